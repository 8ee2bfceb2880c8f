//! Parts of `config.json` that several families share.

use super::config_json::{ConfigJson, Field};
use crate::config::{Balance, ModelConfig, QkNorm, RopeScaling, RopeScalingKind};
use crate::error::Result;
use nibble_core::shortened;
use serde_json::{Map, Value, json};

/// Fields of `config.json` that every decoder has.
pub const DECODER: [Field; 8] = [
    Field::size("vocab_size", |m| &mut m.vocab_size),
    Field::size("hidden_size", |m| &mut m.d_model),
    Field::size("num_hidden_layers", |m| &mut m.layers),
    Field::size("num_attention_heads", |m| &mut m.heads),
    Field::size("max_position_embeddings", |m| &mut m.max_positions),
    Field::switch("tie_word_embeddings", |m| &mut m.tie_embeddings).or("false"),
    Field::always("hidden_act", "\"silu\""),
    Field::always("attention_dropout", "0.0").or_null("0.0"),
];

/// The fields for the number of key-value heads and for the head dimension. The value `null` means as many key-value heads as query heads.
/// For the head dimension, `null` means the model width divided by the number of query heads. A missing key means the same as `null`,
/// unless the family has another default.
pub const GROUPED_QUERY: [Field; 2] = [
    Field::size("num_key_value_heads", |m| &mut m.kv_heads).or("0").or_null("0"),
    Field::size("head_dim", |m| &mut m.head_dim).or("0").or_null("0"),
];

/// Replaces the zeros that [`GROUPED_QUERY`] sets for missing numbers of key-value heads and head dimensions.
///
/// # Errors
/// Returns [`crate::Error::Config`] if the head dimension is missing and the number of heads does not divide the width.
pub fn read_heads(json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
    if model.kv_heads == 0 {
        model.kv_heads = model.heads;
    }
    if model.head_dim == 0 {
        let (d_model, heads) = (model.d_model, model.heads);
        if heads == 0 || !d_model.is_multiple_of(heads) {
            let why = format!(
                "is {heads}, which does not divide hidden_size = {d_model}; head_dim would say what heads are"
            );
            return Err(json.error("num_attention_heads", why));
        }
        model.head_dim = d_model / heads;
    }
    Ok(())
}

/// Fields of models with dense layers and grouped-query attention.
pub const DENSE: [Field; 2] = [
    Field::size("intermediate_size", |m| &mut m.ffn),
    Field::number("rms_norm_eps", |m| &mut m.norm_eps).or("1e-6"),
];

/// A field that accepts only attention projections without bias.
pub const NO_BIAS: Field = Field::always("attention_bias", "false");

/// Reads the settings of a dense model that the lists of fields do not contain. `qk_norm` is the family's norm of queries and keys.
///
/// # Errors
/// Returns the errors of [`read_heads`] and [`read_rope`].
pub fn read_dense(json: &ConfigJson, model: &mut ModelConfig, qk_norm: QkNorm) -> Result<()> {
    model.qk_norm = qk_norm;
    read_heads(json, model)?;
    read_rope(json, model)
}

/// Reads the RoPE settings from `rope_theta` and `rope_scaling`, or from the newer key `rope_parameters`. If `rope_scaling` is not empty,
/// it takes precedence, as in `RotaryEmbeddingConfigMixin` of `transformers`.
///
/// # Errors
/// Returns [`crate::Error::Config`] for an unsupported kind of scaling, and if the file has two different bases of the RoPE frequencies.
pub fn read_rope(json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
    let (parameters, scaling) = (json.table(TABLE)?, json.table(FORMER)?);
    let says = |table: Option<&Map<String, Value>>| table.is_some_and(|table| !table.is_empty());
    let key = if says(scaling) || parameters.is_none() { FORMER } else { TABLE };
    let [of_parameters, of_scaling, own] =
        [&format!("{TABLE}.{THETA}"), &format!("{FORMER}.{THETA}"), THETA].map(|key| json.above_zero(key));
    let (of_parameters, of_scaling, own) = (of_parameters?, of_scaling?, own?);
    if let (Some(of_table), Some(own)) = (if key == TABLE { of_parameters } else { of_scaling }, own)
        && of_table != own
    {
        return Err(json.error(THETA, format!("is {own:?}, and {key}.{THETA} is {of_table:?}")));
    }
    if key == FORMER {
        pass_over_table(json, TABLE)?;
        let counts = of_scaling.or(own);
        if let Some(theta) = of_parameters
            && counts != Some(theta)
        {
            let counts = counts.map_or("is not there".to_owned(), |counts| format!("is {counts:?}"));
            let why =
                format!("{counts}, and {TABLE}.{THETA} is {theta:?}: {FORMER} counts for both, say it there");
            return Err(json.error(&format!("{FORMER}.{THETA}"), why));
        }
        model.rope_theta = counts.unwrap_or(json.usual_theta);
    } else {
        model.rope_theta = of_parameters.or(own).unwrap_or(json.usual_theta);
    }
    check_turns(json, key)?;
    match rope_kind(json, key)? {
        None => Ok(()),
        Some(kind) => read_rope_scaling(json, key, kind, model),
    }
}

