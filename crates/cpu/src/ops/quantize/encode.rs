//! Values to codes, vectorised: the twins of `Element::encode_rounded` and `Codec::quantize_block`.
//!
//! A magnitude becomes a code by arithmetic on its bits: re-biased for normal elements, through an addition or a
//! multiplication by a power of two for subnormal ones, with a selection in place of every branch.

use super::spec::Tally;
use crate::simd::per_isa;
use crate::{CodePath, Cpu};
use nibble_core::ops::Counts;
use nibble_formats::{Codec, Element, Format, Rounding, Scale, ScalePlaneMut, Stream};

/// What the encoder needs to know of an element format, as constants.
pub(crate) trait Small {
    const ELEMENT: Element;
    /// Values along a block.
    const BLOCK: usize;
    /// Mantissa bits of F32 that a code lacks.
    const SHIFT: u32 = 23 - Self::ELEMENT.mantissa_bits();
    /// Takes the exponent's bias of F32 to that of the code.
    const REBIAS: u32 = ((127 - Self::ELEMENT.bias()) as u32) << 23;
    /// Bits of the smallest normal magnitude.
    const MIN_NORMAL: u32 = ((128 - Self::ELEMENT.bias()) as u32) << 23;
    /// Exponent of the subnormal step.
    const STEP_LOG2: i32 = 1 - Self::ELEMENT.bias() - Self::ELEMENT.mantissa_bits() as i32;
    /// Its unit in the last place is the subnormal step.
    const SHIFTER: f32 = f32::from_bits(((127 + Self::STEP_LOG2 + 23) as u32) << 23);
    /// Brings subnormal steps to units of 2⁻¹⁶.
    const TO_Q16: f32 = f32::from_bits(((127 - Self::STEP_LOG2 + 16) as u32) << 23);
    const MAX_CODE: u32 = Self::ELEMENT.max_code() as u32;
    const SIGN_SHIFT: u32 = 32 - Self::ELEMENT.code_bits();
    /// The bits of a code below its sign.
    const MAGNITUDE: u8 = ((1u32 << (Self::ELEMENT.code_bits() - 1)) - 1) as u8;
}

/// FP4.
pub(crate) struct E2m1;
/// FP8 with three mantissa bits.
pub(crate) struct E4m3;
/// FP8 with two mantissa bits.
pub(crate) struct E5m2;

impl Small for E2m1 {
    const ELEMENT: Element = Element::E2M1;
    const BLOCK: usize = 32;
}
impl Small for E4m3 {
    const ELEMENT: Element = Element::E4M3;
    const BLOCK: usize = 128;
}
impl Small for E5m2 {
    const ELEMENT: Element = Element::E5M2;
    const BLOCK: usize = 128;
}

/// One rounding: the code of a finite value, or of one that overflowed to infinity.
pub(crate) trait Round {
    /// Whether sixteen bits an element are read.
    const READS_BITS: bool;
    fn encode<E: Small>(&self, x: f32, bits: u16) -> u8;
}

/// Nearest, ties to even.
struct Nearest;

impl Round for Nearest {
    const READS_BITS: bool = false;

    #[inline(always)]
    fn encode<E: Small>(&self, x: f32, _: u16) -> u8 {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        let rebased = magnitude.wrapping_sub(E::REBIAS);
        let odd = rebased >> E::SHIFT & 1;
        let normal = rebased.wrapping_add((1 << (E::SHIFT - 1)) - 1 + odd) >> E::SHIFT;
        let subnormal = (f32::from_bits(magnitude) + E::SHIFTER).to_bits().wrapping_sub(E::SHIFTER.to_bits());
        let code = if magnitude < E::MIN_NORMAL { subnormal } else { normal };
        (code.min(E::MAX_CODE) | (x.to_bits() >> 31) << (31 - E::SIGN_SHIFT)) as u8
    }
}

/// Up iff the sixteen bits lie below the fraction of the step: stochastic with random bits, nearest with ties away
/// from zero with [`HALF_AWAY`].
struct Threshold;

/// Bits that round up from one half of a step on.
const HALF_AWAY: u16 = 0x7FFF;

impl Round for Threshold {
    const READS_BITS: bool = true;

