//! The values of `train.combine`, which say how the output rows of experts are combined.

use serde::{Deserialize, Serialize};

/// The order in which the output rows of a token's experts are summed. The two variants add rows in different orders, so the results of
/// tokens with three or more experts differ in the last bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Combine {
    /// Output rows are summed in slot order, in F32, and rounded once ([`CombineSlots`](nibble_core::ops::CombineSlots)). Ranks send back
    /// one row per slot.
    #[default]
    Slots,
    /// Rows are summed along a binary tree over the layer's experts, and rounded to the rows' type at each node
    /// ([`CombineTree`](nibble_core::ops::CombineTree)). Each rank sums the rows of its own experts and sends back one row per token
    /// received. The number of expert-parallel ranks must be a power of two.
    Tree,
}

impl Combine {
    /// The variant's name in a configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::Tree => "tree",
        }
    }
}
