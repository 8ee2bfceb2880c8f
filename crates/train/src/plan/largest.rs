//! Which sizes need the memory: its largest parts, each with the keys of the configuration that it grows with.

use super::{Prediction, in_words};
use crate::checks::{EXPERTS, Parameters, Sizes, head_width, layers_of, listed, parameters};
use crate::config::{Config, PlainType};

/// A part of the memory of a device.
struct Part {
    bytes: f64,
    what: String,
    sizes: Sizes,
}

/// The largest parts of what a run takes: `most of it: ...`. Without a prediction, of a run beyond counting, estimated.
pub(super) fn largest(config: &Config, prediction: Option<&Prediction>) -> String {
    const TOLD: usize = 3;
    let largest_first = |parts: &mut Vec<Part>| parts.sort_by(|a, b| b.bytes.total_cmp(&a.bytes));
    let mut parts = state(config, prediction);
    largest_first(&mut parts);
    parts.extend(match prediction {
        Some(prediction) => activations(config, prediction, &parts[0].sizes),
        None => vec![estimated_activations(config)],
    });
    largest_first(&mut parts);
    let all: f64 = parts.iter().map(|part| part.bytes).sum();
    // What is small beside the rest needs no word.
    let large = parts.into_iter().take(TOLD).filter(|part| part.bytes >= 0.05 * all);
    let told = large
        .map(|part| format!("{} {} ({})", part.what, in_words(part.bytes as usize), listed(&part.sizes)));
    format!("most of it: {}", told.collect::<Vec<_>>().join("; "))
}

/// Weights, gradients and moments.
fn state(config: &Config, prediction: Option<&Prediction>) -> Vec<Part> {
    let width = |dtype: PlainType| if dtype == PlainType::F32 { 4.0 } else { 2.0 };
    let each = 4.0 + width(config.train.grad_dtype) + 2.0 * width(config.train.moment_dtype);
    let part = |kind: Parameters| {
        let copies = prediction.map_or(1.0, |prediction| {
            let ranks = if kind.what == EXPERTS { prediction.ranks } else { 1 };
            prediction.ranks_of_a_device() as f64 / ranks as f64
        });
        let count = kind.sizes.iter().fold(kind.times as f64, |product, (_, size)| product * *size as f64);
        let what = format!("{}, with gradients and moments,", kind.what);
        Part { bytes: each * copies * count, what, sizes: kind.sizes }
    };
    parameters(&config.model).into_iter().map(part).collect()
}

/// What a forward pass keeps, by the layers that keep it, and the rest of the arena: copies of the weights, most of which are of
/// these sizes, and more.
fn activations(config: &Config, prediction: &Prediction, weights: &[(&'static str, usize)]) -> Vec<Part> {
    let (m, ranks) = (&config.model, prediction.ranks_of_a_device());
    let [mut attention, mut shared, mut experts, mut dense, mut others] = [0; 5];
    for entry in prediction.ledger.unique() {
        let sum = match entry.layer.as_str() {
            layer if layer.contains(".self_attn") => &mut attention,
            layer if layer.contains(".shared_expert") => &mut shared,
            layer
                if [".mlp", ".mlp.gate_up_proj", ".mlp.down_proj"].iter().any(|end| layer.ends_with(end)) =>
            {
                &mut dense
            }
            layer if layer.contains(".mlp") => &mut experts,
            _ => &mut others,
        };
        *sum += entry.bytes;
    }
    let arena = prediction.memory.activations;
    let kept = attention + shared + experts + dense + others;
    let dropped = arena.total_bytes.unwrap_or(arena.peak_bytes).saturating_sub(kept);
    let (layers, [routed, mlps]) = (("model.layers", m.layers), layers_of(m));
    let part = |bytes: usize, what: &str, more: &[(&'static str, usize)]| Part {
        bytes: (bytes * ranks) as f64,
        what: what.to_owned(),
        sizes: [&tokens(config)[..], more].concat(),
    };
    vec![
        part(attention, "what attention keeps", &[layers, ("model.heads", m.heads), head_width(m)]),
        part(
            experts,
            "what the experts keep",
            &[
                routed,
                ("model.top_k", m.top_k),
                ("model.d_model", m.d_model),
                ("model.expert_ffn", m.expert_ffn),
            ],
        ),
        part(shared, "what the shared experts keep", &[routed, ("model.shared_ffn", m.shared_ffn)]),
        part(dense, "what the MLPs keep", &[mlps, ("model.ffn", m.ffn)]),
        part(others, "what norms and residuals keep", &[layers, ("model.d_model", m.d_model)]),
        part(dropped, "copies of weights, and what a step makes and drops,", weights),
    ]
}

/// Some BF16 tensors of every token in every layer.
fn estimated_activations(config: &Config) -> Part {
    let m = &config.model;
    let [width, ffn, expert_ffn, heads, head_dims, top_k] =
        [m.d_model, m.ffn, m.expert_ffn, m.heads, m.head_dim + m.value_head_dim(), m.top_k]
            .map(|size| size as f64);
    let [layers, dense, routed] = [m.layers, m.num_dense(), m.num_routed()].map(|layers| layers as f64);
    let values = layers * (width + 2.0 * heads * head_dims)
        + routed * top_k * (width + 2.0 * expert_ffn)
        + dense * (width + 3.0 * ffn);
    let tokens = tokens(config);
    let bytes = 2.0 * values * tokens.iter().map(|(_, size)| *size as f64).product::<f64>();
    let wide = if m.experts == 0 { ("model.ffn", m.ffn) } else { ("model.top_k", m.top_k) };
    let more = [("model.layers", m.layers), ("model.d_model", m.d_model), wide];
    Part { bytes, what: "activations, about".into(), sizes: [&tokens[..], &more].concat() }
}

fn tokens(config: &Config) -> [(&'static str, usize); 2] {
    [("train.batch_size", config.train.batch_size), ("data.seq_len", config.data.seq_len)]
}
