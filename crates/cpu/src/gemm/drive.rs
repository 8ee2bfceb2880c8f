//! Splits GEMMs into tasks, and tasks into tiles.
//!
//! A task owns a rectangle of one GEMM's output over the whole contraction. A task packs its own panels of B, then packs A's rows block by
//! block and writes its rectangle. Tasks share nothing. So no task waits for another, and no bit depends on which thread runs which task.

use super::operand::{OperandView, Output, OutputData};
use super::pack::{self, PanelRows, SLACK};
use super::tile::{Kernels, MAX_TILE, RunTile, Tile};
use super::{DotKind, Isa};
use half::bf16;
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// One GEMM of a call: `out[i][j]` = `A[i]·B[j]` over `k`.
pub(super) struct Problem<'a> {
    pub a: OperandView<'a>,
    pub b: OperandView<'a>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Index of element (0, 0) of the output.
    pub out: usize,
}

/// All GEMMs of a call. Outputs are disjoint; outputs and operands are within their slices; all operand pairs use the same dot product and
/// scale block; the machine supports `isa`.
pub(super) struct Job<'a> {
    pub isa: Isa,
    pub dot: DotKind,
    pub block: Option<usize>,
    pub problems: Vec<Problem<'a>>,
}

/// Reusable buffers of the engine for GEMMs on the caller's thread.
#[derive(Debug, Default)]
pub struct Scratch {
    a: Buffer,
    b: Buffer,
    a_scales: Buffer,
    b_scales: Buffer,
    /// Tiles whose sums are unfinished, or that cannot be written to the output directly.
    tiles: Buffer,
    a_lowest: Vec<u8>,
    b_lowest: Vec<u8>,
}

/// One cache line.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// An array of 32-bit words, aligned to cache lines. The array grows and never shrinks.
#[derive(Debug, Default)]
struct Buffer(Vec<Line>);

