//! Quantized planes being written.

use crate::{Buf, Cpu};
use nibble_core::{BlockScaled, Scales};
use nibble_formats::{BlockAxis, Codec, Format, Scale, ScaleKind, ScaleLayout, ScaleRule};

/// A tensor whose planes are yet to be written.
pub(crate) fn unwritten(
    cpu: &Cpu,
    format: Format,
    rule: ScaleRule,
    axis: BlockAxis,
    (rows, cols, stack): (usize, usize, usize),
) -> BlockScaled<Cpu> {
    let num_scales = BlockScaled::<Cpu>::num_scales(format, axis, rows, cols, stack);
    BlockScaled {
        format,
        axis,
        rule,
        rows,
        cols,
        stack,
        codes: cpu.scratch(BlockScaled::<Cpu>::code_bytes(format, axis, rows, cols)),
        scales: match rule.kind() {
            ScaleKind::E8m0 => Scales::E8m0(cpu.scratch(num_scales)),
            ScaleKind::F32 => Scales::F32(cpu.scratch(num_scales)),
        },
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

/// A plane of scales, for reading.
#[derive(Clone, Copy)]
pub(crate) enum ScalesRef<'a> {
    E8m0(&'a [u8]),
    F32(&'a [f32]),
}

impl<'a> ScalesRef<'a> {
    pub fn of(x: &'a BlockScaled<Cpu>) -> Self {
        match &x.scales {
            Scales::E8m0(s) => Self::E8m0(s.as_slice()),
            Scales::F32(s) => Self::F32(s.as_slice()),
        }
    }

    #[inline(always)]
    pub fn get(self, i: usize) -> Scale {
        match self {
            Self::E8m0(s) => Scale::E8M0(s[i]),
            Self::F32(s) => Scale::F32(s[i]),
        }
    }
}

/// Writes scale `i` of a plane of the same kind; a rule makes one kind of scale only.
pub(crate) fn put_scale(scales: &mut Scales<Cpu>, i: usize, scale: Scale) {
    match (scales, scale) {
        (Scales::E8m0(s), Scale::E8M0(byte)) => s.as_mut_slice()[i] = byte,
        (Scales::F32(s), Scale::F32(value)) => s.as_mut_slice()[i] = value,
        (Scales::E8m0(_), Scale::F32(_)) | (Scales::F32(_), Scale::E8M0(_)) => {
            unreachable!("planes are allocated by the rule that makes the scales")
        }
    }
}

/// Writes `codes` (one a byte) from element `first` of line `line` on; a line of `len` elements starts at a whole byte.
/// `first` is even for 4-bit codes.
pub(crate) fn put_codes(
    plane: &mut Buf<u8>,
    format: Format,
    (line, len): (usize, usize),
    first: usize,
    codes: &[u8],
) {
    let line_start = line * format.row_code_bytes(len);
    let plane = plane.as_mut_slice();
    if format.spec().code_bits == 4 {
        let out = &mut plane[line_start + first / 2..];
        for (byte, pair) in out.iter_mut().zip(codes.chunks(2)) {
            *byte = (pair[0] & 15) | pair.get(1).map_or(0, |high| high << 4);
        }
    } else {
        plane[line_start + first..][..codes.len()].copy_from_slice(codes);
    }
}

/// Code `i` of line `line`.
pub(crate) fn get_code(plane: &[u8], format: Format, (line, len): (usize, usize), i: usize) -> u8 {
    let line_start = line * format.row_code_bytes(len);
    if format.spec().code_bits == 4 {
        plane[line_start + i / 2] >> (4 * (i % 2)) & 15
    } else {
        plane[line_start + i]
    }
}
