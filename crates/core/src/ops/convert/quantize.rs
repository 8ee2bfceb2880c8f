use crate::error::expect_eq;
use crate::ops::convert::random::{Hadamard, Random, check_step};
use crate::ops::products::numbers::{Numbers, Taken};
use crate::{Agreement, Backend, BlockScaled, DType, Error, Groups, Operand, Result, Tensor};
use nibble_formats::{BlockAxis, Codec, Correction, Format, ScaleRule};

/// Which block-scaled tensors of a matrix to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planes {
    /// Blocks along the rows.
    Rows,
    /// Blocks down the columns, stored transposed.
    Cols,
    /// Row blocks and column blocks, from one read of the matrix.
    Both,
    /// The two tensors of a weight, one as it is and one transposed: in 2-D blocks if the format has them, otherwise in blocks along the
    /// rows of each tensor, which may be the rows of 2-D blocks ([`nibble_formats::BlockShape`]).
    Tiles,
}

/// Counts of blocks in a conversion, as three numbers on the device: blocks with a non-zero code, inexact blocks among these, and blocks
/// with a NaN or infinity. Padding is not counted.
#[derive(Debug, Clone)]
pub struct Counts<B: Backend>(pub B::Buf<u64>);

impl<B: Backend> Counts<B> {
    /// The element of [`Counts`] with this index is the number of blocks with a non-zero code.
    pub const NON_ZERO: usize = 0;
    /// The element of [`Counts`] with this index is the number of blocks in which the conversion changed the value of a non-zero code.
    pub const INEXACT: usize = 1;
    /// The element of [`Counts`] with this index is the number of blocks that are marked NaN.
    pub const NON_FINITE: usize = 2;

    /// Allocates zeroed counts.
    pub fn zeros(b: &B) -> Result<Self> {
        b.counters(3).map(Self)
    }
}

/// The form in which a fused kernel writes its result: plain or quantized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Emit {
    /// The result has plain elements of this type.
    Plain(DType),
    /// The result is quantized.
    Block {
        /// Format, scale rule and rounding.
        codec: Codec,
        /// Which block-scaled tensors to write.
        planes: Planes,
        /// The numbers that products multiply, as in [`Quantize::only_for`].
        only_for: Option<Numbers>,
    },
}

impl Emit {
    /// Requests a quantized result that any op may read.
    pub const fn block(codec: Codec, planes: Planes) -> Self {
        Self::Block { codec, planes, only_for: None }
    }

    /// The number to a multiple of which the length of quantized columns is padded; 1 if no columns are quantized.
    pub fn column_step(self) -> usize {
        match self {
            Self::Block { codec, planes: Planes::Cols | Planes::Both, .. } => codec.format().column_step(),
            Self::Block { .. } | Self::Plain(_) => 1,
        }
    }

    /// Allocates the result for a matrix `[rows, cols]`, with zeroed counts.
    pub fn result<B: Backend>(self, b: &B, rows: usize, cols: usize) -> Result<Emitted<B>> {
        self.result_with(b, (rows, cols), self.column_step())
    }

    /// [`Emit::result`] with columns padded to a multiple of `step`.
    pub(crate) fn result_with<B: Backend>(
        self,
        b: &B,
        (rows, cols): (usize, usize),
        step: usize,
    ) -> Result<Emitted<B>> {
        match self {
            Self::Plain(dtype) => Ok(Emitted::plain(Tensor::unwritten(b, dtype, rows, cols)?)),
            Self::Block { codec, planes: wanted, .. } => {
                let [rows, cols] = planes(b, (codec, wanted, Taken::AsIs), (rows, cols, 1), step)?;
                Ok(Emitted { rows, cols, counts: Some(Counts::zeros(b)?), found: None })
            }
        }
    }
}

