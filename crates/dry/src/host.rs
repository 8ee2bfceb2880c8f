//! Temporary memory of operations on a CPU.

use crate::memory::InPlace;
use crate::{Dry, ops};
use nibble_core::formats::{BlockAxis, Format};
use nibble_core::ops::*;
use nibble_core::{BlockScaled, DType, Groups, Operand, Result, Tensor};

impl Dry {
    /// A BF16 operand widened to F32, if the other operand is F32.
    fn widened(&self, x: &Operand<Self>, other: &Operand<Self>) -> Result<Option<Tensor<Self>>> {
        match (x.format(), other.format()) {
            (Format::Bf16, Format::F32) => Tensor::unwritten(self, DType::F32, x.rows(), x.cols()).map(Some),
            _ => Ok(None),
        }
    }

    /// The quantized operand `x`, if a GEMM with the other operand lifts it.
    fn taken_lifted<'x>(x: &'x Operand<Self>, other: &Operand<Self>) -> Option<&'x BlockScaled<Self>> {
        let (Operand::Block(q), stored) = (x, Stored::of(x)) else { return None };
        let numbers = Numbers::of(stored, Stored::of(other));
        (numbers.takes(stored) == Taken::Lifted).then_some(q)
    }

    /// The first operand after a lift, if a GEMM with the second operand lifts it. The lift also has counters.
    fn lifted_first(&self, a: &Operand<Self>, b: &Operand<Self>) -> Result<Option<BlockScaled<Self>>> {
        let Some(q) = Self::taken_lifted(a, b) else { return Ok(None) };
        let out = BlockScaled::unwritten(self, Format::LIFTED, q.axis, (q.rows, q.cols, q.stack))?;
        Counts::zeros(self)?;
        Ok(Some(out))
    }

    /// The second operand after a lift, for `matrices` matrices: row blocks are lifted to 2-D blocks, without counters.
    fn lifted_second(
        &self,
        b: &Operand<Self>,
        a: &Operand<Self>,
        matrices: usize,
    ) -> Result<Option<BlockScaled<Self>>> {
        let Some(q) = Self::taken_lifted(b, a) else { return Ok(None) };
        match Stored::block(q).lifted_as(true).axis {
            BlockAxis::Tile => {
                let shape = (q.rows, q.cols, matrices);
                BlockScaled::unwritten(self, Format::LIFTED, BlockAxis::Tile, shape).map(Some)
            }
            _ => self.lifted_first(b, a),
        }
    }

    pub(crate) fn multiply_on_host(&self, product: &ProductArgs<'_, Self>) -> Result<()> {
        let (a, b) = (product.a, product.b);
        let _widened = (self.widened(a, b)?, self.widened(b, a)?);
        let matrices = product.groups.map_or(1, |groups| groups.num_groups);
        let _lifted = (self.lifted_first(a, b)?, self.lifted_second(b, a, matrices)?);
        Ok(())
    }

    /// Keeps logits and their gradients in memory from the first chunk to the last, and quantizes copies of them.
    pub(crate) fn head_loss_on_host(&self, mut op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        let (out, longest) = (op.result(self)?, op.longest_chunk());
        let ((tokens, d), vocab, dtype) = (op.x.shape(), op.w.rows(), op.x.dtype());
        let mut chunks = op.chunks();
        let _loss = self.buf::<f32>(tokens)?;
        let _logits = Tensor::unwritten(self, DType::F32, longest, vocab)?;
        let mut beside = None;
        if let Some(grad) = &mut op.grad {
            grad.dw.make_own(self)?;
            let dlogits = Tensor::unwritten(self, dtype, longest, vocab)?;
            // A shard that spans several chunks has a separate sum, unless the sum is the gradient itself.
            let is_cut = longest < tokens / op.shards.max(1);
            let apart = is_cut && (grad.accumulate || grad.dw.dtype() == DType::Bf16);
            let chain = apart.then(|| Tensor::unwritten(self, DType::F32, vocab, d)).transpose()?;
            beside = Some((dlogits, chain));
        }
        let wt = op.grad.as_ref().map(|grad| grad.wt);
        let (operands, random, block) = (op.operands(), op.random, op.column_block());
        let of_w = HeadProducts { w: op.w, wt, operands, random, block };
        // A chunk reuses the memory of the previous chunk of the same length. The lifted weights of the first chunk stay in memory.
        chunks.dedup_by_key(|chunk| chunk.tokens.len());
        let mut of_weights = Vec::new();
        for chunk in &chunks {
            self.head_chunk_on_host(&of_w, chunk, (d, vocab, dtype), beside.is_some(), &mut of_weights)?;
        }
        Ok(out)
    }

    /// The quantized tensors of a chunk, and the lifted operands of its GEMMs.
    fn head_chunk_on_host(
        &self,
        of: &HeadProducts<'_>,
        chunk: &HeadLossChunk,
        (d, vocab, dtype): (usize, usize, DType),
        gradients: bool,
        of_weights: &mut Vec<BlockScaled<Self>>,
    ) -> Result<()> {
        let is_block = |w: Option<&Operand<Self>>| matches!(w, Some(Operand::Block(_)));
        let groups = of.random.groups_of(self, chunk, of.block)?;
        let (at, [of_x, of_dlogits]) = ((chunk, groups.as_ref()), &of.operands);
        let [x_cols, dlogits_cols] = [of_x, of_dlogits].map(|operand| operand.codecs()[1].is_some());
        let x = self.head_planes((d, dtype), of_x, at, [is_block(Some(of.w)), dlogits_cols])?;
        let first = of_weights.is_empty();
        let mut dense = |planes: &HeadPlanes, w: &Operand<Self>| -> Result<()> {
            let Some(a) = &planes.rows else { return Ok(()) };
            let _a = self.lifted_first(a, w)?;
            // An earlier chunk has already lifted the weight.
            if first {
                of_weights.extend(self.lifted_second(w, a, 1)?);
            }
            Ok(())
        };
        dense(&x, of.w)?;
        let Some(wt) = of.wt.filter(|_| gradients) else { return Ok(()) };
        let dlogits = self.head_planes((vocab, dtype), of_dlogits, at, [is_block(Some(wt)), x_cols])?;
        dense(&dlogits, wt)?;
        if let (Some(dy), Some(x)) = (&dlogits.cols, &x.cols) {
            let _both = (self.lifted_first(dy, x)?, self.lifted_second(x, dy, 1)?);
        }
        Ok(())
    }

    /// A matrix in row blocks and in column blocks, as far as GEMMs need them. A plain matrix next to a quantized operand is copied.
    fn head_planes(
        &self,
        (cols, dtype): (usize, DType),
        operand: &HeadOperand<'_, Self>,
        (chunk, groups): (&HeadLossChunk, Option<&Groups<Self>>),
        beside: [bool; 2],
    ) -> Result<HeadPlanes> {
        let mut made = HeadPlanes { rows: None, cols: None };
        let codecs = operand.codecs();
        if codecs == [None, None] && beside == [false, false] {
            return Ok(made);
        }
        let x = Tensor::unwritten(self, dtype, chunk.tokens.len(), cols)?;
        for op in operand.quantizations(&x, chunk, groups) {
            let quantized = ops::quantize(self, op)?;
            made.rows = made.rows.or(quantized.rows);
            made.cols = made.cols.or(quantized.cols);
        }
        let plain = |side: usize| (beside[side] && codecs[side].is_none()).then(|| Operand::Plain(x.clone()));
        made.rows = made.rows.or_else(|| plain(0));
        made.cols = made.cols.or_else(|| plain(1));
        Ok(made)
    }
}

/// Operands of the head's GEMMs besides x and the gradients of the logits.
struct HeadProducts<'a> {
    w: &'a Operand<Dry>,
    wt: Option<&'a Operand<Dry>>,
    /// How x and the gradients of the logits are quantized.
    operands: [HeadOperand<'a, Dry>; 2],
    random: HeadRandom<'a, Dry>,
    /// Number of rows of the longest column block.
    block: usize,
}

/// A matrix of a chunk in the layouts that GEMMs read.
struct HeadPlanes {
    rows: Option<Operand<Dry>>,
    cols: Option<Operand<Dry>>,
}
