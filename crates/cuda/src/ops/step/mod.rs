//! Runs `begin_step`, `begin_micro_batch`, `collect`, `end_step`, `push_amax` and `balance_bias` on a GPU
//! (`csrc/kernels/step/step.cuh`).

pub(crate) mod adamw;
pub(crate) mod init_normal;
pub(crate) mod sum_squares;
mod tensor_list;

pub(crate) use {
    adamw::adamw,
    init_normal::init_normal,
    sum_squares::{close_squares, sum_squares},
};

use crate::compile::jit::KernelSpec;
use crate::launch::{Launch, plain_args};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::{Buffer, Cuda};
use nibble_core::ops::{
    AmaxRecords, BalanceBias, BeginMicroBatch, BeginStep, Collect, CrossEntropy, EndStep, Entry, EntrySource,
    InputLayout, PushAmax,
};
use nibble_core::{Error, Plain, Result};

const BEGIN_THREADS: u32 = 256;
const MICRO_THREADS: u32 = 1024;
/// Number of CTAs in the cluster of `begin_micro_batch`.
const MICRO_CTAS: u32 = 8;
const COLLECT_THREADS: u32 = 128;
/// Entries per launch, limited by the size of its parameters.
const COLLECT_ENTRIES: usize = 100;
const END_THREADS: u32 = 1024;
const PUSH_THREADS: u32 = 128;
const BALANCE_THREADS: u32 = 256;

fn spec(name: &'static str) -> KernelSpec {
    KernelSpec { source: "kernels/step/step.cuh", name, args: Vec::new() }
}

/// Runs [`BeginStep`] on the GPU.
pub(crate) fn begin_step(cuda: &Cuda, op: BeginStep<'_, Cuda>) -> Result<()> {
    const OP: &str = "begin_step";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    let inputs = buffers.buffer("inputs", op.inputs)?;
    buffers.buffer("clock", op.clock)?;
    buffers.buffer("control", op.control)?;
    buffers.buffer("table", op.table)?;
    let (clock, control, table) = (op.clock.make_mut()?, op.control.make_mut()?, op.table.make_mut()?);
    let ctas = u32::try_from(table.len().div_ceil(BEGIN_THREADS as usize).max(1))
        .map_err(|_| Error::shape(OP, "table.len()", table.len(), "below 2^40"))?;
    let launch = Launch { ctas, threads: BEGIN_THREADS, cluster: 1, shared_bytes: 0 };
    let (slot, cells, told) = (op.layout.slot_len() as u64, table.len() as u64, op.told as u64);
    let kernel = cuda.device().kernel(&spec("nib::begin_step"))?;
    // SAFETY: `check` ensured that the inputs have two slots, and that clock and control have their lengths; the
    // table has `cells` values.
    unsafe { kernel.launch(launch, &[inputs, &*clock, &*control, &*table, &slot, &cells, &told]) }
}

/// Mirrors the device struct `MicroBatch`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct MicroBatchArg {
    slot: u64,
    scalars: u64,
    tokens: u32,
    micro_batches: u32,
    rank: u32,
    ranks: u32,
    apart: u32,
}

