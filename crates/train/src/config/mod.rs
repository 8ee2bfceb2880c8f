//! A run's configuration: one TOML file, dotted overrides on top, checked as a whole, printed in full.
//!
//! ```toml
//! recipe = "mxfp4-hopper"
//! [train]
//! steps = 400
//! ```
//!
//! Every key has a default ([`Config::default`]), every unknown key is an error that names the key, the file and the
//! line. The origin of a value is remembered until it has been validated, so that "32 is not a multiple of 5" names
//! the file and the line of the 32.

mod absent;
mod asked;
mod combine;
mod data;
mod device;
mod foreign;
mod init;
mod layer_attention;
mod load;
mod meaning;
mod model;
mod preset;
mod qk_norm;
mod require;
mod rope_scaling;
mod routing;
mod sliding;
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
pub use layer_attention::LayerAttention;
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

/// Everything that decides a run. On one kind of device, two runs with equal configurations and equal data end with equal weights whatever
/// `run` says, except under `run.reductions = "nccl"`. GPU and CPU products differ in their last bits. (`train.combine` must have resolved
/// to the same value: [`Config::begun_on`].)
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Precision recipe: a built-in name, or the path of a TOML file.
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
    /// How often checkpoints are written and how many are kept.
    pub checkpoint: CheckpointConfig,
    /// Where results go and what hardware the run may use. Nothing here changes the computation; bits change only with
    /// the device (products) and `reductions = "nccl"` (sums).
    pub run: RunConfig,
    /// The tokenizer, once it has been opened.
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

/// Omitted from a stored configuration, as by earlier versions that did not have the key.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Steps, batch and optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Weights to start from: a folder with a Hugging Face model, a run, or one of its checkpoints. `[model]` is then taken from there,
    /// except its losses and positions, and the optimizer state starts at zero. Empty: random weights.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub init_from: String,
    /// Optimizer steps of the whole run.
    pub steps: u64,
    /// Sequences of a micro-batch, over all ranks.
    pub batch_size: usize,
    /// Micro-batches of a step.
    pub grad_accum: usize,
    /// Fixed shards of a micro-batch, whose partial sums are added as a binary tree: the result does not depend on the number of ranks if
    /// that number divides this one.
    pub shards: usize,
    /// Fixed shards of a micro-batch for experts' gradients, which are added as a binary tree: a power of two that `run.dp` divides. The
    /// result depends on this number, not on the number of ranks.
    #[serde(skip_serializing_if = "is_one")]
    pub expert_shards: usize,
    /// How the rows of a token's experts are summed: `slots`, in slot order, rounded once; or `tree`, along a binary tree over the experts,
    /// rounded at each node, so that each rank sends one row per token. The result depends on this choice, not on the number of ranks. If
    /// unset, the run decides at its start and keeps it: `tree` where experts are sharded over GPUs, else `slots`.
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
    /// Fraction of the steps that `wsd` spends decaying.
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
    /// Step by which an expert's bias rises if fewer slots than the mean chose it, and falls if more did, under `model.router_bias`; 0 =
    /// biases are constant ([arXiv 2408.15664](https://arxiv.org/abs/2408.15664)).
    #[serde(skip_serializing_if = "is_usual_bias_rate")]
    pub router_bias_rate: f64,
    /// Assigns training tokens to experts round-robin, whatever the router says, to measure speed: loads are equal if the number of experts
    /// divides a shard's tokens. Such training is of no other use.
    #[serde(skip_serializing_if = "is_default")]
    pub force_load_balance: bool,
    /// Type of weight gradients: `f32`, or `bf16` at half the size, rounded once per micro-batch and accumulated in F32. Gradients of
    /// embeddings and norms that are accumulated more than once a step stay F32.
    pub grad_dtype: PlainType,
    /// Type of AdamW's moments: `f32`, or `bf16` at half the size.
    pub moment_dtype: PlainType,
    /// What the backward pass recomputes instead of saving, a list of `norms`, `swiglu`, `expert_input`, `mla_up`, `attention`, `experts`,
    /// `layers`: less memory, more time, the same bits.
    pub recompute: Vec<Scope>,
    /// Steps between measurements of quantization: the fractions of values that stay exact, become zero, or are clipped; 0 = none. Each
    /// measurement covers about four layers, in turn. No bit of the run changes; only these steps take longer.
    #[serde(skip_serializing_if = "is_default")]
    pub quantization_every: u64,
}

impl TrainConfig {
    /// Whether step `step`, counted from 0, measures quantization.
    #[must_use]
    pub fn measures_in(&self, step: u64) -> bool {
        self.quantization_every > 0 && (step + 1).is_multiple_of(self.quantization_every)
    }

    /// The steps that measure quantization, as a lazy sequence: a run may have too many steps to list.
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
    /// Batches of an evaluation during the run, each of 16 sequences whatever `train.batch_size` is; 0 = all held-out data. The last
    /// evaluation always uses all of it.
    pub batches: usize,
    /// Multiple-choice question files that every evaluation also scores.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<String>,
    /// Whether a question begins with the BOS token if texts do (`data.bos_token`).
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

/// How often checkpoints are written and how many are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; 0 = none during the run.
    pub every: u64,
    /// How many of the newest checkpoints stay on disk; 0 = all.
    pub keep: usize,
    /// Whether the run writes a checkpoint at its end.
    pub at_end: bool,
    /// GiB of host memory that buffers checkpoints between device and disk, shared equally by the ranks of a host; page-locked where there
    /// is a GPU, and allocated until the run ends. A checkpoint that fits is copied while the next step computes; a larger one delays that
    /// step's optimizer until the disk has taken the rest.
    pub host_gib: usize,
    /// Largest size of a file of tensors in MiB; 0 = one file for all. A tensor that is larger has its own file.
    #[serde(skip_serializing_if = "is_usual_file")]
    pub file_mib: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 100, keep: 2, at_end: true, host_gib: 16, file_mib: USUAL_FILE_MIB }
    }
}

