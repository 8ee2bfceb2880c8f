//! `cast`, `transpose` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::{Cast, Transpose};
use nibble_core::{Error, Result, Tensor};

/// See [`Cast`].
pub(crate) fn cast(_cuda: &Cuda, _op: Cast<'_, Cuda>) -> Result<Tensor<Cuda>> {
    Err(Error::Device { call: "cast".to_owned(), why: "no kernel yet".to_owned() })
}

/// See [`Transpose`].
pub(crate) fn transpose(_cuda: &Cuda, _op: Transpose<'_, Cuda>) -> Result<Tensor<Cuda>> {
    Err(Error::Device { call: "transpose".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
