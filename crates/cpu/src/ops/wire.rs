//! See [`nibble_core::ops::PackRows`] and [`nibble_core::ops::UnpackRows`].

use super::elementwise::for_rows;
use super::permute::{Pads, check_index};
use crate::{Buf, Cpu};
use nibble_core::ops::{PackRows, UnpackRows};
use nibble_core::{DType, Data, Operand, Plain, Result, Scales, Tensor};
use nibble_formats::{Format, ScaleRule};

/// Copies bytes; a record is codes ‖ scales ‖ zeros to a multiple of 16.
pub(crate) fn pack_rows(cpu: &Cpu, op: PackRows<'_, Cpu>) -> Result<Buf<u8>> {
    const OP: &str = "pack_rows";
    op.check()?;
    let index = op.index.as_slice();
    check_index(OP, "index", index, op.rows.rows(), Pads::Refused)?;
    let (codes, scales): (&[u8], &[u8]) = match op.rows {
        Operand::Plain(x) => match &x.data {
            Data::F32(x) => (bytemuck::cast_slice(x.as_slice()), &[]),
            Data::Bf16(x) => (bytemuck::cast_slice(x.as_slice()), &[]),
        },
        Operand::Block(x) => match &x.scales {
            Scales::E8m0(s) => (x.codes.as_slice(), s.as_slice()),
            Scales::F32(s) => (x.codes.as_slice(), bytemuck::cast_slice(s.as_slice())),
        },
    };
    let kind = op.rows.row_kind();
    let (code_bytes, scale_bytes, row_bytes) = (kind.code_bytes(), kind.scale_bytes(), kind.row_bytes());
    let mut out = cpu.scratch::<u8>(index.len() * row_bytes);
    for_rows(cpu, out.as_mut_slice(), row_bytes, |first, out| {
        for (record, &row) in out.chunks_exact_mut(row_bytes).zip(&index[first..]) {
            let row = row as usize; // not negative: checked above
            let (of_codes, rest) = record.split_at_mut(code_bytes);
            let (of_scales, padding) = rest.split_at_mut(scale_bytes);
            of_codes.copy_from_slice(&codes[row * code_bytes..][..code_bytes]);
            of_scales.copy_from_slice(&scales[row * scale_bytes..][..scale_bytes]);
            padding.fill(0);
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
    let scales = if kind.rule == ScaleRule::Amax {
        Scales::F32(planes.plane(code_bytes, kind.scale_bytes()))
    } else {
        Scales::E8m0(planes.plane(code_bytes, kind.scale_bytes()))
    };
    Ok(Operand::Block(kind.block_rows(rows, planes.plane(0, code_bytes), scales)))
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
