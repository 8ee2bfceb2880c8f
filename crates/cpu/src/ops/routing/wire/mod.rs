//! The CPU code of [`nibble_core::ops::PackRows`], [`nibble_core::ops::QuantizePack`], [`nibble_core::ops::UnpackRows`] and
//! [`nibble_core::ops::UnpackPermute`].

use crate::ops::convert::quantize::quantize;
use crate::ops::plain::elementwise::for_rows;
use crate::ops::routing::permute::{Pads, check_index, fill_padding, source_rows};
use crate::{Buf, Cpu};
use half::bf16;
use nibble_core::ops::{Counts, PackRows, PackedRows, QuantizePack, UnpackPermute, UnpackRows};
use nibble_core::{Data, Error, Operand, Plain, Result, RowKind};

/// Packs rows by copying bytes. A record is codes ‖ scales ‖ tensor scale ‖ zeros up to a multiple of 16 bytes.
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

/// Quantizes and packs rows, after checking that `index` and `place` are consistent.
pub(crate) fn quantize_pack(cpu: &Cpu, op: QuantizePack<'_, Cpu>) -> Result<PackedRows<Cpu>> {
    const OP: &str = "quantize_pack";
    op.check()?;
    let (index, place) = (op.index.as_slice(), op.place.as_slice());
    check_index(OP, "index", index, op.quantize.x.rows, Pads::Allowed)?;
    check_index(OP, "place", place, index.len(), Pads::Allowed)?;
    let mut row_of = vec![-1; index.len()];
    for (slot, &message) in place.iter().enumerate().filter(|(_, message)| **message >= 0) {
        let row = std::mem::replace(&mut row_of[message as usize], (slot / op.top_k) as i32);
        if row >= 0 {
            let got = format!("message {message} twice");
            return Err(Error::shape(OP, "place", got, "each message once"));
        }
    }
    if let Some(message) = row_of.iter().zip(index).position(|(row, index)| *row != (*index).max(-1)) {
        let expected = format!("row {}, as index says", index[message].max(-1));
        let got = format!("row {} in message {message}", row_of[message]);
        return Err(Error::shape(OP, "place", got, expected));
    }
    let made = quantize(cpu, op.quantize)?;
    let bytes = pack_rows(cpu, PackRows { rows: &made.take_rows(OP)?, index: op.index })?;
    let counts = made.counts.map_or_else(|| Counts::zeros(cpu), Ok)?;
    Ok(PackedRows { bytes, counts, found: made.found })
}

/// Unpacks rows by copying bytes; the padding is ignored.
pub(crate) fn unpack_rows(cpu: &Cpu, op: UnpackRows<'_, Cpu>) -> Result<Operand<Cpu>> {
    op.check()?;
    let mut out = op.result(cpu)?;
    Records { cpu, bytes: op.bytes.as_slice(), kind: op.kind, order: None }.read(&mut out);
    Ok(out)
}

/// Unpacks rows as [`unpack_rows`] does, and copies each record to all of its rows.
pub(crate) fn unpack_permute(cpu: &Cpu, op: UnpackPermute<'_, Cpu>) -> Result<Operand<Cpu>> {
    op.check()?;
    let order = source_rows("unpack_permute", op.map, op.messages())?;
    let mut out = op.result(cpu)?;
    Records { cpu, bytes: op.bytes.as_slice(), kind: op.kind, order: Some(order) }.read(&mut out);
    Ok(out)
}

/// Packed rows, stored contiguously.
struct Records<'a> {
    cpu: &'a Cpu,
    bytes: &'a [u8],
    kind: RowKind,
    /// The record index of each row, negative for padding; `None` if row i is record i.
    order: Option<&'a [i32]>,
}

impl Records<'_> {
    /// Reads codes and scales of all rows. The caller has checked the indices.
    fn read(&self, out: &mut Operand<Cpu>) {
        let (code_bytes, scale_bytes) = (self.kind.code_bytes(), self.kind.scale_bytes());
        match out {
            Operand::Plain(x) => match &mut x.data {
                Data::F32(x) => self.read_plane(0, code_bytes, 0.0, x),
                Data::Bf16(x) => self.read_plane(0, code_bytes, bf16::ZERO, x),
            },
            Operand::Block(x) => {
                self.read_plane(0, code_bytes, 0, &mut x.codes);
                self.read_plane(code_bytes, scale_bytes, 0, &mut x.scales);
                if let Some(order) = self.order {
                    fill_padding(self.cpu, (self.kind.scale_kind(), scale_bytes), order, &mut x.scales);
                }
                if let Some(of_tensor) = &mut x.tensor_scale {
                    let (offset, width) = (code_bytes + scale_bytes, self.kind.tensor_scale_bytes());
                    self.read_plane(offset, width, 1.0, of_tensor);
                }
            }
        }
    }

    /// Copies bytes `offset .. offset + width` of each record to one buffer.
    fn read_plane<T: Plain>(&self, offset: usize, width: usize, pad: T, out: &mut Buf<T>) {
        let row_bytes = self.kind.row_bytes();
        let record_of = |row: usize| self.order.map_or(Some(row), |order| usize::try_from(order[row]).ok());
        let values = width / size_of::<T>();
        for_rows(self.cpu, out.as_mut_slice(), values, |first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(values)) {
                let Some(record) = record_of(row) else {
                    out.fill(pad);
                    continue;
                };
                // Within a record, scales need not be aligned, so they are copied as bytes.
                let from = &self.bytes[record * row_bytes + offset..][..width];
                bytemuck::cast_slice_mut::<T, u8>(out).copy_from_slice(from);
            }
        });
    }
}

#[cfg(test)]
mod tests;