/// Where results go and what hardware the run may use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Directory of metrics, checkpoints and the plot; empty = `runs/NAME` with the configuration's name.
    pub dir: String,
    /// Where to compute: `cpu`; `cuda`, a Hopper GPU for each rank; `cuda:N`, the GPU with this driver index; or `auto`, such GPUs if there
    /// are enough, else the CPU. GPU and CPU products differ in their last bits.
    pub device: DeviceChoice,
    /// Ranks: threads, each with its own GPU or all on the CPU, or processes where a launcher starts as many; divides `train.shards`. A
    /// batch's tokens are sharded over all ranks, and a layer's experts, if any, over `ranks / dp`.
    pub ranks: usize,
    /// Replicas of each expert; with 1 each expert is on one rank. Divides `ranks` and `train.expert_shards`.
    #[serde(skip_serializing_if = "is_one")]
    pub dp: usize,
    /// With expert parallelism, the capacity of a rank in token slots, as a multiple of its share under balanced routing; at least 1. No
    /// token is dropped: on overflow the step is retried with larger capacity, with the same bits.
    #[serde(skip_serializing_if = "is_usual_capacity")]
    pub capacity_factor: f64,
    /// How gradients are summed over ranks: `tree`, in an order independent of ranks and devices; or, on GPUs, `nccl`, in an order that
    /// depends on NCCL's version, the GPUs and their links, so that a run's bits are not reproducible from one machine to another.
    #[serde(skip_serializing_if = "is_default")]
    pub reductions: Reductions,
    /// Worker threads over all ranks; 0 = one per core.
    pub threads: usize,
    /// Steps between console lines; the metrics file always gets every step.
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
    /// By a balanced binary tree over the ranks, the same on every device.
    #[default]
    Tree,
    /// By NCCL, not bit-reproducible.
    Nccl,
}

impl RunConfig {
    /// The number of ranks along each axis; for a valid configuration.
    #[must_use]
    pub fn mesh(&self) -> MeshShape {
        MeshShape { dp: self.dp, ep: self.ranks / self.dp.max(1) }
    }
}

/// The default of [`CheckpointConfig::file_mib`]. Stored configurations omit it.
const USUAL_FILE_MIB: usize = 5120;

fn is_usual_file(mib: &usize) -> bool {
    *mib == USUAL_FILE_MIB
}

/// The default of [`TrainConfig::router_bias_rate`]. Stored configurations omit it.
const USUAL_BIAS_RATE: f64 = 1e-3;

fn is_usual_bias_rate(rate: &f64) -> bool {
    *rate == USUAL_BIAS_RATE
}

/// The default of [`RunConfig::capacity_factor`]. Stored configurations omit it.
const USUAL_CAPACITY: f64 = 1.25;

fn is_usual_capacity(factor: &f64) -> bool {
    *factor == USUAL_CAPACITY
}

/// Stored configurations omit this value.
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

    /// The configuration of a run that starts on devices of this kind, with `train.combine` decided. With experts sharded over GPUs it
    /// becomes `tree`, since one row per slot would dominate the traffic; but `slots` if `top_k` exceeds the GPU's limit for trees, or the
    /// recipe sends rows back quantized.
    #[must_use]
    pub fn begun_on(&self, kind: DeviceKind, recipe: &Recipe) -> Self {
        let mut begun = self.clone();
        if kind == DeviceKind::Gpu && self.model.experts > 0 && self.run.mesh().ep > 1 {
            let has_tree = self.model.top_k <= MOST_TREE_SLOTS && recipe.quantized_combine().is_none();
            begun.train.combine.get_or_insert(if has_tree { Combine::Tree } else { Combine::Slots });
        }
        begun
    }

    /// The configuration for resuming a run that began with `earlier`: unset choices are taken from there.
    #[must_use]
    pub fn going_on_from(&self, earlier: &Self) -> Self {
        let mut now = self.clone();
        now.train.combine = now.train.combine.or(earlier.train.combine);
        if now.train.init_from.is_empty() {
            now.train.init_from.clone_from(&earlier.train.init_from);
        }
        now
    }

    /// Positions of the model, which limit the length of generated text too.
    #[must_use]
    pub fn positions(&self) -> usize {
        if self.model.max_positions == 0 { self.data.seq_len } else { self.model.max_positions }
    }

    /// Sequences of one optimizer step: how far the data cursor advances.
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

    /// Whether the tokens come from files.
    #[must_use]
    pub fn is_text(&self) -> bool {
        !self.has_own_tokens()
    }

    /// The complete configuration as TOML, with keys in a fixed order, so that equal configurations give equal text. Loading this text
    /// gives the same configuration back.
    ///
    /// # Errors
    /// [`Error::Config`] where a number has no TOML form, which [`Config::validate`] refuses too.
    pub fn resolved_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::config("", e.to_string()))
    }
}
