//! Runs `combine_tree` and `find_slots` on a GPU (`csrc/kernels/routing/combine_tree.cuh`).
//!
//! Indices and leaves come from a plan on the device, for which the host does not wait. Whatever the values of indices and leaves,
//! kernels only read rows that exist.

use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{numbers_per_load, plain_arg, plain_or_null, type_name};
use crate::ops::{Instance, SharedSize};
use nibble_choice::routing::MOST_TREE_SLOTS;
use nibble_core::ops::{CombineTree, FindSlots};
use nibble_core::{DType, Error, Result, Tensor};

const SOURCE: &str = "kernels/routing/combine_tree.cuh";
const THREADS: usize = 256;
/// Number of units of a row per warp.
const CHUNK: usize = 128;

/// How [`CombineTree`] is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Config {
    dtype: DType,
    /// Number of columns per unit.
    count: usize,
    /// Number of units per row.
    units_per_row: usize,
    /// Number of warps per token.
    chunks: usize,
    /// Total number of warps.
    items: usize,
    /// Number of partial sums per thread in shared memory.
    entries: usize,
}

impl Config {
    /// A unit is 16 bytes if rows are multiples of 16 bytes, otherwise one column.
    fn choose(dtype: DType, tokens: usize, cols: usize, tree: (usize, usize)) -> Result<Self> {
        const OP: &str = "combine_tree";
        let (top_k, leaves) = tree;
        if top_k > MOST_TREE_SLOTS {
            return Err(Error::Unsupported {
                op: OP,
                format: format!("{top_k} slots a token"),
                why: format!("a warp sorts up to {MOST_TREE_SLOTS}"),
            });
        }
        if cols.checked_mul(dtype.size_bytes()).is_none_or(|bytes| bytes >= 1 << 32) {
            return Err(Error::shape(OP, "bytes of a row", format!("{cols} of {dtype}"), "below 2^32"));
        }
        let wide = numbers_per_load(dtype);
        let count = if cols.is_multiple_of(wide) { wide } else { 1 };
        let units_per_row = cols / count;
        let chunks = units_per_row.div_ceil(CHUNK);
        let items = tokens.checked_mul(chunks).filter(|&items| items <= i32::MAX as usize);
        let items = items.ok_or_else(|| {
            let (got, most) = (format!("{tokens} tokens of {cols}"), CHUNK * count);
            Error::shape(OP, "rows", got, format!("below 2^31 · {most} results"))
        })?;
        Ok(Self { dtype, count, units_per_row, chunks, items, entries: tree_entries(top_k, leaves) })
    }

    fn spec(&self) -> KernelSpec {
        let args = vec![
            ("T", TemplateArg::Type(type_name(self.dtype))),
            ("kCount", TemplateArg::Int(self.count as i64)),
        ];
        KernelSpec { source: SOURCE, name: "nib::combine_tree", args }
    }

    fn launch(&self) -> Launch {
        let ctas = self.items.div_ceil(THREADS / 32) as u32;
        let shared_bytes = self.entries * THREADS * self.count * self.dtype.size_bytes();
        Launch { ctas, threads: THREADS as u32, cluster: 1, shared_bytes }
    }

    fn run(&self, cuda: &Cuda, op: &CombineTree<'_, Cuda>, out: &Tensor<Cuda>) -> Result<()> {
        if self.items == 0 {
            return Ok(());
        }
        // No index exceeds 2^31, so further rows cannot be reached. `choose` and `check` ensured that the other sizes are
        // below 2^31.
        let num_rows = op.rows.rows.min(1 << 31) as u32;
        let [items, units_per_row, chunks, leaves] =
            [self.items, self.units_per_row, self.chunks, op.leaves].map(|n| n as u32);
        let (by_chunks, top_k) = (Divider::by(chunks), op.top_k as i32);
        let (rows, plus, out) = (plain_arg(op.rows).0, plain_or_null(op.plus), plain_arg(out).0);
        let (index, leaf) = (op.index.get(), op.leaf.get());
        let kernel = cuda.device().kernel(&self.spec())?;
        let args: [&dyn KernelArg; 12] = [
            rows,
            index,
            leaf,
            &num_rows,
            &leaves,
            plus,
            out,
            &items,
            &units_per_row,
            &chunks,
            &by_chunks,
            &top_k,
        ];
        // SAFETY: `BufferCheck` ensured that `rows` has at least `num_rows` rows. `plus` is as large as `out`, and `check` ensured that
        // `index` and `leaf` have `top_k` values for each row of `out`. The kernel reads no other row, writes only the units of its
        // items, and stores at most `entries` sums per thread.
        unsafe { kernel.launch(self.launch(), &args) }
    }
}

/// The most partial sums that a thread holds at a time, as computed by the device's `tree_entries`. Pending sums belong to nodes of
/// strictly increasing depth, or to a leaf. With four rows or fewer, a thread sums two units at a time.
fn tree_entries(top_k: usize, leaves: usize) -> usize {
    let height = leaves.max(1).next_power_of_two().ilog2() as usize;
    let waiting = (top_k - 1).min(height + 1);
    if top_k <= 2 { 0 } else { waiting.max(2 * waiting.min(3)) }
}

