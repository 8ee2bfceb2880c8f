//! Which kernel a quantization takes and how it is launched, decided from its description alone.

use super::OP;
use crate::Cuda;
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{Launch, RoundingArg};
use crate::ops::Instance;
use nibble_core::formats::{Codec, Element, Format, Rounding, ScaleKind, WHOLE_LINE, hadamard};
use nibble_core::ops::{Planes, Quantize};
use nibble_core::{DType, Error, Result};

/// Rows and columns of a cta's square; the block of FP8.
pub(super) const TILE: usize = 128;
/// Strips of 128 rows done side by side where both planes are written.
const BAND_STRIPS: usize = 4;
/// Blocks and lines that a cta of `transpose_scales` takes.
const TRANSPOSED: (usize, usize) = (32, 128);
const ROW_THREADS: u32 = 128;
/// Columns of a chunk of `quantize_rows`, and the chunks a warp takes in all.
const CHUNK_COLS: usize = 256;
const WARP_CHUNKS: usize = 16;
/// Columns a warp of `hadamard_rows` takes.
pub(super) const TRANSFORM_COLS: usize = 256;
/// Columns a lane of `quantize_hadamard_rows` takes at a time, and how many of those a row may have.
pub(super) const UNIT_COLS: usize = 64;
const MOST_UNITS: usize = 768;
const UNIT_THREADS: u32 = 512;
/// Ctas of `quantize_hadamard_cols` that a multiprocessor holds.
const HADAMARD_CTAS_PER_SM: usize = 2;
/// A matrix of less than this many numbers may be taken as one row.
const ONE_ROW_BELOW: usize = 1 << 30;

/// What decides about the kernel and its launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct QuantizeDesc {
    pub input: DType,
    pub codec: Codec,
    pub planes: Planes,
    /// Rows of one matrix.
    pub rows: usize,
    pub cols: usize,
    pub stack: usize,
    /// Rows of a column plane.
    pub capacity: usize,
    /// Whether some rows may be padding.
    pub ragged: bool,
    /// The length of a transform that comes first.
    pub hadamard: Option<usize>,
}

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuantizeKernel {
    /// Blocks along the rows, which are divided into segments; a warp takes one in each round.
    Rows { segments: usize, rounds: usize },
    /// Blocks down the columns, with or without those along the rows; bands of so many ctas side by side.
    Cols { band: usize },
    /// Blocks along the rows after a transform.
    HadamardRows,
    /// Blocks down the columns after a transform.
    HadamardCols,
    /// Square tiles.
    Tiles,
}

/// A configuration: the instance and the shape of its launch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct QuantizeConfig {
    pub path: QuantizeKernel,
    pub spec: KernelSpec,
    pub launch: Launch,
}

/// What an instance of one of the fast kernels is made for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Variant {
    input: DType,
    format: Format,
    element: Element,
    kind: ScaleKind,
    rounding: Rounding,
    /// With a transform of this length, which is for one plane at a time.
    hadamard: Option<usize>,
}

