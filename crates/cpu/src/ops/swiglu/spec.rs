//! The specification: results are computed element by element in F32 matrices, which are then quantized like any other matrix.

use super::{PART, part_dot};
use crate::ops::convert::quantize::spans::Spans;
use crate::ops::convert::quantize::spec::{Matrix, decode, emit};
use crate::{Buf, Cpu};
use nibble_core::ops::{Emit, Emitted, Swiglu, SwigluBackward, SwigluGrads, SwigluOut};
use nibble_core::{BlockScaled, Operand, Result};
use nibble_formats::math::{sigmoid, silu};

fn weight_of(weight: Option<&Buf<f32>>, row: usize) -> f32 {
    weight.map_or(1.0, |w| w.as_slice()[row])
}

pub(super) fn forward(
    cpu: &Cpu,
    op: &Swiglu<'_, Cpu>,
    saved: Option<Emit>,
    spans: &Spans,
) -> Result<SwigluOut<Cpu>> {
    let h = Matrix::of(op.h, spans);
    let f = h.cols / 2;
    let mut a = Matrix { values: vec![0.0; spans.rows * f], cols: f };
    for row in spans.valid() {
        let weight = weight_of(op.weight, row);
        for i in 0..f {
            let (gate, up) = (h.values[row * h.cols + i], h.values[row * h.cols + f + i]);
            a.values[row * f + i] = silu(gate) * up * weight;
        }
    }
    let made = op.result(cpu)?;
    let h = match saved.zip(made.h) {
        Some((saved, made)) => taken_block(emit(cpu, &h, (saved, uncounted(made)), spans, None)?)?,
        None => None,
    };
    Ok(SwigluOut { a: emit(cpu, &a, (op.a, made.a), spans, None)?, h })
}

/// A result in row blocks while it is written, without counts.
pub(super) fn uncounted(plane: BlockScaled<Cpu>) -> Emitted<Cpu> {
    Emitted { rows: Some(Operand::Block(plane)), cols: None, counts: None, found: None }
}

/// Takes the quantized row blocks out of a result.
pub(super) fn taken_block(made: Emitted<Cpu>) -> Result<Option<BlockScaled<Cpu>>> {
    Ok(Some(made.take_rows("swiglu")?.block("swiglu")?.clone()))
}

pub(super) fn backward(cpu: &Cpu, op: &SwigluBackward<'_, Cpu>, spans: &Spans) -> Result<SwigluGrads<Cpu>> {
    let h = match op.h {
        Operand::Plain(h) => Matrix::of(h, spans),
        Operand::Block(h) => decode(cpu, h, spans.valid())?,
    };
    let da = Matrix::of(op.da, spans);
    let f = da.cols;
    let mut dh = Matrix { values: vec![0.0; spans.rows * 2 * f], cols: 2 * f };
    let mut a = Matrix { values: vec![0.0; spans.rows * f], cols: f };
    let mut dweight = vec![0.0; spans.rows];
    for row in spans.valid() {
        let weight = weight_of(op.weight, row);
        let mut silu_up = vec![0.0; f];
        for (i, silu_up) in silu_up.iter_mut().enumerate() {
            let (gate, up) = (h.values[row * 2 * f + i], h.values[row * 2 * f + f + i]);
            let da = da.values[row * f + i];
            let s = sigmoid(gate);
            let silu = gate * s;
            a.values[row * f + i] = silu * up * weight;
            dh.values[row * 2 * f + i] = da * weight * up * (s * (1.0 + gate * (1.0 - s)));
            dh.values[row * 2 * f + f + i] = da * weight * silu;
            *silu_up = silu * up;
        }
        for (x, y) in silu_up.chunks(PART).zip(da.values[row * f..][..f].chunks(PART)) {
            let (mut p, mut incoming) = ([0.0; PART], [0.0; PART]);
            p[..x.len()].copy_from_slice(x);
            incoming[..y.len()].copy_from_slice(y);
            dweight[row] += part_dot(&p, &incoming);
        }
    }
    let made = op.result(cpu)?;
    let mut grads = SwigluGrads {
        dh: emit(cpu, &dh, (op.dh, made.dh), spans, None)?,
        a: op.a.zip(made.a).map(|to| emit(cpu, &a, to, spans, None)).transpose()?,
        dweight: made.dweight,
    };
    grads.dweight.as_mut_slice().copy_from_slice(&dweight);
    Ok(grads)
}
