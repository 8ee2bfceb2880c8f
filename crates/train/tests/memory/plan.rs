//! What is predicted is what a run takes: by the allocator, arena by arena, after steps and an evaluation.

use crate::rig;

use nibble_core::{DeviceKind, MeshShape, Recipe, Room, SoloComm};
use nibble_cpu::Cpu;
use nibble_dry::Dry;
use nibble_testkit::Breadth;
use nibble_train::Error;
use nibble_train::checks::checked_recipe;
use nibble_train::config::Config;
use nibble_train::plan::{
    Prediction, kinds_of_ranks, predict, predict_rank, require_room, require_room_for, sent_in_a_step,
};
use nibble_train::rank::RunMemory;
use nibble_train::recompute::Scope;
use nibble_train::trainer::Trainer;
use rig::TINY_LATENT;

fn config(changes: &[&str]) -> Config {
    Config::load("tiny", &changes.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>()).unwrap()
}

fn prediction(kind: DeviceKind, config: &Config) -> nibble_train::Result<Prediction> {
    predict(kind, config.run.mesh(), config, &checked_recipe(config)?)
}

/// Two steps and an evaluation.
fn measured(trainer: &mut Trainer<'_, Cpu>) -> RunMemory {
    trainer.train_step().unwrap();
    trainer.train_step().unwrap();
    trainer.evaluate(1).unwrap();
    trainer.memory()
}

fn off(got: usize, expected: usize) -> f64 {
    (got as f64 / expected as f64 - 1.0).abs()
}

#[test]
fn every_arena_is_as_large_as_predicted() {
    let cases = [
        &["recipe=bf16"][..],
        &["recipe=f32", "model.tie_embeddings=false", "model.shared_ffn=64"],
        &["recipe=fp8-flow", "train.grad_dtype=bf16", "train.moment_dtype=bf16"],
        &["recipe=fp8-block", "train.shards=4", "train.grad_accum=3"],
        &["recipe=mxfp4-hopper", "train.grad_accum=2", "train.shards=2", "model.layers=3"],
        &["recipe=mxfp4-hopper", "model.tie_embeddings=false", "train.recompute=[\"expert_input\"]"],
        &[
            "recipe=bf16",
            "train.recompute=[\"norms\", \"swiglu\", \"attention\", \"experts\"]",
            "model.shared_ffn=64",
        ],
        &["recipe=mxfp4-hopper", "train.recompute=[\"layers\"]", "train.grad_accum=2"],
        &["recipe=fp8-flow", "train.recompute=[]"],
        &["recipe=bf16", "model.head_dim=48", "model.value_head_dim=16", "train.recompute=[]"],
        &["recipe=mxfp4-hopper-head8"],
        &[
            "recipe=mxfp4-hopper-head8",
            "model.tie_embeddings=false",
            "model.vocab_size=1000",
            "train.grad_dtype=bf16",
        ],
        &["recipe=bf16", "train.shards=8", "data.seq_len=256", "train.grad_dtype=bf16", "train.grad_accum=2"],
        &[
            "recipe=mxfp4-hopper",
            "model.experts=32",
            "model.top_k=4",
            "model.expert_ffn=128",
            "model.heads=8",
        ],
        &["recipe=mxfp4-hopper", "model.layers=3", "model.dense_layers=2", "model.ffn=256"],
        &[DELAYED, "train.grad_accum=2", "train.recompute=[\"experts\"]"],
        &[&["recipe=bf16", "train.recompute=[]"], &TINY_LATENT[..]].concat(),
        &[&["recipe=mxfp4-hopper", "train.recompute=[\"norms\", \"swiglu\", \"mla_up\"]"], &TINY_LATENT[..]]
            .concat(),
        &[&["recipe=fp8-flow"], &TINY_LATENT[..], &["model.q_rank=0"]].concat(),
        &["recipe=mxfp4-hopper", "data.document_mask=true", "train.grad_accum=2"],
    ];
    // Daily every other one.
    for changes in cases.into_iter().step_by(Breadth::of_tests().either(1, 2)) {
        as_predicted(&config(changes), changes);
    }
    // Every scope alone, in all layers and in one, of a model that has them all.
    let layers = ["", "@first:1", "@last:1", "@first:50%"].into_iter().cycle();
    for (scope, layers) in Scope::ALL.into_iter().chain(Scope::ALL).zip(layers) {
        let setting = format!("train.recompute=[\"{}{layers}\"]", scope.name());
        for recipe in ["recipe=bf16", "recipe=mxfp4-hopper", "recipe=fp8-block"] {
            let model = ["model.layers=3", "model.dense_layers=1", "model.ffn=96", "model.shared_ffn=64"];
            let changes = [&[recipe, &setting], &model[..], &TINY_LATENT].concat();
            let config = Config::load("tiny", &changes.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>());
            // Of the first layer alone there are no experts, and of the last no MLP.
            if let Ok(config) = config {
                as_predicted(&config, &changes);
            }
        }
    }
    for model in rig::choices() {
        let changes = [&["recipe=bf16"], &model[..]].concat();
        as_predicted(&config(&changes), &changes);
    }
}

