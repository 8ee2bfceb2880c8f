//! The conformance suite on trial: it must notice a backend that computes something else.
//!
//! [`missed`] runs an operation's conformance test on a backend and, case by case, on the same backend with one defect: of each tensor
//! that the operation reads or writes a tile is transposed, a line is shifted or a block is doubled, and what it quantizes on its way is
//! not. For every form that a tensor has in the test, some case must come out as a failure, of those that owe the same bits and of those that
//! owe each relative error. Where all cases owe the same bits, they notice all of this by themselves ([`owes_an_error`]).

use crate::case_trial::CaseTrial;
use crate::pair::Pair;
use crate::recorder::Recorder;
use nibble_core::Backend;
use std::sync::Arc;

/// Whether an operation owes no more than a relative error in some case of its conformance test.
pub fn owes_an_error<A: Backend, B: Backend>(test: fn(&Pair<A, B>), a: &A, b: &B) -> bool {
    let trial = Arc::new(CaseTrial::default());
    test(&Pair::tried(a.clone(), b.clone(), trial.clone()));
    trial.owes_an_error()
}

/// Defects that were tried in an operation's conformance test, and those among them that no case noticed.
#[derive(Debug)]
pub struct Verdict {
    /// How many there were.
    pub tried: usize,
    /// What was not noticed.
    pub missed: Vec<String>,
}

/// Tries the conformance test of `op` on a backend that is to have its defects.
///
/// # Panics
/// If the test fails without any.
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
