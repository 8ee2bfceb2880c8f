//! GEMMs: dense, grouped by expert, and the weight gradients of groups.

pub(super) mod gemm;

pub use gemm::*;
