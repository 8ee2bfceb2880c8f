//! Elementwise operations, biases, transposes and sums of shards.

pub mod bias;
pub(crate) mod column_sums;
pub mod elementwise;
pub mod gelu;
pub mod transpose;

pub(crate) use {bias::*, elementwise::*, gelu::*, transpose::*};
