//! Block-scaled tensors: a buffer of codes and a buffer of scales, with an axis.
//!
//! | axis | blocks run along | read by |
//! |---|---|---|
//! | `Row` | rows | fprop and dgrad, as activations and gradients; saved and dispatched rows |
//! | `Col` | columns, stored transposed | wgrad, both operands: its contraction runs down the rows, which are contiguous here |
//! | `Tile` | both: 2-D blocks | weights: one tensor for fprop, its transpose for dgrad. Formats without 2-D blocks use `Row` for both |
//!
//! * Codes of less than a byte are packed from the lowest bit on. Each row of codes (each column of `Col`) begins at a byte.
//! * A row or column that ends inside a block is extended by zeros. `Col` stores these zeros: it rounds the number of rows up to a block.
//! * Some formats have one scale per row (`e4m3-row`). In `Col` their scales are per column and group of rows: an expert, or a shard of
//!   dense tokens. So ranks need not agree on a scale. The scale is written once per 128 rows, because groups begin at multiples of 128;
//!   products read it as that of a block of 128.
//! * A block that holds a NaN or an infinity has a NaN scale and zero codes, and is counted. Formats without block scales mark the
//!   tensor's scale.
//! * A tensor that only products read may hold what those products take in place of codes (`Taken`). Every other op refuses such a tensor
//!   by name. What is saved for the backward pass or sent to another rank always has codes.

use crate::ops::{Stored, Taken};
use crate::{Backend, DType, Error, Result, Tensor};
use nibble_formats::{BlockAxis, Format, Scale, ScaleKind, ScaleLayout, ScalePlane, ScaleRule};

/// A quantized matrix: a plane of codes and a plane of scales of a logical row-major X `[rows, cols]`.
///
/// * `Row`: codes `[rows][cols]`, scales `[rows][⌈cols/block⌉]`.
/// * `Col`: stored transposed, codes `[cols][capacity]`, scales `[cols][⌈capacity/block⌉]`, so that the contraction
///   down the rows is contiguous. `rows` is the row capacity. Where a line has one scale, a column has one for each group of rows (for all
///   where there are none), written for each 128 of them ([`Format::record_len`]).
/// * `Tile`: codes `[rows][cols]`, scales `[⌈rows/block⌉][⌈cols/block⌉]`.
///
/// Codes of less than a byte lie one after the other from the lowest bit on. A block's scales are a record of
/// [`ScaleKind::bytes`] bytes, whatever they are made of. `stack` equal matrices may lie one under the
/// other (expert weights): blocks never cross from one to the next, and `Tile` scales are
/// `[stack][⌈rows/stack/block⌉][⌈cols/block⌉]`.
#[derive(Debug, Clone)]
pub struct BlockScaled<B: Backend> {
    /// The element format and block length.
    pub format: Format,
    /// Along what a block runs.
    pub axis: BlockAxis,
    /// How the scales were chosen; with the format, what they are ([`BlockScaled::scale_kind`]).
    pub rule: ScaleRule,
    /// Rows of the logical matrix, all matrices of the stack together.
    pub rows: usize,
    /// Columns of the logical matrix.
    pub cols: usize,
    /// Matrices stacked; 1 for activations.
    pub stack: usize,
    /// The codes.
    pub codes: B::Buf<u8>,
    /// The scales, as bytes.
    pub scales: B::Buf<u8>,
    /// Where blocks share one more scale ([`ScaleKind::has_tensor_scale`]): that of each row of the logical matrix. Rows that were
    /// quantized together have the same, and take it along where they travel.
    pub tensor_scale: Option<B::Buf<f32>>,
    /// The order of the scales: those of rows and tiles are row-major, so that they travel with their rows; those of columns lie as the
    /// backend's products read them best.
    pub scale_layout: ScaleLayout,
    /// Of columns: so many neighbours, from every multiple of it on, have the same scales, as those made of blocks along rows do;
    /// products that know it are faster. 1 where nothing is known.
    pub shared_cols: usize,
    /// In what form its numbers lie in `codes`: not as codes where nothing but products reads it ([`Quantize::only_for`](crate::ops::Quantize::only_for)).
    /// Lifted ones have the scales of [`Format::LIFTED`] in `scales`, decoded ones those that their codes had.
    pub taken: Taken,
}

