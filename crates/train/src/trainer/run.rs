//! A whole run: its start, its inputs, its steps, its end.

use super::Trainer;
use super::divergence::how_to_replay;
use super::evaluating::Evaluator;
use super::options::{Observer, Options, Outcome, Start, Summary};
use super::ranks::{any_rank, shared_folder};
use super::start::alike::require_alike;
use super::start::origin::Origin;
use super::start::outputs::Outputs;
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

/// Trains on this rank to the end of the run. The other ranks have no summary, write only checkpoint files, and report only the start of
/// the run.
///
/// # Errors
/// Returns any error that stops the run. The other ranks have already been informed of the error.
pub fn run<'a, B: Kernels>(
    b: &'a B,
    mesh: impl Into<Mesh<'a, B>>,
    config: &Config,
    options: Options,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let mesh = mesh.into();
    let mut whole = || -> Result<Outcome> {
        phase(format_args!("start"));
        reach(Point::Loading)?;
        let origin = Origin::find(b, mesh.all, config, options.resume, observer)?;
        if let ControlFlow::Break(summary) = origin.finished(b, mesh.all, observer)? {
            return Ok(Outcome { summary, stopped: 0 });
        }
        let mut run = Run::begin(b, mesh, origin, options, observer)?;
        let done = run.take_steps().and_then(|()| run.finish());
        if let (Err(error), Some(outputs)) = (&done, &run.outputs) {
            // The call informs the other ranks at once, so that the first error is the reported error.
            mesh.all.abort(&error.to_string());
            let _ = outputs.draw();
        }
        done?;
        run.conclude()
    };
    whole().inspect_err(|error| mesh.all.abort(&error.to_string()))
}

/// A run in progress, on one rank.
struct Run<'a, 'o, B: Kernels> {
    trainer: Trainer<'a, B>,
    /// The run's files; `None` on all ranks except the first.
    outputs: Option<Outputs>,
    evaluator: Evaluator,
    observer: &'o mut dyn Observer,
    watchdog: Watchdog,
    /// Loss of the last step with a target.
    loss: Option<f64>,
    /// The loss over all held-out data; `None` if the run was stopped before the final evaluation.
    held_out: Option<HeldOut>,
    /// The path of the newest checkpoint.
    saved: Option<PathBuf>,
    /// The step of the newest checkpoint that was started. A checkpoint that fails ends the run.
    saved_at: Option<u64>,
    /// See [`Outcome::stopped`].
    stopped: u8,
}

impl<'a, 'o, B: Kernels> Run<'a, 'o, B> {
    /// Starts or resumes a run, and opens the run's files on the first rank. All ranks receive the path of the run's folder, then report
    /// the start.
    fn begin(
        b: &'a B,
        mesh: Mesh<'a, B>,
        origin: Origin,
        options: Options,
        observer: &'o mut dyn Observer,
    ) -> Result<Self> {
        let is_first = mesh.all.rank() == 0;
        let Origin { store, checkpoint, config, recipe, data } = origin;
        let evaluator = Evaluator::of(&config, options, is_first, observer)?;
        let prediction = plan::require_room_for(b, mesh.shape(), mesh.all.host_ranks(), &config, &recipe)?;
        let trainer = Trainer::under(b, mesh, &config, recipe)?;
        let mut trainer = match data {
            Some(data) => trainer.with(data)?,
            None => trainer.with_data()?,
        };
        let inputs = (trainer.config(), trainer.recipe(), trainer.data()?);
        require_alike(b, mesh.all, inputs, &evaluator.sha256())?;
        match &checkpoint {
            Some(checkpoint) => trainer.load(checkpoint)?,
            None => trainer.load_initial()?,
        }
        let (step, entropy) = (trainer.step(), trainer.data()?.entropy());
        let context = &mut trainer.rank.context;
        let open = || {
            let of_run = (&mut context.config, context.plans.recipe());
            Outputs::open(of_run, store, (step, entropy), options, observer)
        };
        let opened = if is_first { open().map(Some) } else { Ok(None) };
        let (made, outputs) = match opened {
            Ok(outputs) => (Ok(outputs.as_ref().map(|outputs| outputs.dir.clone())), outputs),
            Err(error) => (Err(error), None),
        };
        // No rank may take a step before the run has a directory.
        if let Some(dir) = shared_folder(b, mesh.all, made, "the run's folder")? {
            context.config.run.dir = dir.to_string_lossy().into_owned();
        }
        let (config, recipe) = (&context.config, context.plans.recipe());
        observer.start(&Start { step, config, recipe, prediction: &prediction, entropy });
        if b.kind() == DeviceKind::Gpu && config.checkpoint.every > 0 {
            trainer.prepare_to_save()?;
        }
        let (saved_at, saved) = checkpoint.map(|c| (c.position().step, c.path().to_owned())).unzip();
        let watchdog = outputs.as_ref().map_or_else(Watchdog::default, |outputs| outputs.watchdog());
        let (loss, held_out, stopped) = (None, None, 0);
        Ok(Self { trainer, outputs, evaluator, observer, watchdog, loss, held_out, saved, saved_at, stopped })
    }

