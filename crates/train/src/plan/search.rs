//! Searches the shortest list of settings with which a run would fit. The search rehearses alternatives.

use super::{Prediction, predict};
use crate::checks::checked_recipe;
use crate::config::{Config, PlainType};
use crate::error::{Error, Result};
use crate::recompute::{Recompute, Scope};
use nibble_core::{DeviceKind, MeshShape};
use std::path::Path;

/// A way to reduce memory. For a configuration, the function returns alternatives, mildest first; each alternative is a list of overrides.
/// The result is empty if the way saves nothing.
type Way = fn(&Config) -> Vec<Vec<String>>;

/// All ways to reduce memory, ordered by their effect on a run's numbers, smallest effect first. A new way is a new entry.
const WAYS: &[Way] = &[
    recomputation,
    smaller_micro_batches,
    |config| one(config.train.grad_dtype == PlainType::F32, "train.grad_dtype=bf16"),
    |config| one(config.train.moment_dtype == PlainType::F32, "train.moment_dtype=bf16"),
    // `mxfp4-hopper` saves activations in four bits.
    |config| one(config.recipe != "mxfp4-hopper", "recipe=mxfp4-hopper"),
];

/// A single alternative, if it saves memory.
fn one(gains: bool, setting: &str) -> Vec<Vec<String>> {
    gains.then(|| vec![setting.to_owned()]).into_iter().collect()
}

/// More recomputation, which gives the same numbers at the cost of time: first little time, at most the time of a forward pass.
fn recomputation(config: &Config) -> Vec<Vec<String>> {
    more_recomputation(config).iter().map(|recompute| vec![recompute.setting()]).collect()
}

/// Values of `train.recompute` that extend the value in the configuration, cheapest first.
pub(super) fn more_recomputation(config: &Config) -> Vec<Recompute> {
    const MORE: [&[Scope]; 6] = [
        &[],
        &[Scope::MlaUp],
        &[Scope::MlaUp, Scope::ExpertInput],
        &[Scope::ExpertInput, Scope::Attention],
        &[Scope::Attention, Scope::Mlp, Scope::Experts],
        &[Scope::Layers],
    ];
    let (model, own) = (&config.model, config.train.recompute.normal());
    // In a model without experts, `experts` means `mlp`.
    let possible = |scope: &Scope| scope.is_of(model) && (*scope != Scope::Experts || model.experts > 0);
    let more = |more: &&[Scope]| {
        let scopes = [&Scope::DEFAULT[..], more].concat();
        own.with(&scopes.into_iter().filter(possible).collect::<Vec<_>>())
    };
    let mut choices: Vec<Recompute> = MORE.iter().map(more).collect();
    choices.dedup();
    choices.retain(|choice| *choice != own);
    choices
}

/// More and smaller micro-batches with the same number of tokens per step.
fn smaller_micro_batches(config: &Config) -> Vec<Vec<String>> {
    let t = &config.train;
    let parts = (1..usize::BITS).map(|power| 1usize << power);
    let divides = |parts: &usize| (t.batch_size / t.shards.max(1)).is_multiple_of(*parts);
    let settings = |parts: usize| {
        let (size, accum) = (t.batch_size / parts, t.grad_accum.saturating_mul(parts));
        vec![format!("train.batch_size={size}"), format!("train.grad_accum={accum}")]
    };
    parts.take_while(divides).map(settings).collect()
}

/// Settings, and the device memory that a run needs with them.
pub(super) struct Found {
    pub settings: Vec<String>,
    pub bytes: usize,
}

/// Number of layers of the shorter model that is rehearsed instead of a much deeper model.
const SHORT: usize = 8;

