//! What several families' `config.json` have in common.

use super::config_json::{ConfigJson, Field};
use crate::config::{Balance, ModelConfig, QkNorm, RopeScaling, RopeScalingKind};
use crate::error::Result;
use nibble_core::shortened;
use serde_json::{Map, Value, json};

/// Every decoder.
pub const DECODER: [Field; 8] = [
    Field::size("vocab_size", |m| &mut m.vocab_size),
    Field::size("hidden_size", |m| &mut m.d_model),
    Field::size("num_hidden_layers", |m| &mut m.layers),
    Field::size("num_attention_heads", |m| &mut m.heads),
    Field::size("max_position_embeddings", |m| &mut m.max_positions),
    Field::switch("tie_word_embeddings", |m| &mut m.tie_embeddings).or("false"),
    Field::always("hidden_act", "\"silu\""),
    Field::always("attention_dropout", "0.0"),
];

/// Heads of queries that share keys and values. Where they are not said, there are as many of these as of those, and all of them are as wide as
/// the model.
pub const GROUPED_QUERY: [Field; 2] = [
    Field::size("num_key_value_heads", |m| &mut m.kv_heads).or("0"),
    Field::size("head_dim", |m| &mut m.head_dim).or("0"),
];

/// Fills in what [`GROUPED_QUERY`] leaves open.
///
/// # Errors
/// [`crate::Error::Config`] where heads do not divide the width.
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

/// Dense layers of such heads, and no bias anywhere.
pub const DENSE: [Field; 3] = [
    Field::size("intermediate_size", |m| &mut m.ffn),
    Field::number("rms_norm_eps", |m| &mut m.norm_eps).or("1e-6"),
    Field::always("attention_bias", "false"),
];

/// What no field says of a dense model with these norms of queries and keys.
///
/// # Errors
/// As [`read_heads`] and [`read_rope`].
pub fn read_dense(json: &ConfigJson, model: &mut ModelConfig, qk_norm: QkNorm) -> Result<()> {
    model.qk_norm = qk_norm;
    read_heads(json, model)?;
    read_rope(json, model)
}

/// RoPE, under `rope_theta` and `rope_scaling`, or `rope_parameters`, as later files have it.
///
/// # Errors
/// [`crate::Error::Config`] for a kind that the decoder does not have.
pub fn read_rope(json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
    const USUAL_THETA: f64 = 10_000.0;
    const TABLE: &str = "rope_parameters";
    const FORMER: &str = "rope_scaling";
    const THETA: &str = "rope_theta";
    let (parameters, scaling) = (json.table(TABLE)?, json.table(FORMER)?);
    let without_theta = |table: &Map<String, Value>| {
        table.clone().into_iter().filter(|(key, _)| key != THETA).collect::<Map<_, _>>()
    };
    if let (Some(one), Some(other)) = (parameters, scaling)
        && without_theta(one) != without_theta(other)
    {
        return Err(json.error(FORMER, format!("says something else than {TABLE}: leave one of them out")));
    }
    let key = if parameters.is_some() { TABLE } else { FORMER };
    let inside = format!("{key}.{THETA}");
    let (of_table, own) = (json.above_zero(&inside)?, json.above_zero(THETA)?);
    if let (Some(of_table), Some(own)) = (of_table, own)
        && of_table != own
    {
        return Err(json.error(THETA, format!("is {own:?}, and {inside} is {of_table:?}")));
    }
    model.rope_theta = of_table.or(own).unwrap_or(USUAL_THETA);
    let kind = match rope_kind(json, key)? {
        None => return Ok(()),
        Some(kind) => kind,
    };
    read_rope_scaling(json, key, kind, model)
}

/// Which rule a table names, if any but the usual one.
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
            // What else stands there counts for nothing.
            let names = json.table(table)?.into_iter().flatten().map(|(name, _)| format!("{table}.{name}"));
            let names: Vec<String> = names.collect();
            json.pass_over(&names.iter().map(String::as_str).collect::<Vec<_>>());
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

