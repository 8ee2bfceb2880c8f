//! Where a run begins: anew, with other weights, or where another ended; its folder; what its ranks must have alike.

pub(super) mod alike;
pub(super) mod origin;
pub(super) mod outputs;
pub(super) mod run_dir;
