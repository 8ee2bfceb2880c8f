//! What a host takes beside results.

use crate::Dry;
use nibble_choice::{Product, Temporary};
use nibble_core::formats::{Codec, Format};
use nibble_core::ops::*;
use nibble_core::{DType, Operand, Result, Tensor};

/// A transform is made apart.
pub(crate) fn quantize_temporaries(op: &Quantize<'_, Dry>) -> Vec<Temporary> {
    let (rows, cols) = op.x.shape();
    let transformed = |transform: Hadamard<'_, Dry>| {
        let rows = match op.planes {
            Planes::Cols => rows.next_multiple_of(transform.len.max(op.codec.format().column_step())),
            _ => rows,
        };
        Temporary::new("the transform in F32", rows * cols * size_of::<f32>())
    };
    op.hadamard.map(transformed).into_iter().collect()
}

impl Dry {
    /// A BF16 operand in F32, where the other one is.
    fn widened(&self, x: &Operand<Self>, other: &Operand<Self>) -> Result<Option<Tensor<Self>>> {
        match (x.format(), other.format()) {
            (Format::Bf16, Format::F32) => Tensor::unwritten(self, DType::F32, x.rows(), x.cols()).map(Some),
            _ => Ok(None),
        }
    }

    pub(crate) fn multiply_on_host(&self, product: &Product<'_, Self>) -> Result<()> {
        let (a, b) = product.operands;
        let _wide = (self.widened(a, b)?, self.widened(b, a)?);
        Ok(())
    }

    /// It has room for logits and their gradients from the first chunk to the last, and quantizes copies.
    pub(crate) fn head_loss_on_host(&self, op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        let (out, longest) = (op.result(self)?, op.longest_chunk());
        let ((tokens, d), vocab, dtype) = (op.x.shape(), op.w.rows(), op.x.dtype());
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = op.codecs;
        let mut chunks: Vec<usize> = op.chunks().iter().map(|chunk| chunk.tokens.len()).collect();
        let _loss = self.buf::<f32>(tokens)?;
        let _logits = Tensor::unwritten(self, DType::F32, longest, vocab)?;
        let mut beside = None;
        if let Some(grad) = op.grad {
            self.make_tensor_mut(grad.dw)?;
            let dlogits = Tensor::unwritten(self, dtype, longest, vocab)?;
            // A shard in several chunks has a sum of its own, unless that is the gradient itself.
            let is_cut = longest < tokens / op.shards.max(1);
            let apart = is_cut && (grad.accumulate || grad.dw.dtype() == DType::Bf16);
            let chain = apart.then(|| Tensor::unwritten(self, DType::F32, vocab, d)).transpose()?;
            beside = Some((dlogits, chain));
        }
        // What one chunk takes the next of the same length takes again.
        chunks.dedup();
        for rows in chunks {
            let _x = self.head_planes((rows, d, dtype), fprop_x, wgrad_x)?;
            let _dlogits =
                beside.as_ref().map(|_| self.head_planes((rows, vocab, dtype), dgrad_dy, wgrad_dy));
        }
        Ok(out)
    }

    /// Planes of a matrix by rows and by columns, as far as they are wanted.
    fn head_planes(
        &self,
        (rows, cols, dtype): (usize, usize, DType),
        of_rows: Option<Codec>,
        of_cols: Option<Codec>,
    ) -> Result<Vec<Emitted<Self>>> {
        let wanted = match (of_rows, of_cols) {
            (None, None) => return Ok(Vec::new()),
            (Some(rows), cols) if cols == Some(rows) => vec![(rows, Planes::Both)],
            (rows, cols) => {
                let rows = rows.map(|codec| (codec, Planes::Rows));
                rows.into_iter().chain(cols.map(|codec| (codec, Planes::Cols))).collect()
            }
        };
        let x = Tensor::unwritten(self, dtype, rows, cols)?;
        wanted.into_iter().map(|(codec, planes)| self.quantize(Quantize::new(&x, codec, planes))).collect()
    }
}