/// Histories of 1024 steps.
const DELAYED: &str = "recipe=fp8-delayed";

#[test]
fn the_arenas_of_a_dense_model_too() {
    for changes in [
        &[DELAYED][..],
        &["recipe=bf16"],
        &["recipe=f32", "model.qk_norm=true", "train.grad_accum=2"],
        &["recipe=bf16", "model.qkv_bias=true", "train.grad_dtype=bf16"],
        &["recipe=mxfp4-hopper", "model.tie_embeddings=false", "train.grad_dtype=bf16", "train.shards=1"],
        &["recipe=fp8-flow", "train.recompute=[\"attention\"]"],
        &["recipe=mxfp4-hopper", "train.recompute=[\"layers\"]"],
        &["recipe=bf16", "model.activation=gelu", "model.mlp_bias=true", "model.norm=layer"],
        &["recipe=mxfp4-hopper", "model.activation=gelu", "model.norm=layer", "train.recompute=[\"layers\"]"],
    ] {
        as_predicted(
            &Config::load("tiny-dense", &changes.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>())
                .unwrap(),
            changes,
        );
    }
}

/// Lines that end inside a block, a scale a column for each shard and group, and a head that is decoded first.
#[test]
fn short_blocks_and_formats_of_the_general_path_too() {
    let head = concat!(env!("CARGO_TARGET_TMPDIR"), "/plan-head.toml");
    let site = "{ format = \"mxfp8-e4m3\" }";
    let products =
        ["fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x"].map(|key| format!("{key} = {site}"));
    let recipe = format!("description = \"\"\nextends = \"mxfp4-hopper\"\n[head]\n{}\n", products.join("\n"));
    std::fs::write(head, recipe).unwrap();
    let (head, rows) = (format!("recipe={head}"), "recipe=fp8-row");
    for changes in [
        &["recipe=mxfp4-hopper", "model.d_model=80", "model.expert_ffn=37", "model.head_dim=20"][..],
        &["recipe=mxfp4-hopper", "model.d_model=112", "train.recompute=[\"expert_input\"]"],
        &[rows],
        &["recipe=mxfp4-hopper", "train.combine=tree"],
        &[rows, "model.d_model=80", "model.expert_ffn=75"],
        &[&head],
    ] {
        as_predicted(&config(changes), changes);
        prediction(DeviceKind::Gpu, &config(changes)).unwrap();
    }
}

