//! Checks of a configuration and its recipe before a run starts.

mod notes;
mod overrides;
pub(crate) mod recipe_file;
mod sizes;

pub use notes::{for_run, notes};
pub use sizes::check_sizes;
pub(crate) use sizes::listed;

use crate::config::{Combine, Config, absent};
use crate::error::Result;
use crate::spec::ModelSpec;
use nibble_core::Recipe;
use nibble_core::recipe::{RunSize, Section};
use recipe_file::path_of;
use std::path::PathBuf;

/// Loads a built-in recipe by name, or a recipe file by path.
///
/// # Errors
/// Returns [`nibble_core::Error::Recipe`] for an unknown name, [`crate::Error::Config`] with path and line for an invalid file, or an I/O
/// error.
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

/// The files that [`load_recipe`] reads: the recipe file itself, and the recipe files that the recipe file names. The list is empty for a
/// built-in recipe.
#[must_use]
pub fn recipe_files(name_or_path: &str) -> Vec<PathBuf> {
    recipe_file::files_of(name_or_path)
}

/// Loads the recipe of a configuration, and checks that recipe and configuration fit each other.
///
/// # Errors
/// Returns an error for a recipe that cannot be read, and for an override in a recipe file that has no effect in this run. Also returns the
/// errors of [`check_recipe`].
pub fn checked_recipe(config: &Config) -> Result<Recipe> {
    check_sizes(config)?;
    let recipe = for_run(config, load_recipe(&config.recipe)?);
    let Some(path) = path_of(&config.recipe) else {
        check_recipe(config, &recipe)?;
        return Ok(recipe);
    };
    check_recipe(config, &recipe)
        .and_then(|()| {
            let layers = ModelSpec::new(&config.model).recipe_layers();
            Ok(overrides::check(&recipe.clone().without_widths(), &layers, config.train.steps)?)
        })
        .map_err(|error| recipe_file::in_file(error, path))?;
    Ok(recipe)
}

/// The overrides of a recipe that have no effect in a run of this configuration. Each of the returned strings describes one override.
/// [`checked_recipe`] refuses overrides without effect in a recipe file, because the author of the file can fix them. In a built-in recipe,
/// an override without effect is not the user's mistake, because the user's model and number of steps may differ.
#[must_use]
pub fn idle_overrides(config: &Config, recipe: &Recipe) -> Vec<String> {
    // A model's widths may hide what an override decides in another model.
    let recipe = recipe.clone().in_run(config.run_size()).without_widths();
    let layers = ModelSpec::new(&config.model).recipe_layers();
    overrides::idle(&recipe, &layers, config.train.steps).map(|(key, why)| format!("`{key}` {why}")).collect()
}

/// Checks that a configuration and a recipe fit each other.
///
/// # Errors
/// Returns an error if sizes overflow, if an override matches no layer, or if the recipe's blocks do not divide the batch. Also returns an
/// error if the recipe quantizes rows in a way that `train.combine` does not allow.
pub fn check_recipe(config: &Config, recipe: &Recipe) -> Result<()> {
    check_sizes(config)?;
    check_blocks(config, recipe)?;
    check_combine(config, recipe)
}

/// Returns a note if the configuration requests measurements of quantization but the recipe quantizes nothing. The note is no error,
/// because a user may run one configuration with several recipes.
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

/// The steps at which the recipe's precisions may change in a run of `steps` steps. The last element is `steps`, the end of the run.
#[must_use]
pub fn steps_of_change(recipe: &Recipe, steps: u64) -> Vec<u64> {
    let at = |progress| first_step_at(progress, steps);
    let mut found: Vec<u64> = recipe.boundaries().into_iter().map(at).filter(|step| *step < steps).collect();
    found.push(steps);
    found.sort_unstable();
    found.dedup();
    found
}

/// The first step whose progress (step / `steps`) is at least `progress`, in a run of `steps` steps.
#[must_use]
pub fn first_step_at(progress: f64, steps: u64) -> u64 {
    // F64 may round the product up: 7 / 100 · 100 is more than 7.
    let near = (progress * steps as f64).floor() as u64;
    let reaches = |step: &u64| *step as f64 / steps as f64 >= progress;
    (near.saturating_sub(1)..=near + 1).find(reaches).unwrap_or(steps)
}

impl Config {
    /// The numbers of decoder layers and steps on which a recipe's selections of layers and steps depend.
    #[must_use]
    pub fn run_size(&self) -> RunSize {
        RunSize { decoder_layers: self.model.layers, steps: self.train.steps }
    }
}

/// Checks that the recipe's blocks divide the batch, in every layer and at every point of the run. Widths that no block divides are padded
/// with zeros.
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

    /// Holds for every step of every number of steps, although 7 / 100 · 100 is more than 7 in F64.
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
