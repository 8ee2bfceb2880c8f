//! A run's configuration: one TOML file, dotted overrides on top, checked as a whole, printed in full.
//!
//! ```toml
//! recipe = "mxfp4-hopper"
//! [train]
//! steps = 400
//! ```
//!
//! Every key has a default ([`Config::default`]), every unknown key is an error that names the key, the file and the
//! line. Where a value comes from is remembered until it has been validated, so that "32 is not a multiple of 5" says
//! in which line of which file the 32 stands.

mod absent;
mod asked;
mod combine;
mod data;
mod device;
mod foreign;
mod init;
mod load;
mod meaning;
mod model;
mod preset;
mod qk_norm;
mod require;
mod rope_scaling;
mod routing;
mod tokens;
mod validate;
mod values;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::recompute::Scope;
use crate::schedule::{Schedule, ScheduleKind};
use nibble_choice::routing::MOST_TREE_SLOTS;
use nibble_core::{DType, DeviceKind, MeshShape, Recipe};

pub(crate) use absent::absent;
pub use combine::Combine;
pub(crate) use data::USUAL_TEXT_KEY;
pub use data::{DataConfig, MIXTURE, MixtureSource, OnError, RANDOM, SYNTHETIC};
pub use device::DeviceChoice;
pub(crate) use foreign::in_words_of;
pub use foreign::of_option;
pub(crate) use load::read_text;
pub use meaning::Meaning;
pub use model::{Balance, ModelConfig};
pub use preset::{folder_argument, in_shell, preset, preset_names, published_models, tiny_models};
pub use qk_norm::QkNorm;
pub use rope_scaling::{RopeScaling, RopeScalingKind};
pub use routing::{GroupScore, Scores};
pub use tokens::UNENDED;
pub(crate) use tokens::{Opened, kept_beside};
pub use validate::MOST_THREADS;
pub(crate) use validate::check_model;

/// Everything that decides a run. Two runs with equal configurations and equal data end with equal weights, whatever
/// `run` says (but for `run.reductions = "nccl"`, which keeps no bits), on one kind of device: products on a GPU and on a CPU differ in their last bits. (`train.combine` is equal where it was decided
/// alike: [`Config::begun_on`].)
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Precision recipe: the name of a built-in one, or the path of a TOML file.
    pub recipe: String,
    /// Seed of every random number of the run: initialisation, data order, stochastic rounding.
    pub seed: u64,
    /// The model's shape and its losses.
    pub model: ModelConfig,
    /// Where the tokens come from.
    pub data: DataConfig,
    /// Steps, batch and optimizer.
    pub train: TrainConfig,
    /// Held-out loss.
    pub eval: EvalConfig,
    /// How often checkpoints are written and how many stay.
    pub checkpoint: CheckpointConfig,
    /// Where results go and what the run may use. Nothing here changes what a run means, and no bit of it but for the device's
    /// products.
    pub run: RunConfig,
    /// The tokenizer, once it has been asked for.
    #[serde(skip)]
    pub(crate) opened: Opened,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            recipe: "mxfp4-hopper".into(),
            seed: 0,
            model: ModelConfig::default(),
            data: DataConfig::default(),
            train: TrainConfig::default(),
            eval: EvalConfig::default(),
            checkpoint: CheckpointConfig::default(),
            run: RunConfig::default(),
            opened: Opened::default(),
        }
    }
}

