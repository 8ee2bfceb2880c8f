//! A trained model, from the path of its run or of one of its checkpoints.

use crate::device::{Device, On};
use crate::env::Env;
use crate::error::{Error, Result};
use nibble_cpu::Cpu;
use nibble_train::checkpoint::{Checkpoint, latest_valid};
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
        eprintln!("warning: passed over: {}", rejected.why);
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
    let one_rank = ["run.device=auto", "run.ranks=1"].map(String::from);
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

/// The CPU, with the threads of this configuration.
pub fn cpu(config: &Config) -> Result<Cpu> {
    let env = Env::read()?;
    Ok(env.cpu(env.threads(config.run.threads))?)
}

/// The checkpoint's model; with the data it was trained on, or without.
pub fn load<'a, B: Device>(
    on: &On<'a, B>,
    config: &Config,
    checkpoint: &Checkpoint,
    with_data: bool,
) -> Result<Trainer<'a, B>> {
    let make = if with_data { Trainer::new } else { Trainer::without_data };
    let mut trainer = make(on.b, on.comm, config)?;
    trainer.load(checkpoint)?;
    Ok(trainer)
}
