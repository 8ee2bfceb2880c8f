//! The options of a run, and the reports that a run makes during its steps and at its end.

use super::ranks::largest;
use crate::config::Config;
use crate::data::Entropy;
use crate::error::{Error, Result};
use crate::evaluation::Scored;
use crate::metrics::Metrics;
use crate::plan::Prediction;
use nibble_core::{Comm, Kernels, Recipe};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The largest signal number that can stop a run.
const MOST_ASKED: usize = 127;

/// Options of a run in addition to its configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Whether to resume from the newest complete checkpoint in the run's directory. If the directory has a run without a checkpoint, the
    /// run starts from the beginning.
    pub resume: bool,
    /// Whether to append the next free number (`runs/tiny-2`) if the directory of a new run is already in use.
    pub numbered: bool,
    /// Whether to hash the weights after the last step; [`Summary::digest`] contains the hash.
    pub digest: bool,
    /// If not 0, the run ends after this step of its schedule, counted from 1. The run then saves a checkpoint, plots, and skips the last
    /// evaluation. It can be resumed. [`Outcome::stopped`] stays 0.
    pub until: u64,
    /// If not 0, the run ends after the current step or evaluation batch. The run then saves a checkpoint, plots, and skips the last
    /// evaluation or the rest of it. The value is a signal's number or another number below 128. Every rank ends with this value
    /// ([`Outcome::stopped`]). Each rank may have such a flag; a rank without a flag never requests a stop. With several ranks, each rank
    /// learns of the value from the record of a later step. With several ranks, all ranks end after the same step, at most two steps later
    /// than a single rank would.
    pub stop: Option<&'static AtomicUsize>,
}

impl Options {
    /// The value of this rank's flag; 0 if the flag is not set.
    pub(super) fn stop_asked(self) -> u8 {
        self.stop.map_or(0, |stop| stop.load(Ordering::Relaxed).min(MOST_ASKED) as u8)
    }

    /// The largest flag of all ranks. The function is a collective that every rank must call, even without a flag. The records of steps
    /// carry the flags, so steps do not need this function.
    pub(super) fn stop_asked_of_any<B: Kernels>(self, b: &B, comm: &dyn Comm<B>) -> Result<u8> {
        largest(b, comm, self.stop_asked())
    }
}

/// Receives the reports of a run. Only the first rank reports, except through [`Observer::start`], which every rank calls.
pub trait Observer {
    /// The run starts or resumes in this folder. The first rank now holds the folder's lock; a new run has written nothing there yet.
    fn claimed(&mut self, _dir: &str) {}
    /// The run starts or resumes at this step. All ranks see the run's folder.
    fn start(&mut self, start: &Start<'_>);
    /// The run makes a note of one sentence and continues.
    fn note(&mut self, _text: &str) {}
    /// A checkpoint was rejected during the resumption of the run.
    fn rejected(&mut self, path: &Path, why: &Error);
    /// Called after a step, before the step's metrics are written and reported. May add measurements of the device to the metrics.
    fn measure(&mut self, _: &mut Metrics) {}
    /// A step is complete.
    fn step(&mut self, metrics: &Metrics);
    /// `done` of `of` batches of an evaluation are complete.
    fn evaluating(&mut self, _done: usize, _of: usize) {}
    /// The held-out loss after this number of steps; `None` if no evaluated token is a target.
    fn evaluation(&mut self, step: u64, valid_loss: Option<f64>);
    /// The number and the share of held-out images that are classified rightly after this number of steps.
    fn accuracy(&mut self, _step: u64, _right: u64, _share: f64) {}
    /// The scores of a task after this number of steps.
    fn task(&mut self, _step: u64, _name: &str, _scored: &Scored) {}
    /// A checkpoint is complete on disk.
    fn checkpoint(&mut self, path: &Path);
}

/// Facts that are known when a run starts.
#[derive(Debug)]
pub struct Start<'a> {
    /// Number of completed steps.
    pub step: u64,
    /// The run's configuration.
    pub config: &'a Config,
    /// The run's recipe.
    pub recipe: &'a Recipe,
    /// The run's predicted size and memory.
    pub prediction: &'a Prediction,
    /// The entropy rate and the unigram loss of the data, if known.
    pub entropy: Option<Entropy>,
}

/// The end of a run.
#[derive(Debug)]
pub struct Outcome {
    /// The results of the run, on the first rank; `None` on the others.
    pub summary: Option<Summary>,
    /// The value of the flag with which a rank stopped the run before its end ([`Options::stop`]); 0 if no rank stopped the run. The value
    /// is the same on every rank.
    pub stopped: u8,
}

/// The results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Number of completed steps.
    pub steps: u64,
    /// Loss of the last step with a target; `None` if this process ran no such step.
    pub loss: Option<f64>,
    /// Whether the run has completed its last step and the final evaluation.
    pub is_whole: bool,
    /// Loss over all held-out data; `None` if the run was stopped before the final evaluation, or if no held-out token is a target.
    pub valid_loss: Option<f64>,
    /// The entropy rate and the unigram loss of the data, if known.
    pub entropy: Option<Entropy>,
    /// The run's directory.
    pub dir: PathBuf,
    /// The last checkpoint, if the run has one.
    pub checkpoint: Option<PathBuf>,
    /// The plot of the losses; `None` if there are no losses.
    pub picture: Option<PathBuf>,
    /// [`Trainer::digest`](super::Trainer::digest), if requested.
    pub digest: Option<String>,
}
