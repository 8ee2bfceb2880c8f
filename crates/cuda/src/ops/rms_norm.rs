//! `rms_norm`, `rms_norm_backward` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::{RmsNorm, RmsNormBackward, RmsNormOut};
use nibble_core::{Result, Tensor};

/// See [`RmsNorm`].
pub(crate) fn rms_norm(_: &Cuda, _: RmsNorm<'_, Cuda>) -> Result<RmsNormOut<Cuda>> {
    Err(super::missing("rms_norm"))
}

/// See [`RmsNormBackward`].
pub(crate) fn rms_norm_backward(_: &Cuda, _: RmsNormBackward<'_, Cuda>) -> Result<Tensor<Cuda>> {
    Err(super::missing("rms_norm_backward"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
