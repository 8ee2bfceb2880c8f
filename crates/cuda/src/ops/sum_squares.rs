//! `sum_squares` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::Result;
use nibble_core::ops::SumSquares;

/// See [`SumSquares`].
pub(crate) fn sum_squares(_: &Cuda, _: SumSquares<'_, Cuda>) -> Result<()> {
    Err(super::missing("sum_squares"))
}

/// The instances.
pub(crate) fn instances() -> Vec<Instance> {
    Vec::new()
}
