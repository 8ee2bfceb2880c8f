use crate::error::expect_eq;
use crate::{Backend, Error, Result};

/// `n` rounded up to a multiple of `align`.
pub fn round_up(n: usize, align: usize) -> usize {
    n.div_ceil(align) * align
}

/// The rows of each expert (or shard) in a tensor, if experts have different numbers of rows. The lists are on the device.
///
/// Group `g` owns rows `start[g] .. start[g] + len[g]`; rows up to `start[g+1]` are padding. Every start is a
/// multiple of `align`.
#[derive(Debug, Clone)]
pub struct Groups<B: Backend> {
    /// First row of each group, and the end of the last group's padding: `num_groups + 1` values.
    pub start: B::Buf<i32>,
    /// Number of rows of each group, without padding.
    pub len: B::Buf<i32>,
    /// For each row, global token · k + slot; −1 for padding. `capacity` values.
    pub row_id: B::Buf<i32>,
    /// Number of groups.
    pub num_groups: usize,
    /// 128 if any product over these groups is block-scaled, else 1.
    pub align: usize,
    /// Number of rows that the buffers can hold.
    pub capacity: usize,
    /// Rows per group, if the host knows that all groups have the same number of rows, as shards do.
    pub rows_each: Option<usize>,
}

impl<B: Backend> Groups<B> {
    /// `num_groups` groups of `rows_each` rows, one after the other: the shards of a dense layer's tokens.
    /// `first_row` is the global index of row 0.
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

/// The properties of an operation's groups on which the choice of a kernel depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grouping {
    /// Number of groups.
    pub count: usize,
    /// Each group's first row is a multiple of this number.
    pub align: usize,
    /// Rows per group, if the host knows that all groups have the same number of rows.
    pub rows_each: Option<usize>,
}

impl Grouping {
    /// The properties of these groups.
    pub fn of<B: Backend>(groups: &Groups<B>) -> Self {
        Self { count: groups.num_groups, align: groups.align, rows_each: groups.rows_each }
    }
}

/// The permutation that sorts received rows by expert, and its inverse.
#[derive(Debug, Clone)]
pub struct PermuteMap<B: Backend> {
    /// The expert-sorted, padded rows: sorted by (expert, global token, slot).
    pub groups: Groups<B>,
    /// For each expert-sorted row, the index of the received row that it copies; −1 for padding. `capacity` values.
    pub source_row: B::Buf<i32>,
    /// For each expert-sorted row, received token · k + slot; −1 for padding. `capacity` values.
    pub row_slot: B::Buf<i32>,
    /// For each occupied (received token, slot) pair, in that order, the expert-sorted row of the pair; the remaining values are −1.
    /// `num_slots` values.
    pub slot_row: B::Buf<i32>,
    /// Number of occupied (received token, slot) pairs that the plan expects.
    pub num_slots: usize,
    /// The result of the check that every occupied pair has a row.
    pub occupancy: Occupancy<B>,
}

/// The numbers of rows and slots that the plan of a permutation found. The two numbers are on the device. If the rows do not fit, all
/// groups are empty and all rows are padding. The caller of a plan calls [`Occupancy::verify`] when waiting costs nothing, such as at the
/// end of a step.
#[derive(Debug, Clone)]
pub struct Occupancy<B: Backend> {
    /// Two values: the number of rows that the groups need, including padding, and the number of occupied (received token, slot) pairs.
    pub found: B::Buf<i32>,
    /// Number of pairs that the plan expects.
    pub num_slots: usize,
    /// Number of rows that the buffers can hold.
    pub capacity: usize,
}

impl<B: Backend> Occupancy<B> {
    /// Waits for the plan, reads the two numbers from the device, and checks them.
    ///
    /// # Errors
    /// [`Error::Capacity`] if the rows did not fit; [`Error::Shape`] if there were more or fewer occupied slots than the plan expects.
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
