//! Dense and grouped GEMMs: `nibble-choice` chooses the path of each GEMM, and this module launches it.

pub(crate) mod decoded;
pub(crate) mod gemm;
mod operands;
pub(crate) mod ordinary_cores;
pub(crate) mod parts;
pub mod tensor_cores;

pub(crate) use gemm::{gemm, grouped_gemm, grouped_wgrad};

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    [tensor_cores::instances(), decoded::instances(), parts::instances(), ordinary_cores::instances()]
        .concat()
}
