//! Runs `assign_ranks`, `pack_slots` and `unpack_slots` on a GPU
//! (`csrc/kernels/routing/slots.cuh`).

use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::KernelSpec;
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use nibble_core::ops::{AssignRanks, PackSlots, ReceivedSlots, SlotRanks, UnpackSlots, record_words};
use nibble_core::{Error, Result};

const THREADS: u32 = 256;
/// The most CTAs of `assign_ranks` per SM; the number is small because all CTAs add their sums to the
/// same few counts.
const ASSIGN_CTAS: u32 = 4;
/// The most ranks, because a CTA has two counts per rank in shared memory.
const MOST_RANKS: usize = 4096;

fn spec(name: &'static str) -> KernelSpec {
    KernelSpec { source: "kernels/routing/slots.cuh", name, args: Vec::new() }
}

/// A launch of `threads` threads (at least one, below 2^31), but at most `most_ctas` CTAs.
fn launch(threads: u32, most_ctas: u32, shared_bytes: usize) -> Launch {
    Launch { ctas: threads.div_ceil(THREADS).min(most_ctas), threads: THREADS, cluster: 1, shared_bytes }
}

/// The number of bytes of shared memory for a CTA's counts.
fn count_bytes(world: usize) -> usize {
    8 * world
}

/// Runs [`AssignRanks`] on the GPU.
pub(crate) fn assign_ranks(cuda: &Cuda, op: AssignRanks<'_, Cuda>) -> Result<SlotRanks<Cuda>> {
    const OP: &str = "assign_ranks";
    op.check()?;
    if op.world > MOST_RANKS {
        return Err(Error::Unsupported {
            op: OP,
            format: format!("{} ranks", op.world),
            why: format!("the kernel counts up to {MOST_RANKS}"),
        });
    }
    let expert = BufferCheck::by(OP, cuda).buffer("expert", op.expert)?;
    let (device, len) = (cuda.device(), expert.len());
    let out = op.result(cuda)?;
    if len > 0 {
        let [rank, first, counts] = [&out.rank, &out.first, &out.counts].map(Buf::get);
        // `check` ensured that all of these numbers are below 2^31.
        let [slots, top_k, experts_each, world] =
            [len, op.top_k, op.experts_each, op.world].map(|n| n as u32);
        let launch = launch(slots, ASSIGN_CTAS * device.info().num_sms, count_bytes(op.world));
        let (by_top_k, by_experts_each) = (Divider::by(top_k), Divider::by(experts_each));
        let experts = experts_each * world;
        let args: [&dyn KernelArg; 10] =
            [expert, rank, first, counts, &slots, &top_k, &by_top_k, &experts, &by_experts_each, &world];
        // SAFETY: `expert` is on this device (`BufferCheck`); `rank` and `first` have as many values, `slots`; `counts` has two values per
        // rank, and there are at most `experts / experts_each` ranks. The kernel compares a slot only with earlier slots of the same
        // token.
        unsafe { device.kernel(&spec("nib::assign_ranks"))?.launch(launch, &args) }?;
    }
    Ok(out)
}

/// Runs [`PackSlots`] on the GPU.
pub(crate) fn pack_slots(cuda: &Cuda, op: PackSlots<'_, Cuda>) -> Result<Buf<i32>> {
    op.check()?;
    let buffers = BufferCheck::by("pack_slots", cuda);
    let (slot, expert) = (buffers.buffer("slot", op.slot)?, buffers.buffer("expert", op.expert)?);
    let weight = buffers.values("weight", op.weight, expert.len())?;
    let token_id = buffers.values("token_id", op.token_id, expert.len() / op.top_k)?;
    let (device, per_record) = (cuda.device(), record_words(op.top_k));
    let out = op.result(cuda)?;
    let records = out.get();
    if !records.is_empty() {
        // `check` ensured that all of these numbers are below 2^31.
        let [words, slots, top_k, per_record, experts_each] =
            [records.len(), expert.len(), op.top_k, per_record, op.experts_each].map(|n| n as u32);
        let [by_words, by_top_k, by_experts_each] = [per_record, top_k, experts_each].map(Divider::by);
        let args: [&dyn KernelArg; 12] = [
            slot,
            expert,
            weight,
            token_id,
            records,
            &words,
            &slots,
            &top_k,
            &by_words,
            &by_top_k,
            &experts_each,
            &by_experts_each,
        ];
        // SAFETY: all buffers are on this device (`BufferCheck`); `records` has `words` values, as many records as `slot` has slots.
        // Whatever the values of `slot`, the kernel reads `expert`, `weight` and `token_id` only for the token of a slot below `slots`,
        // which `check` ensured to be a multiple of `top_k`.
        unsafe {
            device.kernel(&spec("nib::pack_slots"))?.launch(launch(words, u32::MAX, 0), &args)?;
        }
    }
    Ok(out)
}

/// Runs [`UnpackSlots`] on the GPU.
pub(crate) fn unpack_slots(cuda: &Cuda, op: UnpackSlots<'_, Cuda>) -> Result<ReceivedSlots<Cuda>> {
    op.check()?;
    let records = BufferCheck::by("unpack_slots", cuda).buffer("records", op.records)?;
    let out = op.result(cuda)?;
    if op.records() > 0 {
        let (token_id, expert, weight) = (out.token_id.get(), out.expert.get(), out.weight.get());
        // `check` ensured that all of these numbers are below 2^31.
        let [words, top_k, per_record] = [records.len(), op.top_k, record_words(op.top_k)].map(|n| n as u32);
        let by_words = Divider::by(per_record);
        let args: [&dyn KernelArg; 7] = [records, token_id, expert, weight, &words, &top_k, &by_words];
        // SAFETY: `records` is on this device (`BufferCheck`) and has `words` values, which `check` ensured to be whole records; `token_id`
        // has one value per record, and `expert` and `weight` have `top_k` values per record.
        unsafe {
            cuda.device().kernel(&spec("nib::unpack_slots"))?.launch(launch(words, u32::MAX, 0), &args)?;
        }
    }
    Ok(out)
}

/// Every kernel instance of this module, with the most shared memory that any launch requests.
pub(crate) fn instances() -> Vec<Instance> {
    let instance = |name, shared_bytes| Instance { spec: spec(name), shared_bytes };
    vec![
        instance("nib::assign_ranks", count_bytes(MOST_RANKS)),
        instance("nib::pack_slots", 0),
        instance("nib::unpack_slots", 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_a_thread_and_ranks_are_assigned_by_few_ctas() {
        assert_eq!([1, 256, 257].map(|words| launch(words, u32::MAX, 0).ctas), [1, 1, 2]);
        assert_eq!(launch((1 << 31) - 1, u32::MAX, 0).ctas, 1 << 23);
        assert_eq!([1, 300_000].map(|slots| launch(slots, ASSIGN_CTAS * 132, 64).ctas), [1, 528]);
        // A CTA can have 48 KiB of shared memory without an opt-in for more.
        assert!(count_bytes(MOST_RANKS) <= 48 << 10);
    }
}
