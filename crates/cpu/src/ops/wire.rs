//! See [`nibble_core::ops::PackRows`] and [`nibble_core::ops::UnpackRows`].

use super::elementwise::for_rows;
use super::permute::{Pads, check_index};
use crate::{Buf, Cpu};
use nibble_core::ops::{PackRows, UnpackRows};
use nibble_core::{DType, Data, Operand, Plain, Result, Tensor};
use nibble_formats::Format;

/// Copies bytes; a record is codes ‖ scales ‖ the tensor's scale ‖ zeros to a multiple of 16.
pub(crate) fn pack_rows(cpu: &Cpu, op: PackRows<'_, Cpu>) -> Result<Buf<u8>> {
    const OP: &str = "pack_rows";
    op.check()?;
    let index = op.index.as_slice();
    check_index(OP, "index", index, op.rows.rows(), Pads::Refused)?;
    let planes: [&[u8]; 3] = match op.rows {
        Operand::Plain(x) => match &x.data {
            Data::F32(x) => [bytemuck::cast_slice(x.as_slice()), &[], &[]],
            Data::Bf16(x) => [bytemuck::cast_slice(x.as_slice()), &[], &[]],
        },
        Operand::Block(x) => {
            let tensor_scale = x.tensor_scale.as_ref().map_or(&[][..], |s| s.as_slice());
            [x.codes.as_slice(), x.scales.as_slice(), bytemuck::cast_slice(tensor_scale)]
        }
    };
    let kind = op.rows.row_kind();
    let widths = [kind.code_bytes(), kind.scale_bytes(), kind.tensor_scale_bytes()];
    let row_bytes = kind.row_bytes();
    let mut out = cpu.scratch::<u8>(index.len() * row_bytes);
    for_rows(cpu, out.as_mut_slice(), row_bytes, |first, out| {
        for (record, &row) in out.chunks_exact_mut(row_bytes).zip(&index[first..]) {
            let row = row as usize; // not negative: checked above
            let mut rest = record;
            for (plane, width) in planes.iter().zip(widths) {
                let (part, after) = rest.split_at_mut(width);
                part.copy_from_slice(&plane[row * width..][..width]);
                rest = after;
            }
            rest.fill(0);
        }
    });
    Ok(out)
}

/// Copies bytes back; what the padding holds does not matter.
pub(crate) fn unpack_rows(cpu: &Cpu, op: UnpackRows<'_, Cpu>) -> Result<Operand<Cpu>> {
    const OP: &str = "unpack_rows";
    op.check()?;
    let (kind, format) = (op.kind, op.kind.format);
    let planes = Records { cpu, bytes: op.bytes.as_slice(), row_bytes: kind.row_bytes() };
    let (rows, cols, code_bytes) = (planes.bytes.len() / planes.row_bytes, kind.cols, kind.code_bytes());
    let dtype = match format {
        Format::F32 => Some(DType::F32),
        Format::Bf16 => Some(DType::Bf16),
        _ => None,
    };
    if let Some(dtype) = dtype {
        let data = match dtype {
            DType::F32 => Data::F32(planes.plane(0, code_bytes)),
            DType::Bf16 => Data::Bf16(planes.plane(0, code_bytes)),
        };
        return Ok(Operand::Plain(Tensor::new(data, rows, cols)?));
    }
    kind.check_rule(OP)?;
    let scales = planes.plane(code_bytes, kind.scale_bytes());
    let (at, tensor_bytes) = (code_bytes + kind.scale_bytes(), kind.tensor_scale_bytes());
    let tensor_scale = (tensor_bytes > 0).then(|| planes.plane(at, tensor_bytes));
    Ok(Operand::Block(kind.block_rows(rows, planes.plane(0, code_bytes), scales, tensor_scale)))
}

/// Messages, back to back.
struct Records<'a> {
    cpu: &'a Cpu,
    bytes: &'a [u8],
    row_bytes: usize,
}

impl Records<'_> {
    /// Bytes `offset .. offset + width` of every record, as one plane.
    fn plane<T: Plain>(&self, offset: usize, width: usize) -> Buf<T> {
        let rows = self.bytes.len() / self.row_bytes;
        let mut out = self.cpu.scratch::<T>(rows * width / size_of::<T>());
        for_rows(self.cpu, out.as_mut_slice(), width / size_of::<T>(), |first, out| {
            let records = self.bytes[first * self.row_bytes..].chunks_exact(self.row_bytes);
            // Within a record scales need not be aligned: move them as bytes.
            let out: &mut [u8] = bytemuck::cast_slice_mut(out);
            for (out, record) in out.chunks_exact_mut(width).zip(records) {
                out.copy_from_slice(&record[offset..][..width]);
            }
        });
        out
    }
}

#[cfg(test)]
mod tests;
