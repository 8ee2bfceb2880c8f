//! Runs `swiglu_backward` on a GPU: one kernel from BF16 or MXFP4 to all E4M3 forms that the next GEMMs need
//! (`csrc/kernels/swiglu/swiglu_backward.cuh`). For all other formats a kernel writes plain F32 matrices
//! (`csrc/kernels/swiglu/swiglu_backward_plain.cuh`), which [`Quantize`](nibble_core::ops::Quantize) converts.

use super::{BOX_ROWS, SIGMOIDS, bf16_tiles, cols_of, counts_of, row_ids, rows_of, turned_tiles};
use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::tensor_map::{Element, Swizzle, TensorMap, Tiles};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{plain_arg, plain_or_null, plane_args, rule_arg};
use crate::{Buffer, Device};
use nibble_choice::swiglu::{self as sequence, FUSED_RULES, HSource, SwigluBackwardPath, TILE, check_size};
use nibble_core::formats::{BlockAxis, Codec, ScaleRule};
use nibble_core::ops::{Emitted, SwigluBackward, SwigluGrads};
use nibble_core::{BlockScaled, DType, Error, Operand, Result};

const OP: &str = "swiglu_backward";

/// Runs [`SwigluBackward`] on the GPU.
pub(crate) fn swiglu_backward(cuda: &Cuda, op: SwigluBackward<'_, Cuda>) -> Result<SwigluGrads<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.operand("h", op.h)?;
    buffers.tensor("da", op.da)?;
    buffers.weight(op.weight, op.da.rows)?;
    buffers.groups(op.groups)?;
    if let Operand::Block(h) = op.h
        && h.axis != BlockAxis::Row
    {
        return Err(Error::shape(OP, "h.axis", h.axis, "row"));
    }
    sequence::swiglu_backward(cuda, &op)
}

/// Launches the kernels of the path.
pub(crate) fn launch_swiglu_backward(
    cuda: &Cuda,
    op: &SwigluBackward<'_, Cuda>,
    path: &SwigluBackwardPath,
    (h, parts): (&Operand<Cuda>, Option<&Buffer<f32>>),
    out: &SwigluGrads<Cuda>,
) -> Result<()> {
    match (*path, parts) {
        (SwigluBackwardPath::Fused { source, codec, capacity, .. }, Some(parts)) => {
            let a = out
                .a
                .as_ref()
                .ok_or_else(|| Error::shape(OP, "a", "not made", "the kernel always writes it"))?;
            let fused = Fused::new(op, source, (codec, capacity), cuda.device().info().num_sms);
            fused.run(cuda.device(), op, parts, (&out.dh, a))?;
            add_partial_sums(cuda.device(), parts, out.dweight.get(), op.da.cols / TILE)
        }
        _ => plain(cuda.device(), op, h, (&out.dh, out.a.as_ref(), out.dweight.get())),
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let fused = |source: HSource| {
        FUSED_RULES
            .map(|rule| Instance { spec: fused_spec(source, rule), shared_bytes: fused_shared_bytes(source) })
    };
    let plain = [Chunk::Any, Chunk::Bf16, Chunk::Saved]
        .map(|chunk| Instance { spec: plain_spec(chunk), shared_bytes: plain_shared_bytes(chunk) });
    let parts = [Instance { spec: parts_spec(), shared_bytes: 0 }];
    [&fused(HSource::Saved)[..], &fused(HSource::Plain), &plain, &parts].concat()
}

// Each tile gives one partial sum of the gate weight's gradient per row.
const _: () = assert!(TILE == SwigluBackward::<Cuda>::PART);
const FUSED_THREADS: u32 = 512;
const SOURCE: &str = "kernels/swiglu/swiglu_backward.cuh";

/// Dynamic shared memory in bytes: the size of the kernel's `BackwardShared`.
const fn fused_shared_bytes(source: HSource) -> usize {
    let (table, tiles, stages, h, spares) = match source {
        HSource::Saved => (256 * 16 * 8 + 256 * 16, 3, 2, 2 * TILE * (TILE / 2 + 4), 3),
        // One tile of codes fits between the two arrays of sigmoids.
        HSource::Plain => (SIGMOIDS, 2, 1, 2 * TILE * TILE * 2, 4),
    };
    let stage = h + TILE * TILE * 2 + TILE * 4;
    let spare = spares * FUSED_THREADS as usize * 16;
    let maxima = 8 * 3 * TILE * 4;
    let (inverse, halves, row_id) = (3 * TILE * 4, (2 * 2 + 2) * TILE * 4, 2 * stages * TILE * 4);
    let (barriers, flag, total) = ((stages + 1) * 8, 4, 3 * 4);
    let before = table.next_multiple_of(1024) + tiles * TILE * TILE + stages * stage + spare;
    (before + maxima + inverse + halves + row_id + barriers + flag + total).next_multiple_of(1024)
}

fn fused_spec(source: HSource, rule: ScaleRule) -> KernelSpec {
    let h = match source {
        HSource::Saved => "nib::SavedH",
        HSource::Plain => "nib::PlainH",
    };
    KernelSpec {
        source: SOURCE,
        name: "nib::swiglu_backward",
        args: vec![("H", TemplateArg::Type(h)), ("kRule", rule_arg(rule))],
    }
}

fn parts_spec() -> KernelSpec {
    KernelSpec { source: "kernels/swiglu/add_partial_sums.cuh", name: "nib::add_partial_sums", args: vec![] }
}

/// A launch of the fused kernel, which writes all outputs.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Fused {
    source: HSource,
    codec: Codec,
    ctas: u32,
    /// Number of rows of the column outputs.
    capacity: usize,
}

