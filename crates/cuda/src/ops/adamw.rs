//! `adamw` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::Result;
use nibble_core::ops::AdamW;

/// See [`AdamW`].
pub(crate) fn adamw(_: &Cuda, _: AdamW<'_, Cuda>) -> Result<()> {
    Err(super::missing("adamw"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
