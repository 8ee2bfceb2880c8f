//! Runs `attention_decode` on a GPU (`csrc/kernels/attention/attention_decode.cuh`): one CTA per query head, on the
//! CUDA cores.

use super::sinks_of;
use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{plain_address, plain_arg, type_name};
use nibble_choice::attention::{HEAD_LIMIT, check_heads};
use nibble_core::ops::AttentionDecode;
use nibble_core::{DType, Error, Result, Tensor};

const OP: &str = "attention_decode";
const THREADS: u32 = 256;
// Each element of a head has its own thread.
const _: () = assert!(HEAD_LIMIT <= THREADS as usize);
/// The largest number of keys. Each key has a weight of 4 bytes in shared memory: 192 KiB in total, in addition to
/// the kernel's own 4 KiB.
const MOST_KEYS: usize = 48 << 10;

/// Runs [`AttentionDecode`] on the GPU.
pub(crate) fn attention_decode(cuda: &Cuda, op: AttentionDecode<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    for (argument, x) in [("q", op.q), ("k", op.k), ("v", op.v)] {
        buffers.tensor(argument, x)?;
    }
    let sinks = sinks_of(&buffers, op.sinks)?;
    let AttentionDecode { q, k, v, head_dim, value_dim, scale, first, len, .. } = op;
    check_heads(OP, (head_dim, value_dim))?;
    let seen = len - first;
    if seen > MOST_KEYS {
        return Err(Error::shape(OP, "keys", seen, format!("at most {MOST_KEYS} on a GPU")));
    }
    let device = cuda.device();
    let (heads, kv_heads) = (q.cols / head_dim, k.cols / head_dim);
    let out = op.result(cuda)?;
    if heads == 0 {
        return Ok(out);
    }
    let launch =
        Launch { ctas: heads as u32, threads: THREADS, cluster: 1, shared_bytes: seen * size_of::<f32>() };
    let [group, kv_heads, keys] = [heads / kv_heads, kv_heads, seen].map(|n| n as u32);
    let (key_dim, value_dim) = (head_dim as u32, value_dim as u32);
    let kernel = device.kernel(&spec(q.dtype(), sinks.is_some()))?;
    // The kernel's first key is the first that the query sees.
    let from_first = |x: &Tensor<Cuda>| plain_address(x) + (first * x.cols * x.dtype().size_bytes()) as u64;
    let (k, v) = (from_first(k), from_first(v));
    let [q, to] = [q, &out].map(|x| plain_arg(x).0);
    let args: [&dyn KernelArg; 11] =
        [q, &k, &v, to, &keys, &group, &kv_heads, &key_dim, &value_dim, &scale, &sinks];
    // SAFETY: `check` and `BufferCheck` held q to whole heads, k and v to at least `len` rows of their heads, of which the kernel reads those from `first`
    // on, all of the instance's type, and sinks to a number of each; out was made of as many heads of values and is not yet shared.
    unsafe { kernel.launch(launch, &args) }?;
    Ok(out)
}

fn spec(dtype: DType, sinks: bool) -> KernelSpec {
    KernelSpec {
        source: "kernels/attention/attention_decode.cuh",
        name: "nib::attention_decode",
        args: vec![("T", TemplateArg::Type(type_name(dtype))), ("kSinks", TemplateArg::Bool(sinks))],
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let of =
        |(dtype, sinks)| Instance { spec: spec(dtype, sinks), shared_bytes: MOST_KEYS * size_of::<f32>() };
    [DType::F32, DType::Bf16].into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]).map(of).collect()
}