impl Buffer {
    fn words(&mut self, len: usize) -> &mut [u32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0; 16]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }

    fn floats(&mut self, len: usize) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.words(len))
    }

    /// Pointer to the first of the words requested so far.
    fn start<T>(&self) -> *const T {
        self.0.as_ptr().cast()
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Number of multiply-adds below which a call does not wake other threads.
const SERIAL_WORK: usize = 1 << 20;
/// Number of multiply-adds below which a task is not split further.
const MIN_TASK_WORK: usize = 1 << 20;
/// Number of 32-bit units of the contraction whose panels fit the caches together.
const CHUNK_UNITS: usize = 1024;
/// Maximum number of words of B that a task packs (1 MiB), unless one panel is larger.
const MAX_B_WORDS: usize = 1 << 18;
/// Words of A packed at a time: about a quarter of an L2 cache.
const MAX_A_WORDS: usize = 48 << 10;
/// Minimum rows of a task, so that packing B pays off; fewer only if the output has fewer rows.
const MIN_TASK_ROWS: usize = 240;
/// Minimum columns of a task; fewer only if the output has fewer columns.
const MIN_TASK_COLUMNS: usize = 64;

/// A rectangle of a problem's output.
struct Task {
    problem: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

/// Runs a job on the current rayon thread pool.
pub(super) fn parallel(job: &Job, out: Output) {
    let work = job.work();
    let threads = if work < SERIAL_WORK { 1 } else { rayon::current_num_threads() };
    let (tasks, target) = (job.tasks(threads), Target::of(out));
    let run = |task: &Task| {
        SCRATCH.with(|cell| match cell.try_borrow_mut() {
            Ok(mut scratch) => job.run(task, &target, &mut scratch),
            Err(_) => job.run(task, &target, &mut Scratch::default()),
        });
    };
    if threads == 1 || tasks.len() == 1 {
        tasks.iter().for_each(run);
    } else {
        tasks.par_iter().with_max_len(1).for_each(run);
    }
}

/// Runs a job on this thread.
pub(super) fn serial(job: &Job, out: Output, scratch: &mut Scratch) {
    let (tasks, target) = (job.tasks(1), Target::of(out));
    for task in &tasks {
        job.run(task, &target, scratch);
    }
}

/// The output of a job; each task writes a separate rectangle.
struct Target {
    base: *mut u8,
    is_f32: bool,
    stride: usize,
    accumulate: bool,
    resume: bool,
}

// SAFETY: the pointer comes from an exclusive borrow that outlives the job, and tasks write disjoint rectangles.
unsafe impl Sync for Target {}

impl Target {
    fn of(out: Output) -> Self {
        let (base, is_f32) = match out.data {
            OutputData::F32(x) => (x.as_mut_ptr().cast(), true),
            OutputData::Bf16(x) => (x.as_mut_ptr().cast(), false),
        };
        Self { base, is_f32, stride: out.stride, accumulate: out.accumulate, resume: out.resume }
    }

    /// Prefetches the cache lines of an output tile before its sums are computed, to speed up the stores.
    fn prefetch(&self, at: usize, rows: usize, columns: usize) {
        let size = if self.is_f32 { size_of::<f32>() } else { size_of::<bf16>() };
        for i in 0..rows {
            for byte in (0..columns * size).step_by(64) {
                let line = self.base.wrapping_add((at + i * self.stride) * size + byte);
                // SAFETY: a prefetch of any address is harmless, and every x86-64 processor has the instruction.
                #[cfg(target_arch = "x86_64")]
                unsafe {
                    std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(line.cast());
                }
                #[cfg(not(target_arch = "x86_64"))]
                let _ = line;
            }
        }
    }

    /// Copies the output's sums of a tile to a separate buffer; elements past the output's edge are zero.
    ///
    /// # Safety
    /// The output is F32. Only this task accesses the rows of `columns` elements from `at` on. `tile` has `height` rows of `width`
    /// elements, at least as many as are copied.
    unsafe fn load(
        &self,
        at: usize,
        (rows, columns): (usize, usize),
        tile: *mut f32,
        (height, width): (usize, usize),
    ) {
        // SAFETY: the caller guarantees the ranges, and the buffer is not the output.
        unsafe {
            std::slice::from_raw_parts_mut(tile, height * width).fill(0.0);
            for i in 0..rows {
                let from = self.base.cast::<f32>().add(at + i * self.stride);
                std::ptr::copy_nonoverlapping(from, tile.add(i * width), columns);
            }
        }
    }

    /// # Safety
    /// Only this task accesses the rows of `columns` elements from `at` on. `tile` has rows of as many elements, `tile_stride` apart.
    #[inline(always)]
    unsafe fn finish(&self, at: usize, rows: usize, columns: usize, tile: *const f32, tile_stride: usize) {
        for i in 0..rows {
            let at = at + i * self.stride;
            // SAFETY: the caller guarantees the ranges, and the pointer's type is the slice's own type.
            unsafe {
                let from = std::slice::from_raw_parts(tile.add(i * tile_stride), columns);
                if !self.is_f32 {
                    let to = std::slice::from_raw_parts_mut(self.base.cast::<bf16>().add(at), columns);
                    if self.accumulate {
                        to.iter_mut().zip(from).for_each(|(y, &x)| *y = pack::round_to_bf16(y.to_f32() + x));
                    } else {
                        to.iter_mut().zip(from).for_each(|(y, &x)| *y = pack::round_to_bf16(x));
                    }
                    continue;
                }
                let to = std::slice::from_raw_parts_mut(self.base.cast::<f32>().add(at), columns);
                if self.accumulate {
                    to.iter_mut().zip(from).for_each(|(y, &x)| *y += x);
                } else {
                    to.iter_mut().zip(from).for_each(|(y, &x)| *y = x);
                }
            }
        }
    }

    /// [`Self::finish`] compiled for AVX-512.
    ///
    /// # Safety
    /// The requirements of [`Self::finish`]; the machine has AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn finish_avx512(
        &self,
        at: usize,
        rows: usize,
        columns: usize,
        tile: *const f32,
        tile_stride: usize,
    ) {
        // SAFETY: the caller guarantees the requirements of `finish`.
        unsafe { self.finish(at, rows, columns, tile, tile_stride) }
    }
}

/// A task's kernels and block sizes.
struct Extent {
    kernels: Kernels,
    /// Number of units of the whole contraction, and of one chunk.
    units: usize,
    chunk_units: usize,
    /// Number of units per scale block (without scales, of the whole contraction), and the number of blocks.
    block_units: usize,
    num_blocks: usize,
    /// Rows of A packed at a time.
    block_rows: usize,
}

impl Job<'_> {
    /// Number of multiply-adds of all GEMMs.
    fn work(&self) -> usize {
        let work = |p: &Problem| p.m.saturating_mul(p.n).saturating_mul(p.k);
        self.problems.iter().map(work).fold(0, usize::saturating_add)
    }

    fn extent(&self, problem: &Problem) -> Extent {
        let kernels = Kernels::of(self.isa, self.dot);
        let units = pack::units(self.dot, problem.k);
        let (block_units, num_blocks) = match self.block {
            Some(block) => (block / 2, problem.k.div_ceil(block)),
            None => (units.max(1), 1),
        };
        let chunk_units = match self.block {
            Some(_) if block_units <= CHUNK_UNITS => CHUNK_UNITS / block_units * block_units,
            Some(_) => block_units,
            None => CHUNK_UNITS,
        };
        let tall = kernels.max_rows();
        let block_rows = (MAX_A_WORDS / units.clamp(1, chunk_units) / tall).clamp(1, 16) * tall;
        Extent { kernels, units, chunk_units, block_units, num_blocks, block_rows }
    }

    /// Splits the GEMMs into tasks of about equal work for `threads` threads.
    fn tasks(&self, threads: usize) -> Vec<Task> {
        let target = if threads == 1 { usize::MAX } else { (self.work() / (4 * threads)).max(MIN_TASK_WORK) };
        let mut tasks = Vec::new();
        for (problem, p) in self.problems.iter().enumerate() {
            let x = self.extent(p);
            let (tall, wide) = (x.kernels.max_rows(), Kernels::MAX_VECTORS * x.kernels.lanes);
            let k = p.k.max(1);
            let mut columns = p.n.min((MAX_B_WORDS / x.units.max(1) / wide).max(1) * wide).max(1);
            let mut rows = p.m.max(1);
            if rows.saturating_mul(columns).saturating_mul(k) > target {
                rows = (target / (columns * k)).max(MIN_TASK_ROWS).min(rows);
            }
            if rows.saturating_mul(columns).saturating_mul(k) / 2 > target {
                columns = (target / (rows * k)).max(MIN_TASK_COLUMNS).min(columns);
            }
            for rows in even_cuts(p.m, rows, tall) {
                for columns in even_cuts(p.n, columns, wide) {
                    tasks.push(Task { problem, rows: rows.clone(), columns });
                }
            }
        }
        tasks
    }

    fn run(&self, task: &Task, target: &Target, scratch: &mut Scratch) {
        let p = &self.problems[task.problem];
        if p.k == 0 && (target.accumulate || target.resume) {
            return;
        }
        let x = self.extent(p);
        let num_chunks = x.units.div_ceil(x.chunk_units).max(1);
        self.pack_b(p, &x, task, scratch);
        for first in task.rows.clone().step_by(x.block_rows) {
            let rows = first..(first + x.block_rows).min(task.rows.end);
            scratch.a_lowest.clear();
            if let Some(scales) = &p.a.scales {
                let to = scratch.a_scales.floats((rows.len() + x.kernels.max_rows()) * x.num_blocks);
                for panel in row_panels(&x.kernels, rows.clone()) {
                    pack::scale_panel(
                        scales,
                        &panel,
                        x.num_blocks,
                        &mut to[(panel.first - first) * x.num_blocks..],
                    );
                }
            }
            for chunk_idx in 0..num_chunks {
                let chunk = Chunk {
                    rows: rows.clone(),
                    first_unit: chunk_idx * x.chunk_units,
                    units: x.chunk_units.min(x.units - chunk_idx * x.chunk_units),
                    is_first: chunk_idx == 0,
                    is_last: chunk_idx + 1 == num_chunks,
                };
                self.pack_a(p, &chunk, &x.kernels, scratch);
                self.multiply(p, &x, task, &chunk, target, scratch);
            }
        }
    }

    /// Packs a task's columns of B over the whole contraction.
    fn pack_b(&self, p: &Problem, x: &Extent, task: &Task, scratch: &mut Scratch) {
        scratch.b_lowest.clear();
        let (first, padded) = (task.columns.start, task.columns.len().next_multiple_of(x.kernels.lanes));
        let panels = column_panels(&x.kernels, task.columns.clone());
        let to = scratch.b.words(padded * x.units + SLACK);
        pack::panels(self.isa, &p.b, panels.clone(), first, 0..p.k, to);
        for panel in panels {
            let lane = panel.first - first;
            let packed = &mut scratch.b.words((lane + panel.width) * x.units)[lane * x.units..];
            scratch.b_lowest.push(lowest_exponent(&x.kernels, &p.b, packed));
            if let Some(scales) = &p.b.scales {
                let to = scratch.b_scales.floats((lane + panel.width) * x.num_blocks);
                pack::scale_panel(scales, &panel, x.num_blocks, &mut to[lane * x.num_blocks..]);
            }
        }
    }

    /// Packs a chunk of a block of A's rows. The lowest exponents cover all chunks so far, because a resumed sum inherits the smallest
    /// quantum of all its terms.
    fn pack_a(&self, p: &Problem, chunk: &Chunk, kernels: &Kernels, scratch: &mut Scratch) {
        let per_unit = if self.dot == DotKind::F32 { 1 } else { 2 };
        let k = chunk.first_unit * per_unit..((chunk.first_unit + chunk.units) * per_unit).min(p.k);
        let (first, panels) = (chunk.rows.start, row_panels(kernels, chunk.rows.clone()));
        let to = scratch.a.words((chunk.rows.len() + kernels.max_rows()) * chunk.units + SLACK);
        pack::panels(self.isa, &p.a, panels.clone(), first, k, to);
        for (i, panel) in panels.enumerate() {
            let row = panel.first - first;
            let packed = &mut scratch.a.words((row + panel.width) * chunk.units)[row * chunk.units..];
            let lowest = lowest_exponent(kernels, &p.a, packed);
            match scratch.a_lowest.get_mut(i) {
                Some(so_far) => *so_far = lowest.min(*so_far),
                None => scratch.a_lowest.push(lowest),
            }
        }
    }

    /// Computes all tiles of a chunk.
    fn multiply(
        &self,
        p: &Problem,
        x: &Extent,
        task: &Task,
        chunk: &Chunk,
        target: &Target,
        scratch: &mut Scratch,
    ) {
        let one_chunk = chunk.is_first && chunk.is_last;
        let panels_down = chunk.rows.len().div_ceil(x.kernels.max_rows());
        let panels_across = task.columns.len().div_ceil(Kernels::MAX_VECTORS * x.kernels.lanes);
        let num_tiles = if one_chunk { 1 } else { panels_down * panels_across };
        let Scratch { a, b, a_scales, b_scales, tiles, a_lowest, b_lowest } = scratch;
        let tiles = tiles.floats(num_tiles * MAX_TILE).as_mut_ptr();
        let (a, b) = (a.start::<u32>(), b.start::<u32>());
        let (a_scales, b_scales) = (a_scales.start::<f32>(), b_scales.start::<f32>());
        let first_block = chunk.first_unit / x.block_units;
        for (j, bp) in column_panels(&x.kernels, task.columns.clone()).enumerate() {
            for (i, ap) in row_panels(&x.kernels, chunk.rows.clone()).enumerate() {
                let (row, column) = (ap.first - chunk.rows.start, bp.first - task.columns.start);
                let at = p.out + ap.first * target.stride + bp.first;
                let whole = ap.rows == ap.width && bp.rows == bp.width;
                let direct = target.is_f32 && !target.accumulate && whole;
                if chunk.is_last {
                    target.prefetch(at, ap.rows, bp.rows);
                }
                // SAFETY: `pack_a` and `pack_b` put the panels here, followed by their scales. A tile's buffer holds the largest tile.
                // Resumed sums come from an F32 output. A direct tile is within this task's rectangle of the output. The machine has the
                // kernel's instructions, and the widths are those of its kernels.
                unsafe {
                    let (out, stride) = if direct {
                        (target.base.cast::<f32>().add(at), target.stride)
                    } else {
                        let idx = if one_chunk { 0 } else { j * panels_down + i };
                        (tiles.add(idx * MAX_TILE), bp.width)
                    };
                    if target.resume && chunk.is_first && !direct {
                        target.load(at, (ap.rows, bp.rows), out, (ap.width, bp.width));
                    }
                    let small = |out| target.resume && sums_may_be_tiny(out, (ap.width, bp.width), stride);
                    let run = match x.kernels.run_flushing {
                        Some(flushing) if pack::sums_may_be_tiny(a_lowest[i], b_lowest[j]) || small(out) => {
                            flushing
                        }
                        _ => x.kernels.run,
                    };
                    let tile = Tile {
                        a: a.add(row * chunk.units),
                        b: b.add(column * x.units + chunk.first_unit * bp.width),
                        units: chunk.units,
                        out,
                        stride,
                        first: chunk.is_first && !target.resume,
                        scales: None,
                    };
                    if self.block.is_none() || chunk.units == 0 {
                        run(&tile, ap.width, bp.width / x.kernels.lanes);
                    } else {
                        let sa = a_scales.add(row * x.num_blocks + first_block * ap.width);
                        let sb = b_scales.add(column * x.num_blocks + first_block * bp.width);
                        blocks(x, run, tile, (ap.width, sa), (bp.width, sb));
                    }
                    if chunk.is_last && !direct {
                        self.finish(target, at, ap.rows, bp.rows, out, stride);
                    }
                }
            }
        }
    }

    /// # Safety
    /// The requirements of [`Target::finish`].
    unsafe fn finish(
        &self,
        to: &Target,
        at: usize,
        rows: usize,
        columns: usize,
        tile: *const f32,
        stride: usize,
    ) {
        // SAFETY: the caller guarantees the requirements; the machine has `self.isa`.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if matches!(self.isa, Isa::Avx512 | Isa::Avx512Bf16) {
                return to.finish_avx512(at, rows, columns, tile, stride);
            }
            to.finish(at, rows, columns, tile, stride);
        }
    }
}

