use crate::error::expect_eq;
use crate::ops::convert::quantize::check_planes;
use crate::{Agreement, Backend, Error, Groups, Occupancy, Operand, PermuteMap, Result, RowKind, Tensor};

/// Sorts received (token, slot) pairs stably by (expert, global token, slot), and pads each group to a multiple of `align` rows.
///
/// Too many rows and a wrong `num_slots` are detected on the device and reported by [`crate::Occupancy::verify`]. A backend that can read
/// the slots on the host may report both errors immediately, as well as experts and tokens that are out of range or out of order.
#[derive(Debug)]
pub struct PlanPermute<'a, B: Backend> {
    /// Local expert of each (received token, slot), −1 if another rank has the expert: `tokens · top_k`.
    pub expert: &'a B::Buf<i32>,
    /// Global index of each received token, strictly ascending. The index of a token without a slot on this rank does not matter.
    pub token_id: &'a B::Buf<i32>,
    /// Number of slots per token.
    pub top_k: usize,
    /// Expected number of occupied slots. If fewer slots are occupied, the last values of `slot_row` are −1, and the map's `occupancy`
    /// reports the difference.
    pub num_slots: usize,
    /// Number of local experts.
    pub num_groups: usize,
    /// Alignment of each group's start, in rows.
    pub align: usize,
    /// Number of rows that the permuted buffers can hold.
    pub capacity: usize,
}

impl<B: Backend> PlanPermute<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "plan_permute";
        if self.align == 0 || self.top_k == 0 || self.num_groups == 0 {
            return Err(Error::shape(
                OP,
                "(align, top_k, num_groups)",
                format!("({}, {}, {})", self.align, self.top_k, self.num_groups),
                "all at least 1",
            ));
        }
        expect_eq(OP, "capacity modulo align", self.capacity % self.align, 0)?;
        let slots = B::len(self.expert);
        if self.num_slots > slots {
            return Err(Error::shape(
                OP,
                "num_slots",
                self.num_slots,
                format!("at most {slots}, all of them"),
            ));
        }
        if self.num_slots > self.capacity {
            return Err(Error::Capacity { op: OP, needed: self.num_slots, capacity: self.capacity });
        }
        let padding = self.num_groups.saturating_mul(self.align);
        if slots.max(self.capacity).saturating_add(padding) >= 1 << 31 || self.top_k >= 1 << 31 {
            let got = format!(
                "{slots} ({} a token) in {} groups, capacity {}",
                self.top_k, self.num_groups, self.capacity
            );
            return Err(Error::shape(OP, "slots", got, "row numbers below 2^31, padding included"));
        }
        expect_eq(OP, "expert.len()", B::len(self.expert), B::len(self.token_id) * self.top_k)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<PermuteMap<B>> {
        let &Self { num_groups, align, capacity, num_slots, .. } = self;
        let (start, len, row_id) = (b.alloc(num_groups + 1)?, b.alloc(num_groups)?, b.alloc(capacity)?);
        let (source_row, row_slot) = (b.alloc(capacity)?, b.alloc(capacity)?);
        let slot_row = b.alloc(num_slots)?;
        let groups = Groups { start, len, row_id, num_groups, align, capacity, rows_each: None };
        let occupancy = Occupancy { found: b.alloc(2)?, num_slots, capacity };
        Ok(PermuteMap { groups, source_row, row_slot, slot_row, num_slots, occupancy })
    }
}

/// Copies received rows, with their codes and scales, into expert-sorted order. Padding rows get code 0 and scale byte 0 (2⁻¹²⁶ for F32
/// scales); in a plain tensor, padding rows are zeros.
#[derive(Debug)]
pub struct Permute<'a, B: Backend> {
    /// The received rows, plain or with blocks along the rows.
    pub rows: &'a Operand<B>,
    /// The permutation.
    pub map: &'a PermuteMap<B>,
}

impl<B: Backend> Permute<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the buffers.
    pub fn check(&self) -> Result<()> {
        check_rows("permute", self.rows)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Operand<B>> {
        self.rows.row_kind().unwritten(b, self.map.groups.capacity)
    }
}

/// Checks that rows can be moved one by one.
fn check_rows<B: Backend>(op: &'static str, rows: &Operand<B>) -> Result<()> {
    if let Operand::Block(q) = rows {
        check_planes(op, q)?;
        expect_eq(op, "rows.axis", q.axis, nibble_formats::BlockAxis::Row)?;
    }
    Ok(())
}

/// Copies expert-sorted rows, with their codes and scales, back into (received token, slot) order: one row per slot, without padding,
/// `[num_slots, cols]`.
#[derive(Debug)]
pub struct Unpermute<'a, B: Backend> {
    /// Expert-sorted rows `[capacity, cols]`: plain or with blocks along the rows.
    pub rows: &'a Operand<B>,
    /// The permutation.
    pub map: &'a PermuteMap<B>,
}

impl<B: Backend> Unpermute<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the buffers, and the number of rows.
    pub fn check(&self) -> Result<()> {
        check_rows("unpermute", self.rows)?;
        expect_eq("unpermute", "rows", self.rows.rows(), self.map.groups.capacity)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Operand<B>> {
        self.rows.row_kind().unwritten(b, self.map.num_slots)
    }
}

/// `out[i] = values[index[i]]`, 0 if the index is negative. The op permutes gate weights to expert-sorted rows, and the gradients of gate
/// weights back to slots.
#[derive(Debug)]
pub struct GatherScalars<'a, B: Backend> {
    /// Source values.
    pub values: &'a B::Buf<f32>,
    /// Index of each result's source.
    pub index: &'a B::Buf<i32>,
}

