//! See [`nibble_core::ops::HeadLoss`].
//!
//! Made of the very parts that the separate operations are made of: the engine of [`crate::gemm`], whose chains go on from
//! chunk to chunk, and the rows of [`super::cross_entropy`].

use super::cross_entropy::{Rows, shard_sums};
use super::gemm::{engine, refused};
use crate::gemm::{self, Engine, GemmError, Group, Operand, Output, Shape};
use crate::simd::{Real, per_isa};
use crate::{Buf, Cpu};
use half::bf16;
use nibble_core::ops::{HeadLoss, HeadLossChunk, HeadLossOut};
use nibble_core::{DType, Data, Result, Tensor};

const OP: &str = "head_loss";

/// Losses of the shards, dx and dw.
pub(crate) fn head_loss(cpu: &Cpu, op: HeadLoss<'_, Cpu>) -> Result<HeadLossOut<Cpu>> {
    match op.x.dtype() {
        DType::F32 => run::<f32>(cpu, op),
        DType::Bf16 => run::<bf16>(cpu, op),
    }
}

/// A type that the engine multiplies and writes.
trait Factor: Real {
    fn factor(x: &[Self]) -> gemm::Data<'_>;
    fn output(x: &mut [Self], stride: usize) -> Output<'_>;
}

impl Factor for f32 {
    fn factor(x: &[Self]) -> gemm::Data<'_> {
        gemm::Data::F32(x)
    }
    fn output(x: &mut [Self], stride: usize) -> Output<'_> {
        Output::f32(x, stride)
    }
}

impl Factor for bf16 {
    fn factor(x: &[Self]) -> gemm::Data<'_> {
        gemm::Data::Bf16(x)
    }
    fn output(x: &mut [Self], stride: usize) -> Output<'_> {
        Output::bf16(x, stride)
    }
}

/// The sizes of a call.
#[derive(Clone, Copy)]
struct Sizes {
    vocab: usize,
    d: usize,
}

fn run<T: Factor>(cpu: &Cpu, op: HeadLoss<'_, Cpu>) -> Result<HeadLossOut<Cpu>> {
    let (tokens, d) = op.x.shape();
    let sizes = Sizes { vocab: op.w.rows, d };
    let vocab = sizes.vocab;
    let (x, w) = (T::slice(OP, "x", op.x)?, T::slice(OP, "w", op.w)?);
    let targets = op.targets.as_slice();
    let chunks = op.chunks();
    let longest = chunks.iter().map(|chunk| chunk.tokens.len()).max().unwrap_or(0);
    let mut loss = cpu.scratch::<f32>(tokens);
    let mut logits = cpu.scratch::<f32>(longest * vocab);
    let (scale, mut gradients) = match op.grad {
        Some(grad) => {
            let wt = T::slice(OP, "wt", grad.wt)?;
            let dlogits = cpu.scratch::<T>(longest * vocab);
            let dx = cpu.scratch::<T>(tokens * d);
            let dw = WeightGradient::new(cpu, grad.dw, grad.accumulate, &chunks, sizes);
            (grad.scale, Some(Gradients { wt, dlogits, dx, dw }))
        }
        None => (0.0, None),
    };
    for chunk in &chunks {
        let rows = chunk.tokens.clone();
        let x = &x[rows.start * d..rows.end * d];
        let logits = &mut logits.as_mut_slice()[..rows.len() * vocab];
        product(cpu, (rows.len(), vocab, d), (x, w), &mut *logits)?;
        let losses = &mut loss.as_mut_slice()[rows.clone()];
        let entropy = Rows::new(cpu, &targets[rows.clone()], vocab, scale);
        match &mut gradients {
            None => entropy.run::<T>(logits, losses, &mut []),
            Some(Gradients { wt, dlogits, dx, dw }) => {
                let dlogits = &mut dlogits.as_mut_slice()[..rows.len() * vocab];
                entropy.run(logits, losses, dlogits);
                let dx = &mut dx.as_mut_slice()[rows.start * d..rows.end * d];
                product(cpu, (rows.len(), d, vocab), (dlogits, wt), dx)?;
                dw.add(cpu, chunk, dlogits, x)?;
            }
        }
    }
    Ok(HeadLossOut {
        shard_nats: shard_sums(cpu, loss.as_slice(), op.shards)?,
        bad_ids: cpu.computed(&[Rows::new(cpu, targets, vocab, scale).bad_ids()]),
        dx: gradients.map(|g| Tensor::new(T::data(g.dx), tokens, d)).transpose()?,
    })
}

