//! Vectorised changes of scale by lookup table. The codes are those of `lift_code` and `shift_code`.

use crate::ops::convert::quantize::source::unpack;
use crate::ops::convert::quantize::spec::Tally;
use crate::simd::per_isa;
use nibble_core::ops::Counts;
use nibble_formats::{LIFTED_BLOCK, Lift, e8m0, packed_bytes, shift_code, unpack_codes};
use std::sync::LazyLock;

/// Difference of scale exponents beyond which every code becomes zero.
const FAR: i32 = 32;

/// Lookup table from E2M1 codes with one source scale to E4M3 codes with one target scale.
#[derive(Clone, Copy)]
pub(super) struct Nibbles {
    /// E4M3 codes of the eight E2M1 magnitudes, one per byte.
    magnitudes: u64,
    /// The sign bit, or 0 for a NaN block, whose codes are all 0x7F.
    sign: u8,
    /// Bit c is set if the conversion changes the value of code c.
    changed: u16,
}

/// [`Nibbles`] for source − target = −32 … 6, followed by the entry for a NaN source.
static LIFTS: LazyLock<[Nibbles; 40]> = LazyLock::new(|| {
    std::array::from_fn(|i| {
        // Any source and target with this difference give the same table; 0xFF is NaN.
        let source = if i == 39 { e8m0::NAN } else { 64 + i as u8 };
        let (table, changed) = Lift::E2M1.table(source, 64 + FAR as u8);
        let magnitudes: [u8; 8] = std::array::from_fn(|c| table[c]);
        let sign = if i == 39 { 0 } else { 0x80 };
        Nibbles { magnitudes: u64::from_le_bytes(magnitudes), sign, changed: changed as u16 }
    })
});

/// The target scales of blocks of [`LIFTED_BLOCK`] values: computed from the source blocks, or given.
pub(super) enum Targets<'a> {
    /// Each block's target scale is computed from its sources, and written here.
    Found(&'a mut [u8]),
    /// The caller gives the target scales.
    Given(&'a [u8]),
}

impl Targets<'_> {
    /// The target scale of block `i`, whose source blocks have these scales.
    #[inline(always)]
    fn of(&mut self, i: usize, lift: Lift, scales: &[u8]) -> u8 {
        match self {
            Self::Found(targets) => {
                targets[i] = lift.target(scales.iter().copied());
                targets[i]
            }
            Self::Given(targets) => targets[i],
        }
    }
}

/// The lookup tables, which are computed once.
pub(super) fn lifts() -> &'static [Nibbles; 40] {
    &LIFTS
}

/// The lookup table of a source scale and a target that is at most 6 powers of two below it.
#[inline(always)]
fn lift(lifts: &[Nibbles; 40], source: u8, target: u8) -> &Nibbles {
    let octaves = (i32::from(source) - i32::from(target)).clamp(-FAR, 6);
    &lifts[if source == e8m0::NAN { 39 } else { (octaves + FAR) as usize }]
}

/// Lifts a block of 32 codes, or of `out.len()` codes if the block is short.
#[inline(always)]
fn lift_block_body(by: &Nibbles, packed: &[u8], out: &mut [u8], tally: &mut Tally) {
    if let (Some(packed), Some(out)) = (packed.first_chunk::<16>(), out.first_chunk_mut::<32>()) {
        return lift_whole_block(by, packed, out, tally);
    }
    let (mut extended, mut lifted, len) = ([0; 16], [0; 32], out.len().min(32));
    let bytes = len.div_ceil(2);
    extended[..bytes].copy_from_slice(&packed[..bytes]);
    if !len.is_multiple_of(2) {
        extended[bytes - 1] &= 0xF;
    }
    lift_whole_block(by, &extended, &mut lifted, tally);
    out[..len].copy_from_slice(&lifted[..len]);
}