/// The first settings with which the run fits into `there` bytes. Settings from one way are tried first, then from two ways, and so on. If
/// no settings suffice, the result is the settings that need the least memory. `None` if no setting is possible.
///
/// Instead of a deep model, the search rehearses shorter models with the same kinds of layers. The whole model is then rehearsed with the
/// settings found. If this rehearsal contradicts the search, every alternative is rehearsed with the whole model.
///
/// # Errors
/// Returns an error if the configuration cannot be written as TOML.
pub(super) fn shortest(
    kind: DeviceKind,
    mesh: MeshShape,
    host_ranks: usize,
    config: &Config,
    there: usize,
) -> Result<Option<Found>> {
    let text = config.resolved_toml()?;
    // Invalid settings are skipped.
    let bytes_by = |settings: &[String], rehearse: &dyn Fn(&Config) -> Result<usize>| {
        let tried = Config::from_text(&text, Path::new("configuration"), settings);
        match tried.and_then(|config| rehearse(&config)) {
            Ok(bytes) => Some(bytes),
            Err(Error::Memory { needed, .. }) => Some(needed),
            Err(_) => None,
        }
    };
    let whole = |config: &Config| -> Result<usize> {
        let predicted = predict(kind, mesh, config, &checked_recipe(config)?)?;
        Ok(Prediction { host_ranks, ..predicted }.device_bytes())
    };
    let exact = |settings: &[String]| bytes_by(settings, &whole);
    if config.model.layers > 4 * SHORT
        && !config.train.recompute.is_by_layer()
        && config.model.num_dense().min(config.model.num_routed()) < SHORT
    {
        let near = |settings: &[String]| bytes_by(settings, &|config| by_shorter(config, &whole));
        let Some(found) = search(config, there, &near) else { return Ok(None) };
        if let Some(bytes) =
            exact(&found.settings).filter(|bytes| (*bytes <= there) == (found.bytes <= there))
        {
            return Ok(Some(Found { bytes, ..found }));
        }
    }
    Ok(search(config, there, &exact))
}

/// Estimates a deep model's memory from two shorter models.
fn by_shorter(config: &Config, rehearse: &dyn Fn(&Config) -> Result<usize>) -> Result<usize> {
    let of = |layers: usize| {
        let mut shorter = config.clone();
        // The shorter model loses layers of the more numerous kind.
        if config.model.num_dense() > config.model.num_routed() && config.model.experts > 0 {
            shorter.model.dense_layers = layers - config.model.num_routed();
        }
        shorter.model.layers = layers;
        rehearse(&shorter)
    };
    let (less, more) = (of(SHORT)?, of(2 * SHORT)?);
    let each = more.saturating_sub(less) / SHORT;
    Ok(less.saturating_add(each.saturating_mul(config.model.layers - SHORT)))
}

/// Searches the settings. `bytes` returns the memory that the run needs with these settings.
fn search(config: &Config, there: usize, bytes: &dyn Fn(&[String]) -> Option<usize>) -> Option<Found> {
    let all = bytes(&[]).unwrap_or(usize::MAX);
    // An alternative is dropped if it saves no memory over a milder alternative.
    let gaining = |way: &Way| {
        let mut least = all;
        let mut gains = |settings: &Vec<String>| match bytes(settings) {
            Some(bytes) if bytes < least || bytes == usize::MAX => {
                least = bytes;
                true
            }
            _ => false,
        };
        way(config).into_iter().filter(|settings| gains(settings)).collect::<Vec<_>>()
    };
    let ways: Vec<Vec<Vec<String>>> =
        WAYS.iter().map(gaining).filter(|alternatives| !alternatives.is_empty()).collect();
    let mut least: Option<Found> = None;
    let mut subsets: Vec<u32> = (1..1u32 << ways.len()).collect();
    // The subsets are sorted by the number of ways, then by the order of the table.
    subsets.sort_by_key(|subset| (subset.count_ones(), std::cmp::Reverse(subset.reverse_bits())));
    for subset in subsets {
        let chosen: Vec<&Vec<Vec<String>>> =
            ways.iter().enumerate().filter(|(i, _)| subset >> i & 1 == 1).map(|(_, way)| way).collect();
        let mut strongest = None;
        for settings in combinations(&chosen).into_iter().rev() {
            let Some(bytes) = bytes(&settings) else { continue };
            if least.as_ref().is_none_or(|least| bytes < least.bytes) {
                least = Some(Found { settings: settings.clone(), bytes });
            }
            // The loop goes from the strongest alternative to the mildest alternative that fits.
            if bytes > there {
                break;
            }
            strongest = Some(Found { settings, bytes });
        }
        if strongest.is_some() {
            return strongest;
        }
    }
    least
}

