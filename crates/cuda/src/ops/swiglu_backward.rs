//! `swiglu_backward` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::{SwigluBackward, SwigluGrads};
use nibble_core::{Error, Result};

/// See [`SwigluBackward`].
pub(crate) fn swiglu_backward(_cuda: &Cuda, _op: SwigluBackward<'_, Cuda>) -> Result<SwigluGrads<Cuda>> {
    Err(Error::Device { call: "swiglu_backward".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
