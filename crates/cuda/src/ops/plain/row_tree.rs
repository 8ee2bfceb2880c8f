//! Sums of rows by a tree over neighbours (`csrc/kernels/plain/row_tree.cuh`): adds the sums of chunks of rows to
//! one row.

use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::ops::Instance;
use crate::{Buffer, Device};
use nibble_core::{Error, Result};

/// Threads per CTA; the next constant is the number of threads with adjacent columns.
pub(crate) const THREADS: u32 = 256;
const QUADS: usize = 32;
/// The number of rows that a launch reduces to one row.
const GROUP: usize = 256;
/// Columns that a thread may sum at once.
pub(crate) const COUNTS: [usize; 2] = [4, 1];

/// Columns per thread: 16 bytes if rows are multiples of 16 bytes, otherwise one column.
pub(crate) fn count_of(cols: usize) -> usize {
    if cols.is_multiple_of(4) { 4 } else { 1 }
}

/// The number of CTAs that cover the columns.
pub(crate) fn blocks_of(cols: usize) -> usize {
    cols.div_ceil(QUADS * count_of(cols))
}

fn spec(count: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/plain/row_tree.cuh",
        name: "nib::close_level",
        args: vec![("kCount", TemplateArg::Int(count as i64))],
    }
}

/// A stack of F32 matrices, each of which is reduced to one row.
pub(crate) struct Stack {
    /// The rows `[shards · rows, cols]`.
    pub sums: Buffer<f32>,
    pub shards: usize,
    /// Number of rows per shard, at least one.
    pub rows: usize,
    /// Number of columns, at least one.
    pub cols: usize,
}

impl Stack {
    /// Adds the tree sum of each shard's rows to the shard's row of `into` `[shards, cols]`.
    pub fn add_to(self, device: &Device, op: &'static str, into: &mut Buffer<f32>) -> Result<()> {
        let Self { mut sums, shards, mut rows, cols } = self;
        let (kernel, blocks) = (device.kernel(&spec(count_of(cols)))?, blocks_of(cols));
        loop {
            let groups = rows.div_ceil(GROUP);
            let ctas = shards.saturating_mul(groups).saturating_mul(blocks);
            if ctas.max(rows).max(cols) >= 1 << 31 {
                let got = format!("{shards} shards of {rows} sums of {cols} columns");
                return Err(Error::shape(op, "rows", got, "fewer than 2^31 sums"));
            }
            let launch = Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
            let last = groups == 1;
            let next = if last { None } else { Some(device.alloc::<f32>(shards * groups * cols)?) };
            let out = next.as_ref().unwrap_or(into);
            let [rows_arg, cols_arg, groups_arg, blocks] = [rows, cols, groups, blocks].map(|n| n as u32);
            // SAFETY: `sums` has shards · rows rows and `out` has shards · groups rows, of `cols` values each; groups is 1 for
            // `into`, which has one row per shard. The kernel waits for earlier kernels.
            unsafe {
                let args: [&dyn KernelArg; 7] =
                    [&sums, out, &rows_arg, &cols_arg, &groups_arg, &blocks, &i32::from(last)];
                kernel.launch_early(launch, &args)?;
            }
            match next {
                Some(next) => (sums, rows) = (next, groups),
                None => return Ok(()),
            }
        }
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    COUNTS.map(|count| Instance { spec: spec(count), shared_bytes: 0 }).to_vec()
}
