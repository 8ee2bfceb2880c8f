//! See [`nibble_core::ops::GroupedGemm`]: ragged rows times a stack of matrices.

use super::product::{Product, Ragged, Target};
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
        tensor_scales: [None; 2],
    };
    let mut d = op.result(cuda)?;
    // Rows of no group are zeros, which most paths write themselves.
    if dims.m * dims.n * dims.k * op.groups.num_groups == 0 {
        cuda.clear_tensor(&mut d)?;
        return Ok(d);
    }
    let path = product.path(op.x, op.w, (op.out, false));
    if !path.writes_every_row() {
        cuda.clear_tensor(&mut d)?;
    }
    product.run_by(&path, (op.x, op.w), Target::of(&mut d, false))?;
    Ok(d)
}
