//! Runs `plan_permute` on a GPU: a counting sort in two launches. The first counts the slots of each group in each
//! chunk, the second computes the destinations.

use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::buffer_check::BufferCheck;
use crate::ops::{Instance, SharedSize};
use nibble_choice::routing::{PLAN_PASS, PlanChunks};
use nibble_core::ops::PlanPermute;
use nibble_core::{Error, Groups, PermuteMap, Result};
use std::ffi::c_void;

const SOURCE: &str = "kernels/routing/plan_permute.cuh";
const OP: &str = "plan_permute";
const THREADS: usize = 512;
const MOST_GROUPS: usize = 4096;
/// The fewest CTAs of `plan_place`, so that padding is not written by too few CTAs.
const PLACE_CTAS: i32 = 64;

/// Mirrors the device struct `PlanSizes`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sizes {
    slots: i32,
    groups: i32,
    /// Counts per chunk: one count per group, rounded up for 16-byte loads.
    columns: i32,
    /// A chunk has `passes` · [`PLAN_PASS`] slots.
    passes: i32,
    chunks: i32,
    align: i32,
    capacity: i32,
    num_slots: i32,
    /// Number of chunks whose counts a CTA reads at once.
    count_rows: i32,
}

// SAFETY: the pointer and the size are those of the value itself, which consists of plain integers
// in C's layout.
unsafe impl KernelArg for Sizes {
    fn pointer(&self) -> *const c_void {
        std::ptr::from_ref(self).cast()
    }
    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

/// The sizes of a sort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PlanDesc {
    slots: usize,
    top_k: usize,
    num_slots: usize,
    groups: usize,
    align: usize,
    capacity: usize,
}

impl Sizes {
    fn new(desc: &PlanDesc) -> Result<Self> {
        let PlanDesc { slots, top_k, num_slots, groups, align, capacity } = *desc;
        if groups > MOST_GROUPS {
            return Err(Error::Unsupported {
                op: OP,
                format: format!("{groups} experts of a rank"),
                why: format!("the kernel counts up to {MOST_GROUPS}"),
            });
        }
        if slots >= (1 << 31) - (1 << 16) {
            return Err(Error::shape(OP, "expert.len()", slots, "below 2^31 − 2^16"));
        }
        if top_k >= 1 << 31 {
            return Err(Error::shape(OP, "top_k", top_k, "below 2^31"));
        }
        let PlanChunks { columns, passes, chunks } = PlanChunks::new(slots, groups);
        let count_rows = (THREADS / (columns / 8)).clamp(1, 32);
        // `PlanPermute::check` and the conditions above ensure that all sizes fit an i32.
        Ok(Self {
            slots: slots as i32,
            groups: groups as i32,
            columns: columns as i32,
            passes: passes as i32,
            chunks: chunks as i32,
            align: align as i32,
            capacity: capacity as i32,
            num_slots: num_slots as i32,
            count_rows: count_rows as i32,
        })
    }

    /// The launch of `plan_count`, with shared memory for one count per column.
    fn count(&self) -> Launch {
        self.launch(self.chunks, 4 * self.columns as usize)
    }

    /// The launch of `plan_place`, with shared memory for four numbers per column and one number per token. Another
    /// region is used twice: for the counts of several chunks, then for the sorted slots of a pass with each warp's
    /// counts.
    fn place(&self) -> Launch {
        let (columns, count_rows) = (self.columns as usize, self.count_rows as usize);
        let sorted = 4 * PLAN_PASS + THREADS / 32 * 2 * columns;
        let ids = 4 * (PLAN_PASS + 4);
        self.launch(self.chunks.max(PLACE_CTAS), 16 * columns + ids + sorted.max(8 * count_rows * columns))
    }

    fn launch(&self, ctas: i32, shared_bytes: usize) -> Launch {
        Launch { ctas: ctas as u32, threads: THREADS as u32, cluster: 1, shared_bytes }
    }
}

fn spec(name: &'static str) -> KernelSpec {
    let args = vec![("kThreads", TemplateArg::Int(THREADS as i64))];
    KernelSpec { source: SOURCE, name, args }
}

