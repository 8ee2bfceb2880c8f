//! Where parameters live.

use crate::shards::Shards;
use nibble_core::Kernels;

/// Where a parameter lives, and over what its gradients are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// On every rank; gradients are summed over the shards by a tree.
    Replicated,
    /// Stacked experts, divided among ranks; gradients are summed over the parts of an expert's rows by a tree. The value is the number of
    /// experts on this rank.
    Experts(usize),
}

impl Placement {
    /// Matrices on this rank.
    pub fn stack(self) -> usize {
        match self {
            Self::Replicated => 1,
            Self::Experts(local) => local,
        }
    }

    /// Copies of each matrix's gradient that a step adds up on a rank of these shards.
    pub fn shards<B: Kernels>(self, shards: &Shards<B>) -> usize {
        match self {
            Self::Replicated => shards.local,
            Self::Experts(_) => shards.expert_parts.local,
        }
    }
}
