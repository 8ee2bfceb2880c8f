//! Norms and rotary embeddings.

pub(super) mod norm_rope;
pub(super) mod rms_norm;
pub(super) mod rope;

pub use norm_rope::{NormRope, NormRopeBackward};
pub use rms_norm::{RmsNorm, RmsNormBackward, RmsNormOut};
pub use rope::{Positions, Rope};
