//! What a run is asked for, and what it tells: while it goes on, and at its end.

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

/// The largest number that a run is asked to stop by.
const MOST_ASKED: usize = 127;

/// What to do besides the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Go on from the newest whole checkpoint of the run's directory; from the beginning where a run has begun and has none yet.
    pub resume: bool,
    /// Where a new run finds its directory taken it takes the next free number: `runs/tiny-2`.
    pub numbered: bool,
    /// Hash the weights when all steps are done: [`Summary::digest`].
    pub digest: bool,
    /// Not 0 once the run is to end after the step, or the batch of an evaluation, under way: it saves, draws, and leaves out the last
    /// evaluation, or the rest of it. The number is that of a signal, or another below 128, and the run ends with it on every rank
    /// ([`Outcome::stopped`]). Any rank may have one; a rank without is never asked. On several ranks all learn of it by the
    /// record of a step that was issued after it was set, and end after the same step, two later at most than one rank alone would.
    pub stop: Option<&'static AtomicUsize>,
}

impl Options {
    /// What this rank has been asked to stop by; 0: by nothing.
    pub(super) fn stop_asked(self) -> u8 {
        self.stop.map_or(0, |stop| stop.load(Ordering::Relaxed).min(MOST_ASKED) as u8)
    }

    /// What any rank has, asked of all of them now: so every rank calls it, one that nobody can ask too. Not for steps, whose records tell
    /// it by the way.
    pub(super) fn stop_asked_of_any<B: Kernels>(self, b: &B, comm: &dyn Comm<B>) -> Result<u8> {
        largest(b, comm, self.stop_asked())
    }
}

/// What whoever watches a run is told, by its first rank; of [`Observer::start`] by every rank.
pub trait Observer {
    /// The run begins (or goes on) in this folder, which is the first rank's from now on; nothing of a new run is in it yet.
    fn claimed(&mut self, _dir: &str) {}
    /// The run begins (or goes on) at this step, in a folder that all ranks see; what memory it takes.
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
    /// A held-out loss, after so many steps; none where no token that was evaluated is a target.
    fn evaluation(&mut self, step: u64, valid_loss: Option<f64>);
    /// What a task of this name came to, after so many steps.
    fn task(&mut self, _step: u64, _name: &str, _scored: &Scored) {}
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

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    /// What it came to, on the first rank.
    pub summary: Option<Summary>,
    /// What some rank was asked to stop by ([`Options::stop`]), where that ended the run before its end; 0 where it did not.
    /// The same on every rank.
    pub stopped: u8,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps done.
    pub steps: u64,
    /// Loss of the last step that had a target, if this process made one.
    pub loss: Option<f64>,
    /// Whether the run came to its end: to its last step, and to the evaluation behind that.
    pub is_whole: bool,
    /// Loss over all held-out data; none of a run that was stopped before its end, and where none of them is a target.
    pub valid_loss: Option<f64>,
    /// The floor and the trivial loss of the data, if known.
    pub entropy: Option<Entropy>,
    /// The run's directory.
    pub dir: PathBuf,
    /// The last checkpoint, if the run has one.
    pub checkpoint: Option<PathBuf>,
    /// The picture of the losses, if there are any.
    pub picture: Option<PathBuf>,
    /// [`Trainer::digest`](super::Trainer::digest), where it was asked for.
    pub digest: Option<String>,
}
