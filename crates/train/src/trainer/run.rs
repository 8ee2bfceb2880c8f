//! A whole run: steps, evaluations, checkpoints, metrics.

use super::{Trainer, checked_recipe};
use crate::checkpoint::{Checkpoint, Store, latest_valid};
use crate::config::Config;
use crate::data::Entropy;
use crate::error::{Error, Result};
use crate::metrics::{EventLog, LossCurve, Metrics, MetricsLog, draw_loss_curve, read_metrics};
use crate::plan::{self, Prediction};
use nibble_core::{Comm, Kernels, MemoryStats};
use std::path::{Path, PathBuf};

/// What whoever watches a run is told, by its first rank.
pub trait Observer {
    /// The run begins (or goes on) at this step; what memory it takes.
    fn start(&mut self, start: &Start<'_>);
    /// A checkpoint passed over while resuming.
    fn rejected(&mut self, path: &Path, why: &Error);
    /// A step is done: adds what the device's owner knows to its metrics, before they are written and told.
    fn measure(&mut self, _: &mut Metrics) {}
    /// A step is done.
    fn step(&mut self, metrics: &Metrics);
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
    pub recipe: &'a nibble_core::Recipe,
    /// Its size and its memory.
    pub prediction: &'a Prediction,
    /// The floor and the trivial loss of the data, if known.
    pub entropy: Option<Entropy>,
}

/// What to do besides the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Go on from the newest whole checkpoint of the run's directory, if there is one.
    pub resume: bool,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps done.
    pub steps: u64,
    /// Loss of the last step, if this process made one.
    pub loss: Option<f64>,
    /// Loss over all held-out data.
    pub valid_loss: f64,
    /// The floor and the trivial loss of the data, if known.
    pub entropy: Option<Entropy>,
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

/// Files only the first rank has.
struct Outputs {
    dir: PathBuf,
    store: Store,
    log: MetricsLog,
    events: EventLog,
}

impl Outputs {
    fn open(config: &Config, step: u64) -> Result<Self> {
        let dir = PathBuf::from(&config.run.dir);
        let store = Store::open(&dir)?;
        let path = dir.join("config.toml");
        std::fs::write(&path, config.resolved_toml()?).map_err(Error::io(&path))?;
        let log = MetricsLog::open(&dir.join("metrics.jsonl"), step)?;
        let events = EventLog::create(&dir, step)?;
        Ok(Self { dir, store, log, events })
    }

