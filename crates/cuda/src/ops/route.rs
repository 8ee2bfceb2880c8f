//! `route`, `route_backward` on a GPU.

use super::Instance;
use crate::Cuda;
use nibble_core::ops::{Route, RouteBackward, Routing};
use nibble_core::{Error, Result, Tensor};

/// See [`Route`].
pub(crate) fn route(_cuda: &Cuda, _op: Route<'_, Cuda>) -> Result<Routing<Cuda>> {
    Err(Error::Device { call: "route".to_owned(), why: "no kernel yet".to_owned() })
}

/// See [`RouteBackward`].
pub(crate) fn route_backward(_cuda: &Cuda, _op: RouteBackward<'_, Cuda>) -> Result<Tensor<Cuda>> {
    Err(Error::Device { call: "route_backward".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
