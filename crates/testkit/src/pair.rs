//! Two backends, and the comparison of each case on both.

use crate::breadth::Breadth;
use crate::case::{Case, Pads, run};
use crate::case_trial::CaseTrial;
use nibble_core::{Agreement, Backend, Error};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// In the daily suite, additional backends run about one in this many cases, because most of them are slow and split rows like the first
/// backend.
const SLOWER: usize = 5;

/// The cases of one test, shared among pairs that run the test concurrently: the first pair that is free runs the next case.
#[derive(Debug, Clone, Default)]
pub struct Cases {
    next: Arc<AtomicUsize>,
}

/// One pair's view of shared [`Cases`]. A test creates the same cases in the same order on every pair, so an index identifies a case.
#[derive(Debug)]
struct Share {
    cases: Cases,
    /// Number of cases seen, and the index of this pair's next case.
    state: Mutex<(usize, Option<usize>)>,
}

impl Share {
    /// Whether this pair runs the current case.
    fn takes(&self) -> bool {
        // No code panics while it holds the lock.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (seen, mine) = *state;
        let mine = mine.unwrap_or_else(|| self.cases.next.fetch_add(1, Ordering::Relaxed));
        let takes = seen == mine;
        *state = (seen + 1, (!takes).then_some(mine));
        takes
    }
}

/// A specification, and the backends that are compared with the specification.
#[derive(Debug, Clone)]
pub struct Pair<A, B> {
    /// The specification.
    pub a: A,
    /// The backend under test.
    pub b: B,
    /// More backends under test; the specification runs once for all backends.
    more: Vec<B>,
    /// Whether all operations, including GEMMs and attention, must give bit-identical results, as two code paths of one machine must.
    pub strict: bool,
    cases: Arc<AtomicUsize>,
    /// How much of its lists a test covers.
    breadth: Breadth,
    /// In the daily suite, about one in this many cases of each kind is run.
    one_of: usize,
    /// Number of cases seen, by kind.
    of_kind: Arc<Mutex<HashMap<&'static str, usize>>>,
    /// This pair's share of the cases, if other pairs also run the test.
    share: Option<Arc<Share>>,
    /// The trial that replaces comparisons, if given.
    trial: Option<Arc<CaseTrial>>,
}

impl<A: Backend, B: Backend> Pair<A, B> {
    /// A pair that compares each operation with the tolerance that the operation declares as `AGREEMENT`.
    pub fn new(a: A, b: B) -> Self {
        Self {
            a,
            b,
            more: Vec::new(),
            strict: false,
            cases: Arc::default(),
            breadth: Breadth::of_tests(),
            one_of: 1,
            of_kind: Arc::default(),
            share: None,
            trial: None,
        }
    }

    /// A pair that requires bit-identical results of every operation.
    pub fn strict(a: A, b: B) -> Self {
        Self { strict: true, ..Self::new(a, b) }
    }

    /// Adds a backend that is compared with the specification. In the daily suite, the backend runs the first cases of each kind and about
    /// a fifth of the others.
    pub fn and(mut self, b: B) -> Self {
        self.more.push(b);
        self
    }

    /// In the daily suite, compares only the first cases of each kind and about one in `many` others ([`Breadth::takes`]).
    pub fn one_of(self, many: usize) -> Self {
        Self { one_of: many, ..self }
    }

    /// Covers whole lists of cases or only the daily part, whatever the environment variable says.
    pub fn with_breadth(self, breadth: Breadth) -> Self {
        Self { breadth, ..self }
    }

    /// How much of its lists a test covers.
    pub(crate) fn breadth(&self) -> Breadth {
        self.breadth
    }

    /// A pair for one run of a test, which takes its cases from `cases`.
    pub fn sharing(&self, cases: &Cases) -> Self {
        let share = Share { cases: cases.clone(), state: Mutex::default() };
        Self { share: Some(Arc::new(share)), ..self.clone() }
    }

