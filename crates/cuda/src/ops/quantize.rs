//! `quantize` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::{Emitted, Quantize};
use nibble_core::{Error, Result};

/// See [`Quantize`].
pub(crate) fn quantize(_cuda: &Cuda, _op: Quantize<'_, Cuda>) -> Result<Emitted<Cuda>> {
    Err(Error::Device { call: "quantize".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
