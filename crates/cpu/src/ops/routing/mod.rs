//! Routing: the selection of experts, permutations of rows, and the packing of rows and slot records for all-to-alls.

pub mod combine_tree;
pub mod parts;
pub mod permute;
pub mod route;
pub mod slots;
pub mod wire;

pub(crate) use {combine_tree::*, parts::*, permute::*, route::*, slots::*, wire::*};
