//! Access to code and scale buffers while they are written.

use crate::{Buf, Cpu};
use nibble_core::ops::{Counts, Emitted};
use nibble_core::{BlockScaled, Error, Operand, Result};
use nibble_formats::{Format, Scale, ScalePlane, ScalePlaneMut, pack_codes, packed_code};

/// The quantized tensor of an optional result, if the result exists.
pub(crate) fn plane(made: &mut Option<Operand<Cpu>>) -> Option<&mut BlockScaled<Cpu>> {
    match made {
        Some(Operand::Block(plane)) => Some(plane),
        Some(Operand::Plain(_)) | None => None,
    }
}

/// Both orders of a weight while they are written: the original matrix, and its transpose.
pub(crate) fn both<'a>(
    op: &'static str,
    made: &'a mut Emitted<Cpu>,
) -> Result<[&'a mut BlockScaled<Cpu>; 2]> {
    match (plane(&mut made.rows), plane(&mut made.cols)) {
        (Some(upright), Some(turned)) => Ok([upright, turned]),
        _ => Err(Error::shape(op, "planes of the result", "fewer", "two")),
    }
}

/// Writes the counts if the caller requested them.
pub(crate) fn put_counts(counts: &mut Option<Counts<Cpu>>, tally: [u64; 3]) {
    if let Some(Counts(counts)) = counts {
        counts.as_mut_slice().copy_from_slice(&tally);
    }
}

/// The scales of a tensor, read-only.
pub(crate) fn scales_of(x: &BlockScaled<Cpu>) -> ScalePlane<'_> {
    ScalePlane { kind: x.scale_kind(), bytes: x.scales.as_slice() }
}

/// Writes scale record `i` of a tensor.
pub(crate) fn put_scale(x: &mut BlockScaled<Cpu>, i: usize, record: Scale) {
    ScalePlaneMut { kind: x.scale_kind(), bytes: x.scales.as_mut_slice() }.set(i, record);
}

/// Writes `codes` (one per byte) to the stored row or column `line`, starting at element `first`. Each line of `len` elements starts at a
/// whole byte, and so does `first`.
pub(crate) fn put_codes(
    plane: &mut Buf<u8>,
    format: Format,
    (line, len): (usize, usize),
    first: usize,
    codes: &[u8],
) {
    let start = line * format.row_code_bytes(len) + format.row_code_bytes(first);
    let out = &mut plane.as_mut_slice()[start..][..format.row_code_bytes(codes.len())];
    pack_codes(format.spec().code_bits, codes, out)
        .unwrap_or_else(|e| unreachable!("cut to that length: {e}"));
}

/// Code `i` of the stored row or column `line`.
pub(crate) fn get_code(plane: &[u8], format: Format, (line, len): (usize, usize), i: usize) -> u8 {
    let bytes = format.row_code_bytes(len);
    packed_code(format.spec().code_bits, &plane[line * bytes..][..bytes], i)
}