/// All combinations of one alternative from each way, mildest first.
fn combinations(ways: &[&Vec<Vec<String>>]) -> Vec<Vec<String>> {
    ways.iter().fold(vec![Vec::new()], |made, way| {
        made.iter()
            .flat_map(|settings| way.iter().map(|more| [settings.clone(), more.clone()].concat()))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_is_tried_the_mildest_first() {
        let way = |names: &[&str]| names.iter().map(|name| vec![(*name).to_owned()]).collect::<Vec<_>>();
        let (one, two) = (way(&["a"]), way(&["b", "c"]));
        assert_eq!(combinations(&[&one, &two]), [["a", "b"], ["a", "c"]]);
        assert_eq!(combinations(&[]), [Vec::<String>::new()]);
    }

    #[test]
    fn what_a_deep_model_takes_is_near_what_shorter_ones_say() {
        for (name, sets) in [
            ("tiny", &["model.layers=200"][..]),
            ("tiny", &["model.layers=200", "model.dense_layers=3", "model.ffn=64"]),
            ("tiny", &["model.layers=200", "model.dense_layers=195", "model.ffn=64"]),
            ("tiny-dense", &["model.layers=200", "recipe=bf16"]),
        ] {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            let config = Config::load(name, &sets).unwrap();
            for kind in [DeviceKind::Host, DeviceKind::Gpu] {
                // The device's own memory is not counted here, because it would hide differences.
                let whole = |config: &Config| -> Result<usize> {
                    let prediction = predict(kind, MeshShape::ONE, config, &checked_recipe(config)?)?;
                    Ok(prediction.memory.arenas().iter().map(|(_, stats)| stats.peak_bytes).sum())
                };
                let (near, is) = (by_shorter(&config, &whole).unwrap(), whole(&config).unwrap());
                assert!(near.abs_diff(is) <= is / 100, "{name} {sets:?} {kind:?}: {near} for {is}");
            }
        }
    }

    #[test]
    fn recomputation_goes_on_from_what_is_set() {
        let of = |scopes: &str| {
            let config = Config::load("tiny", &[format!("train.recompute={scopes}")]).unwrap();
            recomputation(&config).concat()
        };
        let all = [
            r#"["norms", "swiglu", "expert_input"]"#,
            r#"["norms", "swiglu", "expert_input", "attention"]"#,
            r#"["norms", "swiglu", "attention", "experts"]"#,
            r#"["norms", "swiglu", "layers"]"#,
        ]
        .map(|scopes| format!("train.recompute={scopes}"));
        assert_eq!(of(r#"["norms", "swiglu"]"#), all);
        assert_eq!(of("[]")[0], r#"train.recompute=["norms", "swiglu"]"#);
        assert_eq!(of("[]")[1..], all);
        let attention = r#"["norms", "swiglu", "attention"]"#;
        assert_eq!(of(attention), all[1..]);
        assert_eq!(of(r#"["layers"]"#), all[3..]);
        assert_eq!(of(r#"["swiglu", "layers", "norms", "experts"]"#), [""; 0]);
    }

    #[test]
    fn latent_attention_may_make_its_heads_again_first() {
        let sets =
            ["kv_rank=32", "rope_dim=8", "kv_heads=4", "qk_norm=false"].map(|set| format!("model.{set}"));
        let config = Config::load("tiny", &sets).unwrap();
        let all = [
            r#"["norms", "swiglu", "mla_up"]"#,
            r#"["norms", "swiglu", "expert_input", "mla_up"]"#,
            r#"["norms", "swiglu", "expert_input", "attention"]"#,
            r#"["norms", "swiglu", "attention", "experts"]"#,
            r#"["norms", "swiglu", "layers"]"#,
        ];
        assert_eq!(recomputation(&config).concat(), all.map(|scopes| format!("train.recompute={scopes}")));
    }

    #[test]
    fn a_dense_model_has_no_experts_input_to_make_again() {
        let config = Config::load("tiny-dense", &[]).unwrap();
        let all = [
            r#"["norms", "swiglu", "attention"]"#,
            r#"["norms", "swiglu", "attention", "mlp"]"#,
            r#"["norms", "swiglu", "layers"]"#,
        ];
        assert_eq!(recomputation(&config).concat(), all.map(|scopes| format!("train.recompute={scopes}")));
    }

    #[test]
    fn micro_batches_are_halved_as_often_as_shards_allow() {
        let changes = ["train.batch_size=24", "train.shards=2", "train.grad_accum=3"].map(String::from);
        let config = Config::load("tiny", &changes).unwrap();
        let settings = smaller_micro_batches(&config);
        assert_eq!(
            settings,
            [["train.batch_size=12", "train.grad_accum=6"], ["train.batch_size=6", "train.grad_accum=12"]]
        );
    }
}
