//! The trait implementations: each operation delegates to the file that bears its name.

use crate::{Buf, Cpu, ops};
use nibble_core::ops::*;
use nibble_core::{Kernels, Operand, PermuteMap, Result, Tensor};

impl Kernels for Cpu {
    fn quantize(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>> {
        self.timed("quantize", || ops::quantize::quantize(self, op))
    }
    fn dequantize(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("dequantize", || ops::quantize::dequantize(self, op))
    }
    fn transcode(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>> {
        self.timed("transcode", || ops::transcode::transcode(self, op))
    }
    fn cast(&self, op: Cast<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("cast", || ops::elementwise::cast(self, op))
    }
    fn transpose(&self, op: Transpose<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("transpose", || ops::transpose::transpose(self, op))
    }
    fn add(&self, op: Add<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("add", || ops::elementwise::add(self, op))
    }
    fn sum_shards(&self, op: SumShards<'_, Self>) -> Result<()> {
        self.timed("sum_shards", || ops::elementwise::sum_shards(self, op))
    }
    fn route(&self, op: Route<'_, Self>) -> Result<Routing<Self>> {
        self.timed("route", || ops::route::route(self, op))
    }
    fn route_backward(&self, op: RouteBackward<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("route_backward", || ops::route::route_backward(self, op))
    }
    fn plan_permute(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>> {
        self.timed("plan_permute", || ops::permute::plan_permute(self, op))
    }
    fn permute(&self, op: Permute<'_, Self>) -> Result<Operand<Self>> {
        self.timed("permute", || ops::permute::permute(self, op))
    }
    fn unpermute(&self, op: Unpermute<'_, Self>) -> Result<Operand<Self>> {
        self.timed("unpermute", || ops::permute::unpermute(self, op))
    }
    fn gather_scalars(&self, op: GatherScalars<'_, Self>) -> Result<Buf<f32>> {
        self.timed("gather_scalars", || ops::permute::gather_scalars(self, op))
    }
    fn combine_slots(&self, op: CombineSlots<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("combine_slots", || ops::permute::combine_slots(self, op))
    }
    fn pack_rows(&self, op: PackRows<'_, Self>) -> Result<Buf<u8>> {
        self.timed("pack_rows", || ops::wire::pack_rows(self, op))
    }
    fn unpack_rows(&self, op: UnpackRows<'_, Self>) -> Result<Operand<Self>> {
        self.timed("unpack_rows", || ops::wire::unpack_rows(self, op))
    }
    fn assign_ranks(&self, op: AssignRanks<'_, Self>) -> Result<SlotRanks<Self>> {
        self.timed("assign_ranks", || ops::slots::assign_ranks(self, op))
    }
    fn pack_slots(&self, op: PackSlots<'_, Self>) -> Result<Buf<i32>> {
        self.timed("pack_slots", || ops::slots::pack_slots(self, op))
    }
    fn unpack_slots(&self, op: UnpackSlots<'_, Self>) -> Result<ReceivedSlots<Self>> {
        self.timed("unpack_slots", || ops::slots::unpack_slots(self, op))
    }
    fn tile_scales(&self, op: TileScales<'_, Self>) -> Result<Buf<u8>> {
        self.timed("tile_scales", || ops::scale_tiles::tile_scales(self, op))
    }
    fn untile_scales(&self, op: UntileScales<'_, Self>) -> Result<Buf<u8>> {
        self.timed("untile_scales", || ops::scale_tiles::untile_scales(self, op))
    }
    fn swiglu(&self, op: Swiglu<'_, Self>) -> Result<SwigluOut<Self>> {
        self.timed("swiglu", || ops::swiglu::swiglu(self, op))
    }
    fn swiglu_backward(&self, op: SwigluBackward<'_, Self>) -> Result<SwigluGrads<Self>> {
        self.timed("swiglu_backward", || ops::swiglu::swiglu_backward(self, op))
    }
    fn init_normal(&self, op: InitNormal) -> Result<Tensor<Self>> {
        self.timed("init_normal", || ops::elementwise::init_normal(self, op))
    }
    fn gemm(&self, op: Gemm<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("gemm", || ops::gemm::gemm(self, op))
    }
    fn grouped_gemm(&self, op: GroupedGemm<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("grouped_gemm", || ops::gemm::grouped_gemm(self, op))
    }
    fn grouped_wgrad(&self, op: GroupedWgrad<'_, Self>) -> Result<()> {
        self.timed("grouped_wgrad", || ops::gemm::grouped_wgrad(self, op))
    }
    fn embed(&self, op: Embed<'_, Self>) -> Result<EmbedOut<Self>> {
        self.timed("embed", || ops::embed::embed(self, op))
    }
    fn embed_backward(&self, op: EmbedBackward<'_, Self>) -> Result<()> {
        self.timed("embed_backward", || ops::embed::embed_backward(self, op))
    }
    fn rms_norm(&self, op: RmsNorm<'_, Self>) -> Result<RmsNormOut<Self>> {
        self.timed("rms_norm", || ops::rms_norm::rms_norm(self, op))
    }
    fn rms_norm_backward(&self, op: RmsNormBackward<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("rms_norm_backward", || ops::rms_norm::rms_norm_backward(self, op))
    }
    fn norm_rope(&self, op: NormRope<'_, Self>) -> Result<RmsNormOut<Self>> {
        self.timed("norm_rope", || ops::norm_rope::norm_rope(self, op))
    }
    fn norm_rope_backward(&self, op: NormRopeBackward<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("norm_rope_backward", || ops::norm_rope::norm_rope_backward(self, op))
    }
    fn rope(&self, op: Rope<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("rope", || ops::rope::rope(self, op))
    }
    fn attention(&self, op: Attention<'_, Self>) -> Result<AttentionOut<Self>> {
        self.timed("attention", || ops::attention::attention(self, op))
    }
    fn attention_decode(&self, op: AttentionDecode<'_, Self>) -> Result<Tensor<Self>> {
        self.timed("attention_decode", || ops::attention::attention_decode(self, op))
    }
    fn attention_backward(&self, op: AttentionBackward<'_, Self>) -> Result<AttentionGrads<Self>> {
        self.timed("attention_backward", || ops::attention::attention_backward(self, op))
    }
    fn cross_entropy(&self, op: CrossEntropy<'_, Self>) -> Result<CrossEntropyOut<Self>> {
        self.timed("cross_entropy", || ops::cross_entropy::cross_entropy(self, op))
    }
    fn head_loss(&self, op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        self.timed("head_loss", || ops::head_loss::head_loss(self, op))
    }
    fn begin_step(&self, op: BeginStep<'_, Self>) -> Result<()> {
        self.timed("begin_step", || ops::step::begin_step(op))
    }
    fn begin_micro_batch(&self, op: BeginMicroBatch<'_, Self>) -> Result<()> {
        self.timed("begin_micro_batch", || ops::step::begin_micro_batch(op))
    }
    fn collect(&self, op: Collect<'_, Self>) -> Result<()> {
        self.timed("collect", || ops::step::collect(op))
    }
    fn sum_squares(&self, op: SumSquares<'_, Self>) -> Result<()> {
        self.timed("sum_squares", || ops::elementwise::sum_squares(self, op))
    }
    fn end_step(&self, op: EndStep<'_, Self>) -> Result<()> {
        self.timed("end_step", || ops::step::end_step(self, op))
    }
    fn push_amax(&self, op: PushAmax<'_, Self>) -> Result<()> {
        self.timed("push_amax", || ops::step::push_amax(op))
    }
    fn adamw(&self, op: AdamW<'_, Self>) -> Result<()> {
        self.timed("adamw", || ops::adamw::adamw(self, op))
    }
}
