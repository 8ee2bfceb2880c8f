//! Matrix products: dense, grouped by expert, and the weight gradients of groups.

pub(super) mod gemm;
pub(super) mod numbers;

pub use gemm::{
    BF16_AGREEMENT, FP8_AGREEMENT, Factor, Gemm, GroupedGemm, GroupedWgrad, ProductArgs, ProductDesc,
    ProductDims, Ragged,
};
pub use numbers::{Numbers, Stored, Taken};
