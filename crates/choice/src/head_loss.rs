//! The head's products and loss on a GPU, chunk by chunk: the order of quantizations and products, and the lifetime of each buffer.

use crate::GpuKernels;
pub use crate::gpu_kernels::TargetRows;
use nibble_core::ops::{
    Counts, HeadLoss, HeadLossChunk, HeadLossGrad, HeadLossOut, HeadOperand, HeadRandom, ProductArgs,
    ProductDims, Ragged,
};
use nibble_core::{Backend, DType, DeviceKind, Error, Groups, Operand, Result, Tensor};

const OP: &str = "head_loss";

/// The number of tokens that [`HeadLoss`] should process together (a chunk), for this kind of device and a head of `vocab` rows. On a CPU,
/// a chunk is large enough to amortize packing the weight, and small enough that the logits stay in the cache until they are read again. On
/// a GPU, a chunk is large enough that its products fill the GPU, within a memory limit for logits and gradients.
pub fn chunk(kind: DeviceKind, vocab: usize) -> usize {
    /// Number of tokens of a chunk on a CPU.
    const OF_A_CPU: usize = 512;
    /// Number of tokens of a chunk on a GPU. With fewer tokens, the products of a chunk do not hide the time to read and write dW.
    const OF_A_GPU: usize = 8192;
    /// Limit on the bytes of the F32 logits and their BF16 gradients on a GPU. If the gradients are quantized, their row and column tensors
    /// reuse the memory of the logits.
    const GPU_BYTES: usize = 15 << 29;
    /// Number of rows of a product's tile.
    const TILE: usize = 128;
    match kind {
        DeviceKind::Host => OF_A_CPU,
        DeviceKind::Gpu => {
            let fits = GPU_BYTES / vocab.max(1).saturating_mul(size_of::<f32>() + 2);
            (fits / TILE * TILE).clamp(TILE, OF_A_GPU)
        }
    }
}

/// `head_loss` on a GPU.
pub fn head_loss<B: GpuKernels>(b: &B, op: HeadLoss<'_, B>) -> Result<HeadLossOut<B>> {
    let (out, chunks, vocab) = (op.result(b)?, op.chunks(), op.w.rows());
    let ([x_operand, dlogits_operand], block, random) = (op.operands(), op.column_block(), op.random);
    let HeadLoss { x, w, targets, grad, .. } = op;
    let (d, dtype, loss) = (x.cols, x.dtype(), b.alloc::<f32>(x.rows)?);
    let control = grad.as_ref().map(|grad| grad.control);
    let of_x = Quantizer { operand: x_operand, counts: out.x_counts.as_ref() };
    let of_dlogits = Quantizer { operand: dlogits_operand, counts: out.dlogits_counts.as_ref() };
    let mut gradients = match (grad, &out.dx) {
        (Some(grad), Some(dx)) => Some(Gradients::new(b, dx, grad, &chunks)?),
        _ => None,
    };
    let groups = match gradients.is_some() || random.row_id.is_some() {
        true => groups_of(b, &chunks, block)?,
        false => Vec::new(),
    };
    for chunk in &chunks {
        let tokens = chunk.tokens.clone();
        let rows = tokens.len();
        let rows_of_shards = with_ids(b, &random, chunk, (&groups, block))?;
        let at = (chunk, rows_of_shards.as_ref());
        let x = of_x.factors(b, b.rows_of(x, tokens.clone())?, at)?;
        let mut logits = Tensor::unwritten(b, DType::F32, rows, vocab)?;
        dense(b, ProductDims { m: rows, n: vocab, k: d }, (&x.rows, w), &mut logits)?;
        let targets = b.part_of(targets, tokens.clone())?;
        let rows_of = TargetRows { targets: &targets, control, bad_ids: &out.bad_ids, tokens: dtype };
        let loss = b.part_of(&loss, tokens)?;
        let Some(gradients) = &mut gradients else {
            b.target_rows(&rows_of, &logits, &loss, None)?;
            continue;
        };
        let dlogits = Tensor::unwritten(b, dtype, rows, vocab)?;
        b.target_rows(&rows_of, &logits, &loss, Some(&dlogits))?;
        // Frees the logits before the quantized gradients are allocated.
        drop(logits);
        let dlogits = of_dlogits.factors(b, dlogits, at)?;
        gradients.add(b, (chunk, &groups), &dlogits, &x)?;
    }
    b.sum_losses(&loss, &out.shard_nats)?;
    Ok(out)
}

