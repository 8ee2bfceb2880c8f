//! A trial of the conformance suite: the suite must notice a backend that computes something wrong.
//!
//! [`missed`] runs an operation's conformance test on a backend and, case by case, on the same backend with one defect. In each tensor that
//! the operation reads or writes, a tile is transposed, a row or column is shifted, or a block is doubled; each internal quantization is
//! skipped. For every form of a tensor in the test, at least one case must fail. At least one case must fail separately among the cases
//! that require the same bits and among the cases of each relative error. If all cases require the same bits, they notice all of these
//! defects without a trial ([`owes_an_error`]).

use crate::case_trial::CaseTrial;
use crate::pair::Pair;
use crate::recorder::Recorder;
use nibble_core::Backend;
use std::sync::Arc;

/// Whether at least one case of an operation's conformance test permits a relative error.
pub fn owes_an_error<A: Backend, B: Backend>(test: fn(&Pair<A, B>), a: &A, b: &B) -> bool {
    let trial = Arc::new(CaseTrial::default());
    test(&Pair::tried(a.clone(), b.clone(), trial.clone()));
    trial.owes_an_error()
}

/// The number of defects that were injected into an operation, and the defects that its conformance test did not notice.
#[derive(Debug)]
pub struct Verdict {
    /// Number of defects that were injected.
    pub tried: usize,
    /// The defects that the conformance test did not notice.
    pub missed: Vec<String>,
}

/// Runs the conformance test of `op` on a backend once for each of the backend's defects.
///
/// # Panics
/// Panics if the test fails on the backend without any defect.
pub fn missed<A: Backend, B: Backend>(
    op: &'static str,
    test: fn(&Pair<A, Recorder<B>>),
    a: &A,
    b: &Recorder<B>,
) -> Verdict {
    let defects = b.defects();
    defects.watch(op);
    let trial = Arc::new(CaseTrial::with(defects));
    test(&Pair::tried(a.clone(), b.clone(), trial.clone()));
    let noticed = trial.noticed();
    let missed = noticed.iter().filter(|(_, noticed)| !**noticed).map(|(defect, _)| defect.clone());
    Verdict { tried: noticed.len(), missed: missed.collect() }
}
