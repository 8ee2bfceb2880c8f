//! A run's configuration: one TOML file, with dotted overrides. The configuration is checked as a whole and can be printed in full.
//!
//! ```toml
//! recipe = "mxfp4-hopper"
//! [train]
//! steps = 400
//! ```
//!
//! Every key has a default ([`Config::default`]). Every unknown key is an error that names the key, the file and the line. The origin of a
//! value is remembered until the value has been validated. So an error such as "32 is not a multiple of 5" names the file and the line of
//! the value 32.

mod absent;
mod activation;
mod asked;
mod combine;
mod data;
mod device;
mod foreign;
mod images;
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
use crate::recompute::Recompute;
use crate::schedule::{Schedule, ScheduleKind};
use nibble_choice::routing::MOST_TREE_SLOTS;
use nibble_core::{DType, DeviceKind, MeshShape, Recipe};

pub(crate) use absent::absent;
pub use activation::{Activation, NormKind};
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

/// All settings that determine a run. On one kind of device, two runs with equal configurations and equal data end with equal weights. The
/// settings in `run` may differ between the two runs. The exception is `run.reductions = "nccl"`, which is not reproducible. GEMMs on a GPU
/// and on the CPU give results that differ in the last bits. For equal weights, the value of `train.combine` that [`Config::begun_on`] sets
/// must also be equal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Precision recipe: a built-in name, or the path of a TOML file.
    pub recipe: String,
    /// Seed of all random numbers of the run: initialisation, data order, stochastic rounding.
    pub seed: u64,
    /// The model's shape and its losses.
    pub model: ModelConfig,
    /// The source of the tokens.
    pub data: DataConfig,
    /// Steps, batch size and optimizer.
    pub train: TrainConfig,
    /// The evaluation on held-out data.
    pub eval: EvalConfig,
    /// How often checkpoints are written and how many are kept on disk.
    pub checkpoint: CheckpointConfig,
    /// The run's output folder and hardware. The settings in `run` do not change what a run computes. Only two settings in `run` change the
    /// last bits of results: the device (in GEMMs) and `reductions = "nccl"` (in sums).
    pub run: RunConfig,
    /// The tokenizer, after it has been opened.
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

