//! The bytes that the all-to-all of one layer sends, as a function of the routing. Tests compare the actual messages with these bytes.

use super::Combine;
use nibble_core::RowKind;
use nibble_core::ops::record_words;

/// How many tokens an exchange sends, and how many slots these tokens have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotCounts {
    /// Number of sent tokens; a token is counted once for each rank that holds at least one of its experts.
    pub tokens: usize,
    /// Number of slots of these tokens.
    pub slots: usize,
    /// Number of slots (chosen experts) per token.
    pub top_k: usize,
}

impl SlotCounts {
    /// Counts tokens and slots from the expert of each (token, slot), `[t·k]`, if each rank holds `experts_each` consecutive experts.
    ///
    /// # Panics
    /// Panics if `top_k` or `experts_each` is 0.
    pub fn of(expert: &[i32], top_k: usize, experts_each: usize) -> Self {
        Self::to(expert, top_k, experts_each, |_| true)
    }

    /// The counts for the tokens of rank `home`, without the tokens that `home` sends to itself.
    ///
    /// # Panics
    /// Panics like [`Self::of`].
    pub fn leaving(expert: &[i32], top_k: usize, experts_each: usize, home: usize) -> Self {
        Self::to(expert, top_k, experts_each, |rank| rank != home as i32)
    }

    /// The counts for the ranks for which `counts` is true.
    fn to(expert: &[i32], top_k: usize, experts_each: usize, counts: impl Fn(i32) -> bool) -> Self {
        let mut all = Self { top_k, ..Self::default() };
        for experts in expert.chunks(top_k) {
            let mut ranks = std::collections::BTreeSet::new();
            for rank in experts.iter().map(|&e| e / experts_each as i32).filter(|rank| counts(*rank)) {
                all.slots += 1;
                ranks.insert(rank);
            }
            all.tokens += ranks.len();
        }
        all
    }
}

/// Bytes that all ranks together pass to the transport for one layer, separately for each leg (transfer) of the exchange. These bytes
/// include the rows that a rank sends to itself, which are 1/N of all rows on N ranks with uniform routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExchangeBytes {
    /// Bytes of the records (a token's number, experts and gate weights), which are sent before the rows.
    pub records: usize,
    /// Bytes of token rows that are sent to the experts.
    pub dispatch: usize,
    /// Bytes of output rows that are sent back to the tokens.
    pub combine: usize,
    /// Bytes of gradients of output rows that are sent to the experts.
    pub dispatch_backward: usize,
    /// Bytes of gradients of token rows that are sent back to the tokens.
    pub combine_backward: usize,
    /// Bytes of gradients of gate weights that are sent back to the tokens.
    pub scalars: usize,
}

impl ExchangeBytes {
    /// Computes the bytes of an exchange that sends rows to experts in the formats `dispatch` (forward, backward), and back in the formats
    /// `combine`.
    ///
    /// A token's record and row are sent once to each rank that has one of its experts. Combine returns one row per slot; if rows are
    /// summed in a tree, combine returns one plain, unpadded row per token and rank. The backward pass returns one gradient of a gate
    /// weight per slot.
    pub fn of(counts: SlotCounts, way: Combine, dispatch: [RowKind; 2], combine: [RowKind; 2]) -> Self {
        let SlotCounts { tokens, slots, top_k } = counts;
        let [back, back_backward] = combine.map(|row| match way {
            Combine::Slots => slots * row.row_bytes(),
            Combine::Tree => tokens * row.code_bytes(),
        });
        Self {
            records: tokens * record_words(top_k) * size_of::<i32>(),
            dispatch: tokens * dispatch[0].row_bytes(),
            combine: back,
            dispatch_backward: tokens * dispatch[1].row_bytes(),
            combine_backward: back_backward,
            scalars: slots * size_of::<f32>(),
        }
    }

    /// The bytes of each leg (transfer) with the leg's name, in the order of a step.
    pub fn legs(&self) -> [(&'static str, usize); 6] {
        [
            ("records", self.records),
            ("dispatch, forward", self.dispatch),
            ("combine, forward", self.combine),
            ("dispatch, backward", self.dispatch_backward),
            ("scalars, backward", self.scalars),
            ("combine, backward", self.combine_backward),
        ]
    }

    /// Bytes of all legs together.
    pub fn total(&self) -> usize {
        self.legs().iter().map(|(_, bytes)| bytes).sum()
    }
}
