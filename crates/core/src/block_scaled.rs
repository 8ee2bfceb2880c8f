//! Block-scaled tensors: a buffer of codes and a buffer of scales, with an axis.
//!
//! | axis | blocks run along | read by |
//! |---|---|---|
//! | `Row` | rows | fprop and dgrad, as activations and gradients; saved and dispatched rows |
//! | `Col` | columns, stored transposed | wgrad, both operands: its contraction runs down the rows, which are contiguous here |
//! | `Tile` | both: 2-D blocks | weights: one tensor for fprop, its transpose for dgrad. Formats without 2-D blocks use `Row` for both |
//!
//! * If a code is shorter than a byte, several codes are packed into a byte, starting at the lowest bit. Each row of codes (each column for
//!   `Col`) begins at a byte boundary.
//! * A row or column that ends inside a block is extended by zeros. `Col` stores these zeros, because it rounds the number of rows up to
//!   whole blocks.
//! * Some formats have one scale per row (`e4m3-row`). With `Col`, these formats have one scale per column and group of rows (an expert, or
//!   a shard of dense tokens), so ranks need not agree on a scale. This scale is stored once per 128 rows, because groups begin at
//!   multiples of 128; products read it as the scale of a block of 128 rows.
//! * A block that holds a NaN or an infinity has a NaN scale and zero codes, and quantization counts such blocks. Formats without block
//!   scales mark the tensor's scale instead.
//! * A tensor that only products read may hold lifted or decoded numbers in place of codes (`Taken`). Every other op returns an error for
//!   such a tensor. Tensors that are saved for the backward pass or sent to another rank always have codes.

use crate::ops::{Stored, Taken};
use crate::{Backend, DType, Error, Result, Tensor};
use nibble_formats::{BlockAxis, Format, Scale, ScaleKind, ScaleLayout, ScalePlane, ScaleRule};

/// A quantized matrix, which consists of codes and scales. The represented matrix is row-major and has the shape `[rows, cols]`.
///
/// * `Row`: codes `[rows][cols]`, scales `[rows][⌈cols/block⌉]`.
/// * `Col`: stored transposed, codes `[cols][capacity]`, scales `[cols][⌈capacity/block⌉]`, so that the contraction down the rows is
///   contiguous. For this axis, the field `rows` is the capacity. In a format with one scale per row, a column has one scale per group of
///   rows, or a single scale if there are no groups. Such a scale is stored repeatedly, once per 128 rows ([`Format::record_len`]).
/// * `Tile`: codes `[rows][cols]`, scales `[⌈rows/block⌉][⌈cols/block⌉]`.
///
/// If a code is shorter than a byte, several codes are packed into a byte, starting at the lowest bit. The scales of a block are stored
/// together as a record of [`ScaleKind::bytes`] bytes, whatever types they have. A tensor may contain a stack of `stack` matrices of equal
/// size, such as expert weights. No block contains values of two matrices, and the scales of the axis `Tile` are
/// `[stack][⌈rows/stack/block⌉][⌈cols/block⌉]`.
#[derive(Debug, Clone)]
pub struct BlockScaled<B: Backend> {
    /// The element format and block length.
    pub format: Format,
    /// The direction along which a block runs.
    pub axis: BlockAxis,
    /// The rule by which the scales were chosen. The rule and the format together determine the type of the scales
    /// ([`BlockScaled::scale_kind`]).
    pub rule: ScaleRule,
    /// The number of rows of the logical (untransposed) matrix, counted over all matrices of the stack.
    pub rows: usize,
    /// The number of columns of the logical (untransposed) matrix.
    pub cols: usize,
    /// The number of stacked matrices, which is 1 for activations.
    pub stack: usize,
    /// The codes.
    pub codes: B::Buf<u8>,
    /// The scales, as bytes.
    pub scales: B::Buf<u8>,
    /// The tensor scale of each row of the logical matrix, for formats with tensor scales ([`ScaleKind::has_tensor_scale`]). Rows that were
    /// quantized together have the same tensor scale. In an all-to-all, each row is sent with its tensor scale.
    pub tensor_scale: Option<B::Buf<f32>>,
    /// The layout of the scales. The scales of row blocks and of 2-D blocks are row-major, so that each row can be copied together with its
    /// scales. The scales of column blocks have the layout that the products of the backend read fastest.
    pub scale_layout: ScaleLayout,
    /// The number n such that, with the axis `Col`, every aligned run of n columns has identical scales. Columns that were converted from
    /// row blocks have this property. Products run faster if this number is known. The value 1 means that no columns are known to have
    /// identical scales.
    pub shared_cols: usize,
    /// The form of the numbers that `codes` contains. The buffer contains codes, unless only products read the tensor
    /// ([`only_for`](crate::ops::Quantize::only_for)). If the numbers are lifted, `scales` contains the scales of [`Format::LIFTED`]. If
    /// the numbers are decoded, `scales` contains the scales of the original codes.
    pub taken: Taken,
}

