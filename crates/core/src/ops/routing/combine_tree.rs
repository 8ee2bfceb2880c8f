use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result, Tensor};

/// Sums the rows of each token by a binary tree, to whose leaves the rows are assigned. The result has the shape `[t, d]`.
///
/// The node for the leaves `lo..hi` has the children `lo..mid` and `mid..hi`, where mid = lo + (hi − lo) / 2. The row of each (token, slot)
/// is at one leaf. If both children of a node have rows, the op adds their sums in F32, as left + right, and rounds the result to the type
/// of the rows. If only one child has rows, its sum becomes the sum of the node bit for bit, including −0 and the payload of a NaN. If a
/// token has no rows, its result is zeros. If several slots of a token are at one leaf, their rows are added in the order of the slots, and
/// each partial sum is rounded.
///
/// With such a tree, each rank can sum one subtree by itself. If the number of ranks is a power of two that divides `leaves`, each rank
/// sums an equal share of the leaves. The sums of the ranks are then the leaves of a second tree. The root of this second tree has the same
/// bits as the root of one tree over all leaves.
#[derive(Debug)]
pub struct CombineTree<'a, B: Backend> {
    /// The rows.
    pub rows: &'a Tensor<B>,
    /// For each (token, slot), the index of its row. If an index is out of range, the slot adds nothing. `[t·k]`
    pub index: &'a B::Buf<i32>,
    /// For each (token, slot), the index of its leaf. If an index is out of range, the slot adds nothing. `[t·k]`
    pub leaf: &'a B::Buf<i32>,
    /// Number of leaves of the tree.
    pub leaves: usize,
    /// A tensor that the op adds to the sums at the root. The sum is rounded again and has the same bits as the result of
    /// [`Add`](crate::ops::Add).
    pub plus: Option<&'a Tensor<B>>,
    /// Number of slots per token.
    pub top_k: usize,
}

impl<B: Backend> CombineTree<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths, and `plus`.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "combine_tree";
        if self.leaves == 0 || self.leaves >= 1 << 31 {
            return Err(Error::shape(OP, "leaves", self.leaves, "1 to 2^31 − 1"));
        }
        let slots = B::len(self.index);
        if self.top_k == 0 || !slots.is_multiple_of(self.top_k) {
            let expected = format!("a multiple of top_k = {}", self.top_k);
            return Err(Error::shape(OP, "index.len()", slots, expected));
        }
        expect_eq(OP, "leaf.len()", B::len(self.leaf), slots)?;
        if let Some(plus) = self.plus {
            expect_eq(OP, "shape of plus", plus.shape(), (self.tokens(), self.rows.cols))?;
            expect_eq(OP, "type of plus", plus.dtype(), self.rows.dtype())?;
        }
        Ok(())
    }

    /// Number of tokens. Call `check` first.
    pub fn tokens(&self) -> usize {
        B::len(self.index) / self.top_k
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        Tensor::unwritten(b, self.rows.dtype(), self.tokens(), self.rows.cols)
    }
}

/// Inverts a list of slots per row. The result contains, for each slot, the row that has this slot, or −1 if there is no such row. The op
/// [`CombineTree`] needs this inverse of a [`PermuteMap`](crate::PermuteMap) if only some of the slots have rows.
#[derive(Debug)]
pub struct FindSlots<'a, B: Backend> {
    /// The (token, slot) of each row, as in [`PermuteMap::row_slot`](crate::PermuteMap::row_slot); negative for a padding row. No slot
    /// occurs twice. `[r]`
    pub row_slot: &'a B::Buf<i32>,
    /// Number of slots, t·k. The op ignores values of t·k or more in `row_slot`.
    pub slots: usize,
}

impl<B: Backend> FindSlots<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks sizes.
    pub fn check(&self) -> Result<()> {
        let most = self.slots.max(B::len(self.row_slot));
        if most >= 1 << 31 {
            return Err(Error::shape("find_slots", "slots or row_slot.len()", most, "below 2^31"));
        }
        Ok(())
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<i32>> {
        b.alloc(self.slots)
    }
}
