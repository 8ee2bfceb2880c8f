//! See [`nibble_core::ops::CrossEntropy`].
//!
//! Of a row z with target y: e = exp(z − max), s = Σ e over 16 lanes (in order, then the tree 8, 4, 2, 1),
//! loss = log s + (max − z_y), dz = scale · (e / s − [i = y]). One body serves as specification and as vectorised code.

use crate::simd::{Real, per_isa, rows_per_task, softmax_terms};
use crate::{Buf, Cpu};
use half::bf16;
use nibble_core::ops::{CrossEntropy, CrossEntropyOut};
use nibble_core::{DType, Error, Result, Tensor};
use nibble_formats::math::log;
use rayon::prelude::*;

const OP: &str = "cross_entropy";

/// The loss of each row, and dlogits if asked for.
pub(crate) fn cross_entropy(cpu: &Cpu, op: CrossEntropy<'_, Cpu>) -> Result<CrossEntropyOut<Cpu>> {
    let (rows, vocab) = op.logits.shape();
    let wrong = |&(_, &target): &(usize, &i32)| usize::try_from(target).is_ok_and(|id| id >= vocab);
    if let Some((row, target)) = op.targets.as_slice().iter().enumerate().find(wrong) {
        let expected = format!("below the vocabulary of {vocab}, or negative for a row that does not count");
        return Err(Error::shape(OP, "targets", format!("{target} in row {row}"), expected));
    }
    match op.grad {
        None => Ok(CrossEntropyOut { loss: run::<f32>(cpu, &op, false)?.0, dlogits: None }),
        Some(DType::F32) => with_gradient::<f32>(cpu, &op, rows, vocab),
        Some(DType::Bf16) => with_gradient::<bf16>(cpu, &op, rows, vocab),
    }
}

fn with_gradient<T: Real>(
    cpu: &Cpu,
    op: &CrossEntropy<'_, Cpu>,
    rows: usize,
    vocab: usize,
) -> Result<CrossEntropyOut<Cpu>> {
    let (loss, dlogits) = run::<T>(cpu, op, true)?;
    Ok(CrossEntropyOut { loss, dlogits: Some(Tensor::new(T::data(dlogits), rows, vocab)?) })
}

/// The loss, and the gradient: empty unless `wanted`.
fn run<T: Real>(cpu: &Cpu, op: &CrossEntropy<'_, Cpu>, wanted: bool) -> Result<(Buf<f32>, Buf<T>)> {
    let (rows, vocab) = op.logits.shape();
    let logits = op.logits.f32(OP, "logits")?.as_slice();
    let targets = op.targets.as_slice();
    let mut loss = cpu.scratch::<f32>(rows);
    let mut grad = cpu.scratch::<T>(if wanted { rows * vocab } else { 0 });
    let (isa, scale, step) = (cpu.isa(), op.scale, rows_per_task(cpu, rows, vocab));
    let (losses, mut grads) = (loss.as_mut_slice(), grad.as_mut_slice());
    if vocab == 0 || step >= rows {
        loss_rows(isa, logits, targets, scale, losses, grads, &mut vec![0.0; vocab]);
        return Ok((loss, grad));
    }
    let mut tasks = Vec::with_capacity(rows.div_ceil(step));
    for ((z, y), loss) in logits.chunks(step * vocab).zip(targets.chunks(step)).zip(losses.chunks_mut(step)) {
        let (grad, rest) = grads.split_at_mut(if wanted { z.len() } else { 0 });
        grads = rest;
        tasks.push((z, y, loss, grad));
    }
    cpu.pool().install(|| {
        tasks.into_par_iter().for_each_init(
            || vec![0.0; vocab],
            |e, (z, y, loss, grad)| loss_rows(isa, z, y, scale, loss, grad, e),
        );
    });
    Ok((loss, grad))
}

per_isa!(fn loss_rows<T: Real> = loss_rows_body; (logits: &[f32], targets: &[i32], scale: f32, loss: &mut [f32], grad: &mut [T], e: &mut [f32]));

/// `e` is room for one row; `grad` may be empty.
#[inline(always)]
fn loss_rows_body<T: Real>(
    logits: &[f32],
    targets: &[i32],
    scale: f32,
    loss: &mut [f32],
    grad: &mut [T],
    e: &mut [f32],
) {
    let vocab = e.len();
    for (row, (loss, &target)) in loss.iter_mut().zip(targets).enumerate() {
        let elements = row * vocab..(row + 1) * vocab;
        let z = &logits[elements.clone()];
        let grad = if grad.is_empty() { &mut [] } else { &mut grad[elements] };
        let Ok(target) = usize::try_from(target) else {
            *loss = 0.0;
            grad.fill(T::round(0.0));
            continue;
        };
        e.copy_from_slice(z);
        let (max, sum) = softmax_terms(e);
        *loss = log(sum) + (max - z[target]);
        if !grad.is_empty() {
            for (grad, e) in grad.iter_mut().zip(&*e) {
                *grad = T::round(scale * (e / sum));
            }
            grad[target] = T::round(scale * (e[target] / sum - 1.0));
        }
    }
}

#[cfg(test)]
mod tests;
