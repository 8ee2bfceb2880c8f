//! The rest of a transformer and of a training step.

use crate::Dry;
use crate::memory::Buf;
use nibble_core::ops::*;
use nibble_core::{Backend, DType, Model, Result, Tensor};

impl Model for Dry {
    fn embed(&self, op: Embed<'_, Self>) -> Result<EmbedOut<Self>> {
        let x = self.plain(op.dtype, Self::len(op.ids), op.table.cols)?;
        Ok(EmbedOut { x, bad_ids: self.buf(1)? })
    }

    fn embed_backward(&self, op: EmbedBackward<'_, Self>) -> Result<()> {
        self.make_tensor_mut(op.grad)?;
        if self.is_gpu() {
            // Tokens sorted by id, and the sums of ids of several chunks.
            let (tokens, d) = op.dy.shape();
            let _sorted: Buf<i32> = self.buf(6 * tokens)?;
            let _sums: Buf<f32> = self.buf(tokens.div_ceil(EmbedBackward::<Self>::CHUNK) * d)?;
        }
        Ok(())
    }

    fn rms_norm(&self, op: RmsNorm<'_, Self>) -> Result<RmsNormOut<Self>> {
        let y = self.plain(op.x.dtype(), op.x.rows, op.x.cols)?;
        Ok(RmsNormOut { y, inv_rms: self.buf(op.x.rows)? })
    }

    fn rms_norm_backward(&self, op: RmsNormBackward<'_, Self>) -> Result<Tensor<Self>> {
        self.make_tensor_mut(op.dweight)?;
        let dx = self.plain(op.x.dtype(), op.x.rows, op.x.cols)?;
        if self.is_gpu() {
            let shards = op.dweight.rows.max(1);
            let chunks = shards * (op.x.rows / shards).div_ceil(RmsNormBackward::<Self>::CHUNK);
            let _sums: Buf<f32> = self.buf(chunks * op.x.cols)?;
        }
        Ok(dx)
    }

    fn rope(&self, op: Rope<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.x.dtype(), op.x.rows, op.x.cols)
    }

    fn attention(&self, op: Attention<'_, Self>) -> Result<AttentionOut<Self>> {
        let (tokens, cols) = op.q.shape();
        let out = self.plain(op.q.dtype(), tokens, cols)?;
        Ok(AttentionOut { out, lse: self.buf(tokens * (cols / op.head_dim.max(1)))? })
    }

    fn attention_backward(&self, op: AttentionBackward<'_, Self>) -> Result<AttentionGrads<Self>> {
        let like = |x: &Tensor<Self>| self.plain(x.dtype(), x.rows, x.cols);
        let grads = AttentionGrads { dq: like(op.q)?, dk: like(op.k)?, dv: like(op.v)? };
        if self.is_gpu() {
            let _row_sums: Buf<f32> = self.buf(Self::len(op.lse))?;
        }
        Ok(grads)
    }

    fn cross_entropy(&self, op: CrossEntropy<'_, Self>) -> Result<CrossEntropyOut<Self>> {
        let (tokens, vocab) = op.logits.shape();
        let loss = self.buf(tokens)?;
        let dlogits = op.grad.map(|dtype| self.plain(dtype, tokens, vocab)).transpose()?;
        Ok(CrossEntropyOut { loss, shard_nats: self.buf(op.shards)?, bad_ids: self.buf(1)?, dlogits })
    }

    fn head_loss(&self, op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        let ((tokens, d), vocab, dtype) = (op.x.shape(), op.w.rows, op.x.dtype());
        let longest = op.longest_chunk();
        let _loss: Buf<f32> = self.buf(tokens)?;
        let _logits = self.plain(DType::F32, longest, vocab)?;
        let (mut dx, mut beside) = (None, None);
        if let Some(grad) = op.grad {
            let dlogits = self.plain(dtype, longest, vocab)?;
            dx = Some(self.plain(dtype, tokens, d)?);
            // A shard in several chunks has a sum of its own, unless it is the gradient itself.
            let apart =
                longest < tokens / op.shards.max(1) && (grad.accumulate || grad.dw.dtype() == DType::Bf16);
            let chain = apart.then(|| self.plain(DType::F32, vocab, d)).transpose()?;
            beside = Some((dlogits, chain));
            self.make_tensor_mut(grad.dw)?;
        }
        let out = HeadLossOut { shard_nats: self.buf(op.shards)?, bad_ids: self.buf(1)?, dx };
        drop(beside);
        Ok(out)
    }

    fn begin_step(&self, op: BeginStep<'_, Self>) -> Result<()> {
        self.make_mut(op.clock)?;
        self.make_mut(op.control)?;
        self.make_mut(op.table)
    }

    fn begin_micro_batch(&self, op: BeginMicroBatch<'_, Self>) -> Result<()> {
        self.make_mut(op.clock)?;
        [op.ids, op.targets, op.row_id].into_iter().try_for_each(|words| self.make_mut(words))
    }

    fn collect(&self, op: Collect<'_, Self>) -> Result<()> {
        self.make_mut(op.table)
    }

    fn sum_squares(&self, op: SumSquares<'_, Self>) -> Result<()> {
        self.make_mut(op.into)?;
        if self.is_gpu() {
            let (rows, cols) = op.x.shape();
            let chunks = (rows / op.parts.max(1) * cols).div_ceil(SumSquares::<Self>::CHUNK);
            let _sums: Buf<f64> = self.buf(op.parts * chunks)?;
        }
        Ok(())
    }

    fn end_step(&self, op: EndStep<'_, Self>) -> Result<()> {
        self.make_mut(op.clock)?;
        self.make_mut(op.control)?;
        self.make_mut(op.reports)
    }

    fn adamw(&self, op: AdamW<'_, Self>) -> Result<()> {
        [op.param, op.exp_avg, op.exp_avg_sq].into_iter().try_for_each(|x| self.make_tensor_mut(x))
    }
}
