//! GEMMs: dense, grouped by expert, and the weight gradients of groups.

pub mod gemm;
pub(crate) mod lowered;
pub(crate) mod operands;

pub(crate) use gemm::*;
