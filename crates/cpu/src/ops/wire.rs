//! See [`nibble_core::ops::PackRows`] and [`nibble_core::ops::UnpackRows`].

use super::elementwise::for_rows;
use super::permute::{Pads, check_index};
use crate::{Buf, Cpu};
use nibble_core::ops::{PackRows, UnpackRows};
use nibble_core::{Data, Operand, Plain, Result};

/// Copies bytes; a record is codes ‖ scales ‖ the tensor's scale ‖ zeros to a multiple of 16.
pub(crate) fn pack_rows(cpu: &Cpu, op: PackRows<'_, Cpu>) -> Result<Buf<u8>> {
    const OP: &str = "pack_rows";
    op.check()?;
    let index = op.index.as_slice();
    check_index(OP, "index", index, op.rows.rows(), Pads::Allowed)?;
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
    let mut out = op.result(cpu)?;
    for_rows(cpu, out.as_mut_slice(), row_bytes, |first, out| {
        for (record, &row) in out.chunks_exact_mut(row_bytes).zip(&index[first..]) {
            let Ok(row) = usize::try_from(row) else {
                record.fill(0);
                continue;
            };
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
    let kind = op.kind;
    kind.check_rule(OP)?;
    let mut out = op.result(cpu)?;
    let records = Records { cpu, bytes: op.bytes.as_slice(), row_bytes: kind.row_bytes() };
    let (code_bytes, scale_bytes) = (kind.code_bytes(), kind.scale_bytes());
    match &mut out {
        Operand::Plain(x) => match &mut x.data {
            Data::F32(x) => records.read(0, code_bytes, x),
            Data::Bf16(x) => records.read(0, code_bytes, x),
        },
        Operand::Block(x) => {
            records.read(0, code_bytes, &mut x.codes);
            records.read(code_bytes, scale_bytes, &mut x.scales);
            if let Some(of_tensor) = &mut x.tensor_scale {
                records.read(code_bytes + scale_bytes, kind.tensor_scale_bytes(), of_tensor);
            }
        }
    }
    Ok(out)
}

/// Messages, back to back.
struct Records<'a> {
    cpu: &'a Cpu,
    bytes: &'a [u8],
    row_bytes: usize,
}

impl Records<'_> {
    /// Bytes `offset .. offset + width` of every record, as one plane.
    fn read<T: Plain>(&self, offset: usize, width: usize, out: &mut Buf<T>) {
        for_rows(self.cpu, out.as_mut_slice(), width / size_of::<T>(), |first, out| {
            let records = self.bytes[first * self.row_bytes..].chunks_exact(self.row_bytes);
            // Within a record scales need not be aligned: move them as bytes.
            let out: &mut [u8] = bytemuck::cast_slice_mut(out);
            for (out, record) in out.chunks_exact_mut(width).zip(records) {
                out.copy_from_slice(&record[offset..][..width]);
            }
        });
    }
}

#[cfg(test)]
mod tests;
