//! Expert routing: which expert processes which rows, and how rows move within a rank and between
//! ranks.

pub(crate) mod combine_tree;
pub(crate) mod copy_rows;
pub(crate) mod parts;
pub(crate) mod permute;
pub(crate) mod plan_permute;
pub(crate) mod route;
pub(crate) mod slots;
pub(crate) mod wire;

pub(crate) use {combine_tree::*, parts::*, permute::*, plan_permute::*, route::*, slots::*, wire::*};

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    [
        permute::instances(),
        combine_tree::instances(),
        plan_permute::instances(),
        route::instances(),
        slots::instances(),
        parts::instances(),
    ]
    .concat()
}
