//! Routing: the selection of experts, permutations of rows, and the packing of rows and slot records for all-to-alls.

pub(super) mod combine_tree;
pub(super) mod parts;
pub(super) mod permute;
pub(super) mod route;
pub(super) mod slots;

pub use {combine_tree::*, parts::*, permute::*, route::*, slots::*};
