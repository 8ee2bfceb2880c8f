//! A value that becomes NaN anywhere in a step never reaches a weight: the step is refused, on every rank alike, and nothing
//! has changed; or nobody used the value.
//!
//! Faults are made after every operation up to the verdict. What follows it, the optimizer, is told by the verdict alone.

use crate::rig;

use nibble_core::{Comm, Error as CoreError};
use nibble_cpu::{Cpu, HostComm};
use nibble_testkit::recorder::Point;
use nibble_testkit::{Breadth, Recorder};
use nibble_train::checkpoint::{Checkpoint, Store};
use nibble_train::config::Config;
use nibble_train::trainer::Trainer;
use nibble_train::{Error, metrics::Metrics};
use rig::{SOLO, small, state};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::OnceLock;

type Backend = Recorder<Cpu>;
type State = Vec<(String, Vec<u32>)>;

/// One decoder layer, each rank with two shards of 128 tokens: a step of a few milliseconds.
fn tiny(recipe: &str, ranks: usize, changes: &[&str]) -> Config {
    let (batch, shards) = (format!("train.batch_size={}", 2 * ranks), format!("train.shards={}", 2 * ranks));
    let ranks = format!("run.ranks={ranks}");
    small(recipe, &[&["model.layers=1", &batch, &shards, &ranks], changes].concat())
}

/// What is the same of two steps that did the same.
fn told(metrics: &Metrics) -> (u64, Option<u64>, Option<u64>) {
    (metrics.step, metrics.loss.map(f64::to_bits), metrics.grad_norm.map(f64::to_bits))
}

/// A step as the checkpoint's run has it, without faults: what it and the one after tell, and where they end.
#[derive(Debug, PartialEq)]
struct Clean {
    told: [(u64, Option<u64>, Option<u64>); 2],
    state: State,
}

/// What became of a fault on one rank.
#[derive(Debug, Clone, PartialEq)]
enum Became {
    /// Both steps told what they do without it, and weights and moments are the same.
    Unused,
    /// The step and the one after it were refused with this error.
    Refused(String),
}

/// One rank of a run with a checkpoint to go back to.
struct Rank<'a> {
    b: &'a Backend,
    trainer: Trainer<'a, Backend>,
    checkpoint: Checkpoint,
    before: State,
    clean: Clean,
    /// Operations of a step until the verdict, in order.
    ops: Vec<&'static str>,
}

impl<'a> Rank<'a> {
    /// Trains one step, writes a checkpoint (rank 0) and does the next two steps without faults.
    fn new(b: &'a Backend, comm: &'a dyn Comm<Backend>, config: &Config, dir: &Path) -> Self {
        let mut trainer = Trainer::new(b, comm, config).unwrap();
        trainer.train_step().unwrap();
        let store = (comm.rank() == 0).then(|| Store::open(dir).unwrap());
        trainer.save(store.as_ref()).unwrap();
        comm.barrier().unwrap();
        let checkpoint = Checkpoint::open(&dir.join("checkpoints/step-00000001")).unwrap();
        let before = state(b, &mut trainer);
        b.watch();
        let mut step = || told(&trainer.train_step().unwrap());
        let first = step();
        let log = b.take_log();
        let ops = log.iter().filter(|event| !event.is_transfer()).map(|event| event.op);
        let ops = ops.take_while(|op| *op != "end_step").collect();
        let clean = Clean { told: [first, step()], state: state(b, &mut trainer) };
        Self { b, trainer, checkpoint, before, clean, ops }
    }

    /// Goes back to the checkpoint, which is whole, and does two steps, the first with a fault if this rank is to have it.
    fn with_fault(&mut self, fault: Option<Point>) -> Became {
        let b = self.b;
        let Self { trainer, checkpoint, before, clean, .. } = self;
        trainer.load(checkpoint).unwrap();
        assert!(state(b, trainer) == *before, "{fault:?}: what was loaded");
        if let Some(point) = fault {
            b.poison(point);
        }
        let first = trainer.train_step();
        if let Some(point) = fault {
            assert!(b.struck().is_some(), "{point:?} was not reached");
        }
        match first {
            Ok(metrics) => {
                let second = trainer.train_step().unwrap_or_else(|e| panic!("{fault:?}: one step late: {e}"));
                let with = Clean { told: [told(&metrics), told(&second)], state: state(b, trainer) };
                assert!(with == *clean, "{fault:?} changed the run and was not refused");
                Became::Unused
            }
            Err(error) => {
                assert_names_what_is_not_finite(&error);
                assert!(state(b, trainer) == *before, "{fault:?} was refused and has changed a weight");
                let again = trainer.train_step().expect_err("the verdict is sticky");
                assert!(matches!(again, Error::Core(CoreError::NonFinite { .. })), "{again}");
                assert!(state(b, trainer) == *before, "{fault:?}: the step after has changed a weight");
                Became::Refused(error.to_string())
            }
        }
    }
}

#[track_caller]
fn assert_names_what_is_not_finite(error: &Error) {
    let Error::Core(CoreError::NonFinite { site, layer, step }) = error else { panic!("{error}") };
    assert!(!site.is_empty() && !layer.is_empty() && *step == 1, "{error}");
}

