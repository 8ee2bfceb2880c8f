//! Expert and data parallelism with ranks as threads: 1, 2 and 4 ranks give the same bits; what goes over the wire is
//! counted; a rank that fails ends all the others with its error.

use crate::rig;

use nibble_core::formats::{Format, ScaleRule};
use nibble_core::recipe::{LayerKind, Passes};
use nibble_core::{
    Backend as _, Comm, DType, Error, Mesh, Recipe, Result, RowKind, SoloComm, Tensor, Traffic,
};
use nibble_cpu::{Cpu, HostComm};
use nibble_testkit::Breadth;
use nibble_train::config::Config;
use nibble_train::cx::Cx;
use nibble_train::layers::Layer;
use nibble_train::metrics::Metrics;
use nibble_train::model::Feed;
use nibble_train::moe::{Combine, ExchangeBytes, Moe, MoeShape, SlotCounts};
use nibble_train::param::{Param, Writes};
use nibble_train::spec::{ModelSpec, MoeSpec, ParamSpec};
use nibble_train::trainer::{Options, Trainer, run};
use rig::{Call, Hook, Hooked, matrix, rank_cx, small, train};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    for recipe in rig::some_recipes(0) {
        let config = small(recipe, &[]);
        // A whole run, or the first steps: daily, and under a recipe that studies a format.
        let whole = Breadth::of_tests().either(config.train.steps, 8);
        let steps = if Recipe::names().any(|name| name == recipe) { whole } else { 4 };
        let one = train(&config, 1, steps, cpu);
        assert!(one.losses.iter().all(|l| l.is_finite()));
        for world in [2, 4] {
            let many = train(&config, world, steps, cpu);
            one.assert_same(&many, &format!("{recipe}, {world} ranks"));
        }
    }
}

/// Dense layers are on every rank, whole; their gradients meet as those of attention do.
#[test]
fn dense_layers_keep_the_bits_too() {
    for recipe in rig::some_recipes(1) {
        for config in [rig::dense(recipe, &["train.grad_accum=2"]), rig::mixed(recipe, &[])] {
            let one = train(&config, 1, 4, cpu);
            assert!(one.losses.iter().all(|l| l.is_finite()));
            for world in [2, 4] {
                let what = format!("{recipe}, {} dense layers, {world} ranks", config.model.num_dense());
                one.assert_same(&train(&config, world, 4, cpu), &what);
            }
        }
    }
}

#[test]
fn micro_batches_and_an_uneven_choice_of_experts_keep_the_bits() {
    let changes = ["train.grad_accum=2", "model.top_k=3", "model.experts=8", "model.aux_loss_coef=0"];
    let config = small("mxfp4-hopper", &changes);
    let one = train(&config, 1, 4, cpu);
    for world in [2, 4] {
        one.assert_same(&train(&config, world, 4, cpu), &format!("{world} ranks"));
    }
}

/// Everything a step tells, times aside, is of all ranks, and the same for any number of them.
#[test]
fn metrics_do_not_depend_on_the_number_of_ranks() {
    let told = |config: &Config, world: usize| -> Vec<Metrics> {
        let one_rank = |comm: HostComm| {
            let cpu = cpu();
            let mut trainer = Trainer::new(&cpu, &comm, config).unwrap();
            let mut step = || trainer.train_step().unwrap().without_times();
            vec![step(), step()]
        };
        std::thread::scope(|scope| {
            let one_rank = &one_rank;
            let ranks = HostComm::world(world).into_iter().map(|c| scope.spawn(move || one_rank(c)));
            let ranks: Vec<_> = ranks.collect();
            let mut told: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert!(told.iter().all(|other| *other == told[0]), "every rank tells the same");
            told.swap_remove(0)
        })
    };
    for recipe in rig::some_recipes(2) {
        let config = small(recipe, &["train.grad_accum=2", "model.layers=3"]);
        let one = told(&config, 1);
        let of = Recipe::builtin(recipe).unwrap();
        let layers = ModelSpec::new(&config.model).recipe_layers();
        let experts = layers.iter().find(|layer| layer.kind == LayerKind::Expert).unwrap();
        let changes = of.plan(experts, 0.0, Passes::TRAINING).changes();
        let transcodes = changes.iter().any(|change| change.op == "transcode");
        assert_eq!(one[0].shift_inexact_fraction.is_some(), transcodes, "{recipe}");
        for world in [2, 4] {
            assert_eq!(told(&config, world), one, "{recipe}, {world} ranks");
        }
    }
}

