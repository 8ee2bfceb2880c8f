//! The CPU code of [`nibble_core::ops::NormRope`]: it runs the norm and the rotation one after the other.

use crate::Cpu;
use crate::ops::norm::rms_norm::{write_dx, write_norm};
use crate::ops::norm::rope::write_turned;
use nibble_core::ops::{NormRope, NormRopeBackward, RmsNorm, RmsNormBackward, RmsNormOut, Rope};
use nibble_core::{Result, Tensor};

/// Reshapes a tensor to one head per row.
fn heads(x: &Tensor<Cpu>, head_dim: usize) -> Result<Tensor<Cpu>> {
    x.reshape(x.rows * (x.cols / head_dim), head_dim)
}

/// Normalises each head, rounds, then rotates it.
pub(crate) fn norm_rope(cpu: &Cpu, op: NormRope<'_, Cpu>) -> Result<RmsNormOut<Cpu>> {
    let mut out = op.result(cpu)?;
    let NormRope { x, weight, eps, table, positions } = op;
    let heads = heads(x, table.cols)?;
    let mut normed = heads.unwritten_like(cpu)?;
    write_norm(cpu, &RmsNorm::new(&heads, weight, eps), &mut normed, out.inv_rms.as_mut_slice())?;
    let x = &normed.reshape(x.rows, x.cols)?;
    let op = Rope { x, table, head_dim: table.cols, positions, inverse: false };
    write_turned(cpu, &op, &mut out.y)?;
    Ok(out)
}

/// Applies the inverse rotation, rounds, then runs the norm's backward pass.
pub(crate) fn norm_rope_backward(cpu: &Cpu, op: NormRopeBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let mut dx = op.result(cpu)?;
    let NormRopeBackward { x, weight, inv_rms, dy, table, positions, dweight } = op;
    let mut turned = dy.unwritten_like(cpu)?;
    let op = Rope { x: dy, table, head_dim: table.cols, positions, inverse: true };
    write_turned(cpu, &op, &mut turned)?;
    let (rows, dy) = (heads(x, table.cols)?, heads(&turned, table.cols)?);
    let op = RmsNormBackward { x: &rows, weight, inv_rms, dy: &dy, plus: None, dweight };
    write_dx(cpu, op, &mut dx)?;
    Ok(dx)
}
