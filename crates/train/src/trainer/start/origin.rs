//! The start of a run: a new start, or a resumption from the newest complete checkpoint in the run's directory. The first rank finds the
//! checkpoint, verifies the checksums, and sends the checkpoint's step to the other ranks.

use super::run_dir::{METRICS_FILE, PICTURE_FILE, RECIPE_FILE, has_begun, stored_config};
use crate::checkpoint::{Checkpoint, Store, latest_valid};
use crate::checks::{check_recipe, checked_recipe, for_run, load_recipe};
use crate::config::{Combine, Config, TrainConfig, kept_beside, read_text};
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::metrics::{Metrics, read_metrics};
use crate::trainer::options::{Observer, Summary};
use crate::trainer::ranks::any_rank;
use nibble_core::{Comm, Kernels, Recipe};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// The start of a run: checkpoint, configuration, recipe and data.
#[derive(Debug)]
pub(in crate::trainer) struct Origin {
    /// The run's checkpoints, opened for writing. The store exists only on the first rank, for a run that has begun before.
    pub store: Option<Store>,
    /// The checkpoint to resume from; `None` at the beginning of a run.
    pub checkpoint: Option<Checkpoint>,
    /// The requested configuration, completed by the values that the run chose at its beginning.
    pub config: Config,
    /// The run's recipe. A resumed run keeps its recipe even if the recipe's file has changed.
    pub recipe: Recipe,
    /// The data of a resumed run: the same data on which the run was trained before.
    pub data: Option<Dataset>,
}

impl Origin {
    /// Determines whether a run starts at its beginning or from a checkpoint. The requested configuration is compared with the checkpoint's
    /// configuration before any other check.
    ///
    /// # Errors
    /// Returns an error for a recipe that cannot be read, a directory without a run, a run whose checkpoints are all damaged, or a
    /// configuration that differs from the run's configuration.
    pub fn find<B: Kernels>(
        b: &B,
        comm: &dyn Comm<B>,
        config: &Config,
        resume: bool,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        let (store, checkpoint) = match resume {
            true => chosen(b, comm, config, observer)?,
            false => (None, None),
        };
        let Some(checkpoint) = checkpoint else {
            // The run has begun and has no checkpoint yet. Another rank that rewrites the file at the same time writes the same contents.
            let earlier = resume.then(|| stored_config(Path::new(&config.run.dir), &[])).transpose()?;
            let earlier = earlier.map(|(earlier, _)| earlier);
            let asked =
                earlier.as_ref().map_or_else(|| config.clone(), |earlier| config.going_on_from(earlier));
            asked.validate_on(b.kind())?;
            let kept =
                earlier.filter(|earlier| earlier.recipe == asked.recipe).and_then(|_| kept_recipe(&asked));
            let recipe = kept.map_or_else(|| checked_recipe(&asked), Ok)?;
            let config = if resume { asked } else { begun(b, comm, &asked, &recipe, observer) };
            return Ok(Self { store, checkpoint, recipe, config, data: None });
        };
        let earlier = Config::of_checkpoint(&checkpoint, &[])?;
        let mut config = config.going_on_from(&earlier);
        let recipe = for_run(&config, checkpoint.position().resolved_recipe()?);
        config.keep_tokenizer(&earlier, kept_beside(&checkpoint));
        let data = Dataset::of(&config)?;
        require_same(&config, &earlier, &recipe, &data, &checkpoint)?;
        config.validate()?;
        config.validate_on(b.kind())?;
        if comm.rank() == 0 {
            changes_to_tell(&config.train, &earlier.train).iter().for_each(|change| observer.note(change));
        }
        Ok(Self { store, checkpoint: Some(checkpoint), config, recipe, data: Some(data) })
    }

