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
