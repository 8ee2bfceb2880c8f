//! `plan_permute` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::PlanPermute;
use nibble_core::{Error, PermuteMap, Result};

/// See [`PlanPermute`].
pub(crate) fn plan_permute(_cuda: &Cuda, _op: PlanPermute<'_, Cuda>) -> Result<PermuteMap<Cuda>> {
    Err(Error::Device { call: "plan_permute".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
