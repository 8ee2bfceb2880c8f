//! See [`nibble_core::ops::GroupedWgrad`]: a gradient for each matrix of a stack, contracted over its group's rows.

use super::product::{Product, Ragged, Target};
use crate::Cuda;
use nibble_core::ops::GroupedWgrad;
use nibble_core::{Data, Result, Tensor};

pub(crate) fn grouped_wgrad(cuda: &Cuda, op: GroupedWgrad<'_, Cuda>) -> Result<()> {
    let dims = op.check()?;
    let GroupedWgrad { dy, x, groups, grad, accumulate } = op;
    let product = Product {
        op: "grouped_wgrad",
        ragged: Ragged::Contraction,
        groups: Some(groups),
        m: dims.m,
        n: dims.n,
        k: dims.k,
        tensor_scales: [None; 2],
    };
    let (rows, cols) = grad.shape();
    if rows * cols == 0 {
        return Ok(());
    }
    if dims.k == 0 {
        if !accumulate {
            *grad = Tensor::zeros(cuda, grad.dtype(), rows, cols)?;
        }
        return Ok(());
    }
    match &mut grad.data {
        Data::F32(grad) => product.run(dy, x, Target::F32 { values: grad.make_mut()?, accumulate }),
        Data::Bf16(grad) => product.run(dy, x, Target::Bf16 { values: grad.make_mut()?, accumulate }),
    }
}
