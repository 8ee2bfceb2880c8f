//! Whom each query sees.

use super::Heads;
use super::tile::TILE;
use crate::Cpu;
use nibble_core::ops::Windows;
use std::ops::Range;

/// Tokens of a sequence that attend among themselves: no later query looks back beyond the first of them. A sequence without windows is one
/// segment, and so is a document, which therefore has the bits that it has alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    /// Its first token, counted in all sequences.
    pub first: usize,
    pub len: usize,
    /// Whether each query sees all up to its own.
    pub is_whole: bool,
}

/// All segments, and where each query's keys begin.
pub(super) struct Sight {
    pub segments: Vec<Segment>,
    /// The first key of each query, counted in its segment. Empty without windows.
    first_key: Vec<usize>,
}

impl Sight {
    pub fn new(sizes: &Heads, windows: Option<&Windows<Cpu>>) -> Self {
        let sequences = (0..sizes.sequences).map(|sequence| sequence * sizes.seq_len);
        let Some(windows) = windows else {
            let whole = |first| Segment { first, len: sizes.seq_len, is_whole: true };
            return Self { segments: sequences.map(whole).collect(), first_key: Vec::new() };
        };
        let mut sight = Self { segments: Vec::new(), first_key: Vec::with_capacity(sizes.tokens()) };
        for first in sequences {
            sight.cut(first, &windows.first_key.as_slice()[first..][..sizes.seq_len]);
        }
        sight
    }

    /// Takes in the sequence whose first token is `first`. Numbers out of range or order count as the nearest ones that are not.
    fn cut(&mut self, first: usize, first_key: &[i32]) {
        let (mut low, mut begin) = (0, 0);
        for (i, &key) in first_key.iter().enumerate() {
            low = usize::try_from(key).unwrap_or(0).clamp(low, i);
            if low == i {
                begin = i;
                self.segments.push(Segment { first: first + i, len: 0, is_whole: true });
            }
            self.first_key.push(low - begin);
            if let Some(segment) = self.segments.last_mut() {
                segment.len += 1;
                segment.is_whole &= low == begin;
            }
        }
    }

    /// The first key of a query of a segment, both counted in the segment.
    pub fn first_key(&self, segment: Segment, query: usize) -> usize {
        self.first_key.get(segment.first + query).copied().unwrap_or(0)
    }

    /// The first key that takes part in the sums of the queries of a tile, with weight 0 where a query does not see it.
    pub fn tile_start(&self, segment: Segment, query: usize) -> usize {
        self.first_key(segment, query / TILE * TILE) / TILE * TILE
    }

    /// How many keys from `from` on each of the queries does not see.
    pub fn hidden(&self, segment: Segment, queries: Range<usize>, from: usize) -> [usize; TILE] {
        let mut hidden = [0; TILE];
        for (hidden, query) in hidden.iter_mut().zip(queries) {
            *hidden = self.first_key(segment, query).saturating_sub(from);
        }
        hidden
    }
}
