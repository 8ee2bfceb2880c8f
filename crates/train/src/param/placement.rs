//! The placement of parameters on ranks.

use crate::shards::Shards;
use nibble_core::Kernels;

/// The ranks that hold a parameter, and the groups over which its gradients are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Every rank holds the parameter. A tree sums gradients over the shards.
    Replicated,
    /// Stacked experts, which are sharded over ranks. A tree sums gradients over the parts of an expert's rows. The value is the number of
    /// experts on this rank.
    Experts(usize),
}

impl Placement {
    /// Number of matrices on this rank.
    pub fn stack(self) -> usize {
        match self {
            Self::Replicated => 1,
            Self::Experts(local) => local,
        }
    }

    /// Number of copies of each matrix's gradient that a step sums on a rank with these shards.
    pub fn shards<B: Kernels>(self, shards: &Shards<B>) -> usize {
        match self {
            Self::Replicated => shards.local,
            Self::Experts(_) => shards.expert_parts.local,
        }
    }
}
