use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Groups, Result};

/// Divides the rows of each expert into parts, one part per shard of the micro-batch to which a row's token belongs. If the weight gradient
/// of an expert is summed by a tree over shards, [`PlanPermute`](crate::ops::PlanPermute) sorts rows by part.
///
/// The group of a (token, slot) is expert · `parts` + (token / `part_tokens`) mod `parts`, or −1 if the expert is −1. Token indices count
/// over all ranks and micro-batches. Each micro-batch of the replica to which this rank belongs begins at a multiple of `parts` ·
/// `part_tokens`.
#[derive(Debug)]
pub struct AssignParts<'a, B: Backend> {
    /// The local expert of each (token, slot), or −1 if the expert is on another rank; `[t·k]`.
    pub expert: &'a B::Buf<i32>,
    /// The global index of each token; `[t]`.
    pub token_id: &'a B::Buf<i32>,
    /// Number of slots per token.
    pub top_k: usize,
    /// The number of parts into which this rank divides the rows of each expert.
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

/// Joins every `parts` consecutive groups into one group over the same rows. The op turns the groups of [`AssignParts`] into one group per
/// expert. The padding rows of the original groups then lie inside the joined group and have no row id.
#[derive(Debug)]
pub struct JoinGroups<'a, B: Backend> {
    /// The groups to join.
    pub groups: &'a Groups<B>,
    /// The number of original groups per joined group, which must divide the number of groups.
    pub parts: usize,
}

impl<B: Backend> JoinGroups<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks that `parts` divides the number of groups.
    pub fn check(&self) -> Result<()> {
        let groups = self.groups.num_groups;
        if self.parts == 0 || groups == 0 || !groups.is_multiple_of(self.parts) {
            let expected = format!("a divisor of {groups} groups");
            return Err(Error::shape("join_groups", "parts", self.parts, expected));
        }
        Ok(())
    }
    /// Allocates the starts and lengths of the joined groups. The result shares the row ids of the original groups. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Groups<B>> {
        let num_groups = self.groups.num_groups / self.parts;
        let (start, len) = (b.alloc(num_groups + 1)?, b.alloc(num_groups)?);
        Ok(Groups { start, len, num_groups, rows_each: None, ..self.groups.clone() })
    }
}