    #[inline(always)]
    fn encode<E: Small>(&self, x: f32, bits: u16) -> u8 {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        // Code and fraction in units of 2⁻¹⁶ of a step, cut off; the multiplication is exact.
        let normal = magnitude.wrapping_sub(E::REBIAS) >> (E::SHIFT - 16);
        let below_normal = magnitude.min(E::MIN_NORMAL);
        let subnormal = (f32::from_bits(below_normal) * E::TO_Q16) as i32 as u32;
        let q16 = if magnitude < E::MIN_NORMAL { subnormal } else { normal };
        let code = (q16 + (0xFFFF - u32::from(bits))) >> 16;
        (code.min(E::MAX_CODE) | (x.to_bits() >> 31) << (31 - E::SIGN_SHIFT)) as u8
    }
}

/// Any rounding, one element after the other: dither, which no recipe uses in a hot place.
struct OneByOne(Rounding);

impl Round for OneByOne {
    const READS_BITS: bool = true;

    #[inline(always)]
    fn encode<E: Small>(&self, x: f32, bits: u16) -> u8 {
        E::ELEMENT.encode_rounded(x, self.0, bits)
    }
}

/// What the elements' bits have to be for [`encode_row`] and its like, apart from random ones.
pub(crate) fn fixed_bits(rounding: Rounding) -> Option<u16> {
    (rounding == Rounding::NearestAway).then_some(HALF_AWAY)
}

/// Whether a rounding reads sixteen bits an element here.
pub(crate) fn reads_bits(rounding: Rounding) -> bool {
    rounding != Rounding::NearestEven
}

/// What the vectorised code knows: an element in blocks of one length, under one power of two or one single a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fast {
    E2m1,
    E4m3,
    E5m2,
}

/// How the vectorised code takes a format; `None` where only the general path does, that of the specification.
pub(crate) fn fast(format: Format) -> Option<Fast> {
    match format {
        Format::Mxfp4 => Some(Fast::E2m1),
        Format::E4m3 => Some(Fast::E4m3),
        Format::E5m2 => Some(Fast::E5m2),
        _ => None,
    }
}

/// The path that serves all of these formats.
pub(crate) fn path(cpu: &Cpu, formats: impl IntoIterator<Item = Format>) -> CodePath {
    if formats.into_iter().all(|format| fast(format).is_some()) { cpu.path() } else { CodePath::Scalar }
}

/// Calls `$body::<E, R>(rounding, args)` for the codec's element and rounding.
macro_rules! with_codec {
    ($codec:expr, $body:ident($($arg:expr),*)) => {
        with_codec!(@element $codec, $codec.rounding(), $body($($arg),*))
    };
    (@element $codec:expr, $rounding:expr, $body:ident($($arg:expr),*)) => {
        match fast($codec.format()) {
            Some(Fast::E2m1) => with_codec!(@rounding E2m1, $rounding, $body($($arg),*)),
            Some(Fast::E4m3) => with_codec!(@rounding E4m3, $rounding, $body($($arg),*)),
            Some(Fast::E5m2) => with_codec!(@rounding E5m2, $rounding, $body($($arg),*)),
            None => unreachable!("`path` sends other formats to the specification"),
        }
    };
    (@rounding $element:ty, $rounding:expr, $body:ident($($arg:expr),*)) => {
        match $rounding {
            Rounding::NearestEven => $body::<$element, _>(Nearest, $($arg),*),
            Rounding::NearestAway | Rounding::Stochastic => $body::<$element, _>(Threshold, $($arg),*),
            rounding @ Rounding::Dither { .. } => $body::<$element, _>(OneByOne(rounding), $($arg),*),
        }
    };
}

#[inline(always)]
fn amax_bits(x: &[f32]) -> u32 {
    x.iter().fold(0, |amax, x| amax.max(x.to_bits() & 0x7FFF_FFFF))
}

/// Two codes a byte, the even one in the low nibble.
#[inline(always)]
fn pack(codes: &[u8], packed: &mut [u8]) {
    for (byte, pair) in packed.iter_mut().zip(codes.as_chunks::<2>().0) {
        let pair = u16::from_le_bytes(*pair);
        *byte = (pair | pair >> 4) as u8;
    }
}

