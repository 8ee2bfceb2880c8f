//! Sums of squares: chunks of tensors, and the levels of their trees.

use crate::Temporary;
use nibble_core::Backend;
use nibble_core::ops::SumSquares;

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

/// What a level takes, which has so many sums of each part of these tensors (`parts`, sums of a part).
pub fn level_temporary(tensors: impl IntoIterator<Item = (usize, usize)>) -> Temporary {
    let sums: usize = tensors.into_iter().map(|(parts, sums)| parts * sums).sum();
    Temporary::new("sums of squares", sums * size_of::<f64>())
}
