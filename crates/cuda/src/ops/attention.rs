//! `attention`, `attention_backward` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::Result;
use nibble_core::ops::{Attention, AttentionBackward, AttentionGrads, AttentionOut};

/// See [`Attention`].
pub(crate) fn attention(_: &Cuda, _: Attention<'_, Cuda>) -> Result<AttentionOut<Cuda>> {
    Err(super::missing("attention"))
}

/// See [`AttentionBackward`].
pub(crate) fn attention_backward(_: &Cuda, _: AttentionBackward<'_, Cuda>) -> Result<AttentionGrads<Cuda>> {
    Err(super::missing("attention_backward"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
