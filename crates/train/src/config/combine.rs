//! How rows come back from experts: a key of it, as a configuration names its values.

use serde::{Deserialize, Serialize};

/// How the rows of a token's experts become one. Both ways have their own order of sums, so their results differ in the last bits where a
/// token has three experts or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Combine {
    /// In slot order, in F32, rounded once ([`CombineSlots`](nibble_core::ops::CombineSlots)). A row for each slot travels back.
    #[default]
    Slots,
    /// Up a binary tree over the layer's experts in order, rounded to the rows' type at each node ([`CombineTree`](nibble_core::ops::CombineTree)). Each rank sums what its
    /// experts made: one row for each token that it was sent travels back. The number of ranks that divide the experts is a power of two.
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
