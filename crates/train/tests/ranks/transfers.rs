//! What goes between host and device in a step: its inputs in one copy, its record in one copy, one wait. On several ranks besides, for each
//! plan of an exchange, how many rows travel; and what weights cost on their way between ranks.

use crate::rig;

use nibble_core::ops::{Control, squares_chunks};
use nibble_core::{Backend, DeviceKind, Mesh, MeshShape, Traffic};
use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_train::checks::checked_recipe;
use nibble_train::config::Config;
use nibble_train::plan::sent_in_a_step;
use nibble_train::trainer::{Options, Trainer, run};
use rig::{Call, FOUR_PARTS, FOUR_RANKS, Hook, Hooked, SOLO, few_held_out, mixed, on_axes, small};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

/// What goes up with the tokens of a step: scalars, and three words that ranks tell each other.
const WORDS: u64 = Control::FROM_HOST as u64 + 3;

#[test]
fn a_step_is_one_upload_one_download_and_one_wait() {
    for recipe in rig::some_recipes(0) {
        for accum in [1, 2] {
            let config = small(recipe, &[&format!("train.grad_accum={accum}")]);
            let cpu = Cpu::new(2).unwrap();
            let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
            // The first step also makes the buffers of all of them.
            trainer.train_step().unwrap();
            for _ in 0..3 {
                let before = cpu.traffic();
                trainer.train_step().unwrap();
                let went = cpu.traffic() - before;
                let Traffic { upload_bytes, download_bytes, .. } = went;
                let want = Traffic {
                    uploads: 1,
                    upload_bytes,
                    downloads: 1,
                    download_bytes,
                    waits: 1,
                    copies_on_write: 0,
                };
                assert_eq!(went, want, "{recipe}, {accum} micro-batches");
                // Inputs and targets of every token.
                let tokens = config.tokens_per_step();
                assert_eq!(upload_bytes, 4 * (WORDS + 2 * tokens), "{recipe}");
                assert!(download_bytes > 0, "{recipe}");
            }
        }
    }
}

/// The host goes on while a step is under way: issuing waits for nothing.
#[test]
fn issuing_a_step_does_not_wait() {
    let config = small("mxfp4-hopper", &[]);
    let cpu = Cpu::new(2).unwrap();
    let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
    trainer.train_step().unwrap();
    let before = cpu.traffic();
    trainer.issue_step().unwrap();
    trainer.issue_step().unwrap();
    assert_eq!((cpu.traffic() - before).waits, 0);
    trainer.settle().unwrap();
    assert_eq!((cpu.traffic() - before).waits, 1);
}

/// Replayed, it is the same copies, in this order, once each.
#[test]
fn a_replayed_step_copies_the_same() {
    for recipe in rig::some_recipes(1) {
        let b = Recorder::new(Cpu::new(2).unwrap());
        let mut trainer = Trainer::new(&b, &SOLO, &small(recipe, &["train.grad_accum=2"])).unwrap();
        trainer.train_step().unwrap();
        b.watch();
        let before = b.traffic();
        trainer.train_step().unwrap();
        let log = b.take_log();
        let transfers: Vec<_> =
            log.iter().filter(|event| event.is_transfer()).map(|event| event.op).collect();
        assert_eq!(transfers, ["write", "begin_download", "finish_download"], "{recipe}");
        assert_eq!((b.traffic() - before).copies_on_write, 0, "{recipe}");
    }
}

/// Notes what goes between host and device within a rank's collectives: ranks that are threads meet in the host's memory, where those of GPUs
/// meet on the devices.
#[derive(Debug)]
struct Within(Arc<Mutex<Vec<Traffic>>>);

impl Hook for Within {
    fn after(&self, _: Call, copied: Traffic) {
        self.0.lock().unwrap().push(copied);
    }
}

/// A rank with a backend of its own, and what goes between host and device outside of collectives.
struct Rank<'a> {
    cpu: &'a Cpu,
    mesh: Mesh<'a, Cpu>,
    within: &'a Mutex<Vec<Traffic>>,
}

impl Rank<'_> {
    /// So far.
    fn went(&self) -> Traffic {
        self.within.lock().unwrap().iter().fold(self.cpu.traffic(), |went, within| went - *within)
    }
}

