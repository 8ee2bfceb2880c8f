//! A trial of the conformance suite: it must notice a backend that computes something wrong.
//!
//! [`missed`] runs an operation's conformance test on a backend and, case by case, on the same backend with one defect: in each tensor that
//! the operation reads or writes, a tile is transposed, a row or column is shifted or a block is doubled; each internal quantization is
//! skipped. For every form of a tensor in the test, some case must fail, both among the cases that require the same bits and among those of
//! each relative error. If all cases require the same bits, they notice all of this by themselves ([`owes_an_error`]).

use crate::case_trial::CaseTrial;
use crate::pair::Pair;
use crate::recorder::Recorder;
use nibble_core::Backend;
use std::sync::Arc;

/// Whether some case of an operation's conformance test allows a relative error.
pub fn owes_an_error<A: Backend, B: Backend>(test: fn(&Pair<A, B>), a: &A, b: &B) -> bool {
    let trial = Arc::new(CaseTrial::default());
    test(&Pair::tried(a.clone(), b.clone(), trial.clone()));
    trial.owes_an_error()
}

/// The defects tried in an operation's conformance test, and those that no case noticed.
#[derive(Debug)]
pub struct Verdict {
    /// Number of defects tried.
    pub tried: usize,
    /// Defects that were not noticed.
    pub missed: Vec<String>,
}

/// Tries the conformance test of `op` on a backend with each of its defects.
///
/// # Panics
/// If the test fails without a defect.
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
