//! Determines by rehearsals whether a GPU can train a whole model, and with which recipe and recomputation.

use super::search::more_recomputation;
use super::{Gpu, predict, predict_state};
use crate::checks::checked_recipe;
use crate::config::Config;
use crate::error::Result;
use crate::recompute::Recompute;
use nibble_core::{DeviceKind, MeshShape};

/// The recipes to try. The first recipe is the baseline; each later recipe saves smaller activations than the recipe before it. A new
/// recipe is a new name in this list.
pub const RECIPES: [&str; 3] = ["bf16", "fp8-flow", "mxfp4-hopper"];

/// Settings for a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// The recipe, one of [`RECIPES`].
    pub recipe: &'static str,
    /// What the trial recomputes, in canonical order.
    pub recompute: Recompute,
}

impl Trial {
    /// Every trial of a configuration. The first trials use the configuration's own recomputation, with each recipe; later trials use more
    /// and more recomputation, with each recipe.
    #[must_use]
    pub fn all(config: &Config) -> Vec<Self> {
        let own = config.train.recompute.normal();
        let recomputed = std::iter::once(own).chain(more_recomputation(config));
        recomputed
            .flat_map(|recompute| RECIPES.map(|recipe| Self { recipe, recompute: recompute.clone() }))
            .collect()
    }

    /// The memory that one GPU needs to train the whole model with these settings.
    ///
    /// # Errors
    /// Returns the errors of [`predict`], and an error for a model that cannot be trained with these settings.
    pub fn bytes(&self, config: &Config) -> Result<usize> {
        let mut tried = alone(config);
        self.recipe.clone_into(&mut tried.recipe);
        tried.train.recompute.clone_from(&self.recompute);
        tried.validate_on(DeviceKind::Gpu)?;
        let recipe = checked_recipe(&tried)?;
        Ok(predict(DeviceKind::Gpu, MeshShape::ONE, &tried, &recipe)?.device_bytes())
    }
}

/// Whether a model fits one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    /// The model fits with these settings, which are the first settings that suffice.
    With(Trial),
    /// The model does not fit. The trial that needs the least memory needs this many bytes.
    TooLarge(usize),
    /// Masters, moments and gradients alone need this many bytes, which exceeds the GPU's memory.
    StateTooLarge(usize),
}

/// Finds the first trial whose memory fits this GPU. If masters, moments and gradients alone exceed the GPU's memory, no trial is
/// evaluated, so that the answer is immediate for a model of any size.
///
/// # Errors
/// Returns the errors of [`Trial::bytes`].
pub fn fits_whole(config: &Config, gpu: &Gpu) -> Result<Fit> {
    let config = alone(config);
    let recipe = checked_recipe(&config)?;
    let state = predict_state(DeviceKind::Gpu, MeshShape::ONE, &config, &recipe)?.device_bytes();
    if state > gpu.bytes {
        return Ok(Fit::StateTooLarge(state));
    }
    let mut least = usize::MAX;
    for trial in Trial::all(&config) {
        let bytes = trial.bytes(&config)?;
        if bytes <= gpu.bytes {
            return Ok(Fit::With(trial));
        }
        least = least.min(bytes);
    }
    Ok(Fit::TooLarge(least))
}

/// The configuration for a single rank.
fn alone(config: &Config) -> Config {
    let mut alone = config.clone();
    (alone.run.ranks, alone.run.dp) = (1, 1);
    alone
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_trial_that_fits_is_found() {
        let config = Config::load("tiny", &[]).unwrap();
        let trials = Trial::all(&config);
        assert!(trials[..3].iter().all(|trial| trial.recompute == Recompute::default()), "{trials:?}");
        let sizes: Vec<usize> = trials.iter().map(|trial| trial.bytes(&config).unwrap()).collect();
        let on = |bytes| fits_whole(&config, &Gpu { name: "", bytes }).unwrap();
        for size in &sizes {
            let first = sizes.iter().position(|other| other <= size).unwrap();
            assert_eq!(on(*size), Fit::With(trials[first].clone()));
        }
        let least = *sizes.iter().min().unwrap();
        assert_eq!(on(least - 1), Fit::TooLarge(least));
        let Fit::StateTooLarge(state) = on(0) else { panic!("it is more than nothing") };
        assert!(state < least);
        assert_eq!(on(state), Fit::TooLarge(least));
        assert_eq!(on(state - 1), Fit::StateTooLarge(state));
    }
}
