//! The CPU code of [`nibble_core::ops::RmsNorm`].
//!
//! One body is both specification and vectorised code; it uses the sums of `crate::sums`.

use crate::Cpu;
use crate::ops::plain::column_sums::{ColumnTerms, add_columns, for_columns};
use crate::ops::plain::elementwise::{add_to, write_sum};
use crate::simd::{LANES, Real, map_lanes, per_isa, rows_per_task};
use crate::sums::{Terms, Vector, lanes_dot};
use half::bf16;
use nibble_core::ops::{RmsNorm, RmsNormBackward, RmsNormOut};
use nibble_core::{DType, Data, Error, Result, Tensor};
use nibble_formats::math::rsqrt;
use rayon::prelude::*;

/// Computes y = x · inv_rms · weight, and inv_rms; if `plus` is given, both for x + plus.
pub(crate) fn rms_norm(cpu: &Cpu, op: RmsNorm<'_, Cpu>) -> Result<RmsNormOut<Cpu>> {
    let mut out = op.result(cpu)?;
    if let (Some(plus), Some(sum)) = (op.plus, &mut out.sum) {
        write_sum(cpu, (op.x, plus), sum)?;
    }
    let RmsNormOut { y, inv_rms, sum } = &mut out;
    let op = RmsNorm::new(sum.as_ref().unwrap_or(op.x), op.weight, op.eps);
    write_norm(cpu, &op, y, inv_rms.as_mut_slice())?;
    Ok(out)
}

/// Writes the norm of x, without `plus`.
pub(in crate::ops) fn write_norm(
    cpu: &Cpu,
    op: &RmsNorm<'_, Cpu>,
    y: &mut Tensor<Cpu>,
    inv_rms: &mut [f32],
) -> Result<()> {
    match op.x.dtype() {
        DType::F32 => forward::<f32>(cpu, op, y, inv_rms),
        DType::Bf16 => forward::<bf16>(cpu, op, y, inv_rms),
    }
}

/// Computes dx (with `plus` added if given) and accumulates into dweight. Each shard's sum starts at zero and is added once.
pub(crate) fn rms_norm_backward(cpu: &Cpu, op: RmsNormBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let (mut dx, plus) = (op.result(cpu)?, op.plus);
    write_dx(cpu, op, &mut dx)?;
    add_to(cpu, plus, &mut dx)?;
    Ok(dx)
}

/// Writes dx without `plus`, and accumulates into dweight.
pub(in crate::ops) fn write_dx(cpu: &Cpu, op: RmsNormBackward<'_, Cpu>, dx: &mut Tensor<Cpu>) -> Result<()> {
    match op.x.dtype() {
        DType::F32 => backward::<f32>(cpu, op, dx),
        DType::Bf16 => backward::<bf16>(cpu, op, dx),
    }
}

fn forward<T: Real>(
    cpu: &Cpu,
    op: &RmsNorm<'_, Cpu>,
    y: &mut Tensor<Cpu>,
    inv_rms: &mut [f32],
) -> Result<()> {
    const OP: &str = "rms_norm";
    let (rows, d) = op.x.shape();
    expect_columns(OP, d)?;
    let x = T::slice(OP, "x", op.x)?;
    let weight = op.weight.f32(OP, "weight")?.as_slice();
    let y = T::slice_mut(OP, y)?;
    let (isa, eps, step) = (cpu.isa(), op.eps, rows_per_task(cpu, rows, d));
    if step >= rows {
        forward_rows(isa, x, weight, eps, y, inv_rms);
    } else {
        cpu.pool().install(|| {
            let tasks =
                x.par_chunks(step * d).zip(y.par_chunks_mut(step * d)).zip(inv_rms.par_chunks_mut(step));
            tasks.for_each(|((x, y), inv_rms)| forward_rows(isa, x, weight, eps, y, inv_rms));
        });
    }
    Ok(())
}

per_isa!(fn forward_rows<T: Real> = forward_rows_body; (x: &[T], weight: &[f32], eps: f32, y: &mut [T], inv_rms: &mut [f32]));

