//! `swiglu` and its backward pass on a GPU, along the chosen path.

use crate::GpuKernels;
pub use crate::swiglu_path::{FUSED_RULES, HSource, SwigluBackwardPath, SwigluPath, TILE, check_size};
use nibble_core::ops::{
    Dequantize, Emit, Emitted, Planes, Quantize, Swiglu, SwigluBackward, SwigluGrads, SwigluOut,
};
use nibble_core::{DType, Groups, Operand, Result};

/// `swiglu` on a GPU. If no kernel writes the requested form directly, the result is quantized by a second op. At that time, only the input
/// of this op and the results are in memory.
pub fn swiglu<B: GpuKernels>(b: &B, op: &Swiglu<'_, B>) -> Result<SwigluOut<B>> {
    let (path, rows, f) = (SwigluPath::of(op), op.h.rows, op.h.cols / 2);
    let first = match path {
        SwigluPath::Rows { .. } => op.result(b)?,
        SwigluPath::RowsCols { .. } => SwigluOut { a: op.a.result(b, rows, f)?, h: None },
        SwigluPath::Plain(dtype) => SwigluOut { a: Emit::Plain(dtype).result(b, rows, f)?, h: None },
    };
    b.swiglu_kernel(op, &path, &first)?;
    let a = match path {
        SwigluPath::Plain(_) => emitted(b, first.a, op.a, op.groups)?,
        SwigluPath::Rows { .. } | SwigluPath::RowsCols { .. } => first.a,
    };
    if matches!(path, SwigluPath::Rows { .. }) {
        return Ok(SwigluOut { a, h: first.h });
    }
    let save = |codec| -> Result<_> {
        let op = Quantize { groups: op.groups, ..Quantize::new(op.h, codec, Planes::Rows) };
        b.quantize_counting(op, None)?.take_rows("swiglu")?.block("swiglu").cloned()
    };
    Ok(SwigluOut { a, h: op.save_h.map(save).transpose()? })
}

/// Converts a plain matrix to the requested form.
fn emitted<B: GpuKernels>(
    b: &B,
    x: Emitted<B>,
    emit: Emit,
    groups: Option<&Groups<B>>,
) -> Result<Emitted<B>> {
    match (emit, &x.rows) {
        (Emit::Block { codec, planes, only_for }, Some(Operand::Plain(x))) => {
            b.quantize_counting(Quantize { groups, only_for, ..Quantize::new(x, codec, planes) }, None)
        }
        _ => Ok(x),
    }
}

/// `swiglu_backward` on a GPU.
pub fn swiglu_backward<B: GpuKernels>(b: &B, op: &SwigluBackward<'_, B>) -> Result<SwigluGrads<B>> {
    let (path, (rows, f)) = (SwigluBackwardPath::of(op), op.da.shape());
    match path {
        SwigluBackwardPath::Fused { codec, parts, .. } => {
            // The kernel always writes `a`.
            let a = Some(Emit::block(codec, Planes::Cols));
            let grads = SwigluBackward { a, ..*op }.result(b)?;
            let parts = b.alloc(parts)?;
            b.swiglu_backward_kernel(op, &path, op.h, Some(&parts), &grads)?;
            Ok(SwigluGrads { a: grads.a.filter(|_| op.a.is_some()), ..grads })
        }
        SwigluBackwardPath::Plain { dh, a, decoded } => {
            let h = match op.h {
                Operand::Block(x) if decoded => {
                    Operand::Plain(b.decode(Dequantize { x, dtype: DType::F32 })?)
                }
                h => h.clone(),
            };
            let dh = Emit::Plain(dh).result(b, rows, 2 * f)?;
            let a = a.map(|dtype| Emit::Plain(dtype).result(b, rows, f)).transpose()?;
            let plain = SwigluGrads { dh, a, dweight: b.alloc(rows)? };
            b.swiglu_backward_kernel(op, &path, &h, None, &plain)?;
            let SwigluGrads { dh, a, dweight } = plain;
            let dh = emitted(b, dh, op.dh, op.groups)?;
            let a = a.zip(op.a).map(|(a, to)| emitted(b, a, to, op.groups)).transpose()?;
            Ok(SwigluGrads { dh, a, dweight })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_32_bits_are_named() {
        check_size("swiglu", 32768, 7168).unwrap();
        check_size("swiglu", 1, (1 << 29) - 1).unwrap();
        for (rows, f, argument) in [
            (0, 1 << 29, "`columns of h`"),
            (1 << 31, 8, "`rows · columns of h`"),
            (1, usize::MAX, "`columns of h`"),
        ] {
            let error = check_size("swiglu", rows, f).unwrap_err().to_string();
            assert!(error.contains(argument), "{rows} · {f}: {error}");
        }
    }
}
