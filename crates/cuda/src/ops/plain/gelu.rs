//! Runs `gelu` and `gelu_backward` on a GPU (`csrc/kernels/plain/gelu.cuh`).

use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::norm::rms_norm::TYPES;
use crate::ops::planes::{numbers_per_load, plain_arg, plain_or_null, type_name};
use nibble_core::ops::{Gelu, GeluBackward};
use nibble_core::{DType, Error, Result, Tensor};

const THREADS: usize = 256;

fn spec(dtype: DType, backward: bool) -> KernelSpec {
    KernelSpec {
        source: "kernels/plain/gelu.cuh",
        name: "nib::gelu",
        args: vec![("T", TemplateArg::Type(type_name(dtype))), ("kBackward", TemplateArg::Bool(backward))],
    }
}

/// Runs [`Gelu`] on the GPU.
pub(crate) fn gelu(cuda: &Cuda, op: Gelu<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    BufferCheck::by("gelu", cuda).tensor("h", op.h)?;
    let a = op.result(cuda)?;
    write(cuda, "gelu", (op.h, None), &a)?;
    Ok(a)
}

/// Runs [`GeluBackward`] on the GPU.
pub(crate) fn gelu_backward(cuda: &Cuda, op: GeluBackward<'_, Cuda>) -> Result<Tensor<Cuda>> {
    const OP: &str = "gelu_backward";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("h", op.h)?;
    buffers.tensor("da", op.da)?;
    let dh = op.result(cuda)?;
    write(cuda, OP, (op.h, Some(op.da)), &dh)?;
    Ok(dh)
}

/// Writes GELU of h, or its gradient if there is da. All tensors have the shape and type of h.
fn write(
    cuda: &Cuda,
    op: &'static str,
    (h, da): (&Tensor<Cuda>, Option<&Tensor<Cuda>>),
    out: &Tensor<Cuda>,
) -> Result<()> {
    let (dtype, len) = (h.dtype(), h.rows * h.cols);
    if len == 0 {
        return Ok(());
    }
    let ctas = u32::try_from(len.div_ceil(THREADS * numbers_per_load(dtype)))
        .ok()
        .filter(|ctas| *ctas < 1 << 31)
        .ok_or_else(|| Error::shape(op, "h.len()", len, "below 2^41"))?;
    let launch = Launch { ctas, threads: THREADS as u32, cluster: 1, shared_bytes: 0 };
    let kernel = cuda.device().kernel(&spec(dtype, da.is_some()))?;
    // SAFETY: all tensors have `len` values of the instance's type (`check`, `result`) and are on this device (`BufferCheck`); the
    // instance reads da only if there is da.
    unsafe { kernel.launch(launch, &[plain_arg(h).0, plain_or_null(da), plain_arg(out).0, &(len as u64)]) }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |dtype| [false, true].map(|backward| Instance { spec: spec(dtype, backward), shared_bytes: 0 });
    TYPES.into_iter().flat_map(of).collect()
}