impl Variant {
    /// Those that recipes ask for: activations and gradients are BF16, and where their scales are powers of two they may be
    /// rounded stochastically and transformed; weights are F32.
    fn all() -> impl Iterator<Item = Self> {
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

    fn spec(&self, source: &'static str, name: &'static str) -> KernelSpec {
        KernelSpec {
            source,
            name,
            args: vec![
                ("In", input_type(self.input)),
                ("E", self.device_element()),
                ("kF32Scales", TemplateArg::Bool(self.kind == ScaleKind::F32)),
                ("Round", TemplateArg::Type(RoundingArg::policy(self.rounding))),
            ],
        }
    }

    /// The device's struct: of an element in blocks.
    fn device_element(&self) -> TemplateArg {
        match self.format {
            Format::Mxfp8E4m3 => TemplateArg::Type("nib::E4m3By32"),
            Format::Mxfp8E5m2 => TemplateArg::Type("nib::E5m2By32"),
            _ => element_type(self.element),
        }
    }

    fn rows_spec(&self) -> KernelSpec {
        match self.hadamard {
            Some(len) => self.hadamard_spec(
                "kernels/convert/quantize_hadamard_rows.cuh",
                "nib::quantize_hadamard_rows",
                len,
            ),
            None => self.spec("kernels/convert/quantize.cuh", "nib::quantize_rows"),
        }
    }

    /// Of a kernel with a transform, which takes BF16 and makes E8M0 scales.
    fn hadamard_spec(&self, source: &'static str, name: &'static str, len: usize) -> KernelSpec {
        let args = vec![
            ("E", element_type(self.element)),
            ("kLen", TemplateArg::Int(len as i64)),
            ("Round", TemplateArg::Type(RoundingArg::policy(self.rounding))),
        ];
        KernelSpec { source, name, args }
    }

    /// `row_chunks` of the kernel: the chunks a warp takes at a time.
    fn row_chunks(&self) -> usize {
        let is_light = self.input == DType::Bf16 && !self.rounding.is_random();
        if is_light { 8 } else { 4 }
    }

    fn cols_spec(&self, rows: bool) -> KernelSpec {
        if let Some(len) = self.hadamard {
            return self.hadamard_spec(
                "kernels/convert/quantize_hadamard.cuh",
                "nib::quantize_hadamard_cols",
                len,
            );
        }
        let mut spec = self.spec("kernels/convert/quantize_cols.cuh", "nib::quantize_cols");
        spec.args.push(("kRows", TemplateArg::Bool(rows)));
        spec
    }

    fn tiles_spec(&self) -> KernelSpec {
        self.spec("kernels/convert/quantize_tiles.cuh", "nib::quantize_tiles")
    }

    /// Weights are not rounded randomly, and have no tiles of MXFP4.
    fn has_tiles(&self) -> bool {
        self.format.spec().tiles && self.rounding == Rounding::NearestEven && self.hadamard.is_none()
    }

    /// Dynamic shared memory for rows: `UnitsShared` of the kernel with a transform.
    fn row_shared_bytes(&self) -> usize {
        if self.hadamard.is_none() {
            return 0;
        }
        let warps = UNIT_THREADS as usize / 32;
        let lines = (32 * warps + MOST_UNITS) * UNIT_COLS * size_of::<u16>();
        let codes = 32 * warps * UNIT_COLS * self.format.spec().code_bits as usize / 8;
        let rest = warps * size_of::<u64>() + 4 * size_of::<u32>();
        (lines + codes + rest).next_multiple_of(1024)
    }

    /// Dynamic shared memory for columns: `ColumnShared` or `QuantizeHadamardShared` of the kernels.
    fn column_shared_bytes(&self) -> usize {
        let blocks = TILE / self.format.spec().block;
        let input = TILE * TILE * self.input.size_bytes();
        let turned = TILE * TILE;
        let total = 3 * size_of::<u32>();
        let bytes = if self.hadamard.is_some() {
            // Once more for random bits.
            let random = if self.rounding.is_random() { input } else { 16 };
            let signs = TILE / 2 * size_of::<u32>();
            (input + turned + signs + total).next_multiple_of(16) + random
        } else {
            let inverse = blocks * TILE * size_of::<f32>();
            let maxima = 8 * TILE * self.input.size_bytes();
            let row_scales = TILE * blocks * self.kind.bytes();
            input + turned + row_scales + inverse + maxima + total
        };
        bytes.next_multiple_of(16)
    }

    /// Dynamic shared memory of `quantize_tiles`: `SquareShared` of the kernel.
    fn square_shared_bytes(&self) -> usize {
        (TILE * TILE * (self.input.size_bytes() + 1) + (8 + 3) * size_of::<u32>()).next_multiple_of(16)
    }
}

pub(super) fn input_type(input: DType) -> TemplateArg {
    TemplateArg::Type(match input {
        DType::Bf16 => "nib::Bf16",
        DType::F32 => "nib::F32",
    })
}

fn element_type(element: Element) -> TemplateArg {
    TemplateArg::Type(match element {
        Element::E2M1 => "nib::E2m1",
        Element::E4M3 => "nib::E4m3",
        Element::E5M2 => "nib::E5m2",
        // No variant has others.
        _ => "nib::Unknown",
    })
}

/// The scales of rows as `quantize_cols` leaves them, block by block, and as they are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowScales {
    pub lines: usize,
    /// Of a line.
    pub blocks: usize,
    /// From one block to the next, a multiple of 128 lines.
    pub stride: usize,
    /// Blocks that the kernel writes: those of whole squares.
    pub written: usize,
}

