//! A run that is asked to stop, on any rank: all ranks end after the same step, whose checkpoint is written once.

mod rig;

use nibble_core::MeshShape;
use nibble_cpu::Cpu;
use nibble_train::metrics::Metrics;
use nibble_train::trainer::{Observer, Options, Start, Summary, run};
use rig::{FOUR_PARTS, FOUR_RANKS, few_held_out, on_mesh, small};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

static NOBODY: AtomicUsize = AtomicUsize::new(0);
static ALWAYS: AtomicUsize = AtomicUsize::new(1);

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
            stop.store(1, Ordering::Relaxed);
        }
    }
    fn evaluation(&mut self, step: u64, _: f64) {
        self.evaluations.push(step);
    }
    fn checkpoint(&mut self, path: &Path) {
        self.checkpoints.push(path.to_owned());
    }
}

/// A run on a mesh one of whose ranks is asked: after how many steps it ended. Every step of them was told, and that one is in a checkpoint.
fn steps_until_stopped(
    mesh: MeshShape,
    changes: &[&str],
    (asked, stop): (usize, &'static AtomicUsize),
    at: Option<u64>,
) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let [source, held_out] = few_held_out(dir.path());
    let run_dir = format!("run.dir={}", dir.path().join("run").display());
    let config = small("bf16", &[&[FOUR_PARTS, &*source, &*held_out, &*run_dir], changes].concat());
    let ranks = on_mesh(mesh, |mesh| {
        let stop = if mesh.all.rank() == asked { stop } else { &NOBODY };
        let at = at.map(|at| (at, stop));
        let mut told = Asking { at, steps: Vec::new(), evaluations: Vec::new(), checkpoints: Vec::new() };
        let options = Options { stop: Some(stop), ..Options::default() };
        (run(&Cpu::new(1).unwrap(), mesh, &config, options, &mut told).unwrap(), told)
    });
    let (summary, told) = ranks.into_iter().next().unwrap();
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
            let of = |changes: &[&str]| steps_until_stopped(mesh, changes, (asked, &ALWAYS), None);
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
            let ended = steps_until_stopped(mesh, &changes, (mesh.ranks() - 1, &ALWAYS), None);
            assert_eq!(ended, if mesh.ranks() == 1 { 1 } else { steps }, "mesh {mesh}");
        }
    }
}

/// While the second step is under way the record of the first is told; the third takes along what the rank is asked then.
#[test]
fn asked_beside_a_step_a_run_ends_after_the_next_or_the_one_after() {
    for mesh in FOUR_RANKS {
        // One for each run: what is asked stays asked.
        let stop: &'static AtomicUsize = Box::leak(Box::default());
        let ended = steps_until_stopped(mesh, &["checkpoint.every=10"], (0, stop), Some(1));
        assert_eq!(ended, if mesh.ranks() == 1 { 3 } else { 4 }, "mesh {mesh}");
    }
}