/// Runs [`BeginMicroBatch`] on the GPU.
pub(crate) fn begin_micro_batch(cuda: &Cuda, op: BeginMicroBatch<'_, Cuda>) -> Result<()> {
    const OP: &str = "begin_micro_batch";
    op.check()?;
    let InputLayout { tokens, micro_batches, apart } = op.layout;
    if micro_batches == 0 {
        return Err(Error::shape(OP, "micro-batch", 0, "below the step's 0"));
    }
    let small = |argument, value: usize| {
        let fits = u32::try_from(value).ok().filter(|value| *value <= i32::MAX as u32);
        fits.ok_or_else(|| Error::shape(OP, argument, value, "below 2^31"))
    };
    let batch = MicroBatchArg {
        slot: op.layout.slot_len() as u64,
        scalars: InputLayout::SCALARS as u64,
        tokens: small("tokens", tokens)?,
        micro_batches: small("micro_batches", micro_batches)?,
        rank: small("rank", op.rank)?,
        ranks: small("ranks", op.ranks)?,
        apart: apart.into(),
    };
    let buffers = BufferCheck::by(OP, cuda);
    let inputs = buffers.buffer("inputs", op.inputs)?;
    buffers.buffer("clock", op.clock)?;
    for (argument, buf) in [("ids", &*op.ids), ("targets", &*op.targets), ("row_id", &*op.row_id)] {
        buffers.values(argument, buf, tokens)?;
    }
    buffers.values("starts", op.starts, op.layout.starts())?;
    let clock = op.clock.make_mut()?;
    let (ids, targets) = (op.ids.make_mut()?, op.targets.make_mut()?);
    let (starts, row_id) = (op.starts.make_mut()?, op.row_id.make_mut()?);
    let launch = Launch { ctas: MICRO_CTAS, threads: MICRO_THREADS, cluster: MICRO_CTAS, shared_bytes: 0 };
    let kernel = cuda.device().kernel(&spec("nib::begin_micro_batch"))?;
    // SAFETY: `check` ensured that the inputs have two slots, the clock its length and the others `tokens` values (starts has
    // none if the kernel does not write it); the kernel reads no micro-batch past those of the layout.
    unsafe { kernel.launch(launch, &[inputs, &*clock, &*ids, &*targets, &*starts, &*row_id, &batch]) }
}

/// Mirrors the device struct `CollectEntry`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EntryArg {
    source: u64,
    kind: i32,
    values: u32,
    at: u32,
    cells: u32,
    stride: u32,
    capacity: u32,
    slots: u32,
    found: u32,
}

impl EntryArg {
    const NONE: Self =
        Self { source: 0, kind: 0, values: 0, at: 0, cells: 0, stride: 0, capacity: 0, slots: 0, found: 0 };

    /// `entry` must lie within its table.
    fn new(buffers: &BufferCheck<'_>, entry: &Entry<'_, Cuda>) -> Result<Self> {
        fn plane<T: Plain>(
            buffers: &BufferCheck<'_>,
            kind: i32,
            x: &crate::backend::Buf<T>,
        ) -> Result<(i32, u64)> {
            Ok((kind, buffers.buffer("entry.source", x)?.address()))
        }
        let ((kind, source), occupancy) = match &entry.source {
            EntrySource::U64(x) => (plane(buffers, 0, x)?, None),
            EntrySource::I32(x) => (plane(buffers, 1, x)?, None),
            EntrySource::F32(x) => (plane(buffers, 2, x)?, None),
            EntrySource::F64(x) => (plane(buffers, 3, x)?, None),
            EntrySource::Occupancy(x) => (plane(buffers, 4, &x.found)?, Some(x)),
            EntrySource::Largest(x) => (plane(buffers, 5, x)?, None),
        };
        let [capacity, slots, found] =
            occupancy.map_or([0; 3], |x| [x.capacity, x.num_slots, x.found.get().len()]);
        // A stride of 0 means a single cell, to which all values are added in order.
        let cells = if entry.stride == 0 { entry.cells.min(1) } else { entry.cells };
        let words = [entry.source.len(), entry.at, cells, entry.stride, capacity, slots, found];
        let mut small = [0u32; 7];
        for (small, word) in small.iter_mut().zip(words) {
            // The limit is below 2^31 because the kernel adds two such numbers in 32 bits.
            let fits = u32::try_from(word).ok().filter(|word| *word <= i32::MAX as u32);
            *small = fits.ok_or_else(|| Error::shape("collect", "entry", word, "sizes below 2^31"))?;
        }
        let [values, at, cells, stride, capacity, slots, found] = small;
        Ok(Self { source, kind, values, at, cells, stride, capacity, slots, found })
    }

    fn places(&self) -> impl Iterator<Item = usize> + use<> {
        let Self { at, stride, .. } = *self;
        (0..self.cells as usize).map(move |cell| at as usize + cell * stride as usize)
    }
}

/// Mirrors the device struct `CollectEntries`.
#[repr(C)]
#[derive(Clone, Copy)]
struct EntriesArg {
    entry: [EntryArg; COLLECT_ENTRIES],
}
plain_args!(MicroBatchArg, EntriesArg, StepEndArg);

