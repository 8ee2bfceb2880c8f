//! JSON-lines files with one object per step: complete after every step, truncated on resume.

use std::fs::File;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use super::{LayerMetrics, Metrics, RankTimes};
use crate::error::{Error, Result};
use crate::files::{self, append, write_whole};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A line of a JSON Lines file, with the data of one step.
pub trait StepLine: Clone + Serialize + DeserializeOwned {
    /// Completed steps.
    fn step(&self) -> u64;

    /// Removes numbers that JSON lacks, where they would not read back as absent.
    fn drop_non_finite(&mut self) {}
}

impl StepLine for Metrics {
    fn step(&self) -> u64 {
        self.step
    }

    fn drop_non_finite(&mut self) {
        self.other.retain(|_, value| value.is_finite());
    }
}

impl StepLine for LayerMetrics {
    fn step(&self) -> u64 {
        self.step
    }
}

impl StepLine for RankTimes {
    fn step(&self) -> u64 {
        self.step
    }
}

/// A JSON Lines file with one line per step, open for appending.
#[derive(Debug)]
pub struct StepLog<T> {
    file: File,
    path: PathBuf,
    lines: PhantomData<T>,
}

/// The metrics file of a run.
pub type MetricsLog = StepLog<Metrics>;

/// The contents of a JSON Lines file with one line per step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepFile<T> {
    /// The file's lines, in order.
    pub metrics: Vec<T>,
    /// Numbers, from 1, of lines that cannot be read because the file was changed by hand. These lines are ignored.
    pub unreadable: Vec<usize>,
}

/// Number of unreadable lines that are reported one by one.
const NAMED: usize = 5;

impl<T> StepFile<T> {
    /// Returns messages about the file's invalid lines: one message for each of the first few, and one message with the number of all
    /// others.
    #[must_use]
    pub fn faults(&self, path: &Path, wrong: &str) -> Vec<String> {
        let (named, rest) = self.unreadable.split_at(self.unreadable.len().min(NAMED));
        let mut faults: Vec<String> =
            named.iter().map(|line| format!("{}: line {line} {wrong}", path.display())).collect();
        if !rest.is_empty() {
            faults.push(format!("{}: the same of {} more lines", path.display(), rest.len()));
        }
        faults
    }
}

impl<T: StepLine> StepLog<T> {
    /// Opens the file of a run that has completed `step` steps; if `step` is 0, the file is emptied. Removes the lines of later steps,
    /// because a resumed run writes these lines again, and an incomplete last line that a killed process left. Unreadable lines of earlier
    /// steps stay in the file.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a call of the operating system fails.
    pub fn open(path: &Path, step: u64) -> Result<Self> {
        if let Some(dir) = path.parent() {
            crate::files::make_folder(dir).map_err(Error::io(dir))?;
        }
        // Lines are copied as bytes: reprinting could change the last digit of a number.
        let whole = if step == 0 { Vec::new() } else { whole_lines::<T>(path)? };
        let earlier = |line: &Line<T>| line.metrics.as_ref().is_some_and(|metrics| metrics.step() <= step);
        let end = whole.iter().rposition(earlier).map_or(0, |last| last + 1);
        let kept = whole[..end].iter().filter(|line| earlier(line) || line.metrics.is_none());
        let text: Vec<u8> = kept.flat_map(|line| &line.bytes).copied().collect();
        // A kill here loses no line that is kept.
        write_whole(path, &text).map_err(Error::io(path))?;
        let file = File::options().append(true).open(path).map_err(Error::io(path))?;
        Ok(Self { file, path: path.to_path_buf(), lines: PhantomData })
    }

    /// Appends one line. When this function returns, the operating system has received the line, so the line survives if the process is
    /// killed later.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a call of the operating system fails.
    pub fn write(&mut self, metrics: &T) -> Result<()> {
        let line = encode(metrics, &self.path)?;
        append(&mut self.file, &line).map_err(Error::io(&self.path))
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Reads a metrics file; a missing file counts as empty. An incomplete last line, which a killed process left, is ignored.
///
/// # Errors
/// Returns [`Error::Io`] if a call of the operating system fails.
pub fn read_metrics(path: &Path) -> Result<StepFile<Metrics>> {
    read_lines(path)
}

/// Reads a file of layer metrics, with the rules of [`read_metrics`].
///
/// # Errors
/// Returns [`Error::Io`] if a call of the operating system fails.
pub fn read_layers(path: &Path) -> Result<StepFile<LayerMetrics>> {
    read_lines(path)
}

/// Reads a file of ranks' times, with the rules of [`read_metrics`].
///
/// # Errors
/// Returns [`Error::Io`] if a call of the operating system fails.
pub fn read_rank_times(path: &Path) -> Result<StepFile<RankTimes>> {
    read_lines(path)
}

fn read_lines<T: StepLine>(path: &Path) -> Result<StepFile<T>> {
    let mut file = StepFile { metrics: Vec::new(), unreadable: Vec::new() };
    for (i, line) in whole_lines(path)?.into_iter().enumerate() {
        match line.metrics {
            Some(metrics) => file.metrics.push(metrics),
            None => file.unreadable.push(i + 1),
        }
    }
    Ok(file)
}

/// A line's bytes, and its contents if it can be parsed.
struct Line<T> {
    bytes: Vec<u8>,
    metrics: Option<T>,
}

/// The lines that end with a line feed.
fn whole_lines<T: StepLine>(path: &Path) -> Result<Vec<Line<T>>> {
    let bytes = match files::read_whole(path, files::MOST_LOG) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(path)(e)),
    };
    // Without its line feed a line may have lost digits and still be valid JSON.
    let whole = bytes.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
    Ok(whole.map(|line| Line { bytes: line.to_vec(), metrics: serde_json::from_slice(line).ok() }).collect())
}

