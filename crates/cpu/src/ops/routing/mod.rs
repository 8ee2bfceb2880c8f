//! Routing: the choice of experts, permutations of rows, and the packing of all-to-all rows and slot records.

pub mod combine_tree;
pub mod parts;
pub mod permute;
pub mod route;
pub mod slots;
pub mod wire;

pub(crate) use {combine_tree::*, parts::*, permute::*, route::*, slots::*, wire::*};
