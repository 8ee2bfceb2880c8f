//! See [`nibble_core::ops::Embed`] and [`nibble_core::ops::EmbedBackward`].

use super::elementwise::{accumulate_bf16, accumulate_f32, for_rows, round_bf16, round_f32, run_shares};
use crate::gemm::Isa;
use crate::simd::{Real, rows_per_task};
use crate::{Buf, Cpu};
use nibble_core::ops::{Embed, EmbedBackward, EmbedOut};
use nibble_core::{DType, Data, Error, Result, Tensor};

/// Copies rows, rounding them on the way.
pub(crate) fn embed(cpu: &Cpu, op: Embed<'_, Cpu>) -> Result<EmbedOut<Cpu>> {
    let table = op.table.f32("embed", "table")?.as_slice();
    let (ids, vocab, d) = (op.ids.as_slice(), op.table.rows, op.table.cols);
    let bad = ids.iter().filter(|&&id| row_of(id, vocab).is_none()).count() as u64;
    let data = match op.dtype {
        DType::F32 => Data::F32(look_up(cpu, table, ids, d, round_f32)),
        DType::Bf16 => Data::Bf16(look_up(cpu, table, ids, d, round_bf16)),
    };
    Ok(EmbedOut { x: Tensor::new(data, ids.len(), d)?, bad_ids: cpu.computed(&[bad]) })
}

/// The row of a table that an id stands for, if it does.
fn row_of(id: i32, vocab: usize) -> Option<usize> {
    usize::try_from(id).ok().filter(|&row| row < vocab)
}

fn look_up<T: Real>(
    cpu: &Cpu,
    table: &[f32],
    ids: &[i32],
    d: usize,
    round: fn(Isa, &[f32], &mut [T]),
) -> Buf<T> {
    let mut out = cpu.scratch::<T>(ids.len() * d);
    let vocab = table.len() / d.max(1);
    for_rows(cpu, out.as_mut_slice(), d, |first, out| {
        for (out, &id) in out.chunks_exact_mut(d).zip(&ids[first..]) {
            match row_of(id, vocab) {
                Some(row) => round(cpu.isa(), &table[row * d..][..d], out),
                None => out.fill(T::round(0.0)),
            }
        }
    });
    out
}

/// Threads divide the rows of the table; each adds to its own in the order of the tokens.
pub(crate) fn embed_backward(cpu: &Cpu, op: EmbedBackward<'_, Cpu>) -> Result<()> {
    const OP: &str = "embed_backward";
    if op.shards == 0 {
        return Err(Error::shape(OP, "shards", 0, "at least 1"));
    }
    let ids = op.ids.as_slice();
    let (vocab, dtype) = (op.grad.rows / op.shards, op.grad.dtype());
    let Data::F32(grad) = &mut op.grad.data else {
        return Err(Error::shape(OP, "type of grad", dtype, DType::F32));
    };
    let grad = grad.as_mut_slice();
    let tokens = Tokens { ids, shards: op.shards, vocab, d: op.dy.cols };
    match &op.dy.data {
        Data::F32(dy) => tokens.accumulate(cpu, dy.as_slice(), grad, accumulate_f32),
        Data::Bf16(dy) => tokens.accumulate(cpu, dy.as_slice(), grad, accumulate_bf16),
    }
    Ok(())
}

/// Which row of the gradient each row of dy goes to.
struct Tokens<'a> {
    ids: &'a [i32],
    shards: usize,
    vocab: usize,
    d: usize,
}

impl Tokens<'_> {
    fn accumulate<T: Real>(&self, cpu: &Cpu, dy: &[T], grad: &mut [f32], add: fn(Isa, &[T], &mut [f32])) {
        let (d, per_shard) = (self.d, self.ids.len() / self.shards);
        if d == 0 || self.vocab == 0 || per_shard == 0 {
            return;
        }
        // Every share reads all ids of its shard, so there are few of them: one a thread at most, unless shards are more.
        let few = rows_per_task(cpu, self.ids.len(), d) >= self.ids.len();
        let threads = if few { 1 } else { cpu.pool().current_num_threads() };
        let rows = self.vocab.div_ceil(threads.div_ceil(self.shards));
        let mut shares = Vec::new();
        for (shard, grad) in grad.chunks_mut(self.vocab * d).enumerate() {
            for (i, grad) in grad.chunks_mut(rows * d).enumerate() {
                shares.push((shard, i * rows, grad));
            }
        }
        let body = |(shard, first, grad): (usize, usize, &mut [f32])| {
            let tokens = shard * per_shard..(shard + 1) * per_shard;
            for token in tokens {
                // A negative id is past every share.
                let row = (self.ids[token] as usize).wrapping_sub(first);
                if row < grad.len() / d {
                    add(cpu.isa(), &dy[token * d..][..d], &mut grad[row * d..][..d]);
                }
            }
        };
        if few { shares.into_iter().for_each(body) } else { run_shares(cpu, shares, body) }
    }
}

#[cfg(test)]
mod tests;
