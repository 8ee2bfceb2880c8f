//! The log of a rank other than rank 0: the rank's device, and how its run started.

use nibble_command::device::{Device, On};
use nibble_core::visible;
use nibble_train::metrics::Metrics;
use nibble_train::trainer::{Observer, RANKS_DIR, Start};
use std::fs::{File, create_dir_all};
use std::io::Write;
use std::path::Path;

/// The log file of a rank in the run's folder.
pub struct RankLog {
    rank: usize,
    device: String,
    /// The log file, which is opened when the run starts.
    log: Option<File>,
}

impl RankLog {
    pub fn new<B: Device>(on: &On<'_, B>) -> Self {
        Self { rank: on.mesh.all.rank(), device: on.describe(), log: None }
    }

    /// Writes a line. Errors are ignored, because a run must not fail because of its log.
    fn say(&mut self, text: &str) {
        if let Some(log) = &mut self.log {
            let _ = log.write_all(visible(format_args!("{text}\n")).as_bytes());
        }
    }
}

impl Observer for RankLog {
    fn start(&mut self, start: &Start<'_>) {
        let dir = Path::new(&start.config.run.dir).join(RANKS_DIR);
        let path = dir.join(format!("rank-{:05}.log", self.rank));
        let opened = create_dir_all(&dir).and_then(|()| File::options().create(true).append(true).open(path));
        self.log = opened.ok();
        let line = format!(
            "rank {}: process {}, after step {}, on {}",
            self.rank,
            std::process::id(),
            start.step,
            self.device
        );
        self.say(&line);
    }

    fn note(&mut self, text: &str) {
        self.say(text);
    }

    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, _: &Metrics) {}
    fn evaluation(&mut self, _: u64, _: Option<f64>) {}
    fn checkpoint(&mut self, _: &Path) {}
}
