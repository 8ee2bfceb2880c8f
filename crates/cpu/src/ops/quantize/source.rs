//! Rows of F32 values out of a plain or row-quantized matrix, vectorised.

use super::encode::{E2m1, E4m3, E5m2, Fast, Small, fast};
use super::planes::scales_of;
use crate::Cpu;
use crate::gemm::Isa;
use crate::simd::{Real, per_isa};
use half::bf16;
use nibble_core::{BlockScaled, Data, Error, Result, Tensor};
use nibble_formats::{Format, ScalePlane};

/// Codes and scales of consecutive values, the first one at the start of a block.
#[derive(Clone, Copy)]
pub(crate) struct Coded<'a> {
    pub fast: Fast,
    pub codes: &'a [u8],
    pub scales: ScalePlane<'a>,
    /// Index of the first block's scale.
    pub first_scale: usize,
}

/// A magnitude code put into the exponent and mantissa of an F32 and re-biased by an exact multiplication, which also
/// brings subnormal elements to their value.
#[inline(always)]
fn decode<E: Small>(code: u8) -> f32 {
    let magnitude = u32::from(code & E::MAGNITUDE);
    let rebias = f32::from_bits(((254 - E::ELEMENT.bias()) as u32) << 23);
    let finite = f32::from_bits(magnitude << E::SHIFT) * rebias;
    let special = f32::from_bits(0x7F80_0000 | (magnitude << E::SHIFT & 0x7F_FFFF));
    let value = if magnitude > E::MAX_CODE { special } else { finite };
    f32::from_bits(value.to_bits() | u32::from(code & !E::MAGNITUDE) << E::SIGN_SHIFT)
}

/// Two nibbles of each byte, the low one first.
#[inline(always)]
pub(crate) fn unpack(packed: &[u8], codes: &mut [u8]) {
    for (pair, byte) in codes.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
        let byte = u16::from(*byte);
        *pair = (byte & 15 | byte >> 4 << 8).to_le_bytes();
    }
}

#[inline(always)]
fn decode_blocks<E: Small>(from: Coded, out: &mut [f32]) {
    let bytes = E::BLOCK * E::ELEMENT.code_bits() as usize / 8;
    let blocks = out.chunks_mut(E::BLOCK).zip(from.codes.chunks(bytes));
    for (b, (out, codes)) in blocks.enumerate() {
        let scale = from.scales.value(from.first_scale + b);
        let mut unpacked = [0; 128];
        let codes = if E::ELEMENT.code_bits() == 4 {
            unpack(codes, &mut unpacked[..2 * codes.len()]);
            &unpacked[..out.len()]
        } else {
            codes
        };
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = decode::<E>(code) * scale;
        }
    }
}

#[inline(always)]
fn decode_row_body(from: Coded, out: &mut [f32]) {
    match from.fast {
        Fast::E2m1 => decode_blocks::<E2m1>(from, out),
        Fast::E4m3 => decode_blocks::<E4m3>(from, out),
        Fast::E5m2 => decode_blocks::<E5m2>(from, out),
    }
}

per_isa! {
    // Values of a run of blocks.
    pub(crate) fn decode_row = decode_row_body; (from: Coded, out: &mut [f32])
}

#[inline(always)]
fn widen_body(x: &[bf16], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = x.widen();
    }
}

per_isa! {
    fn widen = widen_body; (x: &[bf16], out: &mut [f32])
}