    /// Whether this pair runs the next case; counts the case if it does.
    fn takes_case(&self) -> bool {
        let takes = self.share.as_ref().is_none_or(|share| share.takes());
        self.cases.fetch_add(usize::from(takes), Ordering::Relaxed);
        takes
    }

    /// A pair that makes no comparisons. The pair tries each case with the defects of the backend under test, one at a time.
    pub(crate) fn tried(a: A, b: B, trial: Arc<CaseTrial>) -> Self {
        Self { trial: Some(trial), ..Self::new(a, b) }
    }

    /// Number of earlier cases of this kind, in this pair and its clones.
    fn nth_of_kind<C>(&self) -> usize {
        let mut kinds = self.of_kind.lock().unwrap_or_else(PoisonError::into_inner);
        let count = kinds.entry(std::any::type_name::<C>()).or_default();
        *count += 1;
        *count - 1
    }

    /// The backends under test.
    fn tested(&self) -> impl Iterator<Item = &B> {
        std::iter::once(&self.b).chain(&self.more)
    }

    /// Number of cases that this pair and its clones have compared so far.
    pub fn cases(&self) -> usize {
        self.cases.load(Ordering::Relaxed)
    }

    /// Runs one case on the specification and on the backends under test, and compares the results.
    ///
    /// # Panics
    /// Panics with a report if a backend refuses the case or the results do not agree.
    #[track_caller]
    pub(crate) fn check<C: Case<A> + Case<B>>(&self, case: &C) {
        if !self.takes_case() {
            return;
        }
        if let Some(trial) = &self.trial {
            return trial.of_case(&self.a, &self.b, case);
        }
        let nth = self.nth_of_kind::<C>();
        if !self.breadth.takes(nth, self.one_of) {
            return;
        }
        let also = if self.breadth.takes(nth, SLOWER) { &self.more[..] } else { &[] };
        let a = run(&self.a, case, Pads::Zero);
        let owed =
            |result: &str| if self.strict { Agreement::Bitwise } else { Case::<A>::owed(case, result) };
        for tested in std::iter::once(&self.b).chain(also) {
            let b = run(tested, case, Pads::Zero);
            let named = |what: &str| format!("{case:?}\n  {}, {what}", tested.name());
            b.require_agreement(owed, &a, &named(&format!("against {}", self.a.name())));
            if <C as Case<B>>::RAGGED {
                // The padding of `a` is not poisoned here, because a specification with code of its own is also tested as `b` of another
                // pair.
                run(tested, case, Pads::Poison).require_agreement(
                    |_| Agreement::Bitwise,
                    &b,
                    &named("with pads of NaN against pads of zeros"),
                );
            }
        }
    }

    /// Checks that all backends refuse the case with an error that `expected` accepts.
    ///
    /// # Panics
    /// Panics with a report if a backend does not refuse it.
    #[track_caller]
    pub(crate) fn check_refused<C: Case<A> + Case<B>>(&self, case: &C, expected: impl Fn(&Error) -> bool) {
        if !self.takes_case() || self.trial.is_some() {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Three pairs take cases in any order; one of them stops within its second case.
    #[test]
    fn each_case_is_one_pairs_and_one_that_stops_leaves_the_rest() {
        const CASES: usize = 20;
        let cases = Cases::default();
        let shares = [(); 3].map(|()| Share { cases: cases.clone(), state: Mutex::default() });
        let (mut at, mut stopped, mut taken) = ([0; 3], false, Vec::new());
        for turn in 0.. {
            let live = (0..3).filter(|i| at[*i] < CASES && !(stopped && *i == 1)).collect::<Vec<_>>();
            let Some(&i) = live.get(turn * 7 % live.len().max(1)) else { break };
            if shares[i].takes() {
                stopped |= i == 1 && taken.iter().any(|(pair, _)| *pair == 1);
                taken.push((i, at[i]));
            }
            at[i] += 1;
        }
        let mut numbers: Vec<_> = taken.iter().map(|(_, case)| *case).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..CASES).collect::<Vec<_>>());
        assert!(stopped && (0..3).all(|i| taken.iter().any(|(pair, _)| *pair == i)), "{taken:?}");
    }
}
