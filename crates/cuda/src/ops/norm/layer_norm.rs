//! Runs `layer_norm` and `layer_norm_backward` on a GPU (`csrc/kernels/norm/layer_norm.cuh`).

use super::rms_norm::{Chunks, THREADS, TYPES, add_column_sums, check_size, plain_launch};
use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::KernelArg;
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{plain_arg, plain_or_null, type_name};
use nibble_core::ops::{LayerNorm, LayerNormBackward, LayerNormOut};
use nibble_core::{DType, Error, Result, Tensor};

const FORWARD: &str = "nib::layer_norm";
const BACKWARD: &str = "nib::layer_dx";

fn of(name: &'static str, args: Vec<(&'static str, TemplateArg)>) -> KernelSpec {
    KernelSpec { source: "kernels/norm/layer_norm.cuh", name, args }
}

/// The kernel over rows of d columns, which also adds `plus`.
fn rows_spec(name: &'static str, dtype: DType, d: usize, plus: bool) -> KernelSpec {
    let aligned = TemplateArg::Bool(d.is_multiple_of(8));
    let t = TemplateArg::Type(type_name(dtype));
    of(name, vec![("T", t), ("kAligned", aligned), ("kPlus", TemplateArg::Bool(plus))])
}

fn dweight_spec(dtype: DType) -> KernelSpec {
    of("nib::layer_dweight", vec![("T", TemplateArg::Type(type_name(dtype)))])
}

/// Runs [`LayerNorm`] on the GPU.
pub(crate) fn layer_norm(cuda: &Cuda, op: LayerNorm<'_, Cuda>) -> Result<LayerNormOut<Cuda>> {
    const OP: &str = "layer_norm";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    for (argument, x) in [("x", op.x), ("weight", op.weight), ("bias", op.bias)] {
        buffers.tensor(argument, x)?;
    }
    op.plus.map_or(Ok(()), |plus| buffers.tensor("plus", plus))?;
    let (dtype, (rows, d)) = (op.x.dtype(), op.x.shape());
    check_size(OP, rows, d)?;
    let out = op.result(cuda)?;
    if rows == 0 {
        return Ok(out);
    }
    let kernel = cuda.device().kernel(&rows_spec(FORWARD, dtype, d, op.plus.is_some()))?;
    let [x, y] = [op.x, &out.y].map(|x| plain_arg(x).0);
    let (plus, sum) = (plain_or_null(op.plus), plain_or_null(out.sum.as_ref()));
    let (weight, bias) = (op.weight.f32(OP, "weight")?.get(), op.bias.f32(OP, "bias")?.get());
    let (mean, inv_std) = (out.mean.get(), out.inv_std.get());
    let args: [&dyn KernelArg; 11] =
        [x, plus, weight, bias, y, sum, mean, inv_std, &(rows as u32), &(d as u32), &op.eps];
    // SAFETY: `BufferCheck` and `check` checked that x and plus are `[rows, d]` and that weight and bias have d values; y and sum are as
    // large as x, and mean and inv_std have one value per row. The instance supports d, and adds `plus` if `plus` is given.
    unsafe { kernel.launch(plain_launch(rows.div_ceil(THREADS / 32), THREADS), &args) }?;
    Ok(out)
}

/// Runs [`LayerNormBackward`] on the GPU.
pub(crate) fn layer_norm_backward(cuda: &Cuda, op: LayerNormBackward<'_, Cuda>) -> Result<Tensor<Cuda>> {
    const OP: &str = "layer_norm_backward";
    op.check()?;
    let (rows, d) = op.x.shape();
    check_size(OP, rows, d)?;
    let buffers = BufferCheck::by(OP, cuda);
    for (argument, x) in [("x", op.x), ("weight", op.weight), ("dy", op.dy)] {
        buffers.tensor(argument, x)?;
    }
    buffers.tensor("dweight", op.dweight)?;
    buffers.values("mean", op.mean, rows)?;
    buffers.values("inv_std", op.inv_std, rows)?;
    op.plus.map_or(Ok(()), |plus| buffers.tensor("plus", plus))?;
    let dx = op.result(cuda)?;
    let (device, dtype, weight) = (cuda.device(), op.x.dtype(), op.weight.f32(OP, "weight")?.get());
    let (mean, inv_std) = (op.mean.get(), op.inv_std.get());
    let [x, dy, to] = [op.x, op.dy, &dx].map(|x| plain_arg(x).0);
    let blocks = d.div_ceil(THREADS);
    let [rows_arg, d_arg, blocks_arg] = [rows, d, blocks].map(|n| n as u32);
    add_column_sums(device, OP, (rows, d), op.dweight, |chunks| {
        let Chunks { sums, all, rows_per_shard, per_shard } = chunks;
        let ctas = (*all as usize).saturating_mul(blocks);
        if ctas >= 1 << 31 {
            return Err(Error::shape(OP, "shape of x", format!("{rows} x {d}"), "below 2^44 numbers"));
        }
        let rows_kernel = device.kernel(&rows_spec(BACKWARD, dtype, d, op.plus.is_some()))?;
        let args: [&dyn KernelArg; 9] =
            [x, weight, mean, inv_std, dy, plain_or_null(op.plus), to, &rows_arg, &d_arg];
        // SAFETY: `BufferCheck` and `check` checked that x, dy and plus are `[rows, d]`, that weight has d values, and mean and inv_std one
        // value per row; dx is as large as x. The instance supports d, and adds `plus` if `plus` is given.
        unsafe { rows_kernel.launch(plain_launch(rows.div_ceil(THREADS / 32), THREADS), &args) }?;
        let args: [&dyn KernelArg; 9] =
            [x, mean, inv_std, dy, sums, rows_per_shard, per_shard, &d_arg, &blocks_arg];
        // SAFETY: as above; `sums` has a row of d values per chunk.
        unsafe { device.kernel(&dweight_spec(dtype))?.launch(plain_launch(ctas, THREADS), &args) }
    })?;
    Ok(dx)
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let of_type = |dtype| {
        let rows = [FORWARD, BACKWARD].into_iter().flat_map(move |name| {
            [(8, false), (8, true), (1, false), (1, true)].map(|(d, plus)| rows_spec(name, dtype, d, plus))
        });
        rows.chain([dweight_spec(dtype)])
    };
    let all = TYPES.into_iter().flat_map(of_type);
    all.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}
