//! Common parts of DeepSeek-V2 and V3: latent attention, dense layers before layers with experts, and a shared expert.
//!
//! DeepSeek's RoPE rotates the neighbouring elements 2i and 2i + 1 together, and Nibble's RoPE rotates the elements i and i + r/2. So the
//! weight rows that produce these elements are permuted. DeepSeek has one tensor for the latent of keys and values and for the RoPE key
//! shared by all heads; Nibble has two parameters.

use super::config_json::{ConfigJson, Field};
use super::shared::{read_rope, write_rope};
use super::{Named, Rows, as_they_are};
use crate::config::{Balance, GroupScore, ModelConfig, QkNorm};
use crate::error::Result;
use crate::spec::{AttentionSpec, LatentShape, ModelSpec};
use serde_json::{Map, Value};

/// The field for the number of routed experts. `also` is an alternative name of this field in files.
pub const fn experts(also: &'static str) -> Field {
    Field::size("n_routed_experts", |m| &mut m.experts).also(also)
}

/// Fields for the sizes that the families DeepSeek-V2 and DeepSeek-V3 share.
pub const LATENT: [Field; 11] = [
    Field::size("kv_lora_rank", |m| &mut m.kv_rank),
    Field::size("qk_rope_head_dim", |m| &mut m.rope_dim),
    Field::size("v_head_dim", |m| &mut m.value_head_dim),
    Field::size("num_experts_per_tok", |m| &mut m.top_k),
    Field::size("moe_intermediate_size", |m| &mut m.expert_ffn),
    Field::count("first_k_dense_replace", |m| &mut m.dense_layers),
    Field::number("routed_scaling_factor", |m| &mut m.route_scale),
    Field::number("rms_norm_eps", |m| &mut m.norm_eps).or("1e-6"),
    Field::always("attention_bias", "false"),
    Field::always("moe_layer_freq", "1"),
    Field::always("rope_interleave", "true"),
];

const FFN: &str = "intermediate_size";
const Q_RANK: &str = "q_lora_rank";
const NOPE: &str = "qk_nope_head_dim";
const SHARED: &str = "n_shared_experts";
pub const GROUPS: &str = "n_group";
pub const TOP_GROUPS: &str = "topk_group";
const AUX: &str = "aux_loss_alpha";
const OF_SEQUENCES: &str = "seq_aux";
const KV_HEADS: &str = "num_key_value_heads";

/// Reads all settings that the lists of fields do not contain, except the settings of expert selection.
///
/// # Errors
/// Returns [`crate::Error::Config`], which names a key with an unsupported value.
pub fn read(json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
    model.qk_norm = QkNorm::None;
    // These keys are not read, because they follow from the two parts of a head.
    json.pass_over(&["head_dim", "qk_head_dim"]);
    model.kv_heads = json.size(KV_HEADS)?.unwrap_or(model.heads);
    // The key `intermediate_size` also appears in files of models without dense layers.
    let ffn = json.count(FFN)?;
    model.ffn = if model.dense_layers > 0 { ffn.ok_or_else(|| json.missing(FFN))? } else { 0 };
    model.q_rank = json.size(Q_RANK)?.unwrap_or(0);
    let nope = json.size(NOPE)?.ok_or_else(|| json.missing(NOPE))?;
    for (key, part) in [(NOPE, nope), ("qk_rope_head_dim", model.rope_dim)] {
        if !part.is_multiple_of(2) {
            return Err(json.error(key, format!("is {part}, expected an even number: RoPE turns pairs")));
        }
    }
    model.head_dim = nope + model.rope_dim;
    let shared = json.count(SHARED)?.ok_or_else(|| json.missing(SHARED))?;
    model.shared_ffn = shared.checked_mul(model.expert_ffn).ok_or_else(|| {
        let ffn = model.expert_ffn;
        json.error(
            SHARED,
            format!("is {shared}, of moe_intermediate_size = {ffn} each: no model is as large"),
        )
    })?;
    let is_of_sequences = json.switch(OF_SEQUENCES)?.unwrap_or(true);
    model.balance = if is_of_sequences { Balance::Sequence } else { Balance::Batch };
    model.aux_loss_coef = json.number(AUX)?.unwrap_or(0.0);
    read_rope(json, model)
}

