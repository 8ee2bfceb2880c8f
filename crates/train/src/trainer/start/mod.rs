//! The start of a run: a new start, a start from existing weights, or a resumption; the run's folder; the inputs that all ranks must have
//! in common.

pub(super) mod alike;
pub(super) mod origin;
pub(super) mod outputs;
pub(super) mod run_dir;
