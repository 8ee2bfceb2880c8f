//! Quantized planes being written.

use crate::{Buf, Cpu};
use nibble_core::BlockScaled;
use nibble_formats::{
    BlockAxis, Codec, Format, Scale, ScaleLayout, ScalePlane, ScalePlaneMut, ScaleRule, pack_codes,
    packed_code,
};

/// A tensor whose planes are yet to be written.
pub(crate) fn unwritten(
    cpu: &Cpu,
    format: Format,
    rule: ScaleRule,
    axis: BlockAxis,
    (rows, cols, stack): (usize, usize, usize),
) -> BlockScaled<Cpu> {
    let num_scales = BlockScaled::<Cpu>::num_scales(format, axis, rows, cols, stack);
    let kind = format.scale_kind(rule);
    BlockScaled {
        format,
        axis,
        rule,
        rows,
        cols,
        stack,
        codes: cpu.scratch(BlockScaled::<Cpu>::code_bytes(format, axis, rows, cols)),
        scales: cpu.scratch(num_scales * kind.bytes()),
        tensor_scale: kind.has_tensor_scale().then(|| cpu.scratch(rows)),
        scale_layout: ScaleLayout::RowMajor,
        shared_cols: 1,
    }
}

/// [`unwritten`] for a codec's format and rule.
pub(crate) fn unwritten_as(
    cpu: &Cpu,
    codec: Codec,
    axis: BlockAxis,
    shape: (usize, usize, usize),
) -> BlockScaled<Cpu> {
    unwritten(cpu, codec.format(), codec.rule(), axis, shape)
}

/// The scales of a tensor, for reading.
pub(crate) fn scales_of(x: &BlockScaled<Cpu>) -> ScalePlane<'_> {
    ScalePlane { kind: x.scale_kind(), bytes: x.scales.as_slice() }
}

/// Writes record `i` of a tensor's scales.
pub(crate) fn put_scale(x: &mut BlockScaled<Cpu>, i: usize, record: Scale) {
    ScalePlaneMut { kind: x.scale_kind(), bytes: x.scales.as_mut_slice() }.set(i, record);
}

/// Writes `codes` (one a byte) from element `first` of line `line` on; a line of `len` elements starts at a whole byte, and so does
/// `first`.
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

/// Code `i` of line `line`.
pub(crate) fn get_code(plane: &[u8], format: Format, (line, len): (usize, usize), i: usize) -> u8 {
    let bytes = format.row_code_bytes(len);
    packed_code(format.spec().code_bits, &plane[line * bytes..][..bytes], i)
}