/// Whether the value is the default. Stored configurations omit such values, as earlier versions without the key did.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Steps, batch size and optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Weights to start from: a Hugging Face model folder, a run, or a checkpoint of a run. The source of the weights also determines the
    /// keys of `[model]`, except the keys of losses and positions. The optimizer state starts at zero, unless `init_state` is `all`. If
    /// `init_from` is empty, the weights are random.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub init_from: String,
    /// What the run takes from the checkpoint in `init_from`. With `weights`, the run takes only the weights. With `all`, the run also
    /// takes the optimizer state, the step and the position in the data. With `all`, the run continues the run of the checkpoint under
    /// another recipe or other settings.
    #[serde(skip_serializing_if = "is_default")]
    pub init_state: InitState,
    /// Number of optimizer steps of the whole run.
    pub steps: u64,
    /// Number of sequences of a micro-batch, over all ranks.
    pub batch_size: usize,
    /// Number of micro-batches of a step.
    pub grad_accum: usize,
    /// Number of shards into which a micro-batch is divided. The partial sums of the shards are added along a binary tree. The results of
    /// training do not depend on the number of ranks, which must divide `shards`.
    pub shards: usize,
    /// Number of shards into which a micro-batch is divided for the experts' gradients: a power of two that is a multiple of `run.dp`. The
    /// gradients of the shards are added along a binary tree. The results of training depend on `expert_shards`, but not on the number of
    /// ranks.
    #[serde(skip_serializing_if = "is_one")]
    pub expert_shards: usize,
    /// How the output rows of a token's experts are summed. With `slots`, rows are summed in slot order and rounded once. With `tree`, rows
    /// are summed along a binary tree over the experts and rounded at each node. With `tree`, each rank sends only one row per token. The
    /// results of training depend on `combine`, but not on the number of ranks. If `combine` is unset, the run chooses `tree` if experts
    /// are sharded over GPUs, otherwise `slots`. A run in which `combine` is unset stores the chosen value at its start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combine: Option<Combine>,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate of the last step.
    pub min_lr: f64,
    /// Number of steps of the linear warm-up of the learning rate.
    pub warmup_steps: u64,
    /// The learning-rate schedule: `cosine` or `wsd`.
    pub schedule: ScheduleKind,
    /// Fraction of the steps during which `wsd` decays the learning rate.
    pub decay_fraction: f64,
    /// AdamW's decoupled weight decay.
    pub weight_decay: f64,
    /// AdamW's β₁.
    pub beta1: f64,
    /// AdamW's β₂.
    pub beta2: f64,
    /// AdamW's ε.
    pub eps: f64,
    /// Global gradient norm above which gradients are clipped; 0 means no clipping.
    pub clip_norm: f64,
    /// The amount by which each step changes an expert's bias under `model.router_bias` ([arXiv
    /// 2408.15664](https://arxiv.org/abs/2408.15664)). An expert's bias rises if the expert received fewer token slots than the mean, and
    /// falls if the expert received more. 0 means constant biases.
    #[serde(skip_serializing_if = "is_usual_bias_rate")]
    pub router_bias_rate: f64,
    /// Whether training tokens are assigned to experts round-robin, regardless of the router, for speed measurements. All experts get
    /// equally many tokens if the number of experts divides the number of tokens of a shard. The setting is meant for speed measurements
    /// only.
    #[serde(skip_serializing_if = "is_default")]
    pub force_load_balance: bool,
    /// Type of weight gradients: `f32`, or `bf16` at half the size. A `bf16` gradient is rounded once per micro-batch and accumulated in
    /// F32. Gradients of embeddings and norms stay F32 if they are accumulated more than once per step.
    pub grad_dtype: PlainType,
    /// Type of AdamW's moments: `f32`, or `bf16` at half the size.
    pub moment_dtype: PlainType,
    /// Activations that the backward pass recomputes instead of reading saved copies. The value is a list of `norms`, `swiglu`,
    /// `expert_input`, `mla_up`, `mlp_up`, `attention`, `mlp`, `experts`, `layers`. A suffix limits a scope to some decoder layers:
    /// `experts@first:8` recomputes experts in the first 8 decoder layers only. Recomputation needs less memory and more time, and gives
    /// the same bits.
    pub recompute: Recompute,
    /// Number of steps between measurements of quantization; 0 means no measurements. A measurement counts the fractions of values that
    /// stay exact, become zero, or are clipped. Each measurement covers about four layers, and successive measurements take the layers in
    /// turn. Measurements change no bit of the run's results, but make the measured steps slower.
    #[serde(skip_serializing_if = "is_default")]
    pub quantization_every: u64,
}

impl TrainConfig {
    /// Whether step `step`, counted from 0, measures quantization.
    #[must_use]
    pub fn measures_in(&self, step: u64) -> bool {
        self.quantization_every > 0 && (step + 1).is_multiple_of(self.quantization_every)
    }

    /// The steps that measure quantization. The sequence is lazy, because a run may have too many steps to list.
    pub fn measured_steps(&self) -> impl Iterator<Item = u64> + '_ {
        let every = self.quantization_every;
        let last_ones = (1u64..).map_while(move |turn| every.checked_mul(turn)?.checked_sub(1));
        last_ones.take_while(|step| *step < self.steps)
    }
}

/// What a run takes from the checkpoint that it starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InitState {
    /// The weights. The optimizer state is zero, and training starts at step 0.
    #[default]
    Weights,
    /// The weights, the moments, the amax histories of delayed scales, the step and the position in the data.
    All,
}

/// A floating-point type without scales, as written in a configuration.
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
            init_state: InitState::default(),
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
            recompute: Recompute::default(),
            quantization_every: 0,
        }
    }
}