    /// Breaks with the run's summary if the run is finished, that is, if every step and the final evaluation are complete.
    ///
    /// # Errors
    /// Returns an error if the run's metrics cannot be read, and passes on errors of other ranks.
    pub fn finished<B: Kernels>(
        &self,
        b: &B,
        comm: &dyn Comm<B>,
        observer: &mut dyn Observer,
    ) -> Result<ControlFlow<Option<Summary>>> {
        let config = &self.config;
        let Some(checkpoint) = self.checkpoint.as_ref().filter(|c| c.position().step >= config.train.steps)
        else {
            return Ok(ControlFlow::Continue(()));
        };
        let (steps, dir) = (checkpoint.position().step, PathBuf::from(&config.run.dir));
        let mut evaluated = None;
        if comm.rank() == 0 {
            let metrics = read_metrics(&dir.join(METRICS_FILE))?.metrics;
            evaluated = metrics.into_iter().rev().find(|m| m.step == steps && m.is_evaluation());
        }
        if !any_rank(b, comm, evaluated.is_some())? {
            return Ok(ControlFlow::Continue(()));
        }
        let Some(Metrics { valid_loss, .. }) = evaluated else { return Ok(ControlFlow::Break(None)) };
        observer.note(&format!(
            "the run in {} is done, and stays as it is; for more steps set train.steps to more than {steps}",
            dir.display()
        ));
        Ok(ControlFlow::Break(Some(Summary {
            steps,
            loss: None,
            is_whole: true,
            valid_loss,
            entropy: self.data.as_ref().and_then(Dataset::entropy),
            checkpoint: Some(checkpoint.path().to_owned()),
            picture: Some(dir.join(PICTURE_FILE)).filter(|picture| picture.exists()),
            dir,
            // There is no hash of the weights, because no weights are loaded.
            digest: None,
        })))
    }
}

/// The configuration of a new run. The first rank reports the values that are chosen here.
fn begun<B: Kernels>(
    b: &B,
    comm: &dyn Comm<B>,
    config: &Config,
    recipe: &Recipe,
    observer: &mut dyn Observer,
) -> Config {
    let begun = config.begun_on(b.kind(), recipe);
    if begun.train.combine != config.train.combine && comm.rank() == 0 {
        observer.note(match begun.train.combine.unwrap_or_default() {
            Combine::Slots if recipe.quantized_combine().is_some() => {
                "train.combine: slots, as the recipe rounds the rows that travel back one by one: ranks send back a row for each expert of a token"
            }
            Combine::Tree => {
                "train.combine: tree, as experts are divided among GPUs: ranks send back one row a token; slots has the bits of a run on one GPU"
            }
            Combine::Slots => {
                "train.combine: slots, as a token has more experts than a GPU sums up a tree: ranks send back a row for each of them"
            }
        });
    }
    begun
}

/// The recipe that a run without checkpoints stored when it began, if it can still be read and fits the configuration.
fn kept_recipe(config: &Config) -> Option<Recipe> {
    let text = read_text(&Path::new(&config.run.dir).join(RECIPE_FILE)).ok()?;
    let stem = Path::new(&config.recipe).file_stem()?.to_string_lossy();
    let recipe = Recipe::parse(&stem, &text).ok()?.in_run(config.run_size());
    check_recipe(config, &recipe).ok().map(|()| recipe)
}

/// Notes about changes of a resumed run.
fn changes_to_tell(now: &TrainConfig, then: &TrainConfig) -> Vec<String> {
    let mut changes = Vec::new();
    if now.steps > then.steps {
        changes.push(format!(
            "train.steps: {} → {}: learning rate and recipe follow the new number from here on",
            then.steps, now.steps
        ));
    }
    if now.expert_shards != then.expert_shards {
        changes.push(format!(
            "train.expert_shards: {} → {}: gradients of experts are summed in another order from here on",
            then.expert_shards, now.expert_shards
        ));
    }
    let [was, is] = [then, now].map(|train| train.combine.unwrap_or_default());
    if is != was {
        changes.push(format!(
            "train.combine: {} → {}: the rows of a token's experts are summed in another order from here on",
            was.name(),
            is.name()
        ));
    }
    changes
}

/// Opens the checkpoints of a run that has begun, on the first rank. Returns the newest complete checkpoint on every rank.
fn chosen<B: Kernels>(
    b: &B,
    comm: &dyn Comm<B>,
    config: &Config,
    observer: &mut dyn Observer,
) -> Result<(Option<Store>, Option<Checkpoint>)> {
    let (dir, first) = (Path::new(&config.run.dir), comm.rank() == 0);
    let (mut store, mut found) = (None, None);
    if first {
        if has_begun(dir) {
            // Opening the store restores a checkpoint that a killed writer had moved aside.
            store = Some(Store::open(dir)?);
        }
        found = latest(config, observer)?;
    }
    if comm.world() > 1 {
        const NONE: f64 = -1.0;
        let step = found.as_ref().map_or(NONE, |checkpoint| checkpoint.position().step as f64);
        let told = b.download(&comm.all_gather_f64(b, &b.upload(&[step])?)?)?;
        comm.check()?;
        let step = told.first().filter(|step| **step != NONE);
        if let (false, Some(step)) = (first, step) {
            found = Some(Checkpoint::open_verified(dir, *step as u64)?);
        }
    }
    Ok((store, found))
}

