//! Plain matrices: cast, add, transpose, sums of shards and of rows; copies of many lines.

pub(crate) mod copy_many;
pub(crate) mod elementwise;
pub(crate) mod row_tree;

pub(crate) use elementwise::*;
