//! How much of its test lists a test run covers. The daily suite and the exhaustive suite consist of the same tests. The daily suite
//! (`cargo test --workspace`) runs a part of each long list, and covers all pairs of values of several lists; `cargo xtask exhaustive` sets
//! [`EXHAUSTIVE`] and covers everything.

use std::ops::ControlFlow;

/// The environment variable that selects [`Breadth::Whole`] if it has any value except `0`.
pub const EXHAUSTIVE: &str = "NIBBLE_EXHAUSTIVE";

/// How much of each list of test cases a run covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breadth {
    /// A part of each list, small enough to run on every change.
    Daily,
    /// All elements of each list.
    Whole,
}

impl Breadth {
    /// The breadth of this test run.
    pub fn of_tests() -> Self {
        let whole = std::env::var_os(EXHAUSTIVE).is_some_and(|value| value != "0");
        if whole { Self::Whole } else { Self::Daily }
    }

    /// Returns `whole` or `daily`, depending on the breadth.
    pub fn either<T>(self, whole: T, daily: T) -> T {
        match self {
            Self::Whole => whole,
            Self::Daily => daily,
        }
    }

    /// Combinations of one index per list, for lists of these lengths. `Whole` gives all combinations. In the breadth `Daily`, any two
    /// values of two lists occur together in some combination ([`pairs`]), but not all combinations occur.
    pub fn cross<const N: usize>(self, lengths: [usize; N]) -> Vec<[usize; N]> {
        match self {
            Self::Whole => whole(lengths),
            Self::Daily => pairs(lengths),
        }
    }

    /// Whether the `nth` case of a kind (from 0) is run. `Whole` runs every case. In the breadth `Daily`, the first four cases are run,
    /// then about one in `every` cases; the choice does not align with a stride of the list.
    pub fn takes(self, nth: usize, every: usize) -> bool {
        // The hash is Fibonacci hashing: the high half of a product with 2^64 divided by the golden ratio.
        let spread = (nth as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        self == Self::Whole || nth < 4 || spread.is_multiple_of(every as u64)
    }
}

/// All combinations; the last list's index changes fastest.
fn whole<const N: usize>(lengths: [usize; N]) -> Vec<[usize; N]> {
    let mut choices = Vec::new();
    if lengths.contains(&0) {
        return choices;
    }
    let mut at = [0; N];
    loop {
        choices.push(at);
        // The loop increments a number whose digits have the bases `lengths`.
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

/// Combinations in which any two values of two lists occur together. There are only a few more combinations than pairs of the two longest
/// lists. The result is deterministic.
///
/// The algorithm is greedy. The algorithm starts each combination with the first pair that is still missing. From each other list, the
/// algorithm then adds the value that completes the most missing pairs. If several values complete equally many pairs, the algorithm adds
/// the value that was used least.
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
        // Every list has a value, because no list is empty.
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

/// The pairs of values that have occurred together.
struct Met {
    /// For each list, the index of its first value among the values of all lists.
    starts: Vec<usize>,
    lists: Vec<usize>,
    met: Vec<bool>,
    all: usize,
    /// Index of a pair before which no pair is missing.
    searched: usize,
}

/// Two values, each as (list, index).
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