/// The evaluation on held-out data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// Number of steps between evaluations; 0 means one evaluation, at the end of the run.
    pub every: u64,
    /// Number of batches of an evaluation during the run; 0 means all held-out data. Each batch has 16 sequences, regardless of
    /// `train.batch_size`. The last evaluation always uses all held-out data.
    pub batches: usize,
    /// Paths of files with multiple-choice questions that every evaluation also scores.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<String>,
    /// Whether a question begins with the BOS token. The setting has an effect only if texts begin with BOS (`data.bos_token`).
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

/// How often checkpoints are written and how many are kept on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Number of steps between checkpoints; 0 means no checkpoint during the run.
    pub every: u64,
    /// Number of the newest checkpoints that stay on disk; 0 means that all checkpoints stay.
    pub keep: usize,
    /// Number of recorded spikes ([`crate::spikes`]), counted from the newest, for which the checkpoint before the spike also stays on
    /// disk; 0 means none.
    #[serde(skip_serializing_if = "is_one")]
    pub keep_spikes: usize,
    /// Whether the run writes a checkpoint at its end.
    pub at_end: bool,
    /// Size in GiB of the host memory that buffers checkpoints between device and disk. The ranks of a host share the buffer memory
    /// equally. With a GPU, the buffer memory is page-locked and stays allocated until the run ends. If a checkpoint fits into the buffer
    /// memory, the checkpoint is copied while the next step computes. A checkpoint that exceeds the buffer memory delays the optimizer of
    /// the next step until the rest of the checkpoint has been written to disk.
    pub host_gib: usize,
    /// Upper limit of the size of a tensor file in MiB; 0 means one file for all tensors. A tensor that is larger than `file_mib` has a
    /// file of its own.
    #[serde(skip_serializing_if = "is_usual_file")]
    pub file_mib: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 100, keep: 2, keep_spikes: 1, at_end: true, host_gib: 16, file_mib: USUAL_FILE_MIB }
    }
}

/// The run's output folder and hardware.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Directory for the run's metrics, checkpoints and plot. If `dir` is empty, the directory is `runs/NAME`, where NAME is the
    /// configuration's name.
    pub dir: String,
    /// The device of the run: `cpu`, `cuda`, `cuda:N` or `auto`. `cuda` means one Hopper GPU for each rank, and `cuda:N` means the GPU with
    /// index N in the driver. `auto` means Hopper GPUs if there are enough, otherwise the CPU. GEMMs on a GPU and on the CPU give results
    /// that differ in the last bits.
    pub device: DeviceChoice,
    /// Number of ranks, which must divide `train.shards`. Ranks are threads of one process, or processes if a launcher starts that many.
    /// Each rank has its own GPU, or all ranks are on the CPU. The tokens of a batch are sharded over all ranks, and the experts of a layer
    /// are sharded over `ranks / dp` ranks.
    pub ranks: usize,
    /// Number of replicas of each expert, which must divide `ranks` and `train.expert_shards`. If `dp` is 1, each expert is on one rank
    /// only.
    #[serde(skip_serializing_if = "is_one")]
    pub dp: usize,
    /// With expert parallelism, the number of token slots that fit into a rank, as a multiple (at least 1) of the slots that the rank gets
    /// under balanced routing. No token is dropped. If the slots of a rank overflow, the step is repeated with larger capacity and gives
    /// the same bits.
    #[serde(skip_serializing_if = "is_usual_capacity")]
    pub capacity_factor: f64,
    /// How gradients are summed over ranks. With `tree`, the order of the summation does not depend on the number of ranks or on the kind
    /// of device. With `nccl`, which works on GPUs only, the order depends on NCCL's version, the GPUs and their links. With `nccl`, the
    /// bits of a run are not reproducible on another machine.
    #[serde(skip_serializing_if = "is_default")]
    pub reductions: Reductions,
    /// Number of worker threads over all ranks; 0 means one thread per core.
    pub threads: usize,
    /// Number of steps between lines on the console. The metrics file always contains every step.
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