/// The row lengths of heads and small models have specialised bodies, in which the lanes stay in registers.
#[inline(always)]
fn forward_rows_body<T: Real>(x: &[T], weight: &[f32], eps: f32, y: &mut [T], inv_rms: &mut [f32]) {
    match weight.len() {
        16 => forward_rows_of::<T, 16>(x, weight, eps, y, inv_rms),
        32 => forward_rows_of::<T, 32>(x, weight, eps, y, inv_rms),
        64 => forward_rows_of::<T, 64>(x, weight, eps, y, inv_rms),
        128 => forward_rows_of::<T, 128>(x, weight, eps, y, inv_rms),
        _ => forward_rows_of::<T, 0>(x, weight, eps, y, inv_rms),
    }
}

#[inline(always)]
fn forward_rows_of<T: Real, const D: usize>(
    x: &[T],
    weight: &[f32],
    eps: f32,
    y: &mut [T],
    inv_rms: &mut [f32],
) {
    let weight = unknown_length(weight);
    let d = weight.len();
    for ((x, y), inv_rms) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(inv_rms) {
        let inv = rsqrt(lanes_dot::<D>(&Squares(x)) / d as f32 + eps);
        if d < 64 {
            map_lanes(x, weight, y, |x, w| x * inv * w);
        } else {
            for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                *y = T::round(x.widen() * inv * w);
            }
        }
        *inv_rms = inv;
    }
}

fn backward<T: Real>(cpu: &Cpu, op: RmsNormBackward<'_, Cpu>, dx: &mut Tensor<Cpu>) -> Result<()> {
    const OP: &str = "rms_norm_backward";
    let (rows, d) = op.x.shape();
    expect_columns(OP, d)?;
    let (x, dy) = (T::slice(OP, "x", op.x)?, T::slice(OP, "dy", op.dy)?);
    let weight = op.weight.f32(OP, "weight")?.as_slice();
    let inv_rms = op.inv_rms.as_slice();
    let shards = op.dweight.rows;
    if shards == 0 {
        return Err(Error::shape(OP, "rows of dweight", 0, "at least one shard"));
    }
    let Data::F32(dweight) = &mut op.dweight.data else {
        return Err(Error::shape(OP, "type of dweight", DType::Bf16, DType::F32));
    };
    let dx = T::slice_mut(OP, dx)?;
    let (isa, step) = (cpu.isa(), rows_per_task(cpu, rows, d));
    let rows_per_shard = rows / shards;
    let shard_dweight = |shard: usize, first: usize, sums: &mut [f32]| {
        let range = shard * rows_per_shard..(shard + 1) * rows_per_shard;
        let elements = range.start * d..range.end * d;
        add_dweight(isa, &x[elements.clone()], &inv_rms[range], &dy[elements], d, first, sums);
    };
    let divide = step < rows;
    if divide {
        cpu.pool().install(|| {
            let tasks = x.par_chunks(step * d).zip(dy.par_chunks(step * d)).zip(dx.par_chunks_mut(step * d));
            let tasks = tasks.zip(inv_rms.par_chunks(step));
            tasks.for_each(|(((x, dy), dx), inv_rms)| backward_rows(isa, x, weight, inv_rms, dy, dx));
        });
    } else {
        backward_rows(isa, x, weight, inv_rms, dy, dx);
    }
    for_columns(cpu, divide, dweight.as_mut_slice(), d, shard_dweight);
    Ok(())
}

per_isa!(fn backward_rows<T: Real> = backward_rows_body; (x: &[T], weight: &[f32], inv_rms: &[f32], dy: &[T], dx: &mut [T]));

/// dx = inv_rms · (dy·w − x̂ · mean(dy·w·x̂)), x̂ = x · inv_rms.
#[inline(always)]
fn backward_rows_body<T: Real>(x: &[T], weight: &[f32], inv_rms: &[f32], dy: &[T], dx: &mut [T]) {
    match weight.len() {
        16 => backward_rows_of::<T, 16>(x, weight, inv_rms, dy, dx),
        32 => backward_rows_of::<T, 32>(x, weight, inv_rms, dy, dx),
        64 => backward_rows_of::<T, 64>(x, weight, inv_rms, dy, dx),
        128 => backward_rows_of::<T, 128>(x, weight, inv_rms, dy, dx),
        _ => backward_rows_of::<T, 0>(x, weight, inv_rms, dy, dx),
    }
}