impl RowScales {
    /// Ctas of `transpose_scales`.
    pub fn ctas(&self) -> usize {
        self.blocks.div_ceil(TRANSPOSED.0) * self.lines.div_ceil(TRANSPOSED.1)
    }
}

/// Whether a fast kernel quantizes to a format.
pub(crate) fn has_fast_kernels(format: Format) -> bool {
    Variant::all().any(|variant| variant.format == format)
}

/// The kernel that brings scales to their places.
pub(super) fn transpose_spec(kind: ScaleKind) -> KernelSpec {
    let stored = if kind == ScaleKind::F32 { "float" } else { "nib::u8" };
    let args = vec![("Stored", TemplateArg::Type(stored))];
    KernelSpec { source: "kernels/convert/quantize_cols.cuh", name: "nib::transpose_scales", args }
}

/// The transform of a matrix to F32.
fn transform_spec(input: DType, down: bool) -> KernelSpec {
    let name = if down { "nib::hadamard_cols" } else { "nib::hadamard_rows" };
    KernelSpec { source: "kernels/convert/hadamard.cuh", name, args: vec![("In", input_type(input))] }
}

impl QuantizeDesc {
    pub fn of(op: &Quantize<'_, Cuda>) -> Self {
        let has_cols = matches!(op.planes, Planes::Cols | Planes::Both);
        let rows = op.x.rows / op.stack.max(1);
        // A dense column plane ends with a whole block, a ragged one where its groups' capacity does.
        let dense_capacity = rows.next_multiple_of(op.codec.format().column_step());
        let capacity = if has_cols && op.groups.is_none() { dense_capacity } else { rows };
        Self {
            input: op.x.dtype(),
            codec: op.codec,
            planes: op.planes,
            rows,
            cols: op.x.cols,
            stack: op.stack,
            capacity,
            ragged: op.groups.is_some(),
            hadamard: op.hadamard.map(|hadamard| hadamard.len),
        }
    }

    pub fn kind(&self) -> ScaleKind {
        self.codec.scale_kind()
    }

    /// What the kernels can take beyond what the operation's own check lets in.
    pub fn check(&self) -> Result<()> {
        if self.planes == Planes::Tiles && self.ragged {
            return Err(Error::shape(OP, "groups", "given", "none: square tiles are for weights"));
        }
        const MOST: usize = i32::MAX as usize - 512;
        let tasks = self.rows.saturating_mul(self.cols.div_ceil(TRANSFORM_COLS));
        let sizes = [
            ("rows of x", self.stack.saturating_mul(self.rows.max(self.capacity)), MOST),
            ("columns of x", self.cols, MOST),
            ("squares of 128 x 128", self.squares(), MOST),
            ("rows of x, each in segments of 256 columns", tasks, MOST),
        ];
        for (argument, value, most) in sizes {
            if value > most {
                return Err(Error::shape(OP, argument, value, format!("at most {most}")));
            }
        }
        Ok(())
    }

    /// Rows and columns as `quantize_rows` is told: one row where that saves it tails.
    pub fn row_shape(&self) -> (usize, usize) {
        let len = self.rows * self.cols;
        let whole = self.cols.is_multiple_of(self.codec.format().spec().block);
        if !self.ragged && whole && len < ONE_ROW_BELOW { (1, len) } else { (self.rows, self.cols) }
    }

