//! `embed`, `embed_backward` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::Result;
use nibble_core::ops::{Embed, EmbedBackward, EmbedOut};

/// See [`Embed`].
pub(crate) fn embed(_: &Cuda, _: Embed<'_, Cuda>) -> Result<EmbedOut<Cuda>> {
    Err(super::missing("embed"))
}

/// See [`EmbedBackward`].
pub(crate) fn embed_backward(_: &Cuda, _: EmbedBackward<'_, Cuda>) -> Result<()> {
    Err(super::missing("embed_backward"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
