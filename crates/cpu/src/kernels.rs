//! The trait implementations: each operation delegates to the file that bears its name.

use crate::{Buf, Cpu, ops};
use nibble_core::ops::*;
use nibble_core::{Convert, Model, Operand, PermuteMap, Products, Result, Tensor};

impl Convert for Cpu {
    fn quantize(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>> {
        ops::quantize::quantize(self, op)
    }
    fn dequantize(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>> {
        ops::quantize::dequantize(self, op)
    }
    fn transcode(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>> {
        ops::transcode::transcode(self, op)
    }
    fn cast(&self, op: Cast<'_, Self>) -> Result<Tensor<Self>> {
        ops::elementwise::cast(self, op)
    }
    fn transpose(&self, op: Transpose<'_, Self>) -> Result<Tensor<Self>> {
        ops::transpose::transpose(self, op)
    }
    fn route(&self, op: Route<'_, Self>) -> Result<Routing<Self>> {
        ops::route::route(self, op)
    }
    fn route_backward(&self, op: RouteBackward<'_, Self>) -> Result<Tensor<Self>> {
        ops::route::route_backward(self, op)
    }
    fn plan_permute(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>> {
        ops::permute::plan_permute(self, op)
    }
    fn permute(&self, op: Permute<'_, Self>) -> Result<Operand<Self>> {
        ops::permute::permute(self, op)
    }
    fn unpermute(&self, op: Unpermute<'_, Self>) -> Result<Tensor<Self>> {
        ops::permute::unpermute(self, op)
    }
    fn gather_scalars(&self, op: GatherScalars<'_, Self>) -> Result<Buf<f32>> {
        ops::permute::gather_scalars(self, op)
    }
    fn combine_slots(&self, op: CombineSlots<'_, Self>) -> Result<Tensor<Self>> {
        ops::permute::combine_slots(self, op)
    }
    fn pack_rows(&self, op: PackRows<'_, Self>) -> Result<Buf<u8>> {
        ops::wire::pack_rows(self, op)
    }
    fn unpack_rows(&self, op: UnpackRows<'_, Self>) -> Result<Operand<Self>> {
        ops::wire::unpack_rows(self, op)
    }
    fn swiglu(&self, op: Swiglu<'_, Self>) -> Result<SwigluOut<Self>> {
        ops::swiglu::swiglu(self, op)
    }
    fn swiglu_backward(&self, op: SwigluBackward<'_, Self>) -> Result<SwigluGrads<Self>> {
        ops::swiglu::swiglu_backward(self, op)
    }
    fn init_normal(&self, op: InitNormal) -> Result<Tensor<Self>> {
        ops::elementwise::init_normal(self, op)
    }
}

impl Products for Cpu {
    fn gemm(&self, op: Gemm<'_, Self>) -> Result<Tensor<Self>> {
        ops::gemm::gemm(self, op)
    }
    fn grouped_gemm(&self, op: GroupedGemm<'_, Self>) -> Result<Tensor<Self>> {
        ops::gemm::grouped_gemm(self, op)
    }
    fn grouped_wgrad(&self, op: GroupedWgrad<'_, Self>) -> Result<()> {
        ops::gemm::grouped_wgrad(self, op)
    }
}

impl Model for Cpu {
    fn embed(&self, op: Embed<'_, Self>) -> Result<Tensor<Self>> {
        ops::embed::embed(self, op)
    }
    fn embed_backward(&self, op: EmbedBackward<'_, Self>) -> Result<()> {
        ops::embed::embed_backward(self, op)
    }
    fn rms_norm(&self, op: RmsNorm<'_, Self>) -> Result<RmsNormOut<Self>> {
        ops::rms_norm::rms_norm(self, op)
    }
    fn rms_norm_backward(&self, op: RmsNormBackward<'_, Self>) -> Result<Tensor<Self>> {
        ops::rms_norm::rms_norm_backward(self, op)
    }
    fn rope(&self, op: Rope<'_, Self>) -> Result<Tensor<Self>> {
        ops::rope::rope(self, op)
    }
    fn attention(&self, op: Attention<'_, Self>) -> Result<AttentionOut<Self>> {
        ops::attention::attention(self, op)
    }
    fn attention_backward(&self, op: AttentionBackward<'_, Self>) -> Result<AttentionGrads<Self>> {
        ops::attention::attention_backward(self, op)
    }
    fn cross_entropy(&self, op: CrossEntropy<'_, Self>) -> Result<CrossEntropyOut<Self>> {
        ops::cross_entropy::cross_entropy(self, op)
    }
    fn add(&self, op: Add<'_, Self>) -> Result<Tensor<Self>> {
        ops::elementwise::add(self, op)
    }
    fn sum_shards(&self, op: SumShards<'_, Self>) -> Result<Tensor<Self>> {
        ops::elementwise::sum_shards(self, op)
    }
    fn sum_squares(&self, op: SumSquares<'_, Self>) -> Result<Vec<f64>> {
        ops::elementwise::sum_squares(self, op)
    }
    fn adamw(&self, op: AdamW<'_, Self>) -> Result<()> {
        ops::adamw::adamw(self, op)
    }
}
