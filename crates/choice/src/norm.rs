//! Norms on a GPU: RMSNorm fused with RoPE, and the partial sums of a weight's gradient.

use crate::Temporary;
use nibble_core::ops::RmsNormBackward;
use nibble_core::{Backend, Tensor};
use std::fmt;

/// Head sizes for which one kernel computes RMSNorm and RoPE.
pub const TURNED_HEADS: [usize; 3] = [64, 128, 256];

/// The path of `norm_rope` and of its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormRopePath {
    /// One kernel computes RMSNorm and RoPE.
    OnePass,
    /// Two separate operations run one after the other.
    Apart,
}

impl NormRopePath {
    /// The path for heads of `head_dim` columns.
    pub fn of(head_dim: usize) -> Self {
        if TURNED_HEADS.contains(&head_dim) { Self::OnePass } else { Self::Apart }
    }

    /// The tensor, of the size of x, that the first of two operations passes to the second: the normalized heads, or the gradient after the
    /// inverse rotation.
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

/// Number of chunks of rows per shard in the sum of a weight's gradient.
pub const fn chunks_of_shard<B: Backend>(rows: usize, shards: usize) -> usize {
    (rows / if shards == 0 { 1 } else { shards }).div_ceil(RmsNormBackward::<B>::CHUNK)
}

/// Temporary memory of a weight's gradient: one sum per chunk of rows.
pub fn column_sums_temporary<B: Backend>((rows, cols): (usize, usize), shards: usize) -> Temporary {
    let sums = shards * chunks_of_shard::<B>(rows, shards) * cols;
    Temporary::new("sums over chunks of rows", sums * size_of::<f32>())
}
