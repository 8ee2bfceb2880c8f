//! The CPU code of [`nibble_core::ops::HeadLoss`].
//!
//! The operation shares its code with the separate operations: the engine of [`crate::gemm`], whose sums continue from chunk to chunk; the
//! row code of [`mod@crate::ops::vocabulary::cross_entropy`]; and [`mod@crate::ops::convert::quantize`].

use crate::gemm::{self, Engine, GemmError, Group, OperandView, Output};
use crate::ops::convert::quantize::quantize;
use crate::ops::products::gemm::{engine, refused};
use crate::ops::products::lowered::{Side, Way, sides};
use crate::ops::products::operands::view;
use crate::ops::vocabulary::cross_entropy::{TargetRows, sum_losses};
use crate::simd::{Real, per_isa};
use crate::{Buf, Cpu};
use half::bf16;
use nibble_core::ops::{
    Control, Counts, HeadCodecs, HeadLoss, HeadLossChunk, HeadLossOut, HeadOperand, ProductDims,
};
use nibble_core::{self as core, DType, Data, Groups, Result, Tensor};

const OP: &str = "head_loss";

/// Computes the losses of the shards, dx and dw.
pub(crate) fn head_loss(cpu: &Cpu, op: HeadLoss<'_, Cpu>) -> Result<HeadLossOut<Cpu>> {
    match op.x.dtype() {
        DType::F32 => run::<f32>(cpu, op),
        DType::Bf16 => run::<bf16>(cpu, op),
    }
}

/// An element type that the GEMM engine reads and writes.
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

/// The sizes of a head-loss call.
#[derive(Clone, Copy)]
struct Sizes {
    vocab: usize,
    d: usize,
}

fn run<T: Factor>(cpu: &Cpu, op: HeadLoss<'_, Cpu>) -> Result<HeadLossOut<Cpu>> {
    let (tokens, d) = op.x.shape();
    let sizes = Sizes { vocab: op.w.rows(), d };
    let vocab = sizes.vocab;
    let (x, mut w) = (T::slice(OP, "x", op.x)?, Weight::new(op.w));
    let targets = op.targets.as_slice();
    let chunks = op.chunks();
    let longest = chunks.iter().map(|chunk| chunk.tokens.len()).max().unwrap_or(0);
    let mut out = op.result(cpu)?;
    let mut loss = cpu.scratch::<f32>(tokens);
    let mut logits = cpu.scratch::<f32>(longest * vocab);
    let HeadCodecs { wgrad_dy, wgrad_x, .. } = op.codecs;
    let of_wt = op.grad.as_ref().is_some_and(|grad| is_block(grad.wt));
    let ([x_operand, dlogits_operand], random, align) = (op.operands(), op.random, op.column_block());
    let mut of_x = Quantizer::new(cpu, x_operand, [is_block(op.w), wgrad_dy.is_some()]);
    let mut of_dlogits = Quantizer::new(cpu, dlogits_operand, [of_wt, wgrad_x.is_some()]);
    let (scale, mut gradients) = match op.grad {
        Some(grad) => {
            let wt = Weight::new(grad.wt);
            let dlogits = cpu.scratch::<T>(longest * vocab);
            let dw = WeightGradient::new(cpu, grad.dw, grad.accumulate, &chunks, sizes);
            (grad.control.as_slice()[Control::LOSS_SCALE], Some(Gradients { wt, dlogits, dw }))
        }
        None => (0.0, None),
    };
    for chunk in &chunks {
        let rows = chunk.tokens.clone();
        let groups = random.groups_of(cpu, chunk, align)?;
        let x = of_x.factor(&x[rows.start * d..rows.end * d], d, (chunk, groups.as_ref()))?;
        let logits = &mut logits.as_mut_slice()[..rows.len() * vocab];
        product(cpu, (rows.len(), vocab, d), (&x, &mut w), &mut *logits)?;
        let losses = &mut loss.as_mut_slice()[rows.clone()];
        let entropy = TargetRows::new(cpu, &targets[rows.clone()], vocab, scale);
        match (&mut gradients, &mut out.dx) {
            (Some(Gradients { wt, dlogits, dw }), Some(dx)) => {
                let dlogits = &mut dlogits.as_mut_slice()[..rows.len() * vocab];
                entropy.run(logits, losses, dlogits);
                let dlogits = of_dlogits.factor(dlogits, vocab, (chunk, groups.as_ref()))?;
                let dx = &mut T::slice_mut(OP, dx)?[rows.start * d..rows.end * d];
                product(cpu, (rows.len(), d, vocab), (&dlogits, wt), dx)?;
                dw.add_chunk(cpu, chunk, &dlogits, &x)?;
            }
            _ => entropy.run::<T>(logits, losses, &mut []),
        }
    }
    sum_losses(cpu, loss.as_slice(), out.shard_nats.as_mut_slice());
    out.bad_ids.as_mut_slice()[0] = TargetRows::new(cpu, targets, vocab, scale).bad_ids();
    for (counts, made) in [(&mut out.x_counts, of_x), (&mut out.dlogits_counts, of_dlogits)] {
        if let Some(Counts(counts)) = counts {
            counts.as_mut_slice().copy_from_slice(&made.counts);
        }
    }
    Ok(out)
}

