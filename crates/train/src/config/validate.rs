//! Conditions that the numbers of a configuration must satisfy together.
//!
//! Conditions of a precision recipe on widths (multiples of its block) are not checked here, but where recipe and model are combined.

use super::require::{fail, not_negative, positive, require};
use super::values::settings;
use super::{
    Activation, Balance, Combine, Config, DeviceChoice, InitState, MIXTURE, MixtureSource, ModelConfig,
    QkNorm, RANDOM, SYNTHETIC, ScheduleKind,
};
use crate::data::{BYTE_VOCAB, RECORD_TOKENS, SYNTHETIC_VOCAB};
use crate::error::Result;
use crate::tokenizer::{AUTO, NONE};
use nibble_choice::routing::MOST_TREE_SLOTS;
use nibble_core::DeviceKind;

/// Largest number of layers, which exceeds that of any model. The number is limited because each layer is a separate object, even when only
/// memory is counted.
const MOST_LAYERS: usize = 1 << 12;

/// Largest number of ranks, which exceeds that of any run. The number is limited because the search for divisors takes linear time.
const MOST_RANKS: usize = 1 << 20;

/// Upper limit of the number of threads. The limit exceeds the number of cores of any machine. The limit exists because starting more
/// threads would take longer than a run.
pub const MOST_THREADS: usize = 4096;

impl Config {
    /// Checks that the values of the configuration are consistent with each other.
    ///
    /// # Errors
    /// Returns [`Error::Config`](crate::Error::Config), which names the key and the inconsistent numbers. The error contains the file and
    /// the line only if [`Config::load`] calls this function.
    pub fn validate(&self) -> Result<()> {
        if i64::try_from(self.seed).is_err() {
            return fail(
                "seed",
                format!("{} is beyond 2^63 - 1, the largest number TOML can hold", self.seed),
            );
        }
        if self.recipe.is_empty() {
            return fail("recipe", "no recipe is named");
        }
        self.validate_model()?;
        self.validate_data()?;
        let is_named = self.eval.tasks.iter().all(|task| !task.trim().is_empty());
        require(is_named, "eval.tasks", || "lists a file without a name: leave it out".into())?;
        self.validate_batch()?;
        self.validate_optimizer()?;
        match self.run.device {
            DeviceChoice::Gpus | DeviceChoice::Cuda(_) => self.validate_on(DeviceKind::Gpu),
            DeviceChoice::Auto | DeviceChoice::Cpu => Ok(()),
        }
    }

    /// Checks that devices of this kind support the value of `train.combine`.
    ///
    /// # Errors
    /// Returns [`Error::Config`](crate::Error::Config), which names the key `train.combine`.
    pub fn validate_on(&self, kind: DeviceKind) -> Result<()> {
        let (top_k, most) = (self.model.top_k, MOST_TREE_SLOTS);
        let has_tree = kind != DeviceKind::Gpu || top_k <= most;
        require(has_tree || self.train.combine != Some(Combine::Tree), "train.combine", || {
            format!(
                "is \"tree\", but model.top_k = {top_k}: a GPU's tree sums at most {most} rows per token; use \"slots\""
            )
        })
    }

    fn validate_model(&self) -> Result<()> {
        let m = &self.model;
        validate_sizes(m)?;
        if m.experts == 0 {
            self.validate_dense()?
        } else {
            validate_routed(m)?
        }
        self.train.recompute.check(m).or_else(|why| fail("train.recompute", why))?;
        let is_random = self.data.source == RANDOM;
        require(m.vocab_size > 0 || !is_random, "model.vocab_size", || {
            "is 0, but data.source = \"random\" has no vocabulary size: set model.vocab_size or data.tokenizer".into()
        })?;
        require(i32::try_from(m.vocab_size).is_ok(), "model.vocab_size", || {
            format!("is {}, beyond 2^31 - 1, the largest token id", m.vocab_size)
        })?;
        // `Config::check_tokens` checks the tokens of a file, because their number is known only after the file has been opened.
        let symbols = match self.is_synthetic() {
            true => SYNTHETIC_VOCAB,
            false if self.has_bytes() => BYTE_VOCAB,
            false => 1,
        };
        require(m.vocab_size >= symbols, "model.vocab_size", || {
            format!("is {}, but data.source = \"{}\" has {symbols} symbols", m.vocab_size, self.data.source)
        })?;
        let (positions, seq_len) = (self.positions(), self.data.seq_len);
        require(seq_len <= positions, "data.seq_len", || {
            format!("is {seq_len}, more than the {positions} positions of the model (model.max_positions)")
        })?;
        Ok(())
    }