/// The first and the last operation of every name, and every `stride`-th.
fn some_of(ops: &[&'static str], stride: usize) -> Vec<usize> {
    let mut first_and_last = BTreeMap::new();
    for (i, op) in ops.iter().enumerate() {
        first_and_last.entry(op).or_insert([i, i])[1] = i;
    }
    let chosen: BTreeSet<usize> =
        first_and_last.into_values().flatten().chain((0..ops.len()).step_by(stride)).collect();
    chosen.into_iter().collect()
}

/// Faults on one rank; the names of operations whose faults were refused.
fn alone(b: &Backend, recipe: &str, changes: &[&str], stride: usize) -> BTreeSet<&'static str> {
    let dir = tempfile::tempdir().unwrap();
    let mut rank = Rank::new(b, &SOLO, &tiny(recipe, 1, changes), dir.path());
    assert!(rank.ops.len() > 50, "{recipe}: {:?}", rank.ops);
    let mut refused = BTreeSet::new();
    for k in some_of(&rank.ops.clone(), stride) {
        if let Became::Refused(_) = rank.with_fault(Some(Point::Op(k))) {
            refused.insert(rank.ops[k]);
        }
    }
    assert_eq!(rank.with_fault(None), Became::Unused, "{recipe}: without a fault");
    refused
}

/// Operations whose faults must have been seen: a NaN that nobody ever refuses would be no test.
#[track_caller]
fn assert_most_are_refused(refused: &BTreeSet<&str>, recipe: &str) {
    for op in ["embed", "rms_norm", "gemm", "attention", "head_loss", "grouped_wgrad", "swiglu"] {
        assert!(refused.contains(op), "{recipe}: no fault after {op} was refused, only {refused:?}");
    }
}

#[test]
fn a_nan_after_any_operation_changes_nothing() {
    // Of each operation of a step, or daily of some of each name ([`some_of`]).
    let stride = Breadth::of_tests().either(1, 20);
    for recipe in rig::some_recipes(0) {
        let refused = alone(&Recorder::eager(Cpu::new(2).unwrap()), recipe, &[], stride);
        assert_most_are_refused(&refused, recipe);
    }
}

/// Histories go on from what they were, as weights do.
#[test]
fn a_nan_under_scales_of_earlier_steps_changes_nothing() {
    let recipe = "fp8-delayed";
    let refused = alone(&Recorder::eager(Cpu::new(2).unwrap()), recipe, &[], 3);
    assert_most_are_refused(&refused, recipe);
    assert!(refused.contains("quantize"), "{refused:?}");
}

#[test]
fn a_nan_in_a_replay_changes_nothing() {
    let stride = Breadth::of_tests().either(5, 20);
    for recipe in rig::some_recipes(1) {
        let refused = alone(&Recorder::new(Cpu::new(2).unwrap()), recipe, &[], stride);
        assert_most_are_refused(&refused, recipe);
    }
}

/// What is made again is not counted, and yet nothing bad of it gets by.
const AGAIN: [&str; 3] = [
    "train.recompute=['attention', 'experts']",
    "train.recompute=['layers']",
    "train.recompute=['expert_input']",
];

#[test]
fn a_nan_in_what_is_made_again_changes_nothing() {
    for (i, recipe) in ["bf16", "mxfp4-hopper"].into_iter().enumerate() {
        // Daily two under one recipe and one under the other.
        let daily = |at: &usize| Breadth::of_tests().either(true, at % 2 == i);
        for changes in (0..AGAIN.len()).filter(daily).map(|at| AGAIN[at]) {
            let refused = alone(&Recorder::eager(Cpu::new(2).unwrap()), recipe, &[changes], 5);
            assert_most_are_refused(&refused, recipe);
        }
    }
}

/// Faults on one of several ranks, and what became of each.
fn on_ranks(config: &Config, world: usize, poisoned: usize, stride: usize) -> Vec<(&'static str, Became)> {
    let dir = tempfile::tempdir().unwrap();
    // Of the poisoned rank: one that keeps no row of a weight does not quantize it.
    let ops = OnceLock::new();
    let outcomes: Vec<Vec<(&'static str, Became)>> = std::thread::scope(|scope| {
        let (dir, ops) = (dir.path(), &ops);
        let spawn = |comm: HostComm| {
            scope.spawn(move || {
                let b = Recorder::eager(Cpu::new(1).unwrap());
                let mine = Comm::<Backend>::rank(&comm) == poisoned;
                let mut rank = Rank::new(&b, &comm, config, dir);
                if mine {
                    ops.set(rank.ops.clone()).unwrap();
                }
                Comm::<Backend>::barrier(&comm).unwrap();
                let ops = ops.get().unwrap();
                let fault = |k: usize| (ops[k], rank.with_fault(mine.then_some(Point::Op(k))));
                some_of(ops, stride).into_iter().map(fault).collect()
            })
        };
        let threads: Vec<_> = HostComm::world(world).into_iter().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (rank, other) in outcomes.iter().enumerate() {
        assert_eq!(other, &outcomes[0], "{}: rank {rank} of {world}, against rank 0", config.recipe);
    }
    outcomes.into_iter().next().unwrap()
}

#[test]
fn a_nan_on_one_rank_stops_all_of_them_alike() {
    // With gradients in BF16 a rank rounds them for itself after the ranks have met.
    let bf16_gradients = "train.grad_dtype=bf16";
    let cases: [(_, &[&str], _, _, _); 4] = [
        ("mxfp4-hopper", &[], 4, 2, 4),
        ("mxfp4-hopper", &[AGAIN[1]], 2, 0, 3),
        ("fp8-block", &[bf16_gradients], 2, 1, 1),
        ("bf16", &[], 2, 0, 2),
    ];
    for (recipe, changes, world, poisoned, stride) in cases {
        let stride = Breadth::of_tests().either(stride, 20);
        let refused = on_ranks(&tiny(recipe, world, changes), world, poisoned, stride)
            .into_iter()
            .filter_map(|(op, became)| matches!(became, Became::Refused(_)).then_some(op))
            .collect();
        assert_most_are_refused(&refused, recipe);
    }
}