/// Gradients and moments in BF16 are rounded after shards and ranks have met, or shard by shard: in neither case does it matter who
/// has which shard.
#[test]
fn gradients_and_moments_in_bf16_keep_the_bits_too() {
    let types = ["train.grad_dtype=bf16", "train.moment_dtype=bf16"];
    for more in [&[][..], &["train.grad_accum=2"], &["model.tie_embeddings=false", "train.shards=4"]] {
        let config = small("fp8-flow", &[&types[..], more].concat());
        let one = train(&config, 1, 4, cpu);
        assert!(one.losses[3] < one.losses[0], "{:?}", one.losses);
        for world in [2, 4] {
            one.assert_same(&train(&config, world, 4, cpu), &format!("{more:?}, {world} ranks"));
        }
    }
    // The first step moves every weight by the learning rate, whatever its gradient.
    let bits = |changes: &[&str]| train(&small("bf16", changes), 1, 4, cpu).losses[3].to_bits();
    assert_ne!(bits(&[]), bits(&types[..1]), "rounded gradients are not the others");
}

/// What one call of `begin_all_to_all_v` sent.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Leg {
    row_bytes: usize,
    rows: usize,
}

/// What a communicator does beside passing everything on.
#[derive(Debug)]
enum Also {
    /// Nothing.
    Notes,
    /// Fails the exchange of this number.
    FailAt(usize, AtomicUsize),
    /// Panics in the exchange of this number.
    PanicAt(usize, AtomicUsize),
}

/// Notes the calls of a rank.
#[derive(Debug)]
struct Notes {
    also: Also,
    /// Every exchange of rows.
    legs: Mutex<Vec<Leg>>,
    /// What threads copy to and from the host, as their shared memory lies there; call by call.
    transport: Mutex<Vec<Traffic>>,
}

type Wrapped = Hooked<Notes>;

fn wrapped(comm: HostComm, also: Also) -> Wrapped {
    Hooked::new(comm, Notes { also, legs: Mutex::default(), transport: Mutex::default() })
}

fn noted(comm: HostComm) -> Wrapped {
    wrapped(comm, Also::Notes)
}

impl Notes {
    fn legs(&self) -> Vec<Leg> {
        self.legs.lock().unwrap().clone()
    }
}

impl Hook for Notes {
    fn before(&self, call: Call) -> Result<()> {
        if call.name != "begin_all_to_all_v" {
            return Ok(());
        }
        let Call { name, bytes, row_bytes } = call;
        self.legs.lock().unwrap().push(Leg { row_bytes, rows: bytes / row_bytes });
        match &self.also {
            Also::FailAt(at, calls) if calls.fetch_add(1, Ordering::Relaxed) == *at => {
                Err(Error::Comm { call: name, rank: 2, why: "the cable is unplugged".into() })
            }
            Also::PanicAt(at, calls) if calls.fetch_add(1, Ordering::Relaxed) == *at => {
                panic!("a planned panic");
            }
            _ => Ok(()),
        }
    }

    fn after(&self, _: Call, copied: Traffic) {
        self.transport.lock().unwrap().push(copied);
    }
}

/// Bytes of one value in each of the four legs of an expert layer: dispatch and combine, forward and backward; and the
/// rows of each, all ranks together.
#[derive(Debug, Clone, Copy)]
struct Wire {
    bytes: [f64; 4],
    rows: [usize; 4],
}

impl Wire {
    fn total(&self) -> f64 {
        self.bytes.iter().zip(&self.rows).map(|(bytes, rows)| bytes * *rows as f64).sum()
    }
}