    /// Checks that a model without experts has an MLP, and no settings of experts.
    fn validate_dense(&self) -> Result<()> {
        let m = &self.model;
        require(m.ffn > 0, "model.ffn", || {
            "is 0, but model.experts = 0: every layer has an MLP; set model.ffn to the width of the MLP"
                .into()
        })?;
        let set = settings("model", m)?;
        let of_experts = ["model.dense_layers", "model.top_k", "model.expert_ffn", "model.shared_ffn"];
        let of_routers = ["model.norm_topk_prob", "model.aux_loss_coef", "model.z_loss_coef"];
        for key in of_experts.into_iter().chain(of_routers) {
            let is = set.get(key).map_or("0", String::as_str);
            let none = if is == "true" { "false" } else { "0" };
            require(["0", "0.0", "false"].contains(&is), key, || {
                format!(
                    "is {is}, but model.experts = 0: every layer is dense; leave it out, or set it to {none}"
                )
            })?;
        }
        require(m.balance == Balance::Shard, "model.balance", || {
            format!(
                "is \"{}\", but model.experts = 0: there is no load to balance; leave it out",
                m.balance.name()
            )
        })?;
        let groups = ["model.groups", "model.top_groups", "model.group_score"];
        // Serialization omits defaults.
        for key in
            ["model.scores", "model.router_bias"].into_iter().chain(groups).chain(["model.route_scale"])
        {
            if let Some(is) = set.get(key) {
                return fail(
                    key,
                    format!("is {is}, but model.experts = 0: every layer is dense; leave it out"),
                );
            }
        }
        Ok(())
    }

    fn validate_data(&self) -> Result<()> {
        let d = &self.data;
        require(!d.source.is_empty(), "data.source", || {
            "is empty, expected \"synthetic\", \"random\" or a path".into()
        })?;
        for (key, token) in [("data.bos_token", &d.bos_token), ("data.eos_token", &d.eos_token)] {
            require(!token.is_empty(), key, || {
                format!("is empty, expected \"{AUTO}\", \"{NONE}\" or a token")
            })?;
        }
        self.validate_sources()?;
        self.validate_image_data()?;
        require(d.seq_len > 0, "data.seq_len", || "is 0, expected at least 1".into())?;
        require(!self.is_synthetic() || d.seq_len.is_multiple_of(RECORD_TOKENS), "data.seq_len", || {
            format!(
                "is {}, not a multiple of {RECORD_TOKENS}, the record of the built-in language",
                d.seq_len
            )
        })?;
        let share = d.valid_fraction;
        require(
            (0.0..1.0).contains(&share) && (share > 0.0 || !self.is_text()),
            "data.valid_fraction",
            || format!("is {share:?}, expected more than 0 and less than 1"),
        )
    }

