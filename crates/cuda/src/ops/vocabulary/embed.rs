//! Runs `embed` and `embed_backward` on a GPU (`csrc/kernels/vocabulary/embed.cuh`). The backward pass sorts the tokens by shard and id,
//! with one [`PlanPermute`](nibble_core::ops::PlanPermute) per digit; sums chunks of tokens with the same id; and adds the sums of ids
//! that have several chunks.

use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, Launch, plain_args};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::plain::row_tree;
use crate::ops::planes::{plain_arg, type_name};
use crate::{Buffer, Cuda, Device};
use nibble_choice::vocabulary::{Digit, EmbedTasks, TASK_WORDS, sorted_tokens};
use nibble_core::ops::{Embed, EmbedBackward, EmbedOut};
use nibble_core::{DType, Data, Error, Plain, Result};

const THREADS: usize = 256;
/// Units (of a row's elements) per CTA of a lookup.
const UNITS_PER_CTA: usize = 1024;
/// CTAs per SM that sum chunks; each CTA processes chunks in a loop.
const SUM_CTAS: usize = 8;
const TYPES: [DType; 2] = [DType::F32, DType::Bf16];

fn spec(name: &'static str, dtype: Option<DType>, count: usize) -> KernelSpec {
    let dtype = dtype.map(|dtype| ("T", TemplateArg::Type(type_name(dtype))));
    let count = [("kCount", TemplateArg::Int(count as i64))];
    KernelSpec {
        source: "kernels/vocabulary/embed.cuh",
        name,
        args: dtype.into_iter().chain(count).collect(),
    }
}

/// The spec of a kernel that takes part in the sort.
fn sort_spec(name: &'static str) -> KernelSpec {
    let args = vec![("kThreads", TemplateArg::Int(THREADS as i64))];
    KernelSpec { source: "kernels/vocabulary/embed.cuh", name, args }
}

fn launch(ctas: usize) -> Launch {
    Launch { ctas: ctas as u32, threads: THREADS as u32, cluster: 1, shared_bytes: 0 }
}

/// Runs [`Embed`] on the GPU.
pub(crate) fn embed(cuda: &Cuda, op: Embed<'_, Cuda>) -> Result<EmbedOut<Cuda>> {
    const OP: &str = "embed";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("table", op.table)?;
    let ids = buffers.buffer("ids", op.ids)?;
    let (device, table) = (cuda.device(), op.table.f32(OP, "table")?.get());
    let out = op.result(cuda)?;
    look_up(device, &op, (table, ids), &out)?;
    Ok(out)
}

fn look_up(
    device: &Device,
    op: &Embed<'_, Cuda>,
    (table, ids): (&Buffer<f32>, &Buffer<i32>),
    out: &EmbedOut<Cuda>,
) -> Result<()> {
    let (vocab, d) = op.table.shape();
    if ids.is_empty() {
        return Ok(());
    }
    let count = row_tree::count_of(d);
    // Each id is checked even if rows have no columns.
    let units = d.div_ceil(count).max(1);
    let tasks = ids.len().saturating_mul(units);
    if tasks.max(vocab).max(d) >= (1 << 31) - UNITS_PER_CTA {
        let got = format!("{} rows of {d} columns, of {vocab}", ids.len());
        return Err(Error::shape("embed", "ids.len()", got, "below 2^31, in units of 16 bytes"));
    }
    let [tasks_arg, units, vocab, d] = [tasks, units, vocab, d].map(|n| n as u32);
    let by_units = Divider::by(units);
    let kernel = device.kernel(&spec("nib::embed", Some(op.dtype), count))?;
    let (x, bad_ids) = (plain_arg(&out.x).0, out.bad_ids.get());
    // SAFETY: `BufferCheck` ensured that the embedding is `[vocab, d]`, and the kernel compares ids with vocab; x
    // has one row per id.
    unsafe {
        kernel.launch(
            launch(tasks.div_ceil(UNITS_PER_CTA)),
            &[table, ids, x, bad_ids, &tasks_arg, &units, &by_units, &vocab, &d],
        )
    }
}

/// Mirrors the device struct `EmbedKeys`, which computes the sort keys of tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Keys {
    tokens: u32,
    vocab: u32,
    /// A key above all others.
    none: u32,
    by_shard: Divider,
}
plain_args!(Keys);

impl Keys {
    fn new(tokens: usize, shards: usize, vocab: usize) -> Result<Self> {
        let keys = shards.saturating_mul(vocab);
        if keys.max(tokens) >= (1 << 31) - (1 << 16) {
            let got = format!("{tokens} tokens, {shards} shards of {vocab} ids");
            return Err(Error::shape("embed_backward", "rows of grad", got, "both below 2^31 − 2^16"));
        }
        let by_shard = Divider::by((tokens / shards) as u32);
        Ok(Self { tokens: tokens as u32, vocab: vocab as u32, none: keys as u32, by_shard })
    }

    /// Sorts the tokens by key; tokens with the same key stay in order.
    fn sort(&self, cuda: &Cuda, ids: &Buffer<i32>) -> Result<Buf<i32>> {
        let (device, tokens) = (cuda.device(), self.tokens as usize);
        let kernel = device.kernel(&sort_spec("nib::embed_digits"))?;
        sorted_tokens(cuda, tokens, self.none, |Digit { shift, values }, order, digit, as_they_are| {
            let (mask, sorted) = (values.next_power_of_two() as u32 - 1, order.map(Buf::get));
            let (digit, as_they_are) = (digit.get(), as_they_are.get());
            let launch = launch(tokens.div_ceil(THREADS));
            // SAFETY: ids, digit and the orders have one value per token; an order contains each
            // token once.
            unsafe { kernel.launch(launch, &[ids, &sorted, digit, as_they_are, self, &shift, &mask]) }
        })
    }
}

