//! The CPU code of [`nibble_core::ops::AssembleKv`]. One body is both specification and vectorised code: copies, sums and rotations, in
//! which every operation is rounded (no fma).

use crate::Cpu;
use crate::ops::norm::rope::{Places, turn};
use crate::simd::{Real, per_isa, rows_per_task};
use half::bf16;
use nibble_core::ops::{AssembleKv, AssembleKvBackward, AssembledKv, AssembledKvGrads};
use nibble_core::{DType, Result};
use rayon::prelude::*;

/// Sizes of heads, and the positions of rows in their sequences.
#[derive(Clone, Copy)]
struct Sizes<'a> {
    heads: usize,
    key_dim: usize,
    value_dim: usize,
    turned: usize,
    places: Places<'a>,
}

impl Sizes<'_> {
    fn up(&self) -> usize {
        self.heads * (self.key_dim + self.value_dim)
    }

    fn keys(&self) -> usize {
        self.heads * (self.key_dim + self.turned)
    }

    fn values(&self) -> usize {
        self.heads * self.value_dim
    }

    /// Cosines and sines of a row's position.
    #[inline(always)]
    fn angles<'t>(&self, table: &'t [f32], row: usize) -> (&'t [f32], &'t [f32]) {
        table[self.places.position(row) * self.turned..][..self.turned].split_at(self.turned / 2)
    }
}

/// Returns keys, each with the rotated shared key appended, and values.
pub(crate) fn assemble_kv(cpu: &Cpu, op: AssembleKv<'_, Cpu>) -> Result<AssembledKv<Cpu>> {
    match op.up.dtype() {
        DType::F32 => assemble::<f32>(cpu, &op),
        DType::Bf16 => assemble::<bf16>(cpu, &op),
    }
}

fn assemble<T: Real>(cpu: &Cpu, op: &AssembleKv<'_, Cpu>) -> Result<AssembledKv<Cpu>> {
    const OP: &str = "assemble_kv";
    let mut out = op.result(cpu)?;
    let (turned, rows) = (op.table.cols, op.up.rows);
    let (heads, key_dim, value_dim) = (op.heads(), op.key_dim, op.value_dim);
    let sizes = Sizes { heads, key_dim, value_dim, turned, places: Places::of(op.positions) };
    let (up, shared) = (T::slice(OP, "up", op.up)?, T::slice(OP, "shared", op.shared)?);
    let table = op.table.f32(OP, "table")?.as_slice();
    let (k, v) = (T::slice_mut(OP, &mut out.k)?, T::slice_mut(OP, &mut out.v)?);
    let step = rows_per_task(cpu, rows, sizes.keys() + sizes.values());
    let tasks = up.par_chunks(step * sizes.up()).zip(shared.par_chunks(step * turned));
    let tasks = tasks.zip(k.par_chunks_mut(step * sizes.keys()));
    let tasks = tasks.zip(v.par_chunks_mut(step * sizes.values())).enumerate();
    cpu.pool().install(|| {
        tasks.for_each(|(i, (((up, shared), k), v))| {
            assemble_rows(cpu.isa(), sizes, table, i * step, up, shared, k, v);
        });
    });
    Ok(out)
}

per_isa!(fn assemble_rows<T: Real> = assemble_rows_body; (
    sizes: Sizes<'_>,
    table: &[f32],
    first_row: usize,
    up: &[T],
    shared: &[T],
    k: &mut [T],
    v: &mut [T],
));

#[inline(always)]
fn assemble_rows_body<T: Real>(
    sizes: Sizes<'_>,
    table: &[f32],
    first_row: usize,
    up: &[T],
    shared: &[T],
    k: &mut [T],
    v: &mut [T],
) {
    let Sizes { key_dim, value_dim, turned, .. } = sizes;
    let mut key = vec![T::round(0.0); turned];
    let inputs = up.chunks_exact(sizes.up()).zip(shared.chunks_exact(turned));
    let outputs = k.chunks_exact_mut(sizes.keys()).zip(v.chunks_exact_mut(sizes.values()));
    for (r, ((up, shared), (k, v))) in inputs.zip(outputs).enumerate() {
        turn(shared, sizes.angles(table, first_row + r), 1.0, &mut key);
        let heads = k.chunks_exact_mut(key_dim + turned).zip(v.chunks_exact_mut(value_dim));
        for (up, (k, v)) in up.chunks_exact(key_dim + value_dim).zip(heads) {
            k[..key_dim].copy_from_slice(&up[..key_dim]);
            k[key_dim..].copy_from_slice(&key);
            v.copy_from_slice(&up[key_dim..]);
        }
    }
}

