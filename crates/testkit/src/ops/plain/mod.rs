//! Elementwise operations, biases, transposes and sums of shards.

pub(super) mod bias;
pub(super) mod elementwise;
pub(super) mod gelu;

pub use {bias::*, elementwise::*, gelu::*};
