//! The CPU code of [`nibble_core::ops::Attention`] and [`nibble_core::ops::AttentionBackward`].
//!
//! `spec` is the definition. `fast` gives the same bits with register tiles (`tile`); one task handles one head of one segment (`sight`).

pub mod assemble_kv;
pub mod windows;

pub(crate) use {assemble_kv::*, windows::*};

mod decode;
mod fast;
mod sight;
mod spec;
#[cfg(test)]
mod tests;
mod tile;

use crate::simd::Real;
use crate::{CodePath, Cpu};
use half::bf16;
use nibble_core::ops::{Attention, AttentionBackward, AttentionDecode, AttentionGrads, AttentionOut};
use nibble_core::{DType, Result, Tensor};
use nibble_formats::math::{exp, log};
use sight::Sight;
use std::marker::PhantomData;
use std::ops::Range;

/// Computes softmax(q·kᵀ·scale, masked)·v, and the log-sum-exp of the scores.
pub(crate) fn attention(cpu: &Cpu, op: Attention<'_, Cpu>) -> Result<AttentionOut<Cpu>> {
    match op.q.dtype() {
        DType::F32 => forward::<f32>(cpu, &op),
        DType::Bf16 => forward::<bf16>(cpu, &op),
    }
}

/// Computes [`attention`] of one query with cached keys and values.
pub(crate) fn attention_decode(cpu: &Cpu, op: AttentionDecode<'_, Cpu>) -> Result<Tensor<Cpu>> {
    match op.q.dtype() {
        DType::F32 => decode::decode::<f32>(cpu, &op),
        DType::Bf16 => decode::decode::<bf16>(cpu, &op),
    }
}

/// Computes the gradients dq, dk and dv.
pub(crate) fn attention_backward(cpu: &Cpu, op: AttentionBackward<'_, Cpu>) -> Result<AttentionGrads<Cpu>> {
    match op.q.dtype() {
        DType::F32 => backward::<f32>(cpu, &op),
        DType::Bf16 => backward::<bf16>(cpu, &op),
    }
}

/// The sizes and the scale of an attention call.
#[derive(Clone, Copy)]
struct Heads {
    sequences: usize,
    seq_len: usize,
    heads: usize,
    kv_heads: usize,
    /// Head size of queries and keys.
    head_dim: usize,
    /// Head size of values.
    value_dim: usize,
    /// Factor of the scores.
    scale: f32,
}

impl Heads {
    fn new(
        q: &Tensor<Cpu>,
        k: &Tensor<Cpu>,
        (head_dim, value_dim): (usize, usize),
        scale: f32,
        seq_len: usize,
    ) -> Self {
        let (heads, kv_heads) = (q.cols / head_dim, k.cols / head_dim);
        Self { sequences: q.rows / seq_len, seq_len, heads, kv_heads, head_dim, value_dim, scale }
    }

    /// The key/value head that a query head uses.
    fn kv_head(&self, head: usize) -> usize {
        head / self.group()
    }

    /// Number of query heads per key/value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn tokens(&self) -> usize {
        self.sequences * self.seq_len
    }
}

/// The slice from the first to the last element of some tokens of one head. The tensor has `num_heads` heads of `dim` elements, so the rows
/// of the slice are `num_heads · dim` apart.
fn cells<T>(x: &[T], (num_heads, dim): (usize, usize), head: usize, tokens: Range<usize>) -> &[T] {
    let at = |token: usize| (token * num_heads + head) * dim;
    if tokens.is_empty() { &[] } else { &x[at(tokens.start)..at(tokens.end - 1) + dim] }
}

/// The complete tensors that forward tasks read.
struct ForwardInput<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    sinks: Option<&'a [f32]>,
}

/// The tensors that forward tasks write.
struct ForwardOutput<'a, T> {
    out: Cells<'a, T>,
    lse: Cells<'a, f32>,
}

/// The complete tensors that backward tasks read.
struct BackwardInput<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    out: &'a [T],
    dout: &'a [T],
    lse: &'a [f32],
    sinks: Option<&'a [f32]>,
}

/// The tensors that backward tasks write.
struct BackwardOutput<'a, T> {
    dq: Cells<'a, T>,
    dk: Cells<'a, T>,
    dv: Cells<'a, T>,
    dsinks: Option<Cells<'a, f32>>,
}

