//! What the tests of training share: a small run that has every kind of layer, ranks as threads, and reproducible
//! values.
#![allow(dead_code, unused_imports)] // every test file takes a part of it

mod choices;
mod comm;
pub mod documents;

pub use choices::{choices, dense_choices};
pub use comm::{Call, CallLog, Hook, Hooked, noted, on_axes};

use nibble_core::formats::{Purpose, Stream, fnv1a32};
use nibble_core::ops::Control;
use nibble_core::recipe::{LayerKind, Product};
use nibble_core::{Comm, DType, Kernels, Mesh, MeshShape, Recipe, SoloComm, Tensor};
use nibble_cpu::Cpu;
use nibble_testkit::Breadth;
use nibble_train::config::Config;
use nibble_train::cx::Cx;
use nibble_train::metrics::Metrics;
use nibble_train::param::{Param, Placement};
use nibble_train::shards::Shards;
use nibble_train::trainer::{Observer, Start, Trainer};
use std::path::Path;

/// What scales the gradients of losses in a pass without a step.
pub fn loss_scale<B: Kernels>(b: &B, scale: f32) -> B::Buf<f32> {
    b.upload(&Control::with_loss_scale(scale)).unwrap()
}

/// The recipes to train with, except those whose transforms do not divide the small models' widths.
pub fn recipes() -> Vec<&'static str> {
    Recipe::training_names().filter(|name| !wants_width(name)).collect()
}

/// Of [`recipes`] those of a test that takes long under each: all; daily those of the README, and a quarter of the others, another for each `turn`.
pub fn some_recipes(turn: usize) -> Vec<&'static str> {
    let (first, others): (Vec<_>, Vec<_>) =
        recipes().into_iter().partition(|recipe| Recipe::names().any(|name| name == *recipe));
    let others = others.into_iter().skip(Breadth::of_tests().either(0, turn % 4));
    first.into_iter().chain(others.step_by(Breadth::of_tests().either(1, 4))).collect()
}

/// The file of a recipe.
pub fn recipe_file(name: &str) -> String {
    let folder = if Recipe::study_names().any(|study| study == name) { "recipes/studies" } else { "recipes" };
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../{folder}/{name}.toml")).display().to_string()
}

/// Two decoder layers with grouped query heads, four experts and a shared one, 512 tokens a step in four shards of
/// 128: the smallest run whose shards hold whole FP8 blocks and whose widths hold whole MXFP4 blocks.
const EXPERTS: &str = "experts = 4\ntop_k = 2\nexpert_ffn = 32\nshared_ffn = 32";

/// The same with an MLP in each layer, and queries and keys that are not normed.
const MLPS: &str = "experts = 0\nffn = 96\nqk_norm = false";

/// What makes the first layer of the small run dense.
pub const FIRST_DENSE: [&str; 2] = ["model.dense_layers=1", "model.ffn=96"];

/// What gives the small run latent attention: heads of 32 of which 16 turn, values of 24, and latents that no block of a format divides.
pub const LATENT: [&str; 6] = [
    "model.kv_heads=2",
    "model.qk_norm=false",
    "model.kv_rank=48",
    "model.q_rank=40",
    "model.rope_dim=16",
    "model.value_head_dim=24",
];

/// The same without a latent of queries.
pub const LATENT_STRAIGHT: [&str; 5] = [LATENT[0], LATENT[1], LATENT[2], LATENT[4], LATENT[5]];

/// What gives the configuration `tiny` latent attention.
pub const TINY_LATENT: [&str; 6] = [
    "model.kv_heads=4",
    "model.qk_norm=false",
    "model.kv_rank=40",
    "model.q_rank=24",
    "model.rope_dim=8",
    "model.value_head_dim=24",
];

/// All but what stands between attentions.
const SMALL: &str = r#"
seed = 7
[model]
d_model = 64
layers = 2
heads = 2
kv_heads = 1
head_dim = 32
# feed
[data]
seq_len = 128
[train]
steps = 20
batch_size = 4
shards = 4
lr = 5e-3
min_lr = 1e-3
warmup_steps = 5
[eval]
every = 0
batches = 1
[checkpoint]
every = 0
"#;