/// The current and the former name of RoPE's table.
const TABLE: &str = "rope_parameters";
const FORMER: &str = "rope_scaling";
const THETA: &str = "rope_theta";

/// Marks the keys of a table as ignored.
fn pass_over_table(json: &ConfigJson, table: &str) -> Result<()> {
    let names = json.table(table)?.into_iter().flatten().map(|(name, _)| format!("{table}.{name}"));
    let names: Vec<String> = names.collect();
    json.pass_over(&names.iter().map(String::as_str).collect::<Vec<_>>());
    Ok(())
}

/// Checks that RoPE rotates all elements, in the same way in all layers: there is no partial rotation, and no separate table per kind of
/// layer.
fn check_turns(json: &ConfigJson, table: &str) -> Result<()> {
    const PART: &str = "partial_rotary_factor";
    for key in [PART, &format!("{table}.{PART}")] {
        if let Some(part) = json.above_zero(key)?
            && part != 1.0
        {
            return Err(
                json.error(key, format!("is {part}, which the decoder does not have: it has 1 alone"))
            );
        }
    }
    match json.table(table)?.into_iter().flatten().find(|(_, value)| value.is_object()) {
        None => Ok(()),
        Some((name, _)) => {
            let why = "is an object: the decoder has the same frequencies in all layers";
            Err(json.error(&format!("{table}.{name}"), why))
        }
    }
}

/// The scaling rule that a table names; `None` for the default.
fn rope_kind(json: &ConfigJson, table: &str) -> Result<Option<RopeScalingKind>> {
    let [key, former] = ["rope_type", "type"].map(|name| format!("{table}.{name}"));
    let (said, other) = (json.word(&key)?, json.word(&former)?);
    if let (Some(said), Some(other)) = (said, other)
        && said != other
    {
        let why = format!("is \"{}\", and {key} is \"{}\"", shortened(other), shortened(said));
        return Err(json.error(&former, why));
    }
    match said.or(other) {
        Some("default") => {
            pass_over_table(json, table)?;
            Ok(None)
        }
        Some("llama3") => Ok(Some(RopeScalingKind::Llama3)),
        Some("yarn") => Ok(Some(RopeScalingKind::Yarn)),
        Some(kind) => {
            let kind = shortened(kind);
            let why =
                format!("is \"{kind}\", which the decoder does not have: it has default, llama3 and yarn");
            Err(json.error(&key, why))
        }
        None if json.get(&format!("{table}.factor")).is_some() => Err(json.missing(&key)),
        None => Ok(None),
    }
}

/// The number of positions of the original training: from the file, or from the table, or else the model's number of positions.
fn original_positions(json: &ConfigJson, table: &str, model: &ModelConfig) -> Result<usize> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let inside = format!("{table}.{ORIGINAL}");
    let (own, of_table) = (json.size(ORIGINAL)?, json.size(&inside)?);
    if let (Some(own), Some(of_table)) = (own, of_table)
        && own != of_table
    {
        return Err(json.error(ORIGINAL, format!("is {own}, and {inside} is {of_table}")));
    }
    Ok(own.or(of_table).unwrap_or(model.max_positions))
}

fn read_rope_scaling(
    json: &ConfigJson,
    table: &str,
    kind: RopeScalingKind,
    model: &mut ModelConfig,
) -> Result<()> {
    let key = |name: &str| format!("{table}.{name}");
    let above = |name: &str, usual: f64| -> Result<f64> { Ok(json.above_zero(&key(name))?.unwrap_or(usual)) };
    let number = |name: &str| -> Result<f64> { Ok(json.number(&key(name))?.unwrap_or_default()) };
    let factor = key("factor");
    let usual = RopeScaling::default();
    model.rope_scaling = RopeScaling {
        kind,
        factor: json.above_zero(&factor)?.ok_or_else(|| json.missing(&factor))?,
        original_positions: original_positions(json, table, model)?,
        ..usual
    };
    let scaling = &mut model.rope_scaling;
    if kind == RopeScalingKind::Llama3 {
        let needed = |name: &str| json.above_zero(&key(name))?.ok_or_else(|| json.missing(&key(name)));
        scaling.low_freq_factor = needed("low_freq_factor")?;
        scaling.high_freq_factor = needed("high_freq_factor")?;
        return Ok(());
    }
    scaling.beta_fast = above("beta_fast", usual.beta_fast)?;
    scaling.beta_slow = above("beta_slow", usual.beta_slow)?;
    (scaling.mscale, scaling.mscale_all_dim) = (number("mscale")?, number("mscale_all_dim")?);
    // Without `mscale_all_dim`, `mscale` has no effect.
    if scaling.mscale_all_dim == 0.0 {
        scaling.mscale = 0.0;
    }
    if json.switch(&key("truncate"))? == Some(false) {
        let why = "is false, which the decoder does not have: it has true alone";
        return Err(json.error(&key("truncate"), why));
    }
    match json.number(&key("attention_factor"))? {
        None => Ok(()),
        Some(factor) => {
            let why = format!("is {factor}; here it follows from factor, mscale and mscale_all_dim");
            Err(json.error(&key("attention_factor"), why))
        }
    }
}