/// Codes of one block as an array, so that its loops have a known length. A short block is zero-extended.
#[inline(always)]
fn encode_block<E: Small, R: Round, const B: usize>(
    round: &R,
    x: &[f32; B],
    inv: f32,
    bits: &[u16],
) -> [u8; B] {
    let mut codes = [0; B];
    if R::READS_BITS {
        for ((code, &x), &bits) in codes.iter_mut().zip(x).zip(bits) {
            *code = round.encode::<E>(x * inv, bits);
        }
    } else {
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = round.encode::<E>(x * inv, 0);
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
        let block = encode_block::<E, R, B>(&round, x, scale.inv, bits);
        let any = block.iter().fold(0, |any, code| any | code);
        tally[Counts::<crate::Cpu>::NON_ZERO] += u64::from(any & E::MAGNITUDE != 0);
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

/// A tile of values `[rows][width]`, `stride` apart from row to row.
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

/// Codes of one row under a multiplier for each column, cleared where `keep` is 0.
#[inline(always)]
fn encode_under<E: Small, R: Round>(
    round: &R,
    x: &[f32],
    bits: &[u16],
    (inv, keep): (&[f32], &[u8]),
    codes: &mut [u8],
) {
    if R::READS_BITS {
        for ((((code, &x), &bits), &inv), &keep) in codes.iter_mut().zip(x).zip(bits).zip(inv).zip(keep) {
            *code = round.encode::<E>(x * inv, bits) & keep;
        }
    } else {
        for (((code, &x), &inv), &keep) in codes.iter_mut().zip(x).zip(inv).zip(keep) {
            *code = round.encode::<E>(x * inv, 0) & keep;
        }
    }
}

/// Reused memory of [`encode_cols`] and `encode_square`.
#[derive(Default)]
pub(crate) struct Work {
    /// Largest magnitude of each column, as bits.
    amax: Vec<u32>,
    /// Multiplier of each column.
    inv: Vec<f32>,
    /// 0xFF, or 0 under a NaN scale.
    keep: Vec<u8>,
    /// All codes of a column's block together.
    any: Vec<u8>,
    /// Codes, one a byte `[rows][width]`; for 4-bit columns then two rows a byte.
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
            encode_under::<E, R>(&round, tile.row(row), bits, (&work.inv, &work.keep), codes);
            for (any, code) in work.any.iter_mut().zip(codes) {
                *any |= *code;
            }
        }
        let non_zero = work.any.iter().filter(|&any| any & E::MAGNITUDE != 0).count();
        tally[Counts::<crate::Cpu>::NON_ZERO] += non_zero as u64;
    }
    if E::ELEMENT.code_bits() == 4 {
        pair_rows(&mut work.codes, width, out_rows);
    }
}

/// Brings the codes of rows 2i and 2i + 1 into the bytes of row i.
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
    // Quantizes a tile down its columns: scales `[blocks][width]` and codes `[out_rows][width]` (4-bit ones paired,
    // `[out_rows / 2][width]`) in `work`. Rows from `tile.rows` to `out_rows` read as zero. `bits` are `[rows][width]`.
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
        encode_under::<E, R>(&round, tile.row(row), bits, (&work.inv, &work.keep), codes);
    }
    let any = work.codes.iter().fold(0, |any, code| any | code);
    tally[Counts::<crate::Cpu>::NON_ZERO] += u64::from(any & E::MAGNITUDE != 0);
}

#[inline(always)]
fn encode_square_body(codec: Codec, tile: Tile, bits: &[u16], work: &mut Work, tally: &mut Tally) {
    with_codec!(codec, square_as(codec, tile, bits, work, tally));
}

per_isa! {
    // Quantizes a tile under one scale: that and codes `[rows][width]`, one a byte, in `work`.
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
                // Eight bytes of a whole square.
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

/// The transpose of 8 × 8 bytes: exchanges off-diagonal quarters, then those of the quarters, then bytes.
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
    // Bytes `[rows][width]` → `[width][rows]`.
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
    // Whole blocks of Philox, which are independent of each other.
    for (block, bits) in (first / 8..).zip(blocks) {
        for (pair, word) in bits.as_chunks_mut::<2>().0.iter_mut().zip(stream.block(block)) {
            *pair = [word as u16, (word >> 16) as u16];
        }
    }
}

per_isa! {
    // `Stream::fill_u16`.
    pub(crate) fn fill_random = fill_random_body; (stream: Stream, first: u64, bits: &mut [u16])
}
