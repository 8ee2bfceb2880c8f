//! What each rank's steps took, and how long it waited in them for others.

use crate::rig;

use nibble_core::{Comm, MeshShape};
use nibble_cpu::Cpu;
use nibble_train::metrics::{read_metrics, read_rank_times};
use nibble_train::trainer::{METRICS_FILE, Options, RANKS_FILE, run};
use rig::{Hook, Hooked, on_axes, small};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A rank that has waited this much longer each time it is asked.
#[derive(Debug)]
struct Waits {
    each: Duration,
    asked: AtomicU64,
}

impl Hook for Waits {
    fn waited(&self) -> Option<Duration> {
        Some(self.each * self.asked.fetch_add(1, Ordering::Relaxed) as u32)
    }
}

/// A run of some steps, in which the rank of number n waits n + 1 milliseconds in each.
fn run_of(dir: &Path, mesh: MeshShape, steps: u64, resume: bool) {
    let (dir, steps) = (format!("run.dir={}", dir.display()), format!("train.steps={steps}"));
    let ranks = format!("run.ranks={}", mesh.ranks());
    let config = small("bf16", &[&dir, &steps, &ranks, "train.warmup_steps=1", "checkpoint.every=3"]);
    on_axes(mesh, |axes| {
        let each = Duration::from_millis(1 + Comm::<Cpu>::rank(&axes.all) as u64);
        let axes = Hooked::axes(axes, |_| Waits { each, asked: AtomicU64::new(0) });
        let options = Options { resume, ..Options::default() };
        run(&Cpu::new(1).unwrap(), axes.mesh(), &config, options, &mut rig::Silent).unwrap();
    });
}

#[test]
fn a_step_tells_what_the_one_before_it_took_each_rank() {
    let dir = tempfile::tempdir().unwrap();
    let four = MeshShape { dp: 1, ep: 4 };
    run_of(dir.path(), four, 6, false);
    run_of(dir.path(), four, 9, true);
    let lines = read_rank_times(&dir.path().join(RANKS_FILE)).unwrap().metrics;
    // No step follows the last one of a process.
    let steps: Vec<u64> = lines.iter().map(|line| line.step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 7, 8]);
    for line in &lines {
        let micros: Vec<f64> = line.waiting.iter().map(|seconds| (1e6 * seconds).round()).collect();
        assert_eq!(micros, [1e3, 2e3, 3e3, 4e3], "{line:?}");
        assert!(line.seconds.len() == 4 && line.seconds.iter().all(|seconds| *seconds > 0.0), "{line:?}");
    }
    let metrics = read_metrics(&dir.path().join(METRICS_FILE)).unwrap().metrics;
    let of_steps: Vec<_> = metrics.iter().filter(|metrics| metrics.loss.is_some()).collect();
    assert_eq!(of_steps.len(), 9);
    for metrics in of_steps {
        // The line of a step has what the one before it took.
        let before = lines.iter().find(|line| line.step + 1 == metrics.step);
        let summary: BTreeMap<String, f64> =
            before.map(|line| line.summary().into_iter().collect()).unwrap_or_default();
        assert!(metrics.other.keys().eq(summary.keys()), "{metrics:?}");
        // A number read from a file may have another last digit.
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-9;
        assert!(metrics.other.values().zip(summary.values()).all(near), "{metrics:?}, {summary:?}");
    }
}

#[test]
fn one_rank_alone_keeps_nobody_waiting() {
    let dir = tempfile::tempdir().unwrap();
    run_of(dir.path(), MeshShape::ONE, 2, false);
    assert!(!dir.path().join(RANKS_FILE).exists());
    let metrics = read_metrics(&dir.path().join(METRICS_FILE)).unwrap().metrics;
    assert!(metrics.iter().all(|metrics| metrics.other.is_empty()));
}
