//! Checks of a run before it starts.

mod overrides;
pub(crate) mod recipe_file;
mod sizes;

pub use sizes::check_sizes;
pub(crate) use sizes::listed;

use crate::config::{Combine, Config, absent};
use crate::error::Result;
use crate::spec::{ModelSpec, ParamSpec, Part};
use nibble_core::Recipe;
use nibble_core::recipe::{LayerPlan, Passes, Product, ProductPlan, RunSize, Section};
use recipe_file::path_of;
use std::path::PathBuf;

/// A built-in recipe by name, or a recipe file by path.
///
/// # Errors
/// [`nibble_core::Error::Recipe`] for an unknown name; [`crate::Error::Config`] with path and line for a bad file; errors of reading it.
pub fn load_recipe(name_or_path: &str) -> Result<Recipe> {
    match path_of(name_or_path) {
        Some(path) => recipe_file::load(path),
        None => Recipe::builtin(name_or_path).map_err(|error| match error {
            nibble_core::Error::Recipe { recipe, key, why } => {
                let why = why + &absent(&recipe);
                nibble_core::Error::Recipe { recipe, key, why }.into()
            }
            other => other.into(),
        }),
    }
}

/// The files that [`load_recipe`] reads: a recipe file, and the recipe files that it names. None for a built-in recipe.
#[must_use]
pub fn recipe_files(name_or_path: &str) -> Vec<PathBuf> {
    recipe_file::files_of(name_or_path)
}

/// The recipe of a configuration, after checking that both fit each other.
///
/// # Errors
/// For a recipe that cannot be read, as [`check_recipe`], and for an override in a recipe file that has no effect in this run.
pub fn checked_recipe(config: &Config) -> Result<Recipe> {
    check_sizes(config)?;
    let recipe = load_recipe(&config.recipe)?.in_run(config.run_size());
    let Some(path) = path_of(&config.recipe) else {
        check_recipe(config, &recipe)?;
        return Ok(recipe);
    };
    check_recipe(config, &recipe)
        .and_then(|()| {
            Ok(overrides::check(&recipe, &ModelSpec::new(&config.model).recipe_layers(), config.train.steps)?)
        })
        .map_err(|error| recipe_file::in_file(error, path))?;
    Ok(recipe)
}

/// The overrides of a recipe that have no effect in a run of this configuration, one line each. [`checked_recipe`] refuses them in a file,
/// whose author can fix them; in a built-in recipe they are no mistake of the user, whose model and steps may differ.
#[must_use]
pub fn idle_overrides(config: &Config, recipe: &Recipe) -> Vec<String> {
    let recipe = recipe.clone().in_run(config.run_size());
    let layers = ModelSpec::new(&config.model).recipe_layers();
    overrides::idle(&recipe, &layers, config.train.steps).map(|(key, why)| format!("`{key}` {why}")).collect()
}

/// Checks that a configuration and a recipe fit each other.
///
/// # Errors
/// For uncountable sizes, an override without matching layers, a batch that the recipe's blocks do not divide, a transform that does not
/// divide a contracted dimension, or a `train.combine` that quantized rows do not allow.
pub fn check_recipe(config: &Config, recipe: &Recipe) -> Result<()> {
    check_sizes(config)?;
    check_blocks(config, recipe)?;
    check_transforms(config, recipe)?;
    check_combine(config, recipe)
}

/// A note if steps are to measure quantization and the recipe has none. That is no mistake: a configuration is used with several recipes.
#[must_use]
pub fn measures_nothing(config: &Config, recipe: &Recipe) -> Option<String> {
    let every = config.train.quantization_every;
    let sections = recipe.sections(&ModelSpec::new(&config.model).recipe_layers()).ok()?;
    let has_none = every > 0 && !sections.iter().any(Section::has_blocks);
    has_none.then(|| {
        format!(
            "train.quantization_every = {every} measures nothing: recipe {} quantizes no tensor",
            recipe.name
        )
    })
}

/// Checks that each transform divides the dimension that its product contracts. Wgrad contracts whole shards, whose size `check_blocks`
/// checks.
fn check_transforms(config: &Config, recipe: &Recipe) -> Result<()> {
    let spec = ModelSpec::new(&config.model);
    let takes = |part: &Part| {
        let Some(layer) = part.layer() else { return Ok(()) };
        let points = recipe.boundaries();
        points
            .into_iter()
            .try_for_each(|point| part_takes(part, &recipe.plan(&layer, point, Passes::TRAINING), recipe))
    };
    spec.blocks().try_for_each(|block| block.parts().into_iter().try_for_each(takes))
}

