//! Chooses the kernel of a quantization and its launch, from the description alone.

use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Launch, RoundingArg};
use crate::ops::Instance;
use nibble_choice::quantize::{FastKernels, MOST_UNITS};
pub(super) use nibble_choice::quantize::{QuantizeDesc, QuantizePath, RowScales, TILE, UNIT_COLS};
use nibble_core::formats::{Element, Format, Rounding, ScaleKind};
use nibble_core::ops::{Planes, Taken};
use nibble_core::{DType, Error, Result};

/// The operation's name, for errors.
pub(super) const OP: &str = "quantize";
/// Number of strips of 128 rows in a band, if both row and column codes are written.
const BAND_STRIPS: usize = 4;
/// Blocks and rows per CTA of `transpose_scales`.
const TRANSPOSED: (usize, usize) = (32, 128);
const ROW_THREADS: u32 = 128;
/// Columns per chunk of `quantize_rows`, and the total chunks per warp.
const CHUNK_COLS: usize = 256;
const WARP_CHUNKS: usize = 16;
/// Columns per warp of `hadamard_rows`.
pub(super) const TRANSFORM_COLS: usize = 256;
const UNIT_THREADS: u32 = 512;
/// CTAs of `quantize_hadamard_cols` per SM.
const HADAMARD_CTAS_PER_SM: usize = 2;
/// A matrix with fewer elements than this may be treated as one row.
const ONE_ROW_BELOW: usize = 1 << 30;

/// The kernel of a quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuantizeKernel {
    /// Blocks along the rows, which are divided into segments; a warp takes one segment per round.
    Rows { segments: usize, rounds: usize },
    /// Blocks down the columns, optionally also along the rows, in bands that are `band` CTAs high.
    Cols { band: usize },
    /// Blocks along the rows, after a Hadamard transform.
    HadamardRows,
    /// Blocks down the columns, after a Hadamard transform.
    HadamardCols,
    /// 2-D blocks of 128 × 128.
    Tiles,
}

/// A configuration: the instance and the shape of its launch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct QuantizeConfig {
    pub kernel: QuantizeKernel,
    pub spec: KernelSpec,
    pub launch: Launch,
}

fn usual_spec(of: &FastKernels, source: &'static str, name: &'static str) -> KernelSpec {
    KernelSpec {
        source,
        name,
        args: vec![
            ("In", input_type(of.input)),
            ("E", device_element(of)),
            ("kF32Scales", TemplateArg::Bool(of.kind == ScaleKind::F32)),
            round(of),
        ],
    }
}

/// The device's struct for an element in blocks.
fn device_element(of: &FastKernels) -> TemplateArg {
    match of.format {
        Format::Mxfp8E4m3 => TemplateArg::Type("nib::E4m3By32"),
        Format::Mxfp8E5m2 => TemplateArg::Type("nib::E5m2By32"),
        _ => element_type(of.element),
    }
}

fn rows_spec(of: &FastKernels, lifted: bool) -> KernelSpec {
    match of.hadamard {
        _ if lifted => {
            let source = "kernels/convert/quantize.cuh";
            let args = vec![("In", input_type(of.input)), round(of)];
            KernelSpec { source, name: "nib::quantize_rows_lifted", args }
        }
        Some(len) => hadamard_spec(
            of,
            "kernels/convert/quantize_hadamard_rows.cuh",
            "nib::quantize_hadamard_rows",
            len,
        ),
        None => usual_spec(of, "kernels/convert/quantize.cuh", "nib::quantize_rows"),
    }
}

/// The spec of a kernel with a Hadamard transform, which has BF16 input and E8M0 scales.
fn hadamard_spec(of: &FastKernels, source: &'static str, name: &'static str, len: usize) -> KernelSpec {
    let args = vec![("E", element_type(of.element)), ("kLen", TemplateArg::Int(len as i64)), round(of)];
    KernelSpec { source, name, args }
}

fn round(of: &FastKernels) -> (&'static str, TemplateArg) {
    ("Round", TemplateArg::Type(RoundingArg::policy(of.rounding)))
}

