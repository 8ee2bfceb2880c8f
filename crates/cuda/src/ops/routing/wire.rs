//! Runs `pack_rows`, `unpack_rows` and `unpack_permute` on a GPU (`csrc/kernels/routing/copy_rows.cuh`). A record is codes ‖ scales ‖
//! the tensor scale ‖ zeros up to a multiple of 16 bytes.

use super::copy_rows::{Order, PadRows, Reorder, RowSpans};
use super::permute::expert_order;
use crate::Buffer;
use crate::Cuda;
use crate::backend::Buf;
use crate::ops::buffer_check::BufferCheck;
use nibble_core::ops::{PackRows, UnpackPermute, UnpackRows};
use nibble_core::{Operand, Result, RowKind};

/// Runs [`PackRows`] on the GPU.
pub(crate) fn pack_rows(cuda: &Cuda, op: PackRows<'_, Cuda>) -> Result<Buf<u8>> {
    const OP: &str = "pack_rows";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.operand("rows", op.rows)?;
    let index = buffers.buffer("index", op.index)?;
    let (order, rows) = (Order::Gather(index), index.len());
    let (out, kind) = (op.result(cuda)?, op.rows.row_kind());
    let copy = Reorder { op: OP, device: cuda.device(), kind, order, pads: PadRows::Zeros };
    // SAFETY: `out` is new and stays alive here; `op` borrows the other buffers, which are on this
    // device (`BufferCheck`).
    unsafe { copy.run(RowSpans::of(op.rows), RowSpans::in_messages(out.get(), kind, rows)) }?;
    Ok(out)
}

/// Runs [`UnpackRows`] on the GPU.
pub(crate) fn unpack_rows(cuda: &Cuda, op: UnpackRows<'_, Cuda>) -> Result<Operand<Cuda>> {
    const OP: &str = "unpack_rows";
    op.check()?;
    let bytes = BufferCheck::by(OP, cuda).buffer("bytes", op.bytes)?;
    let out = op.result(cuda)?;
    unpack(OP, cuda, (bytes, op.kind, out.rows()), Order::Same, &out)?;
    Ok(out)
}

/// Runs [`UnpackPermute`] on the GPU.
pub(crate) fn unpack_permute(cuda: &Cuda, op: UnpackPermute<'_, Cuda>) -> Result<Operand<Cuda>> {
    const OP: &str = "unpack_permute";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    let bytes = buffers.buffer("bytes", op.bytes)?;
    let messages = op.messages();
    let order = expert_order(&buffers, op.map, messages)?;
    let out = op.result(cuda)?;
    unpack(OP, cuda, (bytes, op.kind, messages), order, &out)?;
    Ok(out)
}

/// Unpacks all-to-all records on this device to new rows.
fn unpack(
    op: &'static str,
    cuda: &Cuda,
    (bytes, kind, messages): (&Buffer<u8>, RowKind, usize),
    order: Order<'_>,
    to: &Operand<Cuda>,
) -> Result<()> {
    let copy = Reorder { op, device: cuda.device(), kind, order, pads: PadRows::Rows };
    // SAFETY: `to` is a new result, which its owner keeps alive; the messages are borrowed and on this device (`BufferCheck`).
    unsafe { copy.run(RowSpans::in_messages(bytes, kind, messages), RowSpans::of(to)) }
}