/// What is left out of a stored configuration, as earlier programs did that did not know the key.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Steps, batch and optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Weights to begin with: a folder with a model, as the Hugging Face family of tools writes it, or a run or one of its checkpoints. `[model]` is then
    /// theirs, but for its losses and positions, and the optimizer begins anew. Empty: random weights.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub init_from: String,
    /// Optimizer steps of the whole run.
    pub steps: u64,
    /// Sequences of a micro-batch, over all ranks.
    pub batch_size: usize,
    /// Micro-batches of a step.
    pub grad_accum: usize,
    /// Fixed shards of a micro-batch whose partial sums are added as a tree: the result does not depend on the number
    /// of ranks as long as that divides this.
    pub shards: usize,
    /// Parts of a micro-batch whose gradients of an expert are added as a tree: a power of two that `run.dp` divides. The result depends on it, and not
    /// on the number of ranks.
    #[serde(skip_serializing_if = "is_one")]
    pub expert_shards: usize,
    /// How the rows of a token's experts become one: `slots`, in slot order, rounded once; or `tree`, up a binary tree over the experts,
    /// rounded at each node, of which ranks send one row a token. The result depends on it, and not on the number of ranks. Where it is not
    /// given, a run keeps what it began with: `tree` where experts are divided among GPUs, else `slots`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combine: Option<Combine>,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate of the last step.
    pub min_lr: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// `cosine` or `wsd`.
    pub schedule: ScheduleKind,
    /// Share of the steps that `wsd` spends decaying.
    pub decay_fraction: f64,
    /// AdamW's decoupled weight decay.
    pub weight_decay: f64,
    /// AdamW's β₁.
    pub beta1: f64,
    /// AdamW's β₂.
    pub beta2: f64,
    /// AdamW's ε.
    pub eps: f64,
    /// Largest global gradient norm; 0 = no clipping.
    pub clip_norm: f64,
    /// What each step adds to the bias of an expert that fewer slots chose than the mean, and takes from that of one that more did, where
    /// `model.router_bias` is set; 0 = biases stay ([arXiv 2408.15664](https://arxiv.org/abs/2408.15664)).
    #[serde(skip_serializing_if = "is_usual_bias_rate")]
    pub router_bias_rate: f64,
    /// In training experts take turns, token by token, whatever routers say, as in runs that measure speed: all have as many where their number divides
    /// the tokens of a shard. What is learnt so is of no use.
    #[serde(skip_serializing_if = "is_default")]
    pub force_load_balance: bool,
    /// Type of the gradients of weights: `f32`, or `bf16`, which halves them: rounded once a micro-batch, added in F32. A
    /// table or norm that is added to more than once a step keeps F32.
    pub grad_dtype: PlainType,
    /// Type of AdamW's moments: `f32`, or `bf16`, which halves them.
    pub moment_dtype: PlainType,
    /// What the backward pass makes again instead of finding it kept, a list of `norms`, `swiglu`, `expert_input`, `mla_up`,
    /// `attention`, `experts`, `layers`: less memory, more time, never a bit of the result.
    pub recompute: Vec<Scope>,
    /// Steps between those that count what quantization makes of values: the shares that stay what they are, become zero, or are cut off; 0 = none
    /// does. Each counts in about four layers, the next in others. It changes no bit, and takes time in these steps alone.
    #[serde(skip_serializing_if = "is_default")]
    pub quantization_every: u64,
}

impl TrainConfig {
    /// Whether a step, from 0, is one that counts what quantization makes of values.
    #[must_use]
    pub fn measures_in(&self, step: u64) -> bool {
        self.quantization_every > 0 && (step + 1).is_multiple_of(self.quantization_every)
    }

    /// Those steps, from the first on. A run may have more steps than can be gone through one by one.
    pub fn measured_steps(&self) -> impl Iterator<Item = u64> + '_ {
        let every = self.quantization_every;
        let last_ones = (1u64..).map_while(move |turn| every.checked_mul(turn)?.checked_sub(1));
        last_ones.take_while(|step| *step < self.steps)
    }
}

/// A plain type, as a configuration names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlainType {
    /// IEEE single precision.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
}

impl From<PlainType> for DType {
    fn from(name: PlainType) -> Self {
        match name {
            PlainType::F32 => Self::F32,
            PlainType::Bf16 => Self::Bf16,
        }
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            init_from: String::new(),
            steps: 300,
            batch_size: 16,
            grad_accum: 1,
            shards: 4,
            expert_shards: 1,
            combine: None,
            lr: 3e-3,
            min_lr: 3e-4,
            warmup_steps: 20,
            schedule: ScheduleKind::Cosine,
            decay_fraction: 0.2,
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            clip_norm: 1.0,
            router_bias_rate: USUAL_BIAS_RATE,
            force_load_balance: false,
            grad_dtype: PlainType::F32,
            moment_dtype: PlainType::F32,
            recompute: Scope::DEFAULT.to_vec(),
            quantization_every: 0,
        }
    }
}

