//! The options of a run, and its reports: during the run, and at its end.

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

/// Options in addition to the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Resume from the newest complete checkpoint of the run's directory; from the beginning if a run has begun there and has no checkpoint
    /// yet.
    pub resume: bool,
    /// If a new run's directory is taken, use the next free number: `runs/tiny-2`.
    pub numbered: bool,
    /// Hash the weights after the last step: [`Summary::digest`].
    pub digest: bool,
    /// If not 0, the run ends after this step of its schedule, counted from 1: it saves a checkpoint, plots, and skips the last evaluation.
    /// It can be resumed. [`Outcome::stopped`] stays 0.
    pub until: u64,
    /// If not 0, the run ends after the current step or evaluation batch: it saves a checkpoint, plots, and skips the last evaluation or
    /// the rest of it. The value is a signal's number or another one below 128, and every rank ends with it ([`Outcome::stopped`]). Any
    /// rank may have such a flag; a rank without one is never asked. Several ranks learn of it from the record of a step that was issued
    /// later, and end after the same step, at most two steps later than a single rank would.
    pub stop: Option<&'static AtomicUsize>,
}

impl Options {
    /// The value of this rank's flag; 0 if it is not set.
    pub(super) fn stop_asked(self) -> u8 {
        self.stop.map_or(0, |stop| stop.load(Ordering::Relaxed).min(MOST_ASKED) as u8)
    }

    /// The largest flag of all ranks, by a collective that every rank must call, even without a flag. Not used for steps, whose records
    /// carry the flags anyway.
    pub(super) fn stop_asked_of_any<B: Kernels>(self, b: &B, comm: &dyn Comm<B>) -> Result<u8> {
        largest(b, comm, self.stop_asked())
    }
}

/// Receives the reports of a run on its first rank, and [`Observer::start`] on every rank.
pub trait Observer {
    /// The run starts (or resumes) in this folder, which the first rank now holds; a new run has written nothing in it.
    fn claimed(&mut self, _dir: &str) {}
    /// The run starts (or resumes) at this step, in a folder that all ranks see.
    fn start(&mut self, start: &Start<'_>);
    /// A note in one sentence that does not stop the run.
    fn note(&mut self, _text: &str) {}
    /// A checkpoint was rejected while resuming.
    fn rejected(&mut self, path: &Path, why: &Error);
    /// A step is done: adds measurements of the device's owner to its metrics, before they are written and reported.
    fn measure(&mut self, _: &mut Metrics) {}
    /// A step is done.
    fn step(&mut self, metrics: &Metrics);
    /// `done` of `of` batches of an evaluation are done.
    fn evaluating(&mut self, _done: usize, _of: usize) {}
    /// A held-out loss after this number of steps; `None` if no evaluated token is a target.
    fn evaluation(&mut self, step: u64, valid_loss: Option<f64>);
    /// The scores of a task after this number of steps.
    fn task(&mut self, _step: u64, _name: &str, _scored: &Scored) {}
    /// A checkpoint is on disk.
    fn checkpoint(&mut self, path: &Path);
}

/// Facts known when a run starts.
#[derive(Debug)]
pub struct Start<'a> {
    /// Steps already done.
    pub step: u64,
    /// The configuration.
    pub config: &'a Config,
    /// The recipe.
    pub recipe: &'a Recipe,
    /// Its predicted size and memory.
    pub prediction: &'a Prediction,
    /// The entropy rate and the unigram loss of the data, if known.
    pub entropy: Option<Entropy>,
}

/// The end of a run.
#[derive(Debug)]
pub struct Outcome {
    /// The results, on the first rank.
    pub summary: Option<Summary>,
    /// The flag by which some rank stopped the run ([`Options::stop`]) before its end; 0 otherwise. The same on every rank.
    pub stopped: u8,
}

/// The results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Completed steps.
    pub steps: u64,
    /// Loss of the last step with a target, if this process made one.
    pub loss: Option<f64>,
    /// Whether the run has completed its last step and the final evaluation.
    pub is_whole: bool,
    /// Loss over all held-out data; `None` if the run was stopped before, or none of its tokens is a target.
    pub valid_loss: Option<f64>,
    /// The entropy rate and the unigram loss of the data, if known.
    pub entropy: Option<Entropy>,
    /// The run's directory.
    pub dir: PathBuf,
    /// The last checkpoint, if the run has one.
    pub checkpoint: Option<PathBuf>,
    /// The plot of the losses, if there are any.
    pub picture: Option<PathBuf>,
    /// [`Trainer::digest`](super::Trainer::digest), if requested.
    pub digest: Option<String>,
}
