//! The CPU code of [`nibble_core::ops::Rope`].
//!
//! x₀ and x₁ are the halves of a head's rotated part: y₀ = x₀·cos − x₁·sin, y₁ = x₁·cos + x₀·sin, in which every product is rounded (no
//! fma). One body is both specification and vectorised code.

use crate::Cpu;
use crate::simd::{Real, per_isa, rows_per_task};
use half::bf16;
use nibble_core::ops::{Positions, Rope};
use nibble_core::{DType, Result, Tensor};
use rayon::prelude::*;

/// Rotates each head's pairs in x by the angles of their row, or rotates them back.
pub(crate) fn rope(cpu: &Cpu, op: Rope<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let mut y = op.result(cpu)?;
    write_turned(cpu, &op, &mut y)?;
    Ok(y)
}

/// Writes the result of [`rope()`] to an existing tensor of the same type and shape as x.
pub(in crate::ops) fn write_turned(cpu: &Cpu, op: &Rope<'_, Cpu>, y: &mut Tensor<Cpu>) -> Result<()> {
    match op.x.dtype() {
        DType::F32 => rotate::<f32>(cpu, op, y),
        DType::Bf16 => rotate::<bf16>(cpu, op, y),
    }
}

fn rotate<T: Real>(cpu: &Cpu, op: &Rope<'_, Cpu>, y: &mut Tensor<Cpu>) -> Result<()> {
    const OP: &str = "rope";
    let (rows, cols) = op.x.shape();
    let x = T::slice(OP, "x", op.x)?;
    let turned = op.table.cols;
    let table = op.table.f32(OP, "table")?.as_slice();
    let sign = if op.inverse { -1.0 } else { 1.0 };
    let y = T::slice_mut(OP, y)?;
    let (isa, step) = (cpu.isa(), rows_per_task(cpu, rows, cols));
    let rotation = Rotation { turned, head_dim: op.head_dim, cols, places: Places::of(op.positions), sign };
    if step >= rows || cols == 0 {
        rotate_rows(isa, rotation, table, 0, x, y);
    } else {
        cpu.pool().install(|| {
            let tasks = x.par_chunks(step * cols).zip(y.par_chunks_mut(step * cols)).enumerate();
            tasks.for_each(|(i, (x, y))| rotate_rows(isa, rotation, table, i * step, x, y));
        });
    }
    Ok(())
}

/// [`Positions`] in host memory.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Places<'a> {
    seq_len: usize,
    first: usize,
    starts: Option<&'a [i32]>,
}

impl<'a> Places<'a> {
    pub fn of(positions: &'a Positions<Cpu>) -> Self {
        let &Positions { seq_len, first, ref starts } = positions;
        Self { seq_len, first, starts: starts.as_ref().map(|starts| starts.as_slice()) }
    }

    /// The position of a row in its sequence.
    #[inline(always)]
    pub fn position(&self, row: usize) -> usize {
        let at = row % self.seq_len;
        let start = self.starts.map_or(0, |starts| (starts[row].max(0) as usize).min(at));
        self.first + at - start
    }
}

/// The sizes, the positions of rows, and the sign of the angle.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    turned: usize,
    head_dim: usize,
    cols: usize,
    places: Places<'a>,
    sign: f32,
}

per_isa!(fn rotate_rows<T: Real> = rotate_rows_body; (rotation: Rotation<'_>, table: &[f32], first_row: usize, x: &[T], y: &mut [T]));

#[inline(always)]
fn rotate_rows_body<T: Real>(rotation: Rotation<'_>, table: &[f32], first_row: usize, x: &[T], y: &mut [T]) {
    // If half the rotated size is known at compile time, loops are whole vectors without a remainder: 2.5 times as fast at 16.
    match rotation.turned / 2 {
        8 => rotate_halves::<T, 8>(rotation, table, first_row, x, y),
        16 => rotate_halves::<T, 16>(rotation, table, first_row, x, y),
        32 => rotate_halves::<T, 32>(rotation, table, first_row, x, y),
        64 => rotate_halves::<T, 64>(rotation, table, first_row, x, y),
        _ => rotate_halves::<T, 0>(rotation, table, first_row, x, y),
    }
}

/// `HALF` is half the number of rotated elements of a head, or 0 for any number (`turned / 2`).
#[inline(always)]
fn rotate_halves<T: Real, const HALF: usize>(
    rotation: Rotation<'_>,
    table: &[f32],
    first_row: usize,
    x: &[T],
    y: &mut [T],
) {
    let half = if HALF == 0 { rotation.turned / 2 } else { HALF };
    if rotation.cols == 0 {
        return;
    }
    let (head_dim, kept) = (rotation.head_dim, rotation.head_dim - 2 * half);
    let rows = x.chunks_exact(rotation.cols).zip(y.chunks_exact_mut(rotation.cols));
    for (r, (x, y)) in rows.enumerate() {
        let position = rotation.places.position(first_row + r);
        let (cos, sin) = table[position * 2 * half..][..2 * half].split_at(half);
        for (x, y) in x.chunks_exact(head_dim).zip(y.chunks_exact_mut(head_dim)) {
            y[..kept].copy_from_slice(&x[..kept]);
            turn(&x[kept..][..2 * half], (cos, sin), rotation.sign, &mut y[kept..][..2 * half]);
        }
    }
}

/// Sets y to x with its pairs rotated by these angles times the sign; each element is rounded.
#[inline(always)]
pub(in crate::ops) fn turn<T: Real, U: Real>(x: &[T], (cos, sin): (&[f32], &[f32]), sign: f32, y: &mut [U]) {
    let half = cos.len();
    let ((x0, x1), (y0, y1)) = (x.split_at(half), y.split_at_mut(half));
    for i in 0..half {
        let (a, b, cos, sin) = (x0[i].widen(), x1[i].widen(), cos[i], sign * sin[i]);
        y0[i] = U::round(a * cos - b * sin);
        y1[i] = U::round(b * cos + a * sin);
    }
}

#[cfg(test)]
mod tests;
