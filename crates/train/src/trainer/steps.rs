//! Issues steps to the device, and reads their records one step late. Retries a step if an exchange among ranks overflowed its buffers.

use super::recorded::Recorded;
use super::{Issue, Issued, Trainer};
use crate::data::Loader;
use crate::error::Result;
use crate::fault::learning_rate;
use crate::metrics::{LayerMetrics, Metrics, RankTimes};
use crate::rank::{RankState, Step};
use crate::record::{Report, Told};
use nibble_core::allocation::{phase, set_step};
use nibble_core::{Error as CoreError, Kernels};
use std::time::{Duration, Instant};

impl<B: Kernels> Trainer<'_, B> {
    /// Takes one optimizer step, and returns the step's metrics.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::issue_step`] and [`Trainer::settle`].
    pub fn train_step(&mut self) -> Result<Metrics> {
        self.issue(Issue::Replayed)?;
        self.settle_all()
    }

    /// Takes one optimizer step op by op, even if steps are recorded and replayed.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::train_step`].
    pub fn eager_step(&mut self) -> Result<Metrics> {
        self.issue(Issue::Eager)?;
        self.settle_all()
    }

    /// Reads all unread records, and returns the metrics of the last step that was issued.
    fn settle_all(&mut self) -> Result<Metrics> {
        let mut last = None;
        while let Some(metrics) = self.settle()? {
            last = Some(metrics);
        }
        // There is a record, because a step has been issued.
        last.ok_or_else(|| CoreError::shape("train_step", "record", "none", "that of the step").into())
    }

    /// Issues an optimizer step without waiting for the step's result. [`Trainer::settle`] must read the step's record before the step
    /// after the next is issued. A step whose gradients are not finite changes no weight, and no later step changes any weight either.
    ///
    /// # Errors
    /// Passes on errors of the backend, the data, or other ranks, and returns an error if the records of two steps have not been read.
    pub fn issue_step(&mut self) -> Result<()> {
        self.issue(Issue::Replayed)
    }

    fn issue(&mut self, how: Issue) -> Result<()> {
        let step = self.rank.context.step;
        phase(format_args!("step {step}"));
        set_step(Some(step));
        self.issue_whole(how).map_err(|error| {
            self.has_failed = true;
            self.without_room(error, format!("step {step}"))
        })
    }

    fn issue_whole(&mut self, how: Issue) -> Result<()> {
        const RING: usize = 2;
        if self.issued.len() >= RING {
            let expected = format!("fewer than {RING}: settle one first");
            return Err(CoreError::shape("issue_step", "unread records", self.issued.len(), expected).into());
        }
        let started = Instant::now();
        self.rank.make_buffers()?;
        let Self { rank, recorded, loader, saving, asked, issue_times, .. } = self;
        let RankState { context, model, buffers: Some(buffers), activations, .. } = rank else {
            return Err(CoreError::shape("issue_step", "buffers", "none", "made").into());
        };
        let lr = learning_rate(context.config.schedule().lr(context.step));
        let loader = match loader {
            Some(loader) => loader,
            None => loader.insert(Loader::new(context.plan()?)),
        };
        let told = Told { asked: *asked, writing: saving.is_writing() };
        let alone = context.mesh.all.world() == 1;
        let spent = match alone {
            true => [0; 2],
            false => issue_times.issue(context.step, started, context.mesh.all.waited()),
        };
        let asked_for = Instant::now();
        let batches = loader.take(context.step)?;
        let waited = asked_for.elapsed();
        let (step, counted) = (context.step, batches.counted);
        if counted == 0 {
            // Without a target there is no mean loss and no gradient. Moments and weight decay would still change the weights, and so would
            // the balancing loss of a layer with experts. So the whole step is skipped. Every rank skips the same steps, because each rank
            // has counted the targets of all ranks.
            buffers.pass_over(context.b, step)?;
            (context.step, context.passed_over) = (step + 1, context.passed_over + 1);
            let issuing = started.elapsed();
            self.issued.push_back(Issued { step, report: None, how, lr, counted, started, waited, issuing });
            return Ok(());
        }
        buffers.write_inputs(context, lr, told, spent, &batches)?;
        // Recordings do not measure quantization, so a measuring step is not replayed.
        let is_replayed = how == Issue::Replayed && !context.config.train.measures_in(context.step);
        let mut whole = || -> Result<Duration> {
            if context.b.can_record() && alone && is_replayed {
                return Recorded::run(recorded, context, model, buffers, saving);
            }
            let mut step = Step::new(context, model, buffers)?;
            step.run(|| saving.wait_copied())?;
            step.end();
            Ok(Duration::ZERO)
        };
        let recording = context.b.within(activations, || Ok(whole()))??;
        let len = buffers.optimizer.report_len();
        let first = context.step as usize % RING * len;
        let report = context.b.begin_download(&buffers.optimizer.reports, first..first + len)?;
        context.step += 1;
        // While a step is recorded, the device works on the previous step, so the time of the recording belongs to that step.
        let issuing = started.elapsed().saturating_sub(recording);
        let report = Some(report);
        self.issued.push_back(Issued { step, report, how, lr, counted, started, waited, issuing });
        Ok(())
    }

    /// Waits for the oldest unread record, and reads this record. Returns `None` if there is no unread record.
    ///
    /// With expert parallelism, a step's all-to-all may have overflowed its buffers. The step with the overflow and the later issued steps
    /// are then retried with larger buffers, and this function returns the metrics of the retried step. Therefore every rank must call this
    /// function after the same steps.
    ///
    /// # Errors
    /// Returns the error of a rank that has failed since the step was issued; the record is then discarded. Returns
    /// [`nibble_core::Error::NonFinite`] naming the step and the first tensor, on any rank, that is not finite; no weight has changed since
    /// then. Returns [`nibble_core::Error::Capacity`] if an expert layer on one rank had more rows than its buffers hold. Returns the
    /// errors of [`Trainer::issue_step`] for a retry, and of a checkpoint in progress, which a failed or retried step completes.
    pub fn settle(&mut self) -> Result<Option<Metrics>> {
        let Some(Issued { step, report, how, lr, counted, started, waited, issuing }) =
            self.issued.pop_front()
        else {
            return Ok(None);
        };
        let seen = (step + 1) * self.config().tokens_per_step();
        let (lr, waited) = (Some(lr), Some(waited.as_secs_f64()));
        let of_step = |rest| {
            let (step, n_tokens_seen, data_seconds) = (step + 1, Some(seen), waited);
            Metrics { step, lr, n_tokens_seen, data_seconds, ..rest }
        };
        let Some(report) = report else {
            return Ok(Some(of_step(Metrics { target_fraction: Some(0.0), ..Metrics::default() })));
        };
        let values = self.rank.context.b.finish_download(report)?;
        if let Err(error) = self.rank.context.mesh.all.check() {
            // If a step could not be issued, the error of that step is reported instead.
            return if self.has_failed { Ok(None) } else { Err(error.into()) };
        }
        let Some(buffers) = &self.rank.buffers else { return Ok(None) };
        let report = Report::new(buffers.layout, buffers.sites(), &values)?;
        if let Some(needed) = report.overflow().filter(|_| self.rank.context.mesh.ep.world() > 1) {
            // If a step could not be issued, the error of that step is reported instead.
            if self.has_failed {
                return Ok(None);
            }
            let step = report.step();
            self.repeat((step, needed), (how, started))?;
            return self.settle();
        }
        self.any_told = report.told();
        self.rank_times = RankTimes::of_report(&report);
        let (config, verified) = (&self.rank.context.config, report.verify());
        let told = verified.is_err()
            || LayerMetrics::is_due(report.step() + 1, config.train.steps)
            || config.train.measures_in(report.step());
        self.layers = told.then(|| LayerMetrics::of_step(&report));
        if let Err(error) = verified {
            // Every rank has read this record, so all ranks complete the checkpoint in progress, which belongs to an earlier step. An error
            // of the checkpoint is secondary. A rank that has failed in a step calls no collective.
            if !self.has_failed {
                let _ = self.saving.finish_owned(&self.rank.context);
            }
            return Err(error.into());
        }
        // A step's time is measured from record to record. A backend that computes while the host issues has spent the issuing time on the
        // next step.
        let (now, later) = (Instant::now(), self.issued.front().map_or(Duration::ZERO, |next| next.issuing));
        let since = self.settled.map_or(started, |settled| settled.max(started));
        let seconds = (now - since).saturating_sub(later).max(issuing).as_secs_f64();
        self.settled = Some(now);
        let tps = config.tokens_per_step() as f64 / seconds;
        Ok(Some(of_step(Metrics {
            tps: Some(tps),
            tflops: Some(tps * config.flops_per_token() / 1e12),
            seconds: Some(seconds),
            ..Metrics::of_step(&report, config, counted)
        })))
    }

    /// Retries a step in which a rank received `needed` times its share and overflowed, and the steps issued after this step. Every rank
    /// has read the same record.
    fn repeat(&mut self, (step, needed): (u64, f64), (how, started): (Issue, Instant)) -> Result<()> {
        // The checkpoint in progress belongs to an earlier step, and must not be lost if there is no memory for larger buffers.
        if let Some(path) = self.saving.finish_owned(&self.rank.context)? {
            self.saving.ended = Some(path);
        }
        // The later steps have changed nothing either.
        let later: Vec<Issued<B>> = self.issued.drain(..).collect();
        let hows: Vec<Issue> = std::iter::once(how).chain(later.iter().map(|issued| issued.how)).collect();
        let RankState { context, buffers, .. } = &mut self.rank;
        for Issued { report, .. } in later {
            match report {
                Some(report) => context.b.finish_download(report).map(drop)?,
                None => context.passed_over -= 1,
            }
        }
        context.make_room(needed, &format!("step {}", step + 1));
        context.step = step;
        if let Some(buffers) = buffers {
            buffers.restart(context.b, step)?;
        }
        hows.into_iter().try_for_each(|how| self.issue(how))?;
        if let Some(first) = self.issued.front_mut() {
            // The time of the first attempt counts as time of the step.
            first.started = started;
        }
        Ok(())
    }

    /// Messages about the all-to-alls among ranks since the last call.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.rank.context.notes)
    }

    /// Layer metrics of the last record. `None` unless the record's step is to be reported ([`LayerMetrics::is_due`]) or has failed.
    pub fn take_layers(&mut self) -> Option<LayerMetrics> {
        self.layers.take()
    }
}