#[inline(always)]
fn backward_rows_of<T: Real, const D: usize>(
    x: &[T],
    weight: &[f32],
    inv_rms: &[f32],
    dy: &[T],
    dx: &mut [T],
) {
    let weight = unknown_length(weight);
    let d = weight.len();
    let rows = x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(dx.chunks_exact_mut(d)).zip(inv_rms);
    for (((x, dy), dx), &inv) in rows {
        let mean = lanes_dot::<D>(&Products { x, dy, weight, inv }) / d as f32;
        for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
            let normal = x.widen() * inv;
            *dx = T::round(inv * (dy.widen() * w - normal * mean));
        }
    }
}

/// Terms of a sum: the squares of a row's elements.
struct Squares<'a, T>(&'a [T]);

impl<T: Real> Terms for Squares<'_, T> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0.len()
    }
    #[inline(always)]
    fn add(&self, v: usize, lanes: &mut Vector) {
        let x = &self.0.as_chunks::<LANES>().0[v];
        for i in 0..LANES {
            lanes[i] = x[i].widen().mul_add(x[i].widen(), lanes[i]);
        }
    }
    #[inline(always)]
    fn add_tail(&self, lanes: &mut Vector) {
        for (lane, x) in lanes.iter_mut().zip(self.0.as_chunks::<LANES>().1) {
            *lane = x.widen().mul_add(x.widen(), *lane);
        }
    }
}

/// Terms of a sum: dy·w · x̂ of a row.
struct Products<'a, T> {
    x: &'a [T],
    dy: &'a [T],
    weight: &'a [f32],
    inv: f32,
}

impl<T: Real> Terms for Products<'_, T> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.weight.len()
    }
    #[inline(always)]
    fn add(&self, v: usize, lanes: &mut Vector) {
        let (x, dy) = (&self.x.as_chunks::<LANES>().0[v], &self.dy.as_chunks::<LANES>().0[v]);
        let w = &self.weight.as_chunks::<LANES>().0[v];
        for i in 0..LANES {
            lanes[i] = (dy[i].widen() * w[i]).mul_add(x[i].widen() * self.inv, lanes[i]);
        }
    }
    #[inline(always)]
    fn add_tail(&self, lanes: &mut Vector) {
        let (x, dy) = (self.x.as_chunks::<LANES>().1, self.dy.as_chunks::<LANES>().1);
        let w = self.weight.as_chunks::<LANES>().1;
        for (((lane, x), dy), w) in lanes.iter_mut().zip(x).zip(dy).zip(w) {
            *lane = (dy.widen() * w).mul_add(x.widen() * self.inv, *lane);
        }
    }
}

/// Terms of the weight gradient: dy · x̂.
struct WeightTerms<'a, T> {
    x: &'a [T],
    inv_rms: &'a [f32],
    dy: &'a [T],
    d: usize,
}

impl<T: Real> ColumnTerms for WeightTerms<'_, T> {
    #[inline(always)]
    fn rows(&self) -> usize {
        self.inv_rms.len()
    }
    #[inline(always)]
    fn add<const N: usize>(&self, row: usize, first: usize, sums: &mut [f32; N]) {
        let (at, inv) = (row * self.d + first, self.inv_rms[row]);
        let (x, dy) = (&self.x[at..][..N], &self.dy[at..][..N]);
        for i in 0..N {
            sums[i] = dy[i].widen().mul_add(x[i].widen() * inv, sums[i]);
        }
    }
}

per_isa!(fn add_dweight<T: Real> = add_dweight_body; (x: &[T], inv_rms: &[f32], dy: &[T], d: usize, first: usize, sums: &mut [f32]));

/// Adds Σ over rows of dy · x̂ to the columns that start at `first`.
#[inline(always)]
fn add_dweight_body<T: Real>(x: &[T], inv_rms: &[f32], dy: &[T], d: usize, first: usize, sums: &mut [f32]) {
    add_columns(&WeightTerms { x, inv_rms, dy, d }, first, sums);
}

/// The same slice with a length that the compiler does not know. If the compiler knew that the loop runs once or twice, it would split
/// vectors into single lanes.
#[inline(always)]
fn unknown_length(x: &[f32]) -> &[f32] {
    &x[..std::hint::black_box(x.len())]
}

fn expect_columns(op: &'static str, d: usize) -> Result<()> {
    if d == 0 {
        return Err(Error::shape(op, "columns of x", 0, "at least one"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