/// Computes D `[m, n]` = a `[m, k]` · b `[n, k]`ᵀ.
fn dense<B: GpuKernels>(
    b: &B,
    dims: ProductDims,
    (x, w): (&Operand<B>, &Operand<B>),
    d: &mut Tensor<B>,
) -> Result<()> {
    let (op, ragged) = (OP, Ragged::Rows);
    let product = ProductArgs { op, ragged, groups: None, dims, a: x, b: w, accumulate: false };
    b.multiply(product, d)
}

/// Quantizes a tensor into the operands of the products, chunk by chunk, and adds up the counts.
struct Quantizer<'a, B: Backend> {
    operand: HeadOperand<'a, B>,
    counts: Option<&'a Counts<B>>,
}

/// A matrix as the operand of a product that contracts along rows, and of a product that contracts down columns.
struct Factors<B: Backend> {
    rows: Operand<B>,
    cols: Operand<B>,
}

impl<B: GpuKernels> Quantizer<'_, B> {
    /// The operands of a chunk. The chunk itself stays alive only if a product reads it unquantized.
    fn factors(
        &self,
        b: &B,
        x: Tensor<B>,
        (chunk, groups): (&HeadLossChunk, Option<&Groups<B>>),
    ) -> Result<Factors<B>> {
        let (mut rows, mut cols) = (None, None);
        for op in self.operand.quantizations(&x, chunk, groups) {
            let made = b.quantize_counting(op, self.counts)?;
            (rows, cols) = (rows.or(made.rows), cols.or(made.cols));
        }
        let rows = rows.unwrap_or_else(|| Operand::Plain(x.clone()));
        let cols = cols.unwrap_or(Operand::Plain(x));
        Ok(Factors { rows, cols })
    }
}

/// The state of the computation of gradients.
struct Gradients<'a, B: Backend> {
    wt: &'a Operand<B>,
    /// The gradient of all tokens.
    dx: &'a Tensor<B>,
    /// The gradient of the weight, one per shard.
    dw: &'a Tensor<B>,
    accumulate: bool,
    /// The F32 sum of a shard that takes several chunks, `[vocab, d]`: it is needed because a BF16 dw would be rounded after each chunk.
    sum: Option<Tensor<B>>,
}

/// The groups of each kind of chunk. The key is the chunk's number of shards and the number of tokens of each shard.
type Grouped<B> = Vec<((usize, usize), Groups<B>)>;

impl<'a, B: GpuKernels> Gradients<'a, B> {
    fn new(b: &B, dx: &'a Tensor<B>, grad: HeadLossGrad<'a, B>, chunks: &[HeadLossChunk]) -> Result<Self> {
        let HeadLossGrad { wt, dw, accumulate, .. } = grad;
        b.make_sole(dw)?;
        let apart = chunks.iter().any(|chunk| !chunk.is_last) && dw.dtype() == DType::Bf16;
        let sum = apart.then(|| Tensor::unwritten(b, DType::F32, wt.cols(), wt.rows())).transpose()?;
        Ok(Self { wt, dx, dw, accumulate, sum })
    }