    /// Rows whose codes fill a line of a column's: strips of half bytes are taken in twos.
    fn line_rows(&self) -> usize {
        TILE * 8 / self.codec.format().spec().code_bits as usize
    }

    /// How many of those a column has.
    pub fn lines_height(&self) -> usize {
        self.capacity.div_ceil(self.line_rows())
    }

    /// Units of columns, of all rows.
    pub fn units(&self) -> usize {
        self.rows * (self.cols / UNIT_COLS)
    }

    /// Squares of 128 x 128, of all matrices.
    fn squares(&self) -> usize {
        self.stack * self.capacity.max(self.rows).div_ceil(TILE) * self.cols.div_ceil(TILE)
    }

    /// The variant of the fast kernels that does it, if one is built and takes the shape.
    fn variant(&self) -> Option<Variant> {
        let (format, element) = (self.codec.format(), self.codec.element());
        let (input, kind, rounding) = (self.input, self.kind(), self.codec.rounding());
        let wanted = Variant { input, format, element, kind, rounding, hadamard: self.hadamard };
        let whole_lines = match self.planes {
            Planes::Rows if self.hadamard.is_some() => {
                let units = self.cols / UNIT_COLS;
                self.cols.is_multiple_of(TILE) && units <= MOST_UNITS && self.rows * units < 1 << 30
            }
            Planes::Rows => true,
            // Blocks of 32 of both planes are counted by lanes that all have columns.
            Planes::Both if format.spec().block == 32 => {
                self.capacity.is_multiple_of(32) && self.cols.is_multiple_of(32)
            }
            Planes::Cols | Planes::Both => self.capacity.is_multiple_of(format.spec().block),
            Planes::Tiles => wanted.has_tiles() && self.rows.is_multiple_of(16),
        };
        // Of codes of less than a byte the kernels take whole blocks, the general one the others.
        let (by_rows, by_cols) = (self.planes != Planes::Cols, self.planes != Planes::Rows);
        let ends_short = by_rows && !self.cols.is_multiple_of(format.spec().block)
            || by_cols && self.rows != self.capacity;
        let takes_codes = format.spec().code_bits == 8 || !ends_short;
        let takes_shape = self.cols.is_multiple_of(8) && whole_lines && takes_codes;
        Variant::all().find(|variant| takes_shape && *variant == wanted)
    }

    /// The scales of the rows, whose padding to whole squares is written as well.
    pub fn row_scales(&self) -> RowScales {
        let block = self.codec.format().spec().block;
        RowScales {
            lines: self.rows,
            blocks: self.cols.div_ceil(block),
            stride: self.capacity.next_multiple_of(TILE),
            written: self.cols.next_multiple_of(TILE) / block,
        }
    }

    /// Whether one kernel does all of it, the transform included.
    pub fn is_fused(&self) -> bool {
        self.hadamard.is_none() || self.variant().is_some()
    }

    /// Whether the general kernel takes it.
    pub fn is_general(&self) -> bool {
        self.variant().is_none()
    }

    /// Whether the general kernel leaves the rows' record bytes as words, which a second kernel brings to their places. In their places every four bytes
    /// are a sector of their own to the L2. It pays for MX formats; NVFP4, with twice as many records, loses more by the second kernel.
    pub fn has_words(&self) -> bool {
        let is_mx = self.codec.scale_kind() == ScaleKind::E8M0 && self.codec.format().spec().block == 32;
        self.planes == Planes::Both && is_mx && self.cols.is_multiple_of(TILE)
    }

    /// Of what [`transformed`](Self::transformed) gives: whether the general kernel makes the transform as it reads. Where lines have one scale it does
    /// not: their maxima are measured of a transform in memory.
    pub fn transforms_as_it_reads(&self) -> bool {
        self.is_general() && self.planes == Planes::Cols && self.codec.format().spec().block != WHOLE_LINE
    }

    /// What is left to do once the transform has been made.
    pub fn transformed(&self) -> Self {
        let rows = if self.planes == Planes::Rows { self.rows } else { self.capacity };
        let transformed = Self { input: DType::F32, rows, hadamard: None, ..*self };
        Self { ragged: self.ragged && transformed.is_general(), ..transformed }
    }