/// The small run under a recipe, with `key=value` changes.
pub fn small(recipe: &str, changes: &[&str]) -> Config {
    configured(EXPERTS, recipe, changes)
}

/// The small run of a dense model.
pub fn dense(recipe: &str, changes: &[&str]) -> Config {
    configured(MLPS, recipe, changes)
}

/// The small run with a layer with experts behind a dense one.
pub fn mixed(recipe: &str, changes: &[&str]) -> Config {
    small(recipe, &[&FIRST_DENSE[..], changes].concat())
}

/// Widths that transforms of 128 divide, of attention and of what stands between attentions; and a rate with which so wide a model learns in BF16.
pub const WIDE: [&str; 4] = ["model.d_model=128", "model.kv_heads=2", "model.head_dim=64", "train.lr=2e-3"];
/// See [`WIDE`].
pub const WIDE_EXPERTS: [&str; 2] = ["model.expert_ffn=64", "model.shared_ffn=64"];
/// See [`WIDE`].
const WIDE_MLPS: [&str; 1] = ["model.ffn=128"];

/// Whether a shipped recipe has transforms that do not divide the small run's widths.
pub fn wants_width(recipe: &str) -> bool {
    let transforms = |recipe: Recipe| {
        let sections = LayerKind::ALL.map(|kind| *recipe.of(kind));
        sections
            .into_iter()
            .flat_map(|of| [Product::Fprop, Product::Dgrad].map(|product| of.transform(product)))
    };
    Recipe::builtin(recipe).is_ok_and(|recipe| transforms(recipe).flatten().any(|of| of.len > 32))
}

fn configured(feed: &str, recipe: &str, changes: &[&str]) -> Config {
    let text = SMALL.replace("# feed", feed);
    let mut overrides = vec![format!("recipe={recipe}")];
    if wants_width(recipe) {
        let between: &[&str] = if feed == MLPS { &WIDE_MLPS } else { &WIDE_EXPERTS };
        overrides.extend(WIDE.iter().chain(between).map(|width| (*width).to_owned()));
    }
    overrides.extend(changes.iter().map(|c| (*c).to_owned()));
    let mut config = Config::from_text(&text, Path::new("small.toml"), &overrides).unwrap();
    // Few tokens are unlike a balanced share; what happens without room has tests of its own.
    config.run.capacity_factor = 100.0;
    config
}

/// Tells nobody what a run does.
pub struct Silent;

impl Observer for Silent {
    fn start(&mut self, _: &Start<'_>) {}
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, _: &Metrics) {}
    fn evaluation(&mut self, _: u64, _: Option<f64>) {}
    fn checkpoint(&mut self, _: &Path) {}
}

/// What a run ended with, over all ranks.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Loss of each step.
    pub losses: Vec<f64>,
    /// Gradient norm of each step.
    pub norms: Vec<f64>,
    /// Every parameter; experts one after the other, whichever rank had them.
    pub weights: Vec<(String, Vec<f32>)>,
}

impl Outcome {
    /// Asserts that another run gave the same bits.
    #[track_caller]
    pub fn assert_same(&self, other: &Outcome, what: &str) {
        for (step, (a, b)) in self.losses.iter().zip(&other.losses).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "{what}: loss of step {}: {a} and {b}", step + 1);
        }
        for (step, (a, b)) in self.norms.iter().zip(&other.norms).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "{what}: gradient norm of step {}: {a} and {b}", step + 1);
        }
        assert_eq!(self.losses.len(), other.losses.len(), "{what}: steps");
        assert_eq!(self.weights.len(), other.weights.len(), "{what}: parameters");
        for ((name, a), (other_name, b)) in self.weights.iter().zip(&other.weights) {
            assert_eq!(name, other_name, "{what}");
            assert_eq!(a.len(), b.len(), "{what}: {name}");
            let differ = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differ, 0, "{what}: {differ} of {} values of {name} differ", a.len());
        }
    }
}

/// A parameter as one rank has it.
struct Part {
    name: String,
    divided: bool,
    values: Vec<f32>,
}

