//! Training, one rank's view of it: steps, evaluations, and what goes into a checkpoint.
//!
//! A [`run()`] is read downwards, and nothing calls a file above it:
//!
//! ```text
//! options.rs         what a run is asked for, and what it tells (Observer)
//! run.rs             the run: where it begins, what it is given, its steps, its end
//!   start/           origin.rs: anew, from other weights, or from the newest whole checkpoint, whose configuration is compared first
//!                    alike.rs: what all ranks must have alike
//!                    outputs.rs, run_dir.rs: the files that a run writes, on the first rank, and the folder of these
//!   steps.rs         steps issued, and their records read a step late; recorded.rs: replayed
//!   evaluating.rs    what is evaluated between steps: held-out loss, tasks
//!   saving/          save.rs: checkpoints, from where they begin to their place
//!                    mod.rs: on the way to the disk; owners.rs, collect.rs: of several ranks
//!                    files.rs: which values a file holds; pieces.rs: the host memory that they travel in
//! ```
//!
//! [`Trainer`] has what all of them work on. `ranks.rs` has what ranks ask each other beside a step. Other uses of a model are no run:
//! `weights.rs` loads, `scoring.rs` computes losses (in evaluations as in `nibble eval`), `decoding.rs` generates text, and `inspect.rs`
//! exposes one step.
//!
//! A checkpoint comes before the evaluation of its step, so that an evaluation that fails costs no step. After the last step come the
//! last checkpoint, the loss over all held-out data, the picture and the summary.
//!
//! A run that is asked to stop finishes its step, saves it and draws its losses, on all ranks after the same step. One rank ends after
//! the step under way. Of several, each writes whether it was asked into the next step's inputs, and that step's record tells all of
//! them: two more steps at most. An evaluation asks all ranks after each batch; if it is cut short, the process that resumes repeats it.

mod decoding;
mod divergence;
mod evaluating;
mod inspect;
mod options;
mod ranks;
mod recorded;
mod run;
mod saving;
mod scoring;
mod start;
mod steps;
mod weights;

pub use decoding::Decoding;
pub use inspect::Inspection;
pub use options::{Observer, Options, Outcome, Start, Summary};
pub use run::run;
pub use start::outputs::heading;
pub use start::run_dir::{
    COMPANIONS_DIR, CONFIG_FILE, LAYERS_FILE, LOG_FILE, MEMORY_FILE, METRICS_FILE, PICTURE_FILE,
    PROCESSES_FILE, RANKS_DIR, RANKS_FILE, RECIPE_FILE, has_begun, is_of_a_run, latest as latest_run_dir,
    require_free, stored_config,
};

use crate::checks::{check_recipe, checked_recipe};
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
use nibble_core::{Comm, Error as CoreError, Kernels, Mesh, Recipe};
use recorded::Recorded;
use saving::Saving;
use std::collections::VecDeque;
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
    /// What each of several ranks took for the step before that whose record was read last; none of one rank alone, and of a step of another process.
    rank_times: Option<RankTimes>,
    /// When this rank, of several, issued its last steps.
    issue_times: IssueTimes,
    /// What this rank was asked to end the run by (0: by nothing). The records of the steps issued from here on tell it to every rank.
    asked: u8,
    /// What any rank told, by the last record: the same on every rank.
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

    /// An error of this run, which says what needs the memory where there is none.
    fn without_room(&self, error: Error, when: impl Into<String>) -> Error {
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh.shape());
        error.without_room(when, || plan::sizes_of(b, mesh, self.config(), self.recipe()))
    }

    /// An error of this run, which says what to do where numbers of a step, or of the held-out loss, are none.
    fn of_divergence(&self, error: Error, held_out: bool) -> Error {
        of_divergence(error, self.config(), held_out)
    }

    /// Tells what exchanges among ranks have done again, on the first rank alone: all have the same to say.
    fn tell_notes(&mut self, first: bool, observer: &mut dyn Observer) {
        let notes = self.take_notes();
        notes.iter().filter(|_| first).for_each(|note| observer.note(note));
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

    /// Reads what steps have left, for what must come after them.
    fn require_settled(&mut self, what: &'static str) -> Result<()> {
        self.settled = None;
        match self.issued.len() {
            0 => Ok(()),
            n => Err(CoreError::shape(what, "unread records", n, "none: settle every step first").into()),
        }
    }
}
