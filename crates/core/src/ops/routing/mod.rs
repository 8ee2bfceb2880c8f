//! Routing: the choice of experts, permutations of rows, and the rows and records of an all-to-all.

pub(super) mod combine_tree;
pub(super) mod parts;
pub(super) mod permute;
pub(super) mod route;
pub(super) mod slots;

pub use combine_tree::{CombineTree, FindSlots, MOST_TREE_SLOTS_OF_GPU};
pub use parts::{AssignParts, JoinGroups};
pub use permute::{
    CombineSlots, GatherScalars, PackRows, Permute, PlanPermute, UnpackPermute, UnpackRows, Unpermute,
};
pub use route::{ExpertGroups, GroupScore, Route, RouteBackward, RouteRule, Routing, Scores};
pub use slots::{AssignRanks, PackSlots, ReceivedSlots, SlotRanks, UnpackSlots, record_words};
