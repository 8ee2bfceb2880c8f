//! Maps a global sample cursor to a window of a text. Each epoch has a new permutation of the windows and a new phase of their boundaries.

use nibble_formats::philox::{Purpose, Stream, fnv1a32};

/// The order in which an epoch visits the windows (training sequences) of a text.
///
/// An epoch cuts the text into windows of `seq_len` tokens. The first window begins at a random offset (the phase) below `seq_len`. The
/// epoch visits each window once, in an order given by a Feistel permutation. The Feistel permutation needs no table and no stored state,
/// and is the same for every rank and after every resume. Because each epoch has another random offset, a target appears at different
/// positions of a window in different epochs.
#[derive(Debug, Clone, Copy)]
pub struct WindowOrder {
    windows: Permutation,
    seq_len: u64,
    phases: u64,
    seed: u64,
}

/// Permutations of `0 .. count`, one for each random stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Permutation {
    count: u64,
    half_bits: u32,
}

impl Permutation {
    /// Permutations of `count` numbers. The number `count` must be at least 1.
    pub fn of(count: u64) -> Self {
        let count = count.max(1);
        // The width is even, so that both halves of the Feistel network have the same number of bits.
        let bits = 64 - (count - 1).leading_zeros();
        Self { count, half_bits: bits.div_ceil(2).max(1) }
    }

    /// The image of `value` under the permutation that `draw` selects. `value` must be less than `count`.
    pub fn at(&self, draw: &Stream, mut value: u64) -> u64 {
        loop {
            // Cycle walking: the network is applied until the value is in range. The result is a permutation of 0..count, in at most four
            // iterations on average.
            value = self.feistel(draw, value);
            if value < self.count {
                return value;
            }
        }
    }

    fn feistel(&self, draw: &Stream, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            let scrambled = u64::from(draw.u32_at(round << 32 | right));
            (left, right) = (right, left ^ (scrambled & mask));
        }
        left << self.half_bits | right
    }
}

/// Rounds of the Feistel network. With four or more rounds, the network is a pseudorandom permutation (Luby and Rackoff, 1988).
const ROUNDS: u64 = 4;

impl WindowOrder {
    /// The order of windows for a text of `tokens` tokens. A window has `seq_len` inputs and one more token as the last target. Therefore
    /// `tokens` must be at least `seq_len + 1`, so that every window lies inside the text.
    #[must_use]
    pub fn new(tokens: usize, seq_len: usize, seed: u64) -> Self {
        let (tokens, seq_len) = (tokens as u64, (seq_len as u64).max(1));
        // `windows` is the number of windows that fit from any phase. At most one and a half windows per epoch are left out at the ends of
        // the text.
        let windows = (tokens.saturating_sub(seq_len) / seq_len).max(1);
        let phases = tokens.saturating_sub(windows * seq_len).clamp(1, seq_len);
        Self { windows: Permutation::of(windows), seq_len, phases, seed }
    }

    /// Number of windows per epoch.
    #[must_use]
    pub fn windows(&self) -> u64 {
        self.windows.count
    }

    /// The epoch of sequence number `cursor`, counted from 0.
    #[must_use]
    pub fn epoch(&self, cursor: u64) -> u64 {
        cursor / self.windows.count
    }

    /// Index in the text of the first token of sequence number `cursor`.
    #[must_use]
    pub fn start(&self, cursor: u64) -> usize {
        // Epochs repeat after 2^32 epochs, which take four seconds for a text of one window at one window per nanosecond.
        let epoch = self.epoch(cursor) as u32;
        let draw = Stream::new(self.seed, Purpose::Data, fnv1a32("data.order"), epoch);
        let phase = u64::from(draw.u32_at(PHASE)) % self.phases;
        let window = self.windows.at(&draw, cursor % self.windows.count);
        (phase + window * self.seq_len) as usize
    }
}

/// Element of the random stream for the phase, which follows the elements of the rounds.
const PHASE: u64 = ROUNDS << 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_visits_every_window_once_in_an_order_of_its_own() {
        for (tokens, seq_len) in [(9, 8), (17, 8), (1000, 7), (4097, 16), (100_000, 33)] {
            let order = WindowOrder::new(tokens, seq_len, 5);
            let windows = order.windows();
            let mut orders = Vec::new();
            for epoch in 0..3 {
                let mut starts: Vec<usize> = (0..windows).map(|i| order.start(epoch * windows + i)).collect();
                orders.push(starts.clone());
                starts.sort_unstable();
                assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == seq_len), "gap or overlap");
                let end = starts[starts.len() - 1] + seq_len;
                assert!(end < tokens, "the last target of {tokens} tokens would be token {end}");
                let left_out = tokens - windows as usize * seq_len;
                assert!(left_out <= 2 * seq_len, "{left_out} tokens of {tokens} left out");
            }
            if windows > 20 {
                assert_ne!(orders[0], orders[1]);
                assert!(!orders[0].is_sorted(), "not shuffled");
            }
        }
    }

    #[test]
    fn the_seed_decides() {
        let starts = |seed| (0..50).map(|c| WindowOrder::new(10_000, 16, seed).start(c)).collect::<Vec<_>>();
        assert_eq!(starts(1), starts(1));
        assert_ne!(starts(1), starts(2));
    }

    #[test]
    fn phases_differ_between_epochs() {
        let order = WindowOrder::new(10_000, 64, 3);
        let phases: std::collections::BTreeSet<usize> =
            (0..40).map(|epoch| order.start(epoch * order.windows()) % 64).collect();
        assert!(phases.len() > 20, "only {} phases in 40 epochs", phases.len());
    }
}
