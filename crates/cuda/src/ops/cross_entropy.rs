//! `cross_entropy` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::Result;
use nibble_core::ops::{CrossEntropy, CrossEntropyOut};

/// See [`CrossEntropy`].
pub(crate) fn cross_entropy(_: &Cuda, _: CrossEntropy<'_, Cuda>) -> Result<CrossEntropyOut<Cuda>> {
    Err(super::missing("cross_entropy"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
