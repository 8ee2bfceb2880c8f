//! Meshes of replicas and divided experts: at the same settings all give the bits of one rank.

use crate::rig;

use nibble_core::{Kernels, Mesh, MeshShape};
use nibble_cpu::Cpu;
use nibble_testkit::Breadth;
use nibble_train::checkpoint::{Store, latest_valid};
use nibble_train::config::Config;
use nibble_train::delayed::History;
use nibble_train::metrics::{LayerMetrics, Metrics, SiteMetrics};
use nibble_train::trainer::{Observer, Options, Start, Trainer, run};
use rig::{
    Outcome, SOLO, STOCHASTIC, few_held_out, on_mesh, recipe_file, recipes, small, train_mesh, with_recipe,
};
use std::path::Path;

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

const fn mesh(dp: usize, ep: usize) -> MeshShape {
    MeshShape { dp, ep }
}

/// Every mesh of up to eight ranks.
const MESHES: [MeshShape; 10] = [
    mesh(1, 1),
    mesh(1, 2),
    mesh(2, 1),
    mesh(1, 4),
    mesh(2, 2),
    mesh(4, 1),
    mesh(1, 8),
    mesh(2, 4),
    mesh(4, 2),
    mesh(8, 1),
];

/// What all meshes up to eight ranks can divide: eight shards, of which the rows of each of eight experts have as many parts.
const DIVIDED: [&str; 4] =
    ["model.experts=8", "train.batch_size=8", "train.shards=8", "train.expert_shards=8"];

/// Settings of which each run has one of every line.
const SETTINGS: [[&[&str]; 2]; 7] = [
    [&[], &["train.grad_accum=2"]],
    [&[], &["train.grad_dtype=bf16"]],
    [&[], &["model.tie_embeddings=false"]],
    [&[], &["train.recompute=[\"experts\",\"norms\"]"]],
    [&[], &["model.balance=batch"]],
    [&[], &["train.moment_dtype=bf16", "model.shared_ffn=0"]],
    // Of three rows the order of sums shows.
    [&[], &["train.combine=tree", "model.top_k=3"]],
];

/// Rows of choices such that any two lines have all four pairs.
const PAIRS: [[usize; 7]; 6] = [
    [0, 0, 0, 0, 0, 0, 0],
    [0, 1, 1, 1, 1, 1, 1],
    [1, 0, 1, 1, 1, 0, 0],
    [1, 1, 0, 1, 0, 1, 0],
    [1, 1, 1, 0, 0, 0, 1],
    [1, 0, 0, 0, 1, 1, 1],
];

/// The settings of a row, and more.
fn settings<'a>(row: usize, more: &[&'a str]) -> Vec<&'a str> {
    let chosen = SETTINGS.iter().zip(PAIRS[row % PAIRS.len()]).flat_map(|(line, choice)| line[choice]);
    DIVIDED.iter().chain(chosen).copied().chain(more.iter().copied()).collect()
}

/// That these meshes end with the bits of one rank.
#[track_caller]
fn assert_same(
    config: &Config,
    meshes: impl IntoIterator<Item = MeshShape>,
    steps: u64,
    what: &str,
) -> Outcome {
    let one = train_mesh(config, MeshShape::ONE, steps, cpu);
    assert!(one.losses.iter().all(|loss| loss.is_finite()), "{what}");
    for mesh in meshes {
        one.assert_same(&train_mesh(config, mesh, steps, cpu), &format!("{what}, mesh {mesh}"));
    }
    one
}

#[test]
fn choices_meet_in_pairs() {
    for a in 0..SETTINGS.len() {
        for b in 0..a {
            for pair in [[0, 0], [0, 1], [1, 0], [1, 1]] {
                assert!(PAIRS.iter().any(|row| [row[a], row[b]] == pair), "lines {a} and {b}: {pair:?}");
            }
        }
    }
}

