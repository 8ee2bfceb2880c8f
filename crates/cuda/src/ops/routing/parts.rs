//! Runs `assign_parts` and `join_groups` on a GPU (`csrc/kernels/routing/parts.cuh`).

use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::KernelSpec;
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use nibble_core::ops::{AssignParts, JoinGroups};
use nibble_core::{Groups, Result};

const THREADS: u32 = 256;

fn spec(name: &'static str) -> KernelSpec {
    KernelSpec { source: "kernels/routing/parts.cuh", name, args: Vec::new() }
}

fn launch(threads: u32) -> Launch {
    Launch { ctas: threads.div_ceil(THREADS), threads: THREADS, cluster: 1, shared_bytes: 0 }
}

/// Runs [`AssignParts`] on the GPU.
pub(crate) fn assign_parts(cuda: &Cuda, op: AssignParts<'_, Cuda>) -> Result<Buf<i32>> {
    op.check()?;
    let buffers = BufferCheck::by("assign_parts", cuda);
    let expert = buffers.buffer("expert", op.expert)?;
    let token_id = buffers.values("token_id", op.token_id, expert.len() / op.top_k)?;
    let out = op.result(cuda)?;
    if !expert.is_empty() {
        // `check` ensured that all of these numbers are below 2^31.
        let [slots, top_k, parts, part_tokens] =
            [expert.len(), op.top_k, op.parts, op.part_tokens].map(|n| n as u32);
        let [by_top_k, by_parts, by_part_tokens] = [top_k, parts, part_tokens].map(Divider::by);
        let args: [&dyn KernelArg; 8] =
            [expert, token_id, out.get(), &slots, &by_top_k, &parts, &by_parts, &by_part_tokens];
        // SAFETY: all buffers are on this device (`BufferCheck`); `expert` and `out` have `slots` values, and `token_id` has one value
        // per `top_k` slots.
        unsafe { cuda.device().kernel(&spec("nib::assign_parts"))?.launch(launch(slots), &args) }?;
    }
    Ok(out)
}

/// Runs [`JoinGroups`] on the GPU.
pub(crate) fn join_groups(cuda: &Cuda, op: JoinGroups<'_, Cuda>) -> Result<Groups<Cuda>> {
    op.check()?;
    let num_groups = op.groups.num_groups;
    let buffers = BufferCheck::by("join_groups", cuda);
    let start = buffers.values("groups.start", &op.groups.start, num_groups + 1)?;
    let len = buffers.values("groups.len", &op.groups.len, num_groups)?;
    let out = op.result(cuda)?;
    let [groups, parts] = [out.num_groups, op.parts].map(|n| n as u32);
    let args: [&dyn KernelArg; 6] = [start, len, out.start.get(), out.len.get(), &groups, &parts];
    // SAFETY: all buffers are on this device (`BufferCheck`); there are `parts` groups for each of the `groups` results (`check`), and
    // one start more than there are groups.
    unsafe { cuda.device().kernel(&spec("nib::join_groups"))?.launch(launch(groups + 1), &args) }?;
    Ok(out)
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    ["nib::assign_parts", "nib::join_groups"]
        .map(|name| Instance { spec: spec(name), shared_bytes: 0 })
        .to_vec()
}