/// Allocates the tensors for `stack` matrices. Columns are padded to a multiple of `step` rows.
fn planes<B: Backend>(
    b: &B,
    (codec, wanted, taken): (Codec, Planes, Taken),
    (rows, cols, stack): (usize, usize, usize),
    step: usize,
) -> Result<[Option<Operand<B>>; 2]> {
    let stored = (codec.format(), codec.rule());
    let plane = |axis, rows| BlockScaled::unwritten_as(b, stored, axis, (rows, cols, 1), taken);
    let row_plane = || plane(BlockAxis::Row, rows);
    let col_plane = || plane(BlockAxis::Col, rows.next_multiple_of(step));
    let made = match wanted {
        Planes::Rows => [Some(row_plane()?), None],
        Planes::Cols => [None, Some(col_plane()?)],
        Planes::Both => [Some(row_plane()?), Some(col_plane()?)],
        Planes::Tiles => weight_planes(b, stored, (rows, cols, stack))?.map(Some),
    };
    Ok(made.map(|plane| plane.map(Operand::Block)))
}

/// Allocates the two tensors of [`Planes::Tiles`] (the weight as it is, and the transposed weight) for `stack` matrices that have `rows`
/// rows in total. If the format has no 2-D blocks, each block is a part of a row of its tensor.
///
/// # Errors
/// The error that the backend reports if it is out of memory.
pub fn weight_planes<B: Backend>(
    b: &B,
    stored: (Format, ScaleRule),
    (rows, cols, stack): (usize, usize, usize),
) -> Result<[BlockScaled<B>; 2]> {
    let (axis, matrices) = if stored.0.spec().tiles { (BlockAxis::Tile, stack) } else { (BlockAxis::Row, 1) };
    let plane = |rows, cols| BlockScaled::unwritten(b, stored, axis, (rows, cols, matrices));
    Ok([plane(rows, cols)?, plane(stack * cols, rows / stack.max(1))?])
}

/// The result of an op, in the form that an [`Emit`] requested.
#[derive(Debug, Clone)]
pub struct Emitted<B: Backend> {
    /// The plain result, the tensor with blocks along rows, or the untransposed matrix in 2-D blocks.
    pub rows: Option<Operand<B>>,
    /// The tensor with blocks down columns, or the transposed matrix in 2-D blocks (a tensor of axis `Tile`).
    pub cols: Option<Operand<B>>,
    /// The counts of blocks in the conversion; `None` if the result is not quantized.
    pub counts: Option<Counts<B>>,
    /// The largest magnitudes and the number of saturated values, if the quantization uses delayed scaling ([`Quantize::delayed`]).
    pub found: Option<Found<B>>,
}

impl<B: Backend> Emitted<B> {
    /// A plain result.
    pub fn plain(x: Tensor<B>) -> Self {
        Self { rows: Some(Operand::Plain(x)), cols: None, counts: None, found: None }
    }

    /// Returns the tensor with blocks along rows, or the plain result.
    ///
    /// # Errors
    /// [`Error::Shape`] if the result has no such tensor.
    pub fn take_rows(&self, op: &'static str) -> Result<Operand<B>> {
        self.rows.clone().ok_or_else(|| Error::shape(op, "rows", "not written", "a row plane"))
    }

    /// Returns the operand of a product that sums over the rows of the matrix: the tensor with blocks down columns, or the plain result.
    ///
    /// # Errors
    /// [`Error::Shape`] if the result has no such tensor.
    pub fn take_cols(&self, op: &'static str) -> Result<Operand<B>> {
        match (&self.cols, &self.rows) {
            (Some(cols), _) => Ok(cols.clone()),
            (None, Some(rows @ Operand::Plain(_))) => Ok(rows.clone()),
            _ => Err(Error::shape(op, "cols", "not written", "a column plane")),
        }
    }
}

/// Delayed scaling: scales that are computed from the magnitudes of earlier steps ([`nibble_formats::DelayedScaling`]), for a format whose
/// only scale is a tensor scale. Each part of the matrix with its own scale (span) has one record of magnitudes. A span is a group, a
/// matrix of the stack, or the whole matrix.
#[derive(Debug)]
pub struct Delayed<'a, B: Backend> {
    /// The buffer with the records of magnitudes of many tensors.
    pub records: &'a B::Buf<f32>,
    /// The index in `records` at which the record of the first span starts.
    pub first: usize,
    /// The distance in `records` from the start of one span's record to the start of the next span's record.
    pub stride: usize,
}

impl<B: Backend> Clone for Delayed<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Delayed<'_, B> {}

