//! Packing: copies parts of an operand's rows into panels `[units][width]` of 32-bit units, with codes decoded to BF16.

#[cfg(target_arch = "x86_64")]
use super::Isa;
use super::operand::{Data, OperandScales, OperandView};
use super::{DotKind, decode};
use half::bf16;
use std::ops::Range;

/// Number of units past a panel's end that packing may overwrite, because it stores whole vectors.
pub(super) const SLACK: usize = 16;

/// Number of 32-bit units for `k` elements.
pub(super) fn units(dot: DotKind, k: usize) -> usize {
    match dot {
        DotKind::F32 => k,
        DotKind::Bf16 => k.div_ceil(2),
    }
}

/// The operand rows in one panel of `width` columns: `rows`, at least one. The remaining columns may hold any values, because the results
/// of those lanes are ignored.
#[derive(Clone)]
pub(super) struct PanelRows {
    pub first: usize,
    pub rows: usize,
    pub width: usize,
}

/// Packs elements `k` of a panel's rows into the beginning of `to`. The elements form whole units, except at the end of the contraction.
/// `to` is longer than the panel by [`SLACK`] units; up to `SLACK` units past the panel are overwritten, unless the source is transposed.
fn panel(isa: super::Isa, from: &OperandView, panel: &PanelRows, k: Range<usize>, to: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if matches!(isa, Isa::Avx512 | Isa::Avx512Bf16) {
        // SAFETY: the entry points checked that the machine has the instruction set and that all elements of the operand lie within its
        // slice. `avx512::panel` checks that `to` has the documented length.
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

/// Packs several panels; panel `p` is written at `(p.first − first) · units` of `to`.
///
/// A panel of a transposed source uses only a part of each cache line, and cache lines at power-of-two distances evict each other.
/// Therefore the panels of a transposed source alternate: each packs a few units in turn.
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

/// Lowest exponent field of any decoded code, that of E5M2's 2⁻¹⁶.
pub(super) const LOWEST_OF_CODES: u8 = 127 - 16;

/// Flushes the subnormals of a panel of BF16 pairs and returns the lowest exponent field of the panel's nonzero elements (255 if all are
/// zero).
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

/// Whether a sum of BF16 products can pass through a tiny number, given the lowest exponent fields of the nonzero elements of both
/// operands. Every element of an operand with lowest field e is a multiple of 2^(e−127−7). So every product, and every rounded sum, is a
/// multiple of q = 2^(ea + eb − 268). If q ≥ 2⁻¹²⁶, no nonzero sum is below 2⁻¹²⁶.
pub(super) fn sums_may_be_tiny(a_lowest: u8, b_lowest: u8) -> bool {
    u32::from(a_lowest) + u32::from(b_lowest) < 268 - 126
}

/// Whether a chain that resumes from this sum can pass through a tiny number. A sum with exponent field e is a multiple of 2^(e−127−23),
/// and so is every sum of it with multiples of 2⁻¹²⁶.
pub(super) fn resumed_sum_may_be_tiny(sum: f32) -> bool {
    (1..(150 - 126) << 23).contains(&(sum.to_bits() & 0x7FFF_FFFF))
}

/// Rounds F32 to BF16, nearest-even; NaN stays NaN.
#[inline(always)]
pub(super) fn round_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    bf16::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { bits >> 16 | 0x40 } else { rounded } as u16)
}

#[cfg(target_arch = "x86_64")]
#[path = "pack_avx512.rs"]
mod avx512;