fn pack_spec(of: &FastKernels) -> KernelSpec {
    usual_spec(of, "kernels/convert/quantize_pack.cuh", "nib::quantize_pack")
}

fn cols_spec(of: &FastKernels, rows: bool, lifted: bool) -> KernelSpec {
    if let Some(len) = of.hadamard {
        let source = "kernels/convert/quantize_hadamard.cuh";
        let spec = hadamard_spec(of, source, "nib::quantize_hadamard_cols", len);
        return match lifted {
            true => {
                let args = spec.args.into_iter().filter(|(name, _)| *name != "E").collect();
                KernelSpec { source, name: "nib::quantize_hadamard_cols_lifted", args }
            }
            false => spec,
        };
    }
    let mut spec = usual_spec(of, "kernels/convert/quantize_cols.cuh", "nib::quantize_cols");
    spec.args.push(("kRows", TemplateArg::Bool(rows)));
    spec
}

fn tiles_spec(of: &FastKernels) -> KernelSpec {
    usual_spec(of, "kernels/convert/quantize_tiles.cuh", "nib::quantize_tiles")
}

/// Dynamic shared memory for rows: the size of `UnitsShared` of the kernel with a transform.
fn row_shared_bytes(of: &FastKernels) -> usize {
    if of.hadamard.is_none() {
        return 0;
    }
    let warps = UNIT_THREADS as usize / 32;
    let lines = (32 * warps + MOST_UNITS) * UNIT_COLS * size_of::<u16>();
    let codes = 32 * warps * UNIT_COLS * of.format.spec().code_bits as usize / 8;
    let rest = warps * size_of::<u64>() + 4 * size_of::<u32>();
    (lines + codes + rest).next_multiple_of(1024)
}

/// Dynamic shared memory for columns: the size of `ColumnShared` or `QuantizeHadamardShared` of the
/// kernels.
fn column_shared_bytes(of: &FastKernels) -> usize {
    let blocks = TILE / of.format.spec().block;
    let input = TILE * TILE * of.input.size_bytes();
    let turned = TILE * TILE;
    let total = 3 * size_of::<u32>();
    let bytes = if of.hadamard.is_some() {
        // Random bits need as many bytes again.
        let random = if of.rounding.is_random() { input } else { 16 };
        let signs = TILE / 2 * size_of::<u32>();
        (input + turned + signs + total).next_multiple_of(16) + random
    } else {
        let inverse = blocks * TILE * size_of::<f32>();
        let maxima = 8 * TILE * of.input.size_bytes();
        let row_scales = TILE * blocks * of.kind.bytes();
        input + turned + row_scales + inverse + maxima + total
    };
    bytes.next_multiple_of(16)
}

/// Dynamic shared memory of `quantize_tiles`: the size of `SquareShared` of the kernel.
fn square_shared_bytes(of: &FastKernels) -> usize {
    (TILE * TILE * (of.input.size_bytes() + 1) + (8 + 3) * size_of::<u32>()).next_multiple_of(16)
}

/// The kernel's `row_chunks`: the number of chunks that a warp processes at a time.
fn row_chunks(input: DType, rounding: Rounding) -> usize {
    if input == DType::Bf16 && !rounding.is_random() { 8 } else { 4 }
}

/// Segments per row, rounds, and CTAs for the rows of a matrix, if a warp processes `chunks` chunks at
/// a time.
fn row_launch(chunks: usize, (rows, cols): (usize, usize)) -> (usize, usize, usize) {
    let segments = cols.div_ceil(chunks * CHUNK_COLS);
    let rounds = WARP_CHUNKS / chunks;
    (segments, rounds, (rows * segments).div_ceil(ROW_THREADS as usize / 32 * rounds))
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
        // No instance has another transform length.
        _ => "nib::Unknown",
    })
}

/// The number of CTAs of `transpose_scales`.
pub(super) fn transpose_ctas(scales: &RowScales) -> usize {
    scales.blocks.div_ceil(TRANSPOSED.0) * scales.lines.div_ceil(TRANSPOSED.1)
}

