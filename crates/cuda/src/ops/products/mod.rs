//! Matrix products, dense and grouped, and the choice of their kernels.

pub(crate) mod gemm;
pub(crate) mod grouped_config;
pub(crate) mod grouped_gemm;
pub mod grouped_product;
pub(crate) mod grouped_wgrad;
pub(crate) mod lowered;
pub(crate) mod product;
pub(crate) mod product_parts;
pub(crate) mod product_runs;
pub(crate) mod product_simt;
pub mod tuning;

pub(crate) use {gemm::*, grouped_gemm::*, grouped_wgrad::*};
