//! Attention over register tiles, with the bits of `spec`. A task is one segment (see `sight`) and one key/value head or query head.

use super::sight::{Segment, Sight};
use super::tile::{
    PanelStrides, RowStrides, TILE, TileProduct, hide, row_dots, score_grads, softmax_rows, store_row,
    transpose_panels, widen_rows,
};
use super::{BackwardInput, BackwardOutput, ForwardInput, ForwardOutput, Heads, cells, sink_grad};
use crate::Cpu;
use crate::gemm::Isa;
use crate::simd::{LANES, Real};
use rayon::prelude::*;
use std::ops::Range;

/// Queries per block of the backward pass. P and dS of a block stay in the L1 cache while dK and dV accumulate them.
const BLOCK: usize = 2 * TILE;

/// Number of multiply-adds below which waking another thread costs more than it saves.
const WORTH_A_THREAD: usize = 200_000;

/// Query heads of one segment that share a key/value head.
struct Unit {
    segment: Segment,
    kv_head: usize,
    heads: Range<usize>,
}

pub(super) fn forward<T: Real>(
    cpu: &Cpu,
    sizes: &Heads,
    sight: &Sight,
    input: &ForwardInput<'_, T>,
    output: &ForwardOutput<'_, T>,
) {
    // Heads of a group share the packed K and V, so a group is one task unless that leaves threads idle.
    let alone = sizes.sequences * sizes.kv_heads < 2 * cpu.pool().current_num_threads();
    let run = |space: &mut Space<'_>, unit: &Unit| space.forward(unit, input, output);
    for_units(cpu, sizes, sight, if alone { 1 } else { sizes.group() }, run);
}

pub(super) fn backward<T: Real>(
    cpu: &Cpu,
    sizes: &Heads,
    sight: &Sight,
    input: &BackwardInput<'_, T>,
    output: &BackwardOutput<'_, T>,
) {
    // dK and dV are sums over a group's query heads, so a group is one task.
    for_units(cpu, sizes, sight, sizes.group(), |space, unit| space.backward(unit, input, output));
}

/// Runs a task for every `heads` query heads of a group.
fn for_units(
    cpu: &Cpu,
    sizes: &Heads,
    sight: &Sight,
    heads: usize,
    run: impl Fn(&mut Space<'_>, &Unit) + Sync,
) {
    if sizes.heads == 0 {
        return;
    }
    let units = sight.segments.len() * sizes.heads / heads;
    let unit = |i: usize| {
        let first = i * heads % sizes.heads;
        let segment = sight.segments[i * heads / sizes.heads];
        Unit { segment, kv_head: sizes.kv_head(first), heads: first..first + heads }
    };
    let multiply_adds = sizes.tokens() * sizes.seq_len * sizes.heads * sizes.head_dim.max(sizes.value_dim);
    let space = || Space::new(sizes, sight, cpu.isa());
    if multiply_adds < WORTH_A_THREAD || cpu.pool().current_num_threads() == 1 {
        let mut space = space();
        (0..units).for_each(|i| run(&mut space, &unit(i)));
    } else {
        cpu.pool().install(|| {
            (0..units).into_par_iter().with_max_len(1).for_each_init(space, |space, i| run(space, &unit(i)));
        });
    }
}

/// Scratch memory of a task. A head's rows are zero-padded to whole panels of 16 columns, and segments to whole panels of 16 keys.
struct Space<'a> {
    sizes: &'a Heads,
    sight: &'a Sight,
    isa: Isa,
    /// head_dim, padded to whole panels.
    width: usize,
    /// value_dim, padded to whole panels.
    value_width: usize,
    /// The segment's length, padded to whole panels.
    keys: usize,
    /// Distance, in elements, from one row of scores to the next: an odd number of cache lines, so that rows do not collide in the cache.
    stride: usize,
    k: Vec<f32>,
    v: Vec<f32>,
    k_panels: Vec<f32>,
    v_panels: Vec<f32>,
    q: Vec<f32>,
    dout: Vec<f32>,
    p: Vec<f32>,
    ds: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    tile: Vec<f32>,
}