/// Trains for `steps` on one rank.
fn train_rank<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    config: &Config,
    steps: u64,
) -> (Vec<f64>, Vec<f64>, Vec<Part>) {
    let mut trainer = Trainer::new(b, mesh, config).unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for _ in 0..steps {
        let metrics = trainer.train_step().unwrap();
        losses.push(metrics.loss.unwrap());
        norms.push(metrics.grad_norm.unwrap());
    }
    let parts = trainer.model().params().into_iter().map(|p| Part {
        name: p.name.clone(),
        divided: p.placement != Placement::Replicated,
        values: p.gathered(b, mesh, &p.master).unwrap().to_f32_vec(b).unwrap(),
    });
    (losses, norms, parts.collect())
}

/// Trains for `steps` on one rank, on any backend.
pub fn train_alone<B: Kernels>(b: &B, config: &Config, steps: u64) -> Outcome {
    let (losses, norms, parts) = train_rank(b, Mesh::new(&SOLO), config, steps);
    Outcome { losses, norms, weights: parts.into_iter().map(|p| (p.name, p.values)).collect() }
}

/// The bits of every weight and both its moments, of the rows that this rank keeps; no moments before the first step.
pub fn state<B: Kernels>(b: &B, trainer: &mut Trainer<'_, B>) -> Vec<(String, Vec<u32>)> {
    bits_of(trainer, |_, kept| kept.to_f32_vec(b).unwrap())
}

/// The same of all rows, and of this rank's experts.
pub fn state_on<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    trainer: &mut Trainer<'_, B>,
) -> Vec<(String, Vec<u32>)> {
    bits_of(trainer, |param, kept| param.gathered(b, mesh, kept).unwrap().to_f32_vec(b).unwrap())
}

fn bits_of<B: Kernels>(
    trainer: &mut Trainer<'_, B>,
    values: impl Fn(&Param<B>, &Tensor<B>) -> Vec<f32>,
) -> Vec<(String, Vec<u32>)> {
    let params = trainer.model().params().into_iter().map(|param| {
        let mut kept = vec![&param.master];
        kept.extend(param.moments.iter().flat_map(|moments| [&moments.exp_avg, &moments.exp_avg_sq]));
        let bits = kept.into_iter().flat_map(|kept| values(param, kept)).map(f32::to_bits);
        (param.name.clone(), bits.collect())
    });
    params.collect()
}

/// `fp8-flow` with gradients rounded stochastically, in dense layers, on the wire, between an expert's products, and in the head, of which wgrad is
/// also transformed.
pub const STOCHASTIC: &str = r#"
    extends = "fp8-flow"
    [linear]
    dgrad.dy = { format = "e4m3", scale = "rceil", round = "stochastic" }
    wgrad.dy = { format = "e4m3", scale = "rceil", round = "stochastic" }
    [expert]
    dispatch.bwd = { format = "e4m3", scale = "rceil", round = "stochastic" }
    dgrad.dy = { format = "e4m3", scale = "rceil", round = "stochastic" }
    dgrad.dh = { format = "e4m3", scale = "rceil", round = "stochastic" }
    wgrad.dh = { format = "e4m3", scale = "rceil", round = "stochastic" }
    [head]
    dgrad.dy = { format = "e4m3", scale = "rceil", round = "stochastic" }
    wgrad.dy = { format = "mxfp4", round = "stochastic" }
    wgrad.x = { format = "mxfp4" }
    wgrad.rht = { len = 32, signs = "step" }
"#;

/// A run under a recipe that is a file; the folder lives as long as the test needs it.
pub fn with_recipe(text: &str, changes: &[&str]) -> (Config, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    std::fs::write(&path, text).unwrap();
    (small(path.to_str().unwrap(), changes), dir)
}

/// Trains for `steps` with `world` ranks as threads, each on a backend of its own; experts divided among all of them.
pub fn train(config: &Config, world: usize, steps: u64, cpu: impl Fn() -> Cpu + Sync) -> Outcome {
    train_mesh(config, MeshShape { dp: 1, ep: world }, steps, cpu)
}

