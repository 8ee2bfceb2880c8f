//! What operations make, and what they take beside it. The results are the operations' own ([`nibble_core::ops`]); the temporaries of a GPU are
//! those that `nibble-choice` names, those of a host are in `host.rs`.

use crate::host;
use crate::{Dry, Slow};
use nibble_choice::attention::{self, AttentionPath};
use nibble_choice::norm::{self, NormRopePath};
use nibble_choice::quantize::QuantizeDesc;
use nibble_choice::routing::{PlanChunks, RouteSums};
use nibble_choice::vocabulary::{EmbedTasks, losses_temporary, sorted_tokens};
use nibble_choice::{GpuKernels, head_loss, squares, swiglu, transcode};
use nibble_core::ops::*;
use nibble_core::{Backend, Groups, Operand, PermuteMap, Result, Tensor};

/// Operations that take nothing beside their results.
macro_rules! results {
    ($($name:ident($args:ty) -> $out:ty;)*) => {
        impl Dry {
            $(pub(crate) fn $name(&self, op: $args) -> Result<$out> {
                op.result(self)
            })*
        }
    };
}

results! {
    measure_amax(MeasureAmax<'_, Self>) -> <Self as Backend>::Buf<f32>;
    measure_quantization(MeasureQuantization<'_, Self>) -> <Self as Backend>::Buf<u64>;
    dequantize(Dequantize<'_, Self>) -> Tensor<Self>;
    cast(Cast<'_, Self>) -> Tensor<Self>;
    transpose(Transpose<'_, Self>) -> Tensor<Self>;
    add(Add<'_, Self>) -> Tensor<Self>;
    permute(Permute<'_, Self>) -> Operand<Self>;
    unpermute(Unpermute<'_, Self>) -> Operand<Self>;
    gather_scalars(GatherScalars<'_, Self>) -> <Self as Backend>::Buf<f32>;
    combine_slots(CombineSlots<'_, Self>) -> Tensor<Self>;
    combine_tree(CombineTree<'_, Self>) -> Tensor<Self>;
    find_slots(FindSlots<'_, Self>) -> <Self as Backend>::Buf<i32>;
    pack_rows(PackRows<'_, Self>) -> <Self as Backend>::Buf<u8>;
    unpack_rows(UnpackRows<'_, Self>) -> Operand<Self>;
    unpack_permute(UnpackPermute<'_, Self>) -> Operand<Self>;
    assign_parts(AssignParts<'_, Self>) -> <Self as Backend>::Buf<i32>;
    join_groups(JoinGroups<'_, Self>) -> Groups<Self>;
    assign_ranks(AssignRanks<'_, Self>) -> SlotRanks<Self>;
    pack_slots(PackSlots<'_, Self>) -> <Self as Backend>::Buf<i32>;
    unpack_slots(UnpackSlots<'_, Self>) -> ReceivedSlots<Self>;
    tile_scales(TileScales<'_, Self>) -> <Self as Backend>::Buf<u8>;
    untile_scales(UntileScales<'_, Self>) -> <Self as Backend>::Buf<u8>;
    init_normal(InitNormal) -> Tensor<Self>;
    embed(Embed<'_, Self>) -> EmbedOut<Self>;
    rms_norm(RmsNorm<'_, Self>) -> RmsNormOut<Self>;
    rope(Rope<'_, Self>) -> Tensor<Self>;
    assemble_kv(AssembleKv<'_, Self>) -> AssembledKv<Self>;
    assemble_kv_backward(AssembleKvBackward<'_, Self>) -> AssembledKvGrads<Self>;
    attention_decode(AttentionDecode<'_, Self>) -> Tensor<Self>;
    find_windows(FindWindows<'_, Self>) -> Windows<Self>;
}

/// Conversions, routing, and the expert layer's fused kernels.
impl Dry {
    pub(crate) fn quantize(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>> {
        let taken = if self.is_gpu() { QuantizeDesc::of(&op).taken() } else { Taken::AsIs };
        let out = op.result_as(self, taken)?;
        self.while_quantizing(&op)?;
        Ok(out)
    }

    pub(crate) fn quantize_pack(&self, op: QuantizePack<'_, Self>) -> Result<PackedRows<Self>> {
        if self.is_gpu() && QuantizeDesc::of(&op.quantize).packs() {
            return op.result(self);
        }
        let made = self.quantize(op.quantize)?;
        let bytes = self.pack_rows(PackRows { rows: &made.take_rows("quantize_pack")?, index: op.index })?;
        let counts = made.counts.map_or_else(|| Counts::zeros(self), Ok)?;
        Ok(PackedRows { bytes, counts, found: made.found })
    }

    /// What is taken on the way.
    pub(crate) fn while_quantizing(&self, op: &Quantize<'_, Self>) -> Result<()> {
        let temporaries = match self.is_gpu() {
            true => QuantizeDesc::of(op).temporaries(),
            false => host::quantize_temporaries(op),
        };
        self.hold(temporaries).map(drop)
    }

    pub(crate) fn transcode(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>> {
        if self.is_gpu() { transcode::transcode(self, op) } else { op.result(self) }
    }

    pub(crate) fn swiglu(&self, op: Swiglu<'_, Self>) -> Result<SwigluOut<Self>> {
        if self.is_gpu() { swiglu::swiglu(self, &op) } else { op.result(self) }
    }

    pub(crate) fn swiglu_backward(&self, op: SwigluBackward<'_, Self>) -> Result<SwigluGrads<Self>> {
        if self.is_gpu() { swiglu::swiglu_backward(self, &op) } else { op.result(self) }
    }

    pub(crate) fn sum_shards(&self, op: SumShards<'_, Self>) -> Result<()> {
        self.make_tensor_mut(op.into)
    }

    pub(crate) fn route(&self, op: Route<'_, Self>) -> Result<Routing<Self>> {
        let out = op.result(self)?;
        let (tokens, experts) = op.logits.shape();
        let sums = RouteSums::new::<Self>(tokens, op.shards, experts);
        let of_documents = sums.of_documents().into_iter().chain([sums.of_document_losses()]);
        let of_documents = of_documents.filter(|_| op.documents.is_some());
        self.while_on_gpu(sums.temporaries().into_iter().chain(of_documents))?;
        Ok(out)
    }

    pub(crate) fn route_backward(&self, op: RouteBackward<'_, Self>) -> Result<Tensor<Self>> {
        let out = op.result(self)?;
        let (tokens, experts) = op.routing.kept.shape();
        let sums = RouteSums::new::<Self>(tokens, op.shards, experts);
        self.while_on_gpu(sums.of_documents().into_iter().filter(|_| op.documents.is_some()))?;
        Ok(out)
    }

    pub(crate) fn plan_permute(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>> {
        let mut out = op.result(self)?;
        // As long as each other: their sum is what is known.
        let lengths = |g| op.num_slots / op.num_groups + usize::from(g < op.num_slots % op.num_groups);
        let lengths: Vec<i32> = (0..op.num_groups).map(|g| lengths(g) as i32).collect();
        out.groups.len.tell(&lengths);
        self.while_on_gpu([PlanChunks::new(Self::len(op.expert), op.num_groups).temporary()])?;
        Ok(out)
    }
}

/// Products.
impl Dry {
    pub(crate) fn gemm(&self, op: Gemm<'_, Self>) -> Result<Tensor<Self>> {
        let mut d = op.result(self)?;
        self.multiply(op.product()?, &mut d)?;
        Ok(d)
    }

    pub(crate) fn grouped_gemm(&self, op: GroupedGemm<'_, Self>) -> Result<Tensor<Self>> {
        let mut d = op.result(self)?;
        self.multiply(op.product()?, &mut d)?;
        Ok(d)
    }

    pub(crate) fn grouped_wgrad(&self, op: GroupedWgrad<'_, Self>) -> Result<()> {
        let (product, grad) = op.product()?;
        self.make_tensor_mut(grad)?;
        self.multiply(product, grad)
    }
}

/// The rest of a transformer.
impl Dry {
    pub(crate) fn embed_backward(&self, op: EmbedBackward<'_, Self>) -> Result<()> {
        self.make_tensor_mut(op.grad)?;
        let Some(tasks) = EmbedTasks::of(&op).filter(|_| self.is_gpu()) else { return Ok(()) };
        let (tokens, d) = op.dy.shape();
        let _order = sorted_tokens(self, tokens, op.grad.rows as u32, |_, _, _, _| Ok(()))?;
        let _counts = self.counters(2)?;
        self.while_on_gpu(tasks.temporaries(tokens, d))
    }

    pub(crate) fn rms_norm_backward(&self, op: RmsNormBackward<'_, Self>) -> Result<Tensor<Self>> {
        let dx = op.result(self)?;
        self.make_tensor_mut(op.dweight)?;
        self.while_on_gpu([norm::dweight_temporary::<Self>(op.x.shape(), op.dweight.rows)])?;
        Ok(dx)
    }

    pub(crate) fn add_bias(&self, op: AddBias<'_, Self>) -> Result<()> {
        self.make_tensor_mut(op.x)
    }

    pub(crate) fn add_bias_backward(&self, op: AddBiasBackward<'_, Self>) -> Result<()> {
        self.make_tensor_mut(op.dbias)?;
        self.while_on_gpu([norm::dweight_temporary::<Self>(op.dy.shape(), op.dbias.rows)])
    }

    /// A host has no pass for both.
    fn norm_rope_path(&self, head_dim: usize) -> NormRopePath {
        if self.is_gpu() { NormRopePath::of(head_dim) } else { NormRopePath::Apart }
    }

    pub(crate) fn norm_rope(&self, op: NormRope<'_, Self>) -> Result<RmsNormOut<Self>> {
        let out = op.result(self)?;
        self.hold(self.norm_rope_path(op.table.cols).between(op.x))?;
        Ok(out)
    }

    pub(crate) fn norm_rope_backward(&self, op: NormRopeBackward<'_, Self>) -> Result<Tensor<Self>> {
        let dx = op.result(self)?;
        let heads = (op.heads(), op.table.cols);
        let _turned = self.hold(self.norm_rope_path(heads.1).between(op.x))?;
        self.make_tensor_mut(op.dweight)?;
        self.while_on_gpu([norm::dweight_temporary::<Self>(heads, op.dweight.rows)])?;
        Ok(dx)
    }

    /// Notes attention that the tensor cores do not take, of so many products of each query with the keys before it.
    fn note_attention(
        &self,
        op: &'static str,
        q: &Tensor<Self>,
        heads: (usize, usize),
        (seq_len, products): (usize, f64),
    ) -> Result<()> {
        if !self.is_gpu() {
            return Ok(());
        }
        attention::check_heads(op, heads)?;
        if let AttentionPath::OrdinaryCores { why } = AttentionPath::of(q.dtype(), heads) {
            let flops = products * (q.rows * q.cols) as f64 * seq_len as f64;
            self.inner.slow.note(Slow { op, why, flops });
        }
        Ok(())
    }

    pub(crate) fn attention(&self, op: Attention<'_, Self>) -> Result<AttentionOut<Self>> {
        self.note_attention("attention", op.q, (op.head_dim, op.value_dim), (op.seq_len, 2.0))?;
        op.result(self)
    }

    pub(crate) fn attention_backward(&self, op: AttentionBackward<'_, Self>) -> Result<AttentionGrads<Self>> {
        self.note_attention("attention_backward", op.q, (op.head_dim, op.value_dim), (op.seq_len, 5.0))?;
        let grads = op.result(self)?;
        self.while_on_gpu(attention::backward_temporaries(&op))?;
        Ok(grads)
    }

    pub(crate) fn cross_entropy(&self, op: CrossEntropy<'_, Self>) -> Result<CrossEntropyOut<Self>> {
        let out = op.result(self)?;
        self.while_on_gpu([losses_temporary::<Self>(op.logits.rows, op.shards)])?;
        Ok(out)
    }

    pub(crate) fn head_loss(&self, op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        if self.is_gpu() { head_loss::head_loss(self, op) } else { self.head_loss_on_host(op) }
    }
}

/// A training step.
impl Dry {
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
        self.make_mut(op.into)
    }

    pub(crate) fn close_squares(&self, op: CloseSquares<'_, Self>) -> Result<()> {
        self.make_mut(op.into)?;
        let mut level = Vec::new();
        for next in squares::levels(&op.tensors).into_iter().filter(|_| self.is_gpu()) {
            level = self.hold([next])?;
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

    pub(crate) fn balance_bias(&self, op: BalanceBias<'_, Self>) -> Result<()> {
        self.make_mut(op.bias)
    }

    pub(crate) fn adamw(&self, op: AdamW<'_, Self>) -> Result<()> {
        for AdamWTensor { param, exp_avg, exp_avg_sq, .. } in op.tensors {
            [param, exp_avg, exp_avg_sq].into_iter().try_for_each(|x| self.make_tensor_mut(x))?;
        }
        Ok(())
    }
}
