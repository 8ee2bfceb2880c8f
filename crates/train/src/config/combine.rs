//! How the output rows of experts are combined: the values of `train.combine`.

use serde::{Deserialize, Serialize};

/// How the output rows of a token's experts are summed. The two ways add in different orders, so results differ in the last bits for tokens
/// with three experts or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Combine {
    /// In slot order, in F32, rounded once ([`CombineSlots`](nibble_core::ops::CombineSlots)). One row per slot is sent back.
    #[default]
    Slots,
    /// Along a binary tree over the layer's experts, rounded to the rows' type at each node
    /// ([`CombineTree`](nibble_core::ops::CombineTree)). Each rank sums its own experts' rows and sends back one row per token received.
    /// The number of expert-parallel ranks is a power of two.
    Tree,
}

impl Combine {
    /// Its name in a configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::Tree => "tree",
        }
    }
}
