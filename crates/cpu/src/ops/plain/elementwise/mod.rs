//! The CPU code of [`nibble_core::ops::Cast`], [`nibble_core::ops::InitNormal`], [`nibble_core::ops::Add`],
//! [`nibble_core::ops::SumShards`], [`nibble_core::ops::SumSquares`] and [`nibble_core::ops::CloseSquares`].
//!
//! Each body is one branch-free loop. The body is compiled for each instruction set, and is both specification and fast path.

use crate::gemm::Isa;
use crate::simd::{LANES, Real, per_isa, rows_per_task, tree_sum};
use crate::sums::chunk_tree;
use crate::{Buf, CodePath, Cpu};
use half::bf16;
use nibble_core::ops::{
    Add, Cast, ChunkSums, CloseSquares, InitNormal, SQUARES_CHUNK, Squared, SumShards, SumSquares,
    squares_chunks,
};
use nibble_core::{Data, Error, Plain, Result, Tensor};
use rayon::prelude::*;

/// Runs `body` on every share of the work, multi-threaded unless there is only one share.
pub(in crate::ops) fn run_shares<S: Send>(cpu: &Cpu, shares: Vec<S>, body: impl Fn(S) + Send + Sync) {
    if shares.len() <= 1 {
        shares.into_iter().for_each(body);
    } else {
        cpu.pool().install(|| shares.into_par_iter().for_each(body));
    }
}

/// Divides the rows of `out` among the threads and calls `body(first row, those rows)`.
pub(in crate::ops) fn for_rows<T: Plain>(
    cpu: &Cpu,
    out: &mut [T],
    width: usize,
    body: impl Fn(usize, &mut [T]) + Send + Sync,
) {
    if width == 0 {
        return;
    }
    let rows = rows_per_task(cpu, out.len() / width, width);
    let shares = out.chunks_mut(rows * width).enumerate().collect();
    run_shares(cpu, shares, |(share, out)| body(share * rows, out));
}

#[inline(always)]
fn round_body<T: Real>(x: &[f32], out: &mut [T]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out = T::round(x);
    }
}
per_isa!(pub(in crate::ops) fn round_f32 = round_body::<f32>; (x: &[f32], out: &mut [f32]));
per_isa!(pub(in crate::ops) fn round_bf16 = round_body::<bf16>; (x: &[f32], out: &mut [bf16]));

#[inline(always)]
fn widen_body(x: &[bf16], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = x.widen();
    }
}
per_isa!(fn widen_bf16 = widen_body; (x: &[bf16], out: &mut [f32]));

/// Casts between plain types. A cast to the same type shares the buffer.
pub(crate) fn cast(cpu: &Cpu, op: Cast<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let mut out = op.result(cpu)?;
    match (&op.x.data, &mut out.data) {
        (Data::F32(x), Data::Bf16(out)) => map(cpu, x.as_slice(), out.as_mut_slice(), round_bf16),
        (Data::Bf16(x), Data::F32(out)) => map(cpu, x.as_slice(), out.as_mut_slice(), widen_bf16),
        (Data::F32(_), Data::F32(_)) | (Data::Bf16(_), Data::Bf16(_)) => {}
    }
    Ok(out)
}

fn map<T: Plain, U: Plain>(cpu: &Cpu, x: &[T], out: &mut [U], body: fn(Isa, &[T], &mut [U])) {
    for_rows(cpu, out, 1, |first, out| body(cpu.isa(), &x[first..][..out.len()], out));
}

/// Initialises element i with std · normal(first + i), one product in F32.
pub(crate) fn init_normal(cpu: &Cpu, op: InitNormal) -> Result<Tensor<Cpu>> {
    op.check()?;
    let mut out = op.result(cpu)?;
    for_rows(cpu, f32::slice_mut("init_normal", &mut out)?, 1, |first, out| {
        let first = op.first + first as u64;
        match cpu.path() {
            CodePath::Scalar => {
                for (e, out) in (first..).zip(out) {
                    *out = op.stream.normal_at(e) * op.std;
                }
            }
            CodePath::Simd => fill_normal(&op, first, out),
        }
    });
    Ok(out)
}

/// Fills `out` with normal numbers; one Philox block serves four elements.
fn fill_normal(op: &InitNormal, first: u64, out: &mut [f32]) {
    let mut q = u64::MAX; // no element is in this block, because e / 4 < 2⁶²
    let mut words = [0; 4];
    for (e, out) in (first..).zip(out) {
        if e / 4 != q {
            q = e / 4;
            words = op.stream.block(q);
        }
        *out = nibble_formats::philox::normal_from_bits(words[(e % 4) as usize]) * op.std;
    }
}