/// Runs [`EmbedBackward`] on the GPU.
pub(crate) fn embed_backward(cuda: &Cuda, op: EmbedBackward<'_, Cuda>) -> Result<()> {
    const OP: &str = "embed_backward";
    op.check()?;
    if op.shards == 0 {
        return Err(Error::shape(OP, "shards", 0, "at least 1"));
    }
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("dy", op.dy)?;
    buffers.tensor("grad", op.grad)?;
    let ids = buffers.values("ids", op.ids, op.dy.rows)?;
    let Some(sizes) = EmbedTasks::of(&op) else { return Ok(()) };
    let (tokens, d) = op.dy.shape();
    let (vocab, grad_type) = (op.grad.rows / op.shards, op.grad.dtype());
    let keys = Keys::new(tokens, op.shards, vocab)?;
    let Data::F32(grad) = &mut op.grad.data else {
        return Err(Error::shape(OP, "type of grad", grad_type, DType::F32));
    };
    let grad = grad.make_mut()?;
    let order = keys.sort(cuda, ids)?;
    let tasks = Tasks::new(cuda.device(), sizes, &keys, ids, order.get())?;
    match &op.dy.data {
        Data::F32(dy) => tasks.add(cuda.device(), DType::F32, dy.get(), d, grad),
        Data::Bf16(dy) => tasks.add(cuda.device(), DType::Bf16, dy.get(), d, grad),
    }
}

/// The kernels' `EmbedTask`s, four words each.
struct Tasks<'a> {
    sizes: EmbedTasks,
    tokens: usize,
    order: &'a Buffer<i32>,
    chunks: Buffer<i32>,
    runs: Buffer<i32>,
    /// The numbers of chunks and of runs.
    counts: Buffer<u64>,
}

impl<'a> Tasks<'a> {
    fn new(
        device: &Device,
        sizes: EmbedTasks,
        keys: &Keys,
        ids: &Buffer<i32>,
        order: &'a Buffer<i32>,
    ) -> Result<Self> {
        let tokens = keys.tokens as usize;
        let counts = device.counters(2)?;
        let [chunks, runs] = [tokens, sizes.most_runs].map(|tasks| device.alloc::<i32>(TASK_WORDS * tasks));
        let (chunks, runs) = (chunks?, runs?);
        let kernel = device.kernel(&sort_spec("nib::embed_chunks"))?;
        // SAFETY: ids and order have one value per token; no token starts more than one chunk, and there are at most `most_runs` runs
        // of several chunks.
        unsafe {
            kernel.launch(launch(tokens.div_ceil(THREADS)), &[ids, order, &chunks, &runs, &counts, keys])?;
        }
        Ok(Self { sizes, tokens, order, chunks, runs, counts })
    }

    /// Adds the sums of rows of dy to grad.
    fn add<T: Plain>(
        &self,
        device: &Device,
        dtype: DType,
        dy: &Buffer<T>,
        d: usize,
        grad: &mut Buffer<f32>,
    ) -> Result<()> {
        let count = row_tree::count_of(d);
        let (blocks, close_blocks) = (d.div_ceil(THREADS * count), row_tree::blocks_of(d));
        if d >= 1 << 30 || self.tokens.saturating_mul(close_blocks) >= 1 << 31 {
            let got = format!("{} x {d}", self.tokens);
            return Err(Error::shape("embed_backward", "dy", got, "below 2^31 blocks of 128 columns"));
        }
        let partial = device.alloc::<f32>(self.sizes.rows * d)?;
        let ctas = SUM_CTAS * device.info().num_sms as usize;
        let sums = device.kernel(&spec("nib::embed_sums", Some(dtype), count))?;
        let close = device.kernel(&spec("nib::embed_close", None, count))?;
        let [d_arg, blocks_arg, close_arg] = [d, blocks, close_blocks].map(|n| n as u32);
        // SAFETY: `check` and `BufferCheck` ensured that dy has one row per token and grad one row per key, of d values each. The tasks
        // were computed from the same tokens and keys, and the rows of `partial` that they name are below 1/32 of the number of tokens,
        // rounded up.
        unsafe {
            sums.launch(
                launch(ctas.min(self.tokens * blocks)),
                &[dy, self.order, &self.chunks, &self.counts, &*grad, &partial, &d_arg, &blocks_arg],
            )?;
            close.launch(
                launch(ctas.min(self.runs.len() / TASK_WORDS * close_blocks)),
                &[&partial, &self.runs, &self.counts, &*grad, &d_arg, &close_arg],
            )
        }
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let counts = row_tree::COUNTS;
    let typed =
        |name| TYPES.into_iter().flat_map(move |dtype| counts.map(|count| spec(name, Some(dtype), count)));
    let sort = ["nib::embed_digits", "nib::embed_chunks"].map(sort_spec);
    let close = counts.map(|count| spec("nib::embed_close", None, count));
    let all = typed("nib::embed").chain(sort).chain(typed("nib::embed_sums")).chain(close);
    all.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_kernels_cannot_count_are_refused() {
        assert!(Keys::new(8, 8, 1 << 28).is_err());
        assert!(Keys::new(8, 8, 1 << 20).is_ok());
    }
}
