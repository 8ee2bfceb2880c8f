//! A whole run: steps, evaluations, checkpoints, metrics.

use super::Trainer;
use super::alike::require_alike;
use super::divergence::of_divergence;
use super::evaluating::Evaluator;
use super::folder::shared_folder;
use super::observer::{Observer, Outcome, Start, Summary};
use super::options::Options;
use super::outputs::Outputs;
use super::resume::Origin;
use crate::checkpoint::Store;
use crate::config::{CheckpointConfig, Config};
use crate::error::Result;
use crate::evaluation::HeldOut;
use crate::fault::{Point, reach};
use crate::metrics::{Metrics, Watchdog};
use crate::plan;
use nibble_core::allocation::phase;
use nibble_core::{DeviceKind, Kernels, MemoryStats, Mesh};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Trains to the end on this rank. Ranks other than the first have no summary, write nothing but files of checkpoints, and tell their observer nothing
/// but that the run begins.
///
/// # Errors
/// Whatever stops a run; the error has been told to the other ranks.
pub fn run<'a, B: Kernels>(
    b: &'a B,
    mesh: impl Into<Mesh<'a, B>>,
    config: &Config,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let mesh = mesh.into();
    let done = run_rank(b, mesh, config, options, observer);
    if let Err(e) = &done {
        mesh.all.abort(&e.to_string());
    }
    done
}

fn run_rank<'a, B: Kernels>(
    b: &'a B,
    mesh: Mesh<'a, B>,
    config: &Config,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    phase(format_args!("start"));
    reach(Point::Loading)?;
    let origin = Origin::find(b, mesh.all, config, options.resume, observer)?;
    if let ControlFlow::Break(summary) = origin.finished(b, mesh.all, observer)? {
        return Ok(Outcome { summary, stopped: 0 });
    }
    let config = &origin.config.clone();
    let resumed = origin.checkpoint.as_ref().map(|c| (c.position().step, c.path().to_owned()));
    let evaluator = Evaluator::of(config, options, mesh.all.rank() == 0, observer)?;
    let (mut trainer, mut outputs) = set_up(b, mesh, config, origin, &evaluator, observer)?;
    let done = train(&mut trainer, &mut outputs, config, &evaluator, resumed, observer);
    if let (Err(error), Some(outputs)) = (&done, &outputs) {
        // Before anything else is done: the others are told where it was. The first error is the one to tell.
        mesh.all.abort(&error.to_string());
        let _ = outputs.draw();
    }
    let done = done?;
    reach(Point::RunEnds)?;
    // Every rank has a part in it.
    let digest = if options.digest { Some(trainer.digest()?) } else { None };
    let entropy = trainer.data()?.entropy();
    let Done { loss, held_out, checkpoint, stopped } = done;
    let Some(outputs) = outputs else { return Ok(Outcome { summary: None, stopped }) };
    let (steps, picture, dir) = (trainer.step(), outputs.draw()?, outputs.dir);
    let (is_whole, valid_loss) = (held_out.is_some(), held_out.and_then(|found| found.loss()));
    tell_passed_over(&trainer, observer);
    let summary = Summary { steps, loss, is_whole, valid_loss, entropy, dir, checkpoint, picture, digest };
    Ok(Outcome { summary: Some(summary), stopped })
}

/// What a rank's steps have given.
struct Done {
    loss: Option<f64>,
    /// None of a run that was stopped before it.
    held_out: Option<HeldOut>,
    checkpoint: Option<PathBuf>,
    /// [`Outcome::stopped`].
    stopped: u8,
}