    fn write(&mut self, metrics: &Metrics) -> Result<()> {
        self.log.write(metrics)?;
        self.events.write(metrics)
    }
}

fn run_rank<B: Kernels>(
    b: &B,
    comm: &dyn Comm<B>,
    config: &Config,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<Option<Summary>> {
    let first = comm.rank() == 0;
    let checkpoint = if options.resume { latest(config, observer, first)? } else { None };
    // A run goes on under the recipe that it began with, whatever has become of the file.
    let recipe = match &checkpoint {
        Some(checkpoint) => checkpoint.position().resolved_recipe()?,
        None => checked_recipe(config)?,
    };
    let prediction = plan::require_room(b, comm.world(), config, &recipe)?;
    let mut trainer = Trainer::under(b, comm, config, recipe)?.with_data()?;
    if let Some(checkpoint) = &checkpoint {
        resume(&mut trainer, checkpoint)?;
    }
    let mut outputs = if first { Some(Outputs::open(config, trainer.step())?) } else { None };
    let entropy = trainer.data()?.entropy();
    if first {
        let (config, recipe) = (trainer.config(), trainer.recipe());
        let start = Start { step: trainer.step(), config, recipe, prediction: &prediction, entropy };
        observer.start(&start);
    }
    let mut loss = None;
    let mut saved = None;
    while trainer.step() < config.train.steps {
        let issued = trainer.issue_step();
        let step = trainer.step();
        let last = step == config.train.steps;
        let evaluate = !last && due(step, config.eval.every);
        let save = !last && due(step, config.checkpoint.every);
        // The record of the step before is read while this one runs; what must not outrun this one waits for its own.
        let unread = if issued.is_err() || last || evaluate || save { 0 } else { 1 };
        while trainer.unread() > unread {
            let Some(mut metrics) = trainer.settle()? else { break };
            loss = metrics.loss;
            if let Some(outputs) = &mut outputs {
                note_memory(&mut metrics, b.memory());
                observer.measure(&mut metrics);
                outputs.write(&metrics)?;
                observer.step(&metrics);
            }
        }
        issued?;
        if evaluate {
            let valid_loss = trainer.evaluate(config.eval.batches)?;
            report(&mut outputs, observer, step, valid_loss)?;
        }
        let mut done = trainer.saved()?;
        if save {
            // One at a time.
            done = done.or(trainer.finish_save()?);
            trainer.begin_save(outputs.as_ref().map(|o| &o.store))?;
        }
        saved = tell(done, observer).or(saved);
    }
    saved = tell(trainer.finish_save()?, observer).or(saved);
    let valid_loss = trainer.evaluate(0)?;
    report(&mut outputs, observer, trainer.step(), valid_loss)?;
    if config.checkpoint.at_end && (loss.is_some() || saved.is_none()) {
        saved = tell(trainer.save(outputs.as_ref().map(|o| &o.store))?, observer);
    }
    let Some(outputs) = outputs else { return Ok(None) };
    let picture = outputs.dir.join("loss.svg");
    let title = format!("{} · {}", outputs.dir.display(), trainer.recipe().name);
    let curve = LossCurve::from_metrics(&title, &read_metrics(outputs.log.path())?, entropy);
    draw_loss_curve(&curve, &picture)?;
    Ok(Some(Summary { steps: trainer.step(), loss, valid_loss, entropy, checkpoint: saved, picture }))
}

fn note_memory(metrics: &mut Metrics, memory: MemoryStats) {
    let peak = memory.peak_bytes as f64;
    metrics.memory_gib = Some(peak / f64::from(1 << 30));
    metrics.memory_percent = memory.total_bytes.map(|total| 100.0 * peak / total as f64);
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

fn report(
    outputs: &mut Option<Outputs>,
    observer: &mut dyn Observer,
    step: u64,
    valid_loss: f64,
) -> Result<()> {
    if let Some(outputs) = outputs {
        outputs.write(&Metrics { step, valid_loss: Some(valid_loss), ..Metrics::default() })?;
        observer.evaluation(step, valid_loss);
    }
    Ok(())
}

/// Tells of a checkpoint that has got into its place.
fn tell(saved: Option<PathBuf>, observer: &mut dyn Observer) -> Option<PathBuf> {
    saved.inspect(|path| observer.checkpoint(path))
}

/// The newest whole checkpoint of the run, if it has any.
fn latest(config: &Config, observer: &mut dyn Observer, first: bool) -> Result<Option<Checkpoint>> {
    let dir = PathBuf::from(&config.run.dir);
    let latest = latest_valid(&dir)?;
    if first {
        latest.rejected.iter().for_each(|r| observer.rejected(&r.path, &r.why));
    }
    match latest.checkpoint {
        // To begin again would overwrite what may yet be mended.
        None if !latest.rejected.is_empty() => {
            Err(Error::checkpoint(&dir, "every checkpoint is damaged; nothing was changed"))
        }
        checkpoint => Ok(checkpoint),
    }
}

/// Goes on from a checkpoint, if its configuration is this run's.
fn resume<B: Kernels>(trainer: &mut Trainer<'_, B>, checkpoint: &Checkpoint) -> Result<()> {
    let earlier = Config::from_text(&checkpoint.position().config, checkpoint.path(), &[])?;
    let mut changes = trainer.config().changes_since(&earlier)?;
    let (then, now) = (&checkpoint.position().data_sha256, &trainer.position()?.data_sha256);
    if then != now {
        let short = |sha: &str| sha[..12.min(sha.len())].to_owned();
        changes.push(format!("the data's content: SHA-256 {} → {}", short(then), short(now)));
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
