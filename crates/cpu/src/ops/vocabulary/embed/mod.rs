//! The CPU code of [`nibble_core::ops::Embed`] and [`nibble_core::ops::EmbedBackward`].

use crate::Cpu;
use crate::gemm::Isa;
use crate::ops::plain::elementwise::{for_rows, round_bf16, round_f32, run_shares};
use crate::simd::{LANES, Real, per_isa, rows_per_task};
use crate::sums::close_neighbours;
use nibble_core::ops::{Embed, EmbedBackward, EmbedOut};
use nibble_core::{DType, Data, Error, Result};
use std::ops::Range;

/// Copies rows of the embedding, rounded to the result's type.
pub(crate) fn embed(cpu: &Cpu, op: Embed<'_, Cpu>) -> Result<EmbedOut<Cpu>> {
    let table = op.table.f32("embed", "table")?.as_slice();
    let mut out = op.result(cpu)?;
    let (ids, vocab) = (op.ids.as_slice(), op.table.rows);
    out.bad_ids.as_mut_slice()[0] = ids.iter().filter(|&&id| row_of(id, vocab).is_none()).count() as u64;
    match &mut out.x.data {
        Data::F32(x) => look_up(cpu, table, ids, x.as_mut_slice(), round_f32),
        Data::Bf16(x) => look_up(cpu, table, ids, x.as_mut_slice(), round_bf16),
    }
    Ok(out)
}

/// The embedding row of an id, if the id is in the vocabulary.
fn row_of(id: i32, vocab: usize) -> Option<usize> {
    usize::try_from(id).ok().filter(|&row| row < vocab)
}

fn look_up<T: Real>(cpu: &Cpu, table: &[f32], ids: &[i32], out: &mut [T], round: fn(Isa, &[f32], &mut [T])) {
    let d = out.len() / ids.len().max(1);
    let vocab = table.len() / d.max(1);
    for_rows(cpu, out, d, |first, out| {
        for (out, &id) in out.chunks_exact_mut(d).zip(&ids[first..]) {
            match row_of(id, vocab) {
                Some(row) => round(cpu.isa(), &table[row * d..][..d], out),
                None => out.fill(T::round(0.0)),
            }
        }
    });
}

per_isa!(fn add_tokens<T: Real> = add_tokens_body; (tokens: &[u32], dy: &[T], row: &mut [f32], room: &mut Vec<f32>));

/// Number of columns summed at a time, in registers.
const COLUMNS: usize = 64;

/// Adds the dy rows of one id's tokens to the id's row of the gradient.
#[inline(always)]
fn add_tokens_body<T: Real>(tokens: &[u32], dy: &[T], row: &mut [f32], room: &mut Vec<f32>) {
    let d = row.len();
    let (wide, rest) = row.as_chunks_mut::<COLUMNS>();
    for (i, sums) in wide.iter_mut().enumerate() {
        add_columns(tokens, dy, d, i * COLUMNS, sums, room);
    }
    let mut column = d - rest.len();
    let (vectors, rest) = rest.as_chunks_mut::<LANES>();
    for sums in vectors {
        add_columns(tokens, dy, d, column, sums, room);
        column += LANES;
    }
    for sum in rest {
        add_columns(tokens, dy, d, column, std::array::from_mut(sum), room);
        column += 1;
    }
}

#[inline(always)]
fn add_columns<T: Real, const N: usize>(
    tokens: &[u32],
    dy: &[T],
    d: usize,
    first: usize,
    sums: &mut [f32; N],
    room: &mut Vec<f32>,
) {
    // Most ids are rare, and a single chunk needs no scratch memory.
    if tokens.len() <= EmbedBackward::<Cpu>::CHUNK {
        let acc = chunk_sum::<T, N>(tokens, dy, d, first);
        for i in 0..N {
            sums[i] += acc[i];
        }
        return;
    }
    room.clear();
    for chunk in tokens.chunks(EmbedBackward::<Cpu>::CHUNK) {
        room.extend_from_slice(&chunk_sum::<T, N>(chunk, dy, d, first));
    }
    close_neighbours(room, N);
    sums.iter_mut().zip(room).for_each(|(sum, chunks)| *sum += *chunks);
}

/// The sum over a chunk's tokens, in order, starting at 0.
#[inline(always)]
fn chunk_sum<T: Real, const N: usize>(tokens: &[u32], dy: &[T], d: usize, first: usize) -> [f32; N] {
    let mut acc = [0.0f32; N];
    for &token in tokens {
        let x = &dy[token as usize * d + first..][..N];
        for i in 0..N {
            acc[i] += x[i].widen();
        }
    }
    acc
}

