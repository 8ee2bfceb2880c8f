//! `adamw` on a GPU (`csrc/kernels/step/adamw.cuh`).

use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{Launch, plain_args};
use crate::ops::Instance;
use crate::ops::held::Held;
use crate::ops::routing::permute::type_name;
use crate::{Buffer, Cuda, Device};
use nibble_core::ops::{AdamW, Control};
use nibble_core::{DType, Data, Error, Plain, Result};

const OP: &str = "adamw";
const THREADS: u32 = 256;
/// Numbers a cta steps.
const PER_CTA: usize = 2048;
const TYPES: [DType; 2] = [DType::F32, DType::Bf16];
// The kernel's indices of a step's scalars.
const _: () = assert!(Control::LR == 0 && Control::BIAS1 == 1 && Control::BIAS2 == 2);
const _: () = assert!(Control::GRAD_SCALE == 3 && Control::STOP == 4);

/// `AdamArg` of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct Arg {
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    eps: f32,
    weight_decay: f32,
}
plain_args!(Arg);

fn spec(grad: DType, moment: DType) -> KernelSpec {
    KernelSpec {
        source: "kernels/step/adamw.cuh",
        name: "nib::adamw",
        args: vec![("G", TemplateArg::Type(type_name(grad))), ("M", TemplateArg::Type(type_name(moment)))],
    }
}

/// See [`AdamW`].
pub(crate) fn adamw(cuda: &Cuda, op: AdamW<'_, Cuda>) -> Result<()> {
    op.check()?;
    let held = Held::by(OP, cuda);
    held.tensor("param", op.param)?;
    held.tensor("grad", op.grad)?;
    held.tensor("exp_avg", op.exp_avg)?;
    held.tensor("exp_avg_sq", op.exp_avg_sq)?;
    let control = held.values("control", op.control, Control::LEN)?;
    let step = Step {
        spec: spec(op.grad.dtype(), op.exp_avg.dtype()),
        device: cuda.device(),
        control,
        arg: Arg {
            beta1: op.beta1,
            rest1: 1.0 - op.beta1,
            beta2: op.beta2,
            rest2: 1.0 - op.beta2,
            eps: op.eps,
            weight_decay: op.weight_decay,
        },
    };
    let param_type = op.param.dtype();
    let Data::F32(w) = &mut op.param.data else {
        return Err(Error::shape(OP, "type of param", param_type, DType::F32));
    };
    let w = w.make_mut()?;
    match (&op.grad.data, &mut op.exp_avg.data, &mut op.exp_avg_sq.data) {
        (Data::F32(g), Data::F32(m), Data::F32(v)) => step.run(w, g.get(), m.make_mut()?, v.make_mut()?),
        (Data::F32(g), Data::Bf16(m), Data::Bf16(v)) => step.run(w, g.get(), m.make_mut()?, v.make_mut()?),
        (Data::Bf16(g), Data::F32(m), Data::F32(v)) => step.run(w, g.get(), m.make_mut()?, v.make_mut()?),
        (Data::Bf16(g), Data::Bf16(m), Data::Bf16(v)) => step.run(w, g.get(), m.make_mut()?, v.make_mut()?),
        _ => Err(Error::shape(OP, "type of exp_avg_sq", "another", "that of exp_avg")),
    }
}

/// What is the same for any tensor of these types.
struct Step<'a> {
    spec: KernelSpec,
    device: &'a Device,
    control: &'a Buffer<f32>,
    arg: Arg,
}

impl Step<'_> {
    fn run<G: Plain, M: Plain>(
        &self,
        w: &mut Buffer<f32>,
        grad: &Buffer<G>,
        m: &mut Buffer<M>,
        v: &mut Buffer<M>,
    ) -> Result<()> {
        if w.is_empty() {
            return Ok(());
        }
        let ctas = u32::try_from(w.len().div_ceil(PER_CTA))
            .map_err(|_| Error::shape(OP, "values of param", w.len(), "below 2^43"))?;
        let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let kernel = self.device.kernel(&self.spec)?;
        let len = w.len() as u64;
        // SAFETY: `Held` and `check` held all four tensors to one shape, and their types are the instance's; those that are written are
        // each the only handle of their bytes; control has its `Control::LEN` values.
        unsafe { kernel.launch(launch, &[&*w, grad, &*m, &*v, self.control, &len, &self.arg]) }
    }
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    let pairs = TYPES.into_iter().flat_map(|grad| TYPES.map(|moment| spec(grad, moment)));
    pairs.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}
