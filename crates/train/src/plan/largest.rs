//! Names the largest parts of a run's memory, each with the configuration keys that determine its size.

use super::Prediction;
use crate::checks::listed;
use crate::config::{Config, PlainType};
use crate::ledger::in_words;
use crate::spec::{Group, ModelSpec, Parameters, Size};
use std::collections::HashMap;

/// A part of a device's memory.
struct Part {
    bytes: f64,
    what: String,
    sizes: Vec<Size>,
}

/// The largest parts of a run's memory, as a text `most of it: ...`. Without a prediction (if sizes overflow), the parts are estimated.
pub(super) fn largest(config: &Config, prediction: Option<&Prediction>) -> String {
    const TOLD: usize = 3;
    let largest_first = |parts: &mut Vec<Part>| parts.sort_by(|a, b| b.bytes.total_cmp(&a.bytes));
    let model = ModelSpec::new(&config.model);
    let mut parts = state(config, &model, prediction);
    largest_first(&mut parts);
    let weights = parts.first().map(|part| part.sizes.clone()).unwrap_or_default();
    parts.extend(match prediction {
        Some(prediction) => activations(config, &model, prediction, &weights),
        None => vec![estimated_activations(config, &model)],
    });
    largest_first(&mut parts);
    let all: f64 = parts.iter().map(|part| part.bytes).sum();
    // Small parts are omitted.
    let large = parts.into_iter().take(TOLD).filter(|part| part.bytes >= 0.05 * all);
    let told = large
        .map(|part| format!("{} {} ({})", part.what, in_words(part.bytes as usize), listed(&part.sizes)));
    format!("most of it: {}", told.collect::<Vec<_>>().join("; "))
}

/// The memory of weights, gradients and moments, by group of parameters.
fn state(config: &Config, model: &ModelSpec, prediction: Option<&Prediction>) -> Vec<Part> {
    let width = |dtype: PlainType| if dtype == PlainType::F32 { 4.0 } else { 2.0 };
    let (kept, gradient) = (4.0 + 2.0 * width(config.train.moment_dtype), width(config.train.grad_dtype));
    let part = |of: Parameters| {
        // Masters and moments are sharded over all ranks. Every rank that computes with a parameter holds the accumulated gradients of all
        // its rows.
        let each = prediction.map_or(kept + gradient, |prediction| {
            let (here, mesh) = (prediction.ranks_of_a_device() as f64, prediction.mesh);
            let ranks = match (config.train.grad_accum, of.group) {
                (1, _) => mesh.ranks(),
                (_, Group::Experts) => mesh.ep,
                _ => 1,
            };
            here * (kept / mesh.ranks() as f64 + gradient / ranks as f64)
        });
        let what = format!("{}, with gradients and moments,", of.what);
        Part { bytes: each * of.count.unwrap_or(u128::MAX) as f64, what, sizes: of.sizes }
    };
    model.parameters().into_iter().map(part).collect()
}

/// The saved activations by group, and the rest of the arena. The rest is mostly copies of the weights, and is therefore listed with the
/// sizes of the weights.
fn activations(config: &Config, model: &ModelSpec, prediction: &Prediction, weights: &[Size]) -> Vec<Part> {
    const KEEP: [(Group, &str); 5] = [
        (Group::Attention, "activations of attention"),
        (Group::Experts, "activations of the experts"),
        (Group::SharedExperts, "activations of the shared experts"),
        (Group::Mlps, "activations of the MLPs"),
        (Group::Norms, "activations of norms and residuals"),
    ];
    let ranks = prediction.ranks_of_a_device();
    let part = |bytes: usize, what: &str, more: &[Size]| Part {
        bytes: (bytes * ranks) as f64,
        what: what.to_owned(),
        sizes: [&tokens(config)[..], more].concat(),
    };
    let kept = kept(model, prediction);
    let mut parts: Vec<Part> = KEEP
        .iter()
        .filter_map(|(group, what)| {
            let sizes = model.parameters_of(*group)?.sizes;
            Some(part(kept.get(group).copied().unwrap_or(0), what, &kept_by(config, *group, sizes)))
        })
        .collect();
    let arena = prediction.memory.activations;
    let dropped = arena.total_bytes.unwrap_or(arena.peak_bytes).saturating_sub(kept.values().sum());
    parts.push(part(dropped, "copies of weights and temporaries of a step,", weights));
    parts
}

/// Saved bytes by group. Routers are counted with the experts, and all other layers with the norms.
fn kept(model: &ModelSpec, prediction: &Prediction) -> HashMap<Group, usize> {
    let groups = model.groups();
    let mut sums = HashMap::new();
    for entry in prediction.ledger.unique() {
        let group = match groups.get(&entry.layer).copied().unwrap_or(Group::Norms) {
            Group::Routers => Group::Experts,
            Group::Tables => Group::Norms,
            group => group,
        };
        *sums.entry(group).or_default() += entry.bytes;
    }
    sums
}

/// The sizes that determine a group's saved bytes: the sizes of the group's weights, but with `top_k` instead of the number of experts.
fn kept_by(config: &Config, group: Group, weights: Vec<Size>) -> Vec<Size> {
    let top_k = Size::new("model.top_k", config.model.top_k);
    let of_experts = |size: Size| if size.key == "model.experts" { top_k } else { size };
    match group {
        Group::Experts => weights.into_iter().map(of_experts).collect(),
        _ => weights,
    }
}

/// Estimates the activations as a number of BF16 tensors per token and layer.
fn estimated_activations(config: &Config, model: &ModelSpec) -> Part {
    let m = &config.model;
    let tokens = tokens(config);
    let bytes = 2.0 * model.kept_values() * tokens.iter().map(|size| size.value as f64).product::<f64>();
    let wide = if m.experts == 0 { Size::new("model.ffn", m.ffn) } else { Size::new("model.top_k", m.top_k) };
    let more = [Size::new("model.layers", m.layers), Size::new("model.d_model", m.d_model), wide];
    Part { bytes, what: "activations, about".into(), sizes: [&tokens[..], &more].concat() }
}

fn tokens(config: &Config) -> [Size; 2] {
    [Size::new("train.batch_size", config.train.batch_size), Size::new("data.seq_len", config.data.seq_len)]
}
