//! The CPU code of `nibble_core::ops::{Swiglu, SwigluBackward}`.

mod simd;
mod spec;
#[cfg(test)]
mod tests;

use crate::ops::convert::quantize::spans::Spans;
use crate::ops::convert::quantize::{check_emits, decodable};
use crate::{CodePath, Cpu};
use nibble_core::ops::{Emit, Planes, Swiglu, SwigluBackward, SwigluGrads, SwigluOut};
use nibble_core::{Error, Operand, Result};
use nibble_formats::BlockAxis;

/// Computes SwiGLU; see [`Swiglu`].
pub(crate) fn swiglu(cpu: &Cpu, op: Swiglu<'_, Cpu>) -> Result<SwigluOut<Cpu>> {
    const OP: &str = "swiglu";
    let saved = op.save_h.map(|codec| Emit::block(codec, Planes::Rows));
    let emits: Vec<Emit> = saved.into_iter().chain([op.a]).collect();
    let block = check_emits(OP, &emits, op.groups)?;
    let spans = Spans::new(OP, op.h.rows, op.groups, block)?;
    match cpu.path() {
        CodePath::Scalar => spec::forward(cpu, &op, saved, &spans),
        CodePath::Simd => simd::forward(cpu, &op, saved, &spans),
    }
}

/// Computes the gradients of SwiGLU; see [`SwigluBackward`].
pub(crate) fn swiglu_backward(cpu: &Cpu, op: SwigluBackward<'_, Cpu>) -> Result<SwigluGrads<Cpu>> {
    const OP: &str = "swiglu_backward";
    if let Operand::Block(h) = op.h {
        decodable(OP, h)?;
        if h.axis != BlockAxis::Row {
            return Err(Error::shape(OP, "h.axis", h.axis, "row"));
        }
    }
    let emits: Vec<Emit> = [op.dh].into_iter().chain(op.a).collect();
    let block = check_emits(OP, &emits, op.groups)?;
    let spans = Spans::new(OP, op.da.rows, op.groups, block)?;
    match cpu.path() {
        CodePath::Scalar => spec::backward(cpu, &op, &spans),
        CodePath::Simd => simd::backward(cpu, &op, &spans),
    }
}

/// Number of columns per partial sum of the gate weight's gradient.
const PART: usize = SwigluBackward::<Cpu>::PART;

/// A partial sum of `x · y`: pairs are added first, then the tree over neighbours.
#[inline(always)]
fn part_dot(x: &[f32; PART], y: &[f32; PART]) -> f32 {
    let pairs: [f32; PART / 2] =
        std::array::from_fn(|i| x[2 * i + 1].mul_add(y[2 * i + 1], x[2 * i] * y[2 * i]));
    let sums: [f32; 4] = halved::<8, 4>(halved::<16, 8>(halved::<32, 16>(halved::<64, 32>(pairs))));
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

/// Adds neighbouring pairs.
#[inline(always)]
fn halved<const N: usize, const HALF: usize>(x: [f32; N]) -> [f32; HALF] {
    std::array::from_fn(|i| x[2 * i] + x[2 * i + 1])
}
