//! The CPU code of [`nibble_core::ops::LayerNorm`].
//!
//! One body is both specification and vectorised code; it uses the sums of `crate::sums`.

use crate::Cpu;
use crate::ops::plain::column_sums::{ColumnTerms, add_columns, for_columns};
use crate::ops::plain::elementwise::{add_to, write_sum};
use crate::simd::{LANES, Real, per_isa, rows_per_task};
use crate::sums::{Terms, Vector, lanes_dot};
use half::bf16;
use nibble_core::ops::{LayerNorm, LayerNormBackward, LayerNormOut};
use nibble_core::{DType, Data, Error, Result, Tensor};
use nibble_formats::math::rsqrt;
use rayon::prelude::*;

/// Computes y, and the mean and 1 / standard deviation of each row; if `plus` is given, all of them for x + plus.
pub(crate) fn layer_norm(cpu: &Cpu, op: LayerNorm<'_, Cpu>) -> Result<LayerNormOut<Cpu>> {
    let mut out = op.result(cpu)?;
    if let (Some(plus), Some(sum)) = (op.plus, &mut out.sum) {
        write_sum(cpu, (op.x, plus), sum)?;
    }
    match op.x.dtype() {
        DType::F32 => forward::<f32>(cpu, &op, &mut out)?,
        DType::Bf16 => forward::<bf16>(cpu, &op, &mut out)?,
    }
    Ok(out)
}

/// Computes dx (with `plus` added if given) and accumulates into dweight. Each shard's sum starts at zero and is added once.
pub(crate) fn layer_norm_backward(cpu: &Cpu, op: LayerNormBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let (mut dx, plus) = (op.result(cpu)?, op.plus);
    match op.x.dtype() {
        DType::F32 => backward::<f32>(cpu, op, &mut dx)?,
        DType::Bf16 => backward::<bf16>(cpu, op, &mut dx)?,
    }
    add_to(cpu, plus, &mut dx)?;
    Ok(dx)
}

fn forward<T: Real>(cpu: &Cpu, op: &LayerNorm<'_, Cpu>, out: &mut LayerNormOut<Cpu>) -> Result<()> {
    const OP: &str = "layer_norm";
    let (rows, d) = op.x.shape();
    expect_columns(OP, d)?;
    let LayerNormOut { y, mean, inv_std, sum } = out;
    let x = T::slice(OP, "x", sum.as_ref().unwrap_or(op.x))?;
    let affine = [op.weight.f32(OP, "weight")?.as_slice(), op.bias.f32(OP, "bias")?.as_slice()];
    let (y, mean, inv_std) = (T::slice_mut(OP, y)?, mean.as_mut_slice(), inv_std.as_mut_slice());
    let (isa, eps, step) = (cpu.isa(), op.eps, rows_per_task(cpu, rows, d));
    if step >= rows {
        forward_rows(isa, x, affine, eps, y, [mean, inv_std]);
        return Ok(());
    }
    cpu.pool().install(|| {
        let statistics = mean.par_chunks_mut(step).zip(inv_std.par_chunks_mut(step));
        let tasks = x.par_chunks(step * d).zip(y.par_chunks_mut(step * d)).zip(statistics);
        tasks.for_each(|((x, y), (mean, inv_std))| forward_rows(isa, x, affine, eps, y, [mean, inv_std]));
    });
    Ok(())
}

per_isa!(fn forward_rows<T: Real> = forward_rows_body; (x: &[T], affine: [&[f32]; 2], eps: f32, y: &mut [T], statistics: [&mut [f32]; 2]));

#[inline(always)]
fn forward_rows_body<T: Real>(
    x: &[T],
    [weight, bias]: [&[f32]; 2],
    eps: f32,
    y: &mut [T],
    [means, inv_stds]: [&mut [f32]; 2],
) {
    let d = weight.len();
    let rows = x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(means).zip(inv_stds);
    for (((x, y), row_mean), row_inv) in rows {
        let mean = sum_of(d, &Values { x }) / d as f32;
        let inv = rsqrt(sum_of(d, &Deviations { x, mean }) / d as f32 + eps);
        for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
            *y = T::round((x.widen() - mean) * inv * w + b);
        }
        (*row_mean, *row_inv) = (mean, inv);
    }
}

