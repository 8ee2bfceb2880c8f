//! `pack_rows`, `unpack_rows` on a GPU (`csrc/kernels/routing/copy_rows.cuh`): a record is codes ‖ scales ‖ the tensor's scale ‖ zeros to a
//! multiple of 16.

use super::copy_rows::{CopyRows, Order, Plane, Span};
use crate::Buffer;
use crate::Cuda;
use crate::backend::Buf;
use crate::ops::buffer_check::BufferCheck;
use nibble_core::ops::{PackRows, UnpackRows};
use nibble_core::{BlockScaled, Data, Operand, Plain, Result, RowKind};

/// See [`PackRows`].
pub(crate) fn pack_rows(cuda: &Cuda, op: PackRows<'_, Cuda>) -> Result<Buf<u8>> {
    const OP: &str = "pack_rows";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.operand("rows", op.rows)?;
    let index = buffers.buffer("index", op.index)?;
    let kind = op.rows.row_kind();
    let (code_bytes, scale_bytes, row_bytes) = (kind.code_bytes(), kind.scale_bytes(), kind.row_bytes());
    let (codes, scales) = match op.rows {
        Operand::Plain(x) => match &x.data {
            Data::F32(x) => (Span::of(x.get(), code_bytes), None),
            Data::Bf16(x) => (Span::of(x.get(), code_bytes), None),
        },
        Operand::Block(x) => {
            (Span::of(x.codes.get(), code_bytes), Some(Span::of(x.scales.get(), scale_bytes)))
        }
    };
    let tensor_bytes = kind.tensor_scale_bytes();
    let out = op.result(cuda)?;
    let to = Span::of(out.get(), row_bytes);
    let copy = CopyRows {
        op: OP,
        codes: Plane { from: codes, to, bytes: code_bytes, pad: 0 },
        scales: scales.map(|from| Plane { from, to: to.skipping(code_bytes), bytes: scale_bytes, pad: 0 }),
        order: Order::Gather(index),
        rows: index.len(),
        rows_in: op.rows.rows(),
    };
    // SAFETY: `out` is new and kept here; the rest is borrowed by `op`, on this device (`BufferCheck`).
    unsafe { copy.run(cuda.device()) }?;
    if let Operand::Block(BlockScaled { tensor_scale: Some(of_rows), .. }) = op.rows {
        let from = Span::of(of_rows.get(), tensor_bytes);
        let to = to.skipping(code_bytes + scale_bytes);
        let copy = CopyRows {
            op: OP,
            codes: Plane { from, to, bytes: tensor_bytes, pad: 0 },
            scales: None,
            order: Order::Gather(index),
            rows: index.len(),
            rows_in: op.rows.rows(),
        };
        // SAFETY: as above.
        unsafe { copy.run(cuda.device()) }?;
    }
    Ok(out)
}

/// See [`UnpackRows`].
pub(crate) fn unpack_rows(cuda: &Cuda, op: UnpackRows<'_, Cuda>) -> Result<Operand<Cuda>> {
    const OP: &str = "unpack_rows";
    op.check()?;
    op.kind.check_rule(OP)?;
    let bytes = BufferCheck::by(OP, cuda).buffer("bytes", op.bytes)?;
    let (out, kind) = (op.result(cuda)?, op.kind);
    let records = Records { cuda, bytes, kind, rows: out.rows() };
    match &out {
        Operand::Plain(x) => match &x.data {
            Data::F32(to) => records.copy(records.plane(to, 0, kind.code_bytes()), None)?,
            Data::Bf16(to) => records.copy(records.plane(to, 0, kind.code_bytes()), None)?,
        },
        Operand::Block(x) => {
            let codes = records.plane(&x.codes, 0, kind.code_bytes());
            records.copy(codes, Some(records.plane(&x.scales, kind.code_bytes(), kind.scale_bytes())))?;
            if let Some(to) = &x.tensor_scale {
                let offset = kind.code_bytes() + kind.scale_bytes();
                records.copy(records.plane(to, offset, kind.tensor_scale_bytes()), None)?;
            }
        }
    }
    Ok(out)
}

/// Messages, back to back.
struct Records<'a> {
    cuda: &'a Cuda,
    bytes: &'a Buffer<u8>,
    kind: RowKind,
    rows: usize,
}

impl Records<'_> {
    /// The plane that fills rows of `bytes` from `offset` of each record on.
    fn plane<T: Plain>(&self, to: &Buf<T>, offset: usize, bytes: usize) -> Plane {
        let from = Span::of(self.bytes, self.kind.row_bytes()).skipping(offset);
        Plane { from, to: Span::of(to.get(), bytes), bytes, pad: 0 }
    }

    fn copy(&self, codes: Plane, scales: Option<Plane>) -> Result<()> {
        let (rows, rows_in) = (self.rows, self.rows);
        let copy = CopyRows { op: "unpack_rows", codes, scales, order: Order::Same, rows, rows_in };
        // SAFETY: the planes write new buffers, which the caller keeps, and read the borrowed messages, on this device (`BufferCheck`).
        unsafe { copy.run(self.cuda.device()) }
    }
}
