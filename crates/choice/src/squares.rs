//! Sums of squares (gradient norms): the levels of the trees over the sums of chunks.

use crate::Temporary;
use nibble_core::ops::ChunkSums;

/// Number of sums of one level that are added to one sum of the next level.
pub const GROUP: usize = 2048;

/// Number of sums of the next level.
pub fn next_level(sums: usize) -> usize {
    sums.div_ceil(GROUP).max(1)
}

/// Temporary memory of each level, which lives until the next level is computed. A level holds the sums of tensors with more than one sum
/// per part, so the last level is empty.
pub fn levels(tensors: &[ChunkSums]) -> Vec<Temporary> {
    let mut open: Vec<(usize, usize)> = tensors.iter().map(|tensor| (tensor.parts, tensor.chunks)).collect();
    open.retain(|&(parts, _)| parts > 0);
    let mut all = Vec::new();
    while !open.is_empty() {
        open.iter_mut().for_each(|(_, sums)| *sums = next_level(*sums));
        open.retain(|&(_, sums)| sums > 1);
        let sums: usize = open.iter().map(|(parts, sums)| parts * sums).sum();
        all.push(Temporary::new("sums of squares", sums * size_of::<f64>()));
    }
    all
}
