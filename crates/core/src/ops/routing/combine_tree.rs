use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result, Tensor};

/// Sums the rows of each token by a binary tree over leaves. The result has the shape `[t, d]`.
///
/// A node of the leaves `lo..hi` has the children `lo..mid` and `mid..hi`, mid = lo + (hi − lo) / 2. Each slot of a token has its row at
/// one leaf. If both children of a node have rows, their sums are added in F32, left + right, and rounded to the rows' type. If one child
/// has rows, its sum moves up bit for bit (−0 and the payload of a NaN stay). A token without rows gives zeros. Several slots at one leaf
/// are added in slot order, and each sum is rounded.
///
/// Each rank can therefore sum a subtree. If `ranks` is a power of two that divides `leaves`, each rank sums its equal share of the leaves,
/// and these sums are the leaves of a tree with `ranks` leaves. The root of that tree has the same bits as the root of the whole tree.
#[derive(Debug)]
pub struct CombineTree<'a, B: Backend> {
    /// The rows.
    pub rows: &'a Tensor<B>,
    /// For each (token, slot), the index of its row; a slot with an index out of range is not summed. `[t·k]`
    pub index: &'a B::Buf<i32>,
    /// For each (token, slot), the index of its leaf; a slot with an index out of range is not summed. `[t·k]`
    pub leaf: &'a B::Buf<i32>,
    /// Number of leaves of the tree.
    pub leaves: usize,
    /// A tensor that is added to the root. The result is rounded again and has the same bits as [`Add`](crate::ops::Add).
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

/// Inverts a list of slots: the result holds the row of each slot, −1 if no row has the slot. [`CombineTree`] needs this inverse for a
/// [`PermuteMap`](crate::PermuteMap) whose rows have only some of the slots.
#[derive(Debug)]
pub struct FindSlots<'a, B: Backend> {
    /// The (token, slot) of each row, like a map's `row_slot`; negative for padding. No slot occurs twice. `[r]`
    pub row_slot: &'a B::Buf<i32>,
    /// Number of slots, t·k. Values of t·k or more in `row_slot` are not slots.
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