/// The gradients of the up-projection's output and of the shared key.
pub(crate) fn assemble_kv_backward(
    cpu: &Cpu,
    op: AssembleKvBackward<'_, Cpu>,
) -> Result<AssembledKvGrads<Cpu>> {
    match op.dk.dtype() {
        DType::F32 => backward::<f32>(cpu, &op),
        DType::Bf16 => backward::<bf16>(cpu, &op),
    }
}

fn backward<T: Real>(cpu: &Cpu, op: &AssembleKvBackward<'_, Cpu>) -> Result<AssembledKvGrads<Cpu>> {
    const OP: &str = "assemble_kv_backward";
    let mut out = op.result(cpu)?;
    let (turned, rows) = (op.table.cols, op.dk.rows);
    let (heads, key_dim, value_dim) = (op.heads(), op.key_dim, op.value_dim);
    let sizes = Sizes { heads, key_dim, value_dim, turned, places: Places::of(op.positions) };
    let (dk, dv) = (T::slice(OP, "dk", op.dk)?, T::slice(OP, "dv", op.dv)?);
    let table = op.table.f32(OP, "table")?.as_slice();
    let (dup, dshared) = (T::slice_mut(OP, &mut out.dup)?, T::slice_mut(OP, &mut out.dshared)?);
    let step = rows_per_task(cpu, rows, sizes.keys() + sizes.values());
    let tasks = dk.par_chunks(step * sizes.keys()).zip(dv.par_chunks(step * sizes.values()));
    let tasks = tasks.zip(dup.par_chunks_mut(step * sizes.up()));
    let tasks = tasks.zip(dshared.par_chunks_mut(step * turned)).enumerate();
    cpu.pool().install(|| {
        tasks.for_each(|(i, (((dk, dv), dup), dshared))| {
            backward_rows(cpu.isa(), sizes, table, i * step, dk, dv, dup, dshared);
        });
    });
    Ok(out)
}

per_isa!(fn backward_rows<T: Real> = backward_rows_body; (
    sizes: Sizes<'_>,
    table: &[f32],
    first_row: usize,
    dk: &[T],
    dv: &[T],
    dup: &mut [T],
    dshared: &mut [T],
));

#[inline(always)]
fn backward_rows_body<T: Real>(
    sizes: Sizes<'_>,
    table: &[f32],
    first_row: usize,
    dk: &[T],
    dv: &[T],
    dup: &mut [T],
    dshared: &mut [T],
) {
    const PARTS: usize = AssembleKvBackward::<Cpu>::PARTIAL_SUMS;
    let Sizes { key_dim, value_dim, turned, .. } = sizes;
    let mut sums = vec![0f32; PARTS * turned];
    let inputs = dk.chunks_exact(sizes.keys()).zip(dv.chunks_exact(sizes.values()));
    let outputs = dup.chunks_exact_mut(sizes.up()).zip(dshared.chunks_exact_mut(turned));
    for (r, ((dk, dv), (dup, dshared))) in inputs.zip(outputs).enumerate() {
        sums.fill(0.0);
        let heads = dk.chunks_exact(key_dim + turned).zip(dv.chunks_exact(value_dim));
        for (head, (dup, (dk, dv))) in dup.chunks_exact_mut(key_dim + value_dim).zip(heads).enumerate() {
            dup[..key_dim].copy_from_slice(&dk[..key_dim]);
            dup[key_dim..].copy_from_slice(dv);
            let sum = &mut sums[head % PARTS * turned..][..turned];
            for (sum, dk) in sum.iter_mut().zip(&dk[key_dim..]) {
                *sum += dk.widen();
            }
        }
        // Each pass halves the number of partial sums, until the first is the total.
        let mut parts = PARTS / 2;
        while parts > 0 {
            let (low, high) = sums.split_at_mut(parts * turned);
            for (low, high) in low.iter_mut().zip(&high[..parts * turned]) {
                *low += high;
            }
            parts /= 2;
        }
        turn(&sums[..turned], sizes.angles(table, first_row + r), -1.0, dshared);
    }
}

#[cfg(test)]
mod tests;
