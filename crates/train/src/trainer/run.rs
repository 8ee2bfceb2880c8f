//! A whole run: steps, evaluations, checkpoints, metrics.

use super::outputs::Outputs;
use super::run_dir::{METRICS_FILE, has_begun};
use super::{Trainer, checked_recipe};
use crate::checkpoint::{Checkpoint, Store, latest_valid};
use crate::config::Config;
use crate::data::Entropy;
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::metrics::{Metrics, Watchdog, read_metrics};
use crate::plan::{self, Prediction};
use nibble_core::{Comm, DeviceKind, Kernels, MemoryStats, Recipe};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What whoever watches a run is told, by its first rank.
pub trait Observer {
    /// The run begins (or goes on) at this step; what memory it takes.
    fn start(&mut self, start: &Start<'_>);
    /// Something worth knowing that stops nothing, a sentence.
    fn note(&mut self, _text: &str) {}
    /// A checkpoint passed over while resuming.
    fn rejected(&mut self, path: &Path, why: &Error);
    /// A step is done: adds what the device's owner knows to its metrics, before they are written and told.
    fn measure(&mut self, _: &mut Metrics) {}
    /// A step is done.
    fn step(&mut self, metrics: &Metrics);
    /// So many batches of an evaluation are done, of how many.
    fn evaluating(&mut self, _done: usize, _of: usize) {}
    /// A held-out loss, after so many steps.
    fn evaluation(&mut self, step: u64, valid_loss: f64);
    /// A checkpoint is on the disk.
    fn checkpoint(&mut self, path: &Path);
}

/// What is known when a run begins.
#[derive(Debug)]
pub struct Start<'a> {
    /// Steps already done.
    pub step: u64,
    /// The configuration.
    pub config: &'a Config,
    /// The recipe.
    pub recipe: &'a Recipe,
    /// Its size and its memory.
    pub prediction: &'a Prediction,
    /// The floor and the trivial loss of the data, if known.
    pub entropy: Option<Entropy>,
}

/// What to do besides the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Go on from the newest whole checkpoint of the run's directory; from the beginning where a run has begun and has none yet.
    pub resume: bool,
    /// Where a new run finds its directory taken it takes the next free number: `runs/tiny-2`.
    pub numbered: bool,
    /// Not 0 once the run is to end after the step under way: it saves, draws, and leaves out the last evaluation.
    pub stop: Option<&'static AtomicUsize>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps done.
    pub steps: u64,
    /// Loss of the last step, if this process made one.
    pub loss: Option<f64>,
    /// Loss over all held-out data; none of a run that was stopped before its end.
    pub valid_loss: Option<f64>,
    /// The floor and the trivial loss of the data, if known.
    pub entropy: Option<Entropy>,
    /// The run's directory.
    pub dir: PathBuf,
    /// The last checkpoint, if the run wrote one.
    pub checkpoint: Option<PathBuf>,
    /// The picture of the losses.
    pub picture: PathBuf,
}

