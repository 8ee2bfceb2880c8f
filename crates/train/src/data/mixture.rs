//! Maps a global sample cursor to a source of a mixture and to one of the source's sequences. The sources' shares are exact in every block
//! of cursors. The seed determines the order within a block, without stored tables.

use nibble_formats::philox::{Purpose, Stream, fnv1a32};

use super::cursor::Permutation;

/// Cursors per block. Each source has the same number of sequences in every block.
pub(super) const BLOCK: u64 = 4096;

/// The shares of the sources of a mixture.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    /// The first place of each source in a block before the permutation, and the end of the last source.
    places: Vec<u64>,
    order: Permutation,
    seed: u64,
}

impl Mixture {
    /// Computes the sources' shares from their weights. The shares are rounded to whole numbers of sequences per block by the
    /// largest-remainder method. If two sources have equal remainders, the earlier source gets the additional sequence.
    pub fn new(weights: &[f64], seed: u64) -> Self {
        let sum: f64 = weights.iter().sum();
        let exact: Vec<f64> = weights.iter().map(|weight| weight / sum * BLOCK as f64).collect();
        let mut shares: Vec<u64> = exact.iter().map(|share| share.floor() as u64).collect();
        let mut by_rest: Vec<usize> = (0..shares.len()).collect();
        by_rest.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
        let left = BLOCK.saturating_sub(shares.iter().sum()) as usize;
        for source in by_rest.into_iter().cycle().take(left) {
            shares[source] += 1;
        }
        let mut places = vec![0];
        places.extend(shares.iter().scan(0, |end, share| {
            *end += share;
            Some(*end)
        }));
        Self { places, order: Permutation::of(BLOCK), seed }
    }

    /// Number of sequences of this source in each block.
    pub fn share(&self, source: usize) -> u64 {
        self.places[source + 1] - self.places[source]
    }

    /// The source of sequence number `cursor` of the mixture, and the sequence's number within that source.
    pub fn of(&self, cursor: u64) -> (usize, u64) {
        if self.places.len() == 2 {
            return (0, cursor);
        }
        let (block, within) = (cursor / BLOCK, cursor % BLOCK);
        let draw = Stream::new(self.seed, Purpose::Data, fnv1a32("data.mixture"), block as u32);
        let place = self.order.at(&draw, within);
        // `source` is the last source whose first place is at most `place`. A source without a share has no place.
        let source = self.places.partition_point(|first| *first <= place) - 1;
        (source, block * self.share(source) + place - self.places[source])
    }

    /// Number of sequences that come from `source` among the first `cursors` sequences of the mixture.
    pub fn sequences(&self, source: usize, cursors: u64) -> u64 {
        let whole = cursors / BLOCK * self.share(source);
        let rest = (cursors / BLOCK * BLOCK..cursors).filter(|cursor| self.of(*cursor).0 == source).count();
        whole + rest as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_exact_in_every_block_and_each_sequence_comes_once() {
        let weights = [2.0, 1.0, 0.001, 5.5];
        let mixture = Mixture::new(&weights, 3);
        let shares: Vec<u64> = (0..4).map(|source| mixture.share(source)).collect();
        assert_eq!(shares.iter().sum::<u64>(), BLOCK);
        for (share, weight) in shares.iter().zip(weights) {
            assert!((*share as f64 - weight / 8.501 * BLOCK as f64).abs() < 1.0, "{shares:?}");
        }
        let mut own = vec![Vec::new(); 4];
        let mut sources = Vec::new();
        for cursor in 0..3 * BLOCK {
            let (source, at) = mixture.of(cursor);
            own[source].push(at);
            sources.push(source);
            if cursor % BLOCK == BLOCK - 1 {
                let blocks = cursor / BLOCK + 1;
                assert!(own.iter().zip(&shares).all(|(own, share)| own.len() as u64 == blocks * share));
            }
        }
        for own in &mut own {
            own.sort_unstable();
            assert!(own.iter().copied().eq(0..own.len() as u64), "a sequence comes twice or never");
        }
        assert_ne!(sources[..4096], sources[4096..8192], "blocks are in one order");
        for (source, cursors) in [(0, 5000), (3, 4096), (1, 1), (2, 12_000)] {
            let counted = sources[..cursors].iter().filter(|is| **is == source).count() as u64;
            assert_eq!(mixture.sequences(source, cursors as u64), counted);
        }
    }

    #[test]
    fn the_seed_decides_and_one_source_has_all() {
        let of = |seed| (0..200).map(|c| Mixture::new(&[1.0, 1.0], seed).of(c)).collect::<Vec<_>>();
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert_eq!(Mixture::new(&[0.3], 1).of(987_654), (0, 987_654));
        let thirds = Mixture::new(&[1.0, 1.0, 1.0], 1);
        assert_eq!([0, 1, 2].map(|source| thirds.share(source)), [1366, 1365, 1365]);
    }
}
