//! `begin_step`, `begin_micro_batch`, `collect`, `end_step` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::Result;
use nibble_core::ops::{BeginMicroBatch, BeginStep, Collect, EndStep};

/// See [`BeginStep`].
pub(crate) fn begin_step(_: &Cuda, _: BeginStep<'_, Cuda>) -> Result<()> {
    Err(super::missing("begin_step"))
}

/// See [`BeginMicroBatch`].
pub(crate) fn begin_micro_batch(_: &Cuda, _: BeginMicroBatch<'_, Cuda>) -> Result<()> {
    Err(super::missing("begin_micro_batch"))
}

/// See [`Collect`].
pub(crate) fn collect(_: &Cuda, _: Collect<'_, Cuda>) -> Result<()> {
    Err(super::missing("collect"))
}

/// See [`EndStep`].
pub(crate) fn end_step(_: &Cuda, _: EndStep<'_, Cuda>) -> Result<()> {
    Err(super::missing("end_step"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