/// Whether sums that continue from these values can pass through a tiny number.
///
/// # Safety
/// `rows` of `columns` sums, `stride` apart, are readable and initialised.
unsafe fn sums_may_be_tiny(sums: *const f32, (rows, columns): (usize, usize), stride: usize) -> bool {
    (0..rows).any(|i| {
        // SAFETY: the caller guarantees that these rows are readable.
        let row = unsafe { std::slice::from_raw_parts(sums.add(i * stride), columns) };
        row.iter().fold(false, |tiny, &sum| tiny | pack::resumed_sum_may_be_tiny(sum))
    })
}

/// Runs a tile, one scale block at a time; `rows` and `columns` are the widths of the panels and of the panels' scales.
///
/// # Safety
/// The requirements of the kernels in `x`; the scales cover all blocks of the tile's units.
unsafe fn blocks(
    x: &Extent,
    run: RunTile,
    mut tile: Tile,
    (rows, mut sa): (usize, *const f32),
    (columns, mut sb): (usize, *const f32),
) {
    let mut left = tile.units;
    while left > 0 {
        tile.units = left.min(x.block_units);
        tile.scales = Some((sa, sb));
        // SAFETY: the caller guarantees contiguous panels and scales for all blocks.
        unsafe {
            run(&tile, rows, columns / x.kernels.lanes);
            tile.a = tile.a.add(tile.units * rows);
            tile.b = tile.b.add(tile.units * columns);
            (sa, sb) = (sa.add(rows), sb.add(columns));
        }
        left -= tile.units;
        tile.first = false;
    }
}

