//! Sums of squares (gradient norms): the levels of the trees over the sums of chunks.

use crate::Temporary;
use nibble_core::ops::ChunkSums;

/// The number of sums of one level of the tree whose sum is one value of the next level.
pub const GROUP: usize = 2048;

/// The number of sums of the next level of the tree, if a level has `sums` sums.
pub fn next_level(sums: usize) -> usize {
    sums.div_ceil(GROUP).max(1)
}

/// The buffer of each level of the tree, which is freed after the next level is computed. A level contains only the sums of tensors that
/// still have several sums per part, so the last level is empty.
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
