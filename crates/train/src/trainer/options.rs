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
    /// Not 0 once the run is to end after the step, or the batch of an evaluation, under way: it saves, draws, and leaves out the last
    /// evaluation, or the rest of it.
    pub stop: Option<&'static AtomicUsize>,
}

impl Options {
    /// Whether all ranks stop after this step: one of them was asked to.
    pub(super) fn asked_to_stop<B: Kernels>(self, b: &B, comm: &dyn Comm<B>) -> Result<bool> {
        let Some(stop) = self.stop else { return Ok(false) };
        any_rank(b, comm, stop.load(Ordering::Relaxed) != 0)
    }
}