/// Runs [`PlanPermute`] on the GPU. A slot whose expert is out of range counts as unoccupied; the caller determines
/// the order of tokens.
pub(crate) fn plan_permute(cuda: &Cuda, op: PlanPermute<'_, Cuda>) -> Result<PermuteMap<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    let (expert, token_id) = (buffers.buffer("expert", op.expert)?, buffers.buffer("token_id", op.token_id)?);
    let sizes = Sizes::new(&PlanDesc {
        slots: expert.len(),
        top_k: op.top_k,
        num_slots: op.num_slots,
        groups: op.num_groups,
        align: op.align,
        capacity: op.capacity,
    })?;
    let device = cuda.device();
    let out = op.result(cuda)?;
    let counts = device.alloc::<u16>((sizes.chunks * sizes.columns) as usize)?;
    let Groups { start, len, row_id, .. } = &out.groups;
    let [start, len, row_id] = [start, len, row_id].map(Buf::get);
    let [source_row, row_slot, slot_row, found] =
        [&out.source_row, &out.row_slot, &out.slot_row, &out.occupancy.found].map(Buf::get);
    if sizes.chunks > 0 {
        // SAFETY: `expert` is on this device (`BufferCheck`) and has sizes.slots values, `counts` has
        // sizes.columns values per chunk, and there is one CTA per chunk.
        unsafe {
            device.kernel(&spec("nib::plan_count"))?.launch(sizes.count(), &[expert, &counts, &sizes])?
        };
    }
    let (top_k, by_top_k) = (op.top_k as i32, Divider::by(op.top_k as u32));
    // SAFETY: `expert` and `counts` have these sizes; token_id has one value per top_k slots (`PlanPermute::check`). Rows are
    // written only if all rows fit the capacity, for which row_id, source_row and row_slot are allocated, and all occupied slots
    // fit num_slots, for which slot_row is allocated. Before the kernel plan_place waits, it reads only `expert` and `token_id`,
    // which were complete before plan_count; without slots it reads neither.
    unsafe {
        device.kernel(&spec("nib::plan_place"))?.launch_early(
            sizes.place(),
            &[
                expert, token_id, &counts, start, len, row_id, source_row, row_slot, slot_row, found, &sizes,
                &top_k, &by_top_k,
            ],
        )?;
    }
    Ok(out)
}

/// Every kernel instance of this module, with the most shared memory that any launch requests.
pub(crate) fn instances() -> Vec<Instance> {
    let columns = MOST_GROUPS as i32;
    let most = Sizes { columns, count_rows: 1, ..Sizes::default() };
    let instance = |name, launch: Launch| Instance { spec: spec(name), shared_bytes: launch.shared_bytes };
    vec![instance("nib::plan_count", most.count()), instance("nib::plan_place", most.place())]
}

/// The shared-memory sizes for few groups, and for the most groups.
pub(crate) fn shared_sizes() -> Vec<SharedSize> {
    let of = |(columns, count_rows)| {
        let sizes = Sizes { columns, count_rows, ..Sizes::default() };
        SharedSize {
            source: SOURCE,
            expression: format!("nib::plan_place_shared_bytes({columns}, {count_rows})"),
            bytes: sizes.place().shared_bytes,
        }
    };
    [(8, 32), (128, 32), (256, 16), (MOST_GROUPS as i32, 1)].map(of).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(slots: usize, groups: usize) -> Result<Sizes> {
        Sizes::new(&PlanDesc {
            slots,
            top_k: 8,
            num_slots: slots,
            groups,
            align: 128,
            capacity: slots + 128 * groups,
        })
    }

    #[test]
    fn chunks_are_few_and_their_counts_fit_sixteen_bits() {
        let of = |slots| sizes(slots, 128).map(|s| (s.passes, s.chunks)).unwrap();
        assert_eq!([of(0), of(1), of(2048), of(2049)], [(1, 0), (1, 1), (1, 1), (1, 2)]);
        assert_eq!([of(262_144), of(4 << 20), of(1 << 30)], [(1, 128), (8, 256), (16, 32_768)]);
    }

    #[test]
    fn shared_memory_suffices_for_every_number_of_groups() {
        for groups in 1..=MOST_GROUPS {
            let sizes = sizes(1 << 20, groups).unwrap();
            assert!(sizes.columns as usize >= groups && sizes.columns % 8 == 0);
            assert!(sizes.place().shared_bytes <= 232_448 - 1024, "{groups}: {:?}", sizes.place());
        }
        assert!(sizes(1, MOST_GROUPS + 1).unwrap_err().to_string().contains("4097 experts"));
        assert!(sizes(1 << 31, 8).is_err());
    }

    #[test]
    fn more_slots_a_token_than_the_device_can_count_are_an_error() {
        let desc = PlanDesc { slots: 0, top_k: 1 << 31, num_slots: 0, groups: 8, align: 1, capacity: 0 };
        assert!(Sizes::new(&desc).unwrap_err().to_string().contains("`top_k`"));
    }
}