#[track_caller]
fn as_predicted(config: &Config, changes: &[&str]) {
    {
        let cpu = Cpu::new(1).unwrap();
        let mut trainer = Trainer::new(&cpu, &SoloComm, config).unwrap();
        let there = measured(&mut trainer);
        let predicted = prediction(DeviceKind::Host, config).unwrap();
        for ((name, there), (_, predicted)) in there.arenas().into_iter().zip(predicted.memory.arenas()) {
            println!("{changes:?} {name}: {predicted:?} predicted, {there:?} there");
            let (live, all) = (
                off(predicted.peak_bytes, there.peak_bytes),
                off(predicted.total_bytes.unwrap(), there.total_bytes.unwrap()),
            );
            if name == "activations" {
                assert!(
                    live < 0.01 && all < 0.05,
                    "{changes:?} {name}: {predicted:?} predicted, {there:?} there"
                );
            } else {
                assert_eq!(predicted, there, "{changes:?} {name}");
            }
        }
        assert_eq!(predicted.parameters, trainer.parameters());
        let (ledger, _) = trainer.ledger().unwrap();
        assert_eq!(predicted.ledger.table(), ledger.table(), "{changes:?}");
    }
}

#[test]
fn the_arenas_of_a_classifier_of_images_too() {
    use crate::models::images;
    let dir = images::folder();
    for recipe in ["bf16", "nvfp4"] {
        as_predicted(&images::config(dir.path(), recipe, &[]), &[recipe]);
    }
}

#[test]
fn the_peak_of_a_schedule_is_that_of_its_largest_part() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("late.toml");
    let text = "extends = \"mxfp4-hopper\"\n[[override]]\nlayers = \"*\"\nsteps = \"0.5..1\"\nset = { recipe = \"bf16\" }";
    std::fs::write(&path, text).unwrap();
    let of = |recipe: &str| prediction(DeviceKind::Host, &config(&[&format!("recipe={recipe}")])).unwrap();
    let activations = |prediction: &Prediction| prediction.memory.activations.peak_bytes;
    let (late, first, last) = (of(path.to_str().unwrap()), of("mxfp4-hopper"), of("bf16"));
    assert!(activations(&first) < activations(&last));
    assert!(
        off(activations(&late), activations(&last)) < 0.05,
        "{} {}",
        activations(&late),
        activations(&last)
    );
}

/// The most bytes that live at once. The gaps that lie between them are each rank's own: where a buffer finds its place depends on the sizes of all.
fn alive(prediction: &Prediction) -> usize {
    prediction.memory.arenas().iter().map(|(_, arena)| arena.peak_bytes).sum()
}

#[test]
fn no_rank_takes_more_than_is_predicted_whatever_it_is_sent() {
    let two = ["run.ranks=2", "train.shards=2"];
    let replicas = ["run.ranks=4", "run.dp=2", "train.expert_shards=4", "train.grad_accum=2"];
    let tree = ["run.ranks=2", "train.shards=2", "train.combine=tree"];
    let dir = tempfile::tempdir().unwrap();
    let back = dir.path().join("back.toml");
    let text = "extends = \"mxfp4-hopper\"\n[expert]\ncombine = { fwd = { format = \"e4m3\" }, bwd = { format = \"mxfp8-e4m3\" } }";
    std::fs::write(&back, text).unwrap();
    let back = format!("recipe={}", back.display());
    let in_blocks = [&two[..], &[&*back]].concat();
    for changes in [&two[..], &replicas, &tree, &in_blocks] {
        // Room for nearly all that a router may choose: what comes takes less, and never more.
        let room = ["recipe=mxfp4-hopper", "run.capacity_factor=1.9"];
        let config = config(&[&room[..], changes].concat());
        let mesh = config.run.mesh();
        let there = rig::on_mesh(mesh, |mesh| {
            let cpu = Cpu::new(1).unwrap();
            measured(&mut Trainer::new(&cpu, mesh, &config).unwrap())
        });
        let recipe = checked_recipe(&config).unwrap();
        let kinds = kinds_of_ranks(mesh, &config).unwrap();
        assert_eq!(kinds.concat().len(), mesh.ranks());
        let largest = prediction(DeviceKind::Host, &config).unwrap();
        for (rank, there) in there.into_iter().enumerate() {
            let like = kinds.iter().find(|kind| kind.contains(&rank)).unwrap();
            let predicted = predict_rank(DeviceKind::Host, mesh, like[0], &config, &recipe).unwrap();
            assert!(alive(&predicted) <= alive(&largest));
            for ((name, there), (_, predicted)) in there.arenas().into_iter().zip(predicted.memory.arenas()) {
                let share = there.peak_bytes as f64 / predicted.peak_bytes as f64;
                let least = if name == "activations" { 0.5 } else { 1.0 };
                assert!(
                    (least..=1.0).contains(&share),
                    "{changes:?}, {name}: {predicted:?}, {there:?}, {share} of that"
                );
            }
        }
    }
}

