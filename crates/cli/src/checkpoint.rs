//! A trained model, from the path of its run or of one of its checkpoints.

use nibble_command::device::{Device, On};
use nibble_command::error::{Error, Result};
use nibble_command::warn;
use nibble_core::Recipe;
use nibble_train::checkpoint::{Checkpoint, latest_valid};
use nibble_train::checks::checked_recipe;
use nibble_train::config::{Config, RANDOM, SYNTHETIC};
use nibble_train::trainer::Trainer;
use std::path::Path;

/// Opens a checkpoint's directory, or the newest whole checkpoint of a run's directory. Damaged ones that are passed
/// over are told on standard error.
///
/// # Errors
/// If there is none.
pub fn open(path: &Path) -> Result<Checkpoint> {
    if !path.exists() {
        return Err(Error::usage(format!("{}: no such run or checkpoint", path.display())));
    }
    if path.join("state.json").exists() {
        return Ok(Checkpoint::open(path)?);
    }
    let latest = latest_valid(path)?;
    for rejected in &latest.rejected {
        warn!("warning: passed over: {}", rejected.why);
    }
    match latest.checkpoint {
        Some(checkpoint) => Ok(checkpoint),
        None if latest.rejected.is_empty() => {
            Err(Error::usage(format!("{}: holds no checkpoint", path.display())))
        }
        None => Err(Error::Failed(format!("{}: every checkpoint is damaged", path.display()))),
    }
}

/// The configuration a checkpoint was trained with, changed by `overrides`, for one rank, and for this machine's device where they
/// name none.
pub fn config(checkpoint: &Checkpoint, overrides: &[String]) -> Result<Config> {
    let one_rank = ["run.device=auto", "run.ranks=1", "run.dp=1"].map(String::from);
    let overrides = [&one_rank[..], overrides, &one_rank[1..]].concat();
    let changed = Config::from_text(&checkpoint.position().config, checkpoint.path(), &overrides);
    let trained = Config::from_text(&checkpoint.position().config, checkpoint.path(), &[])?;
    // A vocabulary too small for a text is its tokens' kind, said in other words.
    let source = match &changed {
        Ok(config) => Some(config.data.source.clone()),
        Err(_) => overrides.iter().rev().find_map(|o| Some(o.split_once("data.source=")?.1.to_owned())),
    };
    match source {
        Some(now) if kind(&now) != kind(&trained.data.source) => Err(Error::usage(format!(
            "`data.source`: {now} is {}, and the model was trained on {}: their tokens have nothing in common",
            kind(&now),
            kind(&trained.data.source)
        ))),
        _ => Ok(changed?),
    }
}

/// What a source's tokens are.
fn kind(source: &str) -> &'static str {
    match source {
        SYNTHETIC => "the built-in language",
        RANDOM => "random tokens",
        _ => "a text",
    }
}

/// The recipe that a checkpoint was trained under, as it was then; or another, if `overrides` name one.
pub fn recipe(checkpoint: &Checkpoint, config: &Config, overrides: &[String]) -> Result<Recipe> {
    let names_one = |o: &String| o.split('=').next().is_some_and(|key| key.trim() == "recipe");
    match overrides.iter().any(names_one) {
        true => Ok(checked_recipe(config)?),
        false => Ok(checkpoint.position().resolved_recipe()?),
    }
}

/// The checkpoint's model, to look at; without data.
pub fn load<'a, B: Device>(
    on: &On<'a, B>,
    config: &Config,
    recipe: &Recipe,
    checkpoint: &Checkpoint,
) -> Result<Trainer<'a, B>> {
    let mut trainer = Trainer::under(on.b, on.mesh, config, recipe.clone())?;
    trainer.load_weights(checkpoint)?;
    Ok(trainer)
}