    /// Computes a chunk's dx, and adds the chunk's share of dw.
    fn add(
        &mut self,
        b: &B,
        (chunk, groups): (&HeadLossChunk, &Grouped<B>),
        dlogits: &Factors<B>,
        x: &Factors<B>,
    ) -> Result<()> {
        let (vocab, d) = (self.wt.cols(), self.wt.rows());
        let mut dx = b.rows_of(self.dx, chunk.tokens.clone())?;
        let dims = ProductDims { m: chunk.tokens.len(), n: d, k: vocab };
        dense(b, dims, (&dlogits.rows, self.wt), &mut dx)?;

        let mut dw = b.rows_of(self.dw, chunk.shards.start * vocab..chunk.shards.end * vocab)?;
        let before = if self.sum.is_none() { self.accumulate } else { false };
        let product = ProductArgs {
            op: OP,
            ragged: Ragged::Contraction,
            groups: Some(listed(groups, chunk)?),
            // Column tensors end with a whole block.
            dims: ProductDims { m: vocab, n: d, k: dlogits.cols.rows() },
            a: &dlogits.cols,
            b: &x.cols,
            accumulate: before || !chunk.is_first,
        };
        let Some(sum) = &mut self.sum else { return b.multiply(product, &mut dw) };
        b.multiply(product, sum)?;
        if chunk.is_last { b.round_sum(sum, &dw, self.accumulate) } else { Ok(()) }
    }
}

/// The number of shards of a chunk, and the number of tokens of each shard.
fn key_of(chunk: &HeadLossChunk) -> (usize, usize) {
    (chunk.shards.len(), chunk.tokens_each())
}

/// The groups of a chunk.
fn listed<'g, B: Backend>(groups: &'g Grouped<B>, chunk: &HeadLossChunk) -> Result<&'g Groups<B>> {
    let key = key_of(chunk);
    let unknown = || Error::shape(OP, "chunk", format!("{chunk:?}"), "one of the operation's");
    groups.iter().find(|(known, _)| *known == key).map(|(_, groups)| groups).ok_or_else(unknown)
}

/// The groups of a chunk with the ids of its rows; `None` if rows have no ids. If rows have ids, each group has whole column blocks of
/// `block` rows.
fn with_ids<B: GpuKernels>(
    b: &B,
    random: &HeadRandom<'_, B>,
    chunk: &HeadLossChunk,
    (groups, block): (&Grouped<B>, usize),
) -> Result<Option<Groups<B>>> {
    let Some(ids) = random.row_id else { return Ok(None) };
    let row_id = b.part_of(ids, chunk.tokens.clone())?;
    Ok(Some(Groups { row_id, align: block, ..listed(groups, chunk)?.clone() }))
}

/// The groups of all chunks; their column tensors end with a whole block. The groups are computed on the device, because this function
/// uploads nothing. The groups exist before the first logits, so that the logits of each chunk reuse the memory of the previous chunk's
/// logits.
fn groups_of<B: GpuKernels>(b: &B, chunks: &[HeadLossChunk], block: usize) -> Result<Grouped<B>> {
    let mut all = Grouped::<B>::new();
    for (count, each) in chunks.iter().map(key_of) {
        if all.iter().any(|(known, _)| *known == (count, each)) {
            continue;
        }
        let apart = each.next_multiple_of(block);
        let groups = Groups {
            start: b.alloc(count + 1)?,
            len: b.alloc(count)?,
            // Products read no row ids.
            row_id: b.alloc(0)?,
            num_groups: count,
            align: 1,
            capacity: count * apart,
            // The number is set only if groups are contiguous, without padding.
            rows_each: (apart == each).then_some(each),
        };
        b.list_groups(&groups, each, apart)?;
        all.push(((count, each), groups));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_a_gpu_are_shorter_where_the_vocabulary_is_large() {
        for (vocab, tokens) in
            [(0, 8192), (257, 8192), (32_768, 8192), (151_936, 8192), (262_144, 5120), (usize::MAX / 16, 128)]
        {
            assert_eq!(chunk(DeviceKind::Gpu, vocab), tokens, "{vocab}");
            assert_eq!(chunk(DeviceKind::Host, vocab), 512, "{vocab}");
        }
    }
}
