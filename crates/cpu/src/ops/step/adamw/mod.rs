//! The CPU code of [`nibble_core::ops::AdamW`].
//!
//! This code computes the documented formula operation by operation: every product, sum, quotient and root is rounded (no fma). The formula
//! is w ← (w − (lr · weight_decay) · w) − (lr · (m · bias1)) / (√(v · bias2) + eps). One body is both specification and vectorised code,
//! for all types of gradients and moments.

use crate::Cpu;
use crate::gemm::Isa;
use crate::simd::{Real, per_isa, rows_per_task};
use half::bf16;
use nibble_core::ops::{AdamW, AdamWTensor, Control};
use nibble_core::{Data, Error, Result};
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

/// Updates parameters and both moments in place, unless the step is skipped.
pub(crate) fn adamw(cpu: &Cpu, op: AdamW<'_, Cpu>) -> Result<()> {
    let control = op.control.as_slice();
    if control[Control::STOP] != 0.0 {
        return Ok(());
    }
    for tensor in op.tensors {
        let step = Step {
            lr: control[Control::LR],
            beta1: op.beta1,
            beta2: op.beta2,
            bias1: control[Control::BIAS1],
            bias2: control[Control::BIAS2],
            eps: op.eps,
            decay: control[Control::LR] * tensor.weight_decay,
            grad_scale: control[Control::GRAD_SCALE],
        };
        update(cpu, step, tensor)?;
    }
    Ok(())
}

fn update(cpu: &Cpu, step: Step, tensor: AdamWTensor<'_, Cpu>) -> Result<()> {
    let param_type = tensor.param.dtype();
    let Data::F32(w) = &mut tensor.param.data else {
        return Err(Error::shape(OP, "type of param", param_type, "f32"));
    };
    let w = w.as_mut_slice();
    match (&tensor.grad.data, &mut tensor.exp_avg.data, &mut tensor.exp_avg_sq.data) {
        (Data::F32(g), Data::F32(m), Data::F32(v)) => {
            run(cpu, step, g.as_slice(), w, m.as_mut_slice(), v.as_mut_slice(), update_f32_f32)
        }
        (Data::F32(g), Data::Bf16(m), Data::Bf16(v)) => {
            run(cpu, step, g.as_slice(), w, m.as_mut_slice(), v.as_mut_slice(), update_f32_bf16)
        }
        (Data::Bf16(g), Data::F32(m), Data::F32(v)) => {
            run(cpu, step, g.as_slice(), w, m.as_mut_slice(), v.as_mut_slice(), update_bf16_f32)
        }
        (Data::Bf16(g), Data::Bf16(m), Data::Bf16(v)) => {
            run(cpu, step, g.as_slice(), w, m.as_mut_slice(), v.as_mut_slice(), update_bf16_bf16)
        }
        _ => return Err(Error::shape(OP, "type of exp_avg_sq", "another", "that of exp_avg")),
    }
    Ok(())
}

/// The update function for one type of gradients and one type of moments.
type Update<G, M> = fn(Isa, Step, &[G], &mut [f32], &mut [M], &mut [M]);

fn run<G: Real, M: Real>(
    cpu: &Cpu,
    step: Step,
    g: &[G],
    w: &mut [f32],
    m: &mut [M],
    v: &mut [M],
    update: Update<G, M>,
) {
    let (isa, len) = (cpu.isa(), rows_per_task(cpu, g.len(), 1));
    if len >= g.len() {
        return update(isa, step, g, w, m, v);
    }
    cpu.pool().install(|| {
        let tasks = g.par_chunks(len).zip(w.par_chunks_mut(len)).zip(m.par_chunks_mut(len));
        tasks.zip(v.par_chunks_mut(len)).for_each(|(((g, w), m), v)| update(isa, step, g, w, m, v));
    });
}

per_isa!(fn update_f32_f32 = update_body::<f32, f32>; (step: Step, g: &[f32], w: &mut [f32], m: &mut [f32], v: &mut [f32]));
per_isa!(fn update_f32_bf16 = update_body::<f32, bf16>; (step: Step, g: &[f32], w: &mut [f32], m: &mut [bf16], v: &mut [bf16]));
per_isa!(fn update_bf16_f32 = update_body::<bf16, f32>; (step: Step, g: &[bf16], w: &mut [f32], m: &mut [f32], v: &mut [f32]));
per_isa!(fn update_bf16_bf16 = update_body::<bf16, bf16>; (step: Step, g: &[bf16], w: &mut [f32], m: &mut [bf16], v: &mut [bf16]));

#[inline(always)]
fn update_body<G: Real, M: Real>(step: Step, g: &[G], w: &mut [f32], m: &mut [M], v: &mut [M]) {
    let (rest1, rest2) = (1.0 - step.beta1, 1.0 - step.beta2);
    for (((g, w), m), v) in g.iter().zip(w).zip(m).zip(v) {
        let g = g.widen() * step.grad_scale;
        let exp_avg = step.beta1 * m.widen() + rest1 * g;
        let exp_avg_sq = step.beta2 * v.widen() + rest2 * (g * g);
        let denominator = (exp_avg_sq * step.bias2).sqrt() + step.eps;
        *w = (*w - step.decay * *w) - (step.lr * (exp_avg * step.bias1)) / denominator;
        (*m, *v) = (M::round(exp_avg), M::round(exp_avg_sq));
    }
}

#[cfg(test)]
mod tests;