    /// Takes the remaining steps. Checkpoints and evaluations are made between the steps when they are due.
    fn take_steps(&mut self) -> Result<()> {
        let config = self.trainer.config();
        let (save_every, eval) = (config.checkpoint.every, config.eval.clone());
        let (options, steps) = (self.evaluator.options, self.last_step());
        self.evaluate_what_is_owed()?;
        let is_alone = self.trainer.backend().1.world() == 1;
        while self.trainer.step() < steps && self.stopped == 0 {
            self.trainer.asked = options.stop_asked();
            let issued = self.trainer.issue_step();
            let step = self.trainer.step();
            let goes_on = issued.is_ok() && step < steps;
            let evaluate = goes_on && due(step, eval.every);
            let save = goes_on && due(step, save_every);
            // A single rank need not wait for a record, so it reads its own flag.
            self.stopped = if goes_on && is_alone { options.stop_asked() } else { 0 };
            // The record of the previous step is read while this step runs. Work that must not overlap this step waits for this step's
            // record.
            let unread = if !goes_on || self.stopped != 0 || evaluate || save { 0 } else { 1 };
            self.read_records(unread)?;
            let asked_of_any = self.trainer.any_told.asked;
            if goes_on && asked_of_any != 0 {
                self.stopped = asked_of_any;
                self.read_records(0)?;
            }
            issued?;
            let mut done = self.trainer.saved()?;
            if save && self.stopped == 0 {
                // Only one checkpoint may be in progress at a time.
                done = done.or(self.trainer.finish_save()?);
                self.trainer.begin_save(self.outputs.as_ref().map(|o| &o.store))?;
                self.saved_at = Some(step);
            }
            self.tell(done);
            if evaluate && self.stopped == 0 {
                if !is_alone {
                    // The checkpoint is finished before the evaluation, which may take long and fail. Several ranks would otherwise learn
                    // only from later steps that all ranks have written their files.
                    self.finish_save()?;
                }
                self.evaluate(eval.batches)?;
                reach(Point::Evaluated)?;
            }
        }
        self.finish_save()?;
        reach(Point::StepsDone)
    }

    /// Writes the checkpoint and runs the evaluation after the last step.
    fn finish(&mut self) -> Result<()> {
        // The checkpoint comes first, because the evaluation takes time and may fail, and the last steps must not be lost.
        let CheckpointConfig { every, at_end, .. } = self.trainer.config().checkpoint;
        let step = self.trainer.step();
        let is_whole = step >= self.trainer.config().train.steps;
        // A run that ends early on request is to be continued.
        let was_cut = self.stopped == 0 && !is_whole;
        let wanted = at_end || due(step, every) || was_cut || self.stopped != 0 && every > 0;
        if wanted && self.saved_at != Some(step) {
            let done = self.trainer.save(self.outputs.as_ref().map(|o| &o.store))?;
            self.tell(done);
        }
        if self.stopped == 0 && is_whole {
            self.held_out = self.evaluate(0)?;
        }
        Ok(())
    }

    /// The step after which this process ends, if nothing stops it before: the run's last one, or [`Options::until`].
    fn last_step(&self) -> u64 {
        match (self.trainer.config().train.steps, self.evaluator.options.until) {
            (steps, 0) => steps,
            (steps, until) => steps.min(until),
        }
    }

    /// The results of the run.
    fn conclude(self) -> Result<Outcome> {
        let Self { mut trainer, outputs, evaluator, observer, loss, held_out, saved, stopped, .. } = self;
        reach(Point::RunEnds)?;
        // All ranks take part in computing the hash.
        let digest = if evaluator.options.digest { Some(trainer.digest()?) } else { None };
        let entropy = trainer.data()?.entropy();
        let Some(outputs) = outputs else { return Ok(Outcome { summary: None, stopped }) };
        let (steps, picture, dir, checkpoint) = (trainer.step(), outputs.draw()?, outputs.dir, saved);
        let (is_whole, valid_loss) = (held_out.is_some(), held_out.and_then(|found| found.loss()));
        tell_passed_over(&trainer, observer);
        let summary =
            Summary { steps, loss, is_whole, valid_loss, entropy, dir, checkpoint, picture, digest };
        Ok(Outcome { summary: Some(summary), stopped })
    }

