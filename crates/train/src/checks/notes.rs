//! What a recipe does not decide for a model, or decides otherwise than it is written. It is no mistake, since a recipe is used with several
//! models, and is told before a run.

use super::{idle_overrides, measures_nothing};
use crate::config::Config;
use crate::spec::{BlockSpec, ModelSpec, ParamSpec, Part};
use nibble_core::recipe::{Contracted, Layer, LayerKind, Passes, Shortened, Widths};
use nibble_core::{DType, Recipe};

/// Adapts a recipe to a run of this configuration. In the returned recipe, selections use the run's numbers of layers and steps, and
/// transforms fit the model's widths ([`Recipe::with_widths`]).
#[must_use]
pub fn for_run(config: &Config, recipe: Recipe) -> Recipe {
    recipe.in_run(config.run_size()).with_widths(widths(&ModelSpec::new(&config.model)))
}

/// What the products of a model's layers contract. Wgrad contracts a shard's tokens, which the blocks of any recipe divide.
fn widths(spec: &ModelSpec) -> Widths {
    let of = |part: &Part| -> Option<(String, Contracted)> {
        let matrices = || part.weights().iter().filter(|weight: &&ParamSpec| !weight.is_vector());
        let cols = matrices().map(|weight| weight.cols.len()).fold(0, common_divisor);
        let rows = matrices().map(|weight| weight.rows.len()).fold(0, common_divisor);
        Some((part.layer()?.name, [cols, rows, 0]))
    };
    let of_block = |block: BlockSpec| block.parts().into_iter().filter_map(of).collect::<Vec<_>>();
    spec.blocks().flat_map(of_block).chain(of(&spec.head)).collect()
}

/// The greatest common divisor; that of 0 and a number is the number.
fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Messages that the user should read before a run with this recipe and this configuration. Each message is one line.
#[must_use]
pub fn notes(config: &Config, recipe: &Recipe) -> Vec<String> {
    let layers = ModelSpec::new(&config.model).recipe_layers();
    let recipe = for_run(config, recipe.clone());
    let mut lines = match decides_nothing(&recipe, &layers) {
        Some(line) => vec![line],
        None => {
            let named = |line: String| format!("warning: recipe {}: {line}", recipe.name);
            let idle = idle_overrides(config, &recipe).into_iter();
            unmatched(&recipe, &layers).into_iter().chain(idle).map(named).collect()
        }
    };
    lines.extend(shortened(&recipe, &layers));
    lines.extend(measures_nothing(config, &recipe));
    lines
}

/// Whether a recipe has blocks somewhere, and no layer of the model at any point of a run.
fn decides_nothing(recipe: &Recipe, layers: &[Layer]) -> Option<String> {
    let plain = Recipe::builtin(if recipe.activations == DType::F32 { "f32" } else { "bf16" }).ok()?;
    let quantizes = |kind: LayerKind| recipe.of(kind).has_blocks();
    let sections: Vec<_> = LayerKind::ALL.into_iter().filter(|kind| quantizes(*kind)).collect();
    let is_plain = |layer: &Layer| {
        let plan = |recipe: &Recipe, progress| recipe.plan(layer, progress, Passes::TRAINING);
        recipe.boundaries().into_iter().all(|progress| plan(recipe, progress) == plan(&plain, 0.0))
    };
    if sections.is_empty() && recipe.overrides.is_empty() || !layers.iter().all(is_plain) {
        return None;
    }
    let absent = |kind: &LayerKind| layers.iter().all(|layer| layer.kind != *kind);
    let sections = sections.iter().filter(|kind| absent(kind));
    let mut rules: Vec<String> =
        sections.map(|kind| format!("its [{}] matches no layer", kind.name())).collect();
    rules.extend(unmatched(recipe, layers));
    let rules = if rules.is_empty() { String::new() } else { format!(" ({})", rules.join("; ")) };
    Some(format!(
        "warning: recipe {} decides nothing for this model: every layer has the precisions of recipe {}{rules}",
        recipe.name, plain.name
    ))
}

/// The optional overrides that match no layer of a model.
fn unmatched(recipe: &Recipe, layers: &[Layer]) -> Vec<String> {
    let several = recipe.overrides.len() > 1;
    let is_met = |o: &nibble_core::recipe::Override| {
        !o.optional || layers.iter().any(|layer| o.is_for(layer.kind, &layer.name, recipe.run))
    };
    let of = recipe.overrides.iter().enumerate().filter(|(_, o)| !is_met(o));
    let named = |(i, o): (usize, &nibble_core::recipe::Override)| {
        let number = if several { format!("[{}]", i + 1) } else { String::new() };
        format!("`override{number}` of {} matches no layer of this model", o.whose())
    };
    of.map(named).collect()
}

/// Transforms that a model's widths shorten, one line for each product and length.
fn shortened(recipe: &Recipe, layers: &[Layer]) -> Vec<String> {
    let mut groups: Vec<(Shortened, Vec<String>)> = Vec::new();
    for new in recipe.shortened(layers) {
        let of = format!("{} ({})", in_any_block(&new.layer), new.contracted);
        let same = |(old, _): &&mut (Shortened, Vec<String>)| {
            (old.kind, old.product, old.from, old.to) == (new.kind, new.product, new.from, new.to)
        };
        match groups.iter_mut().find(same) {
            Some((_, layers)) if layers.contains(&of) => {}
            Some((_, layers)) => layers.push(of),
            None => groups.push((new, vec![of])),
        }
    }
    let line = |(Shortened { kind, product, from, to, .. }, layers): (Shortened, Vec<String>)| {
        let key = format!("{}.{}", kind.name(), product.rht_key());
        let becomes = match to {
            Some(to) => format!("transforms {to} numbers at a time instead of {from}"),
            None => format!(
                "transforms nothing instead of {from} numbers at a time, and its operands have no correction,"
            ),
        };
        format!(
            "warning: recipe {}: {key} {becomes} where {from} does not divide what {} contracts: {}",
            recipe.name,
            product.name(),
            layers.join(", ")
        )
    };
    groups.into_iter().map(line).collect()
}

/// A layer's name without that of its decoder layer.
fn in_any_block(layer: &str) -> String {
    let parts: Vec<&str> = layer.split('.').collect();
    let number = parts.iter().position(|part| part.parse::<usize>().is_ok());
    parts[number.map_or(0, |number| number + 1)..].join(".")
}
