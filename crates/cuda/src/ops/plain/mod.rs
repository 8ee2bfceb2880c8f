//! Operations on plain matrices: casts, additions, biases, GELU, transposes, sums of shards and of rows,
//! and copies of many rows.

pub(crate) mod bias;
pub(crate) mod copy_many;
pub(crate) mod elementwise;
pub(crate) mod gelu;
pub(crate) mod row_tree;

pub(crate) use {bias::*, elementwise::*, gelu::*};

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    let of_files = [elementwise::instances(), bias::instances(), gelu::instances()];
    [of_files.concat(), row_tree::instances(), copy_many::instances()].concat()
}
