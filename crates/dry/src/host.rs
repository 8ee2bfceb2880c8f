//! Temporary memory of operations on a CPU.

use crate::memory::InPlace;
use crate::{Dry, ops};
use nibble_core::formats::{BlockAxis, Codec, Format};
use nibble_core::ops::*;
use nibble_core::{BlockScaled, DType, Operand, Result, Tensor};

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
        let mut chunks: Vec<usize> = op.chunks().iter().map(|chunk| chunk.tokens.len()).collect();
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
        let of_w = HeadProducts { w: op.w, wt: op.grad.as_ref().map(|grad| grad.wt), codecs: op.codecs };
        // A chunk reuses the memory of the previous chunk of the same length. The lifted weights of the first chunk stay in memory.
        chunks.dedup();
        let mut of_weights = Vec::new();
        for rows in chunks {
            self.head_chunk_on_host(&of_w, (rows, d, vocab, dtype), beside.is_some(), &mut of_weights)?;
        }
        Ok(out)
    }

    /// The quantized tensors of a chunk, and the lifted operands of its GEMMs.
    fn head_chunk_on_host(
        &self,
        of: &HeadProducts<'_>,
        (rows, d, vocab, dtype): (usize, usize, usize, DType),
        gradients: bool,
        of_weights: &mut Vec<BlockScaled<Self>>,
    ) -> Result<()> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = of.codecs;
        let is_block = |w: Option<&Operand<Self>>| matches!(w, Some(Operand::Block(_)));
        let x = [fprop_x, wgrad_x];
        let x = self.head_planes((rows, d, dtype), x, [is_block(Some(of.w)), wgrad_dy.is_some()])?;
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
        let dlogits = [dgrad_dy, wgrad_dy];
        let dlogits =
            self.head_planes((rows, vocab, dtype), dlogits, [is_block(Some(wt)), wgrad_x.is_some()])?;
        dense(&dlogits, wt)?;
        if let (Some(dy), Some(x)) = (&dlogits.cols, &x.cols) {
            let _both = (self.lifted_first(dy, x)?, self.lifted_second(x, dy, 1)?);
        }
        Ok(())
    }

    /// A matrix in row blocks and in column blocks, as far as GEMMs need them. A plain matrix next to a quantized operand is copied.
    fn head_planes(
        &self,
        (rows, cols, dtype): (usize, usize, DType),
        codecs: [Option<Codec>; 2],
        beside: [bool; 2],
    ) -> Result<HeadPlanes> {
        let mut made = HeadPlanes { rows: None, cols: None };
        if codecs == [None, None] && beside == [false, false] {
            return Ok(made);
        }
        let x = Tensor::unwritten(self, dtype, rows, cols)?;
        let quantize = |codec, planes| ops::quantize(self, Quantize::new(&x, codec, planes));
        if let [Some(rows), Some(cols)] = codecs
            && rows == cols
        {
            let both = quantize(rows, Planes::Both)?;
            return Ok(HeadPlanes { rows: both.rows, cols: both.cols });
        }
        let plain = |side: usize| beside[side].then(|| Operand::Plain(x.clone()));
        made.rows = match codecs[0] {
            Some(codec) => quantize(codec, Planes::Rows)?.rows,
            None => plain(0),
        };
        made.cols = match codecs[1] {
            Some(codec) => quantize(codec, Planes::Cols)?.cols,
            None => plain(1),
        };
        Ok(made)
    }
}

/// Operands of the head's GEMMs besides x and the gradients of the logits.
struct HeadProducts<'a> {
    w: &'a Operand<Dry>,
    wt: Option<&'a Operand<Dry>>,
    codecs: HeadCodecs,
}

/// A matrix of a chunk in the layouts that GEMMs read.
struct HeadPlanes {
    rows: Option<Operand<Dry>>,
    cols: Option<Operand<Dry>>,
}
