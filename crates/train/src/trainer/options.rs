//! What a run is asked for.

use super::any_rank::largest;
use crate::error::Result;
use nibble_core::{Comm, Kernels};
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
    /// Hash the weights when all steps are done: [`Summary::digest`](super::Summary::digest).
    pub digest: bool,
    /// Not 0 once the run is to end after the step, or the batch of an evaluation, under way: it saves, draws, and leaves out the last
    /// evaluation, or the rest of it. The number is that of a signal, or another below 128, and the run ends with it on every rank
    /// ([`Outcome::stopped`](super::Outcome::stopped)). Any rank may have one; a rank without is never asked. On several ranks all learn of it by the
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