/// How gradients are summed over ranks, as written in a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reductions {
    /// A balanced binary tree over the ranks, which is the same on every device.
    #[default]
    Tree,
    /// A reduction by NCCL, which is not bit-reproducible.
    Nccl,
}

impl RunConfig {
    /// The number of ranks along each axis of the device mesh. The caller must have validated the configuration.
    #[must_use]
    pub fn mesh(&self) -> MeshShape {
        MeshShape { dp: self.dp, ep: self.ranks / self.dp.max(1) }
    }
}

/// The default of [`CheckpointConfig::file_mib`]. Stored configurations omit this value.
const USUAL_FILE_MIB: usize = 5120;

fn is_usual_file(mib: &usize) -> bool {
    *mib == USUAL_FILE_MIB
}

/// The default of [`TrainConfig::router_bias_rate`]. Stored configurations omit this value.
const USUAL_BIAS_RATE: f64 = 1e-3;

fn is_usual_bias_rate(rate: &f64) -> bool {
    *rate == USUAL_BIAS_RATE
}

/// The default of [`RunConfig::capacity_factor`]. Stored configurations omit this value.
const USUAL_CAPACITY: f64 = 1.25;

fn is_usual_capacity(factor: &f64) -> bool {
    *factor == USUAL_CAPACITY
}

/// Whether the value is 1. Stored configurations omit this value.
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

    /// The configuration with which a run starts on devices of this kind. The returned configuration has a value for `train.combine`. If
    /// experts are sharded over GPUs, `train.combine` is `tree`, because sending one row per token slot would dominate the traffic.
    /// `train.combine` is `slots` instead if `top_k` exceeds the limit of the GPU's tree sum, or if the recipe quantizes the rows that
    /// experts return.
    #[must_use]
    pub fn begun_on(&self, kind: DeviceKind, recipe: &Recipe) -> Self {
        let mut begun = self.clone();
        if kind == DeviceKind::Gpu && self.model.experts > 0 && self.run.mesh().ep > 1 {
            let has_tree = self.model.top_k <= MOST_TREE_SLOTS && recipe.quantized_combine().is_none();
            begun.train.combine.get_or_insert(if has_tree { Combine::Tree } else { Combine::Slots });
        }
        begun
    }

    /// The configuration with which to resume a run that began with the configuration `earlier`. For each setting that `self` leaves unset,
    /// the result has the value of `earlier`.
    #[must_use]
    pub fn going_on_from(&self, earlier: &Self) -> Self {
        let mut now = self.clone();
        now.train.combine = now.train.combine.or(earlier.train.combine);
        if now.train.init_from.is_empty() {
            now.train.init_from.clone_from(&earlier.train.init_from);
            now.train.init_state = earlier.train.init_state;
        }
        now
    }

    /// Number of positions of the model: the largest number of tokens of a sequence, also in generation.
    #[must_use]
    pub fn positions(&self) -> usize {
        if self.model.max_positions == 0 { self.data.seq_len } else { self.model.max_positions }
    }

    /// Number of sequences of one optimizer step. Each step advances the data cursor by this number of sequences.
    #[must_use]
    pub fn sequences_per_step(&self) -> u64 {
        (self.train.batch_size * self.train.grad_accum) as u64
    }

    /// Number of tokens of one optimizer step.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.sequences_per_step() * self.data.seq_len as u64
    }

    /// Whether the tokens come from the built-in language.
    #[must_use]
    pub fn is_synthetic(&self) -> bool {
        self.data.source == SYNTHETIC
    }

    /// Whether the tokens come from files of text or of token ids.
    #[must_use]
    pub fn is_text(&self) -> bool {
        !self.has_own_tokens()
    }

    /// The complete configuration as TOML. Keys are in a fixed order, so equal configurations give equal text. Loading the TOML text gives
    /// the same configuration again.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if a number has no TOML form. [`Config::validate`] also refuses numbers without a TOML form.
    pub fn resolved_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::config("", e.to_string()))
    }
}