    /// The kernel that makes it, and its ctas.
    pub fn transform(&self) -> (KernelSpec, usize) {
        let spec = transform_spec(self.input, self.planes == Planes::Cols);
        if self.planes == Planes::Rows {
            (spec, (self.rows * self.cols.div_ceil(TRANSFORM_COLS)).div_ceil(8))
        } else {
            (spec, self.squares())
        }
    }

    /// Of a fast kernel; none where the general one takes it (`UnitsConfig`).
    pub fn config(&self, num_sms: usize) -> Option<QuantizeConfig> {
        let config = |path, spec, ctas: usize, threads, shared_bytes| {
            let launch = Launch { ctas: ctas as u32, threads, cluster: 1, shared_bytes };
            QuantizeConfig { path, spec, launch }
        };
        Some(match (self.variant(), self.planes) {
            (Some(variant), Planes::Rows) if variant.hadamard.is_some() => {
                let ctas = self.units().div_ceil(32).min(num_sms);
                config(
                    QuantizeKernel::HadamardRows,
                    variant.rows_spec(),
                    ctas,
                    UNIT_THREADS,
                    variant.row_shared_bytes(),
                )
            }
            (Some(variant), Planes::Rows) => {
                let (rows, cols) = self.row_shape();
                let segments = cols.div_ceil(variant.row_chunks() * CHUNK_COLS);
                let rounds = WARP_CHUNKS / variant.row_chunks();
                let ctas = (rows * segments).div_ceil(ROW_THREADS as usize / 32 * rounds);
                config(QuantizeKernel::Rows { segments, rounds }, variant.rows_spec(), ctas, ROW_THREADS, 0)
            }
            (Some(variant), Planes::Cols | Planes::Both) => {
                let rows = self.planes == Planes::Both;
                let down = self.lines_height();
                let band = if rows { BAND_STRIPS * TILE / self.line_rows() } else { down };
                let ctas = down * self.cols.div_ceil(TILE);
                let (spec, shared_bytes) = (variant.cols_spec(rows), variant.column_shared_bytes());
                match self.hadamard {
                    Some(_) => {
                        let ctas = ctas.min(HADAMARD_CTAS_PER_SM * num_sms);
                        config(QuantizeKernel::HadamardCols, spec, ctas, 256, shared_bytes)
                    }
                    None => config(QuantizeKernel::Cols { band }, spec, ctas, 256, shared_bytes),
                }
            }
            (Some(variant), Planes::Tiles) => config(
                QuantizeKernel::Tiles,
                variant.tiles_spec(),
                self.squares(),
                256,
                variant.square_shared_bytes(),
            ),
            (None, _) => return None,
        })
    }
}

/// The instances built for it.
pub fn instances() -> Vec<Instance> {
    let mut all = Vec::new();
    for variant in Variant::all() {
        all.push(Instance { spec: variant.rows_spec(), shared_bytes: variant.row_shared_bytes() });
        // A transform is for one plane.
        let forms = [false, true].into_iter().filter(|rows| !(*rows && variant.hadamard.is_some()));
        all.extend(forms.map(|rows| Instance {
            spec: variant.cols_spec(rows),
            shared_bytes: variant.column_shared_bytes(),
        }));
        if variant.has_tiles() {
            all.push(Instance { spec: variant.tiles_spec(), shared_bytes: variant.square_shared_bytes() });
        }
    }
    all.extend(
        [ScaleKind::E8M0, ScaleKind::F32]
            .map(|kind| Instance { spec: transpose_spec(kind), shared_bytes: 0 }),
    );
    for input in [DType::Bf16, DType::F32] {
        let specs = [false, true].map(|down| transform_spec(input, down));
        all.extend(specs.map(|spec| Instance { spec, shared_bytes: 0 }));
    }
    all.extend(super::units::instances());
    all
}

#[cfg(test)]
mod tests;