/// What is there only for gradients.
struct Gradients<'a, T: Factor> {
    wt: &'a [T],
    /// Of one chunk.
    dlogits: Buf<T>,
    /// Of all tokens.
    dx: Buf<T>,
    dw: WeightGradient<'a>,
}

/// out `[m, n]` = a `[m, k]` · b `[n, k]`ᵀ.
fn product<T: Factor, U: Factor>(
    cpu: &Cpu,
    (m, n, k): (usize, usize, usize),
    (a, b): (&[T], &[T]),
    out: &mut [U],
) -> Result<()> {
    let (a, b) = (Operand::rows(T::factor(a), k), Operand::rows(T::factor(b), k));
    multiply(cpu, U::output(out, n), |engine, out| engine.gemm(Shape { m, n, k }, &a, &b, out))
}

/// Runs a product in the pool of its backend.
fn multiply(
    cpu: &Cpu,
    out: Output<'_>,
    run: impl FnOnce(Engine, Output<'_>) -> Result<(), GemmError> + Send,
) -> Result<()> {
    let engine = engine(cpu, OP)?;
    cpu.pool().install(|| run(engine, out)).map_err(|e| refused(OP, e))
}

/// Where the weight's gradient goes, chunk by chunk.
struct WeightGradient<'a> {
    dw: &'a mut Data<Cpu>,
    accumulate: bool,
    sizes: Sizes,
    /// The chain of a shard that is not done in one chunk, where dw itself cannot hold it: it has something to be added to,
    /// or is rounded. `[vocab, d]`.
    chain: Option<Buf<f32>>,
}

impl<'a> WeightGradient<'a> {
    fn new(
        cpu: &Cpu,
        dw: &'a mut Tensor<Cpu>,
        accumulate: bool,
        chunks: &[HeadLossChunk],
        sizes: Sizes,
    ) -> Self {
        let cut = chunks.iter().any(|chunk| !chunk.is_last);
        let apart = cut && (accumulate || dw.dtype() == DType::Bf16);
        let chain = apart.then(|| cpu.scratch(sizes.vocab * sizes.d));
        Self { dw: &mut dw.data, accumulate, sizes, chain }
    }

    fn add<T: Factor>(&mut self, cpu: &Cpu, chunk: &HeadLossChunk, dlogits: &[T], x: &[T]) -> Result<()> {
        let (Sizes { vocab, d }, len) = (self.sizes, chunk.tokens_each());
        let groups: Vec<Group> = (0..chunk.shards.len()).map(|i| Group { start: i * len, len }).collect();
        let (a, b) = (Operand::transposed(T::factor(dlogits), vocab), Operand::transposed(T::factor(x), d));
        let ragged = |engine: Engine, out: Output<'_>| engine.ragged(&groups, vocab, d, &a, &b, out);
        let matrix = vocab * d;
        let at = chunk.shards.start * matrix..chunk.shards.end * matrix;
        let Some(chain) = &mut self.chain else {
            let out = match &mut *self.dw {
                Data::F32(dw) => Output::f32(&mut dw.as_mut_slice()[at], d),
                Data::Bf16(dw) => Output::bf16(&mut dw.as_mut_slice()[at], d),
            };
            let out = if self.accumulate { out.accumulate() } else { out };
            return multiply(cpu, if chunk.is_first { out } else { out.resume() }, ragged);
        };
        let out = Output::f32(chain.as_mut_slice(), d);
        multiply(cpu, if chunk.is_first { out } else { out.resume() }, ragged)?;
        if chunk.is_last {
            let sums = chain.as_slice();
            match &mut *self.dw {
                Data::F32(dw) => finish(cpu.isa(), sums, self.accumulate, &mut dw.as_mut_slice()[at]),
                Data::Bf16(dw) => finish(cpu.isa(), sums, self.accumulate, &mut dw.as_mut_slice()[at]),
            }
        }
        Ok(())
    }
}

per_isa!(fn finish<T: Real> = finish_body; (sums: &[f32], accumulate: bool, dw: &mut [T]));

#[inline(always)]
fn finish_body<T: Real>(sums: &[f32], accumulate: bool, dw: &mut [T]) {
    for (dw, sum) in dw.iter_mut().zip(sums) {
        *dw = T::round(if accumulate { dw.widen() + sum } else { *sum });
    }
}

#[cfg(test)]
mod tests;
