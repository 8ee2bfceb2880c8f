//! Encoding specialised for an element format and a block length. The results have the bits of `Codec::quantize_block`.

use super::round::{E2m1, E4m3, E5m2, Nearest, OneByOne, Round, Small, Threshold, with_rounding};
use crate::simd::per_isa;
use nibble_core::ops::Counts;
use nibble_formats::{Codec, Format, Rounding, Scale, ScalePlaneMut, Stream};

/// Numbers of blocks, in the order of [`Counts`].
pub(crate) type Tally = [u64; 3];

/// The formats with specialised code: an element in blocks of one length, with one power-of-two or F32 scale per block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fast {
    E2m1,
    E4m3,
    E5m2,
}

/// The specialisation for a format; `None` if only the general code handles the format.
pub(crate) fn fast(format: Format) -> Option<Fast> {
    match format {
        Format::Mxfp4 => Some(Fast::E2m1),
        Format::E4m3 => Some(Fast::E4m3),
        Format::E5m2 => Some(Fast::E5m2),
        _ => None,
    }
}

/// Calls `$body::<E, R>(rounding, args)` with the codec's element and rounding.
macro_rules! with_codec {
    ($codec:expr, $body:ident($($arg:expr),*)) => {
        match fast($codec.format()) {
            Some(Fast::E2m1) => with_rounding!($codec.rounding(), $body::<E2m1, _>($($arg),*)),
            Some(Fast::E4m3) => with_rounding!($codec.rounding(), $body::<E4m3, _>($($arg),*)),
            Some(Fast::E5m2) => with_rounding!($codec.rounding(), $body::<E5m2, _>($($arg),*)),
            None => unreachable!("lines of other formats go through `general`"),
        }
    };
}

#[inline(always)]
pub(super) fn amax_bits(x: &[f32]) -> u32 {
    x.iter().fold(0, |amax, x| amax.max(x.to_bits() & 0x7FFF_FFFF))
}

/// Packs two codes per byte, with the even-indexed code in the low nibble.
#[inline(always)]
fn pack(codes: &[u8], packed: &mut [u8]) {
    for (byte, pair) in packed.iter_mut().zip(codes.as_chunks::<2>().0) {
        let pair = u16::from_le_bytes(*pair);
        *byte = (pair | pair >> 4) as u8;
    }
}

/// Encodes one block. The codes are an array, so that loops over it have a constant length; a short block is zero-extended.
#[inline(always)]
fn encode_block<E: Small, R: Round, const B: usize>(
    round: R,
    x: &[f32; B],
    inv: f32,
    bits: &[u16],
) -> [u8; B] {
    let mut codes = [0; B];
    if R::READS_BITS {
        for ((code, &x), &bits) in codes.iter_mut().zip(x).zip(bits) {
            *code = round.encode(&E::FACTS, x * inv, bits);
        }
    } else {
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = round.encode(&E::FACTS, x * inv, 0);
        }
    }
    codes
}

#[inline(always)]
fn row_blocks<E: Small, R: Round, const B: usize>(
    round: R,
    codec: Codec,
    (x, bits): (&[f32], &[u16]),
    codes: &mut [u8],
    scales: &mut ScalePlaneMut,
    tally: &mut Tally,
) {
    let bytes = B * E::ELEMENT.code_bits() as usize / 8;
    for (b, (x, out)) in x.chunks(B).zip(codes.chunks_mut(bytes)).enumerate() {
        let mut extended = [0.0; B];
        let x = match x.first_chunk::<B>() {
            Some(x) => x,
            None => {
                extended[..x.len()].copy_from_slice(x);
                &extended
            }
        };
        let scale = codec.scale_of(f32::from_bits(amax_bits(x)));
        scales.set(b, scale.record);
        if scale.is_nan() {
            out.fill(0);
            tally[Counts::<crate::Cpu>::NON_FINITE] += 1;
            continue;
        }
        let bits = if R::READS_BITS { &bits[b * B..] } else { bits };
        let block = encode_block::<E, R, B>(round, x, scale.inv, bits);
        let any = block.iter().fold(0, |any, code| any | code);
        tally[Counts::<crate::Cpu>::NON_ZERO] += u64::from(any & E::FACTS.magnitude != 0);
        if E::ELEMENT.code_bits() == 4 {
            pack(&block, out);
        } else {
            out.copy_from_slice(&block[..out.len()]);
        }
    }
}

#[inline(always)]
fn row_as<E: Small, R: Round>(
    round: R,
    codec: Codec,
    x: (&[f32], &[u16]),
    codes: &mut [u8],
    scales: &mut ScalePlaneMut,
    tally: &mut Tally,
) {
    if E::BLOCK == 32 {
        row_blocks::<E, R, 32>(round, codec, x, codes, scales, tally);
    } else {
        row_blocks::<E, R, 128>(round, codec, x, codes, scales, tally);
    }
}

#[inline(always)]
fn encode_row_body(
    codec: Codec,
    x: &[f32],
    bits: &[u16],
    codes: &mut [u8],
    scales: &mut ScalePlaneMut,
    tally: &mut Tally,
) {
    with_codec!(codec, row_as(codec, (x, bits), codes, scales, tally));
}