/// Each recipe on a mesh of two, of four and of eight ranks, or daily on one of these; over all recipes every mesh with every row of settings.
#[test]
fn every_recipe_keeps_its_bits() {
    for (i, recipe) in recipes().into_iter().enumerate() {
        let config = small(recipe, &settings(i, &[]));
        let meshes = [&MESHES[1..3], &MESHES[3..6], &MESHES[6..]].map(|size| size[i % size.len()]);
        // Daily on one of them.
        let daily = vec![meshes[i % meshes.len()]];
        let meshes = Breadth::of_tests().either(meshes.to_vec(), daily);
        assert_same(&config, meshes, 3, &format!("{recipe}, settings {}", i % PAIRS.len()));
    }
}

#[test]
fn every_mesh_keeps_the_bits() {
    for row in 0..PAIRS.len() {
        let config = small("mxfp4-hopper", &settings(row, &[]));
        assert_same(&config, MESHES.into_iter().skip(1 + row % 3).step_by(3), 3, &format!("settings {row}"));
    }
}

/// A tree over experts is cut at nodes by every number of ranks, of as many experts as is no power of two as well.
#[test]
fn a_tree_keeps_its_bits_on_every_mesh() {
    let of = |recipe: &str, more: &[&str]| {
        small(recipe, &[&DIVIDED[..], &["model.experts=16", "model.top_k=6"], more].concat())
    };
    let tree = of("mxfp4-hopper", &["train.combine=tree"]);
    assert_same(&tree, MESHES.into_iter().skip(1), 2, "16 experts");
    for recipe in ["f32", "bf16"] {
        let twelve = of(recipe, &["train.combine=tree", "model.experts=12"]);
        assert_same(&twelve, [mesh(1, 2), mesh(1, 4), mesh(2, 4)], 2, &format!("{recipe}, 12 experts"));
    }
}

/// Matrices of several tiles and of a part of one, and some whose columns are no whole chunks: slices end within them, within an expert, and at
/// their ends.
#[test]
fn slices_within_matrices_keep_the_bits() {
    let large: &[&str] = &["model.vocab_size=300", "model.tie_embeddings=false", "model.experts=4"];
    let tiles = ["model.d_model=160", "model.expert_ffn=200"];
    let odd = ["model.d_model=80", "model.expert_ffn=72", "train.grad_accum=2"];
    let blocks = ["model.d_model=160", "model.expert_ffn=224"];
    let meshes = [mesh(2, 2), mesh(4, 1), mesh(1, 4)];
    for (i, (recipe, sizes, more)) in [
        // Codes of four bits in rows and of eight in square tiles, scales of a byte and of four, and scales of tensors, of this step and of earlier ones.
        ("hif4", &blocks[..], &["train.grad_accum=2"][..]),
        ("mxfp4-hopper-head8", &blocks[..], &[][..]),
        ("fp8-block", &blocks[..], &[][..]),
        ("nvfp4", &blocks[..], &[][..]),
        ("fp8-delayed", &blocks[..], &[][..]),
        ("bf16", &tiles[..], &["train.grad_dtype=bf16"][..]),
        ("bf16", &tiles[..], &["train.grad_accum=2", "train.moment_dtype=bf16"][..]),
        ("f32", &odd[..], &[][..]),
    ]
    .into_iter()
    .enumerate()
    {
        let config = small(recipe, &[&DIVIDED[..], large, sizes, more].concat());
        let meshes = Breadth::of_tests().either(meshes.to_vec(), vec![meshes[i % meshes.len()]]);
        assert_same(&config, meshes, 2, &format!("{recipe}, {sizes:?}, {more:?}"));
    }
}

