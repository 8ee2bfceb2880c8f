//! Attention computed one query at a time. This slow code defines the bits.
//!
//! Queries are scaled when they are read. A segment's queries and keys form tiles of 8. The sums of a query start at the tile of keys that
//! contains the window start of the first query in its tile. These sums end with the query's own tile, or with the segment if there is no
//! causal mask. In this range, a key to which the
//! query does not attend has weight 0; no other masked key or query enters any sum.

use super::sight::{Segment, Sight};
use super::{BackwardInput, BackwardOutput, ForwardInput, ForwardOutput, Heads, cells, close, sink_grad};
use crate::simd::{Real, lane_dot, softmax_terms};
use nibble_formats::math::exp;

/// The rows of one head in a segment.
struct View<'a, T> {
    x: &'a [T],
    stride: usize,
    dim: usize,
}

impl<'a, T: Real> View<'a, T> {
    /// A view into a tensor of `num_heads` heads of `dim` elements.
    fn new(x: &'a [T], (num_heads, dim): (usize, usize), segment: Segment, head: usize) -> Self {
        let x = cells(x, (num_heads, dim), head, segment.first..segment.first + segment.len);
        Self { x, stride: num_heads * dim, dim }
    }

    fn row(&self, i: usize) -> &'a [T] {
        &self.x[i * self.stride..][..self.dim]
    }

    fn scaled(&self, i: usize, scale: f32) -> Vec<f32> {
        self.row(i).iter().map(|x| x.widen() * scale).collect()
    }
}

/// Computes Σ a·b as one fma chain.
fn chain(a: &[f32], b: &[impl Real]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| a.mul_add(b.widen(), sum))
}

/// Adds weight · x to `sums`.
fn add_row(sums: &mut [f32], weight: f32, x: &[impl Real]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        *sum = weight.mul_add(x.widen(), *sum);
    }
}

pub(super) fn forward<T: Real>(
    sizes: &Heads,
    sight: &Sight,
    input: &ForwardInput<'_, T>,
    output: &ForwardOutput<'_, T>,
) {
    let units = sight.segments.iter().flat_map(|&segment| (0..sizes.heads).map(move |head| (segment, head)));
    for (segment, head) in units {
        let q = View::new(input.q, (sizes.heads, sizes.head_dim), segment, head);
        let k = View::new(input.k, (sizes.kv_heads, sizes.head_dim), segment, sizes.kv_head(head));
        let v = View::new(input.v, (sizes.kv_heads, sizes.value_dim), segment, sizes.kv_head(head));
        for i in 0..segment.len {
            let query = q.scaled(i, sizes.scale);
            let first = sight.first_key(segment, i);
            let score = |j| if j < first { f32::NEG_INFINITY } else { chain(&query, k.row(j)) };
            let mut weights: Vec<f32> = (0..=sight.last_key(segment, i)).map(score).collect();
            let (max, sum) = softmax_terms(&mut weights);
            weights.resize(sight.tile_end(segment, i), 0.0);
            let mut out = vec![0.0; sizes.value_dim];
            for (j, &weight) in weights.iter().enumerate().skip(sight.tile_start(segment, i)) {
                add_row(&mut out, weight, v.row(j));
            }
            let row = segment.first + i;
            // SAFETY: this is the only thread that writes.
            let (to, lse) = unsafe { (output.out.row(row, head), output.lse.row(row, head)) };
            let (factor, log_sum) = close(max, sum, input.sinks.map(|sinks| sinks[head]));
            to.iter_mut().zip(out).for_each(|(to, x)| *to = T::round(x * factor));
            lse[0] = log_sum;
        }
    }
}

pub(super) fn backward<T: Real>(
    sizes: &Heads,
    sight: &Sight,
    input: &BackwardInput<'_, T>,
    output: &BackwardOutput<'_, T>,
) {
    let group = sizes.group();
    let units =
        sight.segments.iter().flat_map(|&segment| (0..sizes.kv_heads).map(move |head| (segment, head)));
    for (segment, kv_head) in units {
        let k = View::new(input.k, (sizes.kv_heads, sizes.head_dim), segment, kv_head);
        let v = View::new(input.v, (sizes.kv_heads, sizes.value_dim), segment, kv_head);
        let mut dk = vec![vec![0.0; sizes.head_dim]; segment.len];
        let mut dv = vec![vec![0.0; sizes.value_dim]; segment.len];
        for head in kv_head * group..(kv_head + 1) * group {
            let q = View::new(input.q, (sizes.heads, sizes.head_dim), segment, head);
            let out = View::new(input.out, (sizes.heads, sizes.value_dim), segment, head);
            let dout = View::new(input.dout, (sizes.heads, sizes.value_dim), segment, head);
            for i in 0..segment.len {
                let row = segment.first + i;
                let lse = input.lse[row * sizes.heads + head];
                let delta = lane_dot(dout.row(i), out.row(i));
                if let (Some(sinks), Some(dsinks)) = (input.sinks, &output.dsinks) {
                    // SAFETY: this is the only thread that writes.
                    let to = unsafe { dsinks.row(row, head) };
                    to[0] = sink_grad(sinks[head], lse, delta);
                }
                let (query, dout) = (q.scaled(i, sizes.scale), dout.scaled(i, 1.0));
                let mut dq = vec![0.0; sizes.head_dim];
                for j in sight.tile_start(segment, i)..sight.tile_end(segment, i) {
                    let (mut p, mut ds) = (0.0, 0.0);
                    if (sight.first_key(segment, i)..=sight.last_key(segment, i)).contains(&j) {
                        p = exp(chain(&query, k.row(j)) - lse);
                        ds = p * (chain(&dout, v.row(j)) - delta);
                    }
                    add_row(&mut dq, ds, k.row(j));
                    add_row(&mut dv[j], p, &dout);
                    add_row(&mut dk[j], ds, &query);
                }
                // SAFETY: this is the only thread that writes.
                let to = unsafe { output.dq.row(row, head) };
                to.iter_mut().zip(dq).for_each(|(to, x)| *to = T::round(x * sizes.scale));
            }
        }
        for j in 0..segment.len {
            let row = segment.first + j;
            // SAFETY: this is the only thread that writes.
            let (to_dk, to_dv) = unsafe { (output.dk.row(row, kv_head), output.dv.row(row, kv_head)) };
            to_dk.iter_mut().zip(&dk[j]).for_each(|(to, &x)| *to = T::round(x));
            to_dv.iter_mut().zip(&dv[j]).for_each(|(to, &x)| *to = T::round(x));
        }
    }
}