    /// Evaluates the step from which the run resumed, if its evaluation is missing. The checkpoint of a step is written before the
    /// evaluation.
    fn evaluate_what_is_owed(&mut self) -> Result<()> {
        let (step, (b, comm), config) = (self.trainer.step(), self.trainer.backend(), self.trainer.config());
        let may = self.saved_at.is_some() && step < config.train.steps && due(step, config.eval.every);
        let owes = self.outputs.as_ref().is_some_and(|outputs| !outputs.has_held_out(step));
        let batches = config.eval.batches;
        if may && any_rank(b, comm, owes)? {
            self.evaluate(batches)?;
        }
        Ok(())
    }

    /// Evaluates over `batches` batches (0: all). If the evaluation was cut short, a collective determines the flag that stopped the
    /// evaluation.
    fn evaluate(&mut self, batches: usize) -> Result<Option<HeldOut>> {
        let Self { trainer, outputs, evaluator, observer, .. } = self;
        let found = evaluator.evaluate(trainer, batches, outputs, *observer)?;
        if found.is_none() {
            let (b, comm) = trainer.backend();
            self.stopped = evaluator.options.stop_asked_of_any(b, comm)?;
        }
        Ok(found)
    }

    /// Reads, writes and reports the records of all but the last `unread` steps.
    fn read_records(&mut self, unread: usize) -> Result<()> {
        let Self { trainer, outputs, observer, watchdog, .. } = self;
        while trainer.unread() > unread {
            let settled = trainer.settle();
            if let (Err(error), Some(outputs)) = (&settled, &*outputs) {
                // The step's own error is the one to report. Without a record the step can be repeated as well.
                let spike = trainer.spike_of_error(error, watchdog.usual_loss());
                let _ = spike.map(|spike| spike.map(|spike| spike.record(&outputs.dir)));
            }
            let settled = settled.map_err(|error| trainer.of_divergence(error, false));
            trainer.tell_notes(outputs.is_some(), *observer);
            let mut lost = Vec::new();
            if let (Some(layers), Some(outputs)) = (trainer.take_layers(), outputs.as_mut()) {
                outputs.write_layers(&layers)?;
                lost = watchdog.layers(&layers);
            }
            let times = trainer.rank_times.take();
            let Some(mut metrics) = settled? else { break };
            self.loss = metrics.loss.or(self.loss);
            reach(Point::StepSettled)?;
            if let Some(outputs) = outputs {
                note_memory(&mut metrics, trainer.backend().0.memory());
                if let Some(times) = times {
                    outputs.write_ranks(&times)?;
                    metrics.other.extend(times.summary());
                    watchdog.ranks(&times).iter().for_each(|begun| observer.note(begun));
                }
                observer.measure(&mut metrics);
                outputs.write(&metrics)?;
                observer.step(&metrics);
                let spike = trainer.spike_of_step(&metrics, watchdog)?;
                lost.iter().chain(&watchdog.step(&metrics)).for_each(|begun| observer.note(begun));
                if let Some(spike) = spike {
                    spike.record(&outputs.dir)?;
                    let dir = outputs.dir.to_string_lossy();
                    observer.note(&format!("step {}: {}", spike.step, how_to_replay(&dir, spike.step)));
                }
            }
            reach(Point::MetricsWritten)?;
        }
        Ok(())
    }

    /// Waits for the checkpoint in progress, if any, and reports the checkpoint.
    fn finish_save(&mut self) -> Result<()> {
        let done = self.trainer.finish_save()?;
        self.tell(done);
        Ok(())
    }

    /// Reports a completed checkpoint, if there is one.
    fn tell(&mut self, saved: Option<PathBuf>) {
        if let Some(path) = saved {
            self.observer.checkpoint(&path);
            self.saved = Some(path);
        }
    }
}

/// Whether step `step`, counted from 1, is a multiple of `every`. If `every` is 0, no step is.
fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

fn note_memory(metrics: &mut Metrics, memory: MemoryStats) {
    let peak = memory.peak_bytes as f64;
    metrics.memory_gib = Some(peak / f64::from(1 << 30));
    metrics.memory_percent = memory.total_bytes.map(|total| 100.0 * peak / total as f64);
}

/// Reports the number of steps without a target.
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
