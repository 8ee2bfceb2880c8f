//! `swiglu` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::{Swiglu, SwigluOut};
use nibble_core::{Error, Result};

/// See [`Swiglu`].
pub(crate) fn swiglu(_cuda: &Cuda, _op: Swiglu<'_, Cuda>) -> Result<SwigluOut<Cuda>> {
    Err(Error::Device { call: "swiglu".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