/// What a quantization with delayed scaling measures: magnitudes and numbers of values, on the device.
#[derive(Debug, Clone)]
pub struct Found<B: Backend> {
    /// The largest magnitude of each span, or NaN if the span contains a NaN or an infinity.
    pub amax: B::Buf<f32>,
    /// The number of saturated values at index [`Found::SATURATED`], and the number of all values at index [`Found::VALUES`]. Padding is
    /// not counted.
    pub counts: B::Buf<u64>,
}

impl<B: Backend> Found<B> {
    /// The element of `counts` with this index is the number of finite values that saturate because they exceed the magnitude expected from
    /// earlier steps. The number is 0 if no magnitude is expected.
    pub const SATURATED: usize = 0;
    /// The element of `counts` with this index is the number of all values.
    pub const VALUES: usize = 1;
}

/// Quantizes a matrix `[rows, cols]`. A row or column whose end is inside a block is extended by zeros, so the scale of this block depends
/// only on the values of the row or column.
///
/// With `groups`, the matrix contains the rows of several groups. In each group, column blocks start at the group's first row. Rows past
/// the length of a group are padding. The op quantizes padding as zeros, and does not count it.
///
/// With `hadamard`, the op first transforms the values along the contraction: along the rows, or down the columns from the start of each
/// group. If a group ends inside a transform block, the missing rows of this block count as +0. The transform turns these zeros into
/// ordinary values. Their stochastic rounding uses the random bits of row id 0 or, without groups, the random bits of their position. Codes
/// past the last transform block are 0.
///
/// With `delayed`, [`Codec::for_tensor`] computes the scale of a span from the magnitude that the span's record expects. If the expected
/// magnitude is 0, the scale is computed from the largest magnitude in the span, as it is without `delayed`. Values above the expected
/// magnitude saturate. If a block contains a NaN or an infinity, its codes are 0, the block is counted in [`Counts::NON_FINITE`], and the
/// stored scale of its span is NaN. Other blocks of the span are still encoded, because an op that reads the matrix once cannot know of a
/// NaN in another block.
///
/// With `only_for`, a backend may write the numbers that products multiply instead of the codes ([`BlockScaled::taken`] says which of the
/// two a tensor has). A product that reads codes converts these codes to exactly the same numbers. The counts of blocks are the same in
/// either case. Only products that multiply numbers of the type `only_for` may read the result. The CPU always writes codes.
///
/// With `amax`, the matrices are shards of larger matrices, and the caller gives the largest magnitude of each larger matrix instead of
/// letting the op measure it. With `amax`, the codes and scales of a shard are the same as if the whole matrix were quantized. With both
/// `amax` and `delayed`, [`Found::amax`] contains the magnitudes that the caller gave.
#[derive(Debug)]
pub struct Quantize<'a, B: Backend> {
    /// F32 or BF16.
    pub x: &'a Tensor<B>,
    /// Format, scale rule and rounding.
    pub codec: Codec,
    /// Which block-scaled tensors to write.
    pub planes: Planes,
    /// The groups of rows, if any.
    pub groups: Option<&'a Groups<B>>,
    /// The number of matrices that are stacked in `x`. Each matrix has its own tensor scale. Stacks are allowed only for [`Planes::Tiles`]
    /// and [`Planes::Rows`].
    pub stack: usize,
    /// The random bits for stochastic rounding. Element (row, col) uses the bits at index first + row_id · cols + col of the stream, also
    /// in the transposed tensor of a weight. A scale that is rounded stochastically uses the bits at the index of its block's first
    /// element, in the stream with the purpose `Scale`.
    pub random: Option<Random<'a, B>>,
    /// A Hadamard transform before the quantization, along rows or along columns, but not both.
    pub hadamard: Option<Hadamard<'a, B>>,
    /// Delayed scaling: scales from the magnitudes of earlier steps instead of scales from the current values.
    pub delayed: Option<Delayed<'a, B>>,
    /// The largest magnitude of each matrix of the stack, for example from [`MeasureAmax`]. These magnitudes can be given only for
    /// [`Planes::Tiles`]. Each given magnitude must be at least as large as the magnitude of every value of `x` in its matrix.
    pub amax: Option<&'a B::Buf<f32>>,
    /// The type of the numbers that products multiply, if only products read the result; `None` if other ops may read the result.
    pub only_for: Option<Numbers>,
}