    /// Checks the mixture, and the keys that name fields of structured files.
    fn validate_sources(&self) -> Result<()> {
        let d = &self.data;
        require(!d.text_key.is_empty(), "data.text_key", || "is empty, expected the name of a key".into())?;
        for (key, other, is, has) in [
            ("data.prompt_key", "data.answer_key", &d.answer_key, &d.prompt_key),
            ("data.answer_key", "data.prompt_key", &d.prompt_key, &d.answer_key),
        ] {
            require(is.is_empty() || !has.is_empty(), key, || {
                format!("is empty, but {other} = \"{is}\": set both keys or neither")
            })?;
        }
        require(d.prompt_key.is_empty() || d.prompt_key != d.answer_key, "data.answer_key", || {
            format!("is \"{}\", like data.prompt_key: the two keys must differ", d.answer_key)
        })?;
        require(d.messages_key.is_empty() || d.prompt_key.is_empty(), "data.messages_key", || {
            format!(
                "is \"{}\", but data.prompt_key = \"{}\": a row has either messages or a prompt; set only one of the two keys",
                d.messages_key, d.prompt_key
            )
        })?;
        let (mixed, named) = (!d.mixture.is_empty(), d.source == MIXTURE);
        require(mixed || !named, "data.mixture", || {
            "is empty, but data.source = \"mixture\": list what is mixed, as mixture = [{ source = \"a.jsonl\", weight = 2.0 }, ...]"
                .into()
        })?;
        require(!mixed || named, "data.source", || {
            format!("is \"{}\", but data.mixture lists what is read: leave data.source out", d.source)
        })?;
        for MixtureSource { source, weight } in &d.mixture {
            require(![SYNTHETIC, RANDOM, MIXTURE, ""].contains(&source.as_str()), "data.mixture", || {
                format!("lists the source \"{source}\", expected files: a file, a folder or a glob")
            })?;
            require(*weight > 0.0 && weight.is_finite(), "data.mixture", || {
                format!("gives {source} the weight {weight:?}, expected a number above 0")
            })?;
        }
        Ok(())
    }

    fn validate_batch(&self) -> Result<()> {
        let (t, ranks) = (&self.train, self.run.ranks);
        for (key, value) in [
            ("train.steps", t.steps as usize),
            ("train.batch_size", t.batch_size),
            ("train.grad_accum", t.grad_accum),
            ("train.shards", t.shards),
            ("train.expert_shards", t.expert_shards),
            ("run.ranks", ranks),
            ("run.dp", self.run.dp),
        ] {
            require(value > 0, key, || "is 0, expected at least 1".into())?;
        }
        require(self.run.threads <= MOST_THREADS, "run.threads", || {
            format!("is {}, expected at most {MOST_THREADS}", self.run.threads)
        })?;
        require(ranks <= MOST_RANKS, "run.ranks", || format!("is {ranks}, expected at most {MOST_RANKS}"))?;
        require(t.shards.is_power_of_two(), "train.shards", || {
            format!("is {}, expected a power of two: the shards are summed as a tree", t.shards)
        })?;
        require(t.batch_size.is_multiple_of(t.shards), "train.batch_size", || {
            format!("is {}, not a multiple of train.shards = {}", t.batch_size, t.shards)
        })?;
        require(t.shards.is_multiple_of(ranks), "run.ranks", || {
            format!("is {ranks}, which does not divide train.shards = {}", t.shards)
        })?;
        let factor = self.run.capacity_factor;
        require(factor.is_finite() && factor >= 1.0, "run.capacity_factor", || {
            format!(
                "is {factor:?}, expected at least 1: some rank always receives its equal share of rows or more"
            )
        })?;
        self.validate_mesh()?;
        let is_one_gpu = matches!(self.run.device, DeviceChoice::Cuda(_));
        require(ranks == 1 || !is_one_gpu, "run.device", || {
            format!(
                "is {}, which is one GPU, but run.ranks = {ranks}: run.device=cuda gives each rank its own GPU",
                self.run.device
            )
        })?;
        // Row and element indices are 32-bit, in random numbers and in ragged groups.
        let slots = self.model.top_k.max(1);
        let rows = [t.batch_size, t.grad_accum, self.data.seq_len, slots]
            .iter()
            .try_fold(1usize, |product, &factor| product.checked_mul(factor))
            .filter(|&rows| i32::try_from(rows).is_ok());
        require(rows.is_some(), "train.batch_size", || {
            let top_k =
                if self.model.experts > 0 { format!(" and model.top_k = {slots}") } else { String::new() };
            format!(
                "is {}: multiplied by train.grad_accum = {}, data.seq_len = {}{top_k}, it exceeds 2^31 - 1 rows",
                t.batch_size, t.grad_accum, self.data.seq_len
            )
        })
    }

