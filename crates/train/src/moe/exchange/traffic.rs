//! What the exchange of one layer carries: a function of the routing, which tests hold the messages to.

use super::Combine;
use nibble_core::RowKind;
use nibble_core::ops::record_words;

/// How often tokens are sent, and for how many slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotCounts {
    /// Tokens, each counted once for every rank that has one of its experts.
    pub tokens: usize,
    /// Slots of all tokens.
    pub slots: usize,
    /// Slots a token.
    pub top_k: usize,
}

impl SlotCounts {
    /// Of the experts of each (token, slot), `[t·k]`, where each rank has `experts_each` of them, in order.
    ///
    /// # Panics
    /// If `top_k` or `experts_each` is 0.
    pub fn of(expert: &[i32], top_k: usize, experts_each: usize) -> Self {
        Self::to(expert, top_k, experts_each, |_| true)
    }

    /// The same of what leaves the rank `home`, whose tokens these are: without what it sends to itself.
    ///
    /// # Panics
    /// As [`Self::of`].
    pub fn leaving(expert: &[i32], top_k: usize, experts_each: usize, home: usize) -> Self {
        Self::to(expert, top_k, experts_each, |rank| rank != home as i32)
    }

    /// What goes to those ranks that `counts` is true of.
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

/// Bytes that the ranks of one exchange hand to the transport for a layer, all of them together, by leg. What a rank sends to itself is among
/// them; on a mesh of N ranks with uniform routing it is one N-th.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExchangeBytes {
    /// Numbers, experts and gate weights of the tokens, before the rows.
    pub records: usize,
    /// Rows to their experts.
    pub dispatch: usize,
    /// And back.
    pub combine: usize,
    /// Gradients of what experts return, to them.
    pub dispatch_backward: usize,
    /// Gradients of the rows, back.
    pub combine_backward: usize,
    /// Gradients of gate weights, back.
    pub scalars: usize,
}

impl ExchangeBytes {
    /// Of rows that go to experts as `dispatch` says (forward, backward) and come back as `combine` says.
    ///
    /// A token's record and its row travel once to each of its ranks. Back come a row for each slot, or, summed up a tree, one for each token
    /// and rank, which is plain and not padded; the gate weight's gradient comes back for each slot.
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