/// The exchanges of one forward and backward pass of one expert layer on two ranks. Also the number of different
/// (token, rank) pairs that the routing asked for.
fn wire(recipe: &str, d_model: usize, top_k: usize, combine: Combine) -> (Wire, usize) {
    const TOKENS: usize = 128;
    let recipe = Recipe::builtin(recipe).unwrap();
    let shape = MoeShape { d_model, ffn: 32, experts: 4, top_k, normalize: true, aux_coef: 0.0, z_coef: 0.0 };
    let one_rank = |comm: Wrapped| {
        let cpu = cpu();
        let cx = Cx { combine, ..rank_cx(&cpu, &comm, &recipe, 1, TOKENS) };
        let mut moe = Moe::new(&cx, &MoeSpec::new("moe", shape, [0.02; 2])).unwrap();
        moe.prepare(&cx).unwrap();
        let x = matrix(&cpu, &format!("x{}", comm.rank()), (TOKENS, d_model), DType::Bf16);
        let (y, saved) = moe.forward(&cx, x.clone()).unwrap();
        moe.backward(&cx, saved, y).unwrap();
        let expert = moe.router.forward(&cx, &x).unwrap().routing.expert;
        let pairs: usize = expert
            .as_slice()
            .chunks(top_k)
            .map(|e| (0..2).filter(|rank| e.iter().any(|e| e / 2 == *rank)).count())
            .sum();
        // First comes the routing itself, and before the last one the gate weights' gradients: one number a slot.
        let legs = comm.hook.legs();
        ([&legs[1..4], &legs[5..6]].concat(), pairs)
    };
    let ranks: Vec<(Vec<Leg>, usize)> = std::thread::scope(|scope| {
        let one_rank = &one_rank;
        let threads: Vec<_> =
            HostComm::world(2).into_iter().map(|c| scope.spawn(move || one_rank(noted(c)))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let bytes = [0, 1, 2, 3].map(|i| ranks[0].0[i].row_bytes as f64 / d_model as f64);
    let rows = [0, 1, 2, 3].map(|i| ranks.iter().map(|(legs, _)| legs[i].rows).sum());
    (Wire { bytes, rows }, ranks.iter().map(|(_, pairs)| pairs).sum())
}

#[test]
fn dispatch_sends_half_a_byte_a_value_and_the_four_legs_two_thirds_of_bf16() {
    // DeepSeek-V3's width. One expert a token, so that all legs carry the same rows.
    const D: usize = 7168;
    let (bf16, _) = wire("bf16", D, 1, Combine::Slots);
    let (flow, _) = wire("fp8-flow", D, 1, Combine::Slots);
    let (fp4, _) = wire("mxfp4-hopper", D, 1, Combine::Slots);
    assert_eq!(bf16.rows, [256; 4]);
    assert_eq!((bf16.rows, bf16.rows), (flow.rows, fp4.rows));
    assert_eq!(bf16.bytes, [2.0; 4]);
    // 7168 codes and 56 scale bytes, to a multiple of 16: 7232.
    let fp8 = 7232.0 / 7168.0;
    assert_eq!(flow.bytes, [fp8, 2.0, fp8, 2.0]);
    // 3584 bytes of codes and 224 of scales, a multiple of 16.
    assert_eq!(fp4.bytes[0], 17.0 / 32.0, "forward dispatch: 4.25 bits a value");
    assert_eq!(fp4.bytes, [17.0 / 32.0, 2.0, fp8, 2.0]);
    let share = fp4.total() / bf16.total();
    assert!((share - 0.69).abs() < 0.005, "the four legs take {share:.3} of BF16's bytes");
}

#[test]
fn a_token_is_sent_once_to_each_rank_that_needs_it() {
    let slots = 256 * 3;
    for (way, back) in [(Combine::Slots, None), (Combine::Tree, Some(()))] {
        let (wire, pairs) = wire("mxfp4-hopper", 512, 3, way);
        let back = back.map_or(slots, |()| pairs);
        assert_eq!(wire.bytes[0], 17.0 / 32.0, "multiples of 512 need no padding");
        assert_eq!(
            wire.rows,
            [pairs, back, pairs, back],
            "dispatch sends tokens, as the tree does on the way back"
        );
        assert!(pairs < slots, "three of four experts on two ranks: some two are on one");
    }
}

/// The six legs of a layer's exchange, all ranks together, are what a formula makes of the routing.
#[test]
fn every_leg_carries_what_the_routing_asks_for() {
    const TOKENS: usize = 128;
    let row = |format: Format, rule: ScaleRule, cols| RowKind { format, rule, cols };
    let bf16 = "";
    let back = "[expert]\ncombine.fwd = { format = \"mxfp8-e4m3\" }\ncombine.bwd = { format = \"e4m3\", scale = \"amax\" }";
    for (world, d_model, top_k, way, change) in [
        (2, 64, 8, Combine::Slots, bf16),
        (2, 64, 8, Combine::Tree, bf16),
        (4, 96, 3, Combine::Tree, bf16),
        (8, 64, 8, Combine::Slots, bf16),
        (8, 64, 8, Combine::Tree, bf16),
        // Rows that are no multiple of 16 bytes.
        (2, 36, 2, Combine::Slots, bf16),
        (4, 36, 5, Combine::Tree, bf16),
        // Rows that come back in blocks.
        (2, 64, 8, Combine::Slots, back),
        (4, 160, 3, Combine::Slots, back),
    ] {
        let recipe = Recipe::parse("mine", &format!("extends = \"bf16\"\n{change}")).unwrap();
        let shape =
            MoeShape { d_model, ffn: 32, experts: 16, top_k, normalize: true, aux_coef: 0.0, z_coef: 0.0 };
        let one_rank = |comm: Wrapped| {
            let cpu = cpu();
            let cx = Cx { combine: way, ..rank_cx(&cpu, &comm, &recipe, 1, TOKENS) };
            let mut moe = Moe::new(&cx, &MoeSpec::new("moe", shape, [0.02; 2])).unwrap();
            moe.prepare(&cx).unwrap();
            let x = matrix(&cpu, &format!("x{}", comm.rank()), (TOKENS, d_model), DType::Bf16);
            let (y, saved) = moe.forward(&cx, x.clone()).unwrap();
            moe.backward(&cx, saved, y).unwrap();
            let expert = moe.router.forward(&cx, &x).unwrap().routing.expert;
            (comm.hook.legs(), SlotCounts::of(expert.as_slice(), top_k, 16 / world))
        };
        let ranks: Vec<(Vec<Leg>, SlotCounts)> = std::thread::scope(|scope| {
            let one_rank = &one_rank;
            let ranks = HostComm::world(world).into_iter();
            let threads: Vec<_> = ranks.map(|c| scope.spawn(move || one_rank(noted(c)))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let mut counts = SlotCounts { top_k, ..SlotCounts::default() };
        for (_, of_rank) in &ranks {
            counts.tokens += of_rank.tokens;
            counts.slots += of_rank.slots;
        }
        assert_eq!(counts.slots, world * TOKENS * top_k);
        assert!(counts.tokens < counts.slots, "some experts of a token are on one rank");
        let bf16 = row(Format::Bf16, ScaleRule::Amax, d_model);
        let combine = match change.is_empty() {
            true => [bf16; 2],
            false => {
                let mxfp8 = row(Format::Mxfp8E4m3, ScaleRule::Rceil, d_model);
                [mxfp8, row(Format::E4m3, ScaleRule::Amax, d_model)]
            }
        };
        let want = ExchangeBytes::of(counts, way, [bf16; 2], combine);
        let leg = |i: usize| ranks.iter().map(|(legs, _)| legs[i].row_bytes * legs[i].rows).sum::<usize>();
        let case = format!("{world} ranks, top {top_k} of {d_model} columns, {way:?}");
        assert_eq!(want.legs().map(|(_, bytes)| bytes), [0, 1, 2, 3, 4, 5].map(leg), "{case}");
        // By hand, of 16-byte multiples: two bytes a value.
        if !change.is_empty() {
            // Codes; a byte for each 32 of them, or four for each 128; to a multiple of 16.
            let rows: [usize; 2] = if d_model == 64 { [80, 80] } else { [176, 176] };
            assert_eq!([want.combine, want.combine_backward], rows.map(|bytes| bytes * counts.slots));
        } else if d_model % 8 == 0 {
            let back = if way == Combine::Tree { counts.tokens } else { counts.slots };
            assert_eq!(
                want.total(),
                counts.tokens * (4 + 8 * top_k + 4 * d_model) + back * 4 * d_model + 4 * counts.slots
            );
        }
    }
}

#[test]
fn an_expert_layer_copies_nothing_to_or_from_the_host_but_one_table_of_counts() {
    const TOKENS: usize = 128;
    let shape = MoeShape {
        d_model: 64,
        ffn: 32,
        experts: 4,
        top_k: 3,
        normalize: true,
        aux_coef: 0.01,
        z_coef: 0.001,
    };
    let traffic = |recipe: &Recipe, combine: Combine, comm: &dyn Comm<Cpu>| {
        let cpu = cpu();
        let cx = Cx { combine, ..rank_cx(&cpu, comm, recipe, 1, TOKENS) };
        let mut moe = Moe::new(&cx, &MoeSpec::new("moe", shape, [0.02; 2])).unwrap();
        moe.prepare(&cx).unwrap();
        let x = matrix(&cpu, &format!("x{}", comm.rank()), (TOKENS, shape.d_model), recipe.activations);
        let before = cpu.traffic();
        let (y, saved) = moe.forward(&cx, x.clone()).unwrap();
        moe.backward(&cx, saved, y).unwrap();
        cpu.traffic() - before
    };
    let back = "extends = \"bf16\"\n[expert]\ncombine.fwd = { format = \"e4m3\" }\ncombine.bwd = { format = \"mxfp8-e4m3\" }";
    let back = Recipe::parse("rows back in blocks", back).unwrap();
    let shipped = rig::recipes().into_iter().map(|name| Recipe::builtin(name).unwrap());
    for (i, of) in shipped.chain([back]).enumerate() {
        let way = match of.quantized_combine() {
            None => [Combine::Tree, Combine::Slots][i % 2],
            Some(_) => Combine::Slots,
        };
        let (recipe, of) = (&of.name, &of);
        assert_eq!(traffic(of, way, &rig::SOLO), Traffic::default(), "{recipe}, one rank");
        for world in [2, 4] {
            // Tokens and slots from every rank to every rank, read once.
            let bytes = (world * world * 2 * size_of::<i32>()) as u64;
            let counts = Traffic { downloads: 1, download_bytes: bytes, waits: 1, ..Traffic::default() };
            let one_rank = |comm: HostComm| {
                let comm = noted(comm);
                let all = traffic(of, way, &comm);
                let transport = comm.hook.transport.lock().unwrap();
                // Before the passes the router's weight has come together: begun, and waited for.
                let transport = &transport[2..];
                assert_eq!(
                    transport.len(),
                    1 + 2 * 6,
                    "counts; the beginning and the end of records, four legs and gate gradients"
                );
                let own = transport.iter().fold(all, |rest, carried| rest - *carried);
                assert_eq!(own, counts, "{recipe}, {world} ranks");
            };
            std::thread::scope(|scope| {
                let one_rank = &one_rank;
                let threads: Vec<_> =
                    HostComm::world(world).into_iter().map(|c| scope.spawn(move || one_rank(c))).collect();
                threads.into_iter().for_each(|t| t.join().unwrap());
            });
        }
    }
}

/// Runs four ranks, of which the third does `also`, and returns what each rank's run gave; `None` for a panic. Panics
/// if they have not all ended within two minutes.
fn four_ranks(config: &Config, also: fn() -> Also) -> Vec<Option<nibble_train::Result<()>>> {
    let (done, results) = mpsc::channel();
    for (rank, inner) in HostComm::world(4).into_iter().enumerate() {
        let (config, done) = (config.clone(), done.clone());
        std::thread::spawn(move || {
            let also = if rank == 2 { also() } else { Also::Notes };
            let train = move || {
                let comm = wrapped(inner, also);
                run(&cpu(), &comm, &config, Options::default(), &mut rig::Silent).map(|_| ())
            };
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(train)).ok();
            done.send((rank, result)).unwrap();
        });
    }
    let mut all: Vec<Option<nibble_train::Result<()>>> = (0..4).map(|_| None).collect();
    for _ in 0..4 {
        let wait = Duration::from_secs(120);
        let (rank, result) = results.recv_timeout(wait).expect("a rank waits for one that will not come");
        all[rank] = result;
    }
    all
}

fn run_config(dir: &tempfile::TempDir) -> Config {
    let dir = format!("run.dir={}", dir.path().display());
    small("mxfp4-hopper", &["model.layers=1", "run.ranks=4", &dir])
}

#[test]
fn a_rank_that_fails_in_the_middle_of_a_step_ends_the_others_with_its_error() {
    let dir = tempfile::tempdir().unwrap();
    // A step of one layer makes six exchanges; the one before the first step, for the ledger, makes three.
    let results = four_ranks(&run_config(&dir), || Also::FailAt(3 + 2 * 6 + 1, AtomicUsize::new(0)));
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.expect("no rank panicked").expect_err("no rank went on").to_string();
        assert!(error.contains("the cable is unplugged"), "rank {rank}: {error}");
        assert_eq!(error.contains("rank 2 failed"), rank != 2, "rank {rank}: {error}");
    }
    let metrics = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    // Two whole steps were done. The report of the second is believed only if it was read before the failure was known.
    assert!((1..=2).contains(&metrics.lines().count()), "{metrics}");
    assert!(!dir.path().join("checkpoints").join("step-00000020").exists());
}

#[test]
fn a_rank_that_panics_ends_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let results = four_ranks(&run_config(&dir), || Also::PanicAt(9, AtomicUsize::new(0)));
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            None => assert_eq!(rank, 2),
            Some(result) => {
                let error = result.expect_err("no rank went on").to_string();
                assert!(error.contains("rank 2 failed: its thread panicked"), "rank {rank}: {error}");
            }
        }
    }
}

#[test]
fn a_weight_that_is_not_a_number_on_one_rank_stops_every_rank_and_is_named() {
    let config = small("mxfp4-hopper", &[]);
    let one_rank = |comm: HostComm| {
        let cpu = cpu();
        let mut trainer = Trainer::new(&cpu, &comm, &config).unwrap();
        trainer.train_step().unwrap();
        if Comm::<Cpu>::rank(&comm) == 1 {
            let Feed::Experts { moe, .. } = &mut trainer.model().blocks[1].feed else { panic!("no experts") };
            let down = &mut moe.routed.experts.down;
            let mut values = down.master.to_f32_vec(&cpu).unwrap();
            values[5] = f32::NAN;
            let (rows, cols) = down.master.shape();
            down.master = Tensor::from_f32(&cpu, &values, rows, cols).unwrap();
        }
        let error = trainer.train_step().unwrap_err().to_string();
        Comm::<Cpu>::abort(&comm, &error);
        error
    };
    let errors: Vec<String> = std::thread::scope(|scope| {
        let one_rank = &one_rank;
        let threads: Vec<_> =
            HostComm::world(2).into_iter().map(|c| scope.spawn(move || one_rank(c))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(
        errors[1].contains("model.layers.1.mlp.experts") && errors[1].contains("step 1"),
        "{}",
        errors[1]
    );
    // The first rank may have met the NaN itself, in rows that came back, or hears of the second's.
    assert!(errors[0].contains("not finite"), "{}", errors[0]);
}

/// What all ranks hold is added over all of them; experts over those that hold the same, which are none where each rank has its own.
#[test]
fn gradients_meet_along_the_axis_of_what_they_are_of() {
    let recipe = Recipe::builtin("f32").unwrap();
    let specs = MoeSpec::new(
        "moe",
        MoeShape { d_model: 2, ffn: 2, experts: 2, top_k: 1, normalize: true, aux_coef: 0.0, z_coef: 0.0 },
        [0.1; 2],
    );
    let (dense, experts) = (&specs.router.weights()[0], &specs.experts.weights()[1]);
    let sums = |comm: &HostComm, mesh: Mesh<'_, Cpu>, spec: &ParamSpec| {
        let cpu = cpu();
        let cx = Cx { mesh, ..rank_cx(&cpu, comm, &recipe, 1, 2) };
        let mut param = Param::of(&cx, spec).unwrap();
        let (rows, cols) = param.shape();
        let mine = vec![1.0 + Comm::<Cpu>::rank(comm) as f32; rows * cols];
        let write = |grad: &mut Tensor<Cpu>, _| {
            *grad = Tensor::from_f32(&cpu, &mine, rows, cols)?;
            Ok(())
        };
        param.add_gradient(&cx, Writes::Overwrites, write).unwrap();
        param.reduce_gradient(&cx).unwrap();
        let all = param.gathered(&cpu, mesh, param.reduced().unwrap()).unwrap();
        all.to_f32_vec(&cpu).unwrap()
    };
    let one_rank = |comm: HostComm| {
        let mine = 1.0 + Comm::<Cpu>::rank(&comm) as f32;
        let divided = Mesh::new(&comm);
        let replicas = Mesh { all: &comm, ep: &SoloComm, dp: &comm };
        assert_eq!(sums(&comm, divided, dense), [3.0; 4]);
        assert_eq!(sums(&comm, divided, experts), [mine; 4]);
        assert_eq!(sums(&comm, replicas, dense), [3.0; 4]);
        assert_eq!(sums(&comm, replicas, experts), [3.0; 8]);
    };
    std::thread::scope(|scope| {
        let one_rank = &one_rank;
        HostComm::world(2).into_iter().for_each(|comm| {
            scope.spawn(move || one_rank(comm));
        });
    });
}