per_isa! {
    pub(crate) fn encode_row = encode_row_body;
    (codec: Codec, x: &[f32], bits: &[u16], codes: &mut [u8], scales: &mut ScalePlaneMut, tally: &mut Tally)
}

/// A tile of values `[rows][width]`; rows are `stride` values apart.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    pub values: &'a [f32],
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
}

impl<'a> Tile<'a> {
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..self.width]
    }
}

/// Encodes one row with one multiplier per column; codes are 0 where `keep` is 0.
#[inline(always)]
fn encode_under<E: Small, R: Round>(
    round: R,
    x: &[f32],
    bits: &[u16],
    (inv, keep): (&[f32], &[u8]),
    codes: &mut [u8],
) {
    if R::READS_BITS {
        for ((((code, &x), &bits), &inv), &keep) in codes.iter_mut().zip(x).zip(bits).zip(inv).zip(keep) {
            *code = round.encode(&E::FACTS, x * inv, bits) & keep;
        }
    } else {
        for (((code, &x), &inv), &keep) in codes.iter_mut().zip(x).zip(inv).zip(keep) {
            *code = round.encode(&E::FACTS, x * inv, 0) & keep;
        }
    }
}

/// Reusable scratch memory of [`encode_cols`] and `encode_square`.
#[derive(Default)]
pub(crate) struct Work {
    /// Largest magnitude of each column, as bits.
    amax: Vec<u32>,
    /// Multiplier of each column.
    inv: Vec<f32>,
    /// 0xFF for each column, or 0 if the column's scale is NaN.
    keep: Vec<u8>,
    /// Bitwise OR of the codes of a column's block.
    any: Vec<u8>,
    /// Codes `[rows][width]`, one per byte. Column codes of 4 bits are then packed two rows per byte.
    pub codes: Vec<u8>,
    /// Scales `[blocks][width]`.
    pub scales: Vec<Scale>,
}

#[inline(always)]
fn cols_as<E: Small, R: Round>(
    round: R,
    codec: Codec,
    tile: Tile,
    bits: &[u16],
    out_rows: usize,
    work: &mut Work,
    tally: &mut Tally,
) {
    let width = tile.width;
    work.codes.clear();
    work.codes.resize(out_rows * width, 0);
    work.scales.clear();
    for first in (0..out_rows).step_by(E::BLOCK) {
        let rows = first..tile.rows.min(first + E::BLOCK);
        work.amax.clear();
        work.amax.resize(width, 0);
        for row in rows.clone() {
            for (amax, x) in work.amax.iter_mut().zip(tile.row(row)) {
                *amax = (*amax).max(x.to_bits() & 0x7FFF_FFFF);
            }
        }
        work.inv.clear();
        work.keep.clear();
        for &amax in &work.amax {
            let scale = codec.scale_of(f32::from_bits(amax));
            work.scales.push(scale.record);
            work.inv.push(scale.inv);
            work.keep.push(if scale.is_nan() { 0 } else { 0xFF });
            tally[Counts::<crate::Cpu>::NON_FINITE] += u64::from(scale.is_nan());
        }
        work.any.clear();
        work.any.resize(width, 0);
        for row in rows {
            let codes = &mut work.codes[row * width..][..width];
            let bits = if R::READS_BITS { &bits[row * width..][..width] } else { bits };
            encode_under::<E, R>(round, tile.row(row), bits, (&work.inv, &work.keep), codes);
            for (any, code) in work.any.iter_mut().zip(codes) {
                *any |= *code;
            }
        }
        let non_zero = work.any.iter().filter(|&any| any & E::FACTS.magnitude != 0).count();
        tally[Counts::<crate::Cpu>::NON_ZERO] += non_zero as u64;
    }
    if E::ELEMENT.code_bits() == 4 {
        pair_rows(&mut work.codes, width, out_rows);
    }
}

/// Packs the codes of rows 2i and 2i + 1 into the bytes of row i.
#[inline(always)]
fn pair_rows(codes: &mut Vec<u8>, width: usize, rows: usize) {
    for pair in 0..rows / 2 {
        let (done, rest) = codes.split_at_mut(2 * pair * width);
        let (even, odd) = rest.split_at_mut(width);
        if pair == 0 {
            for (even, odd) in even.iter_mut().zip(odd) {
                *even |= *odd << 4;
            }
        } else {
            for ((out, even), odd) in done[pair * width..].iter_mut().zip(even).zip(odd) {
                *out = *even | *odd << 4;
            }
        }
    }
    codes.truncate(rows / 2 * width);
}

#[inline(always)]
fn encode_cols_body(
    codec: Codec,
    tile: Tile,
    bits: &[u16],
    out_rows: usize,
    work: &mut Work,
    tally: &mut Tally,
) {
    with_codec!(codec, cols_as(codec, tile, bits, out_rows, work, tally));
}

