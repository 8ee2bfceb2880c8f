//! What a run is asked for.

use super::any_rank::any_rank;
use crate::error::Result;
use nibble_core::{Comm, Kernels};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What to do besides the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Go on from the newest whole checkpoint of the run's directory; from the beginning where a run has begun and has none yet.
    pub resume: bool,
    /// Where a new run finds its directory taken it takes the next free number: `runs/tiny-2`.
    pub numbered: bool,
    /// Hash the weights when all steps are done: [`Summary::digest`](super::Summary::digest).
    pub digest: bool,
    /// Not 0 once the run is to end after the step, or the batch of an evaluation, under way: it saves, draws, and leaves out the last
    /// evaluation, or the rest of it. Any rank may have one; a rank without is never asked. On several ranks all learn of it by the record of
    /// a step that was issued after it was set, and end after the same step, two later at most than one rank alone would.
    pub stop: Option<&'static AtomicUsize>,
}

impl Options {
    /// Whether this rank has been asked to stop.
    pub(super) fn is_asked_to_stop(self) -> bool {
        self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed) != 0)
    }

    /// Whether any rank has, asked of all of them now: so every rank calls it, one that nobody can ask too. Not for steps, whose records tell
    /// it by the way.
    pub(super) fn any_is_asked_to_stop<B: Kernels>(self, b: &B, comm: &dyn Comm<B>) -> Result<bool> {
        any_rank(b, comm, self.is_asked_to_stop())
    }
}
