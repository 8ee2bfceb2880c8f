//! RMS norm, rotary position embedding, and a fused kernel for both; layer norm.

pub(crate) mod layer_norm;
pub(crate) mod norm_rope;
pub(crate) mod positions;
pub(crate) mod rms_norm;
pub(crate) mod rope;

pub(crate) use {layer_norm::*, norm_rope::*, rms_norm::*, rope::*};

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    [rms_norm::instances(), layer_norm::instances(), norm_rope::instances(), rope::instances()].concat()
}
