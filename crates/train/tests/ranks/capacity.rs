//! Exchanges with too little room: the step, or the batch that is evaluated, is done again with more of it, and with the same bits.

use crate::rig;

use nibble_core::{Axes, Backend, Comm, Data, DeviceKind, Error, Kernels, Mesh, MeshShape, Result};
use nibble_cpu::{Cpu, HostComm};
use nibble_train::checks::checked_recipe;
use nibble_train::config::Config;
use nibble_train::metrics::Metrics;
use nibble_train::plan::predict_rank;
use nibble_train::trainer::{Observer, Options, Start, Trainer, run};
use rig::{Call, Hook, Hooked, SOLO, few_held_out, mixed, on_axes, on_mesh, small, state_on};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Meshes that divide experts.
const MESHES: [MeshShape; 4] = [
    MeshShape { dp: 1, ep: 2 },
    MeshShape { dp: 1, ep: 4 },
    MeshShape { dp: 2, ep: 2 },
    MeshShape { dp: 2, ep: 4 },
];

/// What these meshes can divide.
const DIVIDED: [&str; 4] =
    ["model.experts=8", "train.batch_size=8", "train.shards=8", "train.expert_shards=2"];

/// Settings of which each recipe here has one.
const SETTINGS: [&[&str]; 4] = [
    &["train.grad_accum=2"],
    &["train.combine=tree", "model.top_k=3"],
    &["train.recompute=[\"layers\"]", "model.balance=batch"],
    &["train.combine=tree", "train.grad_accum=2", "train.recompute=[\"experts\"]"],
];

/// The small run with room for so many times a rank's share.
fn with_room(recipe: &str, factor: f64, changes: &[&str]) -> Config {
    let changes = [&DIVIDED[..], changes].concat();
    let mut config = if recipe == "fp8-delayed" { mixed(recipe, &changes) } else { small(recipe, &changes) };
    config.run.capacity_factor = factor;
    config
}

/// How tokens are routed in the first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Routers {
    /// As random weights have it.
    Random,
    /// All alike: every token goes to the first experts, and ranks that have none of them are sent nothing.
    Zero,
}

/// What a rank has seen: losses, norms, a held-out loss, all rows of the dense weights and of the experts that are here, and what it was told.
#[derive(Debug, PartialEq)]
struct Seen {
    losses: Vec<f64>,
    norms: Vec<f64>,
    held_out: f64,
    state: BTreeMap<String, Vec<u32>>,
    notes: Vec<String>,
}

/// Trains for three steps, of which two are under way at once, and evaluates.
fn seen(mesh: Mesh<'_, Cpu>, config: &Config, routers: Routers) -> Seen {
    let cpu = Cpu::new(1).unwrap();
    let mut trainer = Trainer::new(&cpu, mesh, config).unwrap();
    if routers == Routers::Zero {
        zero_routers(&cpu, &mut trainer);
    }
    let mut all = Vec::new();
    let settle = |trainer: &mut Trainer<'_, Cpu>| {
        let metrics = trainer.settle().unwrap().unwrap();
        (metrics.step, metrics.loss.unwrap(), metrics.grad_norm.unwrap())
    };
    trainer.issue_step().unwrap();
    trainer.issue_step().unwrap();
    all.push(settle(&mut trainer));
    assert_eq!((trainer.step(), trainer.unread()), (2, 1), "as if nothing had been done again");
    trainer.issue_step().unwrap();
    all.push(settle(&mut trainer));
    all.push(settle(&mut trainer));
    assert_eq!(all.iter().map(|(step, ..)| *step).collect::<Vec<_>>(), [1, 2, 3]);
    let held_out = trainer.evaluate(2).unwrap();
    let notes = trainer.take_notes();
    let state = state_on(&cpu, mesh, &mut trainer).into_iter().collect();
    let (losses, norms) = all.into_iter().map(|(_, loss, norm)| (loss, norm)).unzip();
    Seen { losses, norms, held_out, state, notes }
}

/// That a mesh ends with the bits of one rank, of whose state every rank has its part. Returns what ranks were told.
#[track_caller]
fn assert_same(config: &Config, mesh: MeshShape, routers: Routers) -> Vec<String> {
    let one = seen(Mesh::new(&SOLO), config, routers);
    assert!(one.notes.is_empty(), "{:?}", one.notes);
    let ranks = on_mesh(mesh, |mesh| seen(mesh, config, routers));
    for (rank, on_rank) in ranks.iter().enumerate() {
        let what = format!("{}, mesh {mesh}, rank {rank}", config.recipe);
        assert_eq!((&on_rank.losses, &on_rank.norms), (&one.losses, &one.norms), "{what}");
        assert_eq!(on_rank.held_out, one.held_out, "{what}");
        assert_eq!(on_rank.notes, ranks[0].notes, "{what}");
        let (_, ep_rank) = mesh.place(rank);
        for (name, bits) in &on_rank.state {
            let all = &one.state[name];
            // Weights and two moments, of each of which a rank has all or the part of its experts.
            let (mine, whole) = (bits.len() / 3, all.len() / 3);
            let first = if mine == whole { 0 } else { ep_rank * mine };
            for tensor in 0..3 {
                let want = &all[tensor * whole + first..][..mine];
                assert!(bits[tensor * mine..][..mine] == *want, "{what}: {name}, tensor {tensor}");
            }
        }
    }
    ranks.into_iter().next().map(|rank| rank.notes).unwrap_or_default()
}

