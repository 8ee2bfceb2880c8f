//! Matrix products: D, and operands in another form.

use crate::Dry;
use crate::memory::Buf;
use nibble_core::formats::Format;
use nibble_core::ops::*;
use nibble_core::{Backend, DType, Groups, Operand, Result, Tensor};

/// Numbers of 16 bytes, which the GPU's tensor cores are brought together: rows of these sizes are whole numbers of them.
const BF16_UNIT: usize = 8;
const F32_UNIT: usize = 4;
/// BF16 numbers that an F32 number is.
const PARTS: usize = 3;

/// What groups a product has.
#[derive(Clone, Copy)]
enum Shape {
    Dense,
    /// Rows of A and D.
    Rows,
    /// The contraction; each has a matrix of D, and is cut into runs.
    Contraction {
        groups: usize,
        runs: usize,
    },
}

impl Shape {
    /// Runs are known where all groups have as many rows.
    fn contraction<B: Backend>(dims: ProductDims, groups: &Groups<B>) -> Self {
        let cut = |rows| if (dims.m * dims.n).is_multiple_of(F32_UNIT) { dims.gpu_runs(rows) } else { 1 };
        Self::Contraction { groups: groups.num_groups, runs: groups.rows_each.map_or(1, cut) }
    }
}

impl Dry {
    /// A BF16 operand in F32, where the other one is.
    fn widened(&self, x: &Operand<Self>, other: &Operand<Self>) -> Result<Option<Tensor<Self>>> {
        match (x.format(), other.format()) {
            (Format::Bf16, Format::F32) => self.plain(DType::F32, x.rows(), x.cols()).map(Some),
            _ => Ok(None),
        }
    }

    /// What a GPU's product takes besides D `[m, n]`.
    fn beside_product(
        &self,
        (a, b): (&Operand<Self>, &Operand<Self>),
        ProductDims { m, n, k }: ProductDims,
        out: DType,
        shape: Shape,
    ) -> Result<()> {
        let (of_bf16, of_f32) =
            (|n: usize| n.is_multiple_of(BF16_UNIT), |n: usize| n.is_multiple_of(F32_UNIT));
        match (a.format(), b.format(), out, shape) {
            _ if [m, n, k].contains(&0) => {}
            (Format::Bf16, Format::F32, DType::F32, Shape::Dense) if of_f32(n) && of_bf16(k) => {
                let _parts = self.bf16(PARTS * n * k)?;
                let _wide: Buf<f32> = self.buf(m * PARTS * n)?;
            }
            (Format::F32, Format::F32, DType::Bf16, Shape::Dense) if of_bf16(n) && of_bf16(k) => {
                let _parts = (self.bf16(PARTS * m * k)?, self.bf16(PARTS * n * k)?);
            }
            (Format::F32, Format::Bf16, _, Shape::Contraction { groups, runs })
                if of_bf16(m) && of_bf16(n) =>
            {
                let _parts = self.bf16(PARTS * m * k)?;
                let _tall: Buf<f32> = self.buf(groups * runs * PARTS * m * n)?;
            }
            // Those that the tensor cores take as they are.
            (
                Format::Bf16 | Format::E4m3,
                Format::Bf16 | Format::E4m3,
                _,
                Shape::Contraction { groups, runs },
            ) if runs > 1 && of_f32(n) => {
                let _all: Buf<f32> = self.buf(groups * runs * m * n)?;
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
        shape: Shape,
    ) -> Result<Tensor<Self>> {
        let ProductDims { m, n, .. } = dims;
        if self.is_gpu() {
            let d = self.plain(out, m, n)?;
            self.beside_product((a, b), dims, out, shape)?;
            return Ok(d);
        }
        let _wide = (self.widened(a, b)?, self.widened(b, a)?);
        self.plain(out, m, n)
    }
}

impl Dry {
    pub(crate) fn gemm(&self, op: Gemm<'_, Self>) -> Result<Tensor<Self>> {
        self.product((op.a, op.b), op.check()?, op.out, Shape::Dense)
    }

    pub(crate) fn grouped_gemm(&self, op: GroupedGemm<'_, Self>) -> Result<Tensor<Self>> {
        self.product((op.x, op.w), op.check()?, op.out, Shape::Rows)
    }

    pub(crate) fn grouped_wgrad(&self, op: GroupedWgrad<'_, Self>) -> Result<()> {
        let dims = op.check()?;
        self.make_tensor_mut(op.grad)?;
        if self.is_gpu() {
            let shape = Shape::contraction(dims, op.groups);
            return self.beside_product((op.dy, op.x), dims, op.grad.dtype(), shape);
        }
        let _wide = (self.widened(op.dy, op.x)?, self.widened(op.x, op.dy)?);
        Ok(())
    }
}
