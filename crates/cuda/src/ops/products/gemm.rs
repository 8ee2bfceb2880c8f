//! Launches any GEMM by its path: [`nibble_core::ops::Gemm`], [`GroupedGemm`] and [`GroupedWgrad`].

use super::operands::{GroupBuffers, Matrix, Target};
use super::tensor_cores::TensorCoreLaunch;
use super::{decoded, ordinary_cores, parts};
use crate::backend::Buf;
use crate::ops::convert::{dequantize, lift};
use crate::ops::plain::elementwise::cast_values;
use crate::{Buffer, Cuda, Device};
use nibble_choice::GpuKernels;
use nibble_choice::products::{Becomes, Cores, OperandKind, ProductPath, ScalesB, TensorCoreProduct};
use nibble_core::formats::{BlockAxis, Format};
use nibble_core::ops::{Gemm, GroupedGemm, GroupedWgrad, ProductArgs, Ragged, Taken};
use nibble_core::{BlockScaled, DType, Data, Operand, Result, Tensor};
use std::borrow::Cow;

pub(crate) fn gemm(cuda: &Cuda, op: Gemm<'_, Cuda>) -> Result<Tensor<Cuda>> {
    let (product, mut d) = (op.product()?, op.result(cuda)?);
    // For an empty contraction the zeros that are already in D stay.
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

/// Computes a GEMM into D, which has no other handle. The result of an empty GEMM is zeros, and so are
/// rows outside all groups.
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
    run(cuda, product, &path, Target::of(d, desc.accumulate))
}

/// Runs the path chosen for this GEMM: converts its operands and multiplies them. Rows outside all groups are not written, unless the
/// path writes every row; then they are zeros. Sizes are positive and already checked.
fn run(cuda: &Cuda, product: &ProductArgs<'_, Cuda>, path: &ProductPath, d: Target<'_>) -> Result<()> {
    let of = |x, becomes| side(d.device, product.op, x, becomes);
    let (a, b) = (of(product.a, path.sides[0])?, of(product.b, path.sides[1])?);
    let ends = match (path.whole_groups, product.groups) {
        (Some(_), Some(groups)) => Some(decoded::whole_groups(d.device, groups)?),
        _ => None,
    };
    let groups = ends.as_ref().or(product.groups);
    let tensor_scales = [product.a, product.b].map(tensor_scale);
    let multiplied = &ProductArgs { groups, a: &a, b: &b, ..*product };
    let Some(sums) = path.sums else { return run_on(cuda, path.cores, multiplied, tensor_scales, d) };
    let mut sums = d.device.alloc::<f32>(sums)?;
    run_on(cuda, path.cores, multiplied, tensor_scales, Target::f32(&mut sums, false))?;
    decoded::scale_sums(product, &sums, tensor_scales, d)
}

fn run_on(
    cuda: &Cuda,
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
                1 => TensorCoreLaunch { product: asked, groups, a, b, d }.run_under(cuda.trial()),
                _ => parts::in_runs(cuda, product, (asked, runs), (a, b), d),
            }
        }
        Cores::Parts(chosen) => parts::run(cuda, chosen, product, d),
        Cores::Ordinary => ordinary_cores::run(product, d),
    }
}

/// An operand, converted for the GEMM.
fn side<'a>(
    device: &Device,
    op: &'static str,
    x: &'a Operand<Cuda>,
    becomes: Becomes,
) -> Result<Cow<'a, Operand<Cuda>>> {
    Ok(match becomes {
        Becomes::AsIs => as_taken(x)?.map_or(Cow::Borrowed(x), Cow::Owned),
        Becomes::Lifted { axis, matrices, codes, scales, layout } => {
            let plane = (codes, scales, layout);
            Cow::Owned(Operand::Block(lift::lift(device, x.block(op)?, (axis, matrices), plane)?))
        }
        Becomes::Decoded(DType::Bf16, _) => {
            Cow::Owned(Operand::Plain(dequantize::bare(device, x.block(op)?)?))
        }
        Becomes::Decoded(DType::F32, _) => {
            Cow::Owned(Operand::Plain(dequantize::whole(device, x.block(op)?)?))
        }
        Becomes::Widened(_) => Cow::Owned(Operand::Plain(widened(device, x.plain(op)?)?)),
    })
}

/// BF16 values as F32.
fn widened(device: &Device, x: &Tensor<Cuda>) -> Result<Tensor<Cuda>> {
    let Data::Bf16(values) = &x.data else { return Ok(x.clone()) };
    let wide = device.alloc(values.get().len())?;
    cast_values(values.get(), &wide, DType::F32)?;
    Tensor::new(Data::F32(Buf::new(wide)), x.rows, x.cols)
}

/// An operand that was quantized to the form that GEMMs take, relabelled as that form; `None` for other operands.
fn as_taken(x: &Operand<Cuda>) -> Result<Option<Operand<Cuda>>> {
    let Operand::Block(q) = x else { return Ok(None) };
    Ok(match q.taken {
        Taken::AsIs => None,
        Taken::Lifted => {
            let (format, rule) = Format::LIFTED;
            Some(Operand::Block(BlockScaled { format, rule, taken: Taken::AsIs, ..q.clone() }))
        }
        Taken::Decoded => {
            let numbers = Data::Bf16(Buf::new(q.codes.get().reinterpreted()?));
            Some(Operand::Plain(Tensor::new(numbers, q.rows, q.cols)?))
        }
    })
}

fn tensor_scale(x: &Operand<Cuda>) -> Option<&Buffer<f32>> {
    match x {
        Operand::Block(q) => q.tensor_scale.as_ref().map(Buf::get),
        Operand::Plain(_) => None,
    }
}

/// Both operands as arguments of the tensor-core kernels.
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

/// An operand whose scales are read once per `shared` adjacent rows, which have the same scale.
fn operand<'a>(op: &'static str, x: &'a Operand<Cuda>, shared: usize) -> Result<Matrix<'a>> {
    let mut matrix = Matrix::of(op, x)?;
    if let (Operand::Block(q), Some(scales)) = (x, &mut matrix.scales)
        && q.axis != BlockAxis::Tile
    {
        scales.row_stride *= shared;
    }
    Ok(matrix)
}
