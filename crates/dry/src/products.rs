//! Matrix products: D, and what the path takes beside it that a GPU chooses (`nibble-choice`).

use crate::Dry;
use nibble_choice::Grouping;
use nibble_choice::products::{Factor, ProductDesc, Ragged};
use nibble_core::formats::Format;
use nibble_core::ops::*;
use nibble_core::{DType, Operand, Result, Tensor};

impl Dry {
    /// A BF16 operand in F32, where the other one is: what a host takes.
    fn widened(&self, x: &Operand<Self>, other: &Operand<Self>) -> Result<Option<Tensor<Self>>> {
        match (x.format(), other.format()) {
            (Format::Bf16, Format::F32) => self.plain(DType::F32, x.rows(), x.cols()).map(Some),
            _ => Ok(None),
        }
    }

    /// What a GPU's product takes besides D while it lasts.
    pub(crate) fn beside_product(&self, op: &'static str, product: ProductDesc) -> Result<()> {
        let ProductDims { m, n, k } = product.dims;
        if m * n * k * product.groups.map_or(1, |groups| groups.count) == 0 {
            return Ok(());
        }
        if let Some(why) = product.obstacle() {
            self.note_slow(op, why, 2.0 * m as f64 * n as f64 * k as f64);
        }
        self.hold(product.path().temporaries()).map(drop)
    }

    fn product(
        &self,
        op: &'static str,
        (a, b): (&Operand<Self>, &Operand<Self>),
        (dims, out): (ProductDims, DType),
        groups: Option<Grouping>,
    ) -> Result<Tensor<Self>> {
        if self.is_gpu() {
            let d = self.plain(out, dims.m, dims.n)?;
            let (a, b) = (Factor::of(a), Factor::of(b));
            let ragged = Ragged::Rows;
            self.beside_product(op, ProductDesc { ragged, groups, dims, a, b, out, accumulate: false })?;
            return Ok(d);
        }
        let _wide = (self.widened(a, b)?, self.widened(b, a)?);
        self.plain(out, dims.m, dims.n)
    }
}

impl Dry {
    pub(crate) fn gemm(&self, op: Gemm<'_, Self>) -> Result<Tensor<Self>> {
        self.product("gemm", (op.a, op.b), (op.check()?, op.out), None)
    }

    pub(crate) fn grouped_gemm(&self, op: GroupedGemm<'_, Self>) -> Result<Tensor<Self>> {
        let groups = Some(Grouping::of(op.groups));
        self.product("grouped_gemm", (op.x, op.w), (op.check()?, op.out), groups)
    }

    pub(crate) fn grouped_wgrad(&self, op: GroupedWgrad<'_, Self>) -> Result<()> {
        let dims = op.check()?;
        self.make_tensor_mut(op.grad)?;
        if self.is_gpu() {
            let (a, b) = (Factor::of(op.dy), Factor::of(op.x));
            let (groups, out) = (Some(Grouping::of(op.groups)), op.grad.dtype());
            let (ragged, accumulate) = (Ragged::Contraction, op.accumulate);
            return self.beside_product(
                "grouped_wgrad",
                ProductDesc { ragged, groups, dims, a, b, out, accumulate },
            );
        }
        let _wide = (self.widened(op.dy, op.x)?, self.widened(op.x, op.dy)?);
        Ok(())
    }
}
