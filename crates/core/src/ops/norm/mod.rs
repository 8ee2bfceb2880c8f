//! Norms and rotary embeddings.

pub(super) mod norm_rope;
pub(super) mod rms_norm;
pub(super) mod rope;

pub use {norm_rope::*, rms_norm::*, rope::*};
