//! Quantization on a GPU: the kernels that run, and their temporary memory.

use crate::Temporary;
use nibble_core::formats::{BlockAxis, Codec, Element, Format, Rounding, ScaleKind, WHOLE_LINE, hadamard};
use nibble_core::ops::{Numbers, Planes, Quantize, Stored, Taken};
use nibble_core::{Backend, DType, Grouping};
use std::fmt;

/// The number of rows and columns of the tile of a CTA, which is the block length of FP8.
pub const TILE: usize = 128;
/// The number of columns that a lane processes per step in the kernel that transforms rows. The longest supported row has [`MOST_UNITS`]
/// times this number of columns.
pub const UNIT_COLS: usize = 64;
/// Maximum number of units of [`UNIT_COLS`] columns in a row.
pub const MOST_UNITS: usize = 768;

/// The properties that identify an instance of the fast kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FastKernels {
    /// The input type.
    pub input: DType,
    /// The format.
    pub format: Format,
    /// The element type of the format's codes.
    pub element: Element,
    /// The kind of the scale that each block has: a power of two or an F32.
    pub kind: ScaleKind,
    /// How values are rounded.
    pub rounding: Rounding,
    /// The length of the Hadamard transform, if there is one. A kernel with a transform writes either row blocks or column blocks, but not
    /// both.
    pub hadamard: Option<usize>,
}

impl FastKernels {
    /// All kernels that recipes need. Activations and gradients are BF16, and weights are F32. With power-of-two scales, activations and
    /// gradients may be rounded stochastically and transformed.
    pub fn all() -> impl Iterator<Item = Self> {
        let formats = [
            (Format::Mxfp4, Element::E2M1, ScaleKind::E8M0),
            (Format::E4m3, Element::E4M3, ScaleKind::E8M0),
            (Format::E4m3, Element::E4M3, ScaleKind::F32),
            (Format::Mxfp8E4m3, Element::E4M3, ScaleKind::E8M0),
            (Format::Mxfp8E5m2, Element::E5M2, ScaleKind::E8M0),
        ];
        let inputs = [
            (DType::F32, Rounding::NearestEven),
            (DType::Bf16, Rounding::NearestEven),
            (DType::Bf16, Rounding::Stochastic),
        ];
        let of = move |(format, element, kind)| {
            let is_plain = kind == ScaleKind::F32 || !matches!(format, Format::Mxfp4 | Format::E4m3);
            let plain = inputs.into_iter().take(if is_plain { 2 } else { 3 });
            let transformed = inputs.into_iter().skip(if is_plain { 3 } else { 1 });
            let transformed = transformed.flat_map(|of| hadamard::LENGTHS.map(|len| (of, Some(len))));
            plain.map(|of| (of, None)).chain(transformed).map(move |((input, rounding), hadamard)| Self {
                input,
                format,
                element,
                kind,
                rounding,
                hadamard,
            })
        };
        formats.into_iter().flat_map(of)
    }

    /// Whether kernels for 2-D blocks are built. There are no such kernels for stochastic rounding, because weights are not rounded
    /// stochastically, or for MXFP4, which has no 2-D blocks.
    pub fn has_tiles(&self) -> bool {
        self.format.spec().tiles && self.rounding == Rounding::NearestEven && self.hadamard.is_none()
    }

    /// Whether the kernel can convert the codes that it quantizes to E4M3 (lift) before it writes them. Kernels can lift MXFP4 codes of row
    /// blocks without a transform, and of column blocks with a transform.
    pub fn lifts(&self, planes: Planes) -> bool {
        let has_planes = match planes {
            Planes::Rows => self.hadamard.is_none(),
            Planes::Cols => self.hadamard.is_some(),
            Planes::Both | Planes::Tiles => false,
        };
        self.format == Format::Mxfp4 && has_planes
    }

    /// Whether a kernel can write rows directly into all-to-all buffers. Such kernels exist for activations and gradients without a
    /// transform.
    pub fn packs(&self) -> bool {
        self.input == DType::Bf16 && self.hadamard.is_none()
    }
}

/// Whether a fast kernel quantizes to a format.
pub fn has_fast_kernels(format: Format) -> bool {
    FastKernels::all().any(|kernels| kernels.format == format)
}

