//! `pack_rows`, `unpack_rows` on a GPU (`csrc/kernels/routing/copy_rows.cuh`): a record is codes ‖ scales ‖ the tensor's scale ‖ zeros to a
//! multiple of 16.

use super::copy_rows::{CopyRows, Order, Plane, Span};
use crate::Buffer;
use crate::Cuda;
use crate::backend::Buf;
use crate::ops::buffer_check::BufferCheck;
use nibble_core::ops::{PackRows, UnpackRows};
use nibble_core::{BlockScaled, Data, Error, Operand, Plain, Result, RowKind, Tensor};
use nibble_formats::Format;

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
    let len = index.len().checked_mul(row_bytes);
    let len =
        len.ok_or_else(|| Error::shape(OP, "index.len()", index.len(), "a buffer that fits the memory"))?;
    // The kernel writes only codes and scales, so the zeros that pad records to 16 bytes are filled in first.
    let tensor_bytes = kind.tensor_scale_bytes();
    let out = if code_bytes + scale_bytes + tensor_bytes == row_bytes {
        cuda.device().alloc::<u8>(len)?
    } else {
        cuda.device().filled(len, 0)?
    };
    let to = Span::of(&out, row_bytes);
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
    Ok(Buf::new(out))
}

/// See [`UnpackRows`].
pub(crate) fn unpack_rows(cuda: &Cuda, op: UnpackRows<'_, Cuda>) -> Result<Operand<Cuda>> {
    const OP: &str = "unpack_rows";
    op.check()?;
    let (kind, format) = (op.kind, op.kind.format);
    let bytes = BufferCheck::by(OP, cuda).buffer("bytes", op.bytes)?;
    let records = Records { cuda, bytes, kind, rows: bytes.len() / kind.row_bytes() };
    let (rows, cols) = (records.rows, kind.cols);
    match format {
        Format::F32 => return Tensor::new(Data::F32(records.plain()?), rows, cols).map(Operand::Plain),
        Format::Bf16 => return Tensor::new(Data::Bf16(records.plain()?), rows, cols).map(Operand::Plain),
        _ => {}
    }
    kind.check_rule(OP)?;
    let (codes, scales) = records.blocks()?;
    let tensor_scale = records.tensor_scale()?;
    Ok(Operand::Block(kind.block_rows(rows, codes, scales, tensor_scale)))
}

/// Messages, back to back.
struct Records<'a> {
    cuda: &'a Cuda,
    bytes: &'a Buffer<u8>,
    kind: RowKind,
    rows: usize,
}

impl Records<'_> {
    /// A new buffer of `bytes` a row, and the plane that fills it from `offset` of each record.
    fn plane<T: Plain>(&self, offset: usize, bytes: usize) -> Result<(Buffer<T>, Plane)> {
        let to = self.cuda.device().alloc::<T>(self.rows * bytes / size_of::<T>())?;
        let from = Span::of(self.bytes, self.kind.row_bytes()).skipping(offset);
        let plane = Plane { from, to: Span::of(&to, bytes), bytes, pad: 0 };
        Ok((to, plane))
    }

    fn copy(&self, codes: Plane, scales: Option<Plane>) -> Result<()> {
        let (rows, rows_in) = (self.rows, self.rows);
        let copy = CopyRows { op: "unpack_rows", codes, scales, order: Order::Same, rows, rows_in };
        // SAFETY: the planes write new buffers, which the caller keeps, and read the borrowed messages, on this device (`BufferCheck`).
        unsafe { copy.run(self.cuda.device()) }
    }

    fn plain<T: Plain>(&self) -> Result<Buf<T>> {
        let (to, plane) = self.plane(0, self.kind.code_bytes())?;
        self.copy(plane, None)?;
        Ok(Buf::new(to))
    }

    /// The tensor's scale of each record, for formats that have one.
    fn tensor_scale(&self) -> Result<Option<Buf<f32>>> {
        let (offset, bytes) =
            (self.kind.code_bytes() + self.kind.scale_bytes(), self.kind.tensor_scale_bytes());
        if bytes == 0 {
            return Ok(None);
        }
        let (to, plane) = self.plane(offset, bytes)?;
        self.copy(plane, None)?;
        Ok(Some(Buf::new(to)))
    }

    fn blocks(&self) -> Result<(Buf<u8>, Buf<u8>)> {
        let (codes, of_codes) = self.plane(0, self.kind.code_bytes())?;
        let (scales, of_scales) = self.plane(self.kind.code_bytes(), self.kind.scale_bytes())?;
        self.copy(of_codes, Some(of_scales))?;
        Ok((Buf::new(codes), Buf::new(scales)))
    }
}
