//! Runs `swiglu` on a GPU: one kernel from BF16 to E4M3 rows or BF16 (`csrc/kernels/swiglu/swiglu.cuh`), and one kernel from BF16 to
//! E4M3 rows and columns (`csrc/kernels/swiglu/swiglu_cols.cuh`). For all other formats a kernel writes a plain matrix
//! (`csrc/kernels/swiglu/swiglu_plain.cuh`), which [`Quantize`](nibble_core::ops::Quantize) converts.

pub(crate) mod swiglu_backward;

pub(crate) use swiglu_backward::swiglu_backward;

use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::tensor_map::{Element, Swizzle, TensorMap, Tiles, TurnedTiles};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{column_stride, plain_arg, plane_args, planes_or_nulls, rule_arg};
use crate::{Buffer, Device};
use nibble_choice::swiglu::{self as sequence, FUSED_RULES, SwigluPath, TILE, check_size};
use nibble_core::formats::{Codec, ScaleRule};
use nibble_core::ops::{Emitted, Swiglu, SwigluOut};
use nibble_core::{BlockScaled, DType, Data, Error, Groups, Operand, Result, Tensor};

const OP: &str = "swiglu";

/// Runs [`Swiglu`] on the GPU.
pub(crate) fn swiglu(cuda: &Cuda, op: Swiglu<'_, Cuda>) -> Result<SwigluOut<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("h", op.h)?;
    buffers.weight(op.weight, op.h.rows)?;
    buffers.groups(op.groups)?;
    sequence::swiglu(cuda, &op)
}

/// Launches the kernel of the path.
pub(crate) fn launch_swiglu(
    cuda: &Cuda,
    op: &Swiglu<'_, Cuda>,
    path: &SwigluPath,
    out: &SwigluOut<Cuda>,
) -> Result<()> {
    let num_sms = cuda.device().info().num_sms;
    match *path {
        SwigluPath::Rows { codec, save_h } => {
            RowsLaunch::new(op, (codec, save_h), num_sms).run(cuda.device(), op, out)
        }
        SwigluPath::RowsCols { codec, capacity } => {
            RowsColsLaunch::new(op, (codec, capacity), num_sms).run(cuda.device(), op, &out.a)
        }
        SwigluPath::Plain(_) => plain(cuda.device(), op, rows_of(OP, &out.a)?.plain(OP)?),
    }
}

/// The result that is plain or quantized along rows.
pub(super) fn rows_of<'a>(op: &'static str, made: &'a Emitted<Cuda>) -> Result<&'a Operand<Cuda>> {
    made.rows.as_ref().ok_or_else(|| Error::shape(op, "rows", "not made", "a row plane"))
}

/// The result that is quantized down columns.
pub(super) fn cols_of<'a>(op: &'static str, made: &'a Emitted<Cuda>) -> Result<&'a BlockScaled<Cuda>> {
    made.cols.as_ref().ok_or_else(|| Error::shape(op, "cols", "not made", "a column plane"))?.block(op)
}

/// The counters; `None` (null) if nothing is counted.
pub(super) fn counts_of(made: &Emitted<Cuda>) -> Option<&Buffer<u64>> {
    made.counts.as_ref().map(|counts| counts.0.get())
}

/// Every kernel instance of this module.
pub(super) fn instances() -> Vec<Instance> {
    let of_rule = |rule| {
        let rows = [false, true].map(|save_h| (rows_spec(Some(rule), save_h), 0));
        rows.into_iter().chain([(rows_cols_spec(rule), ROWS_COLS_SHARED)])
    };
    let plain = [(rows_spec(None, false), 0), (rows_spec(None, true), 0), (plain_spec(), 0)];
    let all = FUSED_RULES.into_iter().flat_map(of_rule).chain(plain);
    let all = all.map(|(spec, shared_bytes)| Instance { spec, shared_bytes });
    all.chain(swiglu_backward::instances()).collect()
}

/// The row ids; `None` (null) if all rows are valid.
pub(super) fn row_ids(groups: Option<&Groups<Cuda>>) -> Option<&Buffer<i32>> {
    groups.map(|groups| groups.row_id.get())
}

const PLAIN_THREADS: usize = 256;

fn plain_spec() -> KernelSpec {
    KernelSpec { source: "kernels/swiglu/swiglu_plain.cuh", name: "nib::swiglu_plain", args: vec![] }
}

