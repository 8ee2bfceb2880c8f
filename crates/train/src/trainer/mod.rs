//! Training on one rank: steps, evaluations, and the contents of checkpoints.
//!
//! A [`run()`] uses these files from top to bottom, and no file calls a file above it:
//!
//! ```text
//! options.rs         the options of a run, and its reports (Observer)
//! run.rs             the run: its start, its inputs, its steps, its end
//!   start/           origin.rs: a new start, or the newest complete checkpoint, whose configuration is compared first
//!                    alike.rs: checks that all ranks have equal inputs
//!                    outputs.rs, run_dir.rs: the files that the first rank writes, and their folder
//!   steps.rs         issues steps, and reads their records one step late; recorded.rs replays recorded steps
//!   evaluating.rs    evaluations between steps: held-out loss, tasks
//!   saving/          save.rs: starts and completes checkpoints
//!                    mod.rs: asynchronous writing; owners.rs, collect.rs: several ranks
//!                    files.rs: the values of each file; pieces.rs: host buffers
//! ```
//!
//! [`Trainer`] contains the state that all of these files share. `ranks.rs` has the communication of ranks outside steps. Other uses of a
//! model are not part of a run: `weights.rs` loads weights, `scoring.rs` computes losses (in evaluations and in `nibble eval`),
//! `decoding.rs` generates text, `inspect.rs` exposes one step, `fidelity.rs` returns gradients and losses of fixed weights, and `replay.rs`
//! repeats a step without its optimizer.
//!
//! The checkpoint of a step precedes the step's evaluation, so that a failed evaluation loses no step. After the last step come the last
//! checkpoint, the loss over all held-out data, the plot and the summary.
//!
//! A run that is asked to stop finishes its step, saves a checkpoint and plots its losses, on all ranks after the same step. A single rank
//! stops after the current step. With several ranks, each rank writes its request into the next step's inputs, and this step's record
//! carries the request to all ranks; this takes at most two more steps. During an evaluation, all ranks are asked after each batch. If the
//! evaluation is cut short, the process that resumes the run repeats the evaluation.

mod decoding;
mod divergence;
mod evaluating;
mod fidelity;
mod inspect;
mod options;
mod ranks;
mod recorded;
mod replay;
mod run;
mod saving;
mod scoring;
mod start;
mod steps;
mod weights;

pub use decoding::Decoding;
pub use fidelity::ParamGradient;
pub use inspect::Inspection;
pub use options::{Observer, Options, Outcome, Start, Summary};
pub use replay::{ScoredSequence, Tried};
pub use run::run;
pub use start::outputs::heading;
pub use start::run_dir::{
    COMPANIONS_DIR, CONFIG_FILE, LAYERS_FILE, LOG_FILE, MEMORY_FILE, METRICS_FILE, PICTURE_FILE,
    PROCESSES_FILE, RANKS_DIR, RANKS_FILE, RECIPE_FILE, has_begun, is_of_a_run, latest as latest_run_dir,
    require_free, stored_config,
};

use crate::checks::{check_recipe, checked_recipe, for_run};
use crate::config::Config;
use crate::data::{Dataset, Loader};
use crate::error::{Error, Result};
use crate::layers::rope_table;
use crate::metrics::{LayerMetrics, RankTimes};
use crate::model::Decoder;
use crate::plan;
use crate::rank::{RankState, RunMemory};
use crate::record::{IssueTimes, Told};
use crate::spec::ModelSpec;
use crate::tokenizer::{Bytes, SharedTokenizer};
use divergence::of_divergence;
use nibble_core::allocation::phase;
use nibble_core::{Comm, Error as CoreError, Kernels, Mesh, Recipe, Tensor};
use recorded::Recorded;
use saving::Saving;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One rank of a training run.
#[derive(Debug)]
pub struct Trainer<'a, B: Kernels> {
    /// The steps' recordings, if the backend can record. Recordings are dropped before the memory that they use.
    recorded: Option<Recorded<B>>,
    /// The model and its state on this rank.
    rank: RankState<'a, B>,
    /// The loader that prepares the batches of later steps; `None` before the first step.
    loader: Option<Loader>,
    /// Steps whose record has not been read. There are at most two such steps, because the ring of reports has two slots.
    issued: VecDeque<Issued<B>>,
    /// Layer metrics of the last record, if they are reported for the record's step.
    layers: Option<LayerMetrics>,
    /// With several ranks: the ranks' times for the step before the last record's step. `None` with one rank, or if another process ran
    /// that step.
    rank_times: Option<RankTimes>,
    /// With several ranks: the times at which this rank issued its last steps.
    issue_times: IssueTimes,
    /// The signal that asked this rank to stop (0: no signal). The records of later steps carry the signal to every rank.
    asked: u8,
    /// The requests of all ranks in the last record. The value is the same on every rank.
    any_told: Told,
    /// Whether a step could not be issued. This rank's own error then ends the run, and the rank calls no further collective.
    has_failed: bool,
    /// Time at which the last record was read; `None` if other work than steps followed.
    settled: Option<Instant>,
    /// The asynchronous checkpoint, if one is in progress.
    saving: Saving<B>,
}

