//! What a run tells: while it goes on, and at its end.

use crate::config::Config;
use crate::data::Entropy;
use crate::error::Error;
use crate::evaluation::Scored;
use crate::metrics::Metrics;
use crate::plan::Prediction;
use nibble_core::Recipe;
use std::path::{Path, PathBuf};

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
    /// What some rank was asked to stop by ([`Options::stop`](super::Options::stop)), where that ended the run before its end; 0 where it did not.
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
