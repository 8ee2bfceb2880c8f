//! `rope` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::Rope;
use nibble_core::{Result, Tensor};

/// See [`Rope`].
pub(crate) fn rope(_: &Cuda, _: Rope<'_, Cuda>) -> Result<Tensor<Cuda>> {
    Err(super::missing("rope"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
