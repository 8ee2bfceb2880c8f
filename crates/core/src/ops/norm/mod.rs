//! Norms and rotary embeddings.

pub(super) mod layer_norm;
pub(super) mod norm_rope;
pub(super) mod rms_norm;
pub(super) mod rope;

pub use {layer_norm::*, norm_rope::*, rms_norm::*, rope::*};
