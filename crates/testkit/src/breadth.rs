//! How much of what could be tested a run of the tests takes. The same tests serve both: the daily suite (`cargo test --workspace`) takes part of
//! a long list, and pairs of several; `cargo xtask exhaustive` sets [`EXHAUSTIVE`] and takes all.

use std::ops::ControlFlow;

/// The environment variable under which tests are [`Breadth::Whole`]: any value but `0`.
pub const EXHAUSTIVE: &str = "NIBBLE_EXHAUSTIVE";

/// How much of each list is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breadth {
    /// A part that a change can wait for.
    Daily,
    /// All.
    Whole,
}

impl Breadth {
    /// That of this run of the tests.
    pub fn of_tests() -> Self {
        let whole = std::env::var_os(EXHAUSTIVE).is_some_and(|value| value != "0");
        if whole { Self::Whole } else { Self::Daily }
    }

    /// What is taken of a whole, or daily.
    pub fn either<T>(self, whole: T, daily: T) -> T {
        match self {
            Self::Whole => whole,
            Self::Daily => daily,
        }
    }

    /// Choices of a place in each of several lists, of these lengths: all of them; daily so many that any two places of two lists meet in
    /// one ([`pairs`]).
    pub fn cross<const N: usize>(self, lengths: [usize; N]) -> Vec<[usize; N]> {
        match self {
            Self::Whole => whole(lengths),
            Self::Daily => pairs(lengths),
        }
    }

    /// Whether the `nth` of like cases, from 0, is taken: all are; daily the first four, and behind them about one of `every`, spread so that no
    /// stride of the list falls in step with it.
    pub fn takes(self, nth: usize, every: usize) -> bool {
        // Fibonacci hashing: the high half of a product with 2^64 over the golden ratio.
        let spread = (nth as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        self == Self::Whole || nth < 4 || spread.is_multiple_of(every as u64)
    }
}

/// Every choice, the last list's place changing fastest.
fn whole<const N: usize>(lengths: [usize; N]) -> Vec<[usize; N]> {
    let mut choices = Vec::new();
    if lengths.contains(&0) {
        return choices;
    }
    let mut at = [0; N];
    loop {
        choices.push(at);
        // The next number, in digits of these bases.
        let carried = at.iter_mut().zip(lengths).rev().try_for_each(|(digit, length)| {
            *digit += 1;
            if *digit < length {
                return ControlFlow::Break(());
            }
            *digit = 0;
            ControlFlow::Continue(())
        });
        if carried.is_continue() {
            return choices;
        }
    }
}

/// Choices in which any two values of two lists meet: close to as few as the two longest lists have pairs. The same on every machine.
///
/// Greedy: a choice begins with the first pair that has not met, and takes from each other list the value with which most pairs meet that have not; of equals
/// the one that was taken least.
pub fn pairs<const N: usize>(lengths: [usize; N]) -> Vec<[usize; N]> {
    if N < 2 || lengths.contains(&0) {
        return whole(lengths);
    }
    let mut met = Met::new(lengths);
    let mut taken: Vec<Vec<usize>> = lengths.iter().map(|length| vec![0; *length]).collect();
    let mut choices = Vec::new();
    while let Some(first) = met.first_missing() {
        let mut choice: [Option<usize>; N] = [None; N];
        for (list, value) in first {
            choice[list] = Some(value);
        }
        for list in 0..N {
            if choice[list].is_none() {
                let new = |value: usize| {
                    let others = choice.iter().enumerate().filter_map(|(of, v)| Some((of, (*v)?)));
                    others.filter(|other| !met.has([(list, value), *other])).count()
                };
                let best = (0..lengths[list])
                    .max_by_key(|value| (new(*value), std::cmp::Reverse((taken[list][*value], *value))));
                choice[list] = best;
            }
        }
        // Every list has a value: none is empty.
        let choice = choice.map(Option::unwrap_or_default);
        for (list, value) in choice.into_iter().enumerate() {
            taken[list][value] += 1;
            for other in choice.into_iter().enumerate().skip(list + 1) {
                met.meet([(list, value), other]);
            }
        }
        choices.push(choice);
    }
    choices
}

/// Which values of which lists have met.
struct Met {
    /// Where each list's values begin among all.
    starts: Vec<usize>,
    lists: Vec<usize>,
    met: Vec<bool>,
    all: usize,
    /// Before this pair none is missing.
    searched: usize,
}

/// A list and a place in it, twice.
type Two = [(usize, usize); 2];

impl Met {
    fn new<const N: usize>(lengths: [usize; N]) -> Self {
        let starts = (0..N).map(|list| lengths[..list].iter().sum()).collect();
        let lists: Vec<usize> = (0..N).flat_map(|list| vec![list; lengths[list]]).collect();
        let all = lists.len();
        Self { starts, lists, met: vec![false; all * all], all, searched: 0 }
    }

    fn index(&self, two: Two) -> usize {
        let [a, b] = two.map(|(list, value)| self.starts[list] + value);
        a.min(b) * self.all + a.max(b)
    }

    fn has(&self, two: Two) -> bool {
        self.met[self.index(two)]
    }

    fn meet(&mut self, two: Two) {
        let index = self.index(two);
        self.met[index] = true;
    }

    fn first_missing(&mut self) -> Option<Two> {
        let lists = &self.lists;
        let missing = (self.searched..self.all * self.all).find(|index| {
            let (a, b) = (index / self.all, index % self.all);
            lists[a] < lists[b] && !self.met[*index]
        })?;
        self.searched = missing;
        let place = |of: usize| (lists[of], of - self.starts[lists[of]]);
        Some([place(missing / self.all), place(missing % self.all)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn any_two_values_meet_in_few_choices() {
        fn check<const N: usize>(lengths: [usize; N], most: usize) {
            let choices = pairs(lengths);
            for (a, b) in (0..N).flat_map(|a| (a + 1..N).map(move |b| (a, b))) {
                let met: HashSet<_> = choices.iter().map(|choice| (choice[a], choice[b])).collect();
                assert_eq!(met.len(), lengths[a] * lengths[b], "lists {a} and {b} of {lengths:?}");
            }
            assert!(choices.len() <= most, "{} choices of {lengths:?}", choices.len());
        }
        check([45, 10, 9], 45 * 10 * 5 / 4);
        check([5, 5, 5, 5], 40);
        check([2, 3, 3, 4, 1], 20);
        check([1, 7], 7);
    }

    #[test]
    fn of_like_cases_the_first_and_a_share_are_taken() {
        let taken: Vec<usize> = (0..1000).filter(|nth| Breadth::Daily.takes(*nth, 5)).collect();
        assert!(taken.starts_with(&[0, 1, 2, 3]) && (150..250).contains(&taken.len()), "{taken:?}");
        for stride in 2..12 {
            let met: HashSet<_> = taken.iter().map(|nth| nth % stride).collect();
            assert_eq!(met.len(), stride, "every place of a cycle of {stride}");
        }
        assert!((0..1000).all(|nth| Breadth::Whole.takes(nth, 5)));
    }

    #[test]
    fn the_whole_cross_is_every_choice_once() {
        assert_eq!(whole([2, 1, 2]), [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]);
        assert_eq!(pairs([3]), [[0], [1], [2]]);
        assert!(whole([2, 0]).is_empty() && pairs([2, 0]).is_empty());
        assert_eq!(whole([3, 4, 5]).into_iter().collect::<HashSet<_>>().len(), 60);
    }
}
