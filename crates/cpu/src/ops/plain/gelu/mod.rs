//! The CPU code of [`nibble_core::ops::Gelu`] and [`nibble_core::ops::GeluBackward`].
//!
//! Each body is one branch-free loop, which is both specification and fast path.

use crate::Cpu;
use crate::ops::plain::elementwise::for_rows;
use crate::simd::{Real, per_isa};
use half::bf16;
use nibble_core::ops::{Gelu, GeluBackward};
use nibble_core::{DType, Result, Tensor};
use nibble_formats::math;

per_isa!(fn values<T: Real> = values_body; (h: &[T], a: &mut [T]));

#[inline(always)]
fn values_body<T: Real>(h: &[T], a: &mut [T]) {
    for (a, h) in a.iter_mut().zip(h) {
        *a = T::round(math::gelu(h.widen()));
    }
}

per_isa!(fn gradients<T: Real> = gradients_body; (h: &[T], da: &[T], dh: &mut [T]));

#[inline(always)]
fn gradients_body<T: Real>(h: &[T], da: &[T], dh: &mut [T]) {
    for ((dh, h), da) in dh.iter_mut().zip(h).zip(da) {
        *dh = T::round(da.widen() * math::gelu_derivative(h.widen()));
    }
}

/// Computes GELU of each element.
pub(crate) fn gelu(cpu: &Cpu, op: Gelu<'_, Cpu>) -> Result<Tensor<Cpu>> {
    match op.h.dtype() {
        DType::F32 => forward::<f32>(cpu, &op),
        DType::Bf16 => forward::<bf16>(cpu, &op),
    }
}

fn forward<T: Real>(cpu: &Cpu, op: &Gelu<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let h = T::slice("gelu", "h", op.h)?;
    let mut a = op.result(cpu)?;
    for_rows(cpu, T::slice_mut("gelu", &mut a)?, 1, |first, a| {
        values(cpu.isa(), &h[first..][..a.len()], a);
    });
    Ok(a)
}

/// Computes the gradient of GELU's input.
pub(crate) fn gelu_backward(cpu: &Cpu, op: GeluBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    match op.h.dtype() {
        DType::F32 => backward::<f32>(cpu, &op),
        DType::Bf16 => backward::<bf16>(cpu, &op),
    }
}

fn backward<T: Real>(cpu: &Cpu, op: &GeluBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    const OP: &str = "gelu_backward";
    let (h, da) = (T::slice(OP, "h", op.h)?, T::slice(OP, "da", op.da)?);
    let mut dh = op.result(cpu)?;
    for_rows(cpu, T::slice_mut(OP, &mut dh)?, 1, |first, dh| {
        gradients(cpu.isa(), &h[first..][..dh.len()], &da[first..][..dh.len()], dh);
    });
    Ok(dh)
}

#[cfg(test)]
mod tests;
