//! Norms and rotary embeddings.

pub mod layer_norm;
pub mod norm_rope;
pub mod rms_norm;
pub mod rope;

pub(crate) use {layer_norm::*, norm_rope::*, rms_norm::*, rope::*};