impl<'a> Space<'a> {
    fn new(sizes: &'a Heads, sight: &'a Sight, isa: Isa) -> Self {
        let [width, value_width] = [sizes.head_dim, sizes.value_dim].map(|dim| dim.next_multiple_of(LANES));
        Self {
            sizes,
            sight,
            isa,
            width,
            value_width,
            keys: 0,
            stride: 0,
            k: Vec::new(),
            v: Vec::new(),
            k_panels: Vec::new(),
            v_panels: Vec::new(),
            q: Vec::new(),
            dout: Vec::new(),
            p: Vec::new(),
            ds: Vec::new(),
            dk: Vec::new(),
            dv: Vec::new(),
            tile: vec![0.0; TILE * width.max(value_width)],
        }
    }

    fn forward<T: Real>(&mut self, unit: &Unit, input: &ForwardInput<'_, T>, output: &ForwardOutput<'_, T>) {
        let (sizes, width, value_width) = (self.sizes, self.width, self.value_width);
        let Segment { first: base, len, .. } = unit.segment;
        self.lay_out_keys(unit, input.k, input.v);
        self.q.resize(TILE * width, 0.0);
        self.p.resize(TILE * self.stride, 0.0);
        for head in unit.heads.clone() {
            let sink = input.sinks.map(|sinks| sinks[head]);
            for first in (0..len).step_by(TILE) {
                let rows = first..(first + TILE).min(len);
                let tokens = base + rows.start..base + rows.end;
                let q = cells(input.q, (sizes.heads, sizes.head_dim), head, tokens);
                widen_rows(
                    self.isa,
                    q,
                    sizes.heads * sizes.head_dim,
                    sizes.head_dim,
                    sizes.scale,
                    &mut self.q,
                    width,
                );
                let start = self.sight.tile_start(unit.segment, first);
                let from = start / LANES * LANES;
                let keys = from..self.sight.tile_end(unit.segment, first).next_multiple_of(LANES);
                self.against((&self.q, width), &self.k_panels, sizes.head_dim, keys.clone())
                    .run(self.isa, &mut self.p[from..]);
                if !unit.segment.is_whole {
                    let hidden = self.sight.hidden(unit.segment, rows.clone(), from);
                    hide(&mut self.p[from..], self.stride, &hidden, f32::NEG_INFINITY);
                }
                let (last, step) = self.sight.last_keys(unit.segment, first);
                let last = (last - from, step);
                let softmax =
                    softmax_rows(self.isa, &mut self.p[from..], self.stride, last, keys.len(), sink);
                let end = self.sight.tile_end(unit.segment, first);
                over_keys(&self.p, self.stride, &self.v, value_width, start..end)
                    .run(self.isa, &mut self.tile);
                for (row, (i, x)) in rows.zip(self.tile.chunks_exact(value_width)).enumerate() {
                    let token = base + i;
                    // SAFETY: no other task has this segment and query head.
                    let (out, lse) = unsafe { (output.out.row(token, head), output.lse.row(token, head)) };
                    store_row(self.isa, x, softmax.inv_sum[row], out);
                    lse[0] = softmax.lse[row];
                }
            }
        }
    }