/// A step that has been issued and whose record has not been read.
#[derive(Debug)]
struct Issued<B: Kernels> {
    /// The index of the step, from 0.
    step: u64,
    /// The pending report; `None` for a step that was skipped because it has no target.
    report: Option<B::Pending<f64>>,
    how: Issue,
    lr: f64,
    /// Number of targets of the step.
    counted: u64,
    started: Instant,
    /// Time for which the host waited for the step's tokens.
    waited: Duration,
    /// Time that the host needed to issue the step, without the time for recording it.
    issuing: Duration,
}

/// How a step is submitted to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Issue {
    /// The step is replayed from a recording, if the backend can record.
    Replayed,
    /// The step is issued op by op.
    Eager,
}

impl<'a, B: Kernels> Trainer<'a, B> {
    /// Creates a trainer at the beginning of a run.
    ///
    /// # Errors
    /// Returns an error for a recipe or data that cannot be read, or for a batch that the recipe's blocks do not divide.
    pub fn new(b: &'a B, mesh: impl Into<Mesh<'a, B>>, config: &Config) -> Result<Self> {
        let mut trainer = Self::under(b, mesh, config, checked_recipe(config)?)?.with_data()?;
        trainer.load_initial()?;
        Ok(trainer)
    }

    /// Creates a trainer with this recipe. The recipe may differ from the configuration's recipe, because a checkpoint contains the recipe
    /// of its run. The trainer has no data, because generation needs none; `with_data` adds data.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::new`], except the errors of data.
    pub fn under(b: &'a B, mesh: impl Into<Mesh<'a, B>>, config: &Config, recipe: Recipe) -> Result<Self> {
        let (mesh, recipe) = (mesh.into(), for_run(config, recipe));
        phase(format_args!("making the model"));
        check_recipe(config, &recipe)?;
        plan::require_room_for_state(b, mesh.shape(), mesh.all.host_ranks(), config, &recipe)?;
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

    /// Adds the sizes that need the most memory to an out-of-memory error.
    fn without_room(&self, error: Error, when: impl Into<String>) -> Error {
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh.shape());
        error.without_room(when, || plan::sizes_of(b, mesh, self.config(), self.recipe()))
    }

    /// Adds advice to an error of non-finite numbers in a step or in the held-out loss.
    fn of_divergence(&self, error: Error, held_out: bool) -> Error {
        of_divergence(error, self.config(), held_out)
    }

    /// Reports retried exchanges. Only the first rank makes reports, because all ranks have the same notes.
    fn tell_notes(&mut self, first: bool, observer: &mut dyn Observer) {
        let notes = self.take_notes();
        notes.iter().filter(|_| first).for_each(|note| observer.note(note));
    }

    /// This rank's part of the model.
    pub fn model(&mut self) -> &mut Decoder<B> {
        &mut self.rank.model
    }

    /// Adds the configuration's data to the trainer.
    ///
    /// # Errors
    /// Returns an error for data that cannot be read.
    pub fn with_data(self) -> Result<Self> {
        let data = Dataset::of(&self.rank.context.config)?;
        self.with(data)
    }

    /// Adds these data to the trainer. The pixels of images are stored beside the weights.
    pub(crate) fn with(mut self, data: Dataset) -> Result<Self> {
        if let (Some(patches), Some((pixels, cols))) = (&mut self.rank.model.embed.patches, data.pixels()) {
            let b = self.rank.context.b;
            let rows = pixels.len() / cols.max(1);
            let table = b.within(&self.rank.weights, || Tensor::from_f32(b, &pixels, rows, cols))?;
            patches.pixels = Some(table);
        }
        self.rank.context.data = Some(Arc::new(data));
        Ok(self)
    }

    /// Number of optimizer steps that have been issued.
    pub fn step(&self) -> u64 {
        self.rank.context.step
    }

    /// Number of issued steps whose record has not been read yet.
    pub fn unread(&self) -> usize {
        self.issued.len()
    }

    /// The backend and the communicator of all ranks.
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
    /// Returns [`crate::Error::Config`] if the trainer has no data.
    pub fn data(&self) -> Result<&Dataset> {
        self.rank.context.data()
    }

    /// The tokenizer of the run's data. If the data's tokenizer is unknown, this is the byte tokenizer.
    ///
    /// # Errors
    /// Returns the errors of [`Config::tokenizer`].
    pub fn tokenizer(&self) -> Result<SharedTokenizer> {
        Ok(self.rank.context.config.tokenizer()?.unwrap_or_else(|| Arc::new(Bytes)))
    }

    /// Number of trainable parameters over all ranks.
    pub fn parameters(&mut self) -> usize {
        self.rank.parameters()
    }

    /// The run's memory, as counted by the allocator. Gradients and moments exist only after the first step has started.
    pub fn memory(&self) -> RunMemory {
        self.rank.memory()
    }

    /// Checks that every step's record has been read. Some work must not start earlier.
    fn require_settled(&mut self, what: &'static str) -> Result<()> {
        self.settled = None;
        match self.issued.len() {
            0 => Ok(()),
            n => Err(CoreError::shape(what, "unread records", n, "none: settle every step first").into()),
        }
    }
}
