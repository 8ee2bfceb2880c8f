//! `init_normal` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::InitNormal;
use nibble_core::{Error, Result, Tensor};

/// See [`InitNormal`].
pub(crate) fn init_normal(_cuda: &Cuda, _op: InitNormal) -> Result<Tensor<Cuda>> {
    Err(Error::Device { call: "init_normal".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