/// Masters and moments are divided among all ranks: what is dense among all, a rank's experts among those that have the same.
#[test]
fn a_rank_keeps_its_share_of_the_state() {
    let changes = |ranks: usize, dp: usize| {
        let parts = format!("train.expert_shards={dp}");
        ["train.shards=8".to_owned(), format!("run.ranks={ranks}"), format!("run.dp={dp}"), parts]
    };
    let mut activations = None;
    let sent = |config: &Config, recipe: &Recipe| {
        let sent = sent_in_a_step(DeviceKind::Gpu, config.run.mesh(), 0, config, recipe).unwrap();
        sent.values().sum::<u64>()
    };
    for (ranks, dp) in [(1, 1), (2, 1), (2, 2), (4, 2), (8, 1), (8, 2), (8, 8)] {
        for (bytes_each, types) in [(12, "f32"), (8, "bf16")] {
            let moments = [format!("train.moment_dtype={types}")];
            let config = Config::load("s", &[&changes(ranks, dp)[..], &moments].concat()).unwrap();
            let (mesh, recipe) = (config.run.mesh(), checked_recipe(&config).unwrap());
            let rope = 4 * config.data.seq_len * config.model.head_dim;
            assert_eq!(sent(&config, &recipe) > 0, ranks > 1);
            for kind in kinds_of_ranks(mesh, &config).unwrap() {
                let of = predict_rank(DeviceKind::Gpu, mesh, kind[0], &config, &recipe).unwrap();
                let state = of.memory.weights.peak_bytes + of.memory.moments.peak_bytes - rope;
                let share = bytes_each * of.parameters / ranks;
                assert!(off(state, share) < 0.01, "{ranks} ranks, dp {dp}, {types}: {state} and {share}");
                // Nothing else is kept twice for it.
                let first = *activations.get_or_insert(of.memory.activations.peak_bytes);
                assert!(of.memory.activations.peak_bytes <= first, "{ranks} ranks, dp {dp}");
            }
        }
    }
}

/// Of configuration `s` on an H200, as its driver and its arenas reported after some steps: recipe; of the activations the
/// most bytes that lived and the bytes taken, and by the ledger what a forward pass keeps, in GiB.
const MEASURED: [(&str, [f64; 3]); 2] = [("bf16", [32.6, 33.0, 24.4]), ("mxfp4-hopper", [17.6, 17.8, 12.6])];

#[test]
fn a_gpu_takes_what_was_measured() {
    for (recipe, measured) in MEASURED {
        let config = Config::load("s", &[format!("recipe={recipe}")]).unwrap();
        let predicted = prediction(DeviceKind::Gpu, &config).unwrap();
        let RunMemory { weights, gradients, moments, activations } = predicted.memory;
        let there = [activations.peak_bytes, activations.total_bytes.unwrap(), predicted.ledger.bytes()]
            .map(|bytes| bytes as f64 / (1u64 << 30) as f64);
        println!("{recipe}: {there:.2?} GiB predicted, {measured:?} measured");
        for (predicted, measured) in there.into_iter().zip(measured) {
            assert!((predicted / measured - 1.0).abs() < 0.05, "{recipe}: {there:?}, {measured:?}");
        }
        let each = |bytes: usize| bytes as f64 / predicted.parameters as f64;
        let state = [weights, gradients, moments].map(|arena| each(arena.peak_bytes));
        println!("{state:.4?} bytes a parameter");
        for (predicted, measured) in state.into_iter().zip([4.0, 2.0, 8.0]) {
            assert!((predicted - measured).abs() < 0.01, "{recipe}: {state:?}");
        }
    }
}