per_isa! {
    // Quantizes a tile along its columns into `work`: scales `[blocks][width]` and codes `[out_rows][width]` (4-bit codes are packed as
    // `[out_rows / 2][width]`). Rows from `tile.rows` to `out_rows` count as zero. `bits` has the shape `[rows][width]`.
    pub(crate) fn encode_cols = encode_cols_body;
    (codec: Codec, tile: Tile, bits: &[u16], out_rows: usize, work: &mut Work, tally: &mut Tally)
}

#[inline(always)]
fn square_as<E: Small, R: Round>(
    round: R,
    codec: Codec,
    tile: Tile,
    bits: &[u16],
    work: &mut Work,
    tally: &mut Tally,
) {
    let width = tile.width;
    let amax = (0..tile.rows).fold(0, |amax, row| amax.max(amax_bits(tile.row(row))));
    let scale = codec.scale_of(f32::from_bits(amax));
    work.scales.clear();
    work.scales.push(scale.record);
    work.codes.clear();
    work.codes.resize(tile.rows * width, 0);
    if scale.is_nan() {
        tally[Counts::<crate::Cpu>::NON_FINITE] += 1;
        return;
    }
    work.inv.clear();
    work.inv.resize(width, scale.inv);
    work.keep.clear();
    work.keep.resize(width, 0xFF);
    for row in 0..tile.rows {
        let codes = &mut work.codes[row * width..][..width];
        let bits = if R::READS_BITS { &bits[row * width..][..width] } else { bits };
        encode_under::<E, R>(round, tile.row(row), bits, (&work.inv, &work.keep), codes);
    }
    let any = work.codes.iter().fold(0, |any, code| any | code);
    tally[Counts::<crate::Cpu>::NON_ZERO] += u64::from(any & E::FACTS.magnitude != 0);
}

#[inline(always)]
fn encode_square_body(codec: Codec, tile: Tile, bits: &[u16], work: &mut Work, tally: &mut Tally) {
    with_codec!(codec, square_as(codec, tile, bits, work, tally));
}

per_isa! {
    // Quantizes a tile with a single scale into `work`: the scale, and codes `[rows][width]`, one per byte.
    pub(crate) fn encode_square = encode_square_body;
    (codec: Codec, tile: Tile, bits: &[u16], work: &mut Work, tally: &mut Tally)
}

#[inline(always)]
fn transpose_body(from: &[u8], rows: usize, width: usize, to: &mut Vec<u8>) {
    to.clear();
    to.resize(rows * width, 0);
    let (whole_rows, whole_cols) = (rows / 8 * 8, width / 8 * 8);
    for row in (0..whole_rows).step_by(8) {
        for col in (0..whole_cols).step_by(8) {
            let mut square = [0u64; 8];
            for (i, line) in square.iter_mut().enumerate() {
                // The row has eight bytes, because the 8 × 8 block is full.
                *line = u64::from_le_bytes(*from[(row + i) * width + col..].first_chunk().unwrap_or(&[0; 8]));
            }
            for (i, line) in turned(square).into_iter().enumerate() {
                to[(col + i) * rows + row..][..8].copy_from_slice(&line.to_le_bytes());
            }
        }
    }
    for row in 0..rows {
        let first = if row < whole_rows { whole_cols } else { 0 };
        for col in first..width {
            to[col * rows + row] = from[row * width + col];
        }
    }
}

/// Transposes 8 × 8 bytes: swaps the off-diagonal quarters, then the quarters of each quarter, then single bytes.
#[inline(always)]
fn turned(mut x: [u64; 8]) -> [u64; 8] {
    for (distance, mask) in [(4, 0xFFFF_FFFFu64), (2, 0x0000_FFFF_0000_FFFF), (1, 0x00FF_00FF_00FF_00FF)] {
        let shift = 8 * distance;
        for i in (0..8).filter(|i| i & distance == 0) {
            let (low, high) = (x[i], x[i + distance]);
            x[i] = (low & mask) | (high & mask) << shift;
            x[i + distance] = (low >> shift & mask) | (high & !mask);
        }
    }
    x
}

per_isa! {
    // Transposes bytes `[rows][width]` to `[width][rows]`.
    pub(crate) fn transpose = transpose_body;
    (from: &[u8], rows: usize, width: usize, to: &mut Vec<u8>)
}

#[inline(always)]
fn fill_random_body(stream: Stream, first: u64, bits: &mut [u16]) {
    let (blocks, tail) = bits.as_chunks_mut::<8>();
    if !first.is_multiple_of(8) || !tail.is_empty() {
        stream.fill_u16(first, bits);
        return;
    }
    // The loop computes whole Philox blocks, which are independent of each other.
    for (block, bits) in (first / 8..).zip(blocks) {
        for (pair, word) in bits.as_chunks_mut::<2>().0.iter_mut().zip(stream.block(block)) {
            *pair = [word as u16, (word >> 16) as u16];
        }
    }
}

per_isa! {
    // The vectorised version of `Stream::fill_u16`.
    pub(crate) fn fill_random = fill_random_body; (stream: Stream, first: u64, bits: &mut [u16])
}
