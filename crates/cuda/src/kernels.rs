//! The trait implementations: each operation delegates to the file that bears its name.

use crate::backend::Buf;
use crate::{Cuda, ops};
use nibble_core::ops::*;
use nibble_core::{Convert, Operand, PermuteMap, Products, Result, Tensor};

impl Convert for Cuda {
    fn quantize(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>> {
        ops::quantize::quantize(self, op)
    }
    fn dequantize(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>> {
        ops::dequantize::dequantize(self, op)
    }
    fn transcode(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>> {
        ops::transcode::transcode(self, op)
    }
    fn cast(&self, op: Cast<'_, Self>) -> Result<Tensor<Self>> {
        ops::elementwise::cast(self, op)
    }
    fn transpose(&self, op: Transpose<'_, Self>) -> Result<Tensor<Self>> {
        ops::elementwise::transpose(self, op)
    }
    fn route(&self, op: Route<'_, Self>) -> Result<Routing<Self>> {
        ops::route::route(self, op)
    }
    fn route_backward(&self, op: RouteBackward<'_, Self>) -> Result<Tensor<Self>> {
        ops::route::route_backward(self, op)
    }
    fn plan_permute(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>> {
        ops::plan_permute::plan_permute(self, op)
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
        ops::swiglu_backward::swiglu_backward(self, op)
    }
    fn init_normal(&self, op: InitNormal) -> Result<Tensor<Self>> {
        ops::init_normal::init_normal(self, op)
    }
}

impl Products for Cuda {
    fn gemm(&self, op: Gemm<'_, Self>) -> Result<Tensor<Self>> {
        ops::gemm::gemm(self, op)
    }
    fn grouped_gemm(&self, op: GroupedGemm<'_, Self>) -> Result<Tensor<Self>> {
        ops::grouped_gemm::grouped_gemm(self, op)
    }
    fn grouped_wgrad(&self, op: GroupedWgrad<'_, Self>) -> Result<()> {
        ops::grouped_wgrad::grouped_wgrad(self, op)
    }
}