/// The sum of a row of `d` terms; the row lengths of small models have bodies in which the lanes stay in registers.
#[inline(always)]
fn sum_of(d: usize, terms: &impl Terms) -> f32 {
    match d {
        32 => lanes_dot::<32>(terms),
        64 => lanes_dot::<64>(terms),
        128 => lanes_dot::<128>(terms),
        _ => lanes_dot::<0>(terms),
    }
}

fn backward<T: Real>(cpu: &Cpu, op: LayerNormBackward<'_, Cpu>, dx: &mut Tensor<Cpu>) -> Result<()> {
    const OP: &str = "layer_norm_backward";
    let (rows, d) = op.x.shape();
    expect_columns(OP, d)?;
    let (x, dy) = (T::slice(OP, "x", op.x)?, T::slice(OP, "dy", op.dy)?);
    let weight = op.weight.f32(OP, "weight")?.as_slice();
    let statistics = [op.mean.as_slice(), op.inv_std.as_slice()];
    let shards = op.dweight.rows;
    if shards == 0 {
        return Err(Error::shape(OP, "rows of dweight", 0, "at least one shard"));
    }
    let Data::F32(dweight) = &mut op.dweight.data else {
        return Err(Error::shape(OP, "type of dweight", DType::Bf16, DType::F32));
    };
    let dx = T::slice_mut(OP, dx)?;
    let (isa, step) = (cpu.isa(), rows_per_task(cpu, rows, d));
    let divide = step < rows;
    if divide {
        cpu.pool().install(|| {
            let tasks = x.par_chunks(step * d).zip(dy.par_chunks(step * d)).zip(dx.par_chunks_mut(step * d));
            let tasks = tasks.zip(statistics[0].par_chunks(step).zip(statistics[1].par_chunks(step)));
            tasks.for_each(|(((x, dy), dx), (mean, inv))| backward_rows(isa, x, weight, [mean, inv], dy, dx));
        });
    } else {
        backward_rows(isa, x, weight, statistics, dy, dx);
    }
    let each = rows / shards;
    for_columns(cpu, divide, dweight.as_mut_slice(), d, |shard, first, sums| {
        let range = shard * each..(shard + 1) * each;
        let elements = range.start * d..range.end * d;
        let statistics = statistics.map(|x| &x[range.clone()]);
        add_dweight(isa, &x[elements.clone()], statistics, &dy[elements], d, first, sums);
    });
    Ok(())
}

per_isa!(fn backward_rows<T: Real> = backward_rows_body; (x: &[T], weight: &[f32], statistics: [&[f32]; 2], dy: &[T], dx: &mut [T]));

/// dx = inv_std · ((g − mean(g)) − x̂ · mean(g·x̂)), g = dy·w.
#[inline(always)]
fn backward_rows_body<T: Real>(
    x: &[T],
    weight: &[f32],
    [means, inv_stds]: [&[f32]; 2],
    dy: &[T],
    dx: &mut [T],
) {
    let d = weight.len();
    let rows = x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(dx.chunks_exact_mut(d));
    for (((x, dy), dx), (&mean, &inv)) in rows.zip(means.iter().zip(inv_stds)) {
        let mean_g = sum_of(d, &Weighted { dy, weight }) / d as f32;
        let mean_gx = sum_of(d, &Products { x, dy, weight, mean, inv }) / d as f32;
        for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
            let normal = (x.widen() - mean) * inv;
            *dx = T::round(inv * ((dy.widen() * w - mean_g) - normal * mean_gx));
        }
    }
}

/// Terms of a sum over a row, of which one is added to its lane: [`Terms`] for all vectors and for the rest.
macro_rules! terms {
    ($name:ident, $length:ident, |$own:ident, $i:ident, $lane:ident| $add:expr) => {
        impl<T: Real> Terms for $name<'_, T> {
            #[inline(always)]
            fn len(&self) -> usize {
                self.$length.len()
            }
            #[inline(always)]
            fn add(&self, v: usize, lanes: &mut Vector) {
                let $own = self.part(v * LANES, LANES);
                for ($i, lane) in lanes.iter_mut().enumerate() {
                    let $lane = *lane;
                    *lane = $add;
                }
            }
            #[inline(always)]
            fn add_tail(&self, lanes: &mut Vector) {
                let first = self.$length.len() / LANES * LANES;
                let $own = self.part(first, self.$length.len() - first);
                for ($i, lane) in lanes.iter_mut().enumerate().take(self.$length.len() - first) {
                    let $lane = *lane;
                    *lane = $add;
                }
            }
        }
    };
}

