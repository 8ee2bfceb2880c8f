//! The matrix products of attention. A product multiplies eight rows of A at a time by panels of 16 columns of B.
//!
//! The general GEMM in `gemm` packs both operands in each call. Here K and V are packed once per sequence, the softmax's output is used in
//! place, and everything above the diagonal is skipped.

use super::close;
use crate::gemm::Isa;
use crate::simd::{LANES, Real, exp_less, lane_dot, lane_max, lane_sum, map_lanes, per_isa};
use nibble_formats::math::exp;
use std::ops::Range;

/// Queries (or keys) per tile. A product may include all keys (queries) of the tile on the diagonal.
pub(super) const TILE: usize = 8;

/// Strides of an operand A. Element (row, k) of A is at `row·row + k·step`; element (k, panel·16 + c) of B is at `k·step + panel·panel +
/// c`.
#[derive(Clone, Copy)]
pub(super) struct RowStrides {
    pub row: usize,
    pub step: usize,
}

/// Strides of an operand B; see [`RowStrides`].
#[derive(Clone, Copy)]
pub(super) struct PanelStrides {
    pub step: usize,
    pub panel: usize,
}

/// Eight rows of A times panels of B; each output element is one fma chain over ascending k.
pub(super) struct TileProduct<'a> {
    pub a: &'a [f32],
    pub a_at: RowStrides,
    pub b: &'a [f32],
    pub b_at: PanelStrides,
    /// Length of the contraction dimension.
    pub k: usize,
    /// Number of panels of 16 columns.
    pub panels: usize,
    /// Distance, in elements, from one row of the result to the next.
    pub out_row: usize,
    /// Whether sums continue from the values in the result instead of starting at zero.
    pub onward: bool,
}

impl TileProduct<'_> {
    /// Writes the eight rows of the product to `out`.
    pub fn run(&self, isa: Isa, out: &mut [f32]) {
        if self.k == 0 || self.panels == 0 {
            return;
        }
        assert!(
            self.a.len() > (TILE - 1) * self.a_at.row + (self.k - 1) * self.a_at.step,
            "A ends within the tile"
        );
        let last = (self.k - 1) * self.b_at.step + (self.panels - 1) * self.b_at.panel;
        assert!(self.b.len() >= last + LANES, "B ends within the tile");
        // AVX2 has 16 registers of 8 lanes, so eight accumulators fit if panels are processed by halves.
        match isa {
            Isa::Avx2 => half_panels(isa, self, out),
            _ => whole_panels(isa, self, out),
        }
    }
}