impl<B: Backend> BlockScaled<B> {
    /// Allocates a tensor that the next operation overwrites. The argument `rows` is the number of rows of all `stack` matrices together.
    ///
    /// # Errors
    /// The backend's error if it is out of memory.
    pub fn unwritten(
        b: &B,
        stored: (Format, ScaleRule),
        axis: BlockAxis,
        shape: (usize, usize, usize),
    ) -> Result<Self> {
        Self::unwritten_as(b, stored, axis, shape, Taken::AsIs)
    }

    /// Like [`BlockScaled::unwritten`], for a tensor whose numbers have the form `taken`. With [`Taken::Lifted`], the format must be one
    /// that products convert to E4M3. With [`Taken::Decoded`], blocks must run along rows or columns.
    ///
    /// # Errors
    /// The backend's error if it is out of memory.
    pub fn unwritten_as(
        b: &B,
        (format, rule): (Format, ScaleRule),
        axis: BlockAxis,
        (rows, cols, stack): (usize, usize, usize),
        taken: Taken,
    ) -> Result<Self> {
        let kind = format.scale_kind(rule);
        let scale_layout = match axis {
            BlockAxis::Col => b.kind().column_scales(),
            BlockAxis::Row | BlockAxis::Tile => ScaleLayout::RowMajor,
        };
        // A GPU writes no tensor scales for rows without columns.
        let tensor_scale = || if cols == 0 { b.upload(&vec![1.0; rows]) } else { b.alloc(rows) };
        let stored = Stored { format, rule, axis };
        let [codes, scales] = stored.plane_bytes((rows, cols, stack), taken, scale_layout);
        Ok(Self {
            format,
            axis,
            rule,
            rows,
            cols,
            stack,
            codes: b.alloc(codes)?,
            scales: b.alloc(scales)?,
            tensor_scale: kind.has_tensor_scale().then(tensor_scale).transpose()?,
            scale_layout,
            shared_cols: 1,
            taken,
        })
    }

    /// The expected number of bytes of the codes and of the scales, computed from the shape and from the form of the numbers.
    pub fn expected_bytes(&self) -> [usize; 2] {
        Stored::block(self).plane_bytes((self.rows, self.cols, self.stack), self.taken, self.scale_layout)
    }

    /// Returns an error for a tensor without codes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the tensor holds lifted or decoded numbers instead of codes.
    pub fn check_has_codes(&self, op: &'static str) -> Result<()> {
        if self.taken == Taken::AsIs {
            return Ok(());
        }
        Err(Error::unsupported(
            op,
            self.format,
            "it was quantized for products alone, as numbers that they take: its codes are not there",
        ))
    }

    /// The number of bytes of the codes of a matrix with this format, axis and shape.
    pub fn code_bytes(format: Format, axis: BlockAxis, rows: usize, cols: usize) -> usize {
        code_bytes(format, axis, (rows, cols))
    }

    /// The number of rows and columns of the matrix of scales for this format, axis and shape. The matrix of scales has one row per row of
    /// codes and one column per block along a row. With the axis `Tile`, it has one row per row of 2-D blocks.
    pub fn scale_shape(
        format: Format,
        axis: BlockAxis,
        rows: usize,
        cols: usize,
        stack: usize,
    ) -> (usize, usize) {
        scale_shape(format, axis, (rows, cols, stack))
    }

