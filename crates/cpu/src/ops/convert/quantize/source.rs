//! Vectorised reads of F32 values from rows of a plain or quantized matrix.

use super::encode::{Fast, fast};
use super::planes::scales_of;
use super::round::{E2m1, E4m3, E5m2, Facts, Small};
use crate::Cpu;
use crate::gemm::Isa;
use crate::simd::{Real, per_isa};
use half::bf16;
use nibble_core::{BlockScaled, Data, Result, Tensor};
use nibble_formats::{Codec, Format, Rounding, ScaleKind, ScalePlane, unpack_codes};

/// Codes and scales of consecutive values; the first value is the first of a block.
#[derive(Clone, Copy)]
pub(crate) struct Coded<'a> {
    pub fast: Fast,
    pub codes: &'a [u8],
    pub scales: ScalePlane<'a>,
    /// Index of the first block's scale.
    pub first_scale: usize,
}

/// Unpacks two 4-bit codes per byte, the low nibble first.
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
            *out = E::FACTS.decode(code) * scale;
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
    // Decodes the values of consecutive blocks.
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

/// A matrix from which values are read.
#[derive(Clone, Copy)]
pub(crate) enum ValueSource<'a> {
    /// F32 values `[rows, cols]`, and `cols`.
    F32(&'a [f32], usize),
    /// BF16 values `[rows, cols]`, and `cols`.
    Bf16(&'a [bf16], usize),
    /// A block-scaled tensor: the stored rows of a `Row` or `Tile` tensor, or the stored columns of a `Col` tensor.
    Lines(Lines<'a>),
}

/// Selects the scales by which decoded values are multiplied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scales {
    /// Block scales and the tensor scale.
    All,
    /// Block scales without the tensor scale.
    OfBlocks,
    /// Block scales of kinds other than F32.
    Exact,
}

/// Stored lines of codes: the rows of a tensor, or the columns of a `Col` tensor.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    fast: Option<Fast>,
    /// The codec of the tensor's format and rule.
    codec: Codec,
    /// The tensor scale of each row, if the tensor has tensor scales, and whether the stored lines are columns.
    of_tensor: (Option<&'a [f32]>, bool),
    with: Scales,
    format: Format,
    codes: &'a [u8],
    scales: ScalePlane<'a>,
    len: usize,
    line_bytes: usize,
    block: usize,
    blocks: usize,
    /// Number of lines that share a scale, and lines per matrix of the stack: (1, all) unless blocks are 2-D.
    lines_per_scale: usize,
    lines_per_matrix: usize,
}

impl<'a> Lines<'a> {
    /// The rows or columns of a tensor as they are stored.
    ///
    /// # Errors
    /// If the format does not support the rule.
    pub fn of(x: &'a BlockScaled<Cpu>, with: Scales) -> Result<Self> {
        use nibble_formats::BlockAxis::{Col, Row, Tile};
        let block = x.format.record_len(x.axis);
        let len = if x.axis == Col { x.rows } else { x.cols };
        let (lines_per_scale, lines_per_matrix) = match x.axis {
            Tile => (block, x.rows / x.stack.max(1)),
            Row | Col => (1, usize::MAX),
        };
        Ok(Self {
            fast: fast(x.format).filter(|_| with != Scales::Exact),
            codec: Codec::new(x.format, x.rule, Rounding::NearestEven)?,
            of_tensor: (x.tensor_scale.as_ref().map(|scales| scales.as_slice()), x.axis == Col),
            with,
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

    /// Codes of `width` values of a line, starting at value `first`; `first` and `width` must fall on whole bytes.
    pub fn codes(&self, line: usize, first: usize, width: usize) -> &'a [u8] {
        let start = line * self.line_bytes + self.format.row_code_bytes(first);
        &self.codes[start..][..self.format.row_code_bytes(width)]
    }

    /// Index of the first scale of a line.
    fn scale_line(&self, line: usize) -> usize {
        let matrix = line / self.lines_per_matrix;
        let in_matrix = line % self.lines_per_matrix;
        let per_matrix = match self.lines_per_scale {
            1 => 0, // all lines are one matrix
            lines => self.lines_per_matrix.div_ceil(lines),
        };
        (matrix * per_matrix + in_matrix / self.lines_per_scale) * self.blocks
    }

    /// Loads the values of a line, starting at value `first`.
    pub fn load(&self, isa: Isa, line: usize, first: usize, out: &mut [f32]) {
        let Some(fast) = self.fast else {
            return decode_line(isa, self, (line, first), out);
        };
        let first_scale = self.scale_line(line);
        let end = first + out.len();
        let from_block = |b: usize| {
            let start = line * self.line_bytes + self.format.row_code_bytes(b * self.block);
            Coded {
                fast,
                codes: &self.codes[start..(line + 1) * self.line_bytes],
                scales: self.scales,
                first_scale: first_scale + b,
            }
        };
        // A leading partial block is decoded separately; whole blocks follow.
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

    /// Multiplies the elements of a line, starting at value `first`, by their block scales.
    #[inline(always)]
    fn multiply(&self, line: usize, first: usize, elements: &mut [f32]) {
        let (kind, end) = (self.codec.scale_kind(), first + elements.len());
        if self.with == Scales::Exact && kind == ScaleKind::F32 {
            return;
        }
        let codec = self.codec.format().spec().codec;
        let one = kind.levels().len() <= 1 && codec.decodes_by_levels();
        let (mut at, first_scale) = (first, self.scale_line(line));
        while at < end {
            let b = at / self.block;
            let stop = (b + 1).saturating_mul(self.block).min(end);
            let record = self.scales.get(first_scale + b);
            let values = &mut elements[at - first..stop - first];
            let (skip, until) = (at - b * self.block, stop - b * self.block);
            let mut multipliers = [0.0; RUN];
            if one {
                let multiplier = codec.multiplier(self.codec.params(), 0, record);
                values.iter_mut().for_each(|value| *value *= multiplier);
            } else if until <= RUN {
                codec.multipliers(self.codec.params(), record, &mut multipliers[..until]);
                values.iter_mut().zip(&multipliers[skip..until]).for_each(|(value, by)| *value *= by);
            } else {
                for (i, value) in (skip..until).zip(values) {
                    *value *= codec.multiplier(self.codec.params(), i, record);
                }
            }
            at = stop;
        }
    }
}

/// Number of codes of any format decoded at a time: a multiple of eight, so that runs start and end at whole bytes.
const RUN: usize = 256;

#[inline(always)]
fn decode_line_body(lines: &Lines, (line, first): (usize, usize), out: &mut [f32]) {
    let bits = lines.format.spec().code_bits;
    let facts = Facts::of(lines.codec.element());
    let bytes = &lines.codes[line * lines.line_bytes..][..lines.line_bytes];
    let (mut at, end) = (first, first + out.len());
    while at < end {
        let begin = at / 8 * 8;
        let stop = end.min(begin + RUN);
        let mut codes = [0; RUN];
        let codes = &mut codes[..stop - begin];
        let packed = &bytes[lines.format.row_code_bytes(begin)..][..lines.format.row_code_bytes(codes.len())];
        unpack_codes(bits, packed, codes).unwrap_or_else(|e| unreachable!("cut to that length: {e}"));
        let out = &mut out[at - first..stop - first];
        for (out, &code) in out.iter_mut().zip(&codes[at - begin..]) {
            *out = facts.decode(code);
        }
        lines.multiply(line, at, out);
        match lines.of_tensor {
            _ if lines.with != Scales::All => {}
            (Some(scales), true) => out.iter_mut().zip(&scales[at..]).for_each(|(out, scale)| *out *= scale),
            (Some(scales), false) => out.iter_mut().for_each(|out| *out *= scales[line]),
            (None, _) => {}
        }
        at = stop;
    }
}

per_isa! {
    // Decodes values of a line in any format, starting at a given position.
    fn decode_line = decode_line_body; (lines: &Lines, at: (usize, usize), out: &mut [f32])
}

impl<'a> ValueSource<'a> {
    /// A source that reads a plain tensor.
    pub fn plain(x: &'a Tensor<Cpu>) -> Self {
        match &x.data {
            Data::F32(data) => Self::F32(data.as_slice(), x.cols),
            Data::Bf16(data) => Self::Bf16(data.as_slice(), x.cols),
        }
    }

    /// Loads the values of a row (of a column, for `Col` tensors), starting at `col`.
    pub fn load(&self, isa: Isa, row: usize, col: usize, out: &mut [f32]) {
        match self {
            Self::F32(x, cols) => out.copy_from_slice(&x[row * cols + col..][..out.len()]),
            Self::Bf16(x, cols) => widen(isa, &x[row * cols + col..][..out.len()], out),
            Self::Lines(lines) => lines.load(isa, row, col, out),
        }
    }
}
