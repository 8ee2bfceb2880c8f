//! See [`nibble_core::ops::NormRope`]: the two operations, one after the other.

use super::rms_norm::{rms_norm, rms_norm_backward};
use super::rope::rope;
use crate::Cpu;
use nibble_core::ops::{NormRope, NormRopeBackward, RmsNorm, RmsNormBackward, RmsNormOut, Rope};
use nibble_core::{Result, Tensor};

/// A head a row.
fn heads(x: &Tensor<Cpu>, head_dim: usize) -> Result<Tensor<Cpu>> {
    x.reshape(x.rows * (x.cols / head_dim), head_dim)
}

/// Each head's norm, rounded, then its rotation.
pub(crate) fn norm_rope(cpu: &Cpu, op: NormRope<'_, Cpu>) -> Result<RmsNormOut<Cpu>> {
    let NormRope { x, weight, eps, table, seq_len, first_position } = op;
    let normed = rms_norm(cpu, RmsNorm::new(&heads(x, table.cols)?, weight, eps))?;
    let y = normed.y.reshape(x.rows, x.cols)?;
    let y = rope(cpu, Rope { x: &y, table, seq_len, first_position, inverse: false })?;
    Ok(RmsNormOut { y, ..normed })
}

/// The rotation back, rounded, then the norm's backward pass.
pub(crate) fn norm_rope_backward(cpu: &Cpu, op: NormRopeBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let NormRopeBackward { x, weight, inv_rms, dy, table, seq_len, first_position, dweight } = op;
    let dy = rope(cpu, Rope { x: dy, table, seq_len, first_position, inverse: true })?;
    let (rows, dy) = (heads(x, table.cols)?, heads(&dy, table.cols)?);
    let op = RmsNormBackward { x: &rows, weight, inv_rms, dy: &dy, plus: None, dweight };
    rms_norm_backward(cpu, op)?.reshape(x.rows, x.cols)
}