    /// Number of scales for this format, axis and shape, in a layout without padding.
    pub fn num_scales(format: Format, axis: BlockAxis, rows: usize, cols: usize, stack: usize) -> usize {
        let (lines, blocks) = Self::scale_shape(format, axis, rows, cols, stack);
        lines * blocks
    }

    /// The number of rows and columns of the matrix of scales.
    pub fn shape_of_scales(&self) -> (usize, usize) {
        Self::scale_shape(self.format, self.axis, self.rows, self.cols, self.stack)
    }

    /// The number of bytes of the codes and the scales together.
    pub fn bytes(&self) -> usize {
        let tensor_scale = self.tensor_scale.as_ref().map_or(0, |s| size_of::<f32>() * B::len(s));
        B::len(&self.codes) + B::len(&self.scales) + tensor_scale
    }

    /// The kinds of scales that each block has, which are stored together as its record.
    pub fn scale_kind(&self) -> ScaleKind {
        self.format.scale_kind(self.rule)
    }

    /// Copies the scales of all blocks to the host, line by line, whatever their layout on the device.
    ///
    /// # Errors
    /// [`Error::Shape`] if the size of the buffer does not fit the layout, and any error of the backend.
    pub fn scales_by_line(&self, b: &B) -> Result<Vec<u8>> {
        self.check_has_codes("scales")?;
        let bytes = b.download(&self.scales)?;
        if bytes.len() != self.scale_bytes() {
            return Err(Error::shape("scales", "scales", bytes.len(), self.scale_bytes()));
        }
        if self.scale_layout == ScaleLayout::RowMajor {
            return Ok(bytes);
        }
        let (each, (lines, blocks)) = (self.scale_kind().bytes(), self.shape_of_scales());
        let at = |i| each * self.scale_layout.offset(i / blocks, i % blocks, lines, blocks, each);
        Ok((0..lines * blocks).flat_map(|i| &bytes[at(i)..][..each]).copied().collect())
    }

    /// Copies the scale records of all blocks to the host, and returns them row by row, whatever their layout on the device. A scale that
    /// is NaN is returned with the bits of [`ScaleKind::nan`].
    ///
    /// # Errors
    /// The errors of [`BlockScaled::scales_by_line`].
    pub fn records(&self, b: &B) -> Result<Vec<Scale>> {
        let (kind, (lines, blocks)) = (self.scale_kind(), self.shape_of_scales());
        let plane = ScalePlane { kind, bytes: &self.scales_by_line(b)? };
        let record = |i| plane.get(i);
        Ok((0..lines * blocks).map(record).map(|s| if kind.is_nan(s) { kind.nan() } else { s }).collect())
    }

    /// The number of bytes of the scales, including the padding of their layout.
    pub fn scale_bytes(&self) -> usize {
        self.expected_bytes()[1]
    }

    /// A number that identifies the allocation that contains the codes.
    pub fn buffer_id(&self) -> u64 {
        B::buffer_id(&self.codes)
    }

    /// Checks that single rows can be sent to another rank, which requires that each row consists of whole blocks with their scales.
    ///
    /// # Errors
    /// [`Error::Shape`] with the name `argument` if blocks do not run along rows, and [`Error::Unsupported`] if the scales are not
    /// row-major.
    pub fn check_rows_travel(&self, op: &'static str, argument: &'static str) -> Result<()> {
        self.check_has_codes(op)?;
        if self.axis != BlockAxis::Row {
            let got = format!("blocks along {}", self.axis);
            return Err(Error::shape(op, argument, got, "blocks along the row"));
        }
        if self.scale_layout != ScaleLayout::RowMajor {
            let why = format!(
                "its scales are {}, and rows move with theirs: write them row-major",
                self.scale_layout
            );
            return Err(Error::unsupported(op, self.format, why));
        }
        Ok(())
    }

    /// The bytes of the scales, if the scales are E8M0.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the scales are not E8M0, because other scales have no exponent to shift by.
    pub fn e8m0_scales(&self, op: &'static str) -> Result<&B::Buf<u8>> {
        if self.scale_kind() == ScaleKind::E8M0 {
            return Ok(&self.scales);
        }
        Err(Error::unsupported(
            op,
            self.format,
            "its scales are not powers of two, and this conversion shifts exponents: use a power-of-two scale rule",
        ))
    }
}

