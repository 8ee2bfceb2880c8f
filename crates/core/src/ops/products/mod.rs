//! Matrix products: dense, grouped by expert, and the weight gradients of groups.

pub(super) mod gemm;
pub(super) mod numbers;

pub use {gemm::*, numbers::*};
