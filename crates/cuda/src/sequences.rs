//! The operations from which `nibble-choice` composes sequences; [`GpuKernels`] lists them.

use crate::Cuda;
use crate::backend::Buf;
use crate::ops::convert::{quantize, transcode};
use crate::ops::products::gemm;
use crate::ops::routing::plan_permute::plan_permute;
use crate::ops::swiglu::{launch_swiglu, swiglu_backward::launch_swiglu_backward};
use crate::ops::vocabulary::{cross_entropy, head_loss};
use nibble_choice::GpuKernels;
use nibble_choice::head_loss::TargetRows;
use nibble_choice::swiglu::{SwigluBackwardPath, SwigluPath};
use nibble_choice::transcode::Lines;
use nibble_core::ops::*;
use nibble_core::{Data, Groups, Operand, PermuteMap, Plain, Result, Tensor};
use std::ops::Range;

impl Cuda {
    /// Sets every value of a tensor to 0; the tensor must have no other handle.
    pub(crate) fn clear_tensor(&self, x: &mut Tensor<Self>) -> Result<()> {
        match &mut x.data {
            Data::F32(values) => values.in_place().fill(0),
            Data::Bf16(values) => values.in_place().fill(0),
        }
    }
}

impl GpuKernels for Cuda {
    fn quantize_counting(
        &self,
        op: Quantize<'_, Self>,
        counts: Option<&Counts<Self>>,
    ) -> Result<Emitted<Self>> {
        match counts {
            None => op.run(self),
            counts => quantize::quantize_counting(self, op, counts),
        }
    }

    fn decode(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>> {
        op.run(self)
    }

    fn transcode_whole_blocks(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>> {
        transcode::transcode_whole_blocks(self, op)
    }

    fn plan(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>> {
        plan_permute(self, op)
    }

    fn multiply(&self, product: ProductArgs<'_, Self>, d: &mut Tensor<Self>) -> Result<()> {
        gemm::multiply(self, &product, d)
    }

    fn sum_losses(&self, loss: &Buf<f32>, shard_nats: &Buf<f64>) -> Result<()> {
        cross_entropy::sum_losses(loss.get(), shard_nats.get())
    }

    fn make_sole(&self, x: &mut Tensor<Self>) -> Result<()> {
        match &mut x.data {
            Data::F32(values) => values.make_mut().map(drop),
            Data::Bf16(values) => values.make_mut().map(drop),
        }
    }

    fn rows_of(&self, x: &Tensor<Self>, rows: Range<usize>) -> Result<Tensor<Self>> {
        let range = rows.start * x.cols..rows.end * x.cols;
        let data = match &x.data {
            Data::F32(values) => Data::F32(self.part_of(values, range)?),
            Data::Bf16(values) => Data::Bf16(self.part_of(values, range)?),
        };
        Tensor::new(data, rows.len(), x.cols)
    }

    fn part_of<T: Plain>(&self, x: &Buf<T>, range: Range<usize>) -> Result<Buf<T>> {
        x.get().part(range).map(Buf::new)
    }

    fn recut(&self, lines: &Lines, from: &Buf<u8>, to: &Buf<u8>) -> Result<()> {
        transcode::short_blocks::recut(lines, from.get(), to.get())
    }

    fn swiglu_kernel(&self, op: &Swiglu<'_, Self>, path: &SwigluPath, out: &SwigluOut<Self>) -> Result<()> {
        launch_swiglu(self, op, path, out)
    }

    fn swiglu_backward_kernel(
        &self,
        op: &SwigluBackward<'_, Self>,
        path: &SwigluBackwardPath,
        h: &Operand<Self>,
        parts: Option<&Buf<f32>>,
        out: &SwigluGrads<Self>,
    ) -> Result<()> {
        launch_swiglu_backward(self, op, path, (h, parts.map(Buf::get)), out)
    }

    fn target_rows(
        &self,
        rows: &TargetRows<'_, Self>,
        logits: &Tensor<Self>,
        loss: &Buf<f32>,
        dlogits: Option<&Tensor<Self>>,
    ) -> Result<()> {
        head_loss::target_rows(rows, logits, loss, dlogits)
    }

    fn list_groups(&self, groups: &Groups<Self>, each: usize, apart: usize) -> Result<()> {
        head_loss::list_groups(self, groups, each, apart)
    }

    fn round_sum(&self, sum: &Tensor<Self>, grad: &Tensor<Self>, accumulate: bool) -> Result<()> {
        head_loss::round_sum(sum, grad, accumulate)
    }
}
