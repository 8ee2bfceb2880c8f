//! Plain matrices: cast, add, transpose, sums of shards and of rows.

pub(crate) mod elementwise;
pub(crate) mod row_tree;

pub(crate) use elementwise::*;
