//! Attention one query at a time: the definition of the bits. Slow.
//!
//! Queries are scaled on reading. A key later than the query, but in the same tile of 8, takes part in
//! the sums over keys with weight 0; no other masked key or query takes part in anything.

use super::tile::TILE;
use super::{BackwardInput, BackwardOutput, ForwardInput, ForwardOutput, Heads};
use crate::simd::{Real, lane_dot, softmax_terms};
use nibble_formats::math::{exp, log};

/// The rows of one head of one sequence.
struct View<'a, T> {
    x: &'a [T],
    stride: usize,
    dim: usize,
}

impl<'a, T: Real> View<'a, T> {
    /// Of a tensor of `num_heads` heads of `dim`.
    fn new(
        x: &'a [T],
        sizes: &Heads,
        (num_heads, dim): (usize, usize),
        sequence: usize,
        head: usize,
    ) -> Self {
        let x = sizes.cells(x, (num_heads, dim), sequence, head, 0..sizes.seq_len);
        Self { x, stride: num_heads * dim, dim }
    }

    fn row(&self, i: usize) -> &'a [T] {
        &self.x[i * self.stride..][..self.dim]
    }

    fn scaled(&self, i: usize, scale: f32) -> Vec<f32> {
        self.row(i).iter().map(|x| x.widen() * scale).collect()
    }
}

/// Σ a·b, one chain of fma.
fn chain(a: &[f32], b: &[impl Real]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| a.mul_add(b.widen(), sum))
}

/// Adds weight · x to the sums.
fn add_row(sums: &mut [f32], weight: f32, x: &[impl Real]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        *sum = weight.mul_add(x.widen(), *sum);
    }
}

/// One past the last key of the tile of query `i`.
fn tile_end(sizes: &Heads, i: usize) -> usize {
    ((i / TILE + 1) * TILE).min(sizes.seq_len)
}

pub(super) fn forward<T: Real>(sizes: &Heads, input: &ForwardInput<'_, T>, output: &ForwardOutput<'_, T>) {
    for unit in 0..sizes.sequences * sizes.heads {
        let (sequence, head) = (unit / sizes.heads, unit % sizes.heads);
        let q = View::new(input.q, sizes, (sizes.heads, sizes.head_dim), sequence, head);
        let k = View::new(input.k, sizes, (sizes.kv_heads, sizes.head_dim), sequence, sizes.kv_head(head));
        let v = View::new(input.v, sizes, (sizes.kv_heads, sizes.value_dim), sequence, sizes.kv_head(head));
        for i in 0..sizes.seq_len {
            let query = q.scaled(i, sizes.scale);
            let mut weights: Vec<f32> = (0..=i).map(|j| chain(&query, k.row(j))).collect();
            let (max, sum) = softmax_terms(&mut weights);
            weights.resize(tile_end(sizes, i), 0.0);
            let mut out = vec![0.0; sizes.value_dim];
            for (j, &weight) in weights.iter().enumerate() {
                add_row(&mut out, weight, v.row(j));
            }
            let row = sequence * sizes.seq_len + i;
            // SAFETY: this is the only thread that writes.
            let (to, lse) = unsafe { (output.out.row(row, head), output.lse.row(row, head)) };
            to.iter_mut().zip(out).for_each(|(to, x)| *to = T::round(x * (1.0 / sum)));
            lse[0] = max + log(sum);
        }
    }
}

pub(super) fn backward<T: Real>(sizes: &Heads, input: &BackwardInput<'_, T>, output: &BackwardOutput<'_, T>) {
    let group = sizes.group();
    for unit in 0..sizes.sequences * sizes.kv_heads {
        let (sequence, kv_head) = (unit / sizes.kv_heads, unit % sizes.kv_heads);
        let k = View::new(input.k, sizes, (sizes.kv_heads, sizes.head_dim), sequence, kv_head);
        let v = View::new(input.v, sizes, (sizes.kv_heads, sizes.value_dim), sequence, kv_head);
        let mut dk = vec![vec![0.0; sizes.head_dim]; sizes.seq_len];
        let mut dv = vec![vec![0.0; sizes.value_dim]; sizes.seq_len];
        for head in kv_head * group..(kv_head + 1) * group {
            let q = View::new(input.q, sizes, (sizes.heads, sizes.head_dim), sequence, head);
            let out = View::new(input.out, sizes, (sizes.heads, sizes.value_dim), sequence, head);
            let dout = View::new(input.dout, sizes, (sizes.heads, sizes.value_dim), sequence, head);
            for i in 0..sizes.seq_len {
                let row = sequence * sizes.seq_len + i;
                let lse = input.lse[row * sizes.heads + head];
                let delta = lane_dot(dout.row(i), out.row(i));
                let (query, dout) = (q.scaled(i, sizes.scale), dout.scaled(i, 1.0));
                let mut dq = vec![0.0; sizes.head_dim];
                for j in 0..tile_end(sizes, i) {
                    let (mut p, mut ds) = (0.0, 0.0);
                    if j <= i {
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
        for j in 0..sizes.seq_len {
            let row = sequence * sizes.seq_len + j;
            // SAFETY: this is the only thread that writes.
            let (to_dk, to_dv) = unsafe { (output.dk.row(row, kv_head), output.dv.row(row, kv_head)) };
            to_dk.iter_mut().zip(&dk[j]).for_each(|(to, &x)| *to = T::round(x));
            to_dv.iter_mut().zip(&dv[j]).for_each(|(to, &x)| *to = T::round(x));
        }
    }
}
