//! A rank that learns of another's failure after it has read what a collective gave believes nothing of it.

use crate::rig;

use nibble_core::{Axes, Comm, Error, Mesh, MeshShape, Result, Traffic};
use nibble_cpu::Cpu;
use nibble_train::checkpoint::Store;
use nibble_train::metrics::{Metrics, read_metrics};
use nibble_train::trainer::{METRICS_FILE, Observer, Options, Start, Trainer, run};
use rig::{Call, Hook, Hooked, on_axes, small};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const RANKS: MeshShape = MeshShape { dp: 1, ep: 2 };

/// From the call after which `failing` is set on, a rank has failed.
#[derive(Debug, Default)]
struct Failure {
    failing: AtomicBool,
    /// Which collective of all ranks sets it.
    after: Option<&'static str>,
    /// After how many of these calls.
    calls: AtomicUsize,
}

#[derive(Debug)]
struct OnAxis(Arc<Failure>, &'static str);

impl Hook for OnAxis {
    fn after(&self, call: Call, _: Traffic) {
        let Self(failure, axis) = self;
        if *axis == "all"
            && Some(call.name) == failure.after
            && failure.calls.fetch_sub(1, Ordering::Relaxed) == 1
        {
            failure.failing.store(true, Ordering::Relaxed);
        }
    }
    fn check(&self) -> Result<()> {
        match self.0.failing.load(Ordering::Relaxed) {
            true => Err(Error::Comm { call: "check", rank: 0, why: "rank 1 is gone".into() }),
            false => Ok(()),
        }
    }
}

/// What each of two ranks gives, of which the first learns of a failure.
fn on_ranks<R: Send>(
    failure: impl Fn() -> Failure + Sync,
    rank: impl Fn(Mesh<'_, Cpu>, &Failure) -> R + Sync,
) -> Vec<R> {
    on_axes(RANKS, |axes: Axes<_>| {
        let is_first = Comm::<Cpu>::rank(&axes.all) == 0;
        let failure = Arc::new(if is_first { failure() } else { Failure::default() });
        let axes = Hooked::axes(axes, |axis| OnAxis(failure.clone(), axis));
        rank(axes.mesh(), &failure)
    })
}

/// Lets the failure be known once the record of this step is told.
struct Knowing<'a>(u64, &'a Failure);

impl Observer for Knowing<'_> {
    fn start(&mut self, _: &Start<'_>) {}
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, metrics: &Metrics) {
        if metrics.step == self.0 {
            self.1.failing.store(true, Ordering::Relaxed);
        }
    }
    fn evaluation(&mut self, _: u64, _: Option<f64>) {}
    fn checkpoint(&mut self, _: &Path) {}
}

/// The steps of the lines of metrics, and the names of checkpoints, whole or not, that a run with a checkpoint after each step leaves.
fn left(failure: impl Fn() -> Failure + Sync, known_after: u64) -> (Vec<u64>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = format!("run.dir={}", dir.path().join("run").display());
    let config = small("bf16", &[&run_dir, "checkpoint.every=1", "run.ranks=2"]);
    let errors = on_ranks(failure, |mesh, failure| {
        let mut knowing = Knowing(known_after, failure);
        run(&Cpu::new(1).unwrap(), mesh, &config, Options::default(), &mut knowing).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("rank 1 is gone")), "{errors:?}");
    let metrics = read_metrics(&dir.path().join("run").join(METRICS_FILE)).unwrap().metrics;
    let names = std::fs::read_dir(dir.path().join("run/checkpoints")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    (metrics.iter().map(|metrics| metrics.step).collect(), names.filter(|name| name != ".lock").collect())
}

#[test]
fn a_record_that_was_read_too_late_is_neither_written_nor_saved() {
    let of_second = || Failure { after: Some("all_gather_f64"), calls: 2.into(), ..Failure::default() };
    let (lines, checkpoints) = left(of_second, u64::MAX);
    assert_eq!(lines, [1]);
    // That of the first step may be under way, and then ends nowhere.
    assert!(checkpoints.iter().all(|name| name == "step-00000001"), "{checkpoints:?}");
}

#[test]
fn no_checkpoint_begins_after_it() {
    assert_eq!(left(Failure::default, 1), (vec![1], vec![]));
}

#[test]
fn no_checkpoint_gets_its_name_and_no_loss_is_told_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = small("bf16", &[]);
    for (what, after, calls) in [("save", "counts", 3), ("evaluate", "all_gather", 1)] {
        let failure = || Failure { after: Some(after), calls: calls.into(), ..Failure::default() };
        let errors = on_ranks(failure, |mesh, _| {
            let b = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&b, mesh, &config).unwrap();
            let done = match what {
                "save" => {
                    let store = (mesh.all.rank() == 0).then(|| Store::open(dir.path()).unwrap());
                    trainer.save(store.as_ref()).map(drop)
                }
                _ => trainer.evaluate(1).map(drop),
            };
            done.inspect_err(|error| mesh.all.abort(&error.to_string())).err().map(|error| error.to_string())
        });
        let error = errors[0].as_ref().unwrap();
        assert!(error.contains("rank 1 is gone"), "{what}: {error}");
    }
    let names = std::fs::read_dir(dir.path().join("checkpoints")).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [".lock"]);
}
