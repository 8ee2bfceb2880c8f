//! Finds overrides of a recipe that have no effect in a run. Overrides without effect are mistakes.

use super::steps_of_change;
use nibble_core::recipe::{Layer, Override};
use nibble_core::{Error, Recipe, Result};

/// The overrides that have no effect on these layers in a run of `steps` steps: the key of each override, and the reason.
pub(super) fn idle<'a>(
    recipe: &'a Recipe,
    layers: &'a [Layer],
    steps: u64,
) -> impl Iterator<Item = (String, String)> + 'a {
    let several = recipe.overrides.len() > 1;
    recipe.overrides.iter().enumerate().filter_map(move |(i, o)| {
        let why = why_idle(recipe, (i, o), layers, steps)?;
        // If there are several overrides, the key contains the override's number, from 1.
        let key = if several { format!("override[{}]", i + 1) } else { "override".into() };
        Some((key, format!("has no effect: {why}")))
    })
}

/// Refuses the first override without effect on these layers in a run of `steps` steps.
pub(super) fn check(recipe: &Recipe, layers: &[Layer], steps: u64) -> Result<()> {
    match idle(recipe, layers, steps).next() {
        Some((key, why)) => Err(Error::Recipe { recipe: recipe.name.clone(), key, why }),
        None => Ok(()),
    }
}

/// The reason why an override has no effect; `None` if the override has an effect.
fn why_idle(recipe: &Recipe, (i, o): (usize, &Override), layers: &[Layer], steps: u64) -> Option<String> {
    if !layers.iter().any(|layer| o.is_for(layer.kind, &layer.name, recipe.run)) {
        // An optional override may match no layer of this model.
        return (!o.optional).then(|| "no layer name matches".to_owned());
    }
    let mut starts = steps_of_change(recipe, steps);
    starts.pop();
    let at = |step: &u64| *step as f64 / steps as f64;
    let covered: Vec<f64> = starts.iter().map(at).filter(|progress| o.holds(*progress, recipe.run)).collect();
    if covered.is_empty() {
        let written = o.steps.to_string();
        return Some(format!("{} has none of the {steps} steps", written.trim_end_matches(" steps")));
    }
    let with = |overrides: Vec<Override>| Recipe { overrides, ..recipe.clone() };
    let differ = |a: &Recipe, b: &Recipe| {
        layers.iter().any(|layer| {
            let section = |recipe: &Recipe, progress| recipe.section(layer.kind, &layer.name, progress);
            covered.iter().any(|progress| !layer.same(&section(a, *progress), &section(b, *progress)))
        })
    };
    let mut others = recipe.overrides.clone();
    others.remove(i);
    if differ(recipe, &with(others)) {
        return None;
    }
    let until = |end: usize| with(recipe.overrides[..end].to_vec());
    Some(match differ(&until(i), &until(i + 1)) {
        true => "later overrides replace it wherever it applies".to_owned(),
        false => "every layer that it matches has the same setting without it".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::recipe::{LayerKind, RunSize};

    fn checked(overrides: &str, steps: u64) -> std::result::Result<(), String> {
        let named = |kind, name: &str| Layer { kind, name: name.into(), gated: false };
        let layers = [
            named(LayerKind::Linear, "model.layers.0.self_attn.q_proj"),
            named(LayerKind::Expert, "model.layers.0.mlp.experts"),
        ];
        let recipe = Recipe::parse("mine", &format!("extends = \"fp8-flow\"\n{overrides}")).unwrap();
        let recipe = recipe.in_run(RunSize { decoder_layers: 1, steps });
        check(&recipe, &layers, steps).map_err(|e| e.to_string())
    }

    const LATE: &str = "[[override]]\nsteps = \"0.94..1\"\nset.recipe = \"bf16\"\n";

    #[test]
    fn an_override_of_no_step_is_refused() {
        assert_eq!(checked(LATE, 100), Ok(()));
        assert_eq!(checked(LATE, 17), Ok(()), "0.94 · 17 is before the last step");
        let e = checked(LATE, 10).unwrap_err();
        assert!(e.contains("0.94..1 has none of the 10 steps"), "{e}");
        let numbers = "[[override]]\nsteps = \"10..20 steps\"\nset.recipe = \"bf16\"\n";
        assert_eq!(checked(numbers, 11), Ok(()));
        let e = checked(numbers, 10).unwrap_err();
        assert!(e.contains("10..20 has none of the 10 steps"), "{e}");
    }

    #[test]
    fn an_override_that_later_ones_hide_is_refused_and_said_which() {
        let all = "[[override]]\nset.recipe = \"fp8-block\"\n";
        let e = checked(&format!("{LATE}{all}"), 100).unwrap_err();
        assert!(e.contains("override[1]") && e.contains("later overrides"), "{e}");
        assert_eq!(checked(&format!("{all}{LATE}"), 100), Ok(()));
        let some = "[[override]]\nlayers = \"*.experts\"\nset.recipe = \"fp8-block\"\n";
        assert_eq!(checked(&format!("{LATE}{some}"), 100), Ok(()), "q_proj still follows the first");
    }

    #[test]
    fn an_override_to_what_is_so_already_is_refused() {
        let e = checked("[[override]]\nset.recipe = \"fp8-flow\"\n", 100).unwrap_err();
        assert!(e.contains("same setting without it"), "{e}");
        let h = "[[override]]\nset.expert.saved.h = { format = \"mxfp4\" }\n";
        assert_eq!(checked(h, 100), Ok(()));
    }

    #[test]
    fn an_override_of_layers_that_are_not_there_is_refused_unless_it_is_optional() {
        let shared = "[[override]]\nlayers = \"*.shared_experts.*\"\nset.recipe = \"bf16\"\n";
        let e = checked(shared, 100).unwrap_err();
        assert!(e.contains("no layer name matches"), "{e}");
        assert_eq!(checked(&format!("{shared}optional = true\n"), 100), Ok(()));
    }
}