/// The steps, after those of the checkpoint that was loaded, if one was, and what comes after the last one.
fn train<B: Kernels>(
    trainer: &mut Trainer<'_, B>,
    outputs: &mut Option<Outputs>,
    config: &Config,
    evaluator: &Evaluator,
    resumed: Option<(u64, PathBuf)>,
    observer: &mut dyn Observer,
) -> Result<Done> {
    let options = evaluator.options;
    let (resumed_at, mut saved) = resumed.unzip();
    // The step of the newest checkpoint. One that fails ends the run.
    let mut saved_at = resumed_at;
    let mut loss = None;
    // Every rank knows that an evaluation was cut short, and asks by what.
    let cut_short = |trainer: &Trainer<'_, B>| {
        let (b, comm) = trainer.backend();
        options.stop_asked_of_any(b, comm)
    };
    let mut stopped = 0;
    if !evaluator.what_is_owed(trainer, outputs, resumed_at, observer)? {
        stopped = cut_short(trainer)?;
    }
    let mut watchdog = Watchdog::default();
    let is_alone = trainer.backend().1.world() == 1;
    while trainer.step() < config.train.steps && stopped == 0 {
        trainer.ask_to_stop(options.stop_asked());
        let issued = trainer.issue_step();
        let step = trainer.step();
        let goes_on = issued.is_ok() && step < config.train.steps;
        let evaluate = goes_on && due(step, config.eval.every);
        let save = goes_on && due(step, config.checkpoint.every);
        // One rank alone need not wait for a record.
        stopped = if goes_on && is_alone { options.stop_asked() } else { 0 };
        // The record of the step before is read while this one runs; what must not outrun this one waits for its own.
        let unread = if !goes_on || stopped != 0 || evaluate || save { 0 } else { 1 };
        loss = read_records(trainer, unread, outputs, &mut watchdog, observer)?.or(loss);
        if goes_on && trainer.stop_asked_of_any() != 0 {
            stopped = trainer.stop_asked_of_any();
            loss = read_records(trainer, 0, outputs, &mut watchdog, observer)?.or(loss);
        }
        issued?;
        let mut done = trainer.saved()?;
        if save && stopped == 0 {
            // One at a time.
            done = done.or(trainer.finish_save()?);
            trainer.begin_save(outputs.as_ref().map(|o| &o.store))?;
            saved_at = Some(step);
        }
        saved = tell(done, observer).or(saved);
        if evaluate && stopped == 0 {
            if !is_alone {
                // Before it: only steps tell several ranks that all have written, and an evaluation may take long and fail.
                saved = tell(trainer.finish_save()?, observer).or(saved);
            }
            if evaluator.evaluate(trainer, config.eval.batches, outputs, observer)?.is_none() {
                stopped = cut_short(trainer)?;
            }
            reach(Point::Evaluated)?;
        }
    }
    saved = tell(trainer.finish_save()?, observer).or(saved);
    reach(Point::StepsDone)?;
    // Before the evaluation, which takes its time and may fail: the last steps are not lost with it.
    let CheckpointConfig { every, at_end, .. } = config.checkpoint;
    let wanted = at_end || due(trainer.step(), every) || stopped != 0 && every > 0;
    if wanted && saved_at != Some(trainer.step()) {
        saved = tell(trainer.save(outputs.as_ref().map(|o| &o.store))?, observer);
    }
    let mut held_out = None;
    if stopped == 0 {
        held_out = evaluator.evaluate(trainer, 0, outputs, observer)?;
        if held_out.is_none() {
            stopped = cut_short(trainer)?;
        }
    }
    Ok(Done { loss, held_out, checkpoint: saved, stopped })
}

/// Reads the records of all steps but the last so many, writes and tells what they say. The loss of the last one read that has one, if any was.
fn read_records<B: Kernels>(
    trainer: &mut Trainer<'_, B>,
    unread: usize,
    outputs: &mut Option<Outputs>,
    watchdog: &mut Watchdog,
    observer: &mut dyn Observer,
) -> Result<Option<f64>> {
    let mut loss = None;
    while trainer.unread() > unread {
        let settled = trainer.settle().map_err(|error| of_divergence(error, trainer.config(), false));
        tell_notes(trainer, outputs.is_some(), observer);
        if let (Some(layers), Some(outputs)) = (trainer.take_layers(), outputs.as_mut()) {
            outputs.write_layers(&layers)?;
        }
        let times = trainer.take_rank_times();
        let Some(mut metrics) = settled? else { break };
        loss = metrics.loss.or(loss);
        reach(Point::StepSettled)?;
        if let Some(outputs) = outputs {
            note_memory(&mut metrics, trainer.backend().0.memory());
            if let Some(times) = times {
                outputs.write_ranks(&times)?;
                metrics.other.extend(times.summary());
                watchdog.ranks(&times).iter().for_each(|begun| observer.note(begun));
            }
            record(metrics, outputs, watchdog, observer)?;
        }
        reach(Point::MetricsWritten)?;
    }
    Ok(loss)
}