#[inline(always)]
fn lift_whole_block(by: &Nibbles, packed: &[u8; 16], out: &mut [u8; 32], tally: &mut Tally) {
    let mut codes = [0u8; 32];
    unpack(packed, &mut codes);
    for (out, &code) in out.iter_mut().zip(&codes) {
        let magnitude = (by.magnitudes >> (8 * u64::from(code & 7))) as u8;
        *out = magnitude | code << 4 & by.sign;
    }
    let any = codes.iter().fold(0, |any, code| any | code & 7);
    tally[Counts::<crate::Cpu>::NON_ZERO] += u64::from(any != 0);
    if by.changed != 0 {
        let seen = codes.iter().fold(0u32, |seen, &code| seen | 1 << code);
        tally[Counts::<crate::Cpu>::INEXACT] += u64::from(seen & u32::from(by.changed) != 0);
    }
    tally[Counts::<crate::Cpu>::NON_FINITE] += u64::from(by.sign == 0);
}

#[inline(always)]
fn lift_row_body(
    lifts: &[Nibbles; 40],
    (scales, packed): (&[u8], &[u8]),
    (mut out_scales, out): (Targets<'_>, &mut [u8]),
    tally: &mut Tally,
) {
    let sources = scales.chunks(4).zip(packed.chunks(64));
    for ((i, out), (scales, packed)) in out.chunks_mut(128).enumerate().zip(sources) {
        let target = out_scales.of(i, Lift::E2M1, scales);
        for (b, &source) in scales.iter().enumerate() {
            lift_block_body(lift(lifts, source, target), &packed[16 * b..], &mut out[32 * b..], tally);
        }
    }
}

per_isa! {
    // Lifts a row of MXFP4 blocks (scales, codes) to E4M3 (scales, codes); four blocks share a scale.
    pub(super) fn lift_row = lift_row_body;
    (lifts: &[Nibbles; 40], from: (&[u8], &[u8]), to: (Targets<'_>, &mut [u8]), tally: &mut Tally)
}

/// Lookup tables from codes of any lifted element to E4M3 codes: one table for each source − target from −32 to the headroom, and one for a
/// NaN source.
pub(super) struct LiftTable {
    lift: Lift,
    bits: u32,
    /// Number of values per source block.
    block: usize,
    /// The E4M3 codes, and a mask of the codes whose values change.
    entries: Vec<([u8; 64], u64)>,
}

impl LiftTable {
    pub fn new(lift: Lift, block: usize) -> Self {
        let rises = 0..=FAR as u8 + lift.headroom_log2();
        let numbers = rises.map(|rise| lift.table(64 + rise, 64 + FAR as u8));
        let entries = numbers.chain([lift.table(e8m0::NAN, 0)]).collect();
        Self { lift, bits: lift.element().code_bits(), block, entries }
    }

    /// The table entry of a source scale and a target scale.
    #[inline(always)]
    fn entry(&self, source: u8, target: u8) -> &([u8; 64], u64) {
        let octaves = (i32::from(source) - i32::from(target)).max(-FAR) + FAR;
        let nan = self.entries.len() - 1;
        &self.entries[if source == e8m0::NAN { nan } else { (octaves as usize).min(nan - 1) }]
    }
}

#[inline(always)]
fn lift_row_by_table_body(
    by: &LiftTable,
    (scales, packed): (&[u8], &[u8]),
    (mut out_scales, out): (Targets<'_>, &mut [u8]),
    tally: &mut Tally,
) {
    let (bytes, blocks) = (packed_bytes(by.bits, by.block), LIFTED_BLOCK / by.block);
    let sources = scales.chunks(blocks).zip(packed.chunks(blocks * bytes));
    for ((i, out), (scales, packed)) in out.chunks_mut(LIFTED_BLOCK).enumerate().zip(sources) {
        let target = out_scales.of(i, by.lift, scales);
        let blocks = out.chunks_mut(by.block).zip(packed.chunks(bytes));
        for (&source, (out, packed)) in scales.iter().zip(blocks) {
            let (table, changed) = by.entry(source, target);
            let (mut codes, mut seen) = ([0; LIFTED_BLOCK], 0u64);
            let codes = &mut codes[..out.len()];
            unpack_codes(by.bits, packed, codes).unwrap_or_else(|e| unreachable!("cut to that length: {e}"));
            for (out, &code) in out.iter_mut().zip(&*codes) {
                *out = table[usize::from(code & 63)];
                seen |= 1 << (code & 63);
            }
            // The codes of +0 and −0 do not count as nonzero.
            let zeros = 1 | 1 << (1u64 << (by.bits - 1));
            tally[Counts::<crate::Cpu>::NON_ZERO] += u64::from(seen & !zeros != 0);
            tally[Counts::<crate::Cpu>::INEXACT] += u64::from(seen & changed != 0);
            tally[Counts::<crate::Cpu>::NON_FINITE] += u64::from(source == e8m0::NAN);
        }
    }
}

per_isa! {
    // The same as `lift_row`, for blocks of any lifted format.
    pub(super) fn lift_row_by_table = lift_row_by_table_body;
    (by: &LiftTable, from: (&[u8], &[u8]), to: (Targets<'_>, &mut [u8]), tally: &mut Tally)
}

/// One block of columns of a strip: row i has its scale and codes at `i · stride` of the respective buffer.
#[derive(Clone, Copy)]
pub(super) struct Column<'a> {
    pub scales: &'a [u8],
    pub scale_stride: usize,
    pub codes: &'a [u8],
    pub code_stride: usize,
    pub rows: usize,
    /// Number of columns, at most a block.
    pub width: usize,
}

#[inline(always)]
fn lift_column_body(
    lifts: &[Nibbles; 40],
    from: Column,
    target: u8,
    (out, out_stride): (&mut [u8], usize),
    tally: &mut Tally,
) {
    for i in 0..from.rows {
        let by = lift(lifts, from.scales[i * from.scale_stride], target);
        let out = &mut out[i * out_stride..][..from.width];
        lift_block_body(by, &from.codes[i * from.code_stride..], out, tally);
    }
}

per_isa! {
    // Lifts one block of columns of a strip to one target scale; the codes of row i are written at `i · stride` of the output.
    pub(super) fn lift_column = lift_column_body;
    (lifts: &[Nibbles; 40], from: Column, target: u8, to: (&mut [u8], usize), tally: &mut Tally)
}

/// Flags in the entries of [`Shift`]: the value changed; the source is not zero; the source is NaN.
const CHANGED: u16 = 0x100;
const NON_ZERO: u16 = 0x200;
const IS_NAN: u16 = 0x400;

/// Lookup table from E4M3 codes with one source scale to E4M3 codes with one target scale, including flags for the counts.
type Shift = [u16; 256];

/// [`Shift`] for target − source = 0 … 32, followed by the entry for a NaN source.
static SHIFTS: LazyLock<Vec<Shift>> = LazyLock::new(|| {
    (0..=FAR as u8 + 1)
        .map(|octaves| {
            let source = if octaves > FAR as u8 { e8m0::NAN } else { 64 };
            std::array::from_fn(|code| {
                let code = code as u8;
                let (shifted, changed) = shift_code(code, source, 64 + octaves);
                let flag = |set, flag| if set { flag } else { 0 };
                u16::from(shifted)
                    | flag(changed, CHANGED)
                    | flag(code & 0x7F != 0, NON_ZERO)
                    | flag(code & 0x7F == 0x7F || source == e8m0::NAN, IS_NAN)
            })
        })
        .collect()
});

/// Converts the codes of one E4M3 block to a target scale that is not below the block's scale.
pub(super) fn shift_block(source: u8, target: u8, codes: &[u8], out: &mut [u8], tally: &mut Tally) {
    let octaves = match source {
        e8m0::NAN => FAR as usize + 1,
        _ => usize::from(target.saturating_sub(source)).min(FAR as usize),
    };
    let table = &SHIFTS[octaves];
    let mut flags = 0;
    for (out, &code) in out.iter_mut().zip(codes) {
        let entry = table[usize::from(code)];
        *out = entry as u8;
        flags |= entry;
    }
    let is_nan = source == e8m0::NAN || flags & IS_NAN != 0;
    tally[Counts::<crate::Cpu>::NON_ZERO] += u64::from(flags & NON_ZERO != 0);
    tally[Counts::<crate::Cpu>::INEXACT] += u64::from(flags & CHANGED != 0);
    tally[Counts::<crate::Cpu>::NON_FINITE] += u64::from(is_nan);
}
