//! The conformance suite on trial: it must notice a backend that computes something else.
//!
//! [`missed`] runs an operation's conformance test on a backend and, case by case, on the same backend with one defect: of each tensor
//! that the operation reads or writes a tile is transposed, a line is shifted or a block is doubled, and what it quantizes on its way is
//! not. For every form that a tensor has in the test, some case must come out as a failure, of those that owe the same bits and of those that
//! owe each relative error. Where all cases owe the same bits, they notice all of this by themselves ([`owes_an_error`]).

use crate::conformance::{Case, Pads, Pair, run};
use crate::recorder::{Defect, Defects, Recorder, Seen, Spot};
use nibble_core::{Agreement, Backend};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What is done with a test's cases.
#[derive(Debug, Default)]
pub(crate) struct Trial {
    /// Of the backend under test. Without them nothing runs.
    defects: Option<Arc<Defects>>,
    /// Whether some case owes a relative error.
    owes_an_error: AtomicBool,
    /// By defect: whether a case failed with it.
    noticed: Mutex<BTreeMap<String, bool>>,
}

/// Whether an operation owes no more than a relative error in some case of its conformance test.
pub fn owes_an_error<A: Backend, B: Backend>(test: fn(&Pair<A, B>), a: &A, b: &B) -> bool {
    let trial = Arc::new(Trial::default());
    test(&Pair::tried(a.clone(), b.clone(), trial.clone()));
    trial.owes_an_error.load(Ordering::Relaxed)
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
    let trial = Arc::new(Trial { defects: Some(defects), ..Trial::default() });
    test(&Pair::tried(a.clone(), b.clone(), trial.clone()));
    let noticed = trial.noticed.lock().unwrap_or_else(PoisonError::into_inner);
    let missed = noticed.iter().filter(|(_, noticed)| !**noticed).map(|(defect, _)| defect.clone());
    Verdict { tried: noticed.len(), missed: missed.collect() }
}

impl Trial {
    /// Instead of a comparison: the case runs as it is, and then with each defect that was not noticed yet.
    #[track_caller]
    pub(crate) fn of_case<A: Backend, B: Backend, C: Case<A> + Case<B>>(&self, a: &A, b: &B, case: &C) {
        let Some(defects) = &self.defects else {
            let owes_an_error = matches!(Case::<A>::agreement(case), Agreement::RelL2(_));
            self.owes_an_error.fetch_or(owes_an_error, Ordering::Relaxed);
            return;
        };
        let mut noticed = self.noticed.lock().unwrap_or_else(PoisonError::into_inner);
        defects.take_seen();
        let sound = run(b, case, Pads::Zero);
        let seen = defects.take_seen();
        let agreement = Case::<A>::agreement(case);
        let all = seen.iter().flat_map(|seen| {
            let Seen { spot, form, .. } = *seen;
            let named = move |defect| (spot, defect, format!("{spot}, {form}, {agreement:?}: {defect:?}"));
            defects_of(seen).map(named)
        });
        let open: Vec<_> = all.filter(|(_, _, name)| noticed.get(name) != Some(&true)).collect();
        if open.is_empty() {
            return;
        }
        let want = run(a, case, Pads::Zero);
        let owed = |result: &str| Case::<A>::owed(case, result);
        sound.require_agreement(owed, &want, &format!("{case:?}, without a defect"));
        if seen.iter().any(|seen| matches!(seen.spot, Spot::Inside(_))) {
            // Another right way to compute the same passes.
            defects.arm(Spot::Inside("nothing"), Defect::NotQuantized);
            let by_parts = run(b, case, Pads::Zero);
            assert!(defects.disarm(), "{case:?}: ran as a whole");
            by_parts.require_agreement(owed, &want, &format!("{case:?}, by its parts"));
        }
        for (spot, defect, name) in open {
            defects.arm(spot, defect);
            let result = catch_unwind(AssertUnwindSafe(|| case.run(b, Pads::Zero)));
            let struck = defects.disarm();
            let differs = match result {
                Ok(Ok(got)) => got.compare(owed, &want).is_err(),
                Ok(Err(error)) => panic!("{case:?}\n  {name}: {error}"),
                // A promise about padding is held by a panic.
                Err(_) => true,
            };
            *noticed.entry(name).or_default() |= struck && differs;
        }
    }
}

/// What can be wrong with such a tensor.
fn defects_of(&Seen { spot, lines, .. }: &Seen) -> impl Iterator<Item = Defect> {
    let all: &[Defect] = match spot {
        Spot::Inside(_) => &[Defect::NotQuantized],
        Spot::Read(_) | Spot::Made(_) | Spot::Written(_) => &Defect::OF_TENSORS,
    };
    all.iter().copied().filter(move |&defect| lines > 1 || defect != Defect::TransposedTile)
}