/// Writes all settings that the lists of fields do not contain, except the settings of expert selection.
pub fn write(model: &ModelConfig, keys: &mut Map<String, Value>) {
    let mut add = |key: &str, value: Value| keys.insert(key.to_owned(), value);
    add(KV_HEADS, model.kv_heads.into());
    add(FFN, model.ffn.into());
    add(Q_RANK, if model.q_rank == 0 { Value::Null } else { model.q_rank.into() });
    add(NOPE, model.head_dim.saturating_sub(model.rope_dim).into());
    add(SHARED, (model.shared_ffn / model.expert_ffn.max(1)).into());
    add(AUX, model.aux_loss_coef.into());
    add(OF_SEQUENCES, (model.balance == Balance::Sequence).into());
    write_rope(model, keys);
}

/// Reads the number of expert groups, and how many groups a token's experts are selected from. If the file says one group, the model has no
/// groups.
///
/// # Errors
/// Returns [`crate::Error::Config`] for an invalid value.
pub fn read_groups(json: &ConfigJson, model: &mut ModelConfig, score: GroupScore) -> Result<()> {
    let (groups, top) = groups(json)?;
    if groups > 1 {
        (model.groups, model.top_groups, model.group_score) = (groups, top, score);
    }
    Ok(())
}

/// The number of groups, and the number of groups that are selected.
///
/// # Errors
/// [`crate::Error::Config`] if a key is not an integer above 0, or if more groups are selected than exist.
fn groups(json: &ConfigJson) -> Result<(usize, usize)> {
    let [groups, top] = [GROUPS, TOP_GROUPS].map(|key| json.size(key)?.ok_or_else(|| json.missing(key)));
    let (groups, top) = (groups?, top?);
    if top > groups {
        return Err(json.error(TOP_GROUPS, format!("is {top}, more than {GROUPS} = {groups}")));
    }
    Ok((groups, top))
}

/// Writes the number of expert groups, and how many groups a token's experts are selected from.
pub fn write_groups(model: &ModelConfig, keys: &mut Map<String, Value>) {
    keys.insert(GROUPS.into(), model.groups.max(1).into());
    keys.insert(TOP_GROUPS.into(), model.top_groups.max(1).into());
}

/// The tensors of a model with latent attention, with the names and the row order that DeepSeek uses.
pub fn tensors(model: &ModelSpec) -> Vec<Named> {
    let shape = model.runs.first().and_then(|run| match &run.block.attn {
        AttentionSpec::Latent(spec) => Some(spec.shape),
        AttentionSpec::GroupedQuery(_) => None,
    });
    let Some(shape) = shape else { return as_they_are(model) };
    let mut all: Vec<Named> = Vec::new();
    for tensor in as_they_are(model) {
        let is_part = |part: &str| tensor.name.ends_with(&format!(".self_attn.{part}.weight"));
        let numbers: Vec<usize> = tensor.rows.iter().map(|rows| rows.param).collect();
        if is_part("q_proj") || is_part("q_b_proj") {
            let rows = numbers.iter().flat_map(|param| of_heads(*param, &shape)).collect();
            all.push(Named { rows, ..tensor });
        } else if is_part("k_rope_proj") {
            // The rows of the RoPE key follow the rows of the latent.
            let turned = numbers.iter().flat_map(|param| neighbours(*param, 0, shape.rope_dim));
            if let Some(latent) = all.last_mut() {
                latent.shape[0] += shape.rope_dim;
                latent.rows.extend(turned);
            }
        } else {
            let name = tensor.name.replace(".kv_a_proj.", ".kv_a_proj_with_mqa.");
            all.push(Named { name: name.replace(".shared_expert.", ".shared_experts."), ..tensor });
        }
    }
    all
}

/// The rows of all query heads. RoPE rotates the last `rope_dim` rows of each head.
fn of_heads(param: usize, shape: &LatentShape) -> Vec<Rows> {
    let (head_dim, rope_dim) = (shape.head_dim(), shape.rope_dim);
    let head = |head: usize| {
        let (first, turns) = (head * head_dim, head * head_dim + shape.nope_dim);
        [Rows { param, range: first..turns }].into_iter().chain(neighbours(param, turns, rope_dim))
    };
    (0..shape.heads).flat_map(head).collect()
}

/// `count` rows from `first` on, in DeepSeek's order: row i is followed by its rotation partner i + count/2.
fn neighbours(param: usize, first: usize, count: usize) -> impl Iterator<Item = Rows> {
    let row = move |row: usize| Rows { param, range: first + row..first + row + 1 };
    (0..count / 2).flat_map(move |i| [row(i), row(i + count / 2)])
}