    fn backward<T: Real>(
        &mut self,
        unit: &Unit,
        input: &BackwardInput<'_, T>,
        output: &BackwardOutput<'_, T>,
    ) {
        let (sizes, width, value_width) = (self.sizes, self.width, self.value_width);
        let Segment { first: base, len, .. } = unit.segment;
        self.lay_out_keys(unit, input.k, input.v);
        self.v_panels.resize(self.keys * sizes.value_dim, 0.0);
        transpose_panels(self.isa, &self.v, value_width, sizes.value_dim, &mut self.v_panels);
        self.q.resize(BLOCK * width, 0.0);
        self.dout.resize(BLOCK * value_width, 0.0);
        for x in [&mut self.p, &mut self.ds] {
            x.resize(BLOCK * self.stride, 0.0);
        }
        for (x, width) in [(&mut self.dk, width), (&mut self.dv, value_width)] {
            x.clear();
            x.resize(self.keys * width, 0.0);
        }
        for head in unit.heads.clone() {
            for first in (0..len).step_by(BLOCK) {
                let rows = first..(first + BLOCK).min(len);
                let tokens = base + rows.start..base + rows.end;
                for (x, factor, to, dim, width) in [
                    (input.q, sizes.scale, &mut self.q, sizes.head_dim, width),
                    (input.dout, 1.0, &mut self.dout, sizes.value_dim, value_width),
                ] {
                    let x = cells(x, (sizes.heads, dim), head, tokens.clone());
                    widen_rows(self.isa, x, sizes.heads * dim, dim, factor, to, width);
                }
                for tile in rows.clone().step_by(TILE) {
                    self.query_grads(unit, head, tile - first, tile, input, output);
                }
                self.add_key_grads(unit.segment, rows);
            }
        }
        for j in 0..len {
            let token = base + j;
            // SAFETY: no other task has this segment and key/value head.
            let (dk, dv) =
                unsafe { (output.dk.row(token, unit.kv_head), output.dv.row(token, unit.kv_head)) };
            store_row(self.isa, &self.dk[j * width..][..width], 1.0, dk);
            store_row(self.isa, &self.dv[j * value_width..][..value_width], 1.0, dv);
        }
    }

    /// P, dS and dq for the tile of queries that starts at `first`; `at` is the tile's first row in its block.
    fn query_grads<T: Real>(
        &mut self,
        unit: &Unit,
        head: usize,
        at: usize,
        first: usize,
        input: &BackwardInput<'_, T>,
        output: &BackwardOutput<'_, T>,
    ) {
        let (sizes, width, value_width, stride) = (self.sizes, self.width, self.value_width, self.stride);
        let Segment { first: base, len, is_whole } = unit.segment;
        let rows = first..(first + TILE).min(len);
        let tokens = base + rows.start..base + rows.end;
        let of_values = (sizes.heads, sizes.value_dim);
        let [out, dout] = [input.out, input.dout].map(|x| cells(x, of_values, head, tokens.clone()));
        let mut delta = [0.0; TILE];
        let value_cols = sizes.heads * sizes.value_dim;
        row_dots(self.isa, dout, out, value_cols, sizes.value_dim, &mut delta[..rows.len()]);
        let mut lse = [0.0; TILE];
        for (i, token) in tokens.enumerate() {
            lse[i] = input.lse[token * sizes.heads + head];
            if let (Some(sinks), Some(dsinks)) = (input.sinks, &output.dsinks) {
                // SAFETY: no other task has this segment and query head.
                let to = unsafe { dsinks.row(token, head) };
                to[0] = sink_grad(sinks[head], lse[i], delta[i]);
            }
        }
        let mut p = std::mem::take(&mut self.p);
        let mut ds = std::mem::take(&mut self.ds);
        let (p_tile, ds_tile) =
            (&mut p[at * stride..][..TILE * stride], &mut ds[at * stride..][..TILE * stride]);
        let start = self.sight.tile_start(unit.segment, first);
        let from = start / LANES * LANES;
        let end = self.sight.tile_end(unit.segment, first);
        let keys = from..end.next_multiple_of(LANES);
        let last = self.sight.last_keys(unit.segment, first);
        self.against((&self.q[at * width..], width), &self.k_panels, sizes.head_dim, keys.clone())
            .run(self.isa, &mut p_tile[from..]);
        let dout = (&self.dout[at * value_width..], value_width);
        self.against(dout, &self.v_panels, sizes.value_dim, keys.clone()).run(self.isa, &mut ds_tile[from..]);
        score_grads(self.isa, p_tile, ds_tile, stride, last, keys, &lse, &delta);
        if !is_whole {
            let hidden = self.sight.hidden(unit.segment, rows.clone(), from);
            hide(&mut p_tile[from..], stride, &hidden, 0.0);
            hide(&mut ds_tile[from..], stride, &hidden, 0.0);
        }
        over_keys(ds_tile, stride, &self.k, width, start..end).run(self.isa, &mut self.tile);
        (self.p, self.ds) = (p, ds);
        for (i, x) in rows.zip(self.tile.chunks_exact(width)) {
            // SAFETY: no other task has this segment and query head.
            let dq = unsafe { output.dq.row(base + i, head) };
            store_row(self.isa, x, sizes.scale, dq);
        }
    }