/// What fixes the bits: the order in which a token's rows are summed, from the first forward pass on, and no more than rounding.
#[test]
fn the_way_to_combine_decides_the_last_bits_and_no_more() {
    for (recipe, most) in [("f32", 1e-5), ("bf16", 1e-2), ("mxfp4-hopper", 1e-2)] {
        let of = |top_k: &str, way: &str| {
            let way = format!("train.combine={way}");
            train_mesh(&small(recipe, &[&DIVIDED[..], &[top_k, &*way]].concat()), MeshShape::ONE, 3, cpu)
        };
        let [slots, tree] = ["slots", "tree"].map(|way| of("model.top_k=5", way));
        assert_ne!(slots.losses, tree.losses, "{recipe}");
        assert_ne!(slots.weights, tree.weights, "{recipe}");
        for (a, b) in slots.losses.iter().zip(&tree.losses) {
            assert!((a - b).abs() <= most * a, "{recipe}: {a} and {b}");
        }
        // An evaluation of the same weights sums as training does. In F32 the last bits of a few rows do not reach a mean of losses.
        let nats = ["slots", "tree"].map(|way| {
            let way = format!("train.combine={way}");
            let config = small(recipe, &[&DIVIDED[..], &["model.top_k=5", &*way]].concat());
            Trainer::new(&cpu(), &SOLO, &config).unwrap().evaluate(1).unwrap().to_bits()
        });
        assert!(nats[0] != nats[1] || recipe == "f32", "{recipe}");
        let [slots, tree] = ["slots", "tree"].map(|way| of("model.top_k=2", way));
        slots.assert_same(&tree, &format!("{recipe}: two rows have one sum"));
    }
}

/// Few experts are chosen, some by no token: groups without rows, parts without rows, a rank that receives nothing.
#[test]
fn empty_experts_and_ranks_keep_the_bits() {
    let of = |way: &str| {
        let more = ["model.top_k=1", "model.aux_loss_coef=0", "train.lr=0.5", way];
        small("mxfp4-hopper", &settings(0, &more))
    };
    let config = of("train.combine=slots");
    let one = assert_same(&config, [mesh(1, 8), mesh(2, 4), mesh(8, 1)], 6, "one expert a token");
    let tree = assert_same(&of("train.combine=tree"), [mesh(1, 8), mesh(2, 4)], 6, "one, up a tree");
    one.assert_same(&tree, "a row alone is the sum");
    // A step this large sends all tokens to a few experts.
    let b = cpu();
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    let load: Vec<f64> =
        (0..6).map(|_| trainer.train_step().unwrap().dead_expert_fraction.unwrap()).collect();
    assert!(load.iter().any(|dead| *dead > 0.0), "{load:?}, losses {:?}", one.losses);
}

/// What fixes the bits: parts of experts, as shards do.
#[test]
fn parts_of_experts_decide_the_last_bits_and_no_more() {
    for recipe in ["f32", "bf16", "mxfp4-hopper"] {
        let of = |parts: usize| {
            let parts = format!("train.expert_shards={parts}");
            train_mesh(&small(recipe, &[&DIVIDED[..3], &[&*parts]].concat()), MeshShape::ONE, 4, cpu)
        };
        let (one, eight) = (of(1), of(8));
        assert_eq!(
            one.losses[0].to_bits(),
            eight.losses[0].to_bits(),
            "{recipe}: the forward pass is the same"
        );
        assert_ne!(one.weights, eight.weights, "{recipe}");
        // Columns are quantized in blocks of other rows: more than the last bits under recipes that do so.
        let most = if recipe == "mxfp4-hopper" { 3e-3 } else { 2e-5 };
        for (a, b) in one.losses.iter().zip(&eight.losses) {
            assert!((a - b).abs() <= most * a, "{recipe}: {a} and {b}");
        }
        for (a, b) in one.norms.iter().zip(&eight.norms).take(1) {
            assert!((a - b).abs() <= 10.0 * most * a, "{recipe}: norms {a} and {b}");
        }
    }
}

/// What a run under scales of earlier steps tells: metrics, and histories where there is one rank.
fn told<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    config: &Config,
    saved: Option<(&Path, bool)>,
) -> (Vec<Metrics>, Vec<History>) {
    let first = mesh.all.rank() == 0;
    let mut trainer = Trainer::new(b, mesh, config).unwrap();
    if let Some((dir, false)) = saved {
        trainer.load(&latest_valid(dir).unwrap().checkpoint.unwrap()).unwrap();
    }
    let steps = (0..3).map(|_| trainer.train_step().unwrap().without_times()).collect();
    if let Some((dir, true)) = saved {
        let store = first.then(|| Store::open(dir).unwrap());
        trainer.save(store.as_ref()).unwrap();
    }
    (steps, trainer.histories().unwrap())
}