#[test]
fn a_step_without_room_is_done_again_with_the_same_bits() {
    for (i, recipe) in ["mxfp4-hopper", "bf16", "fp8-flow", "fp8-delayed"].into_iter().enumerate() {
        let mesh = MESHES[i];
        let config = with_room(recipe, 0.05, SETTINGS[i]);
        let notes = assert_same(&config, mesh, Routers::Random);
        assert!(notes.iter().any(|note| note.contains("step 1 is retried")), "{recipe}: {notes:?}");
        // With room it is done once.
        assert_eq!(assert_same(&with_room(recipe, 100.0, SETTINGS[i]), mesh, Routers::Random), [""; 0]);
    }
}

#[test]
fn a_rank_may_be_sent_everything_and_others_nothing() {
    for (i, mesh) in MESHES.into_iter().enumerate() {
        let config = with_room("mxfp4-hopper", 1.25, SETTINGS[(i + 1) % 4]);
        let notes = assert_same(&config, mesh, Routers::Zero);
        let (all, step) = (format!("sent {}.00 times its share", mesh.ep), "step 1 is retried");
        assert!(notes[0].contains(&all) && notes[0].contains(step), "{notes:?}");
    }
}

#[test]
fn a_held_out_batch_without_room_is_done_again() {
    let dir = tempfile::tempdir().unwrap();
    let held_out = few_held_out(dir.path());
    let config = with_room("mxfp4-hopper", 0.05, &[&held_out[0], &held_out[1]]);
    let evaluated = |mesh: Mesh<'_, Cpu>| {
        let cpu = Cpu::new(1).unwrap();
        let mut trainer = Trainer::new(&cpu, mesh, &config).unwrap();
        let losses = [trainer.evaluate(0).unwrap(), trainer.evaluate(0).unwrap()];
        (losses.map(f64::to_bits), trainer.take_notes())
    };
    let (one, _) = evaluated(Mesh::new(&SOLO));
    for mesh in MESHES {
        for (losses, notes) in on_mesh(mesh, evaluated) {
            assert_eq!(losses, one, "mesh {mesh}");
            assert!(notes.iter().any(|note| note.contains("held-out sequences is retried")), "{notes:?}");
        }
    }
}

/// Activations take no more memory than the room does, whatever routers choose, and less where less is sent.
#[test]
fn memory_is_never_more_than_that_of_the_room() {
    for mesh in MESHES {
        let config = with_room("mxfp4-hopper", 100.0, &[]);
        let recipe = checked_recipe(&config).unwrap();
        let peak = |routers| {
            on_mesh(mesh, |mesh| {
                let cpu = Cpu::new(1).unwrap();
                memory_of(&cpu, mesh, &config, routers)
            })
        };
        let room = |rank| {
            let predicted = predict_rank(DeviceKind::Host, mesh, rank, &config, &recipe).unwrap();
            predicted.memory.activations.peak_bytes
        };
        // Routers of zeros send everything to the first experts.
        let (random, zero) = (peak(Routers::Random), peak(Routers::Zero));
        for (rank, (random, zero)) in random.into_iter().zip(zero).enumerate() {
            let room = room(rank);
            assert!(random < room && zero <= room, "mesh {mesh}, rank {rank}: {random}, {zero} of {room}");
        }
    }
}

fn memory_of(cpu: &Cpu, mesh: Mesh<'_, Cpu>, config: &Config, routers: Routers) -> usize {
    let mut trainer = Trainer::new(cpu, mesh, config).unwrap();
    if routers == Routers::Zero {
        zero_routers(cpu, &mut trainer);
    }
    trainer.train_step().unwrap();
    trainer.memory().activations.peak_bytes
}

fn zero_routers<B: Kernels>(b: &B, trainer: &mut Trainer<'_, B>) {
    for param in trainer.model().params() {
        if let (true, Data::F32(values)) = (param.name.contains(".gate."), &mut param.master.data) {
            b.clear(values).unwrap();
        }
    }
}

/// Keeps what a run is told.
#[derive(Default)]
struct Told {
    notes: Vec<String>,
    steps: Vec<u64>,
    checkpoints: usize,
}

impl Observer for Told {
    fn start(&mut self, _: &Start<'_>) {}
    fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, metrics: &Metrics) {
        self.steps.push(metrics.step);
    }
    fn evaluation(&mut self, _: u64, _: Option<f64>) {}
    fn checkpoint(&mut self, _: &Path) {
        self.checkpoints += 1;
    }
}

