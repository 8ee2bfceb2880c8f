//! Training, one rank's view of it: steps, evaluations, and what goes into a checkpoint.

mod alike;
mod any_rank;
mod collect;
mod decoding;
mod divergence;
mod evaluating;
mod folder;
mod inspect;
mod observer;
mod of_all_ranks;
mod options;
mod outputs;
mod owners;
mod pieces;
mod recorded;
mod resume;
mod run;
mod run_dir;
mod saving;
mod scoring;
mod weights;

pub use decoding::Decoding;
pub use inspect::Inspection;
pub use observer::{Observer, Outcome, Start, Summary};
pub use options::Options;
pub use outputs::heading;
pub(crate) use pieces::PIECE;
pub use run::run;
pub use run_dir::{
    COMPANIONS_DIR, CONFIG_FILE, LAYERS_FILE, LOG_FILE, MEMORY_FILE, METRICS_FILE, PICTURE_FILE,
    PROCESSES_FILE, RANKS_DIR, RANKS_FILE, RECIPE_FILE, has_begun, is_of_a_run, latest as latest_run_dir,
    require_free, stored_config,
};

use crate::checks::{check_recipe, checked_recipe};
use crate::config::Config;
use crate::data::{Dataset, Loader};
use crate::error::{Error, Result};
use crate::evaluation::HeldOut;
use crate::fault::learning_rate;
use crate::layers::rope_table;
use crate::ledger::Ledger;
use crate::metrics::{LayerMetrics, Metrics, RankTimes};
use crate::model::Decoder;
use crate::plan;
use crate::rank::{RankState, RunMemory, Step};
use crate::record::{IssueTimes, Report, Told};
use crate::spec::ModelSpec;
use crate::tokenizer::{Bytes, SharedTokenizer};
use nibble_core::allocation::{part, phase, set_step};
use nibble_core::ops::verify_ids;
use nibble_core::{Comm, Error as CoreError, Kernels, Mesh, Recipe};
use recorded::Recorded;
use saving::Saving;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One rank of a training run.
#[derive(Debug)]
pub struct Trainer<'a, B: Kernels> {
    /// The steps' recordings, where the backend can record. Gone before the memory that they were recorded with.
    recorded: Option<Recorded<B>>,
    /// What the steps are of.
    rank: RankState<'a, B>,
    /// Makes the batches of the steps to come. None until there is a step.
    loader: Option<Loader>,
    /// Steps whose record has not been read: at most two, as many as the ring of reports has places.
    issued: VecDeque<Issued<B>>,
    /// What the last record said layer by layer, if its step is one to tell of.
    layers: Option<LayerMetrics>,
    /// What the last record said of the times of several ranks.
    rank_times: Option<RankTimes>,
    /// When this rank, of several, issued its last steps.
    issue_times: IssueTimes,
    /// What this rank was asked to end the run by, which the steps issued from here on take along.
    asked: u8,
    /// What any rank told, by the last record.
    any_told: Told,
    /// Whether a step could not be issued: this rank's own error ends the run, and it meets no other rank any more.
    has_failed: bool,
    /// When the last record was read, if nothing but steps has come since.
    settled: Option<Instant>,
    /// The checkpoint on its way to the disk, if there is one.
    saving: Saving<B>,
}

/// A step on its way.
#[derive(Debug)]
struct Issued<B: Kernels> {
    /// Its number, from 0.
    step: u64,
    /// None of a step that was passed over, as it has no target.
    report: Option<B::Pending<f64>>,
    how: Issue,
    lr: f64,
    /// Targets that count.
    counted: u64,
    started: Instant,
    /// How long the host waited for its tokens.
    waited: Duration,
    /// How long the host took to issue it, recorded as it was.
    issuing: Duration,
}

/// How a step reaches the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Issue {
    /// As a recording, where the backend can record.
    Replayed,
    /// Operation by operation.
    Eager,
}

impl<'a, B: Kernels> Trainer<'a, B> {
    /// A run at its beginning.
    ///
    /// # Errors
    /// For a recipe or data that cannot be read, or a batch that the recipe's blocks do not divide.
    pub fn new(b: &'a B, mesh: impl Into<Mesh<'a, B>>, config: &Config) -> Result<Self> {
        let mut trainer = Self::under(b, mesh, config, checked_recipe(config)?)?.with_data()?;
        trainer.load_initial()?;
        Ok(trainer)
    }