/// Runs [`CombineTree`] on the GPU.
pub(crate) fn combine_tree(cuda: &Cuda, op: CombineTree<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    let buffers = BufferCheck::by("combine_tree", cuda);
    buffers.tensor("rows", op.rows)?;
    buffers.buffer("index", op.index)?;
    buffers.buffer("leaf", op.leaf)?;
    op.plus.map_or(Ok(()), |plus| buffers.tensor("plus", plus))?;
    let config = Config::choose(op.rows.dtype(), op.tokens(), op.rows.cols, (op.top_k, op.leaves))?;
    let out = op.result(cuda)?;
    config.run(cuda, &op, &out)?;
    Ok(out)
}

fn find_spec() -> KernelSpec {
    KernelSpec { source: SOURCE, name: "nib::find_slots", args: Vec::new() }
}

/// Runs [`FindSlots`] on the GPU.
pub(crate) fn find_slots(cuda: &Cuda, op: FindSlots<'_, Cuda>) -> Result<Buf<i32>> {
    op.check()?;
    let row_slot = BufferCheck::by("find_slots", cuda).buffer("row_slot", op.row_slot)?;
    let mut out = op.result(cuda)?;
    if op.slots == 0 {
        return Ok(out);
    }
    // Fills every byte with 0xFF, so that every value is −1.
    out.in_place().fill(0xFF)?;
    if !row_slot.is_empty() {
        // `check` ensured that both are below 2^31.
        let [rows, slots] = [row_slot.len(), op.slots].map(|n| n as u32);
        let ctas = rows.div_ceil(THREADS as u32);
        let launch = Launch { ctas, threads: THREADS as u32, cluster: 1, shared_bytes: 0 };
        // SAFETY: both buffers are on this device (`BufferCheck`); `row_slot` has `rows` values and `out` has `slots` values, and the
        // kernel writes only below `slots`.
        unsafe { cuda.device().kernel(&find_spec())?.launch(launch, &[row_slot, out.get(), &rows, &slots]) }?;
    }
    Ok(out)
}

/// One configuration per kernel instance, for rows of one unit.
fn configs(entries: usize) -> impl Iterator<Item = Config> {
    [DType::F32, DType::Bf16].into_iter().flat_map(move |dtype| {
        [numbers_per_load(dtype), 1].map(|count| Config {
            dtype,
            count,
            units_per_row: 1,
            chunks: 1,
            items: 1,
            entries,
        })
    })
}

/// Every kernel instance of this module, with the most shared memory that any launch requests.
pub(crate) fn instances() -> Vec<Instance> {
    let instance =
        |config: Config| Instance { spec: config.spec(), shared_bytes: config.launch().shared_bytes };
    let trees = configs(tree_entries(MOST_TREE_SLOTS, i32::MAX as usize)).map(instance);
    trees.chain([Instance { spec: find_spec(), shared_bytes: 0 }]).collect()
}

/// The shared-memory sizes for the pending sums.
pub(crate) fn shared_sizes() -> Vec<SharedSize> {
    let slots = [1, 2, 3, 4, 5, 8, 9, MOST_TREE_SLOTS];
    let leaves = [1, 2, 3, 12, 64, 256, i32::MAX as usize];
    let trees = slots.into_iter().flat_map(|top_k| leaves.map(|leaves| (top_k, leaves)));
    let of = |(top_k, leaves)| {
        configs(tree_entries(top_k, leaves)).map(move |config| SharedSize {
            source: SOURCE,
            expression: format!(
                "nib::combine_tree_shared_bytes<{}, {}>({top_k}, {leaves})",
                type_name(config.dtype),
                config.count
            ),
            bytes: config.launch().shared_bytes,
        })
    };
    trees.flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warp_sums_a_part_of_a_token_16_bytes_at_a_time_where_rows_allow_it() {
        for (dtype, cols, count, chunks) in [
            (DType::Bf16, 7168, 8, 7),
            (DType::Bf16, 300, 1, 3),
            (DType::F32, 300, 4, 1),
            (DType::F32, 33, 1, 1),
        ] {
            let config = Config::choose(dtype, 5, cols, (8, 256)).unwrap();
            assert_eq!((config.count, config.chunks), (count, chunks), "{dtype} {cols}");
            assert_eq!(config.items, 5 * chunks);
            assert_eq!(config.launch().ctas as usize, (5 * chunks).div_ceil(8));
            assert!(instances().iter().any(|instance| instance.spec == config.spec()));
        }
        assert_eq!(Config::choose(DType::F32, 0, 16, (1, 4)).unwrap().items, 0);
        assert!(Config::choose(DType::F32, 1 << 31, 4, (1, 4)).is_err());
        for (dtype, cols) in [(DType::F32, 1 << 30), (DType::Bf16, 1 << 31), (DType::F32, usize::MAX)] {
            let why = Config::choose(dtype, 1, cols, (2, 4)).unwrap_err().to_string();
            assert!(why.contains("bytes of a row") && why.contains("below 2^32"), "{why}");
        }
        let why = Config::choose(DType::F32, 1, 4, (33, 64)).unwrap_err().to_string();
        assert!(why.contains("33 slots a token") && why.contains("up to 32"), "{why}");
    }

    #[test]
    fn as_many_sums_wait_as_rows_and_the_height_of_the_tree_allow() {
        for (top_k, leaves, entries) in
            [(1, 64, 0), (2, 64, 0), (3, 64, 4), (4, 64, 6), (8, 256, 7), (8, 8, 6), (32, 64, 7), (8, 1, 2)]
        {
            assert_eq!(tree_entries(top_k, leaves), entries, "{top_k} of {leaves}");
        }
        let most = instances().into_iter().map(|instance| instance.shared_bytes).max().unwrap();
        assert_eq!(most, 31 * 256 * 16);
    }
}
