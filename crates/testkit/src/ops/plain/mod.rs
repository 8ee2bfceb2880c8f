//! Elementwise operations, biases, transposes and sums of shards.

pub(super) mod bias;
pub(super) mod elementwise;

pub use {bias::*, elementwise::*};
