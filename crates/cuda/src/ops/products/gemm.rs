//! See [`nibble_core::ops::Gemm`], [`GroupedGemm`] and [`GroupedWgrad`]: any product is launched by its path.

use super::operands::{GroupBuffers, Matrix, Target};
use super::tensor_cores::TensorCoreLaunch;
use super::{lowered, ordinary_cores, parts};
use crate::backend::Buf;
use crate::{Buffer, Cuda};
use nibble_choice::GpuKernels;
use nibble_choice::products::{Cores, OperandKind, ProductPath, ScalesB, TensorCoreProduct};
use nibble_core::formats::BlockAxis;
use nibble_core::ops::{Gemm, GroupedGemm, GroupedWgrad, ProductArgs, Ragged};
use nibble_core::{Operand, Result, Tensor};

pub(crate) fn gemm(cuda: &Cuda, op: Gemm<'_, Cuda>) -> Result<Tensor<Cuda>> {
    let (product, mut d) = (op.product()?, op.result(cuda)?);
    // Of nothing it is zeros already.
    if product.dims.k != 0 {
        multiply(cuda, &product, &mut d)?;
    }
    Ok(d)
}

pub(crate) fn grouped_gemm(cuda: &Cuda, op: GroupedGemm<'_, Cuda>) -> Result<Tensor<Cuda>> {
    let (product, mut d) = (op.product()?, op.result(cuda)?);
    multiply(cuda, &product, &mut d)?;
    Ok(d)
}

pub(crate) fn grouped_wgrad(cuda: &Cuda, op: GroupedWgrad<'_, Cuda>) -> Result<()> {
    let (product, grad) = op.product()?;
    cuda.make_sole(grad)?;
    multiply(cuda, &product, grad)
}

/// A product into D, which nobody else has. Of nothing it is zeros, as are rows of no group.
pub(crate) fn multiply(cuda: &Cuda, product: &ProductArgs<'_, Cuda>, d: &mut Tensor<Cuda>) -> Result<()> {
    let desc = product.desc(d.dtype());
    if d.rows * d.cols == 0 {
        return Ok(());
    }
    if desc.is_empty() {
        return if desc.accumulate { Ok(()) } else { cuda.clear_tensor(d) };
    }
    let path = ProductPath::of(&desc);
    if desc.ragged == Ragged::Rows && desc.groups.is_some() && !path.writes_every_row() {
        cuda.clear_tensor(d)?;
    }
    run(product, &path, Target::of(d, desc.accumulate))
}

/// By the path that is chosen for this product: makes what its operands become, and multiplies that. Rows of no group are left alone, unless
/// the path writes every row: then they are zeros. Sizes are positive and checked.
fn run(product: &ProductArgs<'_, Cuda>, path: &ProductPath, d: Target<'_>) -> Result<()> {
    let device = d.device.clone();
    let side = |x, becomes| lowered::side(&device, product.op, x, becomes);
    let (a, b) = (side(product.a, path.sides[0])?, side(product.b, path.sides[1])?);
    let groups = match (path.whole_groups, product.groups) {
        (Some(_), Some(groups)) => Some(lowered::whole_groups(&device, groups)?),
        (_, groups) => groups.cloned(),
    };
    let tensor_scales = [product.a, product.b].map(tensor_scale);
    let product = &ProductArgs { groups: groups.as_ref(), a: &a, b: &b, ..*product };
    let Some(sums) = path.sums else { return run_on(path.cores, product, tensor_scales, d) };
    let mut sums = device.alloc::<f32>(sums)?;
    run_on(path.cores, product, tensor_scales, Target::f32(&mut sums, false))?;
    lowered::scale_sums(product, &sums, tensor_scales, d)
}

fn run_on(
    cores: Cores,
    product: &ProductArgs<'_, Cuda>,
    tensor_scales: [Option<&Buffer<f32>>; 2],
    d: Target<'_>,
) -> Result<()> {
    match cores {
        Cores::Tensor { product: asked, runs } => {
            let (a, b) = operands(product, &asked, tensor_scales)?;
            let groups = product.groups.map(GroupBuffers::of);
            match runs {
                1 => TensorCoreLaunch { product: asked, groups, a, b, d }.run(),
                _ => parts::in_runs(product, (asked, runs), (a, b), d),
            }
        }
        Cores::Parts(chosen) => parts::run(chosen, product, d),
        Cores::Ordinary => ordinary_cores::run(product, d),
    }
}

fn tensor_scale(x: &Operand<Cuda>) -> Option<&Buffer<f32>> {
    match x {
        Operand::Block(q) => q.tensor_scale.as_ref().map(Buf::get),
        Operand::Plain(_) => None,
    }
}

/// Both as the tensor cores' kernels take them.
fn operands<'a>(
    product: &ProductArgs<'a, Cuda>,
    asked: &TensorCoreProduct,
    [of_a, of_b]: [Option<&'a Buffer<f32>>; 2],
) -> Result<(Matrix<'a>, Matrix<'a>)> {
    let (a, b) = if asked.transposed { (product.b, product.a) } else { (product.a, product.b) };
    let rows_b = asked.kind.scales_b().map_or(1, ScalesB::rows);
    let (a, b) = (operand(product.op, a, 1)?, operand(product.op, b, rows_b)?);
    let is_scaled = asked.kind == OperandKind::ScaledBf16;
    Ok(if is_scaled { (a.times(of_a), b.times(of_b)) } else { (a, b) })
}

/// Read with one scale for so many neighbouring rows, of which each has the same.
fn operand<'a>(op: &'static str, x: &'a Operand<Cuda>, shared: usize) -> Result<Matrix<'a>> {
    let mut matrix = Matrix::of(op, x)?;
    if let (Operand::Block(q), Some(scales)) = (x, &mut matrix.scales)
        && q.axis != BlockAxis::Tile
    {
        scales.row_stride *= shared;
    }
    Ok(matrix)
}