/// The newest complete checkpoint of the run; `None` if the run has begun and has no checkpoint yet.
fn latest(config: &Config, observer: &mut dyn Observer) -> Result<Option<Checkpoint>> {
    let dir = PathBuf::from(&config.run.dir);
    let latest = latest_valid(&dir)?;
    latest.rejected.iter().for_each(|r| observer.rejected(&r.path, &r.why));
    if latest.checkpoint.is_none() {
        // A new start would overwrite damaged checkpoints, which might still be repaired.
        if !latest.rejected.is_empty() {
            return Err(Error::checkpoint(&dir, "every checkpoint is damaged; nothing was changed"));
        }
        require_nothing_to_lose(&dir, config.checkpoint.every)?;
        let changes = config.changes_to_refuse(&stored_config(&dir, &[])?.0)?;
        require_none(&changes, &dir)?;
        observer.note(&format!("{} has no checkpoint yet: from the beginning", dir.display()));
    }
    Ok(latest.checkpoint)
}

/// Checks that a configuration is the configuration of the run to be resumed. Of the settings that determine the run's numbers, only these
/// may differ: a larger `train.steps`, `train.combine`, and `train.expert_shards` unless delayed scales are kept per shard. `recipe` is the
/// run's own recipe.
fn require_same(
    config: &Config,
    earlier: &Config,
    recipe: &Recipe,
    data: &Dataset,
    checkpoint: &Checkpoint,
) -> Result<()> {
    let position = checkpoint.position();
    let mut changes = config.changes_to_refuse(earlier)?;
    let [before, parts] = [earlier, config].map(|config| config.train.expert_shards);
    if recipe.is_delayed() && parts > 1 && parts != before {
        changes
            .push(format!("train.expert_shards: {before} → {parts}, of which scales of earlier steps are"));
    }
    let (then, now) = (&position.data_sha256, &data.sha256());
    // Another path to a recipe with the same contents changes nothing.
    if then == now {
        changes
            .retain(|change| !["data.source: ", "data.mixture: "].iter().any(|key| change.starts_with(key)));
    } else {
        let short = |sha: &str| sha[..12.min(sha.len())].to_owned();
        changes.push(format!("the data's content: SHA-256 {} → {}", short(then), short(now)));
    }
    if changes.iter().any(|change| is_of_tokenizer(change)) {
        let json = |config: &Config| Ok::<_, Error>(config.tokenizer()?.map(|own| own.to_json()));
        if json(earlier)? == json(config)? {
            changes.retain(|change| !is_of_tokenizer(change));
        }
    }
    let is_of_recipe = |change: &String| change.starts_with("recipe: ");
    if changes.iter().any(is_of_recipe) {
        let named = load_recipe(&config.recipe)?;
        let (name, description) = (recipe.name.clone(), recipe.description.clone());
        if (Recipe { name, description, ..named }).to_toml() == recipe.to_toml() {
            changes.retain(|change| !is_of_recipe(change));
        }
    }
    require_none(&changes, checkpoint.path())
}

fn is_of_tokenizer(change: &str) -> bool {
    change.starts_with("data.tokenizer: ")
}

/// Checks that there are no changes since the configuration was stored.
fn require_none(changes: &[String], stored: &Path) -> Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    let (stored, changes) = (stored.display(), changes.join("; "));
    let why = format!("differs from that of the run to be resumed ({stored}): {changes}");
    Err(Error::config("configuration", why))
}

/// Checks that a run without checkpoints has taken too few steps for a checkpoint, so that a restart loses little work.
fn require_nothing_to_lose(dir: &Path, every: u64) -> Result<()> {
    if !has_begun(dir) {
        let why = format!("no run has begun in {}: there is nothing to go on from", dir.display());
        return Err(Error::config("run.dir", why));
    }
    let metrics = read_metrics(&dir.join(METRICS_FILE))?.metrics;
    // A run that continues another run starts with a later step than step 1.
    let steps = metrics.iter().filter(|m| m.loss.is_some()).count() as u64;
    // A checkpoint may still be in progress during the steps before the next checkpoint.
    if steps > 2 * every {
        let dir = dir.display();
        let why = format!(
            "{dir} has metrics of {steps} steps and no checkpoint to go on from; nothing was changed"
        );
        return Err(Error::config("run.dir", why));
    }
    Ok(())
}
