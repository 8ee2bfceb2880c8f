//! The start of a run: new, from existing weights, or resumed; its folder; the inputs that its ranks must have in common.

pub(super) mod alike;
pub(super) mod origin;
pub(super) mod outputs;
pub(super) mod run_dir;
