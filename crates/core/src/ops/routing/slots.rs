use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result};

/// Computes the rank that has the expert of each (token, slot). Each rank has `experts_each` consecutive experts, so the rank is expert /
/// `experts_each`. The op [`PlanPermute`](crate::ops::PlanPermute) can then sort slots by rank in the same way as it sorts them by expert.
/// If an expert is out of range, the op reports no error: the rank of the slot is −1, and the slot is not counted.
#[derive(Debug)]
pub struct AssignRanks<'a, B: Backend> {
    /// The global index of the expert of each (token, slot); `[t·k]`.
    pub expert: &'a B::Buf<i32>,
    /// Number of slots per token.
    pub top_k: usize,
    /// Experts per rank.
    pub experts_each: usize,
    /// Number of ranks.
    pub world: usize,
}

/// The result of [`AssignRanks`].
#[derive(Debug, Clone)]
pub struct SlotRanks<B: Backend> {
    /// The rank that has the expert of each (token, slot), or −1 if no rank has this expert. `[t·k]`
    pub rank: B::Buf<i32>,
    /// The rank of each (token, slot), but −1 if an earlier slot of the token has the same rank, because a token is sent to each rank only
    /// once. `[t·k]`
    pub first: B::Buf<i32>,
    /// For each rank, the number of tokens that are sent to the rank, followed by the number of slots that are sent to the rank;
    /// `[2·world]`.
    pub counts: B::Buf<i32>,
}

impl<B: Backend> AssignRanks<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks sizes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "assign_ranks";
        let experts = self.experts_each.checked_mul(self.world);
        if experts.is_none_or(|experts| experts == 0 || experts >= 1 << 31) {
            let got = format!("({}, {})", self.experts_each, self.world);
            return Err(Error::shape(
                OP,
                "(experts_each, world)",
                got,
                "both at least 1, experts below 2^31",
            ));
        }
        check_slots(OP, B::len(self.expert), self.top_k).map(drop)
    }

    /// Allocates the result, with zeroed counts. Call `check` first.
    pub fn result(&self, b: &B) -> Result<SlotRanks<B>> {
        let slots = B::len(self.expert);
        Ok(SlotRanks { rank: b.alloc(slots)?, first: b.alloc(slots)?, counts: b.zeros(2 * self.world)? })
    }
}

/// The number of tokens with `slots` slots.
fn check_slots(op: &'static str, slots: usize, top_k: usize) -> Result<usize> {
    if top_k == 0 || top_k >= 1 << 30 {
        return Err(Error::shape(op, "top_k", top_k, "1 to 2^30 − 1"));
    }
    if slots >= 1 << 31 {
        return Err(Error::shape(op, "expert.len()", slots, "below 2^31"));
    }
    expect_eq(op, "expert.len() modulo top_k", slots % top_k, 0)?;
    Ok(slots / top_k)
}

/// The number of 32-bit words in the record of one token that [`PackSlots`] writes.
pub const fn record_words(top_k: usize) -> usize {
    1 + 2 * top_k
}

/// Writes a record of [`record_words`] words for each token that is sent to a rank. The first word of a record is the global index of the
/// token plus 1. The next words, one per slot of the token, are the local index of the slot's expert on the receiving rank plus 1, or 0 if
/// the expert is on another rank. The last words, one per slot of the token, are the bits of the slot's gate weight. A record of zeros
/// therefore means that there is no token.
///
/// Each record is written for one slot, and is sent to the rank that has the expert of this slot. If the slot of a record is negative or
/// past the end, all words of the record are 0. If the expert of this slot is negative, all words for experts are 0.
#[derive(Debug)]
pub struct PackSlots<'a, B: Backend> {
    /// For each record, a (token, slot) pair that is sent to the rank of the record. This list is the `row_slot` that
    /// [`PlanPermute`](crate::ops::PlanPermute) computes from [`SlotRanks::first`]. `[m]`
    pub slot: &'a B::Buf<i32>,
    /// The global index of the expert of each (token, slot), as in [`AssignRanks::expert`]. `[t·k]`
    pub expert: &'a B::Buf<i32>,
    /// Gate weight of each (token, slot). `[t·k]`
    pub weight: &'a B::Buf<f32>,
    /// Number of slots per token.
    pub top_k: usize,
    /// The number of experts per rank, as in [`AssignRanks::experts_each`].
    pub experts_each: usize,
    /// Global number of each token. `[t]`
    pub token_id: &'a B::Buf<i32>,
}

impl<B: Backend> PackSlots<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks sizes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "pack_slots";
        let tokens = check_slots(OP, B::len(self.expert), self.top_k)?;
        expect_eq(OP, "weight.len()", B::len(self.weight), B::len(self.expert))?;
        if self.experts_each == 0 || self.experts_each >= 1 << 31 {
            return Err(Error::shape(OP, "experts_each", self.experts_each, "1 to 2^31 − 1"));
        }
        expect_eq(OP, "token_id.len()", B::len(self.token_id), tokens)?;
        check_words(OP, "slot.len()", B::len(self.slot), self.top_k)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<i32>> {
        b.alloc(B::len(self.slot) * record_words(self.top_k))
    }
}

/// Checks that the number of words of all records does not overflow.
fn check_words(op: &'static str, argument: &'static str, records: usize, top_k: usize) -> Result<()> {
    let words = records.saturating_mul(record_words(top_k));
    if words >= 1 << 31 {
        let expected = format!("below 2^31 words, {} a record", record_words(top_k));
        return Err(Error::shape(op, argument, records, expected));
    }
    Ok(())
}

/// The inverse of [`PackSlots`]: converts records to the inputs of [`PlanPermute`](crate::ops::PlanPermute) and
/// [`GatherScalars`](crate::ops::GatherScalars). A record of zeros becomes the token −1 with experts −1 and gate weights 0.
#[derive(Debug)]
pub struct UnpackSlots<'a, B: Backend> {
    /// The records, one after the other; `[m, record_words]`.
    pub records: &'a B::Buf<i32>,
    /// Number of slots per token.
    pub top_k: usize,
}

/// The result of [`UnpackSlots`].
#[derive(Debug, Clone)]
pub struct ReceivedSlots<B: Backend> {
    /// Global number of each token. `[m]`
    pub token_id: B::Buf<i32>,
    /// The local index of the expert of each (token, slot), or −1 if the expert is on another rank. `[m·k]`
    pub expert: B::Buf<i32>,
    /// Gate weight of each (token, slot). `[m·k]`
    pub weight: B::Buf<f32>,
}

impl<B: Backend> UnpackSlots<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the length.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "unpack_slots";
        check_slots(OP, 0, self.top_k)?;
        let words = record_words(self.top_k);
        expect_eq(OP, "records.len() modulo the record's words", B::len(self.records) % words, 0)?;
        check_words(OP, "records", self.records(), self.top_k)
    }

    /// Number of records.
    pub fn records(&self) -> usize {
        B::len(self.records) / record_words(self.top_k)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<ReceivedSlots<B>> {
        let (records, slots) = (self.records(), self.records() * self.top_k);
        Ok(ReceivedSlots { token_id: b.alloc(records)?, expert: b.alloc(slots)?, weight: b.alloc(slots)? })
    }
}