fn code_bytes(format: Format, axis: BlockAxis, (rows, cols): (usize, usize)) -> usize {
    match axis {
        BlockAxis::Row | BlockAxis::Tile => rows * format.row_code_bytes(cols),
        BlockAxis::Col => cols * format.row_code_bytes(rows),
    }
}

fn scale_shape(
    format: Format,
    axis: BlockAxis,
    (rows, cols, stack): (usize, usize, usize),
) -> (usize, usize) {
    let block = format.record_len(axis);
    match axis {
        BlockAxis::Row => (rows, cols.div_ceil(block)),
        BlockAxis::Col => (cols, rows.div_ceil(block)),
        BlockAxis::Tile => (stack * (rows / stack.max(1)).div_ceil(block), cols.div_ceil(block)),
    }
}

impl Stored {
    /// Bytes of codes and of scales for `stack` matrices, in the form `taken` and with the scale layout `layout`. Decoded numbers are
    /// row-major BF16, whatever the axis, and keep the scales of their codes.
    pub fn plane_bytes(
        self,
        (rows, cols, stack): (usize, usize, usize),
        taken: Taken,
        layout: ScaleLayout,
    ) -> [usize; 2] {
        let of_codes = match taken {
            Taken::AsIs | Taken::Decoded => self,
            Taken::Lifted => self.lifted(),
        };
        let Self { format, rule, axis } = of_codes;
        let codes = match taken {
            Taken::AsIs | Taken::Lifted => code_bytes(format, axis, (rows, cols)),
            Taken::Decoded => rows * cols * DType::Bf16.size_bytes(),
        };
        let (lines, blocks) = scale_shape(format, axis, (rows, cols, stack));
        let bytes = format.scale_kind(rule).bytes();
        [codes, layout.len(lines, blocks, bytes) * bytes]
    }
}

/// An argument of a product or a permutation: plain or block-scaled rows. A clone shares the buffers.
#[derive(Debug, Clone)]
pub enum Operand<B: Backend> {
    /// A tensor of F32 or BF16.
    Plain(Tensor<B>),
    /// A quantized tensor.
    Block(BlockScaled<B>),
}

impl<B: Backend> Operand<B> {
    /// Rows of the logical matrix.
    pub fn rows(&self) -> usize {
        match self {
            Self::Plain(t) => t.rows,
            Self::Block(q) => q.rows,
        }
    }

    /// Columns of the logical matrix.
    pub fn cols(&self) -> usize {
        match self {
            Self::Plain(t) => t.cols,
            Self::Block(q) => q.cols,
        }
    }

    /// Bytes of the elements, or of the codes and scales.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Plain(t) => t.bytes(),
            Self::Block(q) => q.bytes(),
        }
    }

    /// Identity of the buffer of elements or codes.
    pub fn buffer_id(&self) -> u64 {
        match self {
            Self::Plain(t) => t.buffer_id(),
            Self::Block(q) => q.buffer_id(),
        }
    }

    /// The format.
    pub fn format(&self) -> Format {
        match self {
            Self::Plain(t) => match t.dtype() {
                DType::F32 => Format::F32,
                DType::Bf16 => Format::Bf16,
            },
            Self::Block(q) => q.format,
        }
    }

    /// The plain tensor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the operand is quantized.
    pub fn plain(&self, op: &'static str) -> Result<&Tensor<B>> {
        match self {
            Self::Plain(t) => Ok(t),
            Self::Block(q) => Err(Error::unsupported(op, q.format, "it takes F32 or BF16 here")),
        }
    }

    /// The quantized tensor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the operand is plain.
    pub fn block(&self, op: &'static str) -> Result<&BlockScaled<B>> {
        match self {
            Self::Plain(_) => {
                Err(Error::unsupported(op, self.format(), "it takes a block-scaled operand here"))
            }
            Self::Block(q) => Ok(q),
        }
    }

    /// The layout of one row in an all-to-all.
    pub fn row_kind(&self) -> RowKind {
        match self {
            Self::Plain(t) => RowKind { format: self.format(), rule: ScaleRule::Amax, cols: t.cols },
            Self::Block(q) => RowKind { format: q.format, rule: q.rule, cols: q.cols },
        }
    }
}