/// What every rank of a mesh returns, in order.
fn on_ranks<R: Send>(mesh: MeshShape, work: impl Fn(Rank<'_>) -> R + Sync) -> Vec<R> {
    on_axes(mesh, |axes| {
        let within = Arc::new(Mutex::new(Vec::new()));
        let axes = Hooked::axes(axes, |_| Within(within.clone()));
        work(Rank { cpu: &Cpu::new(1).unwrap(), mesh: axes.mesh(), within: &within })
    })
}

/// Asserts that a rank's steps were each an upload of inputs, a read of counts for each plan among several ranks, and a read of the record.
#[track_caller]
fn assert_steps(went: Traffic, steps: u64, (config, mesh, plans): (&Config, MeshShape, usize), what: &str) {
    // Where no other rank has experts nobody asks how many rows there will be.
    let reads = 1 + if mesh.ep > 1 { plans as u64 } else { 0 };
    let tokens = config.tokens_per_step() / mesh.ranks() as u64;
    let want = Traffic {
        uploads: steps,
        upload_bytes: steps * 4 * (WORDS + 2 * tokens),
        downloads: steps * reads,
        waits: steps * reads,
        copies_on_write: 0,
        download_bytes: went.download_bytes,
    };
    assert_eq!(went, want, "{what}, mesh {mesh}");
}

/// Times that a micro-batch plans the exchange of a layer. What is made again from before the router is planned again, as the plan is not
/// kept; what is made again from behind it is not.
const PLANS: [(&str, usize); 6] = [
    ("[]", 1),
    ("['norms','swiglu']", 1),
    ("['expert_input']", 1),
    ("['attention']", 1),
    ("['experts']", 2),
    ("['layers']", 2),
];

#[test]
fn on_a_mesh_a_step_is_one_upload_the_counts_of_each_plan_and_one_record() {
    for (i, mesh) in FOUR_RANKS.into_iter().enumerate() {
        for (j, (again, plans)) in PLANS.into_iter().enumerate() {
            let accum = 1 + (i + j) % 2;
            let [recompute, micro_batches] =
                [format!("train.recompute={again}"), format!("train.grad_accum={accum}")];
            let changes = [FOUR_PARTS, &recompute, &micro_batches];
            let config = match j % 3 {
                0 => small("mxfp4-hopper", &changes),
                1 => small("bf16", &[&changes[..], &["model.balance=batch"]].concat()),
                _ => mixed("fp8-delayed", &changes),
            };
            let plans = accum * plans * config.model.num_routed();
            on_ranks(mesh, |rank| {
                let mut trainer = Trainer::new(rank.cpu, rank.mesh, &config).unwrap();
                trainer.train_step().unwrap();
                for _ in 0..2 {
                    let before = rank.went();
                    trainer.train_step().unwrap();
                    let went = rank.went() - before;
                    assert_steps(went, 1, (&config, mesh, plans), &format!("{accum} x {again}"));
                }
            });
        }
    }
}

/// However rows come back. 60 values of two bytes are no whole number of 16 bytes.
#[test]
fn sums_up_a_tree_take_no_upload() {
    for (mesh, d_model) in [(1, 2, 64), (1, 2, 60), (1, 4, 60), (2, 2, 64), (2, 2, 60)]
        .map(|(dp, ep, d_model)| (MeshShape { dp, ep }, d_model))
    {
        let width = format!("model.d_model={d_model}");
        let config = small("bf16", &[FOUR_PARTS, "train.combine=tree", "model.top_k=3", &width]);
        on_ranks(mesh, |rank| {
            let mut trainer = Trainer::new(rank.cpu, rank.mesh, &config).unwrap();
            trainer.train_step().unwrap();
            let before = rank.went();
            trainer.train_step().unwrap();
            let went = rank.went() - before;
            assert_steps(went, 1, (&config, mesh, config.model.num_routed()), &format!("{d_model} columns"));
        });
    }
}

/// Where a step is read one later.
#[test]
fn issuing_a_step_on_a_mesh_waits_for_counts_alone() {
    for mesh in FOUR_RANKS {
        let config = small("mxfp4-hopper", &[FOUR_PARTS, "train.grad_accum=2"]);
        let reads = if mesh.ep > 1 { 2 * config.model.num_routed() as u64 } else { 0 };
        on_ranks(mesh, |rank| {
            let mut trainer = Trainer::new(rank.cpu, rank.mesh, &config).unwrap();
            trainer.train_step().unwrap();
            let before = rank.went();
            trainer.issue_step().unwrap();
            trainer.issue_step().unwrap();
            assert_eq!((rank.went() - before).waits, 2 * reads, "mesh {mesh}");
        });
    }
}

/// Runs of five steps and of eight, on ranks that may be asked to stop, differ by three steps and nothing else: a run asks the device nothing
/// for its own sake.
#[test]
fn a_run_adds_nothing_to_its_steps() {
    static STOP: AtomicUsize = AtomicUsize::new(0);
    for mesh in FOUR_RANKS {
        let dir = tempfile::tempdir().unwrap();
        let held_out = few_held_out(dir.path());
        let run_of = |steps: u64| {
            let [steps, run_dir] =
                [format!("train.steps={steps}"), format!("run.dir={}/{steps}", dir.path().display())];
            let changes = [FOUR_PARTS, "train.grad_accum=2", &steps, &run_dir, &held_out[0], &held_out[1]];
            let config = small("bf16", &changes);
            let went = on_ranks(mesh, |rank| {
                let options = Options { stop: Some(&STOP), ..Options::default() };
                run(rank.cpu, rank.mesh, &config, options, &mut rig::Silent).unwrap();
                rank.went()
            });
            (config, went)
        };
        let ((config, long), (_, short)) = (run_of(8), run_of(5));
        for (long, short) in long.into_iter().zip(short) {
            let plans = 2 * config.model.num_routed();
            assert_steps(long - short, 3, (&config, mesh, plans), "three steps of a run");
        }
    }
}

/// Before a step a rank sends codes and scales of its rows, as they stand and transposed, and no value of a quantized weight.
#[test]
fn of_a_quantized_weight_codes_and_scales_travel() {
    let sizes =
        ["model.d_model=256", "model.heads=4", "model.kv_heads=2", "model.head_dim=64", "model.ffn=384"];
    let ranks = 4;
    let sent = |recipe: &str, kind: DeviceKind| {
        let config = rig::dense(recipe, &[&sizes[..], &["run.ranks=4"]].concat());
        let recipe = checked_recipe(&config).unwrap();
        let of_rank = |rank| sent_in_a_step(kind, config.run.mesh(), rank, &config, &recipe).unwrap();
        (0..ranks).map(|rank| of_rank(rank)["all_gather_parts"] as i64).sum::<i64>()
    };
    // Rows and columns of a layer's weights: q, k, v, o, gate and up, down.
    let layer = [(256, 256), (128, 256), (128, 256), (256, 256), (768, 256), (256, 384)];
    let values: i64 = 2 * layer.iter().map(|(n, k)| n * k).sum::<i64>();
    // Of each value: bits of its two codes, and of the shares that it has in two scales.
    for (recipe, codes, scales) in [
        ("hif4", 2 * 4, 2.0 * 32.0 / 64.0),
        ("mxfp8-all", 2 * 8, 2.0 * 8.0 / 32.0),
        ("fp8-block", 2 * 8, 2.0 * 32.0 / (128.0 * 128.0)),
        ("fp8-flow", 2 * 8, 2.0 * 8.0 / (128.0 * 128.0)),
        ("nvfp4", 2 * 4, 2.0 * 8.0 / (16.0 * 16.0)),
        ("fp8-tensor", 2 * 8, 0.0),
    ] {
        // Of a tensor's scale each row has one, and so has each column, transposed.
        let rows: i64 = layer.iter().map(|(n, k)| 2 * (n + k)).sum();
        let tensor_scales = if ["nvfp4", "fp8-tensor"].contains(&recipe) { 32 * rows } else { 0 };
        let bits = (codes * values + tensor_scales) as f64 + scales * values as f64;
        for kind in [DeviceKind::Host, DeviceKind::Gpu] {
            // Everything else is as it is where weights are read in BF16.
            let more = sent(recipe, kind) - sent("bf16", kind);
            let expected = (ranks as i64 - 1) * (bits as i64 / 8 - 2 * values);
            assert_eq!(more, expected, "{recipe}, {kind:?}");
        }
    }
}

/// The head reads what the embedding has of a table that they share.
#[test]
fn a_tied_table_travels_once() {
    let ranks = 4;
    for (recipe, bytes) in [("f32", 4), ("bf16", 2), ("mxfp4-hopper", 2)] {
        let sent = |tied: bool| {
            let tied = format!("model.tie_embeddings={tied}");
            let config = rig::dense(recipe, &["run.ranks=4", &tied]);
            let recipe = checked_recipe(&config).unwrap();
            let of_rank = |rank| {
                let mesh = config.run.mesh();
                sent_in_a_step(DeviceKind::Host, mesh, rank, &config, &recipe).unwrap()["all_gather_parts"]
            };
            let values = config.model.vocab_size * config.model.d_model;
            ((0..ranks).map(of_rank).sum::<u64>(), values as u64)
        };
        let ((tied, values), (untied, _)) = (sent(true), sent(false));
        // A weight of its own has sums for the norm as well.
        let sums = 8 * squares_chunks(values as usize) as u64;
        assert_eq!(untied - tied, (ranks as u64 - 1) * (values * bytes + sums), "{recipe}");
    }
}