/// Steps that are done again beside checkpoints that are under way, and where evaluations and checkpoints are due.
#[test]
fn a_run_with_too_little_room_leaves_the_files_of_one_with_enough() {
    let dir = tempfile::tempdir().unwrap();
    let held_out = few_held_out(dir.path());
    let run_of = |mesh: MeshShape, factor: f64, name: &str| {
        let place = format!("run.dir={}", dir.path().join(name).display());
        let often = ["train.steps=5", "checkpoint.every=2", "eval.every=3", "checkpoint.keep=0"];
        let mut config =
            with_room("mxfp4-hopper", factor, &[&often[..], &[&held_out[0], &held_out[1], &place]].concat());
        config.run.capacity_factor = factor;
        let told = on_mesh(mesh, |mesh| {
            let (cpu, mut told) = (Cpu::new(1).unwrap(), Told::default());
            run(&cpu, mesh, &config, Options::default(), &mut told).unwrap();
            told
        });
        told.into_iter().next().unwrap()
    };
    let enough = run_of(MeshShape::ONE, 100.0, "enough");
    assert!(enough.notes.is_empty(), "{:?}", enough.notes);
    for (i, mesh) in MESHES.into_iter().enumerate() {
        let name = format!("little-{i}");
        let little = run_of(mesh, 0.05, &name);
        assert!(little.notes[0].contains("step 1 is retried"), "{:?}", little.notes);
        assert_eq!((&little.steps, little.checkpoints), (&vec![1, 2, 3, 4, 5], enough.checkpoints));
        for step in ["step-00000002", "step-00000004", "step-00000005"] {
            for file in ["model.safetensors", "optim.safetensors"] {
                let read = |name: &str| {
                    let run = dir.path().join(name).join("checkpoints").join(step);
                    std::fs::read(run.join(file)).unwrap()
                };
                assert!(read(&name) == read("enough"), "mesh {mesh}: {step}/{file}");
            }
        }
    }
}

/// Where routers see no numbers all tokens go to the first experts: that is no lack of room.
#[test]
fn numbers_that_are_none_are_not_taken_for_a_lack_of_room() {
    for mesh in MESHES {
        let config = with_room("bf16", 1.25, &[]);
        let ranks = on_mesh(mesh, |mesh| {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, mesh, &config).unwrap();
            for param in trainer.model().params() {
                let norm = param.name.ends_with("norm.weight");
                if let (true, Data::F32(values)) = (norm, &mut param.master.data) {
                    let nans = vec![f32::NAN; Cpu::len(values)];
                    cpu.write(values, 0, &nans).unwrap();
                }
            }
            (trainer.train_step().unwrap_err(), trainer.take_notes())
        });
        for (error, notes) in ranks {
            assert!(
                matches!(error, nibble_train::Error::Core(Error::NonFinite { .. })),
                "mesh {mesh}: {error}"
            );
            assert!(notes.is_empty(), "mesh {mesh}: {notes:?}");
        }
    }
}

/// Fails the plan of this number.
#[derive(Debug)]
struct Unplugged {
    at: Option<usize>,
    plans: AtomicUsize,
}

impl Hook for Unplugged {
    fn before(&self, call: Call) -> Result<()> {
        if call.name != "counts" || Some(self.plans.fetch_add(1, Ordering::Relaxed)) != self.at {
            return Ok(());
        }
        Err(Error::Comm { call: call.name, rank: 1, why: "the cable is unplugged".into() })
    }
}

/// A rank that fails in the step behind one without room does not do that one again: its error is the one that is told, and nobody waits.
#[test]
fn a_rank_that_fails_behind_a_step_without_room_says_why() {
    for mesh in MESHES {
        let dir = tempfile::tempdir().unwrap();
        let place = format!("run.dir={}", dir.path().display());
        let config = with_room("bf16", 0.05, &["train.steps=6", &place]);
        // As many plans as the first step has.
        let at = config.model.num_routed();
        let errors = on_axes(mesh, |axes: Axes<HostComm>| {
            let fails = Comm::<Cpu>::rank(&axes.all) == 1;
            let hook =
                |axis| Unplugged { at: (fails && axis == "ep").then_some(at), plans: AtomicUsize::new(0) };
            let (axes, cpu) = (Hooked::axes(axes, hook), Cpu::new(1).unwrap());
            let mut told = Told::default();
            let done = run(&cpu, axes.mesh(), &config, Options::default(), &mut told);
            (done.map(drop).unwrap_err().to_string(), told.notes)
        });
        for (error, notes) in errors {
            assert!(error.contains("the cable is unplugged"), "mesh {mesh}: {error}");
            assert!(notes.is_empty(), "mesh {mesh}: {notes:?}");
        }
    }
}