/// Held-out loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// Steps between evaluations; 0 = only at the end.
    pub every: u64,
    /// Batches of an evaluation during the run, of 16 sequences each whatever `train.batch_size` is; 0 = all of the held-out data. The last evaluation
    /// always takes all.
    pub batches: usize,
    /// Files of questions with choices that every evaluation scores, too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<String>,
    /// Whether a question begins with the token that texts begin with, where they do (`data.bos_token`).
    #[serde(skip_serializing_if = "is_true")]
    pub add_bos_token: bool,
}

fn is_true(value: &bool) -> bool {
    *value
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { every: 50, batches: 8, tasks: Vec::new(), add_bos_token: true }
    }
}

/// How often checkpoints are written and how many stay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; 0 = none on the way.
    pub every: u64,
    /// How many of the newest stay on disk; 0 = all.
    pub keep: usize,
    /// Whether the run writes one at its end.
    pub at_end: bool,
    /// GiB of the host's memory that values may take on their way from the device to the disk, page-locked where there is a GPU,
    /// kept until the run ends. A checkpoint that fits is copied while the next step computes; a larger one holds that step's
    /// optimizer up, as long as the disk takes for the rest. The ranks of a host have equal shares of it.
    pub host_gib: usize,
    /// MiB of values in a file of tensors, at most; 0 = all in one. A tensor that is larger has a file of its own.
    #[serde(skip_serializing_if = "is_usual_file")]
    pub file_mib: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 100, keep: 2, at_end: true, host_gib: 16, file_mib: USUAL_FILE_MIB }
    }
}

/// Where results go and what the run may use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Directory of metrics, checkpoints and the picture; empty = `runs/NAME` with the configuration's name.
    pub dir: String,
    /// Where to compute: `cpu`; `cuda`, a Hopper GPU for each rank; `cuda:N`, one by the driver's number; or `auto`, such GPUs if there are so
    /// many to use, else the CPU. Sums of products on a GPU and on a CPU differ in their last bits.
    pub device: DeviceChoice,
    /// Ranks, run as threads, each with a GPU of its own or all on the CPU, or as processes where a launcher starts as many; divides `train.shards`. The tokens of a batch are divided among all of them, and the experts of a layer,
    /// where there are any, among `ranks / dp`.
    pub ranks: usize,
    /// Ranks that hold the same experts: with 1 each expert lives on one rank. Divides `ranks` and `train.expert_shards`.
    #[serde(skip_serializing_if = "is_one")]
    pub dp: usize,
    /// Where experts are divided among ranks: how many slots of tokens a rank has room for, as a multiple of its share if all were sent as
    /// many; at least 1. No token is ever dropped: a step in which a rank is sent more is done again with more room, and the same bits.
    #[serde(skip_serializing_if = "is_usual_capacity")]
    pub capacity_factor: f64,
    /// How gradients are summed over ranks: `tree`, in an order that the ranks and their devices do not change; or, on GPUs, `nccl`, by NCCL's own sums, in
    /// an order that depends on its version, the GPUs and how they are joined: the bits of a run are not kept then, from one machine to another.
    #[serde(skip_serializing_if = "is_default")]
    pub reductions: Reductions,
    /// Worker threads over all ranks; 0 = one a core.
    pub threads: usize,
    /// Steps between lines on the console; the metrics file always gets every step.
    pub log_every: u64,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            dir: String::new(),
            device: DeviceChoice::Auto,
            ranks: 1,
            dp: 1,
            capacity_factor: USUAL_CAPACITY,
            reductions: Reductions::default(),
            threads: 0,
            log_every: 10,
        }
    }
}

/// How gradients are summed over ranks, as a configuration names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reductions {
    /// By a balanced tree over the ranks, the same on every device.
    #[default]
    Tree,
    /// By NCCL, which does not keep bits.
    Nccl,
}