/// Prepares a packed panel for an emulated BF16 dot and returns its lowest exponent field.
fn lowest_exponent(kernels: &Kernels, from: &OperandView, panel: &mut [u32]) -> u8 {
    match kernels.run_flushing {
        Some(_) if pack::may_be_tiny(&from.data) => pack::flush_subnormals(panel),
        _ => pack::LOWEST_OF_CODES,
    }
}

/// A range of the contraction, for a block of A's rows.
struct Chunk {
    rows: Range<usize>,
    first_unit: usize,
    units: usize,
    is_first: bool,
    is_last: bool,
}

/// Splits `0..total` into pieces of about equal length, none longer than `most` rounded up to a multiple of `align`.
fn even_cuts(total: usize, most: usize, align: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = total.div_ceil(most).max(1);
    let length = total.div_ceil(pieces).next_multiple_of(align).max(1);
    (0..total).step_by(length).map(move |first| first..(first + length).min(total))
}

/// Splits a range of A's rows into panels.
fn row_panels(kernels: &Kernels, rows: Range<usize>) -> impl Iterator<Item = PanelRows> + Clone {
    let (tall, kernels) = (kernels.max_rows(), *kernels);
    rows.clone().step_by(tall).map(move |first| {
        let width = kernels.rows_for(rows.end - first);
        PanelRows { first, rows: width.min(rows.end - first), width }
    })
}

/// Splits a range of D's columns into panels.
fn column_panels(kernels: &Kernels, columns: Range<usize>) -> impl Iterator<Item = PanelRows> + Clone {
    let kernels = *kernels;
    columns.clone().step_by(Kernels::MAX_VECTORS * kernels.lanes).map(move |first| {
        let width = kernels.vectors_for(columns.end - first) * kernels.lanes;
        PanelRows { first, rows: width.min(columns.end - first), width }
    })
}