impl<'a, B: Backend> Quantize<'a, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// A quantization of dense rows with rounding to nearest.
    pub fn new(x: &'a Tensor<B>, codec: Codec, planes: Planes) -> Self {
        Self {
            x,
            codec,
            planes,
            groups: None,
            stack: 1,
            random: None,
            hadamard: None,
            delayed: None,
            amax: None,
            only_for: None,
        }
    }

    /// The number of spans: the groups, or the matrices of the stack. In formats with tensor scales, each span has its own scale.
    pub fn spans(&self) -> usize {
        self.groups.map_or(self.stack, |groups| groups.num_groups)
    }

    /// Checks the shapes, and that the op supports this combination of arguments.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "quantize";
        let format = self.codec.format();
        if !format.is_block() {
            return Err(Error::unsupported(OP, format, "it is not a block format; use cast"));
        }
        check_stack(OP, self.x.rows, self.stack, self.planes)?;
        if self.stack > 1 && self.groups.is_some() {
            return Err(Error::shape(OP, "stack (with groups)", self.stack, "1: groups are spans already"));
        }
        if matches!(self.planes, Planes::Cols | Planes::Both) {
            check_group_align(OP, self.groups, format)?;
        }
        check_group_rows(OP, self.groups, self.x.rows)?;
        check_random(OP, self.codec, self.random.is_some())?;
        if self.codec.scaling().is_square() && self.planes != Planes::Tiles {
            let got = format!("{:?}", self.planes);
            return Err(Error::shape(
                OP,
                "planes (with block = square)",
                got,
                "Tiles: squares are of weights",
            ));
        }
        if self.codec.scaling().correction != Correction::None && self.planes == Planes::Tiles {
            let expected = "Rows, Cols or Both: a corrected scale is of a line's values";
            return Err(Error::shape(OP, "planes (with correction)", "Tiles", expected));
        }
        let parts = self.random.map_or(0, |random| random.first).checked_rem(self.x.cols as u64);
        if parts.is_some_and(|rest| rest != 0) {
            let got = self.random.map_or(0, |random| random.first);
            return Err(Error::shape(
                OP,
                "random.first",
                got,
                format!("a multiple of the {} columns", self.x.cols),
            ));
        }
        check_step::<B>(OP, "random.step", self.random.and_then(|random| random.step))?;
        self.delayed.map_or(Ok(()), |delayed| self.check_delayed(delayed))?;
        self.amax.map_or(Ok(()), |amax| self.check_amax(amax))?;
        self.hadamard.map_or(Ok(()), |transform| self.check_hadamard(transform))
    }

    /// Checks that every span has a record, and that the format's only scale is a tensor scale.
    fn check_delayed(&self, Delayed { records, first, stride }: Delayed<'_, B>) -> Result<()> {
        const OP: &str = "quantize";
        if !self.codec.format().may_be_delayed() {
            let why = "scales of earlier steps are for formats with one scale a tensor and none beside it";
            return Err(Error::unsupported(OP, self.codec.format(), why));
        }
        if self.hadamard.is_some() {
            return Err(Error::shape(OP, "hadamard (with delayed)", "given", "none"));
        }
        if self.planes == Planes::Tiles && !self.codec.format().spec().tiles {
            let why = "its weights have no tiles: scales of earlier steps are for rows, columns and tiles";
            return Err(Error::unsupported(OP, self.codec.format(), why));
        }
        let (len, spans) = (B::len(records), self.spans());
        let place = |span: usize| span.checked_mul(stride)?.checked_add(first);
        if spans > 0 && place(spans - 1).is_none_or(|place| place >= len) {
            let expected = format!("a record for each of {spans} spans, from {first} on, {stride} apart");
            return Err(Error::shape(OP, "delayed.records", len, expected));
        }
        Ok(())
    }

    /// Checks that the format has tensor scales, and that each matrix has a magnitude.
    fn check_amax(&self, amax: &B::Buf<f32>) -> Result<()> {
        const OP: &str = "quantize";
        check_tensor_scale(OP, self.codec)?;
        if self.planes != Planes::Tiles {
            let got = format!("{:?}", self.planes);
            return Err(Error::shape(OP, "planes (with amax)", got, "Tiles: it is for parts of weights"));
        }
        expect_eq(OP, "amax.len()", B::len(amax), self.stack)
    }

    /// Checks that the transform runs along one contraction, in whole blocks.
    fn check_hadamard(&self, transform: Hadamard<'_, B>) -> Result<()> {
        const OP: &str = "quantize";
        transform.check(OP, ["hadamard.len", "hadamard.signs.purpose", "hadamard.step"])?;
        let Hadamard { len, first, .. } = transform;
        let is_first = first == 0 || self.planes == Planes::Cols && first.is_multiple_of(len as u64);
        if !is_first {
            let expected = format!("0, or along columns a multiple of the transform's {len}");
            return Err(Error::shape(OP, "hadamard.first", first, expected));
        }
        let whole = format!("a multiple of the transform's {len}");
        // Columns with blocks of 128 are extended by zeros to whole blocks, and any transform length divides 128. Groups are padded
        // already.
        let extended = self.groups.is_none() && self.codec.format().column_step() >= 128;
        match (self.planes, self.groups) {
            (Planes::Rows, _) if !self.x.cols.is_multiple_of(len) => {
                Err(Error::shape(OP, "columns of x", self.x.cols, whole))
            }
            (Planes::Cols, Some(groups)) if !groups.align.is_multiple_of(len) => {
                Err(Error::shape(OP, "groups.align", groups.align, whole))
            }
            (Planes::Cols, _) if !extended && !self.x.rows.is_multiple_of(len) => {
                Err(Error::shape(OP, "rows of x", self.x.rows, whole))
            }
            (Planes::Rows | Planes::Cols, _) => Ok(()),
            (planes @ (Planes::Both | Planes::Tiles), _) => {
                let expected = "Rows or Cols: a transform runs along the contraction of one plane";
                Err(Error::shape(OP, "planes (with hadamard)", format!("{planes:?}"), expected))
            }
        }
    }

    /// Allocates the result, with zeroed counts. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Emitted<B>> {
        self.result_as(b, Taken::AsIs)
    }

    /// Like [`Quantize::result`], for a backend that writes numbers in the form `taken`.
    pub fn result_as(&self, b: &B, taken: Taken) -> Result<Emitted<B>> {
        let made = self.uncounted_as(b, taken)?;
        Ok(Emitted { counts: Some(Counts::zeros(b)?), ..made })
    }

    /// Like [`Quantize::result_as`], but without counts, for conversions that share counters.
    pub fn uncounted_as(&self, b: &B, taken: Taken) -> Result<Emitted<B>> {
        let found = |_| -> Result<_> {
            let mut amax = b.zeros(self.spans())?;
            if let Some(known) = self.amax {
                b.copy(known, 0..self.spans(), &mut amax, 0)?;
            }
            Ok(Found { amax, counts: b.counters(2)? })
        };
        let found = self.delayed.map(found).transpose()?;
        let transform = self.hadamard.filter(|_| self.planes == Planes::Cols).map_or(1, |h| h.len);
        let step = self.codec.format().column_step().max(transform);
        let [rows, cols] =
            planes(b, (self.codec, self.planes, taken), (self.x.rows, self.x.cols, self.stack), step)?;
        Ok(Emitted { rows, cols, counts: None, found })
    }
}