/// The formats and roundings for which the general kernel can decode the codes that it quantizes. The list has the formats whose products
/// multiply BF16 numbers, each with the roundings that recipes use.
pub const DECODED: [(Format, &[Rounding]); 6] = [
    (Format::Nvfp4, &[Rounding::NearestEven, Rounding::Stochastic]),
    (Format::Nvfp4In128, &[Rounding::NearestEven, Rounding::Stochastic]),
    (Format::Hif4, &[Rounding::NearestEven, Rounding::NearestAway]),
    (Format::Mxint8, &[Rounding::NearestEven]),
    (Format::Mxfp8E4m3, &[Rounding::NearestEven]),
    (Format::Mxfp8E5m2, &[Rounding::NearestEven]),
];

/// The properties of a quantization that determine its kernels and their launches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizeDesc {
    /// The input type.
    pub input: DType,
    /// Format, rule and rounding.
    pub codec: Codec,
    /// Which block-scaled tensors to write.
    pub planes: Planes,
    /// Number of rows of one matrix.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Number of matrices.
    pub stack: usize,
    /// The number of rows for which the tensor with column blocks has capacity.
    pub capacity: usize,
    /// The groups of rows, if any. Some rows may be padding.
    pub groups: Option<Grouping>,
    /// Whether a fast kernel reads a list of the padding rows.
    pub ragged: bool,
    /// The length of a transform that precedes quantization.
    pub hadamard: Option<usize>,
    /// The type of numbers that products multiply, if only products read the result.
    pub only_for: Option<Numbers>,
}

/// The temporary layout of row scales. A kernel that quantizes rows and columns stores the scales block by block, and a second kernel then
/// writes them in row-major order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowScales {
    /// Number of rows of codes.
    pub lines: usize,
    /// Number of blocks per row.
    pub blocks: usize,
    /// The distance from the records of one block column to those of the next, as a number of records. This distance is a multiple of 128.
    pub stride: usize,
    /// The number of blocks per row that the kernel writes, including padding to whole tiles.
    pub written: usize,
    /// Bytes of one record of scales.
    pub bytes: usize,
}

impl RowScales {
    /// The number of bytes of the temporary buffer, which is freed after the second kernel.
    pub const fn total_bytes(&self) -> usize {
        self.written * self.stride * self.bytes
    }
}

impl QuantizeDesc {
    /// The description of an operation.
    pub fn of<B: Backend>(op: &Quantize<'_, B>) -> Self {
        let has_cols = matches!(op.planes, Planes::Cols | Planes::Both);
        // Without tensor scales, the rows of all matrices of a stack are quantized in the same way.
        let is_one = op.planes == Planes::Rows && !op.codec.scale_kind().has_tensor_scale();
        let stack = if is_one { 1 } else { op.stack };
        let rows = op.x.rows / stack.max(1);
        // Column tensors of dense rows end with a whole block; column tensors of groups end at the groups' capacity.
        let dense_capacity = rows.next_multiple_of(op.codec.format().column_step());
        let capacity = if has_cols && op.groups.is_none() { dense_capacity } else { rows };
        Self {
            input: op.x.dtype(),
            codec: op.codec,
            planes: op.planes,
            rows,
            cols: op.x.cols,
            stack,
            capacity,
            groups: op.groups.map(Grouping::of),
            ragged: op.groups.is_some(),
            hadamard: op.hadamard.map(|hadamard| hadamard.len),
            only_for: op.only_for,
        }
    }

    /// The kinds of scales in the scale record of a block.
    pub fn kind(&self) -> ScaleKind {
        self.codec.scale_kind()
    }

    /// The form that products read, if only products read the result.
    fn asked_for(&self) -> Taken {
        let axis = match self.planes {
            Planes::Rows | Planes::Both => BlockAxis::Row,
            Planes::Cols => BlockAxis::Col,
            Planes::Tiles => return Taken::AsIs,
        };
        let stored = Stored { format: self.codec.format(), rule: self.codec.rule(), axis };
        let numbers = self.only_for.filter(|numbers| *numbers != Numbers::F32);
        numbers.map_or(Taken::AsIs, |numbers| numbers.takes(stored))
    }

    /// Whether the general kernel decodes the codes that it quantizes.
    fn is_decoded(&self) -> bool {
        let (format, rounding) = (self.codec.format(), self.codec.rounding());
        // One call of the random generator gives the bits for eight neighbours of a row.
        let takes_shape = !rounding.is_random() || self.cols.is_multiple_of(8);
        let is_built = DECODED.iter().any(|(of, roundings)| *of == format && roundings.contains(&rounding));
        let is_wanted = self.asked_for() == Taken::Decoded;
        is_wanted && is_built && takes_shape && self.codec.scaling().is_default_in_blocks()
    }