/// A trainer where the run begins or goes on, and on the first rank its files. All ranks are told the run's folder, and then how it begins.
fn set_up<'a, B: Kernels>(
    b: &'a B,
    mesh: Mesh<'a, B>,
    config: &Config,
    origin: Origin,
    evaluator: &Evaluator,
    observer: &mut dyn Observer,
) -> Result<(Trainer<'a, B>, Option<Outputs>)> {
    let options = evaluator.options;
    let first = mesh.all.rank() == 0;
    let Origin { store, checkpoint, recipe, data, .. } = origin;
    let prediction = plan::require_room_for(b, (mesh.shape(), mesh.all.host_ranks()), config, &recipe)?;
    let trainer = Trainer::under(b, mesh, config, recipe)?;
    let mut trainer = match data {
        Some(data) => trainer.with(data),
        None => trainer.with_data()?,
    };
    let inputs = (trainer.config(), trainer.recipe(), trainer.data()?);
    require_alike(b, mesh.all, inputs, evaluator)?;
    match &checkpoint {
        Some(checkpoint) => trainer.load(checkpoint)?,
        None => trainer.load_initial()?,
    }
    let opened = if first { open(&mut trainer, store, options, observer).map(Some) } else { Ok(None) };
    let (made, outputs) = match opened {
        Ok(outputs) => (Ok(outputs.as_ref().map(|outputs| outputs.dir.clone())), outputs),
        Err(error) => (Err(error), None),
    };
    // No rank does a step of a run that has no directory yet.
    if let Some(dir) = shared_folder(b, mesh.all, made, "the run's folder")? {
        trainer.rank.context.config.run.dir = dir.to_string_lossy().into_owned();
    }
    let (step, entropy) = (trainer.step(), trainer.data()?.entropy());
    let (config, recipe) = (trainer.config(), trainer.recipe());
    observer.start(&Start { step, config, recipe, prediction: &prediction, entropy });
    if b.kind() == DeviceKind::Gpu && config.checkpoint.every > 0 {
        trainer.prepare_to_save()?;
    }
    Ok((trainer, outputs))
}

/// Opens the files of the run. `store` is that of a run that goes on.
fn open<B: Kernels>(
    trainer: &mut Trainer<'_, B>,
    store: Option<Store>,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<Outputs> {
    let (step, entropy) = (trainer.step(), trainer.data()?.entropy());
    let context = &mut trainer.rank.context;
    let mut outputs =
        Outputs::open(&mut context.config, context.plans.recipe(), store, step, options, observer)?;
    let notes = outputs.begin_picture(&context.plans.recipe().name, entropy, context.config.unit())?;
    notes.iter().for_each(|note| observer.note(note));
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

fn note_memory(metrics: &mut Metrics, memory: MemoryStats) {
    let peak = memory.peak_bytes as f64;
    metrics.memory_gib = Some(peak / f64::from(1 << 30));
    metrics.memory_percent = memory.total_bytes.map(|total| 100.0 * peak / total as f64);
}

pub(super) fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

/// Tells how many steps of the run had nothing to learn.
fn tell_passed_over<B: Kernels>(trainer: &Trainer<'_, B>, observer: &mut dyn Observer) {
    let (count, of) = (trainer.rank.context.passed_over, trainer.step());
    if count > 0 {
        observer.note(&format!(
            "warning: {count} of {of} steps had no target and changed nothing: in {} tokens of data.seq_len = {} each there was none; longer \
             sequences, or shorter prompts, have more",
            trainer.config().tokens_per_step(),
            trainer.config().data.seq_len
        ));
    }
}

/// Tells what exchanges among ranks have done again, on the first rank alone: all have the same to say.
pub(super) fn tell_notes<B: Kernels>(trainer: &mut Trainer<'_, B>, first: bool, observer: &mut dyn Observer) {
    let notes = trainer.take_notes();
    notes.iter().filter(|_| first).for_each(|note| observer.note(note));
}

/// Tells of a checkpoint that has got into its place.
fn tell(saved: Option<PathBuf>, observer: &mut dyn Observer) -> Option<PathBuf> {
    saved.inspect(|path| observer.checkpoint(path))
}
