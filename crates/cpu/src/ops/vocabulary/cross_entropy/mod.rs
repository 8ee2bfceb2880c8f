//! The CPU code of [`nibble_core::ops::CrossEntropy`].
//!
//! One body is both specification and vectorised code: a loop over rows that uses the sum `crate::sums::wide_sum`.

use crate::Cpu;
use crate::simd::{Real, exp_less, lane_max, per_isa, rows_per_task};
use crate::sums::{WideLanes, sum_f64, wide_sum};
use nibble_core::ops::{Control, CrossEntropy, CrossEntropyOut};
use nibble_core::{Data, Result};
use nibble_formats::math::log;
use rayon::prelude::*;

const OP: &str = "cross_entropy";

/// Computes the loss of each row and shard, and dlogits if requested.
pub(crate) fn cross_entropy(cpu: &Cpu, op: CrossEntropy<'_, Cpu>) -> Result<CrossEntropyOut<Cpu>> {
    let rows = TargetRows::new(
        cpu,
        op.targets.as_slice(),
        op.logits.cols,
        op.control.as_slice()[Control::LOSS_SCALE],
    );
    let logits = op.logits.f32(OP, "logits")?.as_slice();
    let mut out = op.result(cpu)?;
    let loss = out.loss.as_mut_slice();
    match out.dlogits.as_mut().map(|dlogits| &mut dlogits.data) {
        None => rows.run::<f32>(logits, loss, &mut []),
        Some(Data::F32(dlogits)) => rows.run(logits, loss, dlogits.as_mut_slice()),
        Some(Data::Bf16(dlogits)) => rows.run(logits, loss, dlogits.as_mut_slice()),
    }
    sum_losses(cpu, loss, out.shard_nats.as_mut_slice());
    out.bad_ids.as_mut_slice()[0] = rows.bad_ids();
    Ok(out)
}

/// Sums the losses of each shard in F64.
pub(in crate::ops) fn sum_losses(cpu: &Cpu, loss: &[f32], nats: &mut [f64]) {
    let each = loss.len() / nats.len().max(1);
    for (shard, nats) in nats.iter_mut().enumerate() {
        *nats = sum_f64(cpu.isa(), &loss[shard * each..][..each]);
    }
}

/// Rows of logits with their targets.
pub(in crate::ops) struct TargetRows<'a> {
    cpu: &'a Cpu,
    targets: &'a [i32],
    vocab: usize,
    scale: f32,
}

impl<'a> TargetRows<'a> {
    pub fn new(cpu: &'a Cpu, targets: &'a [i32], vocab: usize, scale: f32) -> Self {
        Self { cpu, targets, vocab, scale }
    }

    /// Number of targets that are outside the vocabulary.
    pub fn bad_ids(&self) -> u64 {
        self.targets.iter().filter(|&&t| usize::try_from(t).is_ok_and(|t| t >= self.vocab)).count() as u64
    }

    /// Computes the loss of each row, and the gradient of the row's logits unless `grads` is empty.
    pub fn run<T: Real>(&self, logits: &[f32], losses: &mut [f32], mut grads: &mut [T]) {
        let Self { cpu, targets, vocab, scale } = *self;
        let (isa, rows, wanted) = (cpu.isa(), targets.len(), !grads.is_empty());
        let step = rows_per_task(cpu, rows, vocab);
        if vocab == 0 || step >= rows {
            return loss_rows(isa, logits, targets, scale, losses, grads, &mut Room::new(vocab));
        }
        let mut tasks = Vec::with_capacity(rows.div_ceil(step));
        let chunks = logits.chunks(step * vocab).zip(targets.chunks(step)).zip(losses.chunks_mut(step));
        for ((z, y), loss) in chunks {
            let (grad, rest) = grads.split_at_mut(if wanted { z.len() } else { 0 });
            grads = rest;
            tasks.push((z, y, loss, grad));
        }
        cpu.pool().install(|| {
            tasks.into_par_iter().for_each_init(
                || Room::new(vocab),
                |room, (z, y, loss, grad)| loss_rows(isa, z, y, scale, loss, grad, room),
            );
        });
    }
}

/// Scratch memory for one row.
struct Room {
    /// The row's exponentials.
    e: Vec<f32>,
    lanes: WideLanes,
}

impl Room {
    fn new(vocab: usize) -> Self {
        Self { e: vec![0.0; vocab], lanes: [0.0; 1024] }
    }
}

per_isa!(fn loss_rows<T: Real> = loss_rows_body; (logits: &[f32], targets: &[i32], scale: f32, loss: &mut [f32], grad: &mut [T], room: &mut Room));

/// Computes the losses of rows, and their gradients unless `grad` is empty.
#[inline(always)]
fn loss_rows_body<T: Real>(
    logits: &[f32],
    targets: &[i32],
    scale: f32,
    loss: &mut [f32],
    grad: &mut [T],
    room: &mut Room,
) {
    let Room { e, lanes } = room;
    let vocab = e.len();
    for (row, (loss, &target)) in loss.iter_mut().zip(targets).enumerate() {
        let elements = row * vocab..(row + 1) * vocab;
        let z = &logits[elements.clone()];
        let grad = if grad.is_empty() { &mut [] } else { &mut grad[elements] };
        // A negative target becomes a huge index, so it is ignored too.
        let target = target as usize;
        if target >= vocab {
            *loss = 0.0;
            grad.fill(T::round(0.0));
            continue;
        }
        let max = lane_max(z);
        e.copy_from_slice(z);
        exp_less(e, max);
        let sum = wide_sum(e, lanes);
        *loss = log(sum) + (max - z[target]);
        if !grad.is_empty() {
            for (grad, e) in grad.iter_mut().zip(e.iter()) {
                *grad = T::round(scale * (e / sum));
            }
            grad[target] = T::round(scale * (e[target] / sum - 1.0));
        }
    }
}

#[cfg(test)]
mod tests;