    /// The fast kernels, if they are built for this request and can process the shape. Fast kernels choose scales only by the rule, and
    /// never decode.
    fn fast_kernels(&self) -> Option<FastKernels> {
        if !self.codec.scaling().is_default() || self.is_decoded() {
            return None;
        }
        let (format, element) = (self.codec.format(), self.codec.element());
        let (input, kind, rounding) = (self.input, self.kind(), self.codec.rounding());
        let wanted = FastKernels { input, format, element, kind, rounding, hadamard: self.hadamard };
        let whole_lines = match self.planes {
            Planes::Rows if self.hadamard.is_some() => {
                let units = self.cols / UNIT_COLS;
                self.cols.is_multiple_of(TILE) && units <= MOST_UNITS && self.rows * units < 1 << 30
            }
            Planes::Rows => true,
            // All lanes that count blocks of 32 for rows and columns together must have columns.
            Planes::Both if format.spec().block == 32 => {
                self.capacity.is_multiple_of(32) && self.cols.is_multiple_of(32)
            }
            Planes::Cols | Planes::Both => self.capacity.is_multiple_of(format.spec().block),
            Planes::Tiles => wanted.has_tiles() && self.rows.is_multiple_of(16),
        };
        // With codes of less than a byte, fast kernels take only whole blocks.
        let (by_rows, by_cols) = (self.planes != Planes::Cols, self.planes != Planes::Rows);
        let ends_short = by_rows && !self.cols.is_multiple_of(format.spec().block)
            || by_cols && self.rows != self.capacity;
        let takes_codes = format.spec().code_bits == 8 || !ends_short;
        let takes_shape = self.cols.is_multiple_of(8) && whole_lines && takes_codes;
        FastKernels::all().find(|kernels| takes_shape && *kernels == wanted)
    }
}

/// Which kernel computes the Hadamard transform before a quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransformMade {
    /// A separate kernel computes the transform and writes it in F32 to memory.
    First,
    /// The general kernel computes the transform when it loads values.
    AsItReads,
}

/// How a quantization is computed: its transform, its kernels and the form of its result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizePath {
    /// The requested quantization.
    pub asked: QuantizeDesc,
    /// Which separate kernel computes the transform; `None` if there is no transform, or if the fast kernel computes it.
    pub transform: Option<TransformMade>,
    /// The quantization that remains after the transform.
    pub last: QuantizeDesc,
    /// The fast kernels for `last`; `None` means the general kernel.
    pub kernels: Option<FastKernels>,
    /// The form of the result. The result contains codes, unless only products read it and there is a kernel that writes the form that
    /// these products multiply.
    pub taken: Taken,
}

impl QuantizePath {
    /// Chooses how to compute the operation `op`.
    pub fn of_op<B: Backend>(op: &Quantize<'_, B>) -> Self {
        Self::of(QuantizeDesc::of(op))
    }

    /// Chooses how to compute a quantization with this description.
    pub fn of(asked: QuantizeDesc) -> Self {
        let (transform, last, kernels) = match (asked.hadamard, asked.fast_kernels()) {
            (Some(_), None) => {
                let rows = if asked.planes == Planes::Rows { asked.rows } else { asked.capacity };
                let last = QuantizeDesc { input: DType::F32, rows, hadamard: None, ..asked };
                let kernels = last.fast_kernels();
                let is_general = kernels.is_none();
                // Formats with one scale per row or column measure maxima on the transformed matrix in memory.
                let by_line = asked.codec.format().spec().block == WHOLE_LINE;
                let reads = is_general && asked.planes == Planes::Cols && !by_line;
                let transform = if reads { TransformMade::AsItReads } else { TransformMade::First };
                (Some(transform), QuantizeDesc { ragged: asked.ragged && is_general, ..last }, kernels)
            }
            (_, kernels) => (None, asked, kernels),
        };
        let taken = match asked.asked_for() {
            Taken::Lifted if kernels.is_some_and(|kernels| kernels.lifts(asked.planes)) => Taken::Lifted,
            Taken::Decoded if asked.is_decoded() => Taken::Decoded,
            _ => Taken::AsIs,
        };
        Self { asked, transform, last, kernels, taken }
    }