/// Terms of a sum: a row's elements.
struct Values<'a, T> {
    x: &'a [T],
}

impl<'a, T> Values<'a, T> {
    #[inline(always)]
    fn part(&self, first: usize, len: usize) -> &'a [T] {
        &self.x[first..][..len]
    }
}

terms!(Values, x, |x, i, lane| lane + x[i].widen());

/// Terms of a sum: the squares of a row's deviations from its mean.
struct Deviations<'a, T> {
    x: &'a [T],
    mean: f32,
}

impl<'a, T> Deviations<'a, T> {
    #[inline(always)]
    fn part(&self, first: usize, len: usize) -> (&'a [T], f32) {
        (&self.x[first..][..len], self.mean)
    }
}

terms!(Deviations, x, |at, i, lane| {
    let off = at.0[i].widen() - at.1;
    off.mul_add(off, lane)
});

/// Terms of a sum: dy·w of a row.
struct Weighted<'a, T> {
    dy: &'a [T],
    weight: &'a [f32],
}

impl<'a, T> Weighted<'a, T> {
    #[inline(always)]
    fn part(&self, first: usize, len: usize) -> (&'a [T], &'a [f32]) {
        (&self.dy[first..][..len], &self.weight[first..][..len])
    }
}

terms!(Weighted, weight, |at, i, lane| lane + at.0[i].widen() * at.1[i]);

/// Terms of a sum: dy·w · x̂ of a row.
struct Products<'a, T> {
    x: &'a [T],
    dy: &'a [T],
    weight: &'a [f32],
    mean: f32,
    inv: f32,
}

impl<T> Products<'_, T> {
    #[inline(always)]
    fn part(&self, first: usize, len: usize) -> Self
    where
        Self: Sized,
    {
        let Self { x, dy, weight, mean, inv } = *self;
        Self { x: &x[first..][..len], dy: &dy[first..][..len], weight: &weight[first..][..len], mean, inv }
    }
}

terms!(Products, weight, |at, i, lane| {
    let normal = (at.x[i].widen() - at.mean) * at.inv;
    (at.dy[i].widen() * at.weight[i]).mul_add(normal, lane)
});

/// Terms of the weight gradient: dy · x̂.
struct WeightTerms<'a, T> {
    x: &'a [T],
    statistics: [&'a [f32]; 2],
    dy: &'a [T],
    d: usize,
}

impl<T: Real> ColumnTerms for WeightTerms<'_, T> {
    #[inline(always)]
    fn rows(&self) -> usize {
        self.statistics[0].len()
    }
    #[inline(always)]
    fn add<const N: usize>(&self, row: usize, first: usize, sums: &mut [f32; N]) {
        let (at, [mean, inv]) = (row * self.d + first, self.statistics.map(|x| x[row]));
        let (x, dy) = (&self.x[at..][..N], &self.dy[at..][..N]);
        for i in 0..N {
            sums[i] = dy[i].widen().mul_add((x[i].widen() - mean) * inv, sums[i]);
        }
    }
}

per_isa!(fn add_dweight<T: Real> = add_dweight_body; (x: &[T], statistics: [&[f32]; 2], dy: &[T], d: usize, first: usize, sums: &mut [f32]));

/// Adds Σ over rows of dy · x̂ to the columns that start at `first`.
#[inline(always)]
fn add_dweight_body<T: Real>(
    x: &[T],
    statistics: [&[f32]; 2],
    dy: &[T],
    d: usize,
    first: usize,
    sums: &mut [f32],
) {
    add_columns(&WeightTerms { x, statistics, dy, d }, first, sums);
}

fn expect_columns(op: &'static str, d: usize) -> Result<()> {
    if d == 0 {
        return Err(Error::shape(op, "columns of x", 0, "at least one"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
