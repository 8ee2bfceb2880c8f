//! The rest of a transformer and of a training step.

use crate::Dry;
use crate::memory::Buf;
use nibble_choice::vocabulary::{EmbedTasks, digits, losses_temporary};
use nibble_choice::{attention, norm, squares};
use nibble_core::ops::*;
use nibble_core::{Backend, Result, Tensor};

impl Dry {
    /// The losses of each shard, and on a GPU the sums of its chunks meanwhile.
    pub(crate) fn shard_nats(&self, tokens: usize, shards: usize) -> Result<Buf<f64>> {
        let nats = self.buf(shards)?;
        self.while_on_gpu([losses_temporary::<Self>(tokens, shards)])?;
        Ok(nats)
    }

    /// Notes attention that the tensor cores do not take, of so many products of each query with the keys before it.
    fn note_slow_attention(
        &self,
        op: &'static str,
        q: &Tensor<Self>,
        heads: (usize, usize),
        (seq_len, products): (usize, f64),
    ) {
        if let Some(why) = attention::obstacle(q.dtype(), heads) {
            let flops = products * (q.rows * q.cols) as f64 * seq_len as f64;
            self.note_slow(op, why, flops);
        }
    }

    fn turns_as_it_norms(&self, head_dim: usize) -> bool {
        self.is_gpu() && norm::turns_as_it_norms(head_dim)
    }
}

impl Dry {
    pub(crate) fn embed(&self, op: Embed<'_, Self>) -> Result<EmbedOut<Self>> {
        let bad_ids = self.counters(1)?;
        Ok(EmbedOut { x: self.plain(op.dtype, Self::len(op.ids), op.table.cols)?, bad_ids })
    }

    pub(crate) fn embed_backward(&self, op: EmbedBackward<'_, Self>) -> Result<()> {
        self.make_tensor_mut(op.grad)?;
        let (tokens, d) = op.dy.shape();
        let vocab = op.grad.rows / op.shards.max(1);
        if !self.is_gpu() || tokens * d * vocab == 0 {
            return Ok(());
        }
        let _order = self.sorted_tokens(tokens, (op.shards * vocab) as u32)?;
        let [chunks, runs, sums] = EmbedTasks::new::<Self>(tokens).temporaries(tokens, d);
        let _tasks = (self.hold(vec![chunks, runs])?, self.counters(2)?);
        self.while_on_gpu([sums])
    }

    /// A GPU's list of tokens in the order of so many keys: a plan for each digit.
    fn sorted_tokens(&self, tokens: usize, keys: u32) -> Result<Option<Buf<i32>>> {
        let mut order = None;
        for digit in digits(keys) {
            let (expert, as_they_are) = (self.buf(tokens)?, self.buf(tokens)?);
            let plan = PlanPermute {
                expert: &expert,
                token_id: &order.unwrap_or(as_they_are),
                top_k: 1,
                num_slots: tokens,
                num_groups: digit.values,
                align: 1,
                capacity: tokens,
            };
            order = Some(self.plan_permute(plan)?.groups.row_id);
        }
        Ok(order)
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
            self.while_on_gpu([norm::dweight_temporary::<Self>(op.x.shape(), op.dweight.rows)])?;
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
        self.while_on_gpu([norm::dweight_temporary::<Self>(head, op.dweight.rows)])?;
        Ok(dx)
    }

    pub(crate) fn rope(&self, op: Rope<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.x.dtype(), op.x.rows, op.x.cols)
    }

    pub(crate) fn attention(&self, op: Attention<'_, Self>) -> Result<AttentionOut<Self>> {
        if self.is_gpu() {
            check_gpu_heads("attention", op.head_dim, op.value_dim)?;
            self.note_slow_attention("attention", op.q, (op.head_dim, op.value_dim), (op.seq_len, 2.0));
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
            let heads = (op.head_dim, op.value_dim);
            self.note_slow_attention("attention_backward", op.q, heads, (op.seq_len, 5.0));
            let (seq_len, heads) = (op.seq_len.max(1), op.q.cols / op.head_dim.max(1));
            self.while_on_gpu(attention::backward_temporaries(op.q.rows / seq_len, heads, seq_len))?;
        }
        Ok(grads)
    }

    pub(crate) fn cross_entropy(&self, op: CrossEntropy<'_, Self>) -> Result<CrossEntropyOut<Self>> {
        let (tokens, vocab) = op.logits.shape();
        let (loss, bad_ids) = (self.buf(tokens)?, self.counters(1)?);
        let dlogits = op.grad.map(|dtype| self.plain(dtype, tokens, vocab)).transpose()?;
        Ok(CrossEntropyOut { loss, shard_nats: self.shard_nats(tokens, op.shards)?, bad_ids, dlogits })
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
        let of_part = |&Squared { x, parts, .. }: &Squared<'_, Self>| {
            (parts, squares::chunks::<Self>(x.rows * x.cols / parts.max(1)))
        };
        let mut open: Vec<_> = op.tensors.iter().map(of_part).collect();
        let mut level = self.hold_on_gpu([squares::level_temporary(open.iter().copied())])?;
        while !open.is_empty() {
            let later = open.iter().map(|&(parts, sums)| (parts, squares::next_level(sums)));
            open = later.filter(|&(_, sums)| sums > 1).collect();
            level = self.hold_on_gpu([squares::level_temporary(open.iter().copied())])?;
        }
        drop(level);
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
