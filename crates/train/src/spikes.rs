//! Steps whose loss or gradient is abnormal: when a loss counts as a spike, and the file in which a run records its spikes for
//! `nibble replay`.
//!
//! A run's bits are a function of its configuration and seed, so the state before any step can be computed again from an earlier checkpoint.
//! A record therefore holds no weights and no tokens. It holds what the repeated step must agree with, and a hash of the step's batch. While a
//! spike has a record, the newest checkpoint before it is kept (`checkpoint.keep_spikes`).

use crate::error::{Error, Result};
use crate::files::{self, append};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::path::Path;

/// The file in the run's folder that records the loss spikes of a run, one JSON object per line. Lines are only ever appended to this file.
pub const SPIKES_FILE: &str = "spikes.jsonl";

/// Running means of a value, and of the value's distance from its running mean. The mean follows a falling loss with a lag of about twenty
/// steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usual {
    /// Number of values that have been added so far.
    pub samples: u64,
    /// Running mean.
    pub mean: f64,
    /// Running mean of the distance from the running mean.
    pub distance: f64,
}

impl Usual {
    /// Weight of a new value in the running means.
    const WEIGHT: f64 = 0.05;

    /// Number of values after which the running means are reliable enough to judge another value.
    pub const SETTLED: u64 = 50;

    /// Whether enough values have been added to judge another value.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.samples >= Self::SETTLED
    }

    /// Takes the next value.
    pub fn take(&mut self, value: f64) {
        if self.samples == 0 {
            self.mean = value;
        }
        let away = value - self.mean;
        self.distance += Self::WEIGHT * (away.abs() - self.distance);
        self.mean += Self::WEIGHT * away;
        self.samples += 1;
    }

    /// The limit above which a loss is a spike: the running mean plus the larger of 8 mean distances and 0.2 nats.
    #[must_use]
    pub fn limit(&self) -> f64 {
        self.mean + (8.0 * self.distance).max(0.2)
    }
}

/// The record of a step whose loss or gradient is abnormal.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Spike {
    /// Number of the step, counted from 1 as in the metrics file.
    pub step: u64,
    /// The step's loss in nats. Absent if the loss is unknown or not finite.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss: Option<f64>,
    /// What was not finite: the tensor and the layer. Absent for a loss that is only large.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub non_finite: Option<String>,
    /// Norm of the gradient before clipping. Absent if the norm is unknown or not finite.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub grad_norm: Option<f64>,
    /// Running mean of the loss before the step ([`Usual::mean`]). Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub usual_loss: Option<f64>,
    /// The loss above which a loss is a spike ([`Usual::limit`]). Absent until enough values have been added ([`Usual::is_settled`]).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub limit: Option<f64>,
    /// Position of the batch's first sequence in the data, and number of sequences in the batch.
    pub sequences: [u64; 2],
    /// SHA-256 of the batch of all ranks.
    pub batch_sha256: String,
    /// `cpu` or `gpu`; the products of the two devices differ in the last bits.
    pub device: String,
}

impl Spike {
    /// Appends the record to the run's file of spikes. When this function returns, the operating system has received the record. A record
    /// that an earlier process of the run has already written is not added again.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a call of the operating system fails.
    pub fn record(&self, run_dir: &Path) -> Result<()> {
        let (path, bytes) = (run_dir.join(SPIKES_FILE), bytes_of(run_dir)?);
        if records(&bytes).any(|earlier| earlier == *self) {
            return Ok(());
        }
        // A line that was cut short by a kill is ended first.
        let mut line = Vec::from_iter((!bytes.is_empty() && !bytes.ends_with(b"\n")).then_some(b'\n'));
        line.extend(serde_json::to_vec(self).map_err(|e| Error::data(&path, e.to_string()))?);
        line.push(b'\n');
        let opened = File::options().create(true).append(true).open(&path);
        let synced = opened.and_then(|mut file| append(&mut file, &line).and_then(|()| file.sync_data()));
        synced.map_err(Error::io(&path))
    }
}

/// The records of a run, in the order in which they were written. Lines that are not valid records, such as a line that was cut short when
/// a process was killed, are skipped. The list is empty if there is no file.
///
/// # Errors
/// Returns [`Error::Io`] if a call of the operating system fails.
pub fn read_spikes(run_dir: &Path) -> Result<Vec<Spike>> {
    Ok(records(&bytes_of(run_dir)?).collect())
}

/// The bytes of a run's file; none if there is no file.
fn bytes_of(run_dir: &Path) -> Result<Vec<u8>> {
    let path = run_dir.join(SPIKES_FILE);
    match files::read_whole(&path, files::MOST_LOG) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.map_err(Error::io(&path)),
    }
}

fn records(bytes: &[u8]) -> impl Iterator<Item = Spike> {
    bytes.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok())
}

/// Selects the checkpoints from which the newest `spikes` recorded spikes can be repeated: for each spike, the newest checkpoint before the
/// spike. `checkpoints` contains the steps of all checkpoints in rising order.
#[must_use]
pub fn checkpoints_before(recorded: &[Spike], spikes: usize, checkpoints: &[u64]) -> Vec<u64> {
    let mut steps: Vec<u64> = recorded.iter().map(|spike| spike.step).collect();
    steps.sort_unstable();
    steps.dedup();
    let newest = &steps[steps.len().saturating_sub(spikes)..];
    newest.iter().filter_map(|spike| checkpoints.iter().rfind(|step| *step < spike).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spike(step: u64) -> Spike {
        Spike { step, loss: Some(7.0 / 3.0), device: "cpu".into(), ..Spike::default() }
    }

    #[test]
    fn records_stay_as_they_were_and_come_once() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_spikes(dir.path()).unwrap(), []);
        spike(7).record(dir.path()).unwrap();
        // A line that a kill has cut short, which the next record must not continue.
        let path = dir.path().join(SPIKES_FILE);
        append(&mut File::options().append(true).open(&path).unwrap(), b"{\"step\": 9").unwrap();
        spike(3).record(dir.path()).unwrap();
        spike(7).record(dir.path()).unwrap();
        let steps: Vec<u64> = read_spikes(dir.path()).unwrap().iter().map(|spike| spike.step).collect();
        assert_eq!(steps, [7, 3]);
        let other = Spike { loss: Some(2.0), ..spike(7) };
        other.record(dir.path()).unwrap();
        assert_eq!(read_spikes(dir.path()).unwrap().last(), Some(&other));
    }

    #[test]
    fn the_checkpoint_before_each_of_the_newest_spikes_is_kept() {
        let recorded = [spike(205), spike(101), spike(100), spike(205), spike(99)];
        let kept = |spikes| checkpoints_before(&recorded, spikes, &[100, 200, 300]);
        assert_eq!([kept(0), kept(1), kept(2)], [vec![], vec![200], vec![100, 200]]);
        // There is no checkpoint before the other two: they are repeated from the beginning.
        assert_eq!(kept(9), [100, 200]);
    }

    #[test]
    fn a_limit_is_above_what_is_usual() {
        let mut usual = Usual::default();
        (0..200).for_each(|step| usual.take(2.0 + 0.1 * f64::from(step % 2)));
        assert!(usual.is_settled() && usual.limit() > 2.1 + 0.2 && usual.limit() < 2.6, "{usual:?}");
    }
}
