use crate::ops::*;
use crate::{Backend, Result};

/// Every operation of a backend. None has a default: a backend that lacks one does not compile.
pub trait Kernels: Backend {
    /// See [`Quantize`].
    fn quantize(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>>;
    /// See [`Dequantize`].
    fn dequantize(&self, op: Dequantize<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`Transcode`].
    fn transcode(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>>;
    /// See [`Cast`].
    fn cast(&self, op: Cast<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`Transpose`].
    fn transpose(&self, op: Transpose<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`Add`].
    fn add(&self, op: Add<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`SumShards`].
    fn sum_shards(&self, op: SumShards<'_, Self>) -> Result<()>;
    /// See [`Route`].
    fn route(&self, op: Route<'_, Self>) -> Result<Routing<Self>>;
    /// See [`RouteBackward`].
    fn route_backward(&self, op: RouteBackward<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`PlanPermute`].
    fn plan_permute(&self, op: PlanPermute<'_, Self>) -> Result<crate::PermuteMap<Self>>;
    /// See [`Permute`].
    fn permute(&self, op: Permute<'_, Self>) -> Result<crate::Operand<Self>>;
    /// See [`Unpermute`].
    fn unpermute(&self, op: Unpermute<'_, Self>) -> Result<crate::Operand<Self>>;
    /// See [`GatherScalars`].
    fn gather_scalars(&self, op: GatherScalars<'_, Self>) -> Result<Self::Buf<f32>>;
    /// See [`CombineSlots`].
    fn combine_slots(&self, op: CombineSlots<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`PackRows`].
    fn pack_rows(&self, op: PackRows<'_, Self>) -> Result<Self::Buf<u8>>;
    /// See [`UnpackRows`].
    fn unpack_rows(&self, op: UnpackRows<'_, Self>) -> Result<crate::Operand<Self>>;
    /// See [`AssignRanks`].
    fn assign_ranks(&self, op: AssignRanks<'_, Self>) -> Result<SlotRanks<Self>>;
    /// See [`PackSlots`].
    fn pack_slots(&self, op: PackSlots<'_, Self>) -> Result<Self::Buf<i32>>;
    /// See [`UnpackSlots`].
    fn unpack_slots(&self, op: UnpackSlots<'_, Self>) -> Result<ReceivedSlots<Self>>;
    /// See [`TileScales`].
    fn tile_scales(&self, op: TileScales<'_, Self>) -> Result<Self::Buf<u8>>;
    /// See [`UntileScales`].
    fn untile_scales(&self, op: UntileScales<'_, Self>) -> Result<Self::Buf<u8>>;
    /// See [`Swiglu`].
    fn swiglu(&self, op: Swiglu<'_, Self>) -> Result<SwigluOut<Self>>;
    /// See [`SwigluBackward`].
    fn swiglu_backward(&self, op: SwigluBackward<'_, Self>) -> Result<SwigluGrads<Self>>;
    /// See [`InitNormal`].
    fn init_normal(&self, op: InitNormal) -> Result<crate::Tensor<Self>>;
    /// See [`Gemm`].
    fn gemm(&self, op: Gemm<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`GroupedGemm`].
    fn grouped_gemm(&self, op: GroupedGemm<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`GroupedWgrad`].
    fn grouped_wgrad(&self, op: GroupedWgrad<'_, Self>) -> Result<()>;
    /// See [`Embed`].
    fn embed(&self, op: Embed<'_, Self>) -> Result<EmbedOut<Self>>;
    /// See [`EmbedBackward`].
    fn embed_backward(&self, op: EmbedBackward<'_, Self>) -> Result<()>;
    /// See [`RmsNorm`].
    fn rms_norm(&self, op: RmsNorm<'_, Self>) -> Result<RmsNormOut<Self>>;
    /// See [`RmsNormBackward`].
    fn rms_norm_backward(&self, op: RmsNormBackward<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`NormRope`].
    fn norm_rope(&self, op: NormRope<'_, Self>) -> Result<RmsNormOut<Self>>;
    /// See [`NormRopeBackward`].
    fn norm_rope_backward(&self, op: NormRopeBackward<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`Rope`].
    fn rope(&self, op: Rope<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`Attention`].
    fn attention(&self, op: Attention<'_, Self>) -> Result<AttentionOut<Self>>;
    /// See [`AttentionDecode`].
    fn attention_decode(&self, op: AttentionDecode<'_, Self>) -> Result<crate::Tensor<Self>>;
    /// See [`AttentionBackward`].
    fn attention_backward(&self, op: AttentionBackward<'_, Self>) -> Result<AttentionGrads<Self>>;
    /// See [`CrossEntropy`].
    fn cross_entropy(&self, op: CrossEntropy<'_, Self>) -> Result<CrossEntropyOut<Self>>;
    /// See [`HeadLoss`].
    fn head_loss(&self, op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>>;
    /// See [`BeginStep`].
    fn begin_step(&self, op: BeginStep<'_, Self>) -> Result<()>;
    /// See [`BeginMicroBatch`].
    fn begin_micro_batch(&self, op: BeginMicroBatch<'_, Self>) -> Result<()>;
    /// See [`Collect`].
    fn collect(&self, op: Collect<'_, Self>) -> Result<()>;
    /// See [`SumSquares`].
    fn sum_squares(&self, op: SumSquares<'_, Self>) -> Result<()>;
    /// See [`EndStep`].
    fn end_step(&self, op: EndStep<'_, Self>) -> Result<()>;
    /// See [`PushAmax`].
    fn push_amax(&self, op: PushAmax<'_, Self>) -> Result<()>;
    /// See [`AdamW`].
    fn adamw(&self, op: AdamW<'_, Self>) -> Result<()>;
}