/// Buffers and operands for gradients; absent if only the loss is computed.
struct Gradients<'a, T: Factor> {
    wt: Weight<'a>,
    /// Gradients of the logits of one chunk.
    dlogits: Buf<T>,
    dw: WeightGradient<'a>,
}

fn is_block(x: &core::Operand<Cpu>) -> bool {
    matches!(x, core::Operand::Block(_))
}

/// Prepares a tensor's operands for the GEMMs, chunk by chunk, and sums the block counts.
struct Quantizer<'a> {
    cpu: &'a Cpu,
    operand: HeadOperand<'a, Cpu>,
    /// For each GEMM, whether the other operand is quantized.
    beside: [bool; 2],
    counts: [u64; 3],
}

impl<'a> Quantizer<'a> {
    fn new(cpu: &'a Cpu, operand: HeadOperand<'a, Cpu>, beside: [bool; 2]) -> Self {
        Self { cpu, operand, beside, counts: [0; 3] }
    }

    /// The operands of one chunk, whose rows have `cols` values.
    fn factor<'x, T: Factor>(
        &mut self,
        values: &'x [T],
        cols: usize,
        (chunk, groups): (&HeadLossChunk, Option<&Groups<Cpu>>),
    ) -> Result<Chunk<'x>> {
        let mut made = Chunk { values: T::factor(values), cols, by_rows: None, by_cols: None };
        let codecs = self.operand.codecs();
        if codecs == [None, None] && self.beside == [false, false] {
            return Ok(made);
        }
        let mut copy = self.cpu.scratch::<T>(values.len());
        copy.as_mut_slice().copy_from_slice(values);
        let x = Tensor::new(T::data(copy), values.len() / cols.max(1), cols)?;
        for op in self.operand.quantizations(&x, chunk, groups) {
            let quantized = quantize(self.cpu, op)?;
            if let Some(Counts(counts)) = &quantized.counts {
                self.counts.iter_mut().zip(counts.as_slice()).for_each(|(sum, count)| *sum += count);
            }
            made.by_rows = made.by_rows.or(quantized.rows);
            made.by_cols = made.by_cols.or(quantized.cols);
        }
        let plain = |side: usize| {
            (self.beside[side] && codecs[side].is_none()).then(|| core::Operand::Plain(x.clone()))
        };
        made.by_rows = made.by_rows.or_else(|| plain(0));
        made.by_cols = made.by_cols.or_else(|| plain(1));
        Ok(made)
    }
}

