//! See [`nibble_core::ops::AdamW`].
//!
//! The formula as written there, operation by operation: every product, sum, quotient and root is rounded (no fma);
//! w ← (w − (lr · weight_decay) · w) − (lr · (m · bias1)) / (√(v · bias2) + eps). One body serves as specification and
//! as vectorised code.

use crate::Cpu;
use crate::simd::{per_isa, rows_per_task};
use nibble_core::ops::AdamW;
use nibble_core::{DType, Data, Error, Result, Tensor};
use rayon::prelude::*;

const OP: &str = "adamw";

/// The scalars of a step.
#[derive(Clone, Copy)]
struct Step {
    lr: f32,
    beta1: f32,
    beta2: f32,
    bias1: f32,
    bias2: f32,
    eps: f32,
    decay: f32,
    grad_scale: f32,
}

/// Updates the parameter and both moments in place.
pub(crate) fn adamw(cpu: &Cpu, op: AdamW<'_, Cpu>) -> Result<()> {
    let step = Step {
        lr: op.lr,
        beta1: op.beta1,
        beta2: op.beta2,
        bias1: op.bias1,
        bias2: op.bias2,
        eps: op.eps,
        decay: op.lr * op.weight_decay,
        grad_scale: op.grad_scale,
    };
    let g = op.grad.f32(OP, "grad")?.as_slice();
    let w = f32_mut("param", op.param)?;
    let m = f32_mut("exp_avg", op.exp_avg)?;
    let v = f32_mut("exp_avg_sq", op.exp_avg_sq)?;
    let (isa, len) = (cpu.isa(), rows_per_task(cpu, g.len(), 1));
    if len >= g.len() {
        update(isa, step, g, w, m, v);
        return Ok(());
    }
    cpu.pool().install(|| {
        let tasks = g.par_chunks(len).zip(w.par_chunks_mut(len)).zip(m.par_chunks_mut(len));
        tasks.zip(v.par_chunks_mut(len)).for_each(|(((g, w), m), v)| update(isa, step, g, w, m, v));
    });
    Ok(())
}

fn f32_mut<'a>(argument: &'static str, t: &'a mut Tensor<Cpu>) -> Result<&'a mut [f32]> {
    match &mut t.data {
        Data::F32(buf) => Ok(buf.as_mut_slice()),
        Data::Bf16(_) => Err(Error::shape(OP, argument, DType::Bf16, DType::F32)),
    }
}

per_isa!(fn update = update_body; (step: Step, g: &[f32], w: &mut [f32], m: &mut [f32], v: &mut [f32]));

#[inline(always)]
fn update_body(step: Step, g: &[f32], w: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    let (rest1, rest2) = (1.0 - step.beta1, 1.0 - step.beta2);
    for (((g, w), m), v) in g.iter().zip(w).zip(m).zip(v) {
        let g = g * step.grad_scale;
        *m = step.beta1 * *m + rest1 * g;
        *v = step.beta2 * *v + rest2 * (g * g);
        let denominator = (*v * step.bias2).sqrt() + step.eps;
        *w = (*w - step.decay * *w) - (step.lr * (*m * step.bias1)) / denominator;
    }
}

#[cfg(test)]
mod tests;