/// The index of the launch to which each entry is assigned. Entries of one launch share no cell, and an entry is
/// assigned to a later launch than all earlier entries that share a cell with it.
fn turns(entries: &[EntryArg], cells: usize) -> Vec<usize> {
    let mut next = vec![0usize; cells];
    let turn_of = |entry: &EntryArg| {
        let turn = entry.places().map(|cell| next[cell]).max().unwrap_or(0);
        entry.places().for_each(|cell| next[cell] = turn + 1);
        turn
    };
    entries.iter().map(turn_of).collect()
}

/// Runs [`Collect`] on the GPU. There is one launch for every [`COLLECT_ENTRIES`] entries, and another
/// launch for each repetition of a cell.
pub(crate) fn collect(cuda: &Cuda, op: Collect<'_, Cuda>) -> Result<()> {
    const OP: &str = "collect";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.buffer("table", op.table)?;
    let entries = op.entries.iter().filter(|entry| !entry.source.is_empty() && entry.cells > 0);
    let entries: Vec<EntryArg> =
        entries.map(|entry| EntryArg::new(&buffers, entry)).collect::<Result<_>>()?;
    if entries.is_empty() {
        return Ok(());
    }
    let table = op.table.make_mut()?;
    let turns = turns(&entries, table.len());
    let kernel = cuda.device().kernel(&spec("nib::collect"))?;
    for turn in 0..=turns.iter().copied().max().unwrap_or(0) {
        let of_turn = entries.iter().zip(&turns).filter(|(_, of)| **of == turn).map(|(entry, _)| *entry);
        let of_turn: Vec<EntryArg> = of_turn.collect();
        for some in of_turn.chunks(COLLECT_ENTRIES) {
            let mut arg = EntriesArg { entry: [EntryArg::NONE; COLLECT_ENTRIES] };
            arg.entry[..some.len()].copy_from_slice(some);
            let launch =
                Launch { ctas: some.len() as u32, threads: COLLECT_THREADS, cluster: 1, shared_bytes: 0 };
            // SAFETY: every source has as many values as its entry says and is on this device; `check` ensured that the cells are
            // in the table, and no two entries of a launch share a cell.
            unsafe { kernel.launch(launch, &[&*table, &arg]) }?;
        }
    }
    Ok(())
}

/// Runs [`PushAmax`] on the GPU. A span whose state is out of range is skipped.
pub(crate) fn push_amax(cuda: &Cuda, op: PushAmax<'_, Cuda>) -> Result<()> {
    const OP: &str = "push_amax";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    let table = buffers.buffer("table", op.table)?.address() + (op.at * size_of::<f64>()) as u64;
    let words = buffers.buffer("spans", op.spans)?;
    let control = buffers.buffer("control", op.control)?;
    buffers.buffer("records", op.records)?;
    let spans = words.len() / AmaxRecords::WORDS;
    if spans == 0 {
        return Ok(());
    }
    let records = op.records.make_mut()?;
    let ctas = u32::try_from(spans).ok().filter(|ctas| *ctas <= i32::MAX as u32);
    let ctas = ctas.ok_or_else(|| Error::shape(OP, "spans", spans, "below 2^31"))?;
    let launch = Launch { ctas, threads: PUSH_THREADS, cluster: 1, shared_bytes: 0 };
    let len = records.len() as u64;
    // SAFETY: `check` ensured that the table has a cell for each span from `at` on, and that the control has its length; the kernel
    // accesses no record past the `len` values.
    unsafe {
        cuda.device()
            .kernel(&spec("nib::push_amax"))?
            .launch(launch, &[&table, words, control, &*records, &len])
    }
}

