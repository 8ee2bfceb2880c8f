//! Norms: RMSNorm fused with RoPE, and the partial sums of a weight's gradient.

use crate::Temporary;
use nibble_core::ops::RmsNormBackward;
use nibble_core::{Backend, Tensor};
use std::fmt;

/// Head sizes for which one kernel does RMSNorm and RoPE.
pub const TURNED_HEADS: [usize; 3] = [64, 128, 256];

/// The path of `norm_rope` and of its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormRopePath {
    /// One kernel does RMSNorm and RoPE.
    OnePass,
    /// Two operations, one after the other.
    Apart,
}

impl NormRopePath {
    /// For heads of `head_dim` columns.
    pub fn of(head_dim: usize) -> Self {
        if TURNED_HEADS.contains(&head_dim) { Self::OnePass } else { Self::Apart }
    }

    /// What the first of two operations passes to the second, in the size of x: the normed heads, or the gradient rotated back.
    pub fn between<B: Backend>(self, x: &Tensor<B>) -> Option<Temporary> {
        (self == Self::Apart).then(|| Temporary::new("heads between norm and rotation", x.bytes()))
    }
}

impl fmt::Display for NormRopePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OnePass => "norm and rotation in one pass",
            Self::Apart => "norm and rotation by themselves",
        })
    }
}

/// Chunks of rows per shard, over which a weight's gradient is summed.
pub const fn chunks_of_shard<B: Backend>(rows: usize, shards: usize) -> usize {
    (rows / if shards == 0 { 1 } else { shards }).div_ceil(RmsNormBackward::<B>::CHUNK)
}

/// Temporary memory of a weight's gradient: a sum per chunk of rows.
pub fn column_sums_temporary<B: Backend>((rows, cols): (usize, usize), shards: usize) -> Temporary {
    let sums = shards * chunks_of_shard::<B>(rows, shards) * cols;
    Temporary::new("sums over chunks of rows", sums * size_of::<f32>())
}