/// Some rows of a matrix as operands: the plain values, and the operands in row blocks and in column blocks if they or their counterparts
/// are quantized.
struct Chunk<'a> {
    values: gemm::Data<'a>,
    cols: usize,
    by_rows: Option<core::Operand<Cpu>>,
    by_cols: Option<core::Operand<Cpu>>,
}

/// A weight; its form for the GEMMs is computed once.
struct Weight<'a> {
    operand: &'a core::Operand<Cpu>,
    side: Option<Side<'a>>,
}

impl<'a> Weight<'a> {
    fn new(operand: &'a core::Operand<Cpu>) -> Self {
        Self { operand, side: None }
    }
}

/// Computes out `[m, n]` = a `[m, k]` · b `[n, k]`ᵀ.
fn product<T: Factor>(
    cpu: &Cpu,
    (m, n, k): (usize, usize, usize),
    (a, b): (&Chunk<'_>, &mut Weight<'_>),
    out: &mut [T],
) -> Result<()> {
    let (dims, out) = (ProductDims { m, n, k }, T::output(out, n));
    let Some(rows) = a.by_rows.as_ref().filter(|rows| is_block(rows) || is_block(b.operand)) else {
        let (a, b) = (OperandView::rows(a.values, a.cols), view(OP, b.operand, 0)?);
        return multiply(cpu, out, |engine, out| engine.gemm(dims, &a, &b, out));
    };
    let way = Way::of(rows, b.operand);
    let a = way.first(cpu, rows)?;
    let b = match &mut b.side {
        Some(side) => side,
        none => none.insert(way.second(cpu, b.operand, 1)?),
    };
    let (a, b) = (a.view(OP, 0)?, b.view(OP, 0)?);
    multiply(cpu, out, |engine, out| engine.gemm(dims, &a, &b, out))
}

/// Runs a GEMM in the thread pool of its backend.
fn multiply(
    cpu: &Cpu,
    out: Output<'_>,
    run: impl FnOnce(Engine, Output<'_>) -> Result<(), GemmError> + Send,
) -> Result<()> {
    let engine = engine(cpu, OP)?;
    cpu.pool().install(|| run(engine, out)).map_err(|e| refused(OP, e))
}

/// Accumulates the weight's gradient chunk by chunk.
struct WeightGradient<'a> {
    dw: &'a mut Data<Cpu>,
    accumulate: bool,
    sizes: Sizes,
    /// F32 partial sums `[vocab, d]` of a shard that spans several chunks. Partial sums need this separate buffer if dw cannot hold them,
    /// because dw is accumulated into or is BF16.
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

    /// Adds the contribution of one chunk to the gradient.
    fn add_chunk(
        &mut self,
        cpu: &Cpu,
        chunk: &HeadLossChunk,
        dlogits: &Chunk<'_>,
        x: &Chunk<'_>,
    ) -> Result<()> {
        match (&dlogits.by_cols, &x.by_cols) {
            (Some(dlogits), Some(x)) => {
                let (dlogits, x) = sides(cpu, dlogits, (x, 1))?;
                self.add(cpu, chunk, &dlogits.down_rows(OP)?, &x.down_rows(OP)?)
            }
            _ => {
                let dlogits = OperandView::transposed(dlogits.values, dlogits.cols);
                self.add(cpu, chunk, &dlogits, &OperandView::transposed(x.values, x.cols))
            }
        }
    }

    fn add(
        &mut self,
        cpu: &Cpu,
        chunk: &HeadLossChunk,
        dlogits: &OperandView<'_>,
        x: &OperandView<'_>,
    ) -> Result<()> {
        let (Sizes { vocab, d }, len) = (self.sizes, chunk.tokens_each());
        let groups: Vec<Group> = (0..chunk.shards.len()).map(|i| Group { start: i * len, len }).collect();
        let ragged = |engine: Engine, out: Output<'_>| engine.ragged(&groups, vocab, d, dlogits, x, out);
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
