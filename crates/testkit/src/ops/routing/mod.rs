//! Routing: the choice of experts, permutations of rows, and the packing of all-to-all rows and slot records.

pub(super) mod combine_tree;
pub(super) mod parts;
pub(super) mod permute;
pub(super) mod route;
pub(super) mod slots;

pub use {combine_tree::*, parts::*, permute::*, route::*, slots::*};
