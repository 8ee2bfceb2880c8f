use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Groups, Result};

/// Divides the rows of each expert into parts, by shard of the micro-batch. [`PlanPermute`](crate::ops::PlanPermute) sorts by part if the
/// weight gradient of an expert is a tree sum over shards.
///
/// Group of each (token, slot) = expert · `parts` + (token / `part_tokens`) mod `parts`; −1 if the expert is −1. Token indices run over all
/// ranks and micro-batches; a micro-batch of the rank's replica begins at a multiple of `parts` · `part_tokens`.
#[derive(Debug)]
pub struct AssignParts<'a, B: Backend> {
    /// Local expert of each (token, slot), −1 if another rank has the expert: `[t·k]`.
    pub expert: &'a B::Buf<i32>,
    /// Global index of each token: `[t]`.
    pub token_id: &'a B::Buf<i32>,
    /// Number of slots per token.
    pub top_k: usize,
    /// Parts per expert on this rank.
    pub parts: usize,
    /// Tokens per part.
    pub part_tokens: usize,
}

impl<B: Backend> AssignParts<'_, B> {
    /// How closely the results of two backends must agree.
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

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<i32>> {
        b.alloc(B::len(self.expert))
    }
}

/// Joins every `parts` consecutive groups into one group over the same rows. This turns the groups of [`AssignParts`] into one group per
/// expert. The padding of the original groups then lies inside a joined group, in rows without an id.
#[derive(Debug)]
pub struct JoinGroups<'a, B: Backend> {
    /// The groups to join.
    pub groups: &'a Groups<B>,
    /// Number of original groups per joined group; it divides the number of groups.
    pub parts: usize,
}

impl<B: Backend> JoinGroups<'_, B> {
    /// How closely the results of two backends must agree.
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
    /// Allocates starts and lengths; the result shares the row ids. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Groups<B>> {
        let num_groups = self.groups.num_groups / self.parts;
        let (start, len) = (b.alloc(num_groups + 1)?, b.alloc(num_groups)?);
        Ok(Groups { start, len, num_groups, rows_each: None, ..self.groups.clone() })
    }
}
