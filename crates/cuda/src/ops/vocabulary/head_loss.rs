//! Runs `head_loss` on a GPU: the two kernels that belong to it alone (`csrc/kernels/vocabulary/head_loss.cuh`).
//! `nibble-choice` defines the sequence of operations for each chunk of tokens.

use super::cross_entropy::TargetRows;
use crate::Cuda;
use crate::compile::jit::KernelSpec;
use crate::launch::Launch;
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use nibble_choice::head_loss as sequence;
use nibble_core::ops::{HeadLoss, HeadLossOut};
use nibble_core::{Backend, DType, Data, Error, Groups, Result, Tensor};

const OP: &str = "head_loss";
const SOURCE: &str = "kernels/vocabulary/head_loss.cuh";
const THREADS: u32 = 256;
/// Gradient elements that a CTA rounds.
const ROUNDED_PER_CTA: usize = 1024;

/// Runs [`HeadLoss`] on the GPU.
pub(crate) fn head_loss(cuda: &Cuda, op: HeadLoss<'_, Cuda>) -> Result<HeadLossOut<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", op.x)?;
    buffers.operand("w", op.w)?;
    let tokens = op.x.rows;
    buffers.values("targets", op.targets, tokens)?;
    if let Some(ids) = op.random.row_id {
        buffers.values("random.row_id", ids, tokens)?;
    }
    if tokens > i32::MAX as usize {
        return Err(Error::shape(OP, "tokens", tokens, "below 2^31"));
    }
    if let Some(grad) = &op.grad {
        buffers.operand("wt", grad.wt)?;
        buffers.tensor("dw", grad.dw)?;
        buffers.buffer("control", grad.control)?;
    }
    sequence::head_loss(cuda, op)
}

/// Cross-entropy of rows: bit-identical to the CPU for F32 tokens, by the fast kernel for BF16
/// tokens.
pub(crate) fn target_rows(
    rows: &sequence::TargetRows<'_, Cuda>,
    logits: &Tensor<Cuda>,
    loss: &<Cuda as Backend>::Buf<f32>,
    dlogits: Option<&Tensor<Cuda>>,
) -> Result<()> {
    let &sequence::TargetRows { targets, control, bad_ids, tokens } = rows;
    let (targets, control, bad_ids) = (targets.get(), control.map(|control| control.get()), bad_ids.get());
    let rows = TargetRows { op: OP, vocab: logits.cols, targets, control, bad_ids };
    let logits = logits.f32(OP, "logits")?.get();
    match tokens {
        DType::F32 => rows.run(logits, loss.get(), dlogits),
        DType::Bf16 => super::head_rows::run(&rows, logits, loss.get(), dlogits),
    }
}

/// Writes starts and lengths of groups with `each` rows, which start `apart` rows from each other.
pub(crate) fn list_groups(cuda: &Cuda, groups: &Groups<Cuda>, each: usize, apart: usize) -> Result<()> {
    let count = groups.num_groups;
    let too_many = || Error::shape(OP, "shards", count, "below 2^31, as the tokens");
    let [num_groups, rows, far] = [count, each, apart].map(|n| i32::try_from(n).map_err(|_| too_many()));
    let (num_groups, rows, far) = (num_groups?, rows?, far?);
    let launch =
        Launch { ctas: (count as u32 + 1).div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = cuda.device().kernel(&spec("nib::equal_groups"))?;
    // SAFETY: there are as many starts and lengths as the number that is passed to the kernel; the number of
    // tokens, and so every start, is below 2^31.
    unsafe { kernel.launch(launch, &[groups.start.get(), groups.len.get(), &num_groups, &rows, &far]) }
}

/// Rounds a shard's sum to BF16, and writes it to the shard's place in a gradient or adds it there.
pub(crate) fn round_sum(sum: &Tensor<Cuda>, dw: &Tensor<Cuda>, accumulate: bool) -> Result<()> {
    let (Data::F32(sum), Data::Bf16(dw)) = (&sum.data, &dw.data) else {
        return Err(Error::shape(OP, "dw", "F32", "BF16, as its sum lies apart"));
    };
    let (sum, dw) = (sum.get(), dw.get());
    let len = sum.len();
    if dw.len() != len {
        return Err(Error::shape(OP, "dw", dw.len(), len));
    }
    if len == 0 {
        return Ok(());
    }
    let ctas = u32::try_from(len.div_ceil(ROUNDED_PER_CTA))
        .map_err(|_| Error::shape(OP, "dw", len, "below 2^42 values a shard"))?;
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = dw.device().kernel(&spec("nib::round_gradient"))?;
    // SAFETY: both buffers have `len` values and are on this device; dw belongs to the caller and
    // is borrowed mutably.
    unsafe { kernel.launch(launch, &[sum, dw, &(len as u64), &i32::from(accumulate)]) }
}

fn spec(name: &'static str) -> KernelSpec {
    KernelSpec { source: SOURCE, name, args: Vec::new() }
}

/// Every kernel instance of this module, except those of GEMMs and cross-entropy.
pub(crate) fn instances() -> Vec<Instance> {
    let of = |name| Instance { spec: spec(name), shared_bytes: 0 };
    vec![of("nib::equal_groups"), of("nib::round_gradient")]
}
