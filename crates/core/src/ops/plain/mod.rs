//! Elementwise operations, biases, transposes and sums of shards.

pub(super) mod bias;
pub(super) mod elementwise;

pub use bias::{AddBias, AddBiasBackward};
pub use elementwise::{
    Add, Cast, ChunkSums, CloseSquares, InitNormal, SQUARES_CHUNK, Squared, SumShards, SumSquares, Transpose,
    squares_chunks,
};