impl Fused {
    fn new(
        op: &SwigluBackward<'_, Cuda>,
        source: HSource,
        (codec, capacity): (Codec, usize),
        num_sms: u32,
    ) -> Self {
        let tiles = op.da.cols / TILE * (capacity / TILE);
        Self { source, codec, ctas: tiles.min(num_sms as usize) as u32, capacity }
    }

    fn run(
        self,
        device: &Device,
        op: &SwigluBackward<'_, Cuda>,
        parts: &Buffer<f32>,
        (dh, a): (&Emitted<Cuda>, &Emitted<Cuda>),
    ) -> Result<()> {
        let (rows, f) = (op.da.rows, op.da.cols);
        let (dh_rows, dh_cols, a_cols) = (rows_of(OP, dh)?.block(OP)?, cols_of(OP, dh)?, cols_of(OP, a)?);
        let (dh_counts, a_counts) = (counts_of(dh), counts_of(a));
        let (weight, row_id) = (op.weight.map(Buf::get), row_ids(op.groups));
        let no_scales = None::<&Buffer<u8>>;
        let (h, h_scales): (TensorMap, &dyn KernelArg) = match op.h {
            Operand::Plain(h) => (bf16_tiles(OP, h)?, &no_scales),
            Operand::Block(h) => (code_tiles(h)?, h.e8m0_scales(OP)?.get()),
        };
        let da = bf16_tiles(OP, op.da)?;
        let [dh_col_tiles, a_tiles] = [turned_tiles(dh_cols)?, turned_tiles(a_cols)?];
        let launch = Launch {
            ctas: self.ctas,
            threads: FUSED_THREADS,
            cluster: 1,
            shared_bytes: fused_shared_bytes(self.source),
        };
        let kernel = device.kernel(&fused_spec(self.source, self.codec.rule()))?;
        let ([row_codes, row_scales], [_, col_scales]) = (plane_args(dh_rows), plane_args(dh_cols));
        let [_, a_scales] = plane_args(a_cols);
        let args: [&dyn KernelArg; 18] = [
            &h,
            h_scales,
            &da,
            &weight,
            row_codes,
            row_scales,
            &dh_col_tiles,
            col_scales,
            &a_tiles,
            a_scales,
            parts,
            &dh_counts,
            &a_counts,
            &row_id,
            &(rows as i32),
            &(f as i32),
            &(self.capacity as i32),
            &Divider::by((f / TILE) as u32),
        ];
        // SAFETY: `BufferCheck` ensured that h is `[rows, 2f]` and da `[rows, f]`, and that weights and groups have `rows` rows; the path
        // determines their types, and that f is a multiple of the tile. The buffers are allocated for these sizes and rules and are not
        // shared yet.
        unsafe { kernel.launch(launch, &args) }
    }
}

/// A tensor map of the codes of an MXFP4 matrix, with boxes 128 columns wide.
fn code_tiles(h: &BlockScaled<Cuda>) -> Result<TensorMap> {
    let row_bytes = h.cols / 2;
    let tiles = Tiles {
        element: Element::U8,
        address: h.codes.get().address(),
        rows: h.rows,
        cols: row_bytes,
        row_stride_bytes: row_bytes,
        tile_rows: BOX_ROWS,
        tile_cols: TILE / 2,
        swizzle: Swizzle::Bytes64,
    };
    tiles.encode()
}

const PARTS_THREADS: usize = 256;

