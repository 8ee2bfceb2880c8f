//! See [`nibble_core::ops::GroupedWgrad`]: a gradient for each matrix of a stack, contracted over its group's rows.

use super::gemm::Product;
use super::product::{Ragged, Target};
use crate::Cuda;
use nibble_core::ops::GroupedWgrad;
use nibble_core::{Data, Error, Result};

pub(crate) fn grouped_wgrad(_: &Cuda, op: GroupedWgrad<'_, Cuda>) -> Result<()> {
    const OP: &str = "grouped_wgrad";
    let dims = op.check()?;
    let Data::F32(grad) = &mut op.grad.data else {
        return Err(Error::shape(OP, "grad", "bf16", "f32"));
    };
    let grad = grad.make_mut()?;
    if grad.is_empty() {
        return Ok(());
    }
    if dims.k == 0 {
        if !op.accumulate {
            *grad = grad.device().filled(grad.len(), 0)?;
        }
        return Ok(());
    }
    let product = Product {
        op: OP,
        ragged: Ragged::Contraction,
        groups: Some(op.groups),
        m: dims.m,
        n: dims.n,
        k: dims.k,
    };
    product.run(op.dy, op.x, Target::F32 { values: grad, accumulate: op.accumulate })
}