fn read_rope_scaling(
    json: &ConfigJson,
    table: &str,
    kind: RopeScalingKind,
    model: &mut ModelConfig,
) -> Result<()> {
    let key = |name: &str| format!("{table}.{name}");
    let above = |name: &str, usual: f64| -> Result<f64> { Ok(json.above_zero(&key(name))?.unwrap_or(usual)) };
    let number = |name: &str| -> Result<f64> { Ok(json.number(&key(name))?.unwrap_or_default()) };
    let (factor, original) = (key("factor"), key("original_max_position_embeddings"));
    let usual = RopeScaling::default();
    model.rope_scaling = RopeScaling {
        kind,
        factor: json.above_zero(&factor)?.ok_or_else(|| json.missing(&factor))?,
        original_positions: json.size(&original)?.ok_or_else(|| json.missing(&original))?,
        ..usual
    };
    let scaling = &mut model.rope_scaling;
    if kind == RopeScalingKind::Llama3 {
        scaling.low_freq_factor = above("low_freq_factor", usual.low_freq_factor)?;
        scaling.high_freq_factor = above("high_freq_factor", usual.high_freq_factor)?;
        return Ok(());
    }
    scaling.beta_fast = above("beta_fast", usual.beta_fast)?;
    scaling.beta_slow = above("beta_slow", usual.beta_slow)?;
    (scaling.mscale, scaling.mscale_all_dim) = (number("mscale")?, number("mscale_all_dim")?);
    // It counts beside the other alone.
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

/// RoPE under the keys that every reader knows.
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

/// Experts of which each token is sent to some; the widths have names of their own.
pub const MIXTURE: [Field; 3] = [
    Field::size("num_experts", |m| &mut m.experts).also("num_local_experts"),
    Field::size("num_experts_per_tok", |m| &mut m.top_k),
    Field::switch("norm_topk_prob", |m| &mut m.norm_topk_prob).or("false"),
];

/// The key of the weight of `transformers`' load-balancing loss.
const AUX: &str = "router_aux_loss_coef";

/// The load-balancing loss: that of `transformers`, of all layers together.
///
/// # Errors
/// [`crate::Error::Config`] where its weight is no number.
pub fn read_balance(json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
    const USUAL: f64 = 0.001;
    model.balance = Balance::Batch;
    model.aux_loss_coef = json.number(AUX)?.unwrap_or(USUAL);
    Ok(())
}

/// The factor under which the load-balancing loss of `transformers` is as strong as ours, and what else there is of the router's losses.
pub fn write_balance(model: &ModelConfig, keys: &mut Map<String, Value>) {
    keys.insert(AUX.into(), their_aux_loss_coef(model).into());
    keys.insert("router_z_loss_coef".into(), model.z_loss_coef.into());
    if model.balance == Balance::Batch {
        keys.insert("nibble_balance".into(), "batch".into());
    }
}

/// The factor under which the load-balancing loss of `transformers` is as strong as ours.
///
/// E experts, k of which each of a layer's T tokens is sent to; n_le tokens of layer l reach expert e, whose mean probability there is P_le. Ours
/// is added up over the L layers that have experts, each of which is 1 where it is balanced:
///
/// ```text
/// ours   = Σ_l E · Σ_e n_le / (k · T) · P_le
/// theirs = E · Σ_e F_e · P_e,   F_e = Σ_l n_le / (L · T),   P_e = Σ_l P_le / L
/// ```
///
/// Theirs (`load_balancing_loss_func` of Qwen3-MoE and Mixtral) takes the layers as one, and its shares F_e sum to k. Where n and P are the same in
/// every layer, F_e = n_e / T and P_e = P_le, so theirs = k · (ours / L): our factor times L / k is theirs, for the loss and so for its gradient. Where
/// layers differ the losses do too: one expert's surplus in a layer makes up for its lack in another in theirs, and in ours does not; nor does
/// ours take the shards of a step together. Under `balance = "batch"` the loss is theirs, and so is its factor.
fn their_aux_loss_coef(m: &ModelConfig) -> f64 {
    if m.balance == Balance::Batch {
        return m.aux_loss_coef;
    }
    m.aux_loss_coef * m.num_routed() as f64 / m.top_k as f64
}