#[inline(always)]
fn add_body<T: Real>(a: &[T], b: &[T], out: &mut [T]) {
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = T::round(a.widen() + b.widen());
    }
}
per_isa!(fn add_f32 = add_body::<f32>; (a: &[f32], b: &[f32], out: &mut [f32]));
per_isa!(fn add_bf16 = add_body::<bf16>; (a: &[bf16], b: &[bf16], out: &mut [bf16]));

#[inline(always)]
fn add_to_body<T: Real>(x: &[T], sum: &mut [T]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum = T::round(sum.widen() + x.widen());
    }
}
per_isa!(pub(in crate::ops) fn add_to_f32 = add_to_body::<f32>; (x: &[f32], sum: &mut [f32]));
per_isa!(pub(in crate::ops) fn add_to_bf16 = add_to_body::<bf16>; (x: &[bf16], sum: &mut [bf16]));

/// Adds a tensor, if given, to another tensor of its type and shape, and rounds each element.
pub(in crate::ops) fn add_to(cpu: &Cpu, x: Option<&Tensor<Cpu>>, sum: &mut Tensor<Cpu>) -> Result<()> {
    let Some(x) = x else { return Ok(()) };
    match (&x.data, &mut sum.data) {
        (Data::F32(x), Data::F32(sum)) => map(cpu, x.as_slice(), sum.as_mut_slice(), add_to_f32),
        (Data::Bf16(x), Data::Bf16(sum)) => map(cpu, x.as_slice(), sum.as_mut_slice(), add_to_bf16),
        _ => return Err(Error::shape("add", "type of plus", x.dtype(), sum.dtype())),
    }
    Ok(())
}

#[inline(always)]
fn accumulate_body(x: &[f32], sum: &mut [f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += x;
    }
}
per_isa!(fn accumulate = accumulate_body; (x: &[f32], sum: &mut [f32]));

/// Computes a + b in F32, rounded once. If `plus` is given, it is added in the same way.
pub(crate) fn add(cpu: &Cpu, op: Add<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let mut out = op.result(cpu)?;
    write_sum(cpu, (op.a, op.b), &mut out)?;
    add_to(cpu, op.plus, &mut out)?;
    Ok(out)
}

/// Writes a + b into a tensor of their type and shape.
pub(in crate::ops) fn write_sum(
    cpu: &Cpu,
    (a, b): (&Tensor<Cpu>, &Tensor<Cpu>),
    out: &mut Tensor<Cpu>,
) -> Result<()> {
    match (&a.data, &b.data, &mut out.data) {
        (Data::F32(a), Data::F32(b), Data::F32(out)) => sum_of(cpu, [a, b], out, add_f32),
        (Data::Bf16(a), Data::Bf16(b), Data::Bf16(out)) => sum_of(cpu, [a, b], out, add_bf16),
        _ => return Err(Error::shape("add", "type of b", b.dtype(), a.dtype())),
    }
    Ok(())
}

fn sum_of<T: Real>(cpu: &Cpu, of: [&Buf<T>; 2], out: &mut Buf<T>, body: fn(Isa, &[T], &[T], &mut [T])) {
    let [a, b] = of.map(Buf::as_slice);
    for_rows(cpu, out.as_mut_slice(), 1, |first, out| {
        body(cpu.isa(), &a[first..][..out.len()], &b[first..][..out.len()], out);
    });
}

/// Number of elements whose shards are summed while they are in the L1 cache.
const TREE_CHUNK: usize = 1024;

/// Sums shards as ((0+1)+(2+3))…, element by element, and rounds once.
pub(crate) fn sum_shards(cpu: &Cpu, op: SumShards<'_, Cpu>) -> Result<()> {
    let len = op.into.rows * op.into.cols / op.stack;
    let shards = Shards { isa: cpu.isa(), x: &op.x.data, count: op.shards, len };
    match &mut op.into.data {
        Data::F32(out) => for_rows(cpu, out.as_mut_slice(), 1, |first, out| {
            shards.for_pieces(first, out, |at, out| shards.sum(at, 0..op.shards, out));
        }),
        Data::Bf16(out) => for_rows(cpu, out.as_mut_slice(), 1, |first, out| {
            shards.for_pieces(first, out, |at, out| {
                let mut sum = [0.0; TREE_CHUNK];
                let sum = &mut sum[..out.len()];
                shards.sum(at, 0..op.shards, sum);
                round_bf16(cpu.isa(), sum, out);
            });
        }),
    }
    Ok(())
}

