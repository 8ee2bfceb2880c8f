//! Runs `tile_scales` and `untile_scales` on a GPU (`csrc/kernels/convert/scale_tiles.cuh`).

use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::{Buffer, Cuda};
use nibble_core::formats::{TILE_COLS, TILE_ROWS};
use nibble_core::ops::{CutScales, CutSide, TileScales, UntileScales};
use nibble_core::{Error, Result};

const THREADS: u32 = 256;
/// Tiles per CTA; each warp has one tile.
const TILES_A_CTA: usize = 8;
/// Number of bytes of a tile.
const TILE_BYTES: usize = TILE_ROWS * TILE_COLS;

/// Runs [`TileScales`] on the GPU.
pub(crate) fn tile_scales(cuda: &Cuda, op: TileScales<'_, Cuda>) -> Result<Buf<u8>> {
    op.check()?;
    let buffers = BufferCheck::by("tile_scales", cuda);
    let (scales, starts) = (buffers.buffer("scales", op.scales)?, buffers.buffer("starts", op.starts)?);
    // The buffer may end with less than a tile after the last whole tile.
    let out = op.result(cuda)?;
    launch(cuda, "tile_scales", true, &op.matrix, [scales, out.get()], starts)?;
    Ok(out)
}

/// Runs [`UntileScales`] on the GPU.
pub(crate) fn untile_scales(cuda: &Cuda, op: UntileScales<'_, Cuda>) -> Result<Buf<u8>> {
    op.check()?;
    let buffers = BufferCheck::by("untile_scales", cuda);
    let (tiles, starts) = (buffers.buffer("tiles", op.tiles)?, buffers.buffer("starts", op.starts)?);
    let out = op.result(cuda)?;
    launch(cuda, "untile_scales", false, &op.matrix, [out.get(), tiles], starts)?;
    Ok(out)
}

fn launch(
    cuda: &Cuda,
    op: &'static str,
    to_tiles: bool,
    matrix: &CutScales,
    [dense, tiles]: [&Buffer<u8>; 2],
    starts: &Buffer<i32>,
) -> Result<()> {
    let num_tiles = tiles.len() / TILE_BYTES;
    if num_tiles == 0 {
        return Ok(());
    }
    if num_tiles.max(matrix.rows).max(matrix.cols) >= 1 << 31 {
        let got = format!("{} x {}, {num_tiles} tiles", matrix.rows, matrix.cols);
        return Err(Error::shape(op, "matrix", got, "below 2^31 each"));
    }
    let launch = Launch {
        ctas: num_tiles.div_ceil(TILES_A_CTA) as u32,
        threads: THREADS,
        cluster: 1,
        shared_bytes: 0,
    };
    // `check` ensured that `per_scale` is below 2^31 if the matrix has scales; if it has none, only zeros
    // are divided.
    let per_scale = matrix.per_scale.min(1 << 31);
    let [num_groups, rows, cols, per_scale, num_tiles] =
        [starts.len() - 1, matrix.rows, matrix.cols, per_scale, num_tiles].map(|n| n as u32);
    let kernel = cuda.device().kernel(&spec(matrix.side, to_tiles))?;
    // SAFETY: all buffers are on this device (`BufferCheck`). `dense` has rows · cols bytes, `tiles` has `num_tiles` whole tiles, and
    // `starts` has `num_groups` + 1 values. The kernel clamps groups to the matrix, so they have no more tiles than `CutScales::tiled_len`
    // counts. Of `dense` and `tiles`, the one that is read belongs to the operation, and the one that is written is new.
    unsafe {
        kernel.launch(launch, &[dense, tiles, starts, &num_groups, &rows, &cols, &per_scale, &num_tiles])
    }
}

fn spec(side: CutSide, to_tiles: bool) -> KernelSpec {
    let args = vec![
        ("kCutRows", TemplateArg::Bool(side == CutSide::Rows)),
        ("kToTiles", TemplateArg::Bool(to_tiles)),
    ];
    KernelSpec { source: "kernels/convert/scale_tiles.cuh", name: "nib::tile_scales", args }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |side, to_tiles| Instance { spec: spec(side, to_tiles), shared_bytes: 0 };
    [CutSide::Rows, CutSide::Cols].into_iter().flat_map(|side| [of(side, true), of(side, false)]).collect()
}
