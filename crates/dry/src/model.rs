//! The rest of a transformer and of a training step.

use crate::Dry;
use crate::memory::Buf;
use crate::products::{Shape, is_lowered};
use nibble_core::formats::Codec;
use nibble_core::ops::*;
use nibble_core::{Backend, DType, Operand, Result, Tensor};

/// Queries of a tile of a GPU's attention.
const ATTENTION_TILE: usize = 128;
/// Columns of heads that a GPU norms and turns in one pass.
const FUSED_HEADS: [usize; 3] = [64, 128, 256];

/// By rows and by columns, what was made of a matrix.
fn planes(made: &[Emitted<Dry>]) -> (Option<&Operand<Dry>>, Option<&Operand<Dry>>) {
    (made.iter().find_map(|of| of.rows.as_ref()), made.iter().find_map(|of| of.cols.as_ref()))
}

impl Dry {
    /// The losses of each shard, and on a GPU the sums of its chunks meanwhile.
    fn shard_nats(&self, tokens: usize, shards: usize) -> Result<Buf<f64>> {
        let nats = self.buf(shards)?;
        if self.is_gpu() {
            let chunks = (tokens / shards.max(1)).div_ceil(CrossEntropy::<Self>::CHUNK);
            let _sums: Buf<f64> = self.buf(shards * chunks)?;
        }
        Ok(nats)
    }

    /// A GPU's sums over chunks of rows, of a norm's weight.
    fn beside_dweight(&self, (rows, cols): (usize, usize), shards: usize) -> Result<()> {
        let chunks = shards * (rows / shards.max(1)).div_ceil(RmsNormBackward::<Self>::CHUNK);
        let _sums: Buf<f32> = self.buf(chunks * cols)?;
        Ok(())
    }

    fn turns_as_it_norms(&self, head_dim: usize) -> bool {
        self.is_gpu() && FUSED_HEADS.contains(&head_dim)
    }
}

impl Dry {
    /// What a chunk of the head's rows takes while it lasts.
    fn head_chunk_of(
        &self,
        rows: usize,
        (d, vocab): (usize, usize),
        (dtype, gradients): (DType, bool),
        codecs: HeadCodecs,
        [w, wt]: [Option<&Operand<Self>>; 2],
    ) -> Result<()> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = codecs;
        // A CPU quantizes a copy; a GPU finds x where it is.
        let copied = if self.is_gpu() { 0 } else { rows };
        let x = || self.plain(dtype, copied, d).map(|x| Tensor { rows, ..x });
        let x = self.head_planes(x, fprop_x, wgrad_x)?;
        self.beside_head(planes(&x).0, w, ProductDims { m: rows, n: vocab, k: d }, DType::F32)?;
        let logits = self.is_gpu().then(|| self.plain(DType::F32, rows, vocab)).transpose()?;
        if !gradients {
            return Ok(());
        }
        // Those that a GPU has made for the chunk go when there are planes of them.
        let mut made = self.is_gpu().then(|| self.plain(dtype, rows, vocab)).transpose()?;
        drop(logits);
        let dlogits = || made.take().map_or_else(|| self.plain(dtype, rows, vocab), Ok);
        let dlogits = self.head_planes(dlogits, dgrad_dy, wgrad_dy)?;
        self.beside_head(planes(&dlogits).0, wt, ProductDims { m: rows, n: d, k: vocab }, dtype)?;
        let (of_x, of_dlogits) = (planes(&x).1, planes(&dlogits).1);
        let capacity = of_x.map_or(0, Operand::rows);
        self.beside_head(of_dlogits, of_x, ProductDims { m: vocab, n: d, k: capacity }, DType::F32)
    }

    /// What a GPU's product takes beside its operands, where those are quantized and decoded first.
    fn beside_head(
        &self,
        a: Option<&Operand<Self>>,
        b: Option<&Operand<Self>>,
        dims: ProductDims,
        out: DType,
    ) -> Result<()> {
        match (a, b) {
            (Some(a), Some(b)) if self.is_gpu() && is_lowered(a, b) => {
                self.beside_product((a, b), dims, out, Shape::Dense)
            }
            _ => Ok(()),
        }
    }

    /// Planes of a matrix by rows and by columns, as far as they are wanted.
    fn head_planes(
        &self,
        x: impl FnOnce() -> Result<Tensor<Self>>,
        rows: Option<Codec>,
        cols: Option<Codec>,
    ) -> Result<Vec<Emitted<Self>>> {
        if rows.is_none() && cols.is_none() {
            return Ok(Vec::new());
        }
        let x = x()?;
        let wanted = match (rows, cols) {
            (Some(rows), cols) if cols == Some(rows) => vec![(rows, Planes::Both)],
            (rows, cols) => {
                let rows = rows.map(|codec| (codec, Planes::Rows));
                rows.into_iter().chain(cols.map(|codec| (codec, Planes::Cols))).collect()
            }
        };
        wanted.into_iter().map(|(codec, planes)| self.quantize(Quantize::new(&x, codec, planes))).collect()
    }
}

