use crate::error::expect_eq;
use crate::ops::convert::quantize::check_planes;
use crate::{Agreement, Backend, Error, Groups, Occupancy, Operand, PermuteMap, Result, RowKind, Tensor};

/// Sorts received (token, slot) pairs stably by (expert, global token, slot), and pads the group of each expert to a multiple of `align`
/// rows.
///
/// The device detects whether there are too many rows and whether `num_slots` is wrong. [`crate::Occupancy::verify`] reports both errors. A
/// backend that can read the slots on the host may report these errors immediately. Such a backend may also report experts and tokens that
/// are out of range or out of order.
#[derive(Debug)]
pub struct PlanPermute<'a, B: Backend> {
    /// The local expert of each (received token, slot), or −1 if the expert is on another rank; `tokens · top_k` values.
    pub expert: &'a B::Buf<i32>,
    /// The global index of each received token. Indices must be strictly ascending. If a token has no slot on this rank, its index does not
    /// matter.
    pub token_id: &'a B::Buf<i32>,
    /// Number of slots per token.
    pub top_k: usize,
    /// The number of (token, slot) pairs that the host expects to have an expert on this rank. If there are fewer such pairs, the last
    /// values of `slot_row` are −1, and the field `occupancy` of the result reports the difference.
    pub num_slots: usize,
    /// Number of local experts.
    pub num_groups: usize,
    /// The number of rows to a multiple of which the start of each group is aligned.
    pub align: usize,
    /// The number of rows that fit into the buffers of permuted rows.
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

/// Copies received rows into the order in which rows are sorted by expert. Quantized rows are copied with their codes and scales. In a
/// quantized tensor, padding rows get code 0 and scale byte 0, or the scale 2⁻¹²⁶ if scales are F32. In a plain tensor, padding rows are
/// zeros.
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

/// Copies rows that are sorted by expert back into the order of (received token, slot). The result has one row per slot, no padding, and
/// the shape `[num_slots, cols]`. Quantized rows are copied with their codes and scales.
#[derive(Debug)]
pub struct Unpermute<'a, B: Backend> {
    /// The rows sorted by expert, of shape `[capacity, cols]`, either plain or with blocks along the rows.
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

/// Computes `out[i] = values[index[i]]`, or 0 if the index is negative. The op brings gate weights into the order of the rows that are
/// sorted by expert, and brings the gradients of gate weights back into the order of the slots.
#[derive(Debug)]
pub struct GatherScalars<'a, B: Backend> {
    /// Source values.
    pub values: &'a B::Buf<f32>,
    /// For each element of the result, the index in `values` of the element to copy.
    pub index: &'a B::Buf<i32>,
}

impl<B: Backend> GatherScalars<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Always succeeds. Indices are not checked, because they are on the device and come from a [`PermuteMap`].
    pub fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<f32>> {
        b.alloc(B::len(self.index))
    }
}

/// Sums the `top_k` rows of each token in F32, in the order of the slots, and rounds the sum once to the type of the rows. The result has
/// the shape `[t, d]`.
#[derive(Debug)]
pub struct CombineSlots<'a, B: Backend> {
    /// The rows to sum. Without `index`, there is one row per (token, slot), in this order.
    pub rows: &'a Tensor<B>,
    /// For each (token, slot), the index of its row. A slot without a row counts as zeros. The result is the same as if [`Unpermute`] or
    /// [`PackRows`] had first brought the rows into the order of the slots, but the op does not write these intermediate rows.
    pub index: Option<&'a B::Buf<i32>>,
    /// A tensor that the op adds to the rounded sums. The result is rounded again and has the same bits as the result of
    /// [`Add`](crate::ops::Add).
    pub plus: Option<&'a Tensor<B>>,
    /// Number of slots per token.
    pub top_k: usize,
}

impl<'a, B: Backend> CombineSlots<'a, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Sums rows that are already in the order of the slots.
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

/// Writes the rows that `index` lists as records for an all-to-all. A record has codes, scales, a tensor scale if the format has one, and
/// zeros up to a multiple of 16 bytes ([`RowKind::row_bytes`]), in this order. If an index is negative, its record consists of zeros.
#[derive(Debug)]
pub struct PackRows<'a, B: Backend> {
    /// The rows, plain or with blocks along the rows.
    pub rows: &'a Operand<B>,
    /// For each record, the index of the row to write.
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

    /// Allocates the records, which are zeroed if they contain padding. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<u8>> {
        let kind = self.rows.row_kind();
        let len = B::len(self.index).checked_mul(kind.row_bytes());
        let len = len.ok_or_else(|| {
            Error::shape("pack_rows", "index.len()", B::len(self.index), "a buffer that fits the memory")
        })?;
        if kind.is_padded() { b.zeros(len) } else { b.alloc(len) }
    }
}

/// The inverse of [`PackRows`], which converts records to rows.
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

/// Applies [`UnpackRows`] and then [`Permute`] in one op, without writing the rows in between.
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