impl<B: Backend> GatherScalars<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Always succeeds, because indices are on the device and come from a [`PermuteMap`].
    pub fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<f32>> {
        b.alloc(B::len(self.index))
    }
}

/// Sums the `top_k` rows of each token in F32, in slot order from slot 0's row, and rounds the sum once to the rows' type. The result has
/// the shape `[t, d]`.
#[derive(Debug)]
pub struct CombineSlots<'a, B: Backend> {
    /// The rows: one per (token, slot), unless `index` is given.
    pub rows: &'a Tensor<B>,
    /// The row of each (token, slot); slots without a row count as zeros. The result is that of [`Unpermute`] or [`PackRows`] followed by
    /// this sum, without writing the intermediate rows.
    pub index: Option<&'a B::Buf<i32>>,
    /// A tensor that is added to the rounded sums. The result is rounded again and has the same bits as [`Add`](crate::ops::Add).
    pub plus: Option<&'a Tensor<B>>,
    /// Number of slots per token.
    pub top_k: usize,
}

impl<'a, B: Backend> CombineSlots<'a, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// A combine of all rows, in the order of the slots.
    pub fn new(rows: &'a Tensor<B>, top_k: usize) -> Self {
        Self { rows, index: None, plus: None, top_k }
    }

    /// Checks rows.
    pub fn check(&self) -> Result<()> {
        let (argument, slots) = match self.index {
            Some(index) => ("index.len()", B::len(index)),
            None => ("rows", self.rows.rows),
        };
        if self.top_k == 0 || !slots.is_multiple_of(self.top_k) {
            let expected = format!("a multiple of top_k = {}", self.top_k);
            return Err(Error::shape("combine_slots", argument, slots, expected));
        }
        if let Some(plus) = self.plus {
            expect_eq("combine_slots", "shape of plus", plus.shape(), (self.tokens(), self.rows.cols))?;
            expect_eq("combine_slots", "type of plus", plus.dtype(), self.rows.dtype())?;
        }
        Ok(())
    }

    /// Number of tokens. Call `check` first.
    pub fn tokens(&self) -> usize {
        self.index.map_or(self.rows.rows, B::len) / self.top_k
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        Tensor::unwritten(b, self.rows.dtype(), self.tokens(), self.rows.cols)
    }
}

/// Writes the rows given by `index` as records for an all-to-all: codes ‖ scales ‖ tensor scale if there is one ‖ zeros to a multiple of 16
/// bytes ([`RowKind::row_bytes`]). A negative index gives a record of zeros.
#[derive(Debug)]
pub struct PackRows<'a, B: Backend> {
    /// The rows, plain or with blocks along the rows.
    pub rows: &'a Operand<B>,
    /// The index of each record's row.
    pub index: &'a B::Buf<i32>,
}

impl<B: Backend> PackRows<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the buffers.
    pub fn check(&self) -> Result<()> {
        match self.rows {
            Operand::Plain(_) => Ok(()),
            Operand::Block(q) => {
                q.check_rows_travel("pack_rows", "rows")?;
                check_planes("pack_rows", q)
            }
        }
    }

    /// Allocates the records, zeroed if they are padded. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<u8>> {
        let kind = self.rows.row_kind();
        let len = B::len(self.index).checked_mul(kind.row_bytes());
        let len = len.ok_or_else(|| {
            Error::shape("pack_rows", "index.len()", B::len(self.index), "a buffer that fits the memory")
        })?;
        if kind.is_padded() { b.zeros(len) } else { b.alloc(len) }
    }
}

/// The inverse of [`PackRows`]: converts records to rows.
#[derive(Debug)]
pub struct UnpackRows<'a, B: Backend> {
    /// The records, one after the other.
    pub bytes: &'a B::Buf<u8>,
    /// The layout of a record.
    pub kind: RowKind,
}

impl<B: Backend> UnpackRows<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the length.
    pub fn check(&self) -> Result<()> {
        check_messages("unpack_rows", B::len(self.bytes), self.kind)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Operand<B>> {
        self.kind.unwritten(b, B::len(self.bytes) / self.kind.row_bytes())
    }
}

/// Checks that the bytes are whole records of this layout.
fn check_messages(op: &'static str, bytes: usize, kind: RowKind) -> Result<()> {
    if kind.cols == 0 {
        return Err(Error::shape(op, "kind.cols", 0, "at least 1"));
    }
    kind.check_rule(op)?;
    expect_eq(op, "bytes modulo the record's length", bytes % kind.row_bytes(), 0)
}

/// [`UnpackRows`], then [`Permute`], without writing the intermediate rows.
#[derive(Debug)]
pub struct UnpackPermute<'a, B: Backend> {
    /// The records, one after the other.
    pub bytes: &'a B::Buf<u8>,
    /// The layout of a record.
    pub kind: RowKind,
    /// The permutation.
    pub map: &'a PermuteMap<B>,
}

impl<B: Backend> UnpackPermute<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the length.
    pub fn check(&self) -> Result<()> {
        check_messages("unpack_permute", B::len(self.bytes), self.kind)
    }

    /// Number of records. Call `check` first.
    pub fn messages(&self) -> usize {
        B::len(self.bytes) / self.kind.row_bytes()
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Operand<B>> {
        self.kind.unwritten(b, self.map.groups.capacity)
    }
}