/// The same on a mesh.
pub fn train_mesh(config: &Config, mesh: MeshShape, steps: u64, cpu: impl Fn() -> Cpu + Sync) -> Outcome {
    let ranks = on_mesh(mesh, |mesh| train_rank(&cpu(), mesh, config, steps));
    let mut ranks = ranks.into_iter().enumerate();
    let (_, (losses, norms, mut parts)) = ranks.next().unwrap();
    let mut experts: Vec<Vec<f32>> = parts.iter().map(|part| part.values.clone()).collect();
    for (rank, (other_losses, other_norms, other)) in ranks {
        assert_eq!(losses, other_losses, "every rank reports the same losses");
        assert_eq!(norms, other_norms, "every rank reports the same gradient norms");
        let (dp_rank, ep_rank) = mesh.place(rank);
        for ((part, experts), more) in parts.iter().zip(&mut experts).zip(other) {
            if !part.divided {
                assert_eq!(part.values, more.values, "every rank has the same {}", part.name);
            } else if dp_rank == 0 {
                experts.extend(more.values);
            } else {
                let first = ep_rank * more.values.len();
                assert_eq!(
                    experts[first..][..more.values.len()],
                    more.values,
                    "replicas agree on {}",
                    part.name
                );
            }
        }
    }
    parts.iter_mut().zip(experts).for_each(|(part, experts)| part.values = experts);
    Outcome { losses, norms, weights: parts.into_iter().map(|p| (p.name, p.values)).collect() }
}

/// Settings for a text in this folder of which fifteen sequences and a part of one are held out.
pub fn few_held_out(dir: &Path) -> [String; 2] {
    let text = dir.join("text.txt");
    std::fs::write(&text, (0..8_100u32).map(|i| b'a' + (i * i % 23) as u8).collect::<Vec<_>>()).unwrap();
    [format!("data.source={}", text.display()), "data.valid_fraction=0.25".to_owned()]
}

/// Every mesh of up to four ranks.
pub const FOUR_RANKS: [MeshShape; 6] = [
    MeshShape::ONE,
    MeshShape { dp: 1, ep: 2 },
    MeshShape { dp: 2, ep: 1 },
    MeshShape { dp: 1, ep: 4 },
    MeshShape { dp: 2, ep: 2 },
    MeshShape { dp: 4, ep: 1 },
];

/// What the small run needs on all of these: an expert's rows in as many parts as there may be replicas.
pub const FOUR_PARTS: &str = "train.expert_shards=4";

/// What every rank of a mesh of threads returns, in order.
pub fn on_mesh<R: Send>(mesh: MeshShape, rank: impl Fn(Mesh<'_, Cpu>) -> R + Sync) -> Vec<R> {
    on_axes(mesh, |axes| rank(axes.mesh()))
}

/// Normal numbers, a function of their name.
pub fn normals(name: &str, len: usize) -> Vec<f32> {
    let stream = Stream::new(11, Purpose::Data, fnv1a32(name), 0);
    (0..len as u64).map(|i| stream.normal_at(i)).collect()
}

/// A matrix of normal numbers, rounded to `dtype`.
pub fn matrix(cpu: &Cpu, name: &str, (rows, cols): (usize, usize), dtype: DType) -> Tensor<Cpu> {
    let x = Tensor::from_f32(cpu, &normals(name, rows * cols), rows, cols).unwrap();
    nibble_core::ops::Cast { x: &x, dtype }.run(cpu).unwrap()
}

/// One rank.
pub static SOLO: SoloComm = SoloComm;

/// The context of a training pass on one rank, with so many shards of `rows_each` tokens.
pub fn cx<'a>(cpu: &'a Cpu, recipe: &'a Recipe, shards: usize, rows_each: usize) -> Cx<'a, Cpu> {
    rank_cx(cpu, &SOLO, recipe, shards, rows_each)
}

/// The context of a training pass on one of several ranks.
pub fn rank_cx<'a>(
    cpu: &'a Cpu,
    comm: &'a dyn Comm<Cpu>,
    recipe: &'a Recipe,
    shards: usize,
    rows_each: usize,
) -> Cx<'a, Cpu> {
    let shards = Shards::new(cpu, shards, rows_each, comm.rank()).unwrap();
    Cx { training: true, seed: 3, ..Cx::inference(cpu, Mesh::new(comm), recipe, shards, 0.0) }
}