/// A matrix `[tokens, heads · len]` whose cells (one token of one head) several tasks write.
struct Cells<'a, T> {
    first: *mut T,
    tokens: usize,
    heads: usize,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Cells` stands for a `&mut [T]`; callers of `row` guarantee that no two threads access the same cell.
unsafe impl<T: Send> Sync for Cells<'_, T> {}

impl<'a, T> Cells<'a, T> {
    fn new(x: &'a mut [T], tokens: usize, heads: usize) -> Self {
        let len = x.len().checked_div(tokens * heads).unwrap_or(0);
        Self { first: x.as_mut_ptr(), tokens, heads, len, borrow: PhantomData }
    }

    /// The cell of one token and one head.
    ///
    /// # Safety
    /// No other reference to this cell exists.
    #[allow(clippy::mut_from_ref)] // the purpose of this type is disjoint cells through one shared handle
    unsafe fn row(&self, token: usize, head: usize) -> &mut [T] {
        assert!(token < self.tokens && head < self.heads, "cell ({token}, {head}) is outside the matrix");
        // SAFETY: the assertion ensures that the cell lies within the slice that `new` borrowed for 'a; the caller guarantees that it is
        // not aliased.
        unsafe {
            std::slice::from_raw_parts_mut(self.first.add((token * self.heads + head) * self.len), self.len)
        }
    }
}

fn sinks_of<'a>(op: &'static str, sinks: Option<&'a Tensor<Cpu>>) -> Result<Option<&'a [f32]>> {
    sinks.map(|sinks| f32::slice(op, "sinks", sinks)).transpose()
}

/// Finishes a query's softmax from its largest score and its sum of exp(score − max). Returns the factor that normalises the weights (with
/// the head's sink, if any), and the logarithm of the sum of all exponentials.
#[inline(always)]
fn close(max: f32, sum: f32, sink: Option<f32>) -> (f32, f32) {
    match sink {
        None => (1.0 / sum, max + log(sum)),
        // The exponentials are relative to the larger of sink and max, so that none overflows.
        Some(sink) if sink > max => {
            let less = exp(max - sink);
            let sum = sum.mul_add(less, 1.0);
            (less / sum, sink + log(sum))
        }
        Some(sink) => {
            let sum = sum + exp(sink - max);
            (1.0 / sum, max + log(sum))
        }
    }
}

/// A row's contribution to the gradient of a head's sink.
fn sink_grad(sink: f32, lse: f32, delta: f32) -> f32 {
    -exp(sink - lse) * delta
}

fn forward<T: Real>(cpu: &Cpu, op: &Attention<'_, Cpu>) -> Result<AttentionOut<Cpu>> {
    const OP: &str = "attention";
    let sizes = Heads::new(op.q, op.k, (op.head_dim, op.value_dim), op.scale, op.seq_len);
    let sight = Sight::new(&sizes, op.windows, op.causal);
    let input = ForwardInput {
        q: T::slice(OP, "q", op.q)?,
        k: T::slice(OP, "k", op.k)?,
        v: T::slice(OP, "v", op.v)?,
        sinks: sinks_of(OP, op.sinks)?,
    };
    let mut made = op.result(cpu)?;
    let output = ForwardOutput {
        out: Cells::new(T::slice_mut(OP, &mut made.out)?, sizes.tokens(), sizes.heads),
        lse: Cells::new(made.lse.as_mut_slice(), sizes.tokens(), sizes.heads),
    };
    match cpu.path() {
        CodePath::Scalar => spec::forward(&sizes, &sight, &input, &output),
        CodePath::Simd => fast::forward(cpu, &sizes, &sight, &input, &output),
    }
    Ok(made)
}

fn backward<T: Real>(cpu: &Cpu, op: &AttentionBackward<'_, Cpu>) -> Result<AttentionGrads<Cpu>> {
    const OP: &str = "attention_backward";
    let sizes = Heads::new(op.q, op.k, (op.head_dim, op.value_dim), op.scale, op.seq_len);
    let sight = Sight::new(&sizes, op.windows, op.causal);
    let input = BackwardInput {
        q: T::slice(OP, "q", op.q)?,
        k: T::slice(OP, "k", op.k)?,
        v: T::slice(OP, "v", op.v)?,
        out: T::slice(OP, "out", op.out)?,
        dout: T::slice(OP, "dout", op.dout)?,
        lse: op.lse.as_slice(),
        sinks: sinks_of(OP, op.sinks)?,
    };
    let mut grads = op.result(cpu)?;
    let AttentionGrads { dq, dk, dv, dsinks } = &mut grads;
    let dsinks = dsinks.as_mut().map(|dsinks| f32::slice_mut(OP, dsinks)).transpose()?;
    let output = BackwardOutput {
        dq: Cells::new(T::slice_mut(OP, dq)?, sizes.tokens(), sizes.heads),
        dk: Cells::new(T::slice_mut(OP, dk)?, sizes.tokens(), sizes.kv_heads),
        dv: Cells::new(T::slice_mut(OP, dv)?, sizes.tokens(), sizes.kv_heads),
        dsinks: dsinks.map(|dsinks| Cells::new(dsinks, sizes.tokens(), sizes.heads)),
    };
    match cpu.path() {
        CodePath::Scalar => spec::backward(&sizes, &sight, &input, &output),
        CodePath::Simd => fast::backward(cpu, &sizes, &sight, &input, &output),
    }
    Ok(grads)
}