/// Adds the partial sums `[parts][rows]` to give the gate weights' gradients.
fn add_partial_sums(
    device: &Device,
    parts: &Buffer<f32>,
    dweight: &Buffer<f32>,
    num_parts: usize,
) -> Result<()> {
    let rows = dweight.len();
    let ctas = rows.div_ceil(PARTS_THREADS) as u32;
    let launch = Launch { ctas, threads: PARTS_THREADS as u32, cluster: 1, shared_bytes: 0 };
    let kernel = device.kernel(&parts_spec())?;
    // SAFETY: there are `num_parts · rows` partial sums, and `rows` sums.
    unsafe { kernel.launch(launch, &[parts, dweight, &(rows as i32), &(num_parts as i32)]) }
}

const PLAIN_THREADS: usize = 256;

/// CTAs per SM, if sigmoids are looked up in a table.
const PLAIN_PER_SM: usize = 4;

/// The inputs that the plain kernel reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    /// Both inputs are F32 or BF16.
    Any,
    /// Both inputs are BF16.
    Bf16,
    /// h is MXFP4, and da is BF16.
    Saved,
}

fn plain_spec(chunk: Chunk) -> KernelSpec {
    let chunk = match chunk {
        Chunk::Any => "nib::AnyChunk",
        Chunk::Bf16 => "nib::Bf16Chunk",
        Chunk::Saved => "nib::SavedChunk",
    };
    KernelSpec {
        source: "kernels/swiglu/swiglu_backward_plain.cuh",
        name: "nib::swiglu_backward_plain",
        args: vec![("Chunk", TemplateArg::Type(chunk))],
    }
}

/// The size of dynamic shared memory in bytes.
const fn plain_shared_bytes(chunk: Chunk) -> usize {
    match chunk {
        Chunk::Any => 0,
        Chunk::Bf16 | Chunk::Saved => SIGMOIDS,
    }
}

/// Supports any format: writes dh as a plain matrix, and `a` too if it is requested.
fn plain(
    device: &Device,
    op: &SwigluBackward<'_, Cuda>,
    h: &Operand<Cuda>,
    (dh, a, dweight): (&Emitted<Cuda>, Option<&Emitted<Cuda>>, &Buffer<f32>),
) -> Result<()> {
    let (rows, f) = (op.da.rows, op.da.cols);
    if rows == 0 {
        return Ok(());
    }
    check_size(OP, rows, f)?;
    let dh = rows_of(OP, dh)?.plain(OP)?;
    let a = a.map(|a| rows_of(OP, a)?.plain(OP)).transpose()?;
    let bf16 = f.is_multiple_of(8) && op.da.dtype() == DType::Bf16;
    let no_scales = None::<&Buffer<u8>>;
    let (chunk, [h, h_scales], h_bf16): (Chunk, [&dyn KernelArg; 2], i32) = match h {
        Operand::Block(h) => (Chunk::Saved, plane_args(h), 0),
        Operand::Plain(h) => {
            let chunk = if bf16 && h.dtype() == DType::Bf16 { Chunk::Bf16 } else { Chunk::Any };
            let (h, h_bf16) = plain_arg(h);
            (chunk, [h, &no_scales], h_bf16)
        }
    };
    let most = if chunk == Chunk::Any { usize::MAX } else { PLAIN_PER_SM * device.info().num_sms as usize };
    let ctas = rows.div_ceil(PLAIN_THREADS / 32).min(most) as u32;
    let threads = PLAIN_THREADS as u32;
    let launch = Launch { ctas, threads, cluster: 1, shared_bytes: plain_shared_bytes(chunk) };
    let ((da, da_bf16), (dh, dh_bf16)) = (plain_arg(op.da), plain_arg(dh));
    let (a, a_bf16) = (plain_or_null(a), a.map_or(0, |a| plain_arg(a).1));
    let (weight, row_id) = (op.weight.map(Buf::get), row_ids(op.groups));
    let (rows, f) = (rows as i32, f as i32);
    let args: [&dyn KernelArg; 14] =
        [h, h_scales, &h_bf16, da, &da_bf16, &weight, dh, &dh_bf16, a, &a_bf16, dweight, &row_id, &rows, &f];
    let kernel = device.kernel(&plain_spec(chunk))?;
    // SAFETY: `BufferCheck` ensured that h is `[rows, 2f]` (unless it has just been decoded) and da `[rows, f]`, and that weights and
    // groups have `rows` rows. The flags state the types, and the instance supports these types and f. If blocks were not decoded, they are
    // MXFP4 rows with f in whole blocks, and da is BF16; `SwigluBackwardPath` ensures this.
    // The outputs are allocated for these sizes and are not shared yet.
    unsafe { kernel.launch(launch, &args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_fits_a_multiprocessor() {
        assert_eq!([HSource::Saved, HSource::Plain].map(fused_shared_bytes), [231_424, 232_448]);
    }
}