/// Accumulates the embedding's gradient; threads divide the rows of the embedding.
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
        Data::F32(dy) => tokens.accumulate(cpu, dy.as_slice(), grad),
        Data::Bf16(dy) => tokens.accumulate(cpu, dy.as_slice(), grad),
    }
    Ok(())
}

/// Maps each row of dy to its row of the gradient.
struct Tokens<'a> {
    ids: &'a [i32],
    shards: usize,
    vocab: usize,
    d: usize,
}

impl Tokens<'_> {
    fn accumulate<T: Real>(&self, cpu: &Cpu, dy: &[T], grad: &mut [f32]) {
        let (d, per_shard) = (self.d, self.ids.len() / self.shards);
        if d == 0 || self.vocab == 0 || per_shard == 0 {
            return;
        }
        let sorted: Vec<ById> = self.ids.chunks(per_shard).map(|ids| ById::new(ids, self.vocab)).collect();
        let few = rows_per_task(cpu, self.ids.len(), d) >= self.ids.len();
        // Each thread gets several shares, because some ids are more frequent than others.
        let threads = if few { 1 } else { 4 * cpu.pool().current_num_threads() };
        let rows = self.vocab.div_ceil(threads.div_ceil(self.shards));
        let mut shares = Vec::new();
        for ((tokens, dy), grad) in
            sorted.iter().zip(dy.chunks(per_shard * d)).zip(grad.chunks_mut(self.vocab * d))
        {
            for (i, grad) in grad.chunks_mut(rows * d).enumerate() {
                shares.push((tokens, dy, i * rows, grad));
            }
        }
        let body = |(tokens, dy, first, grad): (&ById, &[T], usize, &mut [f32])| {
            let mut room = Vec::new();
            for (id, tokens) in tokens.of(first..first + grad.len() / d) {
                add_tokens(cpu.isa(), tokens, dy, &mut grad[(id - first) * d..][..d], &mut room);
            }
        };
        if few { shares.into_iter().for_each(body) } else { run_shares(cpu, shares, body) }
    }
}

/// A shard's tokens sorted by id; tokens with the same id keep their order.
struct ById {
    tokens: Vec<u32>,
    /// Each id that occurs and the index of its first token, in ascending order of ids.
    runs: Vec<(usize, usize)>,
}

impl ById {
    /// Sorts the tokens by id and leaves out tokens whose id is outside the embedding. The sort is a counting sort if there are at most as
    /// many ids as tokens, otherwise a comparison sort. Both kinds of sort keep the order of tokens.
    fn new(ids: &[i32], vocab: usize) -> Self {
        if vocab <= ids.len() { Self::counted(ids, vocab) } else { Self::compared(ids, vocab) }
    }

    fn counted(ids: &[i32], vocab: usize) -> Self {
        let rows = || ids.iter().map(|&id| row_of(id, vocab));
        let mut next = vec![0; vocab];
        rows().flatten().for_each(|row| next[row] += 1);
        let (mut runs, mut start) = (Vec::new(), 0);
        for (id, next) in next.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            runs.push((id, start));
            start += std::mem::replace(next, start);
        }
        let mut tokens = vec![0; start];
        for (token, row) in (0..).zip(rows()) {
            if let Some(row) = row {
                tokens[next[row]] = token;
                next[row] += 1;
            }
        }
        Self { tokens, runs }
    }

    fn compared(ids: &[i32], vocab: usize) -> Self {
        let id_and_token = |(token, id): (u64, &i32)| Some((row_of(*id, vocab)? as u64) << 32 | token);
        let mut sorted: Vec<u64> = (0..).zip(ids).filter_map(id_and_token).collect();
        sorted.sort_unstable();
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (at, key) in sorted.iter().enumerate() {
            let id = (key >> 32) as usize;
            if runs.last().is_none_or(|(last, _)| *last != id) {
                runs.push((id, at));
            }
        }
        Self { tokens: sorted.into_iter().map(|key| key as u32).collect(), runs }
    }

    /// The ids of this range that occur, with their tokens.
    fn of(&self, ids: Range<usize>) -> impl Iterator<Item = (usize, &[u32])> {
        let first = self.runs.partition_point(|(id, _)| *id < ids.start);
        let end = self.runs.partition_point(|(id, _)| *id < ids.end);
        (first..end).map(|run| {
            let (id, start) = self.runs[run];
            let end = self.runs.get(run + 1).map_or(self.tokens.len(), |(_, start)| *start);
            (id, &self.tokens[start..end])
        })
    }
}

#[cfg(test)]
mod tests;