/// The kernel that transposes scales into their final order.
pub(super) fn transpose_spec(kind: ScaleKind) -> KernelSpec {
    let stored = if kind == ScaleKind::F32 { "float" } else { "nib::u8" };
    let args = vec![("Stored", TemplateArg::Type(stored))];
    KernelSpec { source: "kernels/convert/quantize_cols.cuh", name: "nib::transpose_scales", args }
}

/// The kernel that writes the Hadamard transform of a matrix as F32.
fn transform_spec(input: DType, down: bool) -> KernelSpec {
    let name = if down { "nib::hadamard_cols" } else { "nib::hadamard_rows" };
    KernelSpec { source: "kernels/convert/hadamard.cuh", name, args: vec![("In", input_type(input))] }
}

/// Checks limits of the kernels beyond those that the operation itself checks.
pub(super) fn check(desc: &QuantizeDesc) -> Result<()> {
    if desc.planes == Planes::Tiles && desc.ragged {
        return Err(Error::shape(OP, "groups", "given", "none: square tiles are for weights"));
    }
    const MOST: usize = i32::MAX as usize - 512;
    let tasks = (desc.stack * desc.rows).saturating_mul(desc.cols.div_ceil(TRANSFORM_COLS));
    let sizes = [
        ("rows of x", desc.stack.saturating_mul(desc.rows.max(desc.capacity)), MOST),
        ("columns of x", desc.cols, MOST),
        ("squares of 128 x 128", squares(desc), MOST),
        ("rows of x, each in segments of 256 columns", tasks, MOST),
    ];
    for (argument, value, most) in sizes {
        if value > most {
            return Err(Error::shape(OP, argument, value, format!("at most {most}")));
        }
    }
    Ok(())
}

/// The shape for `quantize_rows`: one long row if that avoids partial segments. If rows may be padding, one long row is used only if more
/// than an eighth of a row's segments would be empty, because each block must then look up its row.
pub(super) fn row_shape(path: &QuantizePath) -> (usize, usize) {
    let QuantizeDesc { input, codec, rows, cols, ragged, .. } = path.last;
    let len = rows * cols;
    // No block, and no group of blocks lifted to one scale, may extend from one row to the next.
    let block = if path.taken == Taken::Lifted { TILE } else { codec.format().spec().block };
    let whole = cols.is_multiple_of(block);
    let pays = !ragged || {
        let chunks = row_chunks(input, codec.rounding());
        let (segments, ..) = row_launch(chunks, (rows, cols));
        8 * cols < 7 * segments * chunks * CHUNK_COLS
    };
    if pays && whole && len < ONE_ROW_BELOW { (1, len) } else { (rows, cols) }
}

/// The number of rows whose codes fill 128 bytes of a column: half-byte codes need two strips.
fn line_rows(path: &QuantizePath) -> usize {
    if path.taken == Taken::Lifted {
        return TILE;
    }
    TILE * 8 / path.last.codec.format().spec().code_bits as usize
}

/// The number of runs of 128 bytes in a column of codes.
pub(super) fn lines_height(path: &QuantizePath) -> usize {
    path.last.capacity.div_ceil(line_rows(path))
}

/// The number of column units over all rows.
pub(super) fn units(desc: &QuantizeDesc) -> usize {
    desc.rows * (desc.cols / UNIT_COLS)
}

/// The number of 2-D blocks of 128 × 128 over all matrices.
fn squares(desc: &QuantizeDesc) -> usize {
    desc.stack * desc.capacity.max(desc.rows).div_ceil(TILE) * desc.cols.div_ceil(TILE)
}

/// The kernel that writes a transformed matrix to memory, and its number of CTAs.
pub(super) fn transform(desc: &QuantizeDesc) -> (KernelSpec, usize) {
    let spec = transform_spec(desc.input, desc.planes == Planes::Cols);
    if desc.planes == Planes::Rows {
        (spec, (desc.stack * desc.rows * desc.cols.div_ceil(TRANSFORM_COLS)).div_ceil(8))
    } else {
        (spec, squares(desc))
    }
}

