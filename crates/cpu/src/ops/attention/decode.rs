//! One query against cached keys and values: the sums of `spec`, in the same order. Keys outside the query's window enter no sum of values.

use super::{Heads, close, sinks_of};
use crate::Cpu;
use crate::simd::{LANES, Real, softmax_terms};
use nibble_core::ops::AttentionDecode;
use nibble_core::{Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Number of keys whose scores are computed side by side, each as a separate fma chain.
const KEYS: usize = 8;

pub(super) fn decode<T: Real>(cpu: &Cpu, op: &AttentionDecode<'_, Cpu>) -> Result<Tensor<Cpu>> {
    const OP: &str = "attention_decode";
    let (head_dim, value_dim) = (op.head_dim, op.value_dim);
    let sizes = Heads::new(op.q, op.k, (head_dim, value_dim), op.scale, 1);
    let [q, k, v] = [T::slice(OP, "q", op.q)?, T::slice(OP, "k", op.k)?, T::slice(OP, "v", op.v)?];
    let sinks = sinks_of(OP, op.sinks)?;
    let mut out = op.result(cpu)?;
    let to = T::slice_mut(OP, &mut out)?;
    let head = |(head, to): (usize, &mut [T])| {
        let query: Vec<f32> =
            q[head * head_dim..][..head_dim].iter().map(|x| x.widen() * sizes.scale).collect();
        let kv_head = sizes.kv_head(head);
        let keys = StridedRows { x: &k[kv_head * head_dim..], stride: op.k.cols };
        let values = StridedRows { x: &v[kv_head * value_dim..], stride: op.v.cols };
        one_head(&query, keys, values, (op.first..op.len, sinks.map(|sinks| sinks[head])), to);
    };
    cpu.pool().install(|| to.par_chunks_mut(value_dim).enumerate().for_each(head));
    Ok(out)
}

/// The rows of one head, `stride` elements apart.
#[derive(Clone, Copy)]
struct StridedRows<'a, T> {
    x: &'a [T],
    stride: usize,
}

/// `query` is already scaled; it sees the keys `seen`.
fn one_head<T: Real>(
    query: &[f32],
    k: StridedRows<'_, T>,
    v: StridedRows<'_, T>,
    (seen, sink): (Range<usize>, Option<f32>),
    to: &mut [T],
) {
    let key =
        |j: usize| -> Vec<f32> { k.x[j * k.stride..][..query.len()].iter().map(|x| x.widen()).collect() };
    // The sum of the weights has lanes, in which a key's place follows from its number: hidden keys fill the first lanes.
    let hidden = seen.start % LANES;
    let mut weights = Vec::with_capacity(hidden + seen.len());
    weights.resize(hidden, f32::NEG_INFINITY);
    for first in seen.clone().step_by(KEYS) {
        let keys: Vec<Vec<f32>> = (first..seen.end.min(first + KEYS)).map(key).collect();
        let mut sums = [0.0f32; KEYS];
        for (c, q) in query.iter().enumerate() {
            for (sum, key) in sums.iter_mut().zip(&keys) {
                *sum = q.mul_add(key[c], *sum);
            }
        }
        weights.extend(&sums[..keys.len()]);
    }
    let (max, sum) = softmax_terms(&mut weights);
    let (factor, _) = close(max, sum, sink);
    let mut out = vec![0.0f32; to.len()];
    for (j, &weight) in seen.zip(&weights[hidden..]) {
        for (out, x) in out.iter_mut().zip(&v.x[j * v.stride..]) {
            *out = weight.mul_add(x.widen(), *out);
        }
    }
    to.iter_mut().zip(out).for_each(|(to, x)| *to = T::round(x * factor));
}