/// The shards of a stack of matrices, `len` elements per shard; the shards of a matrix are consecutive.
struct Shards<'a> {
    isa: Isa,
    x: &'a Data<Cpu>,
    count: usize,
    len: usize,
}

impl Shards<'_> {
    /// Splits the sums into pieces that are in one matrix and fit a temporary. `first` is the index of the first sum among those of all
    /// matrices. `body` gets the index of a piece's first element in the first shard.
    fn for_pieces<T>(&self, first: usize, mut out: &mut [T], body: impl Fn(usize, &mut [T])) {
        let mut next = first;
        while let (false, Some(i)) = (out.is_empty(), next.checked_rem(self.len)) {
            let (piece, rest) = out.split_at_mut(TREE_CHUNK.min(self.len - i).min(out.len()));
            next += piece.len();
            body((next - piece.len()) / self.len * self.count * self.len + i, piece);
            out = rest;
        }
    }

    /// The tree sum over these shards (at least one), for the elements that start at `at` in the first shard.
    fn sum(&self, at: usize, shards: std::ops::Range<usize>, out: &mut [f32]) {
        if shards.len() <= 1 {
            let range = shards.start * self.len + at..shards.start * self.len + at + out.len();
            return match self.x {
                Data::F32(x) => out.copy_from_slice(&x.as_slice()[range]),
                Data::Bf16(x) => widen_bf16(self.isa, &x.as_slice()[range], out),
            };
        }
        let middle = shards.start + shards.len() / 2;
        let mut right = [0.0; TREE_CHUNK];
        let right = &mut right[..out.len()];
        self.sum(at, shards.start..middle, out);
        self.sum(at, middle..shards.end, right);
        accumulate(self.isa, right, out);
    }
}

#[inline(always)]
fn sum_squares_body<T: Real>(x: &[T]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for (lane, &x) in lanes.iter_mut().zip(x) {
            *lane += f64::from(x.widen()) * f64::from(x.widen()); // the product is exact
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(x.widen()) * f64::from(x.widen());
    }
    tree_sum(lanes)
}
per_isa!(fn squares_f32 = sum_squares_body::<f32>; (x: &[f32]) -> f64);
per_isa!(fn squares_bf16 = sum_squares_body::<bf16>; (x: &[bf16]) -> f64);

/// Computes Σ x² of each chunk; threads divide the chunks, never a sum.
pub(crate) fn sum_squares(cpu: &Cpu, op: SumSquares<'_, Cpu>) -> Result<()> {
    op.check()?;
    let into = op.into.as_mut_slice();
    for tensor in &op.tensors {
        let sums = &mut into[tensor.at..][..tensor.chunks()];
        match &tensor.x.data {
            Data::F32(x) => chunk_squares(cpu, (tensor, x.as_slice()), squares_f32, sums),
            Data::Bf16(x) => chunk_squares(cpu, (tensor, x.as_slice()), squares_bf16, sums),
        }
    }
    Ok(())
}

fn chunk_squares<T: Real>(
    cpu: &Cpu,
    (tensor, x): (&Squared<'_, Cpu>, &[T]),
    squares: fn(Isa, &[T]) -> f64,
    sums: &mut [f64],
) {
    const CHUNK: usize = SQUARES_CHUNK;
    let &Squared { part, skip, .. } = tensor;
    let each = squares_chunks(part);
    let per_share = rows_per_task(cpu, sums.len(), CHUNK);
    let shares = sums.chunks_mut(per_share).enumerate().collect();
    run_shares(cpu, shares, |(share, sums): (usize, &mut [f64])| {
        for (i, sum) in (skip / CHUNK + share * per_share..).zip(sums) {
            let within = i % each * CHUNK;
            *sum = squares(cpu.isa(), &x[i / each * part + within - skip..][..CHUNK.min(part - within)]);
        }
    });
}

/// Computes the tree sum over the chunks of each part.
pub(crate) fn close_squares(_: &Cpu, op: CloseSquares<'_, Cpu>) -> Result<()> {
    op.check()?;
    let (sums, into) = (op.sums.as_slice(), op.into.as_mut_slice());
    for ChunkSums { first, parts, chunks, at } in op.tensors {
        for (part, sum) in into[at..][..parts].iter_mut().enumerate() {
            *sum = chunk_tree(sums[first + part * chunks..][..chunks].to_vec()) as f32;
        }
    }
    Ok(())
}

#[cfg(test)]
pub(in crate::ops) mod tests;