    /// Checks that the numbers of ranks and replicas divide the quantities that are sharded over ranks and replicas.
    fn validate_mesh(&self) -> Result<()> {
        let (t, ranks) = (&self.train, self.run.ranks);
        let (dp, experts) = (self.run.dp, self.model.experts);
        require(ranks.is_multiple_of(dp), "run.dp", || {
            format!(
                "is {dp}, which does not divide run.ranks = {ranks}; {}",
                these(dividing(ranks, |_| true))
            )
        })?;
        let ep = ranks / dp;
        // 0 is a multiple of every number.
        require(experts.is_multiple_of(ep), if dp > 1 { "run.dp" } else { "run.ranks" }, || {
            let would_do = these(dividing(ranks, |dp| experts.is_multiple_of(ranks / dp)));
            match dp {
                1 => format!(
                    "is {ranks}, which does not divide model.experts = {experts}; as run.dp {would_do}"
                ),
                _ => format!(
                    "is {dp}: run.ranks / run.dp = {ep} does not divide model.experts = {experts}; {would_do}"
                ),
            }
        })?;
        let parts = t.expert_shards;
        require(parts.is_power_of_two() && t.shards.is_multiple_of(parts), "train.expert_shards", || {
            format!("is {parts}, expected a power of two that divides train.shards = {}", t.shards)
        })?;
        require(experts > 0 || parts == 1, "train.expert_shards", || {
            format!("is {parts}, but model.experts = 0: without experts, this key has no effect")
        })?;
        require(experts > 0 || t.combine.is_none(), "train.combine", || {
            let way = t.combine.unwrap_or_default().name();
            format!("is \"{way}\", but model.experts = 0: without experts, this key has no effect")
        })?;
        require(experts > 0 || dp == 1, "run.dp", || {
            format!("is {dp}, but model.experts = 0: without experts, this key has no effect")
        })?;
        require(parts.is_multiple_of(dp), "run.dp", || {
            format!(
                "is {dp}, which does not divide train.expert_shards = {parts}; train.expert_shards={dp} would do, but changes the \
                 order of sums, and therefore the last bits"
            )
        })
    }

    fn validate_optimizer(&self) -> Result<()> {
        let t = &self.train;
        require(t.init_state == InitState::Weights || !t.init_from.is_empty(), "train.init_state", || {
            "is \"all\", but train.init_from names no checkpoint".into()
        })?;
        positive("train.lr", t.lr)?;
        not_negative("train.min_lr", t.min_lr)?;
        require(t.min_lr <= t.lr, "train.min_lr", || {
            format!("is {:?}, more than train.lr = {:?}", t.min_lr, t.lr)
        })?;
        require(t.warmup_steps <= t.steps, "train.warmup_steps", || {
            format!(
                "is {}, more than train.steps = {}; lower train.warmup_steps, or raise train.steps",
                t.warmup_steps, t.steps
            )
        })?;
        require((0.0..=1.0).contains(&t.decay_fraction), "train.decay_fraction", || {
            format!("is {:?}, expected 0 to 1", t.decay_fraction)
        })?;
        let decay_steps = (t.steps as f64 * t.decay_fraction).round() as u64;
        require(
            t.schedule != ScheduleKind::Wsd || t.warmup_steps + decay_steps <= t.steps,
            "train.decay_fraction",
            || {
                format!(
                    "asks for {decay_steps} steps of decay after train.warmup_steps = {}, more than train.steps = {}",
                    t.warmup_steps, t.steps
                )
            },
        )?;
        for (key, beta) in [("train.beta1", t.beta1), ("train.beta2", t.beta2)] {
            require((0.0..1.0).contains(&beta), key, || {
                format!("is {beta:?}, expected at least 0 and below 1")
            })?;
        }
        positive("train.eps", t.eps)?;
        not_negative("train.weight_decay", t.weight_decay)?;
        not_negative("train.clip_norm", t.clip_norm)?;
        not_negative("train.router_bias_rate", t.router_bias_rate)
    }
}