impl<B: Backend> BlockScaled<B> {
    /// A tensor whose planes the next operation overwrites. `rows` are those of all `stack` matrices.
    ///
    /// # Errors
    /// What the backend returns where it has no memory left.
    pub fn unwritten(
        b: &B,
        stored: (Format, ScaleRule),
        axis: BlockAxis,
        shape: (usize, usize, usize),
    ) -> Result<Self> {
        Self::unwritten_as(b, stored, axis, shape, Taken::AsIs)
    }

    /// The same in the form that products take. For a format that they lift, [`Taken::Lifted`]; for [`Taken::Decoded`] one whose blocks run along
    /// lines.
    ///
    /// # Errors
    /// What the backend returns where it has no memory left.
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
        // Of rows without values a GPU writes nothing.
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

    /// Bytes of its planes of codes and of scales, as they follow from its shape and form.
    pub fn expected_bytes(&self) -> [usize; 2] {
        Stored::block(self).plane_bytes((self.rows, self.cols, self.stack), self.taken, self.scale_layout)
    }

    /// Whether its codes are there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if they lie in the form that products take.
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

    /// Bytes of the code plane for this format, axis and shape.
    pub fn code_bytes(format: Format, axis: BlockAxis, rows: usize, cols: usize) -> usize {
        code_bytes(format, axis, (rows, cols))
    }

    /// Rows and columns of the matrix of scales for this format, axis and shape: lines of codes (of `Tile`: tiles down all
    /// matrices), and blocks of a line.
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

    /// Rows and columns of the matrix of its codes' scales.
    pub fn shape_of_scales(&self) -> (usize, usize) {
        Self::scale_shape(self.format, self.axis, self.rows, self.cols, self.stack)
    }

    /// Bytes of codes and scales together.
    pub fn bytes(&self) -> usize {
        let tensor_scale = self.tensor_scale.as_ref().map_or(0, |s| size_of::<f32>() * B::len(s));
        B::len(&self.codes) + B::len(&self.scales) + tensor_scale
    }

    /// What a block's record of scales holds.
    pub fn scale_kind(&self) -> ScaleKind {
        self.format.scale_kind(self.rule)
    }

    /// The records of scales on the host, line after line whatever their layout. A NaN's bits are those of [`ScaleKind::nan`].
    ///
    /// # Errors
    /// [`Error::Shape`] if the plane does not have the bytes that its layout asks for; what the backend reports.
    pub fn records(&self, b: &B) -> Result<Vec<Scale>> {
        self.check_has_codes("records")?;
        let (kind, (lines, blocks)) = (self.scale_kind(), self.shape_of_scales());
        let bytes = b.download(&self.scales)?;
        if bytes.len() != self.scale_bytes() {
            return Err(Error::shape("records", "scales", bytes.len(), self.scale_bytes()));
        }
        let plane = ScalePlane { kind, bytes: &bytes };
        let at = |i| self.scale_layout.offset(i / blocks, i % blocks, lines, blocks, kind.bytes());
        let record = |i| plane.get(at(i));
        Ok((0..lines * blocks).map(record).map(|s| if kind.is_nan(s) { kind.nan() } else { s }).collect())
    }

    /// Bytes of the plane of scales, in its form and with the padding of its layout.
    pub fn scale_bytes(&self) -> usize {
        self.expected_bytes()[1]
    }

    /// Identity of the code plane's allocation.
    pub fn buffer_id(&self) -> u64 {
        B::buffer_id(&self.codes)
    }

    /// Rows that travel carry whole blocks, their scales beside them.
    ///
    /// # Errors
    /// [`Error::Shape`] naming `argument` unless blocks run along the row; [`Error::Unsupported`] unless the scales are row-major.
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