    /// Under a recipe that need not be the one that the configuration names: a checkpoint has the run's own. Without data, which
    /// `with_data` adds: a model to generate with has none.
    ///
    /// # Errors
    /// As [`Trainer::new`], the data aside.
    pub fn under(b: &'a B, mesh: impl Into<Mesh<'a, B>>, config: &Config, recipe: Recipe) -> Result<Self> {
        let (mesh, recipe) = (mesh.into(), recipe.in_run(config.run_size()));
        phase(format_args!("making the model"));
        check_recipe(config, &recipe)?;
        plan::require_room_for_state(b, (mesh.shape(), mesh.all.host_ranks()), config, &recipe)?;
        let rope = |b: &B| rope_table(b, config.data.seq_len, ModelSpec::new(&config.model).rope);
        let rank = RankState::assemble(b, mesh, config, recipe.clone(), rope).map_err(|error| {
            error.without_room("making the model", || plan::sizes_of(b, mesh.shape(), config, &recipe))
        })?;
        Ok(Self {
            recorded: None,
            rank,
            loader: None,
            issued: VecDeque::new(),
            layers: None,
            rank_times: None,
            issue_times: IssueTimes::default(),
            asked: 0,
            any_told: Told::default(),
            has_failed: false,
            settled: None,
            saving: Saving::default(),
        })
    }