/// Checks the sizes of a model independently of its data. Files of other projects are checked in the same way.
///
/// # Errors
/// [`Error::Config`](crate::Error::Config) with the key and the inconsistent numbers.
pub(crate) fn check_model(m: &ModelConfig) -> Result<()> {
    let config = Config { model: m.clone(), ..Config::default() };
    validate_sizes(m)?;
    if m.experts == 0 { config.validate_dense() } else { validate_routed(m) }
}

fn validate_sizes(m: &ModelConfig) -> Result<()> {
    for (key, value) in [
        ("model.d_model", m.d_model),
        ("model.layers", m.layers),
        ("model.heads", m.heads),
        ("model.kv_heads", m.kv_heads),
        ("model.head_dim", m.head_dim),
    ] {
        require(value > 0, key, || "is 0, expected at least 1".into())?;
    }
    for (key, value) in [
        ("model.d_model", m.d_model),
        ("model.image_size", m.image_size),
        ("model.patch_size", m.patch_size),
        ("model.heads", m.heads),
        ("model.kv_heads", m.kv_heads),
        ("model.head_dim", m.head_dim),
        ("model.value_head_dim", m.value_head_dim),
        ("model.ffn", m.ffn),
        ("model.experts", m.experts),
        ("model.top_k", m.top_k),
        ("model.expert_ffn", m.expert_ffn),
        ("model.shared_ffn", m.shared_ffn),
        ("model.kv_rank", m.kv_rank),
        ("model.q_rank", m.q_rank),
        ("model.rope_dim", m.rope_dim),
        ("model.max_positions", m.max_positions),
        ("model.sliding_window", m.sliding_window),
        ("model.rope_scaling.original_positions", m.rope_scaling.original_positions),
    ] {
        // Row and column indices are 32-bit.
        require(i32::try_from(value).is_ok(), key, || format!("is {value}, expected at most 2^31 - 1"))?;
    }
    require(m.layers <= MOST_LAYERS, "model.layers", || {
        format!("is {}, expected at most {MOST_LAYERS}", m.layers)
    })?;
    require(m.heads.is_multiple_of(m.kv_heads), "model.kv_heads", || {
        format!("is {}, which does not divide model.heads = {}", m.kv_heads, m.heads)
    })?;
    require(m.head_dim.is_multiple_of(2), "model.head_dim", || {
        format!("is {}, expected an even number: RoPE turns pairs", m.head_dim)
    })?;
    validate_latent(m)?;
    m.validate_windows()?;
    validate_mask(m)?;
    m.validate_images()?;
    positive("model.rope_theta", m.rope_theta)?;
    positive("model.norm_eps", m.norm_eps)?;
    m.rope_scaling.validate(m.rope_theta)
}

/// Checks that only grouped-query attention without windows goes without the causal mask.
fn validate_mask(m: &ModelConfig) -> Result<()> {
    require(m.causal || m.sliding_window == 0, "model.sliding_window", || {
        format!(
            "is {}, but model.causal = false: windows need the causal mask; leave one out",
            m.sliding_window
        )
    })?;
    require(m.causal || m.kv_rank == 0, "model.causal", || {
        format!("is false, but model.kv_rank = {}: latent attention is causal; leave it out", m.kv_rank)
    })
}