impl Dry {
    pub(crate) fn embed(&self, op: Embed<'_, Self>) -> Result<EmbedOut<Self>> {
        let bad_ids = self.counters(1)?;
        Ok(EmbedOut { x: self.plain(op.dtype, Self::len(op.ids), op.table.cols)?, bad_ids })
    }

    pub(crate) fn embed_backward(&self, op: EmbedBackward<'_, Self>) -> Result<()> {
        self.make_tensor_mut(op.grad)?;
        if self.is_gpu() {
            // Tokens sorted by id; then their order, the tasks, and the sums of ids of several chunks.
            let (tokens, d) = op.dy.shape();
            drop::<Buf<i32>>(self.buf(6 * tokens)?);
            let _tasks: Buf<i32> = self.buf(5 * tokens)?;
            let _sums: Buf<f32> = self.buf((2 * tokens).div_ceil(EmbedBackward::<Self>::CHUNK) * d)?;
        }
        Ok(())
    }

    pub(crate) fn rms_norm(&self, op: RmsNorm<'_, Self>) -> Result<RmsNormOut<Self>> {
        let like = || self.plain(op.x.dtype(), op.x.rows, op.x.cols);
        let sum = || op.plus.map(|_| like()).transpose();
        if self.is_gpu() {
            let inv_rms = self.buf(op.x.rows)?;
            return Ok(RmsNormOut { inv_rms, y: like()?, sum: sum()? });
        }
        Ok(RmsNormOut { sum: sum()?, y: like()?, inv_rms: self.buf(op.x.rows)? })
    }

    pub(crate) fn rms_norm_backward(&self, op: RmsNormBackward<'_, Self>) -> Result<Tensor<Self>> {
        self.make_tensor_mut(op.dweight)?;
        let like = || self.plain(op.x.dtype(), op.x.rows, op.x.cols);
        let dx = like()?;
        if self.is_gpu() {
            self.beside_dweight(op.x.shape(), op.dweight.rows)?;
            return Ok(dx);
        }
        // What is to be added is added by itself.
        if op.plus.is_some() { like() } else { Ok(dx) }
    }

    pub(crate) fn norm_rope(&self, op: NormRope<'_, Self>) -> Result<RmsNormOut<Self>> {
        let (x, heads) = (op.x, op.x.rows * (op.x.cols / op.table.cols));
        if self.turns_as_it_norms(op.table.cols) {
            let inv_rms = self.buf(heads)?;
            return Ok(RmsNormOut { inv_rms, y: self.plain(x.dtype(), x.rows, x.cols)?, sum: None });
        }
        let rows = x.reshape(heads, op.table.cols)?;
        let normed = self.rms_norm(RmsNorm::new(&rows, op.weight, op.eps))?;
        Ok(RmsNormOut { y: self.plain(x.dtype(), x.rows, x.cols)?, ..normed })
    }

    pub(crate) fn norm_rope_backward(&self, op: NormRopeBackward<'_, Self>) -> Result<Tensor<Self>> {
        let (x, head) = (op.x, (op.heads(), op.table.cols));
        self.make_tensor_mut(op.dweight)?;
        let like = || self.plain(x.dtype(), x.rows, x.cols);
        let _turned = if self.turns_as_it_norms(head.1) { None } else { Some(like()?) };
        let dx = like()?;
        if self.is_gpu() {
            self.beside_dweight(head, op.dweight.rows)?;
        }
        Ok(dx)
    }

