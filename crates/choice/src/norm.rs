//! Norms on a GPU: RMSNorm fused with RoPE, and the partial sums of a weight's gradient.

use crate::Temporary;
use nibble_core::ops::RmsNormBackward;
use nibble_core::{Backend, Tensor};
use std::fmt;

/// The head sizes for which a single kernel computes RMSNorm and RoPE.
pub const TURNED_HEADS: [usize; 3] = [64, 128, 256];

/// The kernels that compute `norm_rope` and its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormRopePath {
    /// One kernel computes RMSNorm and RoPE.
    OnePass,
    /// Two separate operations run one after the other.
    Apart,
}

impl NormRopePath {
    /// The kernels for heads of `head_dim` columns.
    pub fn of(head_dim: usize) -> Self {
        if TURNED_HEADS.contains(&head_dim) { Self::OnePass } else { Self::Apart }
    }

    /// The intermediate tensor between RMSNorm and RoPE if separate operations compute them: the normalized heads, or the gradient after
    /// the inverse rotation. This tensor has the size of x.
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

/// The number of chunks into which the rows of a shard are divided when the gradient of a weight is summed.
pub const fn chunks_of_shard<B: Backend>(rows: usize, shards: usize) -> usize {
    (rows / if shards == 0 { 1 } else { shards }).div_ceil(RmsNormBackward::<B>::CHUNK)
}

/// The temporary memory for the gradient of a weight, which contains one sum per chunk of rows.
pub fn column_sums_temporary<B: Backend>((rows, cols): (usize, usize), shards: usize) -> Temporary {
    let sums = shards * chunks_of_shard::<B>(rows, shards) * cols;
    Temporary::new("sums over chunks of rows", sums * size_of::<f32>())
}