/// Runs [`BalanceBias`] on the GPU.
pub(crate) fn balance_bias(cuda: &Cuda, op: BalanceBias<'_, Cuda>) -> Result<()> {
    const OP: &str = "balance_bias";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    let tables = buffers.buffer("tables", op.tables)?.address() + (op.at * size_of::<f64>()) as u64;
    let control = buffers.buffer("control", op.control)?;
    buffers.buffer("bias", op.bias)?;
    let cells = op.cells() as u64;
    let bias = op.bias.make_mut()?;
    let [ranks, experts] = [("ranks", op.ranks), ("bias.len()", bias.len())]
        .map(|(argument, n)| i32::try_from(n).map_err(|_| Error::shape(OP, argument, n, "below 2^31")));
    let launch = Launch { ctas: 1, threads: BALANCE_THREADS, cluster: 1, shared_bytes: 0 };
    // SAFETY: `check` ensured that each of the `ranks` tables of `cells` cells has a load for each bias from `at` on, and that
    // the control has its length.
    unsafe {
        cuda.device()
            .kernel(&spec("nib::balance_bias"))?
            .launch(launch, &[&tables, control, &*bias, &cells, &ranks?, &experts?, &op.rate])
    }
}

/// Mirrors the device struct `StepEnd`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct StepEndArg {
    squares: u64,
    ordered: u64,
    cells: u64,
    ranks: u64,
    alarms: [u64; 2],
    finite: [u64; 2],
    clip_norm: f64,
}

/// Runs [`EndStep`] on the GPU. An index in `order` that is outside `squares` makes the norm NaN.
pub(crate) fn end_step(cuda: &Cuda, op: EndStep<'_, Cuda>) -> Result<()> {
    const OP: &str = "end_step";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    let squares = buffers.buffer("squares", op.squares)?;
    let order = buffers.buffer("order", op.order)?;
    let tables = buffers.buffer("tables", op.tables)?;
    buffers.buffer("clock", op.clock)?;
    buffers.buffer("control", op.control)?;
    buffers.buffer("reports", op.reports)?;
    let range = |range: &std::ops::Range<usize>| [range.start as u64, range.end as u64];
    let end = StepEndArg {
        squares: squares.len() as u64,
        ordered: order.len() as u64,
        cells: (tables.len() / op.ranks) as u64,
        ranks: op.ranks as u64,
        alarms: range(&op.alarms),
        finite: range(&op.finite),
        clip_norm: op.clip_norm,
    };
    let sums: Buffer<f64> = cuda.device().alloc(order.len().div_ceil(CrossEntropy::<Cuda>::CHUNK))?;
    let (clock, control, reports) = (op.clock.make_mut()?, op.control.make_mut()?, op.reports.make_mut()?);
    let launch = Launch { ctas: 1, threads: END_THREADS, cluster: 1, shared_bytes: 0 };
    let kernel = cuda.device().kernel(&spec("nib::end_step"))?;
    // SAFETY: the lengths are those of the buffers; `check` ensured that the ranges are within a table, that the reports have two
    // copies of all tables, and that clock and control have their lengths. The kernel compares the indices in `order` with the
    // number of squares.
    unsafe { kernel.launch(launch, &[squares, order, tables, &sums, &*clock, &*control, &*reports, &end]) }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let names = [
        "nib::begin_step",
        "nib::begin_micro_batch",
        "nib::collect",
        "nib::end_step",
        "nib::push_amax",
        "nib::balance_bias",
    ];
    let all = names.map(|name| Instance { spec: spec(name), shared_bytes: 0 }).to_vec();
    [all, sum_squares::instances(), adamw::instances(), init_normal::instances()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(at: u32, cells: u32, stride: u32) -> EntryArg {
        EntryArg { at, cells, stride, values: cells, ..EntryArg::NONE }
    }

    #[test]
    fn entries_with_a_common_cell_come_one_after_the_other() {
        let entries =
            [entry(0, 3, 2), entry(1, 3, 2), entry(0, 3, 2), entry(4, 1, 1), entry(7, 1, 1), entry(5, 3, 1)];
        assert_eq!(turns(&entries, 8), [0, 0, 1, 2, 0, 1]);
        assert!(turns(&[], 0).is_empty());
    }

    #[test]
    fn entries_fit_the_parameters_of_a_kernel() {
        assert_eq!(
            (size_of::<EntryArg>(), size_of::<MicroBatchArg>(), size_of::<StepEndArg>()),
            (40, 40, 72)
        );
        assert!(size_of::<u64>() + size_of::<EntriesArg>() <= 4096);
    }
}