/// A matrix to read values from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// `[rows, cols]`.
    F32(&'a [f32], usize),
    /// `[rows, cols]`.
    Bf16(&'a [bf16], usize),
    /// Blocks along lines: the rows of a `Row` or `Tile` tensor, the stored lines of a `Col` one.
    Lines(Lines<'a>),
}

/// Lines of codes.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    fast: Fast,
    format: Format,
    codes: &'a [u8],
    scales: ScalePlane<'a>,
    len: usize,
    line_bytes: usize,
    block: usize,
    blocks: usize,
    /// Lines that share a scale, and lines of one matrix of the stack: (1, all) except for tiles.
    lines_per_scale: usize,
    lines_per_matrix: usize,
}

impl<'a> Lines<'a> {
    /// The lines of a tensor as they are stored.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if its format has no vectorised code.
    pub fn of(op: &'static str, x: &'a BlockScaled<Cpu>) -> Result<Self> {
        use nibble_formats::BlockAxis::{Col, Row, Tile};
        let block = x.format.spec().block;
        let len = if x.axis == Col { x.rows } else { x.cols };
        let (lines_per_scale, lines_per_matrix) = match x.axis {
            Tile => (block, x.rows / x.stack.max(1)),
            Row | Col => (1, usize::MAX),
        };
        let general = || Error::unsupported(op, x.format, "it has no vectorised code");
        Ok(Self {
            fast: fast(x.format).ok_or_else(general)?,
            format: x.format,
            codes: x.codes.as_slice(),
            scales: scales_of(x),
            len,
            line_bytes: x.format.row_code_bytes(len),
            block,
            blocks: len.div_ceil(block),
            lines_per_scale,
            lines_per_matrix: lines_per_matrix.max(1),
        })
    }

    /// Codes of `width` values of a line from `first` on, whole bytes.
    pub fn codes(&self, line: usize, first: usize, width: usize) -> &'a [u8] {
        let start = line * self.line_bytes + self.format.row_code_bytes(first);
        &self.codes[start..][..self.format.row_code_bytes(width)]
    }

    /// Values `first..` of a line.
    pub fn load(&self, isa: Isa, line: usize, first: usize, out: &mut [f32]) {
        let matrix = line / self.lines_per_matrix;
        let in_matrix = line % self.lines_per_matrix;
        let per_matrix = match self.lines_per_scale {
            1 => 0, // all lines are one matrix
            lines => self.lines_per_matrix.div_ceil(lines),
        };
        let scale_line = matrix * per_matrix + in_matrix / self.lines_per_scale;
        let end = first + out.len();
        let from_block = |b: usize| {
            let start = line * self.line_bytes + self.format.row_code_bytes(b * self.block);
            Coded {
                fast: self.fast,
                codes: &self.codes[start..(line + 1) * self.line_bytes],
                scales: self.scales,
                first_scale: scale_line * self.blocks + b,
            }
        };
        // Up to the first block's start through a block of its own, then straight.
        let aligned = first.next_multiple_of(self.block).min(end);
        let (head, rest) = out.split_at_mut(aligned - first);
        if !head.is_empty() {
            let b = first / self.block;
            let mut values = [0.0; 128];
            let in_line = self.block.min(self.len - b * self.block);
            let values = &mut values[..in_line];
            decode_row(isa, from_block(b), values);
            let skip = first - b * self.block;
            head.copy_from_slice(&values[skip..skip + head.len()]);
        }
        if !rest.is_empty() {
            decode_row(isa, from_block(aligned / self.block), rest);
        }
    }
}

impl<'a> Source<'a> {
    /// A plain tensor.
    pub fn plain(x: &'a Tensor<Cpu>) -> Self {
        match &x.data {
            Data::F32(data) => Self::F32(data.as_slice(), x.cols),
            Data::Bf16(data) => Self::Bf16(data.as_slice(), x.cols),
        }
    }

    /// Values of columns `col..` of a row (of a line, for `Col` tensors).
    pub fn load(&self, isa: Isa, row: usize, col: usize, out: &mut [f32]) {
        match self {
            Self::F32(x, cols) => out.copy_from_slice(&x[row * cols + col..][..out.len()]),
            Self::Bf16(x, cols) => widen(isa, &x[row * cols + col..][..out.len()], out),
            Self::Lines(lines) => lines.load(isa, row, col, out),
        }
    }
}
