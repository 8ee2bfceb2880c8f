//! Norms and rotary embeddings.

pub mod norm_rope;
pub mod rms_norm;
pub mod rope;

pub(crate) use {norm_rope::*, rms_norm::*, rope::*};