    pub(crate) fn rope(&self, op: Rope<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.x.dtype(), op.x.rows, op.x.cols)
    }

    pub(crate) fn attention(&self, op: Attention<'_, Self>) -> Result<AttentionOut<Self>> {
        if self.is_gpu() {
            check_gpu_heads("attention", op.head_dim, op.value_dim)?;
        }
        let (tokens, heads) = (op.q.rows, op.q.cols / op.head_dim.max(1));
        let out = self.plain(op.q.dtype(), tokens, heads * op.value_dim)?;
        Ok(AttentionOut { out, lse: self.buf(tokens * heads)? })
    }

    pub(crate) fn attention_decode(&self, op: AttentionDecode<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.q.dtype(), op.q.rows, op.q.cols / op.head_dim.max(1) * op.value_dim)
    }

    pub(crate) fn attention_backward(&self, op: AttentionBackward<'_, Self>) -> Result<AttentionGrads<Self>> {
        let like = |x: &Tensor<Self>| self.plain(x.dtype(), x.rows, x.cols);
        let grads = AttentionGrads { dq: like(op.q)?, dk: like(op.k)?, dv: like(op.v)? };
        if self.is_gpu() {
            // Log-sum-exp and out · dout of each query, by heads of whole tiles.
            let seq_len = op.seq_len.max(1);
            let rows = Self::len(op.lse) / seq_len * seq_len.next_multiple_of(ATTENTION_TILE);
            let _rows: [Buf<f32>; 2] = [self.buf(rows)?, self.buf(rows)?];
        }
        Ok(grads)
    }

    pub(crate) fn cross_entropy(&self, op: CrossEntropy<'_, Self>) -> Result<CrossEntropyOut<Self>> {
        let (tokens, vocab) = op.logits.shape();
        let (loss, bad_ids) = (self.buf(tokens)?, self.counters(1)?);
        let dlogits = op.grad.map(|dtype| self.plain(dtype, tokens, vocab)).transpose()?;
        Ok(CrossEntropyOut { loss, shard_nats: self.shard_nats(tokens, op.shards)?, bad_ids, dlogits })
    }

    pub(crate) fn head_loss(&self, op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        let ((tokens, d), vocab, dtype) = (op.x.shape(), op.w.rows(), op.x.dtype());
        let (chunks, longest) = (op.chunks(), op.longest_chunk());
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = op.codecs;
        let [x_counts, dlogits_counts] = [(fprop_x, wgrad_x), (dgrad_dy, wgrad_dy)].map(|(rows, cols)| {
            let any = rows.is_some() || cols.is_some();
            any.then(|| self.counters(3).map(Counts)).transpose()
        });
        let _loss: Buf<f32> = self.buf(tokens)?;
        let bad_ids = self.counters(1)?;
        // A CPU has room for the longest chunk from the first to the last, a GPU for each chunk as it comes.
        let room = |dtype| (!self.is_gpu()).then(|| self.plain(dtype, longest, vocab)).transpose();
        let _logits = room(DType::F32)?;
        let (mut dx, mut beside) = (None, None);
        let (gradients, wt) = (op.grad.is_some(), op.grad.as_ref().map(|grad| grad.wt));
        if let Some(grad) = op.grad {
            let dlogits = room(dtype)?;
            dx = Some(self.plain(dtype, tokens, d)?);
            // A shard in several chunks has a sum of its own, unless that is the gradient itself: a GPU adds to one in F32.
            let adds = grad.accumulate && !self.is_gpu();
            let is_cut = longest < tokens / op.shards.max(1);
            let apart = is_cut && (adds || grad.dw.dtype() == DType::Bf16);
            let chain = apart.then(|| self.plain(DType::F32, vocab, d)).transpose()?;
            beside = Some((dlogits, chain));
            self.make_tensor_mut(grad.dw)?;
        }
        let mut known = None;
        for rows in chunks.into_iter().map(|chunk| chunk.tokens.len()) {
            // What one chunk takes the next of the same length takes again.
            if known.replace(rows) != Some(rows) {
                self.head_chunk_of(rows, (d, vocab), (dtype, gradients), op.codecs, [Some(op.w), wt])?;
            }
        }
        let shard_nats = self.shard_nats(tokens, op.shards)?;
        drop(beside);
        Ok(HeadLossOut { shard_nats, bad_ids, dx, x_counts: x_counts?, dlogits_counts: dlogits_counts? })
    }

    pub(crate) fn begin_step(&self, op: BeginStep<'_, Self>) -> Result<()> {
        self.make_mut(op.clock)?;
        self.make_mut(op.control)?;
        self.make_mut(op.table)
    }

    pub(crate) fn begin_micro_batch(&self, op: BeginMicroBatch<'_, Self>) -> Result<()> {
        self.make_mut(op.clock)?;
        [op.ids, op.targets, op.row_id].into_iter().try_for_each(|words| self.make_mut(words))
    }

    pub(crate) fn collect(&self, op: Collect<'_, Self>) -> Result<()> {
        self.make_mut(op.table)
    }

    pub(crate) fn sum_squares(&self, op: SumSquares<'_, Self>) -> Result<()> {
        self.make_mut(op.into)?;
        if self.is_gpu() {
            let chunks = op.tensors.iter().map(|&Squared { x, parts, .. }| {
                parts * (x.rows / parts.max(1) * x.cols).div_ceil(SumSquares::<Self>::CHUNK)
            });
            let _sums: Buf<f64> = self.buf(chunks.sum())?;
        }
        Ok(())
    }

    pub(crate) fn end_step(&self, op: EndStep<'_, Self>) -> Result<()> {
        self.make_mut(op.clock)?;
        self.make_mut(op.control)?;
        self.make_mut(op.reports)
    }

    pub(crate) fn push_amax(&self, op: PushAmax<'_, Self>) -> Result<()> {
        self.make_mut(op.records)
    }

    pub(crate) fn adamw(&self, op: AdamW<'_, Self>) -> Result<()> {
        for AdamWTensor { param, exp_avg, exp_avg_sq, .. } in op.tensors {
            [param, exp_avg, exp_avg_sq].into_iter().try_for_each(|x| self.make_tensor_mut(x))?;
        }
        Ok(())
    }
}