/// Checks that latent attention has all the sizes it needs, and that grouped-query attention has none of these sizes.
fn validate_latent(m: &ModelConfig) -> Result<()> {
    if m.kv_rank == 0 {
        for (key, value) in [("model.q_rank", m.q_rank), ("model.rope_dim", m.rope_dim)] {
            require(value == 0, key, || {
                format!(
                    "is {value}, but model.kv_rank = 0: only latent attention has it; leave it out, or set model.kv_rank"
                )
            })?;
        }
        return Ok(());
    }
    require(m.kv_heads == m.heads, "model.kv_heads", || {
        format!(
            "is {}, but model.kv_rank = {}: latent attention has one key and value head per query head; set it to model.heads = {}",
            m.kv_heads, m.kv_rank, m.heads
        )
    })?;
    require(m.qk_norm == QkNorm::None, "model.qk_norm", || {
        format!(
            "is true, but model.kv_rank = {}: latent attention normalizes latent vectors instead of heads; set it to false",
            m.kv_rank
        )
    })?;
    require(!m.qkv_bias, "model.qkv_bias", || {
        format!(
            "is true, but model.kv_rank = {}: projections from latents have no bias; leave it out",
            m.kv_rank
        )
    })?;
    require(!m.o_bias, "model.o_bias", || {
        format!("is true, but model.kv_rank = {}: latent attention has no biases; leave it out", m.kv_rank)
    })?;
    require(!m.attention_sinks, "model.attention_sinks", || {
        format!("is true, but model.kv_rank = {}: latent attention has no sinks; leave it out", m.kv_rank)
    })?;
    let is_part = m.rope_dim > 0 && m.rope_dim < m.head_dim;
    require(is_part && m.rope_dim.is_multiple_of(2), "model.rope_dim", || {
        format!(
            "is {}, expected an even number from 2 on and below model.head_dim = {}: RoPE turns pairs of the last elements of a head; model.kv_rank \
             = {}",
            m.rope_dim, m.head_dim, m.kv_rank
        )
    })
}

/// Checks a model with experts, in all layers or after the dense layers.
fn validate_routed(m: &ModelConfig) -> Result<()> {
    for (key, value) in [("model.top_k", m.top_k), ("model.expert_ffn", m.expert_ffn)] {
        require(value > 0, key, || format!("is 0, expected at least 1: model.experts = {}", m.experts))?;
    }
    require(m.top_k <= m.experts, "model.top_k", || {
        format!("is {}, more than model.experts = {}", m.top_k, m.experts)
    })?;
    require(m.dense_layers < m.layers, "model.dense_layers", || {
        format!(
            "is {}, but model.layers = {}: no layer is left for the experts; for a dense model set model.experts = 0",
            m.dense_layers, m.layers
        )
    })?;
    require(m.dense_layers == 0 || m.ffn > 0, "model.ffn", || {
        format!(
            "is 0, but model.dense_layers = {}: set it to the width of the dense layers' MLPs",
            m.dense_layers
        )
    })?;
    require(m.ffn == 0 || m.dense_layers > 0, "model.ffn", || {
        format!("is {}, but no layer is dense: set model.dense_layers, or model.experts = 0", m.ffn)
    })?;
    require(m.activation == Activation::Swiglu, "model.activation", || {
        format!("is \"gelu\", but model.experts = {}: experts have SwiGLU; leave it out", m.experts)
    })?;
    require(!m.mlp_bias, "model.mlp_bias", || {
        format!("is true, but model.experts = {}: experts have no biases; leave it out", m.experts)
    })?;
    m.validate_routing()?;
    not_negative("model.aux_loss_coef", m.aux_loss_coef)?;
    not_negative("model.z_loss_coef", m.z_loss_coef)
}

/// The divisors of `n` for which `does` is true.
fn dividing(n: usize, does: impl Fn(usize) -> bool) -> Vec<usize> {
    (1..=n).filter(|d| n.is_multiple_of(*d) && does(*d)).collect()
}

/// Formats the end of a message: `1, 2 or 4 would do`.
fn these(values: Vec<usize>) -> String {
    let words: Vec<String> = values.iter().map(usize::to_string).collect();
    match words.split_last() {
        None => "no value would do".into(),
        Some((one, [])) => format!("{one} would do"),
        Some((last, others)) => format!("{} or {last} would do", others.join(", ")),
    }
}