/// On the same card: h in a format that no kernel of SwiGLU reads or writes is decoded to F32, and what is made of it quantized by itself.
#[test]
fn h_kept_in_another_format_takes_what_was_measured() {
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/plan-h.toml");
    let text = "description = \"\"\nextends = \"fp8-flow\"\n[expert]\nsaved.h = { format = \"nvfp4\" }\n";
    std::fs::write(path, text).unwrap();
    let config = Config::load("s", &[format!("recipe={path}")]).unwrap();
    let activations = prediction(DeviceKind::Gpu, &config).unwrap().memory.activations;
    let gib = activations.total_bytes.unwrap() as f64 / (1u64 << 30) as f64;
    assert!((gib / 22.6 - 1.0).abs() < 0.02, "{gib:.2} GiB predicted, 22.6 measured");
}

/// DeepSeek-V3's sizes.
const HUGE: &[&str] = &[
    "model.d_model=7168",
    "model.layers=61",
    "model.heads=128",
    "model.kv_heads=128",
    "model.head_dim=128",
    "model.experts=256",
    "model.top_k=8",
    "model.expert_ffn=2048",
    "model.shared_ffn=2048",
    "model.vocab_size=129280",
    "data.seq_len=4096",
    "train.batch_size=16",
    "train.shards=1",
    "model.tie_embeddings=false",
];

#[test]
fn hundreds_of_billions_of_parameters_are_counted_and_not_made() {
    for kind in [DeviceKind::Host, DeviceKind::Gpu] {
        for recipe in ["recipe=bf16", "recipe=mxfp4-hopper"] {
            let config = config(&[HUGE, &[recipe]].concat());
            let predicted = prediction(kind, &config).unwrap();
            println!(
                "{kind:?} {recipe}: {:.1}e9 parameters, {}",
                predicted.parameters as f64 / 1e9,
                predicted.summary()
            );
            assert!(predicted.parameters > 600_000_000_000);
            assert!(off(predicted.memory.moments.peak_bytes, 8 * predicted.parameters) < 1e-6);
        }
    }
}

#[test]
fn heads_that_no_kernel_of_a_gpu_takes_are_refused_before_a_run() {
    for (change, name) in [("model.head_dim=320", "head_dim"), ("model.value_head_dim=288", "value_dim")] {
        let config = config(&[change, "recipe=bf16"]);
        prediction(DeviceKind::Host, &config).unwrap();
        let why = prediction(DeviceKind::Gpu, &config).unwrap_err().to_string();
        assert!(why.contains(name) && why.contains("at most 256 on a GPU"), "{why}");
    }
}

/// A GPU of so many bytes, of which others hold some.
fn gpu(total_bytes: usize, others_bytes: usize) -> Dry {
    Dry::with_room(DeviceKind::Gpu, Room { total_bytes, others_bytes })
}

/// The refusal on a device of so many bytes.
fn refused(config: &Config, there: usize) -> (Vec<String>, String) {
    refused_by(&gpu(there, 0), config)
}

