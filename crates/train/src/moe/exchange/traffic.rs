//! What the all-to-all of one layer carries, as a function of the routing. Tests compare the messages with it.

use super::Combine;
use nibble_core::RowKind;
use nibble_core::ops::record_words;

/// How many tokens are sent, and for how many slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotCounts {
    /// Tokens, each counted once for every rank that has one of its experts.
    pub tokens: usize,
    /// Slots of these tokens.
    pub slots: usize,
    /// Slots per token.
    pub top_k: usize,
}

impl SlotCounts {
    /// From the expert of each (token, slot), `[t·k]`, where each rank has `experts_each` consecutive experts.
    ///
    /// # Panics
    /// If `top_k` or `experts_each` is 0.
    pub fn of(expert: &[i32], top_k: usize, experts_each: usize) -> Self {
        Self::to(expert, top_k, experts_each, |_| true)
    }

    /// The same for the tokens of rank `home`, without what that rank sends to itself.
    ///
    /// # Panics
    /// As [`Self::of`].
    pub fn leaving(expert: &[i32], top_k: usize, experts_each: usize, home: usize) -> Self {
        Self::to(expert, top_k, experts_each, |rank| rank != home as i32)
    }

    /// What goes to the ranks for which `counts` is true.
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

/// Bytes that all ranks of an exchange together hand to the transport for one layer, by leg. They include what a rank sends to itself:
/// one N-th on N ranks with uniform routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExchangeBytes {
    /// Numbers, experts and gate weights of tokens, sent before the rows.
    pub records: usize,
    /// Token rows, to the experts.
    pub dispatch: usize,
    /// Output rows, back to the tokens.
    pub combine: usize,
    /// Gradients of the output rows, to the experts.
    pub dispatch_backward: usize,
    /// Gradients of the token rows, back to the tokens.
    pub combine_backward: usize,
    /// Gradients of gate weights, back to the tokens.
    pub scalars: usize,
}

impl ExchangeBytes {
    /// For rows that travel to experts in the formats `dispatch` (forward, backward), and back in the formats `combine`.
    ///
    /// A token's record and row travel once to each of its ranks. Back comes one row per slot, or, with a tree, one row per token and rank,
    /// which is plain and not padded. The gradient of a gate weight comes back for each slot.
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

    /// Each leg by its name, in the order of a step.
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

    /// All legs.
    pub fn total(&self) -> usize {
        self.legs().iter().map(|(_, bytes)| bytes).sum()
    }
}