/// Saved on a mesh, resumed on another: the metrics of a run that was not stopped. Under a recipe that keeps histories of scales, which each mesh has
/// in an order of its own.
#[test]
fn a_run_goes_on_on_any_mesh() {
    let text = std::fs::read_to_string(recipe_file("fp8-delayed")).unwrap();
    let text = text.replace("history = 1024", "history = 3");
    let changes = settings(0, &["train.steps=6"]);
    let (config, _recipe) = with_recipe(&text, &changes);
    let b = cpu();
    let whole = {
        let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
        let steps: Vec<_> = (0..6).map(|_| trainer.train_step().unwrap().without_times()).collect();
        (steps, trainer.histories().unwrap())
    };
    let files = |dir: &Path| {
        let dir = dir.join("checkpoints/step-00000003");
        ["model.safetensors", "optim.safetensors", "scales.safetensors"]
            .map(|name| std::fs::read(dir.join(name)).unwrap())
    };
    let mut written = None;
    // Daily from one of two, of four and of eight ranks.
    let daily = |i: &usize| Breadth::of_tests().either(true, i % 3 == 1);
    for (i, from) in (0..MESHES.len()).filter(daily).map(|i| (i, MESHES[i])) {
        let dir = tempfile::tempdir().unwrap();
        let before = on_mesh(from, |mesh| told(&cpu(), mesh, &config, Some((dir.path(), true))));
        assert!(before.iter().all(|(steps, _)| *steps == whole.0[..3]), "{from}");
        let files = files(dir.path());
        assert!(*written.get_or_insert_with(|| files.clone()) == files, "{from}: tensors of the checkpoint");
        // On one rank, whose histories are all there are, and on one more mesh.
        for to in [MeshShape::ONE, MESHES[(3 * i + 4) % MESHES.len()]] {
            let after = on_mesh(to, |mesh| told(&cpu(), mesh, &config, Some((dir.path(), false))));
            assert!(after.iter().all(|(steps, _)| *steps == whole.0[3..]), "{from} to {to}");
            if to == MeshShape::ONE {
                assert_eq!(after[0].1, whole.1, "{from}");
            }
        }
    }
}

/// Every model, saved on a mesh of two or of four ranks and resumed on one: the metrics of one rank that was not stopped.
#[test]
fn every_model_keeps_its_bits_and_goes_on() {
    for (i, changes) in rig::choices().into_iter().enumerate() {
        let changes = [&DIVIDED[..], &["train.steps=6"], &changes].concat();
        let (recipe, (config, _recipe)) = match i % 3 {
            0 => ("stochastic rounding", with_recipe(STOCHASTIC, &changes)),
            other => {
                let recipe = ["bf16", "mxfp4-hopper"][other - 1];
                (recipe, (small(recipe, &changes), tempfile::tempdir().unwrap()))
            }
        };
        let b = cpu();
        let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
        let whole: Vec<_> = (0..6).map(|_| trainer.train_step().unwrap().without_times()).collect();
        let dir = tempfile::tempdir().unwrap();
        let (from, saved) = (MESHES[1 + i % 5], |first| Some((dir.path(), first)));
        let before = on_mesh(from, |mesh| told(&cpu(), mesh, &config, saved(true)));
        assert!(before.iter().all(|(steps, _)| *steps == whole[..3]), "{recipe} {changes:?}, {from}");
        let after = on_mesh(MeshShape::ONE, |mesh| told(&cpu(), mesh, &config, saved(false)));
        assert!(after[0].0 == whole[3..], "{recipe} {changes:?}, from {from}");
    }
}

