//! The kernel sequences that `nibble-choice` determines, by shape alone.

use crate::memory::{Buf, InPlace};
use crate::{Dry, Multiplied, Slow, ops};
use nibble_choice::GpuKernels;
use nibble_choice::head_loss::TargetRows;
use nibble_choice::products::{ProductPath, obstacle};
use nibble_choice::quantize::QuantizePath;
use nibble_choice::swiglu::{SwigluBackwardPath, SwigluPath};
use nibble_choice::transcode::Lines;
use nibble_choice::vocabulary::losses_temporary;
use nibble_core::ops::*;
use nibble_core::{Data, Groups, Operand, PermuteMap, Plain, Result, Tensor};
use std::ops::Range;

impl GpuKernels for Dry {
    fn quantize_counting(
        &self,
        op: Quantize<'_, Self>,
        counts: Option<&Counts<Self>>,
    ) -> Result<Emitted<Self>> {
        let Some(counts) = counts else { return ops::quantize(self, op) };
        let out = op.uncounted_as(self, QuantizePath::of_op(&op).taken)?;
        ops::while_quantizing(self, &op)?;
        Ok(Emitted { counts: Some(counts.clone()), ..out })
    }

    fn decode(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>> {
        op.result(self)
    }

    fn transcode_whole_blocks(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>> {
        op.result(self)
    }

    fn plan(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>> {
        ops::plan_permute(self, op)
    }

    fn multiply(&self, product: ProductArgs<'_, Self>, d: &mut Tensor<Self>) -> Result<()> {
        if !self.is_gpu() {
            return self.multiply_on_host(&product);
        }
        let desc = product.desc(d.dtype());
        if desc.is_empty() {
            return Ok(());
        }
        self.inner.products.note(Multiplied { op: product.op, desc });
        if let Some(why) = obstacle(&desc) {
            self.inner.slow.note(Slow { op: product.op, why, flops: desc.flops() });
        }
        self.while_on_gpu(ProductPath::of(&desc).temporaries())
    }

    fn sum_losses(&self, loss: &Buf<f32>, shard_nats: &Buf<f64>) -> Result<()> {
        self.while_on_gpu([losses_temporary::<Self>(loss.len(), shard_nats.len())])
    }

    fn make_sole(&self, x: &mut Tensor<Self>) -> Result<()> {
        x.make_own(self)
    }

    fn rows_of(&self, x: &Tensor<Self>, rows: Range<usize>) -> Result<Tensor<Self>> {
        let len = rows.len() * x.cols;
        let data = match &x.data {
            Data::F32(values) => Data::F32(values.part(len)),
            Data::Bf16(values) => Data::Bf16(values.part(len)),
        };
        Tensor::new(data, rows.len(), x.cols)
    }

    fn part_of<T: Plain>(&self, x: &Buf<T>, range: Range<usize>) -> Result<Buf<T>> {
        Ok(x.part(range.len()))
    }

    fn recut(&self, _: &Lines, _: &Buf<u8>, _: &Buf<u8>) -> Result<()> {
        Ok(())
    }

    fn swiglu_kernel(&self, _: &Swiglu<'_, Self>, _: &SwigluPath, _: &SwigluOut<Self>) -> Result<()> {
        Ok(())
    }

    fn swiglu_backward_kernel(
        &self,
        _: &SwigluBackward<'_, Self>,
        _: &SwigluBackwardPath,
        _: &Operand<Self>,
        _: Option<&Buf<f32>>,
        _: &SwigluGrads<Self>,
    ) -> Result<()> {
        Ok(())
    }

    fn target_rows(
        &self,
        _: &TargetRows<'_, Self>,
        _: &Tensor<Self>,
        _: &Buf<f32>,
        _: Option<&Tensor<Self>>,
    ) -> Result<()> {
        Ok(())
    }

    fn list_groups(&self, _: &Groups<Self>, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn round_sum(&self, _: &Tensor<Self>, _: &Tensor<Self>, _: bool) -> Result<()> {
        Ok(())
    }
}
