//! Matrix products: D, and operands in another form.

use crate::Dry;
use crate::memory::Buf;
use nibble_core::formats::Format;
use nibble_core::ops::*;
use nibble_core::{DType, Operand, Products, Result, Tensor};

/// A product's sizes are multiples of this where the GPU's tensor cores take it.
const UNIT: usize = 8;
/// BF16 numbers that an F32 number is.
const PARTS: usize = 3;

impl Dry {
    /// A BF16 operand in F32, where the other one is.
    fn widened(&self, x: &Operand<Self>, other: &Operand<Self>) -> Result<Option<Tensor<Self>>> {
        match (x.format(), other.format()) {
            (Format::Bf16, Format::F32) => self.plain(DType::F32, x.rows(), x.cols()).map(Some),
            _ => Ok(None),
        }
    }

    /// What a GPU's product takes besides D `[m, n]`, of `groups` matrices where the contraction is ragged.
    fn beside_product(
        &self,
        (a, b): (&Operand<Self>, &Operand<Self>),
        (m, n, k): (usize, usize, usize),
        out: DType,
        contracted: Option<usize>,
    ) -> Result<()> {
        let whole = [m, n, k].iter().all(|size| size.is_multiple_of(UNIT));
        match (a.format(), b.format(), out, contracted) {
            (Format::Bf16, Format::F32, DType::F32, None) if whole => {
                let _parts = self.bf16(PARTS * n * k)?;
                let _wide: Buf<f32> = self.buf(m * PARTS * n)?;
            }
            (Format::F32, Format::F32, DType::Bf16, None) if whole => {
                let _parts = (self.bf16(PARTS * m * k)?, self.bf16(PARTS * n * k)?);
            }
            (Format::F32, Format::Bf16, DType::F32, Some(groups)) if whole => {
                let _parts = self.bf16(PARTS * m * k)?;
                let _tall: Buf<f32> = self.buf(groups * PARTS * m * n)?;
            }
            _ => {
                let _wide = (self.widened(a, b)?, self.widened(b, a)?);
            }
        }
        Ok(())
    }

    fn product(
        &self,
        (a, b): (&Operand<Self>, &Operand<Self>),
        dims: ProductDims,
        out: DType,
    ) -> Result<Tensor<Self>> {
        let ProductDims { m, n, k } = dims;
        if self.is_gpu() {
            let d = self.plain(out, m, n)?;
            self.beside_product((a, b), (m, n, k), out, None)?;
            return Ok(d);
        }
        let _wide = (self.widened(a, b)?, self.widened(b, a)?);
        self.plain(out, m, n)
    }
}

impl Products for Dry {
    fn gemm(&self, op: Gemm<'_, Self>) -> Result<Tensor<Self>> {
        self.product((op.a, op.b), op.check()?, op.out)
    }

    fn grouped_gemm(&self, op: GroupedGemm<'_, Self>) -> Result<Tensor<Self>> {
        self.product((op.x, op.w), op.check()?, op.out)
    }

    fn grouped_wgrad(&self, op: GroupedWgrad<'_, Self>) -> Result<()> {
        let ProductDims { m, n, k } = op.check()?;
        self.make_tensor_mut(op.grad)?;
        if self.is_gpu() {
            let groups = Some(op.groups.num_groups);
            return self.beside_product((op.dy, op.x), (m, n, k), op.grad.dtype(), groups);
        }
        let _wide = (self.widened(op.dy, op.x)?, self.widened(op.x, op.dy)?);
        Ok(())
    }
}
