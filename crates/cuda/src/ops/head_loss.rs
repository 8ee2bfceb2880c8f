//! `head_loss` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::Result;
use nibble_core::ops::{HeadLoss, HeadLossOut};

/// See [`HeadLoss`].
pub(crate) fn head_loss(_: &Cuda, _: HeadLoss<'_, Cuda>) -> Result<HeadLossOut<Cuda>> {
    Err(super::missing("head_loss"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
