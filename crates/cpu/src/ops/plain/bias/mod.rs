//! The CPU code of [`nibble_core::ops::AddBias`].

use crate::Cpu;
use crate::ops::plain::column_sums::{ColumnTerms, add_columns, for_columns};
use crate::ops::plain::elementwise::for_rows;
use crate::simd::{Real, per_isa, rows_per_task};
use half::bf16;
use nibble_core::ops::{AddBias, AddBiasBackward};
use nibble_core::{DType, Data, Error, Result};

per_isa!(fn add_to_rows<T: Real> = add_to_rows_body; (bias: &[f32], x: &mut [T]));

#[inline(always)]
fn add_to_rows_body<T: Real>(bias: &[f32], x: &mut [T]) {
    for x in x.chunks_exact_mut(bias.len()) {
        for (x, bias) in x.iter_mut().zip(bias) {
            *x = T::round(x.widen() + bias);
        }
    }
}

/// Adds the bias to each row of x in place, with one rounding.
pub(crate) fn add_bias(cpu: &Cpu, op: AddBias<'_, Cpu>) -> Result<()> {
    let bias = op.bias.f32("add_bias", "bias")?.as_slice();
    match &mut op.x.data {
        Data::F32(x) => for_rows(cpu, x.as_mut_slice(), bias.len(), |_, x| add_to_rows(cpu.isa(), bias, x)),
        Data::Bf16(x) => for_rows(cpu, x.as_mut_slice(), bias.len(), |_, x| add_to_rows(cpu.isa(), bias, x)),
    }
    Ok(())
}

/// Terms of the column sums: dy itself.
struct Gradients<'a, T> {
    dy: &'a [T],
    d: usize,
}

impl<T: Real> ColumnTerms for Gradients<'_, T> {
    #[inline(always)]
    fn rows(&self) -> usize {
        self.dy.len() / self.d
    }
    #[inline(always)]
    fn add<const N: usize>(&self, row: usize, first: usize, sums: &mut [f32; N]) {
        let dy = &self.dy[row * self.d + first..][..N];
        for i in 0..N {
            sums[i] += dy[i].widen();
        }
    }
}

per_isa!(fn add_dbias<T: Real> = add_dbias_body; (dy: &[T], d: usize, first: usize, sums: &mut [f32]));

#[inline(always)]
fn add_dbias_body<T: Real>(dy: &[T], d: usize, first: usize, sums: &mut [f32]) {
    add_columns(&Gradients { dy, d }, first, sums);
}

/// Accumulates the bias gradient. Each shard's sum starts at zero and is added once.
pub(crate) fn add_bias_backward(cpu: &Cpu, op: AddBiasBackward<'_, Cpu>) -> Result<()> {
    match op.dy.dtype() {
        DType::F32 => backward::<f32>(cpu, op),
        DType::Bf16 => backward::<bf16>(cpu, op),
    }
}

fn backward<T: Real>(cpu: &Cpu, op: AddBiasBackward<'_, Cpu>) -> Result<()> {
    const OP: &str = "add_bias_backward";
    let ((rows, d), shards) = (op.dy.shape(), op.dbias.rows);
    if d == 0 || shards == 0 {
        let what = if d == 0 { "columns of dy" } else { "rows of dbias" };
        return Err(Error::shape(OP, what, 0, "at least one"));
    }
    let dy = T::slice(OP, "dy", op.dy)?;
    let Data::F32(dbias) = &mut op.dbias.data else {
        return Err(Error::shape(OP, "type of dbias", DType::Bf16, DType::F32));
    };
    let elements = rows / shards * d;
    let divide = rows_per_task(cpu, rows, d) < rows;
    for_columns(cpu, divide, dbias.as_mut_slice(), d, |shard, first, sums| {
        add_dbias(cpu.isa(), &dy[shard * elements..][..elements], d, first, sums);
    });
    Ok(())
}

#[cfg(test)]
mod tests;