/// The largest magnitude of each matrix of a stack, which determines a tensor scale. In formats whose blocks can be marked NaN, the op
/// ignores non-finite values. In other formats, a non-finite value makes the result of its matrix NaN. The result for a matrix without
/// values is 0.
#[derive(Debug)]
pub struct MeasureAmax<'a, B: Backend> {
    /// The stacked matrices, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// A codec with a tensor scale.
    pub codec: Codec,
    /// Number of matrices.
    pub stack: usize,
}

impl<B: Backend> MeasureAmax<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the stack, and that the codec has a tensor scale.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "measure_amax";
        check_tensor_scale(OP, self.codec)?;
        check_stack(OP, self.x.rows, self.stack, Planes::Tiles)
    }

    /// Allocates the result, zeroed. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<f32>> {
        b.zeros(self.stack)
    }
}

/// Dequantizes a block-scaled tensor to plain elements. The result has the logical shape `[rows, cols]`, also if the tensor is stored
/// transposed.
#[derive(Debug)]
pub struct Dequantize<'a, B: Backend> {
    /// The quantized tensor.
    pub x: &'a BlockScaled<B>,
    /// The type of the result. An F32 result is code · scale, rounded to F32. If there is a tensor scale, this number is multiplied by the
    /// tensor scale and rounded again. A BF16 result is the F32 result, rounded to nearest even.
    pub dtype: DType,
}

