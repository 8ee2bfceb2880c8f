//! A trained model, from the path of its run or of one of its checkpoints.

use nibble_command::device::{Device, On};
use nibble_command::error::{Error, Result};
use nibble_command::warn;
use nibble_core::Recipe;
use nibble_train::checkpoint::{Checkpoint, latest_valid};
use nibble_train::checks::checked_recipe;
use nibble_train::config::{Config, RANDOM, SYNTHETIC};
use nibble_train::evaluation::Beginning;
use nibble_train::pretrained::{Pretrained, is_folder};
use nibble_train::tokenizer::{SharedTokenizer, Symbols, TOKENIZER_FILE, Tokenizer};
use nibble_train::trainer::Trainer;
use std::path::Path;

/// A trained model, wherever it is.
pub enum Trained {
    /// Of a run.
    Checkpoint(Box<Checkpoint>),
    /// A folder as the Hugging Face family of tools writes it.
    Folder(Box<Pretrained>),
}

impl Trained {
    /// Opens a folder with a model, a checkpoint's directory, or the newest whole checkpoint of a run's directory.
    ///
    /// # Errors
    /// If there is none.
    pub fn open(path: &Path) -> Result<Self> {
        match is_folder(path) {
            true => Ok(Self::Folder(Box::new(Pretrained::open(path)?))),
            false => Ok(Self::Checkpoint(Box::new(open(path)?))),
        }
    }

    /// Its checkpoint, if it is one of a run.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint),
            Self::Folder(_) => None,
        }
    }

    /// What a configuration says, so that text is made of the tokens of a folder's model.
    ///
    /// # Errors
    /// If it has none that can be read.
    pub fn tokens(&self) -> Result<Vec<String>> {
        let Self::Folder(folder) = self else { return Ok(Vec::new()) };
        match folder.tokenizer()? {
            Some(own) if is_symbols(&own) => Ok(Vec::new()),
            // Any text's.
            Some(_) => Ok(vec!["data.source=prompt".into()]),
            None => {
                let why = format!(
                    "{}: has no {TOKENIZER_FILE}, which says what its tokens are",
                    folder.path().display()
                );
                Err(Error::usage(why))
            }
        }
    }

    /// The configuration that it was trained with, or that begins with it, changed by `overrides`, for one rank, and for this machine's device where they
    /// name none.
    pub fn config(&self, overrides: &[String]) -> Result<Config> {
        match self {
            Self::Checkpoint(checkpoint) => config(checkpoint, overrides),
            Self::Folder(folder) => of_folder(folder, overrides),
        }
    }

    /// What stands before texts that it is scored on.
    pub fn beginning(&self, config: &Config) -> Result<Beginning> {
        Ok(match self {
            Self::Checkpoint(_) => Beginning::of_run(config)?,
            Self::Folder(_) => Beginning::of_folder(config)?,
        })
    }

    /// The recipe that it was trained under, as it was then, of a folder BF16; or another, if `overrides` name one.
    pub fn recipe(&self, config: &Config, overrides: &[String]) -> Result<Recipe> {
        match self {
            Self::Checkpoint(checkpoint) => recipe(checkpoint, config, overrides),
            Self::Folder(_) => Ok(checked_recipe(config)?),
        }
    }

    /// The model, to look at; without data.
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

/// Whether these are the tokens of the built-in language, which brings its data along.
fn is_symbols(tokenizer: &SharedTokenizer) -> bool {
    tokenizer.to_json() == Symbols.to_json()
}

/// The configuration that begins with the model of a folder. Its data are those of its tokenizer, where nothing else is said.
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
            "{path} says nothing of data: name some, such as --set data.source=book.txt"
        )));
    }
    let overrides = [&begins[..], overrides, &["run.ranks=1".into(), "run.dp=1".into()]].concat();
    Ok(Config::asked("", Path::new("folder.toml"), &overrides)?)
}

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
fn config(checkpoint: &Checkpoint, overrides: &[String]) -> Result<Config> {
    let one_rank = ["run.device=auto", "run.ranks=1", "run.dp=1"].map(String::from);
    let overrides = [&one_rank[..], overrides, &one_rank[1..]].concat();
    let changed = Config::of_checkpoint(checkpoint, &overrides);
    let trained = Config::of_checkpoint(checkpoint, &[])?;
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
fn recipe(checkpoint: &Checkpoint, config: &Config, overrides: &[String]) -> Result<Recipe> {
    let names_one = |o: &String| o.split('=').next().is_some_and(|key| key.trim() == "recipe");
    match overrides.iter().any(names_one) {
        true => Ok(checked_recipe(config)?),
        false => Ok(checkpoint.position().resolved_recipe()?.in_run(config.run_size())),
    }
}
