//! Runs `add_bias` and `add_bias_backward` on a GPU (`csrc/kernels/plain/bias.cuh`).

use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::norm::rms_norm::{Chunks, TYPES, add_column_sums, check_size, plain_launch};
use crate::ops::planes::{numbers_per_load, plain_arg, type_name};
use nibble_core::ops::{AddBias, AddBiasBackward};
use nibble_core::{DType, Data, Error, Result};

const ADD_THREADS: usize = 256;
/// Rows per thread of the addition.
const ADD_ROWS: usize = 4;
const SUM_THREADS: usize = 128;

/// Adjacent columns per thread, for rows of d elements: 16 bytes if rows are multiples of 16 bytes, otherwise one
/// element.
fn count(dtype: DType, d: usize) -> usize {
    let whole = numbers_per_load(dtype);
    if d.is_multiple_of(whole) { whole } else { 1 }
}

fn spec(name: &'static str, dtype: DType, count: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/plain/bias.cuh",
        name,
        args: vec![("T", TemplateArg::Type(type_name(dtype))), ("kCount", TemplateArg::Int(count as i64))],
    }
}

const ADD: &str = "nib::add_bias";
const SUM: &str = "nib::bias_sums";

/// A launch of units · rows tasks, one per thread.
fn launch(op: &'static str, (units, rows): (usize, usize), threads: usize) -> Result<Launch> {
    match units.checked_mul(rows).filter(|tasks| *tasks <= (u32::MAX as usize) - threads) {
        Some(tasks) => Ok(plain_launch(tasks.div_ceil(threads), threads)),
        None => Err(Error::shape(op, "rows and columns", format!("{rows} x {units} tasks"), "below 2^32")),
    }
}

/// Runs [`AddBias`] on the GPU.
pub(crate) fn add_bias(cuda: &Cuda, op: AddBias<'_, Cuda>) -> Result<()> {
    const OP: &str = "add_bias";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", op.x)?;
    buffers.tensor("bias", op.bias)?;
    let (dtype, (rows, d)) = (op.x.dtype(), op.x.shape());
    check_size(OP, rows, d)?;
    if rows == 0 {
        return Ok(());
    }
    let count = count(dtype, d);
    let kernel = cuda.device().kernel(&spec(ADD, dtype, count))?;
    let launch = launch(OP, (d / count, rows.div_ceil(ADD_ROWS)), ADD_THREADS)?;
    let x: &dyn KernelArg = match &mut op.x.data {
        Data::F32(x) => x.make_mut()?,
        Data::Bf16(x) => x.make_mut()?,
    };
    let bias = op.bias.f32(OP, "bias")?.get();
    // SAFETY: `BufferCheck` and `check` checked that x is `[rows, d]` and that bias has d values; the instance has x's type, and its
    // column count divides d.
    unsafe { kernel.launch(launch, &[x, bias, &(rows as u32), &(d as u32)]) }
}

/// Runs [`AddBiasBackward`] on the GPU.
pub(crate) fn add_bias_backward(cuda: &Cuda, op: AddBiasBackward<'_, Cuda>) -> Result<()> {
    const OP: &str = "add_bias_backward";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("dy", op.dy)?;
    buffers.tensor("dbias", op.dbias)?;
    let (dtype, (rows, d)) = (op.dy.dtype(), op.dy.shape());
    check_size(OP, rows, d)?;
    let count = count(dtype, d);
    add_column_sums(cuda.device(), OP, (rows, d), op.dbias, |chunks| {
        let Chunks { sums, all, rows_per_shard, per_shard } = chunks;
        let launch = launch(OP, (d / count, *all as usize), SUM_THREADS)?;
        let kernel = cuda.device().kernel(&spec(SUM, dtype, count))?;
        let args: [&dyn KernelArg; 6] =
            [plain_arg(op.dy).0, sums, rows_per_shard, per_shard, all, &(d as u32)];
        // SAFETY: `BufferCheck` checked that dy is `[rows, d]`; `sums` has a row of d values per chunk; the instance has dy's type,
        // and its column count divides d.
        unsafe { kernel.launch(launch, &args) }
    })
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |dtype| {
        [1, numbers_per_load(dtype)].into_iter().flat_map(move |count| {
            [ADD, SUM].map(|name| Instance { spec: spec(name, dtype, count), shared_bytes: 0 })
        })
    };
    TYPES.into_iter().flat_map(of).collect()
}
