//! See [`nibble_core::ops::GroupedGemm`]: ragged rows times a stack of matrices.

use super::gemm::Output;
use super::product::{Product, Ragged};
use crate::Cuda;
use nibble_core::ops::GroupedGemm;
use nibble_core::{Result, Tensor};

pub(crate) fn grouped_gemm(cuda: &Cuda, op: GroupedGemm<'_, Cuda>) -> Result<Tensor<Cuda>> {
    let dims = op.check()?;
    let product = Product {
        op: "grouped_gemm",
        ragged: Ragged::Rows,
        groups: Some(op.groups),
        m: dims.m,
        n: dims.n,
        k: dims.k,
    };
    // Rows of no group are zeros, which most paths write themselves.
    if dims.m * dims.n * dims.k * op.groups.num_groups == 0 {
        return Output::new(cuda, op.out, dims.m * dims.n, true)?.into_tensor(dims.m, dims.n);
    }
    let path = product.path(op.x, op.w, (op.out, false));
    let mut d = Output::new(cuda, op.out, dims.m * dims.n, !path.writes_every_row())?;
    product.run_by(&path, (op.x, op.w), d.target())?;
    d.into_tensor(dims.m, dims.n)
}
