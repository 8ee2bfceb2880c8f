use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Groups, Result};

/// Divides the rows of each expert into parts, by their tokens: what [`PlanPermute`](crate::ops::PlanPermute) sorts by where the weight gradient of
/// an expert is a tree over parts of a micro-batch.
///
/// Group of each (token, slot) = expert · `parts` + (token / `part_tokens`) mod `parts`; −1 where the expert is −1. Tokens are counted over all
/// ranks and micro-batches, which a multiple of `parts` parts begins with.
#[derive(Debug)]
pub struct AssignParts<'a, B: Backend> {
    /// Local expert of each (token, slot), −1 where the slot is not of this rank: `[t·k]`.
    pub expert: &'a B::Buf<i32>,
    /// Global index of each token: `[t]`.
    pub token_id: &'a B::Buf<i32>,
    /// Slots a token.
    pub top_k: usize,
    /// Parts of an expert's rows on this rank.
    pub parts: usize,
    /// Tokens of a part.
    pub part_tokens: usize,
}

impl<B: Backend> AssignParts<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks sizes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "assign_parts";
        for (argument, value) in
            [("top_k", self.top_k), ("parts", self.parts), ("part_tokens", self.part_tokens)]
        {
            if !(1..1 << 31).contains(&value) {
                return Err(Error::shape(OP, argument, value, "1 to 2^31 − 1"));
            }
        }
        let slots = B::len(self.expert);
        if slots >= 1 << 31 {
            return Err(Error::shape(OP, "expert.len()", slots, "below 2^31"));
        }
        expect_eq(OP, "expert.len()", slots, B::len(self.token_id) * self.top_k)
    }

    /// Its result, yet to be written. For checked arguments.
    pub fn result(&self, b: &B) -> Result<B::Buf<i32>> {
        b.alloc(B::len(self.expert))
    }
}

/// Groups of the same rows, `parts` of which are one: from those of [`AssignParts`] to one an expert. A group's padding lies within then, where
/// rows have no id.
#[derive(Debug)]
pub struct JoinGroups<'a, B: Backend> {
    /// What to join.
    pub groups: &'a Groups<B>,
    /// How many to one; divides them.
    pub parts: usize,
}

impl<B: Backend> JoinGroups<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the number of groups.
    pub fn check(&self) -> Result<()> {
        let groups = self.groups.num_groups;
        if self.parts == 0 || groups == 0 || !groups.is_multiple_of(self.parts) {
            let expected = format!("a divisor of {groups} groups");
            return Err(Error::shape("join_groups", "parts", self.parts, expected));
        }
        Ok(())
    }
    /// Its result: starts and lengths yet to be written, and the rows' ids as they are. For checked arguments.
    pub fn result(&self, b: &B) -> Result<Groups<B>> {
        let num_groups = self.groups.num_groups / self.parts;
        let (start, len) = (b.alloc(num_groups + 1)?, b.alloc(num_groups)?);
        Ok(Groups { start, len, num_groups, rows_each: None, ..self.groups.clone() })
    }
}