    /// Whether a kernel writes the quantized rows directly into all-to-all buffers. Otherwise the rows are first quantized and then packed.
    pub fn packs(&self) -> bool {
        let is_whole = self.transform.is_none() && self.asked.planes == Planes::Rows;
        is_whole && self.kernels.is_some_and(|kernels| kernels.packs())
    }

    /// The temporary layout of row scales, including padding to whole tiles, if a second kernel copies them to their final addresses;
    /// otherwise `None`. The fast kernels store the scales of neighbouring rows together. The general kernel stores four bytes of records
    /// as one word. At their final addresses, each four bytes would be in a different L2 sector. The second kernel pays off for MX formats,
    /// but not for NVFP4, which has twice as many records.
    pub fn row_scales(&self) -> Option<RowScales> {
        let QuantizeDesc { codec, planes, rows, cols, capacity, .. } = self.last;
        let (block, kind) = (codec.format().spec().block, codec.scale_kind());
        if planes != Planes::Both || self.taken == Taken::Decoded {
            return None;
        }
        if self.kernels.is_none() {
            let words = cols / block / size_of::<u32>();
            let plane = RowScales {
                lines: rows,
                blocks: words,
                stride: rows.next_multiple_of(TILE),
                written: words,
                bytes: size_of::<u32>(),
            };
            return (kind == ScaleKind::E8M0 && block == 32 && cols.is_multiple_of(TILE)).then_some(plane);
        }
        Some(RowScales {
            lines: rows,
            blocks: cols.div_ceil(block),
            stride: capacity.next_multiple_of(TILE),
            written: cols.next_multiple_of(TILE) / block,
            bytes: kind.bytes(),
        })
    }

    /// The buffers that the quantization needs in addition to results and counts, in the order in which they are allocated.
    pub fn temporaries(&self) -> Vec<Temporary> {
        let QuantizeDesc { stack, rows, cols, .. } = self.last;
        if self.asked.rows == 0 || cols == 0 {
            return Vec::new();
        }
        let transformed = Temporary::new("the transform in F32", stack * rows * cols * size_of::<f32>());
        let is_first = self.transform == Some(TransformMade::First);
        let mut all: Vec<_> = is_first.then_some(transformed).into_iter().collect();
        if self.kernels.is_none() {
            all.extend(self.last.measured());
        }
        all.extend(self.row_scales().map(|scales| Temporary::new("the rows' scales", scales.total_bytes())));
        all
    }
}

impl QuantizeDesc {
    /// Temporary memory of the measurements before values are encoded, for formats with one scale per row or column, or with tensor scales.
    fn measured(&self) -> Vec<Temporary> {
        let by_line = self.codec.format().spec().block == WHOLE_LINE;
        if !by_line && !self.kind().has_tensor_scale() {
            return Vec::new();
        }
        let words = |what, len: usize| Temporary::new(what, len * size_of::<u32>());
        let bytes = |what, len: usize| Temporary::new(what, len);
        let has_spans = self.groups.is_some() && !(by_line && self.planes == Planes::Rows);
        let spans = self.groups.map(|groups| groups.count + 1);
        let mut all: Vec<_> =
            has_spans.then(|| words("the span of each row", self.rows)).into_iter().collect();
        if by_line {
            let rows = self.stack * self.rows;
            let cols = spans.unwrap_or(1) * self.stack * self.cols;
            if self.planes != Planes::Cols {
                all.extend([words("rows' maxima", rows), bytes("rows with a code", rows)]);
            }
            if self.planes != Planes::Rows {
                all.extend([words("columns' maxima", cols), bytes("columns with a code", cols)]);
            }
        } else {
            let count = spans.unwrap_or(self.stack);
            all.extend([
                words("tensors' maxima", count),
                words("inverses", 2 * count),
                words("scales", count),
            ]);
        }
        all
    }
}

impl fmt::Display for QuantizePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.transform == Some(TransformMade::First) { "transform; " } else { "" })?;
        f.write_str(if self.kernels.is_none() { "general kernel" } else { "kernel of its own" })?;
        f.write_str(match self.taken {
            Taken::AsIs => "",
            Taken::Lifted => ", lifted",
            Taken::Decoded => ", decoded",
        })
    }
}