/// The configuration of a fast kernel; `None` if the kernel for all formats is used
/// (`UnitsConfig`).
pub(super) fn config(path: &QuantizePath, num_sms: usize) -> Option<QuantizeConfig> {
    let config = |kernel, spec, ctas: usize, threads, shared_bytes| {
        let launch = Launch { ctas: ctas as u32, threads, cluster: 1, shared_bytes };
        QuantizeConfig { kernel, spec, launch }
    };
    let (kernels, desc, lifted) = (&path.kernels?, &path.last, path.taken == Taken::Lifted);
    Some(match desc.planes {
        Planes::Rows if kernels.hadamard.is_some() => {
            let (ctas, shared) = (units(desc).div_ceil(32).min(num_sms), row_shared_bytes(kernels));
            config(QuantizeKernel::HadamardRows, rows_spec(kernels, false), ctas, UNIT_THREADS, shared)
        }
        Planes::Rows => {
            let chunks = row_chunks(desc.input, desc.codec.rounding());
            let (segments, rounds, ctas) = row_launch(chunks, row_shape(path));
            let spec = rows_spec(kernels, lifted);
            config(QuantizeKernel::Rows { segments, rounds }, spec, ctas, ROW_THREADS, 0)
        }
        Planes::Cols | Planes::Both => {
            let rows = desc.planes == Planes::Both;
            let down = lines_height(path);
            let band = if rows { BAND_STRIPS * TILE / line_rows(path) } else { down };
            let ctas = down * desc.cols.div_ceil(TILE);
            let (spec, shared_bytes) = (cols_spec(kernels, rows, lifted), column_shared_bytes(kernels));
            match kernels.hadamard {
                Some(_) => {
                    let ctas = ctas.min(HADAMARD_CTAS_PER_SM * num_sms);
                    config(QuantizeKernel::HadamardCols, spec, ctas, 256, shared_bytes)
                }
                None => config(QuantizeKernel::Cols { band }, spec, ctas, 256, shared_bytes),
            }
        }
        Planes::Tiles => {
            let shared_bytes = square_shared_bytes(kernels);
            config(QuantizeKernel::Tiles, tiles_spec(kernels), squares(desc), 256, shared_bytes)
        }
    })
}

/// The configuration for rows that are packed into all-to-all records; `None` if a separate kernel packs
/// them.
pub(super) fn pack_config(path: &QuantizePath) -> Option<QuantizeConfig> {
    let (kernels, desc) = (path.kernels.filter(|_| path.packs())?, &path.last);
    // Each row has its own records, so the matrix is not passed as one row.
    let chunks = row_chunks(desc.input, desc.codec.rounding());
    let (segments, rounds, ctas) = row_launch(chunks, (desc.rows, desc.cols));
    let launch = Launch { ctas: ctas as u32, threads: ROW_THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = QuantizeKernel::Rows { segments, rounds };
    Some(QuantizeConfig { kernel, spec: pack_spec(&kernels), launch })
}

/// Every kernel instance of this module.
pub fn instances() -> Vec<Instance> {
    let mut all = Vec::new();
    for kernels in FastKernels::all() {
        all.push(Instance { spec: rows_spec(&kernels, false), shared_bytes: row_shared_bytes(&kernels) });
        if kernels.packs() {
            all.push(Instance { spec: pack_spec(&kernels), shared_bytes: 0 });
        }
        // A transform is applied to rows or to columns, not to both.
        let forms = [false, true].into_iter().filter(|rows| !(*rows && kernels.hadamard.is_some()));
        all.extend(forms.map(|rows| Instance {
            spec: cols_spec(&kernels, rows, false),
            shared_bytes: column_shared_bytes(&kernels),
        }));
        if kernels.lifts(Planes::Rows) {
            all.push(Instance { spec: rows_spec(&kernels, true), shared_bytes: 0 });
        }
        if kernels.lifts(Planes::Cols) {
            let shared_bytes = column_shared_bytes(&kernels);
            all.push(Instance { spec: cols_spec(&kernels, false, true), shared_bytes });
        }
        if kernels.has_tiles() {
            all.push(Instance { spec: tiles_spec(&kernels), shared_bytes: square_shared_bytes(&kernels) });
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
    all
}

#[cfg(test)]
mod tests;