impl<B: Backend> Dequantize<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks the lengths of the buffers.
    pub fn check(&self) -> Result<()> {
        check_planes("dequantize", self.x)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        Tensor::unwritten(b, self.dtype, self.x.rows, self.x.cols)
    }
}

/// Checks that column blocks do not cross from one group to the next.
pub(crate) fn check_group_align<B: Backend>(
    op: &'static str,
    groups: Option<&Groups<B>>,
    format: Format,
) -> Result<()> {
    let block = format.column_step();
    match groups {
        Some(g) if g.align % block != 0 => Err(Error::shape(
            op,
            "groups.align",
            g.align,
            format!("a multiple of {format}'s block of {block}"),
        )),
        _ => Ok(()),
    }
}

/// Checks that the rows of a grouped operation are exactly as many as the groups' capacity.
pub(crate) fn check_group_rows<B: Backend>(
    op: &'static str,
    groups: Option<&Groups<B>>,
    rows: usize,
) -> Result<()> {
    match groups {
        Some(g) => expect_eq(op, "rows (against groups.capacity)", rows, g.capacity),
        None => Ok(()),
    }
}

/// Checks that a codec has a tensor scale, which all blocks of a tensor share.
fn check_tensor_scale(op: &'static str, codec: Codec) -> Result<()> {
    match codec.scale_kind().has_tensor_scale() {
        true => Ok(()),
        false => Err(Error::unsupported(op, codec.format(), "it has no scale of a tensor")),
    }
}

/// Checks that a stochastic codec has a stream of random bits.
///
/// # Errors
/// [`Error::Shape`] if there is no stream of random bits. The error says whether elements or scales are rounded stochastically.
pub fn check_random(op: &'static str, codec: Codec, is_given: bool) -> Result<()> {
    if is_given || !codec.draws() {
        return Ok(());
    }
    let expected = match codec.scaling().correction {
        Correction::None => format!("a stream: rounding is {}", codec.rounding()),
        correction => format!("a stream: scales are rounded at random by {correction}"),
    };
    Err(Error::shape(op, "random", "none", expected))
}

/// Checks that a stack holds equal matrices; only tiles and rows may be stacked.
pub(crate) fn check_stack(op: &'static str, rows: usize, stack: usize, planes: Planes) -> Result<()> {
    if stack == 0 || !rows.is_multiple_of(stack) {
        return Err(Error::shape(op, "stack", stack, format!("a divisor of the {rows} rows")));
    }
    if stack > 1 && !matches!(planes, Planes::Tiles | Planes::Rows) {
        return Err(Error::shape(op, "stack", stack, "1, unless tiles or rows are written"));
    }
    Ok(())
}

/// Checks that the tensor has codes, and that codes and scales have the lengths of its shape, format and rule.
pub(crate) fn check_planes<B: Backend>(op: &'static str, x: &BlockScaled<B>) -> Result<()> {
    x.check_has_codes(op)?;
    check_lengths(op, x)
}

/// Checks the lengths of the buffers, also for a tensor of lifted or decoded numbers.
pub(crate) fn check_lengths<B: Backend>(op: &'static str, x: &BlockScaled<B>) -> Result<()> {
    let [codes, scales] = x.expected_bytes();
    expect_eq(op, "bytes of x.codes", B::len(&x.codes), codes)?;
    expect_eq(op, "bytes of x.scales (against x.rule)", B::len(&x.scales), scales)?;
    let tensor_scale = x.tensor_scale.as_ref().map(B::len);
    let rows = x.scale_kind().has_tensor_scale().then_some(x.rows);
    expect_eq(op, "values of x.tensor_scale", tensor_scale.unwrap_or(0), rows.unwrap_or(0))
}

/// Checks the axis.
pub(crate) fn check_axis<B: Backend>(
    op: &'static str,
    argument: &'static str,
    x: &BlockScaled<B>,
    axis: BlockAxis,
) -> Result<()> {
    expect_eq(op, argument, x.axis, axis)
}
