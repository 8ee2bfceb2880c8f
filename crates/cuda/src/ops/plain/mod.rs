//! Operations on plain matrices: casts, additions, biases, transposes, sums of shards and of rows,
//! and copies of many rows.

pub(crate) mod bias;
pub(crate) mod copy_many;
pub(crate) mod elementwise;
pub(crate) mod row_tree;

pub(crate) use {bias::*, elementwise::*};

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    [elementwise::instances(), bias::instances(), row_tree::instances(), copy_many::instances()].concat()
}