/// Writes `a` as a plain matrix.
fn plain(device: &Device, op: &Swiglu<'_, Cuda>, a: &Tensor<Cuda>) -> Result<()> {
    let (rows, f) = (op.h.rows, op.h.cols / 2);
    if rows == 0 || f == 0 {
        return Ok(());
    }
    check_size(OP, rows, f)?;
    let chunks = f.div_ceil(8);
    let ctas = (rows * chunks).div_ceil(PLAIN_THREADS) as u32;
    let launch = Launch { ctas, threads: PLAIN_THREADS as u32, cluster: 1, shared_bytes: 0 };
    let ((h, h_bf16), (out, out_bf16)) = (plain_arg(op.h), plain_arg(a));
    let (weight, row_id) = (op.weight.map(Buf::get), row_ids(op.groups));
    let (by_chunks, chunks) = (Divider::by(chunks as u32), chunks as u32);
    let kernel = device.kernel(&plain_spec())?;
    // SAFETY: `BufferCheck` ensured that h is `[rows, 2f]` and that weights and groups have `rows` rows; `a` is allocated as `[rows, f]`
    // and is not shared yet. The flags state the types.
    unsafe {
        kernel.launch(
            launch,
            &[h, &h_bf16, &weight, out, &out_bf16, &row_id, &(rows as i32), &(f as i32), &by_chunks, &chunks],
        )
    }
}

/// Threads per CTA of `swiglu_rows`, with one CTA per SM.
const ROWS_THREADS: u32 = 640;
/// Columns that a warp processes at a time.
const ROWS_COLS: usize = 512;

/// Without a rule, a is BF16.
fn rows_spec(rule: Option<ScaleRule>, save_h: bool) -> KernelSpec {
    let rule = rule.map_or(TemplateArg::Int(-1), rule_arg);
    KernelSpec {
        source: "kernels/swiglu/swiglu.cuh",
        name: "nib::swiglu_rows",
        args: vec![("kRule", rule), ("kSaveH", TemplateArg::Bool(save_h))],
    }
}

/// A launch of `swiglu_rows`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RowsLaunch {
    /// The format of a; `None` for BF16.
    codec: Option<Codec>,
    save_h: Option<Codec>,
    ctas: u32,
    /// Number of segments per row.
    segments: u32,
}

impl RowsLaunch {
    fn new(op: &Swiglu<'_, Cuda>, (codec, save_h): (Option<Codec>, Option<Codec>), num_sms: u32) -> Self {
        let (rows, f) = (op.h.rows, op.h.cols / 2);
        let segments = f.div_ceil(ROWS_COLS);
        // At most as many CTAs as are needed for `rounds` segments per warp.
        let (tasks, warps) = (rows * segments, ROWS_THREADS as usize / 32);
        let rounds = tasks.div_ceil(warps * num_sms.max(1) as usize);
        let ctas = tasks.div_ceil(warps * rounds) as u32;
        Self { codec, save_h, ctas, segments: segments as u32 }
    }

    fn run(self, device: &Device, op: &Swiglu<'_, Cuda>, out: &SwigluOut<Cuda>) -> Result<()> {
        let no_scales = None::<&Buffer<u8>>;
        let [a, a_scales] = match rows_of(OP, &out.a)? {
            Operand::Plain(a) => [plain_arg(a).0, &no_scales],
            Operand::Block(a) => plane_args(a),
        };
        let counts = counts_of(&out.a);
        let (weight, row_id) = (op.weight.map(Buf::get), row_ids(op.groups));
        let (h, _) = plain_arg(op.h);
        let [h_codes, h_scales] = planes_or_nulls(out.h.as_ref());
        let (rows, f) = (op.h.rows as i32, (op.h.cols / 2) as i32);
        let by_segments = Divider::by(self.segments);
        let launch = Launch { ctas: self.ctas, threads: ROWS_THREADS, cluster: 1, shared_bytes: 0 };
        let kernel =
            device.kernel(&rows_spec(self.codec.map(|codec| codec.rule()), self.save_h.is_some()))?;
        let args: [&dyn KernelArg; 12] = [
            h,
            &weight,
            a,
            a_scales,
            h_codes,
            h_scales,
            &counts,
            &row_id,
            &rows,
            &f,
            &by_segments,
            &self.segments,
        ];
        // SAFETY: `BufferCheck` ensured that h, which is BF16 with f a multiple of 32, is `[rows, 2f]`, and that weights and groups have
        // `rows` rows. The caller allocated the outputs for these sizes and rules, and has not shared them yet.
        unsafe { kernel.launch(launch, &args) }
    }
}

