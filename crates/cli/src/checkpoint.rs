//! A trained model, opened by the path of a run, of a checkpoint, or of a Hugging Face folder.

use nibble_command::device::{Device, On};
use nibble_command::error::{Error, Result};
use nibble_command::warn;
use nibble_core::Recipe;
use nibble_train::checkpoint::{Checkpoint, latest_valid};
use nibble_train::checks::{checked_recipe, for_run};
use nibble_train::config::{Config, RANDOM, SYNTHETIC};
use nibble_train::evaluation::Beginning;
use nibble_train::pretrained::{Pretrained, is_folder};
use nibble_train::tokenizer::{SharedTokenizer, Symbols, TOKENIZER_FILE, Tokenizer};
use nibble_train::trainer::Trainer;
use std::path::Path;

/// A trained model.
pub enum Trained {
    /// A checkpoint of a run.
    Checkpoint(Box<Checkpoint>),
    /// A Hugging Face model folder.
    Folder(Box<Pretrained>),
}

impl Trained {
    /// Opens a folder with a model, a checkpoint's directory, or the newest whole checkpoint of a run's directory.
    ///
    /// # Errors
    /// Returns an error if the path has no model.
    pub fn open(path: &Path) -> Result<Self> {
        match is_folder(path) {
            true => Ok(Self::Folder(Box::new(Pretrained::open(path)?))),
            false => Ok(Self::Checkpoint(Box::new(open(path)?))),
        }
    }

    /// The checkpoint, or `None` if a folder with a model was opened.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint),
            Self::Folder(_) => None,
        }
    }

    /// The overrides that make a folder's own tokenizer encode text; empty for a checkpoint.
    ///
    /// # Errors
    /// Returns an error if the folder has no readable tokenizer.
    pub fn tokens(&self) -> Result<Vec<String>> {
        let Self::Folder(folder) = self else { return Ok(Vec::new()) };
        match folder.tokenizer()? {
            Some(own) if is_symbols(&own) => Ok(Vec::new()),
            // This tokenizer encodes any text.
            Some(_) => Ok(vec!["data.source=prompt".into()]),
            None => {
                let why = format!(
                    "{}: has no {TOKENIZER_FILE}, expected the tokenizer of its model",
                    folder.path().display()
                );
                Err(Error::usage(why))
            }
        }
    }

    /// The configuration of the checkpoint, or a configuration derived from the folder's model, changed by `overrides`. The configuration
    /// is for one rank, and for this machine's device unless `overrides` name another device.
    pub fn config(&self, overrides: &[String]) -> Result<Config> {
        match self {
            Self::Checkpoint(checkpoint) => config(checkpoint, overrides),
            Self::Folder(folder) => of_folder(folder, overrides),
        }
    }

    /// The token that precedes each text on which the model is scored.
    pub fn beginning(&self, config: &Config) -> Result<Beginning> {
        Ok(match self {
            Self::Checkpoint(_) => Beginning::of_run(config)?,
            Self::Folder(_) => Beginning::of_folder(config)?,
        })
    }

    /// The recipe that `overrides` name; otherwise the recipe stored with the run, or BF16 for a folder.
    pub fn recipe(&self, config: &Config, overrides: &[String]) -> Result<Recipe> {
        match self {
            Self::Checkpoint(checkpoint) => recipe(checkpoint, config, overrides),
            Self::Folder(_) => Ok(checked_recipe(config)?),
        }
    }

    /// Loads the model for evaluation, without data.
    pub fn load<'a, B: Device>(
        &self,
        on: &On<'a, B>,
        config: &Config,
        recipe: &Recipe,
    ) -> Result<Trainer<'a, B>> {
        let mut trainer = Trainer::under(on.b, on.mesh, config, recipe.clone())?;
        match self {
            Self::Checkpoint(checkpoint) => trainer.load_weights(checkpoint)?,
            Self::Folder(_) => trainer.load_initial()?,
        }
        Ok(trainer)
    }
}

/// Whether the tokenizer is that of the built-in language, which needs no data source.
fn is_symbols(tokenizer: &SharedTokenizer) -> bool {
    tokenizer.to_json() == Symbols.to_json()
}

/// A configuration that starts from a folder's model. Without a data source, the model must be one of the built-in language.
fn of_folder(folder: &Pretrained, overrides: &[String]) -> Result<Config> {
    folder.notes.iter().for_each(|note| warn!("warning: {note}"));
    let usual = Config::default().data.seq_len;
    let seq_len = match folder.model.max_positions {
        0 => usual,
        positions => positions.min(usual),
    };
    let begins = [
        format!("train.init_from={}", folder.path().display()),
        "recipe=bf16".into(),
        format!("data.seq_len={seq_len}"),
    ];
    let says_data = overrides.iter().any(|o| o.starts_with("data.source=") || o.starts_with("data.mixture="));
    let has_data = folder.tokenizer()?.is_some_and(|own| is_symbols(&own));
    if !says_data && !has_data {
        let path = folder.path().display();
        return Err(Error::usage(format!(
            "{path} is a model folder and names no data: add a source, such as --set data.source=book.txt"
        )));
    }
    let overrides = [&begins[..], overrides, &["run.ranks=1".into(), "run.dp=1".into()]].concat();
    Ok(Config::asked("", Path::new("folder.toml"), &overrides)?)
}

/// Opens a checkpoint's directory, or the newest whole checkpoint of a run's directory. Damaged checkpoints are skipped
/// with a warning.
///
/// # Errors
/// Returns an error if the path has no complete checkpoint.
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

/// The configuration of a checkpoint, changed by `overrides`, for one rank and for this machine's device unless `overrides` name another
/// device.
fn config(checkpoint: &Checkpoint, overrides: &[String]) -> Result<Config> {
    let one_rank = ["run.device=auto", "run.ranks=1", "run.dp=1"].map(String::from);
    let overrides = [&one_rank[..], overrides, &one_rank[1..]].concat();
    let changed = Config::of_checkpoint(checkpoint, &overrides);
    let trained = Config::of_checkpoint(checkpoint, &[])?;
    // If the vocabulary is too small for the text, the error should name the source, not the vocabulary.
    let source = match &changed {
        Ok(config) => Some(config.data.source.clone()),
        Err(_) => overrides.iter().rev().find_map(|o| Some(o.split_once("data.source=")?.1.to_owned())),
    };
    match source {
        Some(now) if kind(&now) != kind(&trained.data.source) => Err(Error::usage(format!(
            "`data.source`: {now} is {}, and the model was trained on {}: they share no vocabulary",
            kind(&now),
            kind(&trained.data.source)
        ))),
        _ => Ok(changed?),
    }
}

/// A name for the kind of a source's tokens.
fn kind(source: &str) -> &'static str {
    match source {
        SYNTHETIC => "the built-in language",
        RANDOM => "random tokens",
        _ => "a text",
    }
}

/// The recipe that `overrides` name; otherwise the recipe stored with the run.
fn recipe(checkpoint: &Checkpoint, config: &Config, overrides: &[String]) -> Result<Recipe> {
    let names_one = |o: &String| o.split('=').next().is_some_and(|key| key.trim() == "recipe");
    match overrides.iter().any(names_one) {
        true => Ok(checked_recipe(config)?),
        false => Ok(for_run(config, checkpoint.position().resolved_recipe()?)),
    }
}