/// Trains to the end on this rank. Ranks other than the first return `None`, write nothing and tell nobody.
///
/// # Errors
/// Whatever stops a run; the error has been told to the other ranks.
pub fn run<B: Kernels>(
    b: &B,
    comm: &dyn Comm<B>,
    config: &Config,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<Option<Summary>> {
    let done = run_rank(b, comm, config, options, observer);
    if let Err(e) = &done {
        comm.abort(&e.to_string());
    }
    done
}

fn run_rank<B: Kernels>(
    b: &B,
    comm: &dyn Comm<B>,
    config: &Config,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<Option<Summary>> {
    let (mut trainer, mut outputs) = set_up(b, comm, config, options, observer)?;
    let (mut loss, mut saved, mut stopped) = (None, None, false);
    let mut watchdog = Watchdog::default();
    while trainer.step() < config.train.steps && !stopped {
        let issued = trainer.issue_step();
        let step = trainer.step();
        stopped = issued.is_ok() && step < config.train.steps && options.asked_to_stop(b, comm)?;
        let last = stopped || step == config.train.steps;
        let evaluate = !last && due(step, config.eval.every);
        let save = !last && due(step, config.checkpoint.every);
        // The record of the step before is read while this one runs; what must not outrun this one waits for its own.
        let unread = if issued.is_err() || last || evaluate || save { 0 } else { 1 };
        while trainer.unread() > unread {
            let settled = trainer.settle().map_err(|error| diverged(error, config));
            if let (Some(layers), Some(outputs)) = (trainer.take_layers(), &mut outputs) {
                outputs.write_layers(&layers)?;
            }
            let Some(mut metrics) = settled? else { break };
            loss = metrics.loss;
            reach(Point::StepSettled)?;
            if let Some(outputs) = &mut outputs {
                note_memory(&mut metrics, b.memory());
                record(metrics, outputs, &mut watchdog, observer)?;
            }
            reach(Point::MetricsWritten)?;
        }
        issued?;
        let mut done = trainer.saved()?;
        if save {
            // One at a time.
            done = done.or(trainer.finish_save()?);
            trainer.begin_save(outputs.as_ref().map(|o| &o.store))?;
        }
        saved = tell(done, observer).or(saved);
        if evaluate {
            self::evaluate(&mut trainer, config.eval.batches, &mut outputs, observer)?;
            reach(Point::Evaluated)?;
        }
    }
    saved = tell(trainer.finish_save()?, observer).or(saved);
    reach(Point::StepsDone)?;
    // Before the evaluation, which takes its time and may fail: the last steps are not lost with it.
    let wanted = config.checkpoint.at_end || stopped && config.checkpoint.every > 0;
    if wanted && (loss.is_some() || saved.is_none()) {
        saved = tell(trainer.save(outputs.as_ref().map(|o| &o.store))?, observer);
    }
    let valid_loss = match stopped {
        true => None,
        false => Some(evaluate(&mut trainer, 0, &mut outputs, observer)?),
    };
    reach(Point::RunEnds)?;
    let entropy = trainer.data()?.entropy();
    let Some(outputs) = outputs else { return Ok(None) };
    let (steps, picture, dir) = (trainer.step(), outputs.draw()?, outputs.dir);
    Ok(Some(Summary { steps, loss, valid_loss, entropy, dir, checkpoint: saved, picture }))
}

/// A trainer where the run begins or goes on, and on the first rank its files.
fn set_up<'a, B: Kernels>(
    b: &'a B,
    comm: &'a dyn Comm<B>,
    config: &Config,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<(Trainer<'a, B>, Option<Outputs>)> {
    let first = comm.rank() == 0;
    let (mut store, mut checkpoint) = (None, None);
    if options.resume {
        // Before anybody looks for a checkpoint: what a killed writer had moved aside is put back.
        let dir = Path::new(&config.run.dir);
        if first && has_begun(dir) {
            store = Some(Store::open(dir)?);
        }
        comm.barrier()?;
        checkpoint = latest(config, observer, first)?;
    }
    // A run goes on under the recipe that it began with, whatever has become of the file.
    let recipe = match &checkpoint {
        Some(checkpoint) => checkpoint.position().resolved_recipe()?,
        None => checked_recipe(config)?,
    };
    let prediction = plan::require_room(b, comm.world(), config, &recipe)?;
    let mut trainer = Trainer::under(b, comm, config, recipe)?.with_data()?;
    if let Some(checkpoint) = &checkpoint {
        resume(&mut trainer, checkpoint, observer, first)?;
    }
    let mut outputs =
        if first { Some(begin(&mut trainer, store, &prediction, options, observer)?) } else { None };
    // No rank does a step of a run that has no directory yet.
    comm.barrier()?;
    if first && b.kind() == DeviceKind::Gpu && config.checkpoint.every > 0 {
        trainer.prepare_to_save()?;
    }
    let step = trainer.step();
    // Its checkpoint was on the disk before its held-out loss.
    let owes = outputs.as_ref().is_some_and(|outputs| !outputs.has_held_out(step));
    if checkpoint.is_some()
        && step < config.train.steps
        && due(step, config.eval.every)
        && any(b, comm, owes)?
    {
        self::evaluate(&mut trainer, config.eval.batches, &mut outputs, observer)?;
    }
    Ok((trainer, outputs))
}

/// What to do about a step whose numbers are none.
fn diverged(error: Error, config: &Config) -> Error {
    match error {
        Error::Core(source @ nibble_core::Error::NonFinite { .. }) => {
            let (lr, warmup_steps) = (config.train.lr, config.train.warmup_steps);
            Error::Diverged { lr, warmup_steps, source }
        }
        other => other,
    }
}

impl Options {
    /// Whether all ranks stop after this step: one of them was asked to.
    fn asked_to_stop<B: Kernels>(self, b: &B, comm: &dyn Comm<B>) -> Result<bool> {
        let Some(stop) = self.stop else { return Ok(false) };
        any(b, comm, stop.load(Ordering::Relaxed) != 0)
    }
}

/// Whether it is so on any rank.
fn any<B: Kernels>(b: &B, comm: &dyn Comm<B>, here: bool) -> Result<bool> {
    if comm.world() == 1 {
        return Ok(here);
    }
    let all = comm.all_gather(b, &b.upload(&[f32::from(u8::from(here))])?)?;
    Ok(b.download(&all)?.contains(&1.0))
}

/// Opens the files of the run, and tells how it begins. `store` is that of a run that goes on.
fn begin<B: Kernels>(
    trainer: &mut Trainer<'_, B>,
    store: Option<Store>,
    prediction: &Prediction,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<Outputs> {
    let (step, entropy) = (trainer.step(), trainer.data()?.entropy());
    let setup = &mut trainer.setup;
    let mut outputs = Outputs::open(&mut setup.config, &setup.recipe, store, step, options)?;
    let (config, recipe) = (trainer.config(), trainer.recipe());
    let notes = outputs.begin_picture(&recipe.name, entropy, config.unit())?;
    notes.iter().for_each(|note| observer.note(note));
    observer.start(&Start { step, config, recipe, prediction, entropy });
    Ok(outputs)
}

/// Writes and tells what a step has measured.
fn record(
    mut metrics: Metrics,
    outputs: &mut Outputs,
    watchdog: &mut Watchdog,
    observer: &mut dyn Observer,
) -> Result<()> {
    observer.measure(&mut metrics);
    outputs.write(&metrics)?;
    observer.step(&metrics);
    watchdog.step(&metrics).iter().for_each(|begun| observer.note(begun));
    Ok(())
}

/// A held-out loss over so many batches (0: all there are), written, drawn and told.
fn evaluate<B: Kernels>(
    trainer: &mut Trainer<'_, B>,
    batches: usize,
    outputs: &mut Option<Outputs>,
    observer: &mut dyn Observer,
) -> Result<f64> {
    let first = outputs.is_some();
    let valid_loss = trainer.evaluate_telling(batches, &mut |done, of| {
        if first {
            observer.evaluating(done, of);
        }
    })?;
    if let Some(outputs) = outputs {
        let step = trainer.step();
        outputs.write(&Metrics { step, valid_loss: Some(valid_loss), ..Metrics::default() })?;
        outputs.draw()?;
        observer.evaluation(step, valid_loss);
    }
    Ok(valid_loss)
}

fn note_memory(metrics: &mut Metrics, memory: MemoryStats) {
    let peak = memory.peak_bytes as f64;
    metrics.memory_gib = Some(peak / f64::from(1 << 30));
    metrics.memory_percent = memory.total_bytes.map(|total| 100.0 * peak / total as f64);
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

/// Tells of a checkpoint that has got into its place.
fn tell(saved: Option<PathBuf>, observer: &mut dyn Observer) -> Option<PathBuf> {
    saved.inspect(|path| observer.checkpoint(path))
}

/// The newest whole checkpoint of the run; none where it has begun and has had none yet.
fn latest(config: &Config, observer: &mut dyn Observer, first: bool) -> Result<Option<Checkpoint>> {
    let dir = PathBuf::from(&config.run.dir);
    let latest = latest_valid(&dir)?;
    if first {
        latest.rejected.iter().for_each(|r| observer.rejected(&r.path, &r.why));
    }
    if latest.checkpoint.is_none() {
        // To begin again would overwrite what may yet be mended.
        if !latest.rejected.is_empty() {
            return Err(Error::checkpoint(&dir, "every checkpoint is damaged; nothing was changed"));
        }
        require_nothing_to_lose(&dir, config.checkpoint.every)?;
        if first {
            observer.note(&format!("{} has no checkpoint yet: from the beginning", dir.display()));
        }
    }
    Ok(latest.checkpoint)
}

/// Goes on from a checkpoint, if its configuration is this run's.
fn resume<B: Kernels>(
    trainer: &mut Trainer<'_, B>,
    checkpoint: &Checkpoint,
    observer: &mut dyn Observer,
    first: bool,
) -> Result<()> {
    let earlier = Config::from_text(&checkpoint.position().config, checkpoint.path(), &[])?;
    let mut changes = trainer.config().changes_since(&earlier)?;
    let (then, now) = (&checkpoint.position().data_sha256, &trainer.position()?.data_sha256);
    // Another path of the same content changes nothing.
    if then == now {
        changes.retain(|change| !change.starts_with("data.source: "));
    } else {
        let short = |sha: &str| sha[..12.min(sha.len())].to_owned();
        changes.push(format!("the data's content: SHA-256 {} → {}", short(then), short(now)));
    }
    let is_of_recipe = |change: &String| change.starts_with("recipe: ");
    if changes.iter().any(is_of_recipe) {
        let (stored, named) = (trainer.recipe(), checked_recipe(trainer.config())?);
        let (name, description) = (stored.name.clone(), stored.description.clone());
        if (Recipe { name, description, ..named }).to_toml() == stored.to_toml() {
            changes.retain(|change| !is_of_recipe(change));
        }
    }
    if trainer.config().train.steps > earlier.train.steps {
        changes.retain(|change| !change.starts_with("train.steps: "));
        if first {
            observer.note(&format!(
                "train.steps: {} → {}: learning rate and recipe follow the new number from here on",
                earlier.train.steps,
                trainer.config().train.steps
            ));
        }
    }
    if !changes.is_empty() {
        let why = format!(
            "differs from that of the run to be resumed ({}): {}",
            checkpoint.path().display(),
            changes.join("; ")
        );
        return Err(Error::config("configuration", why));
    }
    trainer.load(checkpoint)
}

/// Checks that a run without checkpoints has not come far enough to have had one, or to be wanted without any.
fn require_nothing_to_lose(dir: &Path, every: u64) -> Result<()> {
    if !has_begun(dir) {
        let why = format!("no run has begun in {}: there is nothing to go on from", dir.display());
        return Err(Error::config("run.dir", why));
    }
    let metrics = read_metrics(&dir.join(METRICS_FILE))?.metrics;
    let steps = metrics.iter().map(|m| m.step).max().unwrap_or(0);
    // One may be on its way to the disk while the steps up to the next are done.
    if steps > 2 * every {
        let dir = dir.display();
        let why = format!(
            "{dir} has metrics of {steps} steps and no checkpoint to go on from; nothing was changed"
        );
        return Err(Error::config("run.dir", why));
    }
    Ok(())
}
