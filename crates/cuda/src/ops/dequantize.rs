//! `dequantize` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::Dequantize;
use nibble_core::{Error, Result, Tensor};

/// See [`Dequantize`].
pub(crate) fn dequantize(_cuda: &Cuda, _op: Dequantize<'_, Cuda>) -> Result<Tensor<Cuda>> {
    Err(Error::Device { call: "dequantize".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