    /// dV += Pᵀ·dO and dK += dSᵀ·Q over a block of queries.
    fn add_key_grads(&mut self, segment: Segment, queries: Range<usize>) {
        let tiles = queries.clone().step_by(TILE);
        let keys =
            self.sight.tile_start(segment, queries.start)..self.sight.tile_end(segment, queries.end - 1);
        for key in keys.step_by(TILE) {
            // The start of the window never decreases from one query to the next. So the product ends before the first tile of queries
            // whose window starts after the key.
            let hidden = tiles.clone().find(|&tile| self.sight.tile_start(segment, tile) > key);
            // Under the causal mask, the queries of earlier tiles do not attend to the key.
            let first = queries.clone().step_by(TILE).find(|&tile| self.sight.tile_end(segment, tile) > key);
            let (from, end) = (first.unwrap_or(queries.end), hidden.unwrap_or(queries.end));
            let at = from - queries.start;
            let sums = [
                (&self.p, &self.dout, &mut self.dv, self.value_width),
                (&self.ds, &self.q, &mut self.dk, self.width),
            ];
            for (weights, rows, sum, width) in sums {
                let product = TileProduct {
                    a: &weights[at * self.stride + key..],
                    a_at: RowStrides { row: 1, step: self.stride },
                    b: &rows[at * width..],
                    b_at: PanelStrides { step: width, panel: LANES },
                    k: end - from,
                    panels: width / LANES,
                    out_row: width,
                    onward: true,
                };
                product.run(self.isa, &mut sum[key * width..]);
            }
        }
    }

    /// Packs K and V of a task: both as F32 rows, and K also as panels.
    fn lay_out_keys<T: Real>(&mut self, unit: &Unit, k: &[T], v: &[T]) {
        let (sizes, width) = (self.sizes, self.width);
        let Segment { first, len, .. } = unit.segment;
        self.keys = len.next_multiple_of(LANES);
        self.stride = self.keys + if (self.keys / LANES).is_multiple_of(2) { LANES } else { 0 };
        for (x, to, dim, width) in
            [(k, &mut self.k, sizes.head_dim, width), (v, &mut self.v, sizes.value_dim, self.value_width)]
        {
            let x = cells(x, (sizes.kv_heads, dim), unit.kv_head, first..first + len);
            to.resize(self.keys * width, 0.0);
            widen_rows(self.isa, x, sizes.kv_heads * dim, dim, 1.0, to, width);
        }
        self.k_panels.resize(self.keys * sizes.head_dim, 0.0);
        transpose_panels(self.isa, &self.k, width, sizes.head_dim, &mut self.k_panels);
    }

    /// Multiplies a tile of rows of `dim` elements (`width` apart) by transposed keys or values, in whole panels.
    fn against<'p>(
        &self,
        (rows, width): (&'p [f32], usize),
        panels: &'p [f32],
        dim: usize,
        keys: Range<usize>,
    ) -> TileProduct<'p> {
        TileProduct {
            a: rows,
            a_at: RowStrides { row: width, step: 1 },
            b: &panels[keys.start * dim..],
            b_at: PanelStrides { step: LANES, panel: dim * LANES },
            k: dim,
            panels: keys.len() / LANES,
            out_row: self.stride,
            onward: false,
        }
    }
}

/// Multiplies a tile of weights by these rows of `b`.
fn over_keys<'p>(
    weights: &'p [f32],
    stride: usize,
    b: &'p [f32],
    width: usize,
    keys: Range<usize>,
) -> TileProduct<'p> {
    TileProduct {
        a: &weights[keys.start..],
        a_at: RowStrides { row: stride, step: 1 },
        b: &b[keys.start * width..],
        b_at: PanelStrides { step: width, panel: LANES },
        k: keys.len(),
        panels: width / LANES,
        out_row: width,
        onward: false,
    }
}
