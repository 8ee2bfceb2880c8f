//! Sums of squares: chunks of tensors, and the levels of their trees.

use crate::Temporary;
use nibble_core::Backend;
use nibble_core::ops::{Squared, SumSquares};

/// Sums of a level that become one of the next.
pub const GROUP: usize = 2048;

/// Chunks of a part of a tensor of so many elements.
pub const fn chunks<B: Backend>(elements: usize) -> usize {
    elements.div_ceil(SumSquares::<B>::CHUNK)
}

/// Sums of the next level.
pub fn next_level(sums: usize) -> usize {
    sums.div_ceil(GROUP).max(1)
}

/// What each level takes, until the next one has been made of it: the sums of chunks, then those of the sums that are more than one a part. The
/// last level is empty.
pub fn levels<B: Backend>(op: &SumSquares<'_, B>) -> Vec<Temporary> {
    let of_chunks =
        |&Squared { x, parts, .. }: &Squared<'_, B>| (parts, chunks::<B>(x.rows * x.cols / parts.max(1)));
    let mut open: Vec<(usize, usize)> = op.tensors.iter().map(of_chunks).collect();
    let mut all = Vec::new();
    loop {
        let sums: usize = open.iter().map(|(parts, sums)| parts * sums).sum();
        all.push(Temporary::new("sums of squares", sums * size_of::<f64>()));
        if open.is_empty() {
            return all;
        }
        open.iter_mut().for_each(|(_, sums)| *sums = next_level(*sums));
        open.retain(|&(_, sums)| sums > 1);
    }
}
