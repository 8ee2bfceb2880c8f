//! The shortest list of settings with which a run would fit: alternatives, rehearsed.

use super::{Prediction, predict};
use crate::checks::checked_recipe;
use crate::config::{Config, PlainType};
use crate::error::{Error, Result};
use crate::recompute::Scope;
use nibble_core::{DeviceKind, MeshShape};
use std::path::Path;

/// A way to take less memory: for a configuration its alternatives, each a list of overrides, the mildest first. None where
/// there is nothing to gain.
type Way = fn(&Config) -> Vec<Vec<String>>;

/// Every way, those that change the fewest numbers first. Another one is another line.
const WAYS: &[Way] = &[
    recomputation,
    smaller_micro_batches,
    |config| one(config.train.grad_dtype == PlainType::F32, "train.grad_dtype=bf16"),
    |config| one(config.train.moment_dtype == PlainType::F32, "train.moment_dtype=bf16"),
    // Activations of four bits.
    |config| one(config.recipe != "mxfp4-hopper", "recipe=mxfp4-hopper"),
];

/// This alternative, if there is something to gain.
fn one(gains: bool, setting: &str) -> Vec<Vec<String>> {
    gains.then(|| vec![setting.to_owned()]).into_iter().collect()
}

/// The same numbers, for time: a little at first, a forward pass in the end.
fn recomputation(config: &Config) -> Vec<Vec<String>> {
    more_recomputation(config).iter().map(|scopes| vec![Scope::setting(scopes)]).collect()
}

/// Lists for `train.recompute` that have more than the configuration's own, the cheapest first.
pub(super) fn more_recomputation(config: &Config) -> Vec<Vec<Scope>> {
    const MORE: [&[Scope]; 6] = [
        &[],
        &[Scope::MlaUp],
        &[Scope::MlaUp, Scope::ExpertInput],
        &[Scope::ExpertInput, Scope::Attention],
        &[Scope::Attention, Scope::Experts],
        &[Scope::Layers],
    ];
    let own = Scope::normal(&config.train.recompute);
    let possible = |scope: &Scope| match scope {
        Scope::ExpertInput => config.model.experts > 0,
        Scope::MlaUp => config.model.kv_rank > 0,
        _ => true,
    };
    let more = |more: &&[Scope]| {
        let mut scopes = [&own, &Scope::DEFAULT[..], more].concat();
        scopes.retain(possible);
        Scope::normal(&scopes)
    };
    let mut choices: Vec<Vec<Scope>> = MORE.iter().map(more).collect();
    choices.dedup();
    choices.retain(|choice| *choice != own);
    choices
}

/// As many tokens a step, in more and smaller micro-batches.
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

/// Settings, and what a device needs with them.
pub(super) struct Found {
    pub settings: Vec<String>,
    pub bytes: usize,
}

/// Layers of a model that is rehearsed in place of one of many more.
const SHORT: usize = 8;

/// The first settings that fit into so many bytes, of one way, else of two, and so on; where none do, those that take the
/// least. None where nothing can be set.
///
/// Deep models are tried by shorter ones, whose layers are alike; what comes of it is rehearsed whole, and should it be
/// otherwise then, every alternative is.
///
/// # Errors
/// If the configuration cannot be written down.
pub(super) fn shortest(
    kind: DeviceKind,
    mesh: MeshShape,
    host_ranks: usize,
    config: &Config,
    there: usize,
) -> Result<Option<Found>> {
    let text = config.resolved_toml()?;
    // What cannot be, or is beyond counting, is passed over.
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
    if config.model.layers > 4 * SHORT && config.model.num_dense().min(config.model.num_routed()) < SHORT {
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

/// About what a deep model takes, of two that are less deep.
fn by_shorter(config: &Config, rehearse: &dyn Fn(&Config) -> Result<usize>) -> Result<usize> {
    let of = |layers: usize| {
        let mut shorter = config.clone();
        // Those layers go of which there are more.
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

/// The search, by what `bytes` says that settings need.
fn search(config: &Config, there: usize, bytes: &dyn Fn(&[String]) -> Option<usize>) -> Option<Found> {
    let all = bytes(&[]).unwrap_or(usize::MAX);
    // What takes no less than something milder is no alternative.
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
    // By their number, then in the order of the table.
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
            // From the strongest on, as long as it fits: the mildest is what is wanted.
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

/// One alternative of each way, in every combination; the mildest first.
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
                // Without what the device takes for itself, which hides differences.
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
            r#"["norms", "swiglu", "attention", "experts"]"#,
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
