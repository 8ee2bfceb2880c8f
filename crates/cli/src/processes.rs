//! The processes that have worked on a run, with start time and machine: one line per process in a file in the run's directory.

use nibble_train::files::{MOST_TEXT, read_text};
use nibble_train::trainer::PROCESSES_FILE;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

/// A process that has worked on a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Start time of the process, in seconds since 1970.
    pub began: u64,
    /// Number of steps that the run had done when the process started.
    pub step: u64,
    /// The device that the process used.
    pub device: String,
    /// The host's processor.
    pub processor: String,
    /// The version of Nibble.
    pub version: String,
}

impl Process {
    /// Creates a record of this process, which starts now.
    pub fn now(step: u64, device: &str) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let (device, processor) = (device.to_owned(), crate::doctor::processor());
        Self { began: now.as_secs(), step, device, processor, version }
    }

    /// Appends a line about this process to the file in the run's directory.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn note(&self, dir: &Path) -> std::io::Result<()> {
        let Self { began, step, device, processor, version } = self;
        let line = json!({ "began": began, "step": step, "device": device, "processor": processor, "version": version });
        let mut file = std::fs::File::options().create(true).append(true).open(dir.join(PROCESSES_FILE))?;
        file.write_all(format!("{line}\n").as_bytes())
    }

    /// The processes that have worked on the run in this directory, in order. Unreadable lines are skipped. The list is empty for runs of
    /// older versions, which have no such file.
    pub fn of_run(dir: &Path) -> Vec<Self> {
        let text = read_text(&dir.join(PROCESSES_FILE), MOST_TEXT).unwrap_or_default();
        let text_of = |line: &Value, key: &str| Some(line[key].as_str()?.to_owned());
        let one = |line: &str| {
            let line: Value = serde_json::from_str(line).ok()?;
            Some(Self {
                began: line["began"].as_u64()?,
                step: line["step"].as_u64()?,
                device: text_of(&line, "device")?,
                processor: text_of(&line, "processor")?,
                version: text_of(&line, "version")?,
            })
        };
        text.lines().filter_map(one).collect()
    }
}

/// Formats seconds since 1970 as `2026-11-23 22:20 UTC`.
pub fn date(seconds: u64) -> String {
    let (days, minutes) = (seconds / 86_400, seconds / 60 % 1440);
    // Days and months are counted from the first of March, so that a leap day is the last day of its year (Hinnant, 2013).
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = 400 * era + year + next;
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", minutes / 60, minutes % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_799, "2000-02-29 23:59 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_704_067_199, "2023-12-31 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }

    #[test]
    fn processes_are_read_as_they_were_noted_and_other_lines_left_out() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Process::of_run(dir.path()).is_empty());
        let first = Process::now(0, "a CPU");
        let second = Process { step: 4, ..first.clone() };
        first.note(dir.path()).unwrap();
        let path = dir.path().join(PROCESSES_FILE);
        let text = std::fs::read_to_string(&path).unwrap() + "nonsense\n{}\n";
        std::fs::write(&path, text).unwrap();
        second.note(dir.path()).unwrap();
        assert_eq!(Process::of_run(dir.path()), [first, second]);
    }
}
