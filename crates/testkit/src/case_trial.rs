//! Runs a case once with each defect of the backend under test, instead of comparing backends.

use crate::case::{Case, Pads, run};
use crate::recorder::{Defect, Defects, Seen, Spot};
use nibble_core::{Agreement, Backend};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The trial of a test's cases.
#[derive(Debug, Default)]
pub(crate) struct CaseTrial {
    /// Defects of the backend under test. If there are none, no case runs.
    defects: Option<Arc<Defects>>,
    /// Whether at least one case allows a relative error.
    owes_an_error: AtomicBool,
    /// For each defect, whether at least one case failed with it.
    noticed: Mutex<BTreeMap<String, bool>>,
}

impl CaseTrial {
    /// A trial with these defects of the backend under test.
    pub(crate) fn with(defects: Arc<Defects>) -> Self {
        Self { defects: Some(defects), ..Self::default() }
    }

    /// Whether at least one case allows a relative error.
    pub(crate) fn owes_an_error(&self) -> bool {
        self.owes_an_error.load(Ordering::Relaxed)
    }

    /// For each defect, whether at least one case failed with it.
    pub(crate) fn noticed(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        self.noticed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces a comparison: runs the case without defects, then with each defect that no case has noticed yet.
    #[track_caller]
    pub(crate) fn of_case<A: Backend, B: Backend, C: Case<A> + Case<B>>(&self, a: &A, b: &B, case: &C) {
        let Some(defects) = &self.defects else {
            let owes_an_error = matches!(Case::<A>::agreement(case), Agreement::RelL2(_));
            self.owes_an_error.fetch_or(owes_an_error, Ordering::Relaxed);
            return;
        };
        let mut noticed = self.noticed();
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
            // With a defect that skips no quantization, the operation runs by its parts, which is another correct way to compute the
            // results.
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
                // The check of the padding guarantee panics.
                Err(_) => true,
            };
            *noticed.entry(name).or_default() |= struck && differs;
        }
    }
}

/// The defects that a tensor can have.
fn defects_of(&Seen { spot, lines, .. }: &Seen) -> impl Iterator<Item = Defect> {
    let all: &[Defect] = match spot {
        Spot::Inside(_) => &[Defect::NotQuantized],
        Spot::Read(_) | Spot::Made(_) | Spot::Written(_) => &Defect::OF_TENSORS,
    };
    all.iter().copied().filter(move |&defect| lines > 1 || defect != Defect::TransposedTile)
}
