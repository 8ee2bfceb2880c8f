//! Which keys each query attends to.

use super::Heads;
use super::tile::TILE;
use crate::Cpu;
use nibble_core::ops::Windows;
use std::ops::Range;

/// Consecutive tokens of a sequence that attend only to each other: no other query attends to a key of the segment. A
/// sequence without windows is one segment. A document is one segment, so its bits are those of the document alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    /// Index of the first token, counted over all sequences.
    pub first: usize,
    pub len: usize,
    /// Whether each query attends to all keys of the segment that the causal mask leaves.
    pub is_whole: bool,
}

/// All segments, and the first key of each query.
pub(super) struct Sight {
    pub segments: Vec<Segment>,
    /// Whether a query attends to no later key.
    causal: bool,
    /// The first key of each query, counted within the segment. Empty without windows.
    first_key: Vec<usize>,
}

impl Sight {
    pub fn new(sizes: &Heads, windows: Option<&Windows<Cpu>>, causal: bool) -> Self {
        let sequences = (0..sizes.sequences).map(|sequence| sequence * sizes.seq_len);
        let Some(windows) = windows else {
            let whole = |first| Segment { first, len: sizes.seq_len, is_whole: true };
            return Self { segments: sequences.map(whole).collect(), causal, first_key: Vec::new() };
        };
        let first_key = Vec::with_capacity(sizes.tokens());
        let mut sight = Self { segments: Vec::new(), causal, first_key };
        for first in sequences {
            sight.cut(first, &windows.first_key.as_slice()[first..][..sizes.seq_len]);
        }
        sight
    }

    /// Adds the segments of the sequence whose first token is `first`. First keys that are out of range or decrease are clamped to the
    /// nearest valid value.
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

    /// The first key of a query; query and key are counted within the segment.
    pub fn first_key(&self, segment: Segment, query: usize) -> usize {
        self.first_key.get(segment.first + query).copied().unwrap_or(0)
    }

    /// The last key of a query; query and key are counted within the segment.
    pub fn last_key(&self, segment: Segment, query: usize) -> usize {
        if self.causal { query } else { segment.len - 1 }
    }

    /// The key after the last key in the sums of the tile of queries that contains `query`.
    pub fn tile_end(&self, segment: Segment, query: usize) -> usize {
        if self.causal { ((query / TILE + 1) * TILE).min(segment.len) } else { segment.len }
    }

    /// The last key of each query of the tile that starts at `first`, as the last key of the first query and the step to the next.
    pub fn last_keys(&self, segment: Segment, first: usize) -> (usize, usize) {
        (self.last_key(segment, first), usize::from(self.causal))
    }

    /// The first key in the sums of the tile of queries that contains `query`. A key to which a query does not attend has weight 0.
    pub fn tile_start(&self, segment: Segment, query: usize) -> usize {
        self.first_key(segment, query / TILE * TILE) / TILE * TILE
    }

    /// For each query, the number of keys, starting at `from`, that are before its window.
    pub fn hidden(&self, segment: Segment, queries: Range<usize>, from: usize) -> [usize; TILE] {
        let mut hidden = [0; TILE];
        for (hidden, query) in hidden.iter_mut().zip(queries) {
            *hidden = self.first_key(segment, query).saturating_sub(from);
        }
        hidden
    }
}