fn refused_by(device: &Dry, config: &Config) -> (Vec<String>, String) {
    match require_room(device, config.run.mesh(), config, &checked_recipe(config).unwrap()) {
        Err(Error::Memory { settings, why, .. }) => (settings, why),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_host_has_room_for_the_ranks_that_run_on_it() {
    let config = config(&["recipe=bf16", "run.ranks=4", "train.shards=4"]);
    let (mesh, recipe) = (config.run.mesh(), Recipe::builtin("bf16").unwrap());
    let all = prediction(DeviceKind::Host, &config).unwrap();
    let of_two = Prediction { host_ranks: 2, ..all.clone() }.device_bytes();
    let (process, rank) = (all.allowance().1, (all.device_bytes() - all.allowance().1) / 4);
    assert_eq!(of_two, process + 2 * rank);
    let host = Dry::with_room(DeviceKind::Host, Room { total_bytes: of_two, others_bytes: 0 });
    let predicted = require_room_for(&host, mesh, 2, &config, &recipe).unwrap();
    assert!(predicted.summary().starts_with("2 ranks of "), "{}", predicted.summary());
    assert!(require_room(&host, mesh, &config, &recipe).is_err(), "four of them have no room");
}

#[test]
fn what_does_not_fit_is_told_the_shortest_list_that_does() {
    // Over a gibibyte of weights.
    let config = config(&[
        "recipe=bf16",
        "model.d_model=1024",
        "model.expert_ffn=4096",
        "model.experts=16",
        "train.batch_size=32",
    ]);
    let bytes = |changes: &[&str]| {
        let text = config.resolved_toml().unwrap();
        let changes: Vec<String> = changes.iter().map(|c| (*c).to_owned()).collect();
        let config = Config::from_text(&text, std::path::Path::new("test"), &changes).unwrap();
        prediction(DeviceKind::Gpu, &config).unwrap().device_bytes()
    };
    let all = bytes(&[]);
    let recipe = Recipe::builtin("bf16").unwrap();
    assert!(require_room(&gpu(all, 0), MeshShape::ONE, &config, &recipe).is_ok());
    let moments = bytes(&["train.moment_dtype=bf16"]);
    let (settings, why) = refused(&config, moments);
    println!("{why}");
    assert_eq!(settings, ["train.moment_dtype=bf16"], "{why}");
    for part in [
        "GiB",
        "a GPU by its shapes alone has",
        "weights",
        "gradients",
        "moments",
        "activations",
        "--set train.moment_dtype=bf16",
    ] {
        assert!(why.contains(part), "{part}: {why}");
    }
    // What others hold of a larger device is not to be had, and who holds it is told.
    assert!(require_room(&gpu(all + (3 << 30), 3 << 30), MeshShape::ONE, &config, &recipe).is_ok());
    let (settings, why) = refused_by(&gpu(moments + (3 << 30), 3 << 30), &config);
    println!("{why}");
    assert_eq!(settings, ["train.moment_dtype=bf16"], "{why}");
    assert!(why.contains("GiB for it: 3.0 GiB of its") && why.contains("in use by other processes"), "{why}");
    // Two where one does not do.
    let (settings, why) = refused(&config, bytes(&["train.moment_dtype=bf16", "train.grad_dtype=bf16"]));
    println!("{why}");
    assert_eq!(settings, ["train.grad_dtype=bf16", "train.moment_dtype=bf16"], "{why}");
    // Nothing.
    let (settings, why) = refused(&config, 1 << 30);
    println!("{why}");
    assert!(settings.is_empty() && why.contains("no setting makes it fit: the least is"), "{why}");
}

/// What a refusal says of the sizes that need the memory.
fn most_of_it(changes: &[&str]) -> Vec<String> {
    let (_, why) = refused(&config(changes), 1 << 20);
    println!("{why}");
    let (_, most) = why.split_once("most of it: ").unwrap();
    most.split("); ").map(str::to_owned).collect()
}

#[test]
fn a_refusal_says_which_sizes_need_the_memory() {
    let cases = [
        (
            &["model.experts=512", "model.expert_ffn=512"][..],
            "the experts",
            &["model.experts = 512", "model.expert_ffn = 512", "model.layers = 2"][..],
        ),
        (
            &["model.vocab_size=1000000"],
            "copies of weights",
            &["model.vocab_size = 1000000", "model.d_model = 64"],
        ),
        (&["model.shared_ffn=65536"], "activations of the shared experts", &["model.shared_ffn = 65536"]),
        (
            &[
                "model.heads=64",
                "model.head_dim=256",
                "train.batch_size=4",
                "train.shards=1",
                "data.seq_len=32",
            ],
            "attention",
            &["model.head_dim = 256", "model.heads = 64"],
        ),
        (
            &["train.batch_size=1024", "model.head_dim=256"],
            "activations of attention",
            &["train.batch_size = 1024", "data.seq_len = 128"],
        ),
        (
            &["train.batch_size=1024", "model.top_k=8"],
            "activations of the experts",
            &["train.batch_size = 1024", "model.top_k = 8"],
        ),
        // Beyond what is counted to the end.
        (
            &["model.layers=4096", "model.d_model=1048576", "model.expert_ffn=1024"],
            "the experts, with gradients and moments,",
            &["model.layers = 4096", "model.d_model = 1048576"],
        ),
        (
            &[
                "model.layers=4096",
                "model.d_model=16384",
                "train.batch_size=1024",
                "data.seq_len=16384",
                "train.shards=1",
            ],
            "activations, about",
            &["train.batch_size = 1024", "data.seq_len = 16384"],
        ),
    ];
    // The last are models that take long to count.
    let most = Breadth::of_tests().either(cases.len(), cases.len() - 2);
    for (changes, first, keys) in cases.into_iter().take(most) {
        let most = most_of_it(&[&["recipe=bf16", "train.recompute=[]"], changes].concat());
        assert!(most[0].starts_with(first), "{changes:?}: {most:?}");
        keys.iter().for_each(|key| assert!(most[0].contains(key), "{key}: {most:?}"));
    }
}

/// Of a dense model a refusal names its own sizes, and no experts among what would help.
#[test]
fn a_dense_model_is_refused_by_its_own_sizes() {
    let refuse = |changes: &[&str], there: usize| {
        let changes: Vec<String> = changes.iter().map(|c| (*c).to_owned()).collect();
        let (_, why) = refused(&Config::load("tiny-dense", &changes).unwrap(), there);
        println!("{why}");
        why
    };
    let why = refuse(&["recipe=bf16", "model.ffn=65536", "train.batch_size=4", "data.seq_len=32"], 1 << 20);
    assert!(why.contains("most of it: the MLPs, with gradients and moments, 384.0 MiB"), "{why}");
    assert!(why.contains("(model.layers = 2, model.d_model = 64, model.ffn = 65536)"), "{why}");
    let why = refuse(&["recipe=bf16", "model.ffn=4096", "train.batch_size=512"], 1 << 20);
    assert!(why.contains("activations of the MLPs") && why.contains("model.ffn = 4096"), "{why}");
    assert!(why.contains("the least is") && why.contains("layers"), "{why}");
    let why = refuse(&["model.layers=4096", "model.d_model=16384", "model.ffn=1048576"], 1 << 20);
    assert!(why.contains("the MLPs") && !why.contains("expert"), "{why}");
    let mixed = most_of_it(&["recipe=bf16", "model.layers=9", "model.dense_layers=8", "model.ffn=65536"]);
    assert!(mixed[0].contains("MLPs") && mixed[0].contains("model.dense_layers = 8"), "{mixed:?}");
}

#[test]
fn the_sizes_told_are_those_counted() {
    let most = most_of_it(&["recipe=bf16", "model.experts=512", "model.expert_ffn=1024", "run.ranks=2"]);
    // 2 layers · 512 experts · 3 · 64 · 1024, in F32 four times; two ranks divide them.
    assert!(most[0].starts_with("the experts, with gradients and moments, 1.5 GiB"), "{most:?}");
}

#[test]
fn what_does_not_fit_is_made_again_as_far_as_it_must() {
    let config = Config::load("s", &["recipe=bf16".to_owned()]).unwrap();
    let all = prediction(DeviceKind::Gpu, &config).unwrap().device_bytes();
    for (less, setting) in [
        (1, r#"train.recompute=["norms", "swiglu", "expert_input"]"#),
        (10, r#"train.recompute=["norms", "swiglu", "expert_input", "attention"]"#),
        (16, r#"train.recompute=["norms", "swiglu", "attention", "experts"]"#),
    ] {
        let (settings, why) = refused(&config, all - (less << 30));
        println!("{why}");
        assert_eq!(settings, [setting], "{why}");
        assert!(why.contains(&format!("--set '{setting}'")), "{why}");
    }
}

/// All the recomputation that there is.
const LAYERS: &str = "train.recompute=[\"norms\", \"swiglu\", \"layers\"]";

#[test]
fn smaller_micro_batches_keep_the_tokens_of_a_step() {
    let config = config(&["recipe=mxfp4-hopper", "train.batch_size=4096", LAYERS]);
    let bytes = prediction(DeviceKind::Gpu, &config).unwrap().device_bytes();
    let (settings, why) = refused(&config, bytes / 10 * 9);
    println!("{why}");
    assert_eq!(settings, ["train.batch_size=2048", "train.grad_accum=2"], "{why}");
}

/// Every format is rehearsed for a GPU as for a host, in weights too and from a late step on; what a GPU decodes for its products counts.
#[test]
fn a_gpu_takes_every_format_and_needs_room_to_decode() {
    let late = |format: &str| {
        let site = |key| format!("set.linear.{key} = {{ format = \"{format}\" }}\n");
        let mut set: String = ["fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "saved.x"].map(site).concat();
        set += &format!("set.linear.wgrad.x = {{ format = \"{format}\", by = \"requantize\" }}\n");
        Recipe::parse("late", &format!("extends = \"bf16\"\n[[override]]\nsteps = \"0.9..1\"\n{set}"))
            .unwrap()
    };
    let config = config(&[]);
    let of = |kind, format| predict(kind, MeshShape::ONE, &config, &late(format)).unwrap().device_bytes();
    for format in ["nvfp4", "hif4", "mxfp6-e2m3", "mxint8", "mxfp4", "e4m3-tensor"] {
        assert!(of(DeviceKind::Host, format) > 0, "{format}");
        assert!(of(DeviceKind::Gpu, format) > 0, "{format}");
    }
}

#[test]
fn absurd_sizes_are_errors() {
    let load = |changes: &[&str]| {
        let changes: Vec<String> = changes.iter().map(|c| (*c).to_owned()).collect();
        Config::load("tiny", &changes)
    };
    let text = |changes: &[&str]| match load(changes) {
        Err(e) => e.to_string(),
        Ok(config) => {
            let cpu = Cpu::new(1).unwrap();
            let refused = Trainer::new(&cpu, &SoloComm, &config).map(drop).and_then(|()| {
                require_room(&cpu, MeshShape::ONE, &config, &checked_recipe(&config)?).map(drop)
            });
            refused.unwrap_err().to_string()
        }
    };
    assert!(text(&["model.layers=9223372036854775807"]).contains("model.layers"));
    assert!(text(&["train.batch_size=400000", "train.shards=1"]).contains("train.batch_size"));
    assert!(text(&["model.d_model=4611686018427387904"]).contains("expected at most 2^31 - 1"));
    assert!(text(&["model.d_model=1073741824", "model.expert_ffn=1073741824"]).contains("2^48 parameters"));
    assert!(text(&["model.vocab_size=9223372036854775807"]).contains("model.vocab_size"));
    assert!(text(&["model.experts=2147483647"]).contains("has more than 262144 experts"));
    assert!(
        text(&["model.head_dim=1073741824"]).contains("`model.head_dim`: is 1073741824, expected at most")
    );
    let heads = text(&["model.heads=2147483646", "model.kv_heads=1", "model.d_model=65536"]);
    assert!(heads.contains("2^48 parameters; most of them are of attention: model.layers = 2"), "{heads}");
    assert!(heads.contains("model.heads = 2147483646"), "{heads}");
    assert!(
        text(&["data.seq_len=1048576", "train.batch_size=16", "train.shards=1", "model.head_dim=1048576"])
            .contains("GiB")
    );
    assert!(text(&["model.layers=4096", "model.d_model=4096", "model.expert_ffn=4096"]).contains("GiB"));
    assert!(text(&["model.d_model=1048576", "model.expert_ffn=1048576", "recipe=bf16"]).contains("GiB"));
}