/// The held-out loss is of the same bits too, where parts of experts have scales of their own.
#[test]
fn evaluations_keep_the_bits() {
    let dir = tempfile::tempdir().unwrap();
    let [source, held_out] = few_held_out(dir.path());
    for (recipe, way) in [("fp8-tensor", "slots"), ("nvfp4", "tree"), ("mxfp4-hopper", "tree")] {
        let way = format!("train.combine={way}");
        let config = small(recipe, &settings(0, &[&source, &held_out, "model.top_k=3", &way]));
        let nats = |mesh: Mesh<'_, Cpu>| {
            let b = cpu();
            let mut trainer = Trainer::new(&b, mesh, &config).unwrap();
            // Whole batches, and all there is: a number of sequences that ranks do not divide.
            [2, 0].map(|batches| trainer.evaluate(batches).unwrap().to_bits())
        };
        let one = on_mesh(MeshShape::ONE, nats)[0];
        for mesh in [mesh(1, 2), mesh(2, 2), mesh(4, 1), mesh(2, 4)] {
            assert!(on_mesh(mesh, nats).iter().all(|nats| *nats == one), "{recipe}, mesh {mesh}");
        }
    }
}

/// What a run tells.
#[derive(Default)]
struct Notes(Vec<String>);

impl Observer for Notes {
    fn start(&mut self, _: &Start<'_>) {}
    fn note(&mut self, text: &str) {
        self.0.push(text.to_owned());
    }
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, _: &Metrics) {}
    fn evaluation(&mut self, _: u64, _: Option<f64>) {}
    fn checkpoint(&mut self, _: &Path) {}
}

/// A run in the directory of its configuration, from its beginning or on: what the first rank notes, or why it does not.
fn go(config: &Config, resume: bool) -> Result<Vec<String>, String> {
    let ranks = on_mesh(config.run.mesh(), |mesh| {
        let mut notes = Notes::default();
        let options = Options { resume, ..Options::default() };
        run(&cpu(), mesh, config, options, &mut notes).map(|_| notes.0).map_err(|e| e.to_string())
    });
    ranks.into_iter().next().unwrap()
}

/// A short run in this folder, under `bf16` or the recipe of this text, which lies where the second says.
fn at(dir: &Path, text: Option<&str>, more: &[&str]) -> (Config, tempfile::TempDir) {
    let [source, held_out] = few_held_out(dir);
    let dir = format!("run.dir={}", dir.join("run").display());
    let common = ["train.warmup_steps=1", &dir, &source, &held_out];
    match text {
        Some(text) => with_recipe(text, &[&common[..], more].concat()),
        None => (small("bf16", &[&common[..], more].concat()), tempfile::tempdir().unwrap()),
    }
}

/// The records of a run count every block of a weight once, whoever quantizes it: its slices one each, or all ranks all of it.
#[test]
fn blocks_of_weights_are_counted_once() {
    for recipe in ["hif4", "nvfp4", "fp8-delayed", "fp8-row"] {
        let text = std::fs::read_to_string(recipe_file(recipe)).unwrap();
        let counted = |more: &[&str]| {
            let dir = tempfile::tempdir().unwrap();
            let more = [&DIVIDED[..], &["train.steps=2", "model.d_model=160"], more].concat();
            let (config, _recipe) = at(dir.path(), Some(&text), &more);
            go(&config, false).unwrap();
            let lines = std::fs::read_to_string(dir.path().join("run/layers.jsonl")).unwrap();
            let of_line = |line: &str| serde_json::from_str::<LayerMetrics>(line).unwrap().sites;
            let sites = lines.lines().flat_map(of_line).filter(|site| site.tensor == "w");
            sites.collect::<Vec<SiteMetrics>>()
        };
        let one = counted(&["run.ranks=1"]);
        assert!(one.len() >= 20 && one.iter().all(|site| site.non_zero > 0), "{one:?}");
        let saturated = one.iter().filter_map(|site| site.saturated).any(|values| values > 0);
        assert_eq!(saturated, recipe == "fp8-delayed", "{one:?}");
        for mesh in [["run.ranks=2", "run.dp=1"], ["run.ranks=4", "run.dp=2"]] {
            assert_eq!(counted(&mesh), one, "{recipe}, {mesh:?}");
        }
    }
}