impl RunConfig {
    /// How many ranks there are along each axis; of a valid configuration.
    #[must_use]
    pub fn mesh(&self) -> MeshShape {
        MeshShape { dp: self.dp, ep: self.ranks / self.dp.max(1) }
    }
}

/// [`CheckpointConfig::file_mib`] where it is not given. Stored configurations leave it out.
const USUAL_FILE_MIB: usize = 5120;

fn is_usual_file(mib: &usize) -> bool {
    *mib == USUAL_FILE_MIB
}

/// [`TrainConfig::router_bias_rate`] where it is not given. Stored configurations leave it out.
const USUAL_BIAS_RATE: f64 = 1e-3;

fn is_usual_bias_rate(rate: &f64) -> bool {
    *rate == USUAL_BIAS_RATE
}

/// [`RunConfig::capacity_factor`] where it is not given. Stored configurations leave it out.
const USUAL_CAPACITY: f64 = 1.25;

fn is_usual_capacity(factor: &f64) -> bool {
    *factor == USUAL_CAPACITY
}

/// Stored configurations leave it out.
fn is_one<T: From<u8> + PartialEq>(n: &T) -> bool {
    *n == T::from(1)
}

impl Config {
    /// The learning-rate schedule.
    #[must_use]
    pub fn schedule(&self) -> Schedule {
        let t = &self.train;
        Schedule {
            kind: t.schedule,
            lr: t.lr,
            min_lr: t.min_lr,
            warmup_steps: t.warmup_steps,
            steps: t.steps,
            decay_fraction: t.decay_fraction,
        }
    }

    /// The configuration of a run that begins on devices of this kind, and that keeps what is decided now: rows are summed up a tree where
    /// experts are divided among GPUs, between which a row a slot would be most of what travels; as slots, where a token has more of them than a
    /// GPU sums up a tree, or where the recipe has them travel back in blocks.
    #[must_use]
    pub fn begun_on(&self, kind: DeviceKind, recipe: &Recipe) -> Self {
        let mut begun = self.clone();
        if kind == DeviceKind::Gpu && self.model.experts > 0 && self.run.mesh().ep > 1 {
            let has_tree = self.model.top_k <= MOST_TREE_SLOTS && recipe.quantized_combine().is_none();
            begun.train.combine.get_or_insert(if has_tree { Combine::Tree } else { Combine::Slots });
        }
        begun
    }

    /// The configuration under which a run goes on that began with `earlier`: what is not asked for stays.
    #[must_use]
    pub fn going_on_from(&self, earlier: &Self) -> Self {
        let mut now = self.clone();
        now.train.combine = now.train.combine.or(earlier.train.combine);
        if now.train.init_from.is_empty() {
            now.train.init_from.clone_from(&earlier.train.init_from);
        }
        now
    }

    /// Positions that the model has: as many tokens may be generated one after the other.
    #[must_use]
    pub fn positions(&self) -> usize {
        if self.model.max_positions == 0 { self.data.seq_len } else { self.model.max_positions }
    }

    /// Sequences of one optimizer step: how far the data cursor moves.
    #[must_use]
    pub fn sequences_per_step(&self) -> u64 {
        (self.train.batch_size * self.train.grad_accum) as u64
    }

    /// Tokens of one optimizer step.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.sequences_per_step() * self.data.seq_len as u64
    }

    /// Whether the tokens come from the built-in language.
    #[must_use]
    pub fn is_synthetic(&self) -> bool {
        self.data.source == SYNTHETIC
    }

    /// Whether the tokens come from a text.
    #[must_use]
    pub fn is_text(&self) -> bool {
        !self.has_own_tokens()
    }

    /// The complete configuration as TOML: every key, in a fixed order, so that equal configurations give equal text.
    /// Loading this text gives the same configuration back.
    ///
    /// # Errors
    /// [`Error::Config`] where a number has no TOML form, which [`Config::validate`] refuses too.
    pub fn resolved_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::config("", e.to_string()))
    }
}