    /// An error of this run, which says what needs the memory where there is none.
    fn without_room(&self, error: Error, when: impl Into<String>) -> Error {
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh.shape());
        error.without_room(when, || plan::sizes_of(b, mesh, self.config(), self.recipe()))
    }

    /// The model, this rank's part of it.
    pub fn model(&mut self) -> &mut Decoder<B> {
        &mut self.rank.model
    }

    /// The same with the configuration's data.
    ///
    /// # Errors
    /// For data that cannot be read.
    pub fn with_data(self) -> Result<Self> {
        let data = Dataset::of(&self.rank.context.config)?;
        Ok(self.with(data))
    }

    /// The same with these data.
    pub(crate) fn with(mut self, data: Dataset) -> Self {
        self.rank.context.data = Some(Arc::new(data));
        self
    }

    /// Optimizer steps issued.
    pub fn step(&self) -> u64 {
        self.rank.context.step
    }

    /// Steps issued whose record has not been read.
    pub fn unread(&self) -> usize {
        self.issued.len()
    }

    /// Where it computes, and all ranks.
    fn backend(&self) -> (&'a B, &'a dyn Comm<B>) {
        (self.rank.context.b, self.rank.context.mesh.all)
    }

    /// The run's configuration.
    pub fn config(&self) -> &Config {
        &self.rank.context.config
    }

    /// The run's recipe.
    pub fn recipe(&self) -> &Recipe {
        self.rank.context.plans.recipe()
    }

    /// The run's data.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if it was made without.
    pub fn data(&self) -> Result<&Dataset> {
        self.rank.context.data()
    }

    /// The tokenizer of the run's data; bytes where that is not known.
    ///
    /// # Errors
    /// As [`Config::tokenizer`].
    pub fn tokenizer(&self) -> Result<SharedTokenizer> {
        Ok(self.rank.context.config.tokenizer()?.unwrap_or_else(|| Arc::new(Bytes)))
    }

    /// Trainable numbers over all ranks.
    pub fn parameters(&mut self) -> usize {
        self.rank.parameters()
    }

    /// Where the run's memory is, by the allocator. Gradients and moments are there from the first step on.
    pub fn memory(&self) -> RunMemory {
        self.rank.memory()
    }

    /// One optimizer step, and its record.
    ///
    /// # Errors
    /// As [`Trainer::issue_step`] and [`Trainer::settle`].
    pub fn train_step(&mut self) -> Result<Metrics> {
        self.issue(Issue::Replayed)?;
        self.settle_all()
    }

    /// One optimizer step, issued operation by operation also where steps are recorded and replayed.
    ///
    /// # Errors
    /// As [`Trainer::train_step`].
    pub fn eager_step(&mut self) -> Result<Metrics> {
        self.issue(Issue::Eager)?;
        self.settle_all()
    }

    /// The record of the last step issued.
    fn settle_all(&mut self) -> Result<Metrics> {
        let mut last = None;
        while let Some(metrics) = self.settle()? {
            last = Some(metrics);
        }
        // The step just issued has a record.
        last.ok_or_else(|| CoreError::shape("train_step", "record", "none", "that of the step").into())
    }

    /// Issues an optimizer step. The host waits for nothing: what the step found is for [`Trainer::settle`] to tell, at the
    /// latest before the step after the next. A step whose gradients are not finite changes no weight, and neither does any
    /// later one.
    ///
    /// # Errors
    /// From the backend, the data, or other ranks; if two steps' records have not been read.
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
            // There is no mean over no target, and so no gradient of it. Moments and weight decay would move the weights all the same, and in a
            // layer of experts the balancing loss alone would: the step is passed over as a whole, by every rank alike, as each has counted the
            // targets of all.
            buffers.pass_over(context.b, step)?;
            (context.step, context.passed_over) = (step + 1, context.passed_over + 1);
            let issuing = started.elapsed();
            self.issued.push_back(Issued { step, report: None, how, lr, counted, started, waited, issuing });
            return Ok(());
        }
        buffers.write_inputs(context, (lr, told, spent), &batches)?;
        // A recording measures nothing.
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
        // While a step is recorded the device works on the one before, whose time that is.
        let issuing = started.elapsed().saturating_sub(recording);
        let report = Some(report);
        self.issued.push_back(Issued { step, report, how, lr, counted, started, waited, issuing });
        Ok(())
    }

    /// Waits for the oldest step whose record has not been read, and reads it; none if there is no such step.
    ///
    /// Where experts are divided among ranks, a step may have had too little room for what its routers chose. Then it is done again with more,
    /// with what was issued after it, and what it gives is of that. So every rank calls this after the same steps.
    ///
    /// # Errors
    /// That of a rank that has failed meanwhile: nothing of the record is believed then. [`nibble_core::Error::NonFinite`] naming the first tensor
    /// that is not finite, of whichever rank, and the step: no weight has changed since; [`nibble_core::Error::Capacity`] if an expert layer of one rank had more rows than its buffers hold; as
    /// [`Trainer::issue_step`] where a step is done again; those of a checkpoint under way, which a step that fails or is done again ends.
    pub fn settle(&mut self) -> Result<Option<Metrics>> {
        let Some(Issued { step, report, how, lr, counted, started, waited, issuing }) =
            self.issued.pop_front()
        else {
            return Ok(None);
        };
        let scheduled = Metrics {
            step: step + 1,
            lr: Some(lr),
            n_tokens_seen: Some((step + 1) * self.config().tokens_per_step()),
            data_seconds: Some(waited.as_secs_f64()),
            ..Metrics::default()
        };
        let Some(report) = report else {
            return Ok(Some(Metrics { target_fraction: Some(0.0), ..scheduled }));
        };
        let values = self.rank.context.b.finish_download(report)?;
        if let Err(error) = self.rank.context.mesh.all.check() {
            // The error of the step that could not be issued is the one to tell.
            return if self.has_failed { Ok(None) } else { Err(error.into()) };
        }
        let Some(buffers) = &self.rank.buffers else { return Ok(None) };
        let report = Report::new(buffers.layout, buffers.sites(), &values)?;
        if let Some(needed) = report.overflow().filter(|_| self.rank.context.mesh.ep.world() > 1) {
            // The error of the step that could not be issued is the one to tell.
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
            // Every rank has read it: all of them end the checkpoint under way, which is of an earlier step. Its own error comes second. A rank
            // that has failed in a step meets nobody.
            if !self.has_failed {
                let _ = self.saving.owner.take().map(|owner| self.finish_owned(owner));
            }
            return Err(error.into());
        }
        // From record to record; a backend that computes while the host issues has spent that time on the step after.
        let (now, later) = (Instant::now(), self.issued.front().map_or(Duration::ZERO, |next| next.issuing));
        let since = self.settled.map_or(started, |settled| settled.max(started));
        let seconds = (now - since).saturating_sub(later).max(issuing).as_secs_f64();
        self.settled = Some(now);
        let tps = config.tokens_per_step() as f64 / seconds;
        let Metrics { step, lr, n_tokens_seen, data_seconds, .. } = scheduled;
        Ok(Some(Metrics {
            step,
            lr,
            n_tokens_seen,
            data_seconds,
            tps: Some(tps),
            tflops: Some(tps * config.flops_per_token() / 1e12),
            seconds: Some(seconds),
            ..Metrics::of_step(&report, config, counted)
        }))
    }

    /// Does a step again in which a rank was sent `needed` times its share and had less room, and what was issued after it. Every rank has read the
    /// same record.
    fn repeat(&mut self, (step, needed): (u64, f64), (how, started): (Issue, Instant)) -> Result<()> {
        // Of an earlier step, and not to be lost if there is no memory for more room.
        if let Some(owner) = self.saving.owner.take() {
            self.saving.ended = self.finish_owned(owner)?;
        }
        // Steps after it have changed nothing either.
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
            // What the first attempt took is time of the step.
            first.started = started;
        }
        Ok(())
    }

    /// What whoever runs this should be told of the exchanges among ranks since this was asked last.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.rank.context.notes)
    }

    /// Says what this rank was asked to end the run by (0: by nothing). The records of the steps issued from here on tell it to every rank.
    pub fn ask_to_stop(&mut self, asked: u8) {
        self.asked = asked;
    }

    /// What any rank had been asked to end the run by when it issued the step whose record was read last: the same answer on every rank.
    pub fn stop_asked_of_any(&self) -> u8 {
        self.any_told.asked
    }

    /// What the record that was read last says layer by layer, if its step is one to tell of ([`LayerMetrics::is_due`]), or has failed.
    pub fn take_layers(&mut self) -> Option<LayerMetrics> {
        self.layers.take()
    }

    /// What each of several ranks took for the step before that whose record was read last; none of one rank alone, and of a step of another process.
    pub fn take_rank_times(&mut self) -> Option<RankTimes> {
        self.rank_times.take()
    }

    /// Reads what steps have left, for what must come after them.
    fn require_settled(&mut self, what: &'static str) -> Result<()> {
        self.settled = None;
        match self.issued.len() {
            0 => Ok(()),
            n => Err(CoreError::shape(what, "unread records", n, "none: settle every step first").into()),
        }
    }

    /// Mean cross-entropy in nats over the targets of held-out sequences, all ranks together: `batches` batches of [`HeldOut::BATCH`] sequences
    /// from all over the data, or all of it (0), the shorter tail included.
    ///
    /// # Errors
    /// [`nibble_core::Error::NonFinite`] if the loss is not a number; [`Error::Data`] if none of the tokens is a target; from the backend and
    /// other ranks.
    pub fn evaluate(&mut self, batches: usize) -> Result<f64> {
        let found = self.evaluate_while(batches, &mut |_, _| Ok(true))?;
        found.and_then(|found| found.loss()).ok_or_else(|| {
            Error::data(Path::new(&self.config().data.described()), "has no target among its held-out tokens")
        })
    }

    /// What [`Trainer::evaluate`] takes the mean of, asking after every batch that is computed whether to go on, of how many; none once the answer
    /// was no. Every rank asks after the same batches, and owes the same answer.
    ///
    /// # Errors
    /// As [`Trainer::evaluate`], but for tokens without a target; what `go_on` returns.
    pub fn evaluate_while(
        &mut self,
        batches: usize,
        go_on: &mut dyn FnMut(usize, usize) -> Result<bool>,
    ) -> Result<Option<HeldOut>> {
        self.require_settled("evaluate")?;
        phase(format_args!("the held-out loss"));
        part("evaluation");
        let RankState { context, model, activations, .. } = &mut self.rank;
        let evaluated = context.b.within(activations, || Ok(context.evaluate(model, batches, go_on)))?;
        evaluated.map_err(|error| self.without_room(error, "the held-out loss"))
    }

    /// Logits of the last of these tokens, one sequence, every rank alike.
    ///
    /// # Errors
    /// If an id is no token of the vocabulary; from the backend.
    pub fn next_logits(&mut self, ids: &[i32]) -> Result<Vec<f32>> {
        self.require_settled("next_logits")?;
        let RankState { context, model, activations, .. } = &mut self.rank;
        let cx = context.inference_cx(ids.len())?;
        let last = context.b.within(activations, || {
            model.prepare(&cx)?;
            let (logits, bad_ids) = model.last_logits(&cx, &cx.b.upload(ids)?)?;
            model.release();
            verify_ids(cx.b, "next_logits", "ids", &bad_ids, logits.cols)?;
            logits.to_f32_vec(cx.b)
        });
        Ok(last?)
    }

    /// What a forward pass of this run keeps for its backward pass, measured by doing one; and the bytes the
    /// allocator holds for it.
    ///
    /// # Errors
    /// As [`Trainer::train_step`].
    pub fn ledger(&mut self) -> Result<(Ledger, usize)> {
        self.require_settled("ledger")?;
        let batch = self.rank.context.plan()?.batch(self.rank.context.step, 0)?;
        self.rank.ledger_of(&batch)
    }
}