impl Stored {
    /// The layout of an operand's rows in an all-to-all.
    pub fn of<B: Backend>(x: &Operand<B>) -> Self {
        match x {
            Operand::Plain(x) => Self::plain(x.dtype()),
            Operand::Block(q) => Self::block(q),
        }
    }

    /// The layout of a quantized matrix's rows in an all-to-all.
    pub fn block<B: Backend>(x: &BlockScaled<B>) -> Self {
        Self { format: x.format, rule: x.rule, axis: x.axis }
    }
}

/// The layout of one row in an all-to-all. A row consists of its codes, its scales, its tensor scale if there is one, and padding to a
/// multiple of 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowKind {
    /// The plain or block format of the row. Blocks run along the row.
    pub format: Format,
    /// The scale rule, which determines the type of the scales. The scale rule is ignored for plain formats.
    pub rule: ScaleRule,
    /// Number of elements of a row.
    pub cols: usize,
}

impl RowKind {
    /// Checks that the scale rule is one of the rules of the format.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the format does not have this scale rule.
    pub fn check_rule(&self, op: &'static str) -> Result<()> {
        if self.format.is_block() && !self.format.spec().rules.contains(&self.rule) {
            let why = format!("it has no scale rule `{}`", self.rule);
            return Err(Error::unsupported(op, self.format, why));
        }
        Ok(())
    }

    /// The kinds of scales that each block has, which are stored together as its record.
    pub fn scale_kind(&self) -> ScaleKind {
        if self.format.is_block() { self.format.scale_kind(self.rule) } else { ScaleKind::NONE }
    }

    /// Allocates `rows` rows of this layout, which the next operation overwrites.
    ///
    /// # Errors
    /// The backend's error if it is out of memory.
    pub fn unwritten<B: Backend>(&self, b: &B, rows: usize) -> Result<Operand<B>> {
        let plain = |dtype| Tensor::unwritten(b, dtype, rows, self.cols).map(Operand::Plain);
        match self.format {
            Format::F32 => plain(DType::F32),
            Format::Bf16 => plain(DType::Bf16),
            format => {
                let stored = (format, self.rule);
                BlockScaled::unwritten(b, stored, BlockAxis::Row, (rows, self.cols, 1)).map(Operand::Block)
            }
        }
    }

    /// Whether a row of this layout ends with padding.
    pub fn is_padded(&self) -> bool {
        self.row_bytes() != self.code_bytes() + self.scale_bytes() + self.tensor_scale_bytes()
    }

    /// Creates rows of a block format from these codes and scales.
    pub fn block_rows<B: Backend>(
        &self,
        rows: usize,
        codes: B::Buf<u8>,
        scales: B::Buf<u8>,
        tensor_scale: Option<B::Buf<f32>>,
    ) -> BlockScaled<B> {
        BlockScaled {
            format: self.format,
            axis: BlockAxis::Row,
            rule: self.rule,
            rows,
            cols: self.cols,
            stack: 1,
            codes,
            scales,
            tensor_scale,
            scale_layout: ScaleLayout::RowMajor,
            shared_cols: 1,
            taken: Taken::AsIs,
        }
    }

    /// Bytes of a row's codes or plain elements.
    pub fn code_bytes(&self) -> usize {
        self.format.row_code_bytes(self.cols)
    }

    /// Bytes of the scales of a row's blocks.
    pub fn scale_bytes(&self) -> usize {
        self.scale_kind().bytes() * self.format.scales_per_row(self.cols)
    }

    /// Bytes of a row's tensor scale.
    pub fn tensor_scale_bytes(&self) -> usize {
        if self.scale_kind().has_tensor_scale() { size_of::<f32>() } else { 0 }
    }

    /// Bytes of the whole row with its padding, a multiple of 16.
    pub fn row_bytes(&self) -> usize {
        (self.code_bytes() + self.scale_bytes() + self.tensor_scale_bytes()).next_multiple_of(16)
    }
}
