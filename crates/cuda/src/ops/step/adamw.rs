//! Runs `adamw` on a GPU (`csrc/kernels/step/adamw.cuh`).

use super::tensor_list::{Listed, each_list};
use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Launch, plain_args};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::type_name;
use nibble_core::ops::{AdamW, AdamWTensor, Control};
use nibble_core::{DType, Data, Result, Tensor};

const OP: &str = "adamw";
const THREADS: u32 = 256;
/// Elements per CTA.
const PER_CTA: usize = 2048;
const TYPES: [DType; 2] = [DType::F32, DType::Bf16];
// The kernel has these indices of the control values as constants.
const _: () = assert!(Control::LR == 0 && Control::BIAS1 == 1 && Control::BIAS2 == 2);
const _: () = assert!(Control::LOSS_SCALE == 3 && Control::GRAD_SCALE == 4 && Control::STOP == 5);

/// Mirrors the device struct `AdamArg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct Arg {
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    eps: f32,
}
plain_args!(Arg);

/// Mirrors the device struct `AdamTensor`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct TensorArg {
    w: u64,
    grad: u64,
    m: u64,
    v: u64,
    len: u64,
    weight_decay: f32,
    first_cta: u32,
}

// SAFETY: the type has five words of 8 bytes and two of 4 bytes, without padding.
unsafe impl Listed for TensorArg {
    fn begin_at(&mut self, cta: u32) {
        self.first_cta = cta;
    }
}

fn spec(grad: DType, moment: DType) -> KernelSpec {
    KernelSpec {
        source: "kernels/step/adamw.cuh",
        name: "nib::adamw",
        args: vec![("G", TemplateArg::Type(type_name(grad))), ("M", TemplateArg::Type(type_name(moment)))],
    }
}

/// Runs [`AdamW`] on the GPU. There is one launch for every 72 tensors of the same types.
pub(crate) fn adamw(cuda: &Cuda, op: AdamW<'_, Cuda>) -> Result<()> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    let control = buffers.values("control", op.control, Control::LEN)?;
    let arg =
        Arg { beta1: op.beta1, rest1: 1.0 - op.beta1, beta2: op.beta2, rest2: 1.0 - op.beta2, eps: op.eps };
    let mut of_types: [Vec<(TensorArg, usize)>; 4] = Default::default();
    for tensor in op.tensors {
        buffers.tensor("param", tensor.param)?;
        buffers.tensor("grad", tensor.grad)?;
        buffers.tensor("exp_avg", tensor.exp_avg)?;
        buffers.tensor("exp_avg_sq", tensor.exp_avg_sq)?;
        let types = (tensor.grad.dtype(), tensor.exp_avg.dtype());
        let arg = tensor_arg(tensor)?;
        if arg.len > 0 {
            let place = pairs().position(|pair| pair == types);
            of_types[place.unwrap_or_default()].push((arg, (arg.len as usize).div_ceil(PER_CTA)));
        }
    }
    for ((grad, moment), tensors) in pairs().zip(&of_types) {
        each_list(OP, tensors, |list, ctas| {
            let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
            let kernel = cuda.device().kernel(&spec(grad, moment))?;
            // SAFETY: `BufferCheck` and `check` ensured that all four buffers of each tensor have one shape, and their types are the
            // instance's; each written buffer is the only handle of its bytes; control has its `Control::LEN` values.
            unsafe { kernel.launch(launch, &[list, control, &arg]) }
        })?;
    }
    Ok(())
}

/// Pairs of gradient type and moment type, in launch order.
fn pairs() -> impl Iterator<Item = (DType, DType)> {
    TYPES.into_iter().flat_map(|grad| TYPES.map(|moment| (grad, moment)))
}

/// The addresses of a tensor's buffers. If another handle shares the bytes of a buffer that is written, the
/// buffer is copied first.
fn tensor_arg(tensor: AdamWTensor<'_, Cuda>) -> Result<TensorArg> {
    let AdamWTensor { param, grad, exp_avg, exp_avg_sq, weight_decay } = tensor;
    let len = (param.rows * param.cols) as u64;
    let [w, m, v] = [writable(param)?, writable(exp_avg)?, writable(exp_avg_sq)?];
    let grad = match &grad.data {
        Data::F32(grad) => grad.get().address(),
        Data::Bf16(grad) => grad.get().address(),
    };
    Ok(TensorArg { w, grad, m, v, len, weight_decay, first_cta: 0 })
}

fn writable(x: &mut Tensor<Cuda>) -> Result<u64> {
    Ok(match &mut x.data {
        Data::F32(x) => x.make_mut()?.address(),
        Data::Bf16(x) => x.make_mut()?.address(),
    })
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let specs = pairs().map(|(grad, moment)| spec(grad, moment));
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}
