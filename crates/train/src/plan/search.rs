//! The shortest list of settings with which a run would fit: alternatives, rehearsed.

use super::predict;
use crate::checks::checked_recipe;
use crate::config::{Config, PlainType};
use crate::error::{Error, Result};
use crate::recompute::Scope;
use nibble_core::DeviceKind;
use std::path::Path;

/// A way to take less memory: for a configuration its alternatives, each a list of overrides, the mildest first. None where
/// there is nothing to gain.
type Way = fn(&Config) -> Vec<Vec<String>>;

/// Every way, those that change the fewest numbers first. Another one is another line.
const WAYS: &[Way] =
    &[recomputation, smaller_micro_batches, bf16_gradients, bf16_moments, four_bit_activations];

/// The same numbers, for time: a little at first, a forward pass in the end.
fn recomputation(config: &Config) -> Vec<Vec<String>> {
    const MORE: [&[Scope]; 5] = [
        &[],
        &[Scope::ExpertInput],
        &[Scope::ExpertInput, Scope::Attention],
        &[Scope::Attention, Scope::Experts],
        &[Scope::Layers],
    ];
    let own = Scope::normal(&config.train.recompute);
    let possible = |scope: &Scope| *scope != Scope::ExpertInput || config.model.experts > 0;
    let more = |more: &&[Scope]| {
        let mut scopes = [&own, &Scope::DEFAULT[..], more].concat();
        scopes.retain(possible);
        Scope::normal(&scopes)
    };
    let mut choices: Vec<Vec<Scope>> = MORE.iter().map(more).collect();
    choices.dedup();
    choices.retain(|choice| *choice != own);
    let setting = |choice: Vec<Scope>| {
        let names: Vec<String> = choice.iter().map(|scope| format!("{:?}", scope.name())).collect();
        vec![format!("train.recompute=[{}]", names.join(", "))]
    };
    choices.into_iter().map(setting).collect()
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

fn bf16_gradients(config: &Config) -> Vec<Vec<String>> {
    let possible = config.train.grad_dtype == PlainType::F32;
    possible.then(|| vec!["train.grad_dtype=bf16".into()]).into_iter().collect()
}

fn bf16_moments(config: &Config) -> Vec<Vec<String>> {
    let possible = config.train.moment_dtype == PlainType::F32;
    possible.then(|| vec!["train.moment_dtype=bf16".into()]).into_iter().collect()
}

fn four_bit_activations(config: &Config) -> Vec<Vec<String>> {
    const RECIPE: &str = "mxfp4-hopper";
    (config.recipe != RECIPE).then(|| vec![format!("recipe={RECIPE}")]).into_iter().collect()
}

/// Settings, and what a device needs with them.
pub(super) struct Found {
    pub settings: Vec<String>,
    pub bytes: usize,
}

/// The first settings that fit into so many bytes, of one way, else of two, and so on; where none do, those that take the
/// least. None where nothing can be set.
///
/// # Errors
/// If the configuration cannot be written down.
pub(super) fn shortest(
    kind: DeviceKind,
    ranks: usize,
    config: &Config,
    there: usize,
) -> Result<Option<Found>> {
    let text = config.resolved_toml()?;
    // What cannot be, or is beyond counting, is passed over.
    let bytes = |settings: &[String]| {
        let tried = || -> Result<usize> {
            let config = Config::from_text(&text, Path::new("configuration"), settings)?;
            Ok(predict(kind, ranks, &config, &checked_recipe(&config)?)?.device_bytes())
        };
        match tried() {
            Ok(bytes) => Some(bytes),
            Err(Error::Memory { needed, .. }) => Some(needed),
            Err(_) => None,
        }
    };
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
            return Ok(strongest);
        }
    }
    Ok(least)
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
