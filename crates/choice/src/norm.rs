//! Norms: heads that are turned afterwards, and the sums of a weight's gradient.

use crate::Temporary;
use nibble_core::Backend;
use nibble_core::ops::RmsNormBackward;

/// Columns of heads that are normed and turned in one pass; others by two operations.
pub const TURNED_HEADS: [usize; 3] = [64, 128, 256];

/// Whether heads of so many columns are normed and turned in one pass.
pub fn turns_as_it_norms(head_dim: usize) -> bool {
    TURNED_HEADS.contains(&head_dim)
}

/// Chunks of rows of a shard, over which a weight's gradient is summed.
pub const fn chunks_of_shard<B: Backend>(rows: usize, shards: usize) -> usize {
    (rows / if shards == 0 { 1 } else { shards }).div_ceil(RmsNormBackward::<B>::CHUNK)
}

/// What a weight's gradient takes: a sum of each chunk of rows.
pub fn dweight_temporary<B: Backend>((rows, cols): (usize, usize), shards: usize) -> Temporary {
    let sums = shards * chunks_of_shard::<B>(rows, shards) * cols;
    Temporary::new("sums over chunks of rows", sums * size_of::<f32>())
}
