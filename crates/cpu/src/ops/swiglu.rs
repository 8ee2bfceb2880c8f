//! See `nibble_core::ops::{Swiglu, SwigluBackward}`.

mod simd;
mod spec;
#[cfg(test)]
mod tests;

use super::quantize::spans::Spans;
use super::quantize::{check_emits, decodable};
use crate::{Cpu, Path};
use nibble_core::ops::{Emit, Planes, Swiglu, SwigluBackward, SwigluGrads, SwigluOut};
use nibble_core::{Error, Operand, Result};
use nibble_formats::BlockAxis;

/// See [`Swiglu`].
pub(crate) fn swiglu(cpu: &Cpu, op: Swiglu<'_, Cpu>) -> Result<SwigluOut<Cpu>> {
    const OP: &str = "swiglu";
    let saved = op.save_h.map(|codec| Emit::Block { codec, planes: Planes::Rows });
    let emits: Vec<Emit> = saved.into_iter().chain([op.a]).collect();
    let block = check_emits(OP, &emits, op.h.rows, op.groups)?;
    let spans = Spans::new(OP, op.h.rows, op.groups, block)?;
    match cpu.path() {
        Path::Scalar => spec::forward(cpu, &op, saved, &spans),
        Path::Simd => simd::forward(cpu, &op, saved, &spans),
    }
}

/// See [`SwigluBackward`].
pub(crate) fn swiglu_backward(cpu: &Cpu, op: SwigluBackward<'_, Cpu>) -> Result<SwigluGrads<Cpu>> {
    const OP: &str = "swiglu_backward";
    if let Operand::Block(h) = op.h {
        decodable(OP, h)?;
        if h.axis != BlockAxis::Row {
            return Err(Error::shape(OP, "h.axis", h.axis, "row"));
        }
    }
    let block = check_emits(OP, &[op.dh, op.a], op.da.rows, op.groups)?;
    let spans = Spans::new(OP, op.da.rows, op.groups, block)?;
    match cpu.path() {
        Path::Scalar => spec::backward(cpu, &op, &spans),
        Path::Simd => simd::backward(cpu, &op, &spans),
    }
}

/// Columns of a part of the gate weight's gradient.
const PART: usize = SwigluBackward::<Cpu>::PART;

/// The part's sum of `x · y`, by pairs and the tree of neighbours.
#[inline(always)]
fn part_dot(x: &[f32; PART], y: &[f32; PART]) -> f32 {
    let mut sums = [0.0f32; PART / 2];
    for ((sum, x), y) in sums.iter_mut().zip(x.as_chunks::<2>().0).zip(y.as_chunks::<2>().0) {
        *sum = x[1].mul_add(y[1], x[0] * y[0]);
    }
    let mut left = sums.len();
    while left > 1 {
        left /= 2;
        for i in 0..left {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
    }
    sums[0]
}