    /// The E8M0 scale bytes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the scales are of another kind: there is no exponent to shift by.
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
    /// Bytes of the planes of codes and of scales of a matrix, or of `stack` under each other, whose numbers lie in this form and whose scales in this
    /// layout. Decoded ones are BF16 numbers, row by row whatever the axis, and keep the scales of their codes.
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

/// Something a product or a permutation takes: plain or block-scaled rows. A clone shares the buffers.
#[derive(Debug, Clone)]
pub enum Operand<B: Backend> {
    /// F32 or BF16.
    Plain(Tensor<B>),
    /// Quantized.
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

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Plain(t) => t.bytes(),
            Self::Block(q) => q.bytes(),
        }
    }

    /// Identity of the allocation of elements or codes.
    pub fn buffer_id(&self) -> u64 {
        match self {
            Self::Plain(t) => t.buffer_id(),
            Self::Block(q) => q.buffer_id(),
        }
    }

    /// The format's name.
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
    /// [`Error::Unsupported`] if it is quantized.
    pub fn plain(&self, op: &'static str) -> Result<&Tensor<B>> {
        match self {
            Self::Plain(t) => Ok(t),
            Self::Block(q) => Err(Error::unsupported(op, q.format, "it takes F32 or BF16 here")),
        }
    }

    /// The quantized tensor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it is plain.
    pub fn block(&self, op: &'static str) -> Result<&BlockScaled<B>> {
        match self {
            Self::Plain(_) => {
                Err(Error::unsupported(op, self.format(), "it takes a block-scaled operand here"))
            }
            Self::Block(q) => Ok(q),
        }
    }

    /// How one of its rows lies in a message.
    pub fn row_kind(&self) -> RowKind {
        match self {
            Self::Plain(t) => RowKind { format: self.format(), rule: ScaleRule::Amax, cols: t.cols },
            Self::Block(q) => RowKind { format: q.format, rule: q.rule, cols: q.cols },
        }
    }
}

impl Stored {
    /// Of an operand.
    pub fn of<B: Backend>(x: &Operand<B>) -> Self {
        match x {
            Operand::Plain(x) => Self::plain(x.dtype()),
            Operand::Block(q) => Self::block(q),
        }
    }

    /// Of a quantized matrix.
    pub fn block<B: Backend>(x: &BlockScaled<B>) -> Self {
        Self { format: x.format, rule: x.rule, axis: x.axis }
    }
}

/// How one row of a tensor lies in a message: codes, then scales, then the tensor's scale where there is one, padded to 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowKind {
    /// Plain or block format; blocks run along the row.
    pub format: Format,
    /// Which kind of scale (ignored for plain formats).
    pub rule: ScaleRule,
    /// Elements of a row.
    pub cols: usize,
}

impl RowKind {
    /// Whether the format has such scales.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it does not.
    pub fn check_rule(&self, op: &'static str) -> Result<()> {
        if self.format.is_block() && !self.format.spec().rules.contains(&self.rule) {
            let why = format!("it has no scale rule `{}`", self.rule);
            return Err(Error::unsupported(op, self.format, why));
        }
        Ok(())
    }

    /// What a block's record of scales holds.
    pub fn scale_kind(&self) -> ScaleKind {
        if self.format.is_block() { self.format.scale_kind(self.rule) } else { ScaleKind::NONE }
    }

    /// So many such rows, yet to be written.
    ///
    /// # Errors
    /// What the backend returns where it has no memory left.
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

    /// Whether a record ends with padding.
    pub fn is_padded(&self) -> bool {
        self.row_bytes() != self.code_bytes() + self.scale_bytes() + self.tensor_scale_bytes()
    }

    /// Rows of a block format that came with these planes.
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

    /// Bytes of the codes or plain elements.
    pub fn code_bytes(&self) -> usize {
        self.format.row_code_bytes(self.cols)
    }

    /// Bytes of the blocks' scales.
    pub fn scale_bytes(&self) -> usize {
        self.scale_kind().bytes() * self.format.scales_per_row(self.cols)
    }

    /// Bytes of the scale that its tensor's blocks share.
    pub fn tensor_scale_bytes(&self) -> usize {
        if self.scale_kind().has_tensor_scale() { size_of::<f32>() } else { 0 }
    }

    /// Bytes of the whole record, a multiple of 16.
    pub fn row_bytes(&self) -> usize {
        (self.code_bytes() + self.scale_bytes() + self.tensor_scale_bytes()).next_multiple_of(16)
    }
}