/// Encodes one line. Numbers that JSON lacks (NaN, infinities) become null or are omitted, and read back as absent.
fn encode<T: StepLine>(metrics: &T, path: &Path) -> Result<Vec<u8>> {
    let mut metrics = metrics.clone();
    metrics.drop_non_finite();
    let mut line = serde_json::to_vec(&metrics).map_err(|e| Error::data(path, e.to_string()))?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn step(step: u64) -> Metrics {
        Metrics {
            step,
            loss: Some(4.0 / step as f64),
            tps: Some(1000.5),
            other: [("my/metric".to_owned(), 0.25)].into(),
            ..Metrics::default()
        }
    }

    fn log_of(path: &Path, steps: u64) -> Result<()> {
        let mut log = MetricsLog::open(path, 0)?;
        (1..=steps).try_for_each(|s| log.write(&step(s)))
    }

    fn steps_in(path: &Path) -> Result<Vec<u64>> {
        Ok(read_metrics(path)?.metrics.iter().map(|m| m.step).collect())
    }

    #[test]
    fn lines_use_the_known_names_and_come_back() -> Result<()> {
        let dir = tempfile::tempdir().map_err(Error::io(Path::new("tmp")))?;
        let path = dir.path().join("run/metrics.jsonl");
        log_of(&path, 2)?;
        let text = fs::read_to_string(&path).map_err(Error::io(&path))?;
        assert_eq!(
            text.lines().next(),
            Some(
                r#"{"step":1,"loss_metrics/global_avg_loss":4.0,"throughput(tps)":1000.5,"my/metric":0.25}"#
            )
        );
        assert_eq!(read_metrics(&path)?.metrics, [step(1), step(2)]);
        Ok(())
    }

    #[test]
    fn a_resumed_run_cuts_what_it_will_write_again() -> Result<()> {
        let dir = tempfile::tempdir().map_err(Error::io(Path::new("tmp")))?;
        let path = dir.path().join("metrics.jsonl");
        log_of(&path, 5)?;
        let before = fs::read(&path).map_err(Error::io(&path))?;
        MetricsLog::open(&path, 3)?.write(&step(4))?;
        let after = fs::read(&path).map_err(Error::io(&path))?;
        assert!(before.starts_with(&after), "a kept line has changed");
        assert_eq!(steps_in(&path)?, [1, 2, 3, 4]);
        MetricsLog::open(&path, 0)?;
        assert_eq!(steps_in(&path)?, [0; 0]);
        Ok(())
    }

    #[test]
    fn a_line_cut_anywhere_by_a_kill_is_left_out() -> Result<()> {
        let dir = tempfile::tempdir().map_err(Error::io(Path::new("tmp")))?;
        let path = dir.path().join("metrics.jsonl");
        log_of(&path, 3)?;
        let whole = fs::read(&path).map_err(Error::io(&path))?;
        let last = encode(&step(3), &path)?.len();
        for cut in 1..last {
            fs::write(&path, &whole[..whole.len() - cut]).map_err(Error::io(&path))?;
            assert_eq!(steps_in(&path)?, [1, 2], "{cut} bytes missing");
            MetricsLog::open(&path, 2)?.write(&step(3))?;
            assert_eq!(steps_in(&path)?, [1, 2, 3], "{cut} bytes missing");
        }
        Ok(())
    }

    #[test]
    fn a_line_that_is_no_metrics_is_passed_over_and_stays() -> Result<()> {
        let dir = tempfile::tempdir().map_err(Error::io(Path::new("tmp")))?;
        let path = dir.path().join("metrics.jsonl");
        let text = "{\"step\":1}\nnonsense\n{\"step\":2}\n{\"step\":3}\nmore\n";
        fs::write(&path, text).map_err(Error::io(&path))?;
        assert_eq!(read_metrics(&path)?.unreadable, [2, 5]);
        assert_eq!(steps_in(&path)?, [1, 2, 3]);
        MetricsLog::open(&path, 2)?;
        let left = fs::read_to_string(&path).map_err(Error::io(&path))?;
        assert_eq!(left, "{\"step\":1}\nnonsense\n{\"step\":2}\n");
        Ok(())
    }

    #[test]
    fn a_loss_that_is_not_a_number_is_absent_not_fatal() -> Result<()> {
        let dir = tempfile::tempdir().map_err(Error::io(Path::new("tmp")))?;
        let path = dir.path().join("metrics.jsonl");
        let other = [("lost".to_owned(), f64::INFINITY), ("kept".to_owned(), 1.0)].into();
        MetricsLog::open(&path, 0)?.write(&Metrics { loss: Some(f64::NAN), other, ..step(1) })?;
        let read = read_metrics(&path)?.metrics;
        assert_eq!(read[0].loss, None);
        assert_eq!(read[0].other.keys().collect::<Vec<_>>(), ["kept"]);
        Ok(())
    }
}