/// A run that began with one part goes on with two if it is asked to, says so and stores it, with the bits of any mesh from there on. Without being
/// asked, and under scales of earlier steps, it does not.
#[test]
fn a_run_goes_on_with_other_parts_of_experts_if_asked() {
    let delayed = std::fs::read_to_string(recipe_file("fp8-delayed")).unwrap();
    let weights =
        |dir: &Path| std::fs::read(dir.join("run/checkpoints/step-00000004/model.safetensors")).unwrap();
    let mut all = Vec::new();
    for mesh in [&["run.ranks=1"][..], &["run.ranks=4", "run.dp=2"]] {
        let dir = tempfile::tempdir().unwrap();
        go(&at(dir.path(), None, &["train.steps=2"]).0, false).unwrap();
        let more = [&["train.steps=4", "train.expert_shards=2"], mesh].concat();
        let notes = go(&at(dir.path(), None, &more).0, true).unwrap();
        assert!(notes.iter().any(|note| note.starts_with("train.expert_shards: 1 → 2: ")), "{notes:?}");
        let stored = std::fs::read_to_string(dir.path().join("run/config.toml")).unwrap();
        assert!(stored.contains("expert_shards = 2"), "{stored}");
        all.push(weights(dir.path()));
        let why = go(&at(dir.path(), None, &["train.steps=5"]).0, true).unwrap_err();
        assert!(why.contains("train.expert_shards: 2 → the default"), "{why}");
    }
    assert!(all[0] == all[1], "one rank, and two replicas of two");
    let dir = tempfile::tempdir().unwrap();
    let (config, _recipe) = at(dir.path(), Some(&delayed), &["train.steps=2"]);
    go(&config, false).unwrap();
    let (config, _recipe) = at(dir.path(), Some(&delayed), &["train.steps=4", "train.expert_shards=2"]);
    let why = go(&config, true).unwrap_err();
    assert!(why.contains("of which scales of earlier steps are"), "{why}");
}

/// A run keeps the way to combine that it began with, whatever ranks it goes on with, until another is asked for; the new one is stored, told
/// of, and kept.
#[test]
fn a_run_keeps_its_way_to_combine_until_another_is_asked_for() {
    let stored = |dir: &Path| std::fs::read_to_string(dir.join("run/config.toml")).unwrap();
    let on = |dir: &Path, steps: u64, more: &[&str], resume: bool| {
        let steps = format!("train.steps={steps}");
        go(&at(dir, None, &[&["model.top_k=4", &*steps], more].concat()).0, resume).unwrap()
    };
    let told = |notes: &[String]| notes.iter().any(|note| note.starts_with("train.combine: "));
    let four = ["run.ranks=4"];
    let mut all = Vec::new();
    for ranks in [&[][..], &four] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert!(!told(&on(dir, 1, ranks, false)));
        assert!(!stored(dir).contains("combine"), "as it was stored before there was another way");
        let notes = on(dir, 2, &[ranks, &["train.combine=slots"]].concat(), true);
        assert!(!told(&notes), "which it has: {notes:?}");
        let notes = on(dir, 3, &[ranks, &["train.combine=tree"]].concat(), true);
        assert!(notes.iter().any(|note| note.starts_with("train.combine: slots → tree: ")), "{notes:?}");
        assert!(stored(dir).contains("combine = \"tree\""), "{}", stored(dir));
        // Not asked for again; on other ranks.
        let others = if ranks.is_empty() { &four[..] } else { &[] };
        assert!(!told(&on(dir, 4, others, true)));
        assert!(stored(dir).contains("combine = \"tree\""), "{}", stored(dir));
        let weights = std::fs::read(dir.join("run/checkpoints/step-00000004/model.safetensors")).unwrap();
        all.push(weights);
        let notes = on(dir, 5, &["train.combine=slots"], true);
        assert!(notes.iter().any(|note| note.starts_with("train.combine: tree → slots: ")), "{notes:?}");
    }
    assert!(all[0] == all[1], "steps on one rank and on four");
}