const ROWS_COLS_THREADS: u32 = 512;
/// CTAs of `swiglu_rows_cols` per SM.
const ROWS_COLS_PER_SM: usize = 2;
/// Rows per TMA copy; a box that contains only padding is skipped.
pub(super) const BOX_ROWS: usize = 32;
/// Dynamic shared memory in bytes, the size of the kernel's `RowsColsShared`: the sigmoid table, a tile of h, the factors of 128
/// columns, the ids of 128 rows, barriers, a flag and counts.
const ROWS_COLS_SHARED: usize =
    (SIGMOIDS.next_multiple_of(128) + 2 * TILE * TILE * 2 + 2 * TILE * 4 + 2 * 8 + 4 * 4)
        .next_multiple_of(128);

/// The size in bytes of the kernels' `SigmoidTable`: two arrays of 4049 sigmoids, of which the second starts 32
/// KiB after the first.
pub(super) const SIGMOIDS: usize = 0x8000 + (4049 * 4usize).next_multiple_of(16);

/// A tensor map of a BF16 matrix, with boxes 128 columns wide.
pub(super) fn bf16_tiles(op: &'static str, x: &Tensor<Cuda>) -> Result<TensorMap> {
    let Data::Bf16(values) = &x.data else {
        return Err(Error::shape(op, "type", x.dtype(), DType::Bf16));
    };
    let tiles = Tiles {
        element: Element::Bf16,
        address: values.get().address(),
        rows: x.rows,
        cols: x.cols,
        row_stride_bytes: x.cols * Element::Bf16.bytes(),
        tile_rows: BOX_ROWS,
        tile_cols: TILE,
        swizzle: Swizzle::None,
    };
    tiles.encode()
}

/// A tensor map for writing the tiles of a buffer of E4M3 columns.
pub(super) fn turned_tiles(x: &BlockScaled<Cuda>) -> Result<TensorMap> {
    TurnedTiles { address: x.codes.get().address(), lines: x.cols, stride: x.rows }.encode()
}

fn rows_cols_spec(rule: ScaleRule) -> KernelSpec {
    let args = vec![("kRule", rule_arg(rule))];
    KernelSpec { source: "kernels/swiglu/swiglu_cols.cuh", name: "nib::swiglu_rows_cols", args }
}

/// A launch of `swiglu_rows_cols`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RowsColsLaunch {
    codec: Codec,
    ctas: u32,
    /// Number of rows of the column output.
    capacity: usize,
}

impl RowsColsLaunch {
    fn new(op: &Swiglu<'_, Cuda>, (codec, capacity): (Codec, usize), num_sms: u32) -> Self {
        let f = op.h.cols / 2;
        let tiles = f.div_ceil(TILE) * (capacity / TILE);
        Self { codec, ctas: tiles.min(ROWS_COLS_PER_SM * num_sms as usize) as u32, capacity }
    }

    fn run(self, device: &Device, op: &Swiglu<'_, Cuda>, a: &Emitted<Cuda>) -> Result<()> {
        let (rows, f) = (op.h.rows, op.h.cols / 2);
        let (row_plane, col_plane) = (rows_of(OP, a)?.block(OP)?, cols_of(OP, a)?);
        let ([row_codes, row_scales], [_, col_scales]) = (plane_args(row_plane), plane_args(col_plane));
        let counts = counts_of(a);
        let (weight, row_id) = (op.weight.map(Buf::get), row_ids(op.groups));
        let [h, cols] = [bf16_tiles(OP, op.h)?, turned_tiles(col_plane)?];
        let launch = Launch {
            ctas: self.ctas,
            threads: ROWS_COLS_THREADS,
            cluster: 1,
            shared_bytes: ROWS_COLS_SHARED,
        };
        let kernel = device.kernel(&rows_cols_spec(self.codec.rule()))?;
        let args: [&dyn KernelArg; 13] = [
            &h,
            &weight,
            row_codes,
            row_scales,
            &cols,
            col_scales,
            &counts,
            &row_id,
            &(rows as i32),
            &(f as i32),
            &(self.capacity as i32),
            &(column_stride(self.codec.scale_kind(), f) as u32),
            &Divider::by(f.div_ceil(TILE) as u32),
        ];
        // SAFETY: the map is that of h. `BufferCheck` ensured that h is `[rows, 2f]`, BF16 with f a multiple of 8, and that weights and
        // groups have `rows` rows; the buffers are allocated for these sizes and rules and are not shared yet.
        unsafe { kernel.launch(launch, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_what_the_kernel_lays_out() {
        assert_eq!(ROWS_COLS_SHARED, 115_712);
    }
}
