//! Matrix products: D, and operands in another form.

use crate::Dry;
use crate::memory::Buf;
use nibble_core::formats::WHOLE_LINE;
use nibble_core::formats::{Element, Format};
use nibble_core::ops::*;
use nibble_core::{Backend, DType, Groups, Operand, Result, Tensor};

/// Numbers of 16 bytes, which the GPU's tensor cores are brought together: rows of these sizes are whole numbers of them.
const BF16_UNIT: usize = 8;
const F32_UNIT: usize = 4;
/// BF16 numbers that an F32 number is.
const PARTS: usize = 3;

/// What groups a product has.
#[derive(Clone, Copy)]
pub(crate) enum Shape {
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

/// Whether kernels of a GPU read an operand's codes: FP8 under a scale for 128 or more.
fn is_fp8(x: &Operand<Dry>) -> bool {
    let Operand::Block(q) = x else { return false };
    let spec = q.format.spec();
    let long = spec.block == WHOLE_LINE || spec.block.is_multiple_of(128);
    long && matches!(spec.element, Some(Element::E4M3 | Element::E5M2))
}

/// Whether a GPU decodes both operands first.
pub(crate) fn is_lowered(a: &Operand<Dry>, b: &Operand<Dry>) -> bool {
    let as_it_is = |x: &Operand<Dry>| is_fp8(x) || x.format() == Format::Mxfp4;
    matches!((a, b), (Operand::Block(_), Operand::Block(_))) && !(as_it_is(a) && as_it_is(b))
}

/// Whether its tensor cores take an operand.
fn on_tensor_cores(x: &Operand<Dry>) -> bool {
    x.format() == Format::Bf16 || is_fp8(x) && x.format().spec().element == Some(Element::E4M3)
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
    pub(crate) fn beside_product(
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
            _ if is_lowered(a, b) => return self.beside_lowered((a, b), ProductDims { m, n, k }, out, shape),
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
            (_, _, _, Shape::Contraction { groups, runs })
                if runs > 1 && of_f32(n) && on_tensor_cores(a) && on_tensor_cores(b) =>
            {
                let _all: Buf<f32> = self.buf(groups * runs * m * n)?;
            }
            _ => {
                let _wide = (self.widened(a, b)?, self.widened(b, a)?);
            }
        }
        Ok(())
    }

    /// What a GPU's product takes of operands whose codes no kernel reads: both in BF16, what that product takes, and, under a tensor's
    /// scale, the sums.
    fn beside_lowered(
        &self,
        (a, b): (&Operand<Self>, &Operand<Self>),
        dims: ProductDims,
        out: DType,
        shape: Shape,
    ) -> Result<()> {
        let folds = |x: &Operand<Self>| matches!(x, Operand::Block(q) if q.format.folds_into_bf16(q.rule));
        let folded = folds(a) && folds(b);
        let dtype = if folded { DType::Bf16 } else { DType::F32 };
        let plain = |x: &Operand<Self>| self.plain(dtype, x.rows(), x.cols()).map(Operand::Plain);
        let (plain_a, plain_b) = (plain(a)?, plain(b)?);
        let matrices = if let Shape::Contraction { groups, .. } = shape { groups } else { 1 };
        let of_tensor =
            folded && [a, b].iter().any(|x| matches!(x, Operand::Block(q) if q.tensor_scale.is_some()));
        let _sums: Option<Buf<f32>> = of_tensor.then(|| self.buf(matrices * dims.m * dims.n)).transpose()?;
        self.beside_product((&plain_a, &plain_b), dims, if of_tensor { DType::F32 } else { out }, shape)
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
