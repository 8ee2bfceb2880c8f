//! Column sums of a tensor, for the gradients of vectors. Rows form chunks of 64, and each chunk is summed in order; a tree over neighbours
//! then sums the chunks. The total is added once to the existing value ([`nibble_core::ops::RmsNormBackward`]).

use crate::Cpu;
use crate::simd::LANES;
use crate::sums::close_neighbours;
use nibble_core::ops::RmsNormBackward;
use rayon::prelude::*;

/// Number of rows in a chunk.
const CHUNK: usize = RmsNormBackward::<Cpu>::CHUNK;

/// Number of columns per task.
const COLUMNS: usize = 64;

/// The terms that each row adds to the column sums.
pub(in crate::ops) trait ColumnTerms {
    /// Number of rows.
    fn rows(&self) -> usize;

    /// Adds the row's terms to the sums of the columns that start at `first`.
    fn add<const N: usize>(&self, row: usize, first: usize, sums: &mut [f32; N]);
}

/// Adds the sums of the columns that start at `first`. This function is inlined into each instruction set's function.
#[inline(always)]
pub(in crate::ops) fn add_columns(terms: &impl ColumnTerms, first: usize, into: &mut [f32]) {
    // The scratch memory has one row of sums per chunk.
    let mut room = Vec::with_capacity(terms.rows().div_ceil(CHUNK) * COLUMNS);
    let (wide, rest) = into.as_chunks_mut::<COLUMNS>();
    let mut column = first;
    for into in wide {
        add_some(terms, column, into, &mut room);
        column += COLUMNS;
    }
    let (vectors, rest) = rest.as_chunks_mut::<LANES>();
    for into in vectors {
        add_some(terms, column, into, &mut room);
        column += LANES;
    }
    for into in rest {
        add_some(terms, column, std::array::from_mut(into), &mut room);
        column += 1;
    }
}

#[inline(always)]
fn add_some<const N: usize>(
    terms: &impl ColumnTerms,
    first: usize,
    into: &mut [f32; N],
    room: &mut Vec<f32>,
) {
    let rows = terms.rows();
    room.clear();
    for chunk in (0..rows).step_by(CHUNK) {
        let mut sums = [0.0f32; N];
        for row in chunk..rows.min(chunk + CHUNK) {
            terms.add(row, first, &mut sums);
        }
        room.extend_from_slice(&sums);
    }
    close_neighbours(room, N);
    into.iter_mut().zip(room).for_each(|(into, sums)| *into += *sums);
}

/// Calls `body(shard, first column, sums)` for all columns of `[shards, d]`; multi-threaded if `divide` is set.
pub(in crate::ops) fn for_columns(
    cpu: &Cpu,
    divide: bool,
    into: &mut [f32],
    d: usize,
    body: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    if !divide {
        into.chunks_exact_mut(d).enumerate().for_each(|(shard, sums)| body(shard, 0, sums));
        return;
    }
    cpu.pool().install(|| {
        into.par_chunks_exact_mut(d).enumerate().for_each(|(shard, sums)| {
            let blocks = sums.par_chunks_mut(COLUMNS).enumerate();
            blocks.for_each(|(i, sums)| body(shard, i * COLUMNS, sums));
        });
    });
}

#[cfg(test)]
pub(in crate::ops) mod tests {
    /// The definition of the tree over neighbours. An odd last value moves up a level unchanged. The sum of no values is 0.
    pub fn tree(mut level: Vec<f32>) -> f32 {
        while level.len() > 1 {
            let pairs = level.chunks_exact(2);
            let odd = pairs.remainder().to_vec();
            level = pairs.map(|pair| pair[0] + pair[1]).chain(odd).collect();
        }
        level.first().copied().unwrap_or(0.0)
    }
}