/// Writes the RoPE settings under `rope_theta` and `rope_scaling`, the keys that every program knows.
pub fn write_rope(model: &ModelConfig, keys: &mut Map<String, Value>) {
    keys.insert("rope_theta".into(), model.rope_theta.into());
    let s = &model.rope_scaling;
    let table = match s.kind {
        RopeScalingKind::None => Value::Null,
        RopeScalingKind::Llama3 => json!({
            "rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor, "original_max_position_embeddings": s.original_positions
        }),
        RopeScalingKind::Yarn => {
            let mut table = json!({
                "rope_type": "yarn", "factor": s.factor, "beta_fast": s.beta_fast, "beta_slow": s.beta_slow,
                "original_max_position_embeddings": s.original_positions
            });
            for (name, value) in [("mscale", s.mscale), ("mscale_all_dim", s.mscale_all_dim)] {
                if value != 0.0 {
                    table[name] = value.into();
                }
            }
            table
        }
    };
    keys.insert("rope_scaling".into(), table);
}

/// Fields of a mixture of experts that have the same names in all families. The keys of widths have different names.
pub const MIXTURE: [Field; 3] = [
    Field::size("num_experts", |m| &mut m.experts).also("num_local_experts"),
    Field::size("num_experts_per_tok", |m| &mut m.top_k),
    Field::switch("norm_topk_prob", |m| &mut m.norm_topk_prob).or("false"),
];

/// The key in `config.json` for the weight of the load-balancing loss of `transformers`.
pub const AUX: &str = "router_aux_loss_coef";

/// Reads the weight of the load-balancing loss of `transformers`. The load-balancing loss of `transformers` is computed over all layers
/// together.
///
/// # Errors
/// Returns [`crate::Error::Config`] if the weight is missing or not a number.
pub fn read_balance(json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
    model.balance = Balance::Batch;
    model.aux_loss_coef = json.number(AUX)?.ok_or_else(|| json.missing(AUX))?;
    Ok(())
}

/// Writes the weight for the load-balancing loss of `transformers` that is equivalent to the model's weight. Also writes the other keys of
/// the router's losses.
pub fn write_balance(model: &ModelConfig, keys: &mut Map<String, Value>) {
    keys.insert(AUX.into(), their_aux_loss_coef(model).into());
    keys.insert("router_z_loss_coef".into(), model.z_loss_coef.into());
    if model.balance == Balance::Batch {
        keys.insert("nibble_balance".into(), "batch".into());
    }
}

/// The weight with which the load-balancing loss of `transformers` is as strong as Nibble's loss.
///
/// With E experts and top-k routing of T tokens per layer, n_le tokens of layer l reach expert e, and P_le is the mean probability of
/// expert e in layer l. Nibble's loss is summed over the L layers with experts; each layer contributes 1 under uniform routing:
///
/// ```text
/// ours   = Σ_l E · Σ_e n_le / (k · T) · P_le
/// theirs = E · Σ_e F_e · P_e,   F_e = Σ_l n_le / (L · T),   P_e = Σ_l P_le / L
/// ```
///
/// The loss of `transformers` (`load_balancing_loss_func` of Qwen3-MoE and Mixtral) treats all layers as one, and its fractions F_e sum to
/// k. If n and P are the same in every layer, then F_e = n_e / T and P_e = P_le, so theirs = k · (ours / L). Nibble's weight times L / k is
/// then the weight of `transformers`, for the loss and for its gradient. If layers differ, the losses differ too. In the loss of
/// `transformers`, an expert's surplus in one layer offsets the expert's deficit in another layer; in Nibble's loss, a surplus offsets no
/// deficit. Nibble's loss also does not combine the shards of a step. Under `balance = "batch"` the loss is that of `transformers`, and so
/// is the weight.
fn their_aux_loss_coef(m: &ModelConfig) -> f64 {
    if m.balance == Balance::Batch {
        return m.aux_loss_coef;
    }
    m.aux_loss_coef * m.num_routed() as f64 / m.top_k as f64
}
