//! Two backends, and each case on both.

use crate::case::{Case, Pads, run};
use crate::case_trial::CaseTrial;
use nibble_core::{Agreement, Backend, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A specification and the backends that are compared with it.
#[derive(Debug, Clone)]
pub struct Pair<A, B> {
    /// The specification.
    pub a: A,
    /// The backend under test.
    pub b: B,
    /// More of them: the specification runs once for all.
    more: Vec<B>,
    /// The same bits are owed everywhere, products and attention included (two paths of one machine).
    pub strict: bool,
    cases: Arc<AtomicUsize>,
    /// What is done with cases instead of comparing them.
    trial: Option<Arc<CaseTrial>>,
}

impl<A: Backend, B: Backend> Pair<A, B> {
    /// Each operation at its own `AGREEMENT`.
    pub fn new(a: A, b: B) -> Self {
        Self { a, b, more: Vec::new(), strict: false, cases: Arc::default(), trial: None }
    }

    /// The same bits everywhere.
    pub fn strict(a: A, b: B) -> Self {
        Self { strict: true, ..Self::new(a, b) }
    }

    /// With one more backend under test.
    pub fn and(mut self, b: B) -> Self {
        self.more.push(b);
        self
    }

    /// Each case is tried with defects of the backend under test, one at a time, instead.
    pub(crate) fn tried(a: A, b: B, trial: Arc<CaseTrial>) -> Self {
        Self { trial: Some(trial), ..Self::new(a, b) }
    }

    /// Those under test.
    fn tested(&self) -> impl Iterator<Item = &B> {
        std::iter::once(&self.b).chain(&self.more)
    }

    /// Cases compared so far, by this pair and its clones.
    pub fn cases(&self) -> usize {
        self.cases.load(Ordering::Relaxed)
    }

    /// Runs one case on both and compares.
    ///
    /// # Panics
    /// With a report, if one refuses the case or they do not agree.
    #[track_caller]
    pub(crate) fn check<C: Case<A> + Case<B>>(&self, case: &C) {
        self.cases.fetch_add(1, Ordering::Relaxed);
        if let Some(trial) = &self.trial {
            return trial.of_case(&self.a, &self.b, case);
        }
        let a = run(&self.a, case, Pads::Zero);
        let owed =
            |result: &str| if self.strict { Agreement::Bitwise } else { Case::<A>::owed(case, result) };
        for tested in self.tested() {
            let b = run(tested, case, Pads::Zero);
            let named = |what: &str| format!("{case:?}\n  {}, {what}", tested.name());
            b.require_agreement(owed, &a, &named(&format!("against {}", self.a.name())));
            if <C as Case<B>>::RAGGED {
                // Not of `a`: a specification with code of its own is put under test as well.
                run(tested, case, Pads::Poison).require_agreement(
                    |_| Agreement::Bitwise,
                    &b,
                    &named("with pads of NaN against pads of zeros"),
                );
            }
        }
    }

    /// Both must refuse the case with such an error.
    ///
    /// # Panics
    /// With a report, if one does not.
    #[track_caller]
    pub(crate) fn check_refused<C: Case<A> + Case<B>>(&self, case: &C, expected: impl Fn(&Error) -> bool) {
        self.cases.fetch_add(1, Ordering::Relaxed);
        if self.trial.is_some() {
            return;
        }
        let of_a = (self.a.name(), case.run(&self.a, Pads::Zero).err());
        let tested = self.tested().map(|b| (b.name(), case.run(b, Pads::Zero).err()));
        for (name, error) in std::iter::once(of_a).chain(tested) {
            let good = error.as_ref().is_some_and(&expected);
            assert!(good, "{case:?}\n  {name}: should have been refused, got {error:?}");
        }
    }
}
