//! Packing: stretches of an operand's rows into panels `[units][width]` of 32-bit units, codes decoded to BF16.

#[cfg(target_arch = "x86_64")]
use super::Isa;
use super::operand::{Data, OperandScales, OperandView};
use super::{DotKind, decode};
use half::bf16;
use std::ops::Range;

/// Units past its end that packing a panel may overwrite (by whole-vector stores).
pub(super) const SLACK: usize = 16;

/// Length of `k` elements in units.
pub(super) fn units(dot: DotKind, k: usize) -> usize {
    match dot {
        DotKind::F32 => k,
        DotKind::Bf16 => k.div_ceil(2),
    }
}

/// The rows of an operand in one panel of `width`: `rows`, at least one. The rest of the panel may hold anything: the results of
/// those lanes are ignored.
#[derive(Clone)]
pub(super) struct PanelRows {
    pub first: usize,
    pub rows: usize,
    pub width: usize,
}

/// Packs elements `k` of a panel's rows (whole units, except at the end of the contraction) into the beginning of
/// `to`, which is longer than the panel by [`SLACK`]. Up to `SLACK` units past the panel are overwritten, unless the
/// source is transposed.
fn panel(isa: super::Isa, from: &OperandView, panel: &PanelRows, k: Range<usize>, to: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if matches!(isa, Isa::Avx512 | Isa::Avx512Bf16) {
        // SAFETY: the entry points checked that the machine has the instruction set and that all of the operand's
        // elements lie within its slice; `to` has the length that the documentation asks for (checked inside).
        unsafe { avx512::panel(from, panel, k, to) };
        return;
    }
    let _ = isa;
    portable_panel(from, panel, k, to);
}

fn portable_panel(from: &OperandView, panel: &PanelRows, k: Range<usize>, to: &mut [u32]) {
    let (width, at) = (panel.width, |row: usize, k: usize| {
        let row = panel.first + row;
        from.offset + if from.transposed { k * from.stride + row } else { row * from.stride + k }
    });
    let pair = |row: usize, k0: usize, element: &dyn Fn(usize) -> u16| {
        let odd = if k0 + 1 < k.end { element(at(row, k0 + 1)) } else { 0 };
        u32::from(element(at(row, k0))) | u32::from(odd) << 16
    };
    let step = if let Data::F32(_) = from.data { 1 } else { 2 };
    for (unit, k0) in k.clone().step_by(step).enumerate() {
        let lanes = &mut to[unit * width..(unit + 1) * width];
        lanes[panel.rows..].fill(0);
        for (row, lane) in lanes[..panel.rows].iter_mut().enumerate() {
            *lane = match from.data {
                Data::F32(x) => x[at(row, k0)].to_bits(),
                Data::Bf16(x) => pair(row, k0, &|i| x[i].to_bits()),
                Data::E4m3(x) => pair(row, k0, &|i| decode::fp8(&decode::E4M3, x[i])),
                Data::E5m2(x) => pair(row, k0, &|i| decode::fp8(&decode::E5M2, x[i])),
                Data::E2m1(x) => {
                    pair(row, k0, &|i| decode::E2M1[usize::from(x[i / 2] >> (4 * (i % 2)) & 0xF)])
                }
            };
        }
    }
}

/// Packs the panels from `first` on; each goes to `(panel.first − first) · units` of `to`.
///
/// A panel of a transposed source uses only part of each cache line, and lines a power of two apart evict each
/// other: there, all panels take a few units in turn.
pub(super) fn panels<P: Iterator<Item = PanelRows> + Clone>(
    isa: super::Isa,
    from: &OperandView,
    panels: P,
    first: usize,
    k: Range<usize>,
    to: &mut [u32],
) {
    const UNITS_IN_TURN: usize = 16;
    let per_unit = if let Data::F32(_) = from.data { 1 } else { 2 };
    let units = k.len().div_ceil(per_unit);
    let step = if from.transposed { UNITS_IN_TURN } else { units.max(1) };
    for unit in (0..units).step_by(step) {
        let k0 = k.start + unit * per_unit;
        let part = k0..(k0 + step * per_unit).min(k.end);
        for p in panels.clone() {
            let at = (p.first - first) * units + unit * p.width;
            panel(isa, from, &p, part.clone(), &mut to[at..]);
        }
    }
}

/// Packs the scales of a panel's rows as `[blocks][width]`.
pub(super) fn scale_panel(from: &OperandScales, panel: &PanelRows, num_blocks: usize, to: &mut [f32]) {
    for (block_idx, lanes) in to.chunks_exact_mut(panel.width).take(num_blocks).enumerate() {
        for (row, lane) in lanes.iter_mut().enumerate() {
            *lane = if row < panel.rows { from.value(panel.first + row, block_idx) } else { 0.0 };
        }
    }
}

/// Whether decoded elements may be subnormal, or so small that their products may be.
pub(super) fn may_be_tiny(data: &Data) -> bool {
    matches!(data, Data::Bf16(_))
}

/// Lowest exponent field of any decoded code: E5M2's 2⁻¹⁶.
pub(super) const LOWEST_OF_CODES: u8 = 127 - 16;

/// Flushes the subnormals of a panel of BF16 pairs and returns the lowest exponent field of its nonzero elements (255
/// if there is none).
pub(super) fn flush_subnormals(panel: &mut [u32]) -> u8 {
    let mut lowest = 0x7F80;
    for unit in panel {
        let (low, high) = (*unit & 0x7F80, *unit >> 16 & 0x7F80);
        let keep = if low == 0 { 0x8000 } else { 0xFFFF } | if high == 0 { 0x8000_0000 } else { 0xFFFF_0000 };
        *unit &= keep;
        lowest = lowest.min(if low == 0 { 0x7F80 } else { low }).min(if high == 0 { 0x7F80 } else { high });
    }
    (lowest >> 7) as u8
}

/// Whether the chain of BF16 products can pass through a tiny number, given the lowest exponent fields of the nonzero
/// elements of both operands. An operand with lowest field e is a multiple of 2^(e−127−7). So every product, and every rounded
/// sum, is a multiple of q = 2^(ea + eb − 268); if q ≥ 2⁻¹²⁶, none but zero is below 2⁻¹²⁶.
pub(super) fn sums_may_be_tiny(a_lowest: u8, b_lowest: u8) -> bool {
    u32::from(a_lowest) + u32::from(b_lowest) < 268 - 126
}

/// The same for a chain that continues from this sum. A sum with exponent field e is a multiple of 2^(e−127−23), and so is every
/// sum of it with multiples of 2⁻¹²⁶.
pub(super) fn resumed_sum_may_be_tiny(sum: f32) -> bool {
    (1..(150 - 126) << 23).contains(&(sum.to_bits() & 0x7FFF_FFFF))
}

/// F32 to BF16, nearest-even; NaN stays NaN.
#[inline(always)]
pub(super) fn round_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    bf16::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { bits >> 16 | 0x40 } else { rounded } as u16)
}

#[cfg(target_arch = "x86_64")]
#[path = "pack_avx512.rs"]
mod avx512;
