use crate::error::expect_eq;
use crate::{Backend, Error, Result};

/// `n` rounded up to a multiple of `align`.
pub fn round_up(n: usize, align: usize) -> usize {
    n.div_ceil(align) * align
}

/// Which rows of a tensor belong to which group. A group contains the rows of one expert or one shard, and groups may have different
/// numbers of rows. The lists `start`, `len` and `row_id` are on the device.
///
/// Group `g` consists of the rows `start[g] .. start[g] + len[g]`. The rows from there up to `start[g+1]` are padding. Every start is a
/// multiple of `align`.
#[derive(Debug, Clone)]
pub struct Groups<B: Backend> {
    /// The first row of each group, followed by the end of the padding of the last group; `num_groups + 1` values.
    pub start: B::Buf<i32>,
    /// Number of rows of each group, without padding.
    pub len: B::Buf<i32>,
    /// The id of each row, which is global token · k + slot; −1 for a padding row. `capacity` values.
    pub row_id: B::Buf<i32>,
    /// Number of groups.
    pub num_groups: usize,
    /// The number of which each group start is a multiple: 128 if any product over these groups has block-scaled operands, otherwise 1.
    pub align: usize,
    /// Number of rows that the buffers can hold.
    pub capacity: usize,
    /// The number of rows per group, if all groups have the same number of rows and the host knows this number, as for shards.
    pub rows_each: Option<usize>,
}

impl<B: Backend> Groups<B> {
    /// Creates `num_groups` consecutive groups of `rows_each` rows each, such as the shards of the tokens of a dense layer. `first_row` is
    /// the global index of row 0.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if `rows_each` is not a multiple of `align`.
    pub fn uniform(
        b: &B,
        num_groups: usize,
        rows_each: usize,
        align: usize,
        first_row: usize,
    ) -> Result<Self> {
        expect_eq("Groups::uniform", "rows of a shard modulo the block", rows_each % align.max(1), 0)?;
        let start: Vec<i32> = (0..=num_groups).map(|g| (g * rows_each) as i32).collect();
        let capacity = num_groups * rows_each;
        let row_id: Vec<i32> = (0..capacity).map(|r| (first_row + r) as i32).collect();
        Ok(Self {
            start: b.upload(&start)?,
            len: b.upload(&vec![rows_each as i32; num_groups])?,
            row_id: b.upload(&row_id)?,
            num_groups,
            align,
            capacity,
            rows_each: Some(rows_each),
        })
    }
}

/// The properties of groups on which a backend's choice of a kernel depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grouping {
    /// Number of groups.
    pub count: usize,
    /// Each group's first row is a multiple of this number.
    pub align: usize,
    /// The number of rows per group, if all groups have the same number of rows and the host knows this number.
    pub rows_each: Option<usize>,
}

impl Grouping {
    /// Returns the properties of `groups` on which the choice of a kernel depends.
    pub fn of<B: Backend>(groups: &Groups<B>) -> Self {
        Self { count: groups.num_groups, align: groups.align, rows_each: groups.rows_each }
    }
}

/// The permutation that sorts received rows by expert, and its inverse.
#[derive(Debug, Clone)]
pub struct PermuteMap<B: Backend> {
    /// The groups of rows after the permutation, one group per expert. Rows are sorted by (expert, global token, slot), and groups are
    /// padded.
    pub groups: Groups<B>,
    /// For each row after the permutation, the index of the received row that is copied to it; −1 for a padding row. `capacity` values.
    pub source_row: B::Buf<i32>,
    /// For each row after the permutation, the value received token · k + slot; −1 for a padding row. `capacity` values.
    pub row_slot: B::Buf<i32>,
    /// For each (received token, slot) pair whose expert is on this rank, in ascending order, the index of its row after the permutation.
    /// The remaining values are −1. `num_slots` values.
    pub slot_row: B::Buf<i32>,
    /// The number of (received token, slot) pairs that the host expects to have an expert on this rank.
    pub num_slots: usize,
    /// The numbers by which the host later checks that every such pair has a row.
    pub occupancy: Occupancy<B>,
}

/// The numbers of rows and slots that [`PlanPermute`](crate::ops::PlanPermute) found on the device. If the rows exceed the capacity, all
/// groups are empty and all rows are padding. The caller should check these numbers by [`Occupancy::verify`] at a time when waiting costs
/// nothing, such as the end of a step.
#[derive(Debug, Clone)]
pub struct Occupancy<B: Backend> {
    /// A buffer of two values: the number of rows that the groups need, including padding, and the number of (received token, slot) pairs
    /// whose expert is on this rank.
    pub found: B::Buf<i32>,
    /// The number of (received token, slot) pairs that the host expects.
    pub num_slots: usize,
    /// Number of rows that the buffers can hold.
    pub capacity: usize,
}

impl<B: Backend> Occupancy<B> {
    /// Waits until the device has computed both numbers, reads them, and checks them.
    ///
    /// # Errors
    /// [`Error::Capacity`] if the rows exceed the capacity, and [`Error::Shape`] if the number of pairs is not the expected number.
    pub fn verify(&self, b: &B) -> Result<()> {
        const OP: &str = "plan_permute";
        let found = b.download(&self.found)?;
        let [needed, occupied] = [0, 1].map(|i| found.get(i).map_or(0, |n| *n as usize));
        expect_eq(OP, "occupied slots", occupied, self.num_slots)?;
        if needed > self.capacity {
            return Err(Error::Capacity { op: OP, needed, capacity: self.capacity });
        }
        Ok(())
    }
}
