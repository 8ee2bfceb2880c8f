//! What a product costs at least, and groups of very different lengths.

use crate::case::Case;
use crate::check::{rows, wgrad};
use nibble_cuda::ops::grouped_product::{Kind, Out, Ragged, ScalesB};
use nibble_cuda::timing::Rates;

/// Rows that a warpgroup multiplies at a time.
const WAVE_ROWS: usize = 64;

/// Of one row of the groups.
fn flop_a_row(case: &Case) -> f64 {
    let (wide, deep) = match case.ragged {
        Ragged::Rows => (case.n, case.k),
        Ragged::Contraction => (case.m, case.n),
    };
    2.0 * wide as f64 * deep as f64
}

/// Floating-point operations that count.
pub fn flop(case: &Case) -> f64 {
    case.lens.iter().sum::<usize>() as f64 * flop_a_row(case)
}

/// Those of whole tiles: 64 rows, or a block of the contraction.
pub fn tile_flop(case: &Case) -> f64 {
    let unit = if case.ragged == Ragged::Rows { WAVE_ROWS } else { 128 };
    case.lens.iter().map(|len| len.next_multiple_of(unit)).sum::<usize>() as f64 * flop_a_row(case)
}

/// Microseconds to read the operands of groups that have rows, and to write D, or to read and write it.
pub fn memory_us(case: &Case, rates: &Rates) -> f64 {
    let desc = case.desc();
    let bytes = if desc.kind == Kind::Bf16 { 2 } else { 1 };
    let used: usize = case.lens.iter().sum();
    let matrices = case.lens.iter().filter(|&&len| len > 0).count();
    let read = match case.ragged {
        Ragged::Rows => used * case.k + matrices * case.n * case.k,
        Ragged::Contraction => used * (case.m + case.n),
    };
    let d = desc.d() * if desc.out == Out::Bf16 { 2 } else { 4 };
    rates.floor_us((read * bytes + if case.accumulate { d } else { 0 }) as u64, d as u64)
}

/// So many rows over experts whose shares fall as 1, 1/2, 1/3 ..., in an order that is none.
fn zipf(experts: usize, rows: usize) -> Vec<usize> {
    let all: f64 = (1..=experts).map(|i| 1.0 / i as f64).sum();
    let mut lens: Vec<usize> =
        (0..experts).map(|i| (rows as f64 / (all * (1 + i * 97 % experts) as f64)) as usize).collect();
    lens[0] += rows - lens.iter().sum::<usize>();
    lens
}

/// One group has all the rows.
fn one(groups: usize, which: usize, rows: usize) -> Vec<usize> {
    (0..groups).map(|group| if group == which { rows } else { 0 }).collect()
}

/// Even groups, and the uneven ones that are held to their rate.
pub fn loads() -> Vec<(Case, Vec<Case>)> {
    let tiles = |case: Case| Case { kind: Kind::Fp8(ScalesB::Tile), ..case };
    vec![
        (
            rows(&[256; 256], 2048, 4096),
            vec![rows(&zipf(256, 65536), 2048, 4096), rows(&one(256, 77, 65536), 2048, 4096)],
        ),
        (rows(&[4096; 8], 4096, 7168), vec![rows(&one(8, 5, 32768), 4096, 7168)]),
        (
            tiles(wgrad(&[4096; 8], 4096, 7168)),
            vec![tiles(wgrad(&one(8, 5, 32768), 4096, 7168)), tiles(wgrad(&zipf(8, 32768), 4096, 7168))],
        ),
        (tiles(wgrad(&[1024; 128], 1024, 2048)), vec![tiles(wgrad(&zipf(128, 131072), 1024, 2048))]),
    ]
}
