//! A run that is asked to stop, on any rank: all ranks end after the same step, whose checkpoint is written once.

use crate::rig;

use nibble_core::{Comm, MeshShape, Result};
use nibble_cpu::Cpu;
use nibble_train::metrics::Metrics;
use nibble_train::trainer::{Observer, Options, Outcome, Start, Summary, run};
use rig::{Call, FOUR_PARTS, FOUR_RANKS, Hook, Hooked, few_held_out, on_axes, small};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a rank is asked by.
const SIGNAL: usize = 15;

static ALWAYS: AtomicUsize = AtomicUsize::new(SIGNAL);

/// Asks its rank to stop once the record of a step is told, and notes what is told.
struct Asking {
    at: Option<(u64, &'static AtomicUsize)>,
    steps: Vec<u64>,
    evaluations: Vec<u64>,
    checkpoints: Vec<PathBuf>,
}

impl Observer for Asking {
    fn start(&mut self, _: &Start<'_>) {}
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, metrics: &Metrics) {
        self.steps.push(metrics.step);
        if let Some((_, stop)) = self.at.filter(|(at, _)| *at == metrics.step) {
            stop.store(SIGNAL, Ordering::Relaxed);
        }
    }
    fn evaluation(&mut self, step: u64, _: Option<f64>) {
        self.evaluations.push(step);
    }
    fn checkpoint(&mut self, path: &Path) {
        self.checkpoints.push(path.to_owned());
    }
}

/// Asks its rank to stop within a step: where weights come together, once `armed` is set.
#[derive(Debug)]
struct Within {
    armed: &'static AtomicUsize,
    stop: &'static AtomicUsize,
}

impl Hook for Within {
    fn before(&self, call: Call) -> Result<()> {
        if call.name == "begin_all_gather_parts" {
            self.stop.fetch_max(self.armed.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Ok(())
    }
}

/// When a rank is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// Before the run.
    Before,
    /// Once this step's record is told, between two steps.
    Told(u64),
    /// While the step is issued that follows.
    IssuedAfter(u64),
}

/// A run on a mesh one of whose ranks is asked, which nobody can ask the others: after how many steps it ended. Every step of them was told,
/// and that one is in a checkpoint.
fn steps_until_stopped(mesh: MeshShape, changes: &[&str], (asked, when): (usize, When)) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let [source, held_out] = few_held_out(dir.path());
    let run_dir = format!("run.dir={}", dir.path().join("run").display());
    let config = small("bf16", &[&[FOUR_PARTS, &*source, &*held_out, &*run_dir], changes].concat());
    let ranks = on_axes(mesh, |axes| {
        // For each run its own: what is asked stays asked.
        let [armed, own]: [&'static AtomicUsize; 2] = [Box::leak(Box::default()), Box::leak(Box::default())];
        let (stop, at) = match when {
            When::Before => (&ALWAYS, None),
            When::Told(step) => (own, Some((step, own))),
            When::IssuedAfter(step) => (own, Some((step, armed))),
        };
        // Nobody arms the others.
        let axes = Hooked::axes(axes, |_| Within { armed, stop });
        let is_asked = axes.all.rank() == asked;
        let at = at.filter(|_| is_asked);
        let mut told = Asking { at, steps: Vec::new(), evaluations: Vec::new(), checkpoints: Vec::new() };
        let options = Options { stop: is_asked.then_some(stop), ..Options::default() };
        (run(&Cpu::new(1).unwrap(), axes.mesh(), &config, options, &mut told).unwrap(), told)
    });
    // Every rank ends by what one was asked by.
    ranks.iter().for_each(|(outcome, _)| assert_eq!(outcome.stopped, SIGNAL as u8, "mesh {mesh}"));
    let (Outcome { summary, .. }, told) = ranks.into_iter().next().unwrap();
    let Summary { steps, valid_loss, .. } = summary.unwrap();
    assert_eq!((valid_loss, &told.evaluations[..]), (None, &[][..]), "mesh {mesh}");
    assert_eq!(told.steps, (1..=steps).collect::<Vec<_>>(), "mesh {mesh}");
    let checkpoint = dir.path().join(format!("run/checkpoints/step-{steps:08}"));
    assert_eq!(told.checkpoints, [checkpoint], "mesh {mesh}");
    steps
}

/// Several ranks learn of it by the record of the step that was issued after it, which they read beside the step after that.
#[test]
fn all_ranks_stop_after_the_same_step() {
    for mesh in FOUR_RANKS {
        let alone = mesh.ranks() == 1;
        for asked in [0, mesh.ranks() - 1] {
            let of = |changes: &[&str]| steps_until_stopped(mesh, changes, (asked, When::Before));
            assert_eq!(of(&["checkpoint.every=10"]), if alone { 1 } else { 2 }, "mesh {mesh}");
            // Where an evaluation or a checkpoint is due the record is read at once. No evaluation follows, and one checkpoint.
            for every in ["eval.every=1", "checkpoint.every=1"] {
                assert_eq!(of(&["checkpoint.every=10", every]), 1, "mesh {mesh}, {every}");
            }
        }
    }
}

/// Then there is no step to leave out: the last evaluation begins, and ends after its first batch.
#[test]
fn asked_in_the_last_step_a_run_leaves_out_the_evaluation() {
    for mesh in FOUR_RANKS {
        for steps in [1, 2] {
            let changes = [&format!("train.steps={steps}"), "train.warmup_steps=1", "checkpoint.every=10"];
            let ended = steps_until_stopped(mesh, &changes, (mesh.ranks() - 1, When::Before));
            assert_eq!(ended, if mesh.ranks() == 1 { 1 } else { steps }, "mesh {mesh}");
        }
    }
}

/// While the second step is under way the record of the first is told; the third takes along what the rank is asked then.
#[test]
fn asked_beside_a_step_a_run_ends_after_the_next_or_the_one_after() {
    for mesh in FOUR_RANKS {
        let ended = steps_until_stopped(mesh, &["checkpoint.every=10"], (0, When::Told(1)));
        assert_eq!(ended, if mesh.ranks() == 1 { 3 } else { 4 }, "mesh {mesh}");
    }
}

/// The third step has its inputs by then, so that the fourth takes it along, whose record is read beside the fifth. One rank alone would end
/// after the third.
#[test]
fn asked_within_a_step_several_ranks_end_two_later() {
    for mesh in FOUR_RANKS.into_iter().filter(|mesh| mesh.ranks() > 1) {
        let ended = steps_until_stopped(mesh, &["checkpoint.every=10"], (0, When::IssuedAfter(1)));
        assert_eq!(ended, 5, "mesh {mesh}");
    }
}