/// [`check_transforms`] for one part of the model.
fn part_takes(part: &Part, plan: &LayerPlan, recipe: &Recipe) -> Result<()> {
    let matrices: Vec<&ParamSpec> = part.weights().iter().filter(|weight| !weight.is_vector()).collect();
    for ProductPlan { product, weight, transform, .. } in &plan.products {
        let (Some(transform), Some(weight)) = (transform, matrices.get(*weight)) else { continue };
        let contracted = match product {
            Product::Fprop => weight.cols.len(),
            Product::Dgrad => weight.rows.len(),
            Product::Wgrad => continue,
        };
        if !contracted.is_multiple_of(transform.len) {
            let (len, product_name, id) = (transform.len, product.name(), &weight.id);
            let why = format!(
                "transforms {len} numbers at a time, and {product_name} of {id} contracts {contracted}"
            );
            let key = format!("{}.{}", plan.layer.kind.name(), product.rht_key());
            return Err(nibble_core::Error::Recipe { recipe: recipe.name.clone(), key, why }.into());
        }
    }
    Ok(())
}

/// Checks that `train.combine` is possible if the recipe sends rows back quantized.
fn check_combine(config: &Config, recipe: &Recipe) -> Result<()> {
    match (config.train.combine, recipe.quantized_combine()) {
        (Some(Combine::Tree), Some((site, format))) => {
            let why = format!(
                "is \"tree\", but recipe {} has expert.{} in {format}: the tree's sums would be rounded between ranks, and depend on the \
                 mesh; use \"slots\", or send the rows in the activations' type",
                recipe.name,
                site.key()
            );
            Err(crate::Error::config("train.combine", why))
        }
        _ => Ok(()),
    }
}

/// The steps of a run at which a recipe's precisions may change, and `steps` itself.
#[must_use]
pub fn steps_of_change(recipe: &Recipe, steps: u64) -> Vec<u64> {
    let at = |progress| first_step_at(progress, steps);
    let mut found: Vec<u64> = recipe.boundaries().into_iter().map(at).filter(|step| *step < steps).collect();
    found.push(steps);
    found.sort_unstable();
    found.dedup();
    found
}

/// The first of `steps` steps whose progress (step / steps) is at least `progress`.
#[must_use]
pub fn first_step_at(progress: f64, steps: u64) -> u64 {
    // The product may be rounded up: 7 / 100 · 100 is more than 7.
    let near = (progress * steps as f64).floor() as u64;
    let reaches = |step: &u64| *step as f64 / steps as f64 >= progress;
    (near.saturating_sub(1)..=near + 1).find(reaches).unwrap_or(steps)
}

impl Config {
    /// The sizes that a recipe's selections depend on.
    #[must_use]
    pub fn run_size(&self) -> RunSize {
        RunSize { decoder_layers: self.model.layers, steps: self.train.steps }
    }
}

/// Checks the batch against the recipe's blocks, in every layer at every point of the run. Widths that no block divides are padded with
/// zeros.
fn check_blocks(config: &Config, recipe: &Recipe) -> Result<()> {
    let sections = recipe.sections(&ModelSpec::new(&config.model).recipe_layers())?;
    if !sections.iter().any(Section::has_blocks) {
        return Ok(());
    }
    let shard = config.train.batch_size / config.train.shards * config.data.seq_len;
    if !shard.is_multiple_of(128) {
        let why = format!(
            "recipe {} sums weight gradients in blocks of 128 tokens, and a shard has {shard} \
             (batch_size / shards · seq_len); make it a multiple of 128",
            recipe.name
        );
        return Err(crate::Error::config("train.batch_size", why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every step of every number of steps: 7 / 100 · 100 is more than 7 in F64.
    #[test]
    fn the_first_step_at_a_steps_own_progress_is_that_step() {
        for steps in 1..300u64 {
            for step in 0..=steps {
                let progress = step as f64 / steps as f64;
                assert_eq!(first_step_at(progress, steps), step, "of {steps}");
                if step < steps {
                    assert_eq!(
                        first_step_at((step as f64 + 0.5) / steps as f64, steps),
                        step + 1,
                        "of {steps}"
                    );
                }
            }
        }
    }
}
