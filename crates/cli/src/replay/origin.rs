//! The state before a step: the newest checkpoint before it, or the beginning of the run, and the steps from there on.

use crate::checkpoint::Trained;
use crate::run_files::stored_recipe;
use nibble_command::device::{Device, On};
use nibble_command::error::{Error, Result};
use nibble_command::warn;
use nibble_core::Recipe;
use nibble_train::checkpoint::{Checkpoint, latest_valid_until};
use nibble_train::checks::{for_run, load_recipe};
use nibble_train::config::Config;
use nibble_train::trainer::{Trainer, stored_config};
use std::path::Path;

/// A state from which a run can be repeated: a stored checkpoint, or the beginning of the run.
pub struct Origin {
    checkpoint: Option<Box<Checkpoint>>,
    pub config: Config,
    /// The run's own recipe.
    pub recipe: Recipe,
}

impl Origin {
    /// Finds the newest whole checkpoint of a run after at most `steps` steps; if there is none, the state is the beginning of the run. The
    /// configuration of the result is for one rank, and for this machine's device unless `overrides` name another device.
    pub fn find(dir: &Path, steps: u64, overrides: &[String]) -> Result<Self> {
        let latest = latest_valid_until(dir, steps)?;
        for rejected in &latest.rejected {
            warn!("warning: passed over: {}", rejected.why);
        }
        let one_rank = ["run.device=auto", "run.ranks=1", "run.dp=1"].map(String::from);
        let overrides = [&one_rank[..], overrides].concat();
        let Some(checkpoint) = latest.checkpoint else {
            let (config, _) = stored_config(dir, &overrides)?;
            let recipe = stored_recipe(dir, &config).map_err(Error::Failed)?;
            let recipe = for_run(&config, recipe);
            return Ok(Self { checkpoint: None, config: measuring(config), recipe });
        };
        let (trained, mut overrides) = (Trained::Checkpoint(Box::new(checkpoint)), overrides);
        let mut config = trained.config(&overrides)?;
        if steps >= config.train.steps {
            // The run was extended after this checkpoint.
            let (extended, _) = stored_config(dir, &[])?;
            overrides.push(format!("train.steps={}", extended.train.steps));
            config = trained.config(&overrides)?;
        }
        let recipe = trained.recipe(&config, &[])?;
        let checkpoint = match trained {
            Trained::Checkpoint(checkpoint) => Some(checkpoint),
            Trained::Folder(_) => None,
        };
        Ok(Self { checkpoint, config: measuring(config), recipe })
    }

    /// Describes the state in words.
    pub fn describe(&self) -> String {
        match &self.checkpoint {
            Some(checkpoint) => format!("checkpoint of step {}", checkpoint.position().step),
            None => "beginning of the run".to_owned(),
        }
    }

    /// Loads the run in this state, together with its data.
    ///
    /// # Errors
    /// Returns an error if the data have changed since the run.
    pub fn load<'a, B: Device>(&self, on: &On<'a, B>) -> Result<Trainer<'a, B>> {
        let mut trainer = Trainer::under(on.b, on.mesh, &self.config, self.recipe.clone())?.with_data()?;
        match &self.checkpoint {
            Some(checkpoint) => {
                trainer.require_data(&checkpoint.position().data_sha256)?;
                trainer.load(checkpoint)?;
            }
            None => trainer.load_initial()?,
        }
        Ok(trainer)
    }

    /// The weights of this state.
    pub fn weights<B: Device>(&self, on: &On<'_, B>) -> Result<Vec<(String, Vec<f32>)>> {
        let mut trainer = Trainer::under(on.b, on.mesh, &self.config, self.bf16()?)?;
        match &self.checkpoint {
            Some(checkpoint) => trainer.load_weights(checkpoint)?,
            None => trainer.load_initial()?,
        }
        Ok(trainer.weights()?)
    }

    /// Creates the run in BF16; the caller must then set the weights.
    pub fn load_bf16<'a, B: Device>(&self, on: &On<'a, B>) -> Result<Trainer<'a, B>> {
        Ok(Trainer::under(on.b, on.mesh, &self.config, self.bf16()?)?.with_data()?)
    }

    fn bf16(&self) -> Result<Recipe> {
        Ok(for_run(&self.config, load_recipe("bf16")?))
    }

    /// The step that the run had reached in this state.
    pub fn step(&self) -> Option<u64> {
        self.checkpoint.as_ref().map(|checkpoint| checkpoint.position().step)
    }
}

/// The configuration with room for measurements of quantization in the record of a step, but without a step of the run that measures.
fn measuring(mut config: Config) -> Config {
    config.train.quantization_every = u64::MAX;
    config
}