per_isa!(fn whole_panels = panels_body::<16>; (product: &TileProduct<'_>, out: &mut [f32]));
per_isa!(fn half_panels = panels_body::<8>; (product: &TileProduct<'_>, out: &mut [f32]));

#[inline(always)]
fn panels_body<const WIDTH: usize>(product: &TileProduct<'_>, out: &mut [f32]) {
    for panel in 0..product.panels {
        for column in (0..LANES).step_by(WIDTH) {
            tile_body::<WIDTH>(product, panel, column, out);
        }
    }
}

#[inline(always)]
fn tile_body<const WIDTH: usize>(product: &TileProduct<'_>, panel: usize, column: usize, out: &mut [f32]) {
    let &TileProduct { a, a_at, b, b_at, k, out_row, onward, .. } = product;
    let (b_first, out_first) = (panel * b_at.panel + column, panel * LANES + column);
    let mut acc = [[0.0f32; WIDTH]; TILE];
    if onward {
        for (row, acc) in acc.iter_mut().enumerate() {
            acc.copy_from_slice(&out[out_first + row * out_row..][..WIDTH]);
        }
    }
    for k in 0..k {
        // SAFETY: `run` asserted that B holds the last panel of the last k, and `WIDTH` divides `LANES`.
        let b = unsafe { b.get_unchecked(b_first + k * b_at.step..).get_unchecked(..WIDTH) };
        for (row, acc) in acc.iter_mut().enumerate() {
            // SAFETY: `run` asserted that A holds the last row of the last k.
            let x = unsafe { *a.get_unchecked(row * a_at.row + k * a_at.step) };
            for i in 0..WIDTH {
                acc[i] = x.mul_add(b[i], acc[i]);
            }
        }
    }
    for (row, acc) in acc.iter().enumerate() {
        out[out_first + row * out_row..][..WIDTH].copy_from_slice(acc);
    }
}

/// Softmax statistics of a tile of rows: the factors that normalise the weights (including the sink), and log Σ exp(score).
#[derive(Default)]
pub(super) struct Softmax {
    pub inv_sum: [f32; TILE],
    pub lse: [f32; TILE],
}

per_isa!(pub(super) fn softmax_rows = softmax_rows_body; (scores: &mut [f32], stride: usize, last: (usize, usize), keys: usize, sink: Option<f32>) -> Softmax);

/// Softmax for a tile of queries: scores after a query's last key become weight 0, and the others become exp(s − max). `last` is the last
/// key of the first query, and the step to that of the next query. `keys`
/// is the number of scores in a row, including masked scores. `sink` is the head's sink score.
#[inline(always)]
fn softmax_rows_body(
    scores: &mut [f32],
    stride: usize,
    (last, step): (usize, usize),
    keys: usize,
    sink: Option<f32>,
) -> Softmax {
    let (mut max, mut sum) = ([0.0f32; TILE], [0.0f32; TILE]);
    // Each stage runs over all rows, so that the rows' latencies overlap.
    for (row, max) in max.iter_mut().enumerate() {
        let scores = &mut scores[row * stride..][..keys];
        // exp(−∞) is +0, which changes neither the sum nor a product.
        mask(scores, last + row * step, f32::NEG_INFINITY);
        *max = lane_max(scores);
    }
    for (row, &max) in max.iter().enumerate() {
        exp_less(&mut scores[row * stride..][..keys], max);
    }
    for (row, sum) in sum.iter_mut().enumerate() {
        *sum = lane_sum(&scores[row * stride..][..keys]);
    }
    let mut softmax = Softmax::default();
    for row in 0..TILE {
        (softmax.inv_sum[row], softmax.lse[row]) = close(max[row], sum[row], sink);
    }
    softmax
}

/// Masks the scores after the query's last key. Fewer scores than one panel are masked, because rows end with the panel that contains the
/// tile.
#[inline(always)]
fn mask(row: &mut [f32], last: usize, value: f32) {
    let Some(at) = row.len().checked_sub(LANES) else { return };
    let seen = (last + 1).saturating_sub(at) as u32;
    for (lane, x) in row[at..].iter_mut().enumerate() {
        *x = if lane as u32 >= seen { value } else { *x };
    }
}

/// Masks the scores before the windows of a tile's queries: the first `hidden` scores of each row.
pub(super) fn hide(rows: &mut [f32], stride: usize, hidden: &[usize; TILE], value: f32) {
    for (row, &hidden) in hidden.iter().enumerate() {
        rows[row * stride..][..hidden].fill(value);
    }
}

per_isa!(pub(super) fn score_grads = score_grads_body; (p: &mut [f32], ds: &mut [f32], stride: usize, last: (usize, usize), keys: Range<usize>, lse: &[f32; TILE], delta: &[f32; TILE]));

/// Score gradients for a tile of queries with these last keys (see [`softmax_rows`]), over whole panels of `keys`: scores become P = exp(s − lse), and dP
/// becomes dS = P · (dP − delta). P and dS are 0 for later keys.
#[inline(always)]
fn score_grads_body(
    p: &mut [f32],
    ds: &mut [f32],
    stride: usize,
    (last, step): (usize, usize),
    keys: Range<usize>,
    lse: &[f32; TILE],
    delta: &[f32; TILE],
) {
    for (row, (p, ds)) in p.chunks_exact_mut(stride).zip(ds.chunks_exact_mut(stride)).enumerate() {
        let (p, ds) = (&mut p[keys.clone()], &mut ds[keys.clone()]);
        for (p, ds) in p.as_chunks_mut::<LANES>().0.iter_mut().zip(ds.as_chunks_mut::<LANES>().0) {
            for i in 0..LANES {
                p[i] = exp(p[i] - lse[row]);
                ds[i] = p[i] * (ds[i] - delta[row]);
            }
        }
        mask(p, last + row * step - keys.start, 0.0);
        mask(ds, last + row * step - keys.start, 0.0);
    }
}

per_isa!(pub(super) fn widen_rows<T: Real> = widen_rows_body; (from: &[T], from_row: usize, cols: usize, factor: f32, to: &mut [f32], to_row: usize));

/// Sets `to` = `from` · `factor`, for all rows of `to`. Rows past the end of `from`, and columns past `cols`, become 0.
#[inline(always)]
fn widen_rows_body<T: Real>(
    from: &[T],
    from_row: usize,
    cols: usize,
    factor: f32,
    to: &mut [f32],
    to_row: usize,
) {
    for (row, to) in to.chunks_exact_mut(to_row).enumerate() {
        let from = from.get(row * from_row..row * from_row + cols).unwrap_or(&[]);
        let (to, padding) = to.split_at_mut(from.len());
        map_lanes(from, from, to, |x, _| x * factor);
        padding.fill(0.0);
    }
}

per_isa!(pub(super) fn transpose_panels = transpose_panels_body; (rows: &[f32], row: usize, cols: usize, panels: &mut [f32]));

/// Packs rows of `cols` elements, `row` elements apart, into panels `[rows / 16][cols][16]`.
#[inline(always)]
fn transpose_panels_body(rows: &[f32], row: usize, cols: usize, panels: &mut [f32]) {
    for (rows, panel) in rows.chunks_exact(LANES * row).zip(panels.chunks_exact_mut(LANES * cols)) {
        for (i, to) in panel.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            for lane in 0..LANES {
                to[lane] = rows[lane * row + i];
            }
        }
    }
}

per_isa!(pub(super) fn row_dots<T: Real> = row_dots_body; (a: &[T], b: &[T], row: usize, cols: usize, dots: &mut [f32]));

/// Dot products of corresponding rows of `a` and `b`. A row has `cols` elements; rows are `row` elements apart.
#[inline(always)]
fn row_dots_body<T: Real>(a: &[T], b: &[T], row: usize, cols: usize, dots: &mut [f32]) {
    for (i, dot) in dots.iter_mut().enumerate() {
        *dot = lane_dot(&a[i * row..][..cols], &b[i * row..][..cols]);
    }
}

per_isa!(pub(super) fn store_row<T: Real> = store_row_body; (x: &[f32], factor: f32, to: &mut [T]));

/// Sets `to` = x · factor, with one rounding; x may be longer than `to`.
#[inline(always)]
fn store_row_body<T: Real>(x: &[f32], factor: f32, to: &mut [T]) {
    let x = &x[..to.len()];
    map_lanes(x, x, to, |x, _| x * factor);
}
