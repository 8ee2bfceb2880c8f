//! See [`nibble_core::ops::Route`] and [`nibble_core::ops::RouteBackward`], which also say in which order sums run.
//!
//! A row of logits with a NaN or +∞ (or with −∞ alone) has probabilities that are all NaN, chooses the first experts, and
//! makes the losses of its shard NaN: training sees it there.

use super::elementwise::{for_rows, run_shares};
use crate::Cpu;
use crate::simd::{LANES, Real, exp_less, lane_max, per_isa, rows_per_task, tree_sum};
use nibble_core::ops::{Route, RouteBackward, Routing};
use nibble_core::{Result, Tensor};
use nibble_formats::math;
use std::ops::{Add, AddAssign};

/// Lanes of a sum over experts.
const EXPERT_LANES: usize = 4 * LANES;

/// A sum over experts: `add(lane, j)` puts expert j's term on its lane.
#[inline(always)]
fn expert_sum<T: Copy + Default + Add<Output = T>>(experts: usize, add: impl Fn(T, usize) -> T) -> T {
    let mut lanes = [T::default(); EXPERT_LANES];
    let whole = experts - experts % EXPERT_LANES;
    for first in (0..whole).step_by(EXPERT_LANES) {
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane = add(*lane, first + i);
        }
    }
    for (lane, j) in lanes.iter_mut().zip(whole..experts) {
        *lane = add(*lane, j);
    }
    let four = |i: usize| (lanes[4 * i] + lanes[4 * i + 1]) + (lanes[4 * i + 2] + lanes[4 * i + 3]);
    tree_sum(std::array::from_fn::<T, LANES, _>(four))
}

/// Softmax of each row and its log Σ exp.
#[inline(always)]
fn softmax_body(logits: &[f32], experts: usize, probs: &mut [f32], log_sum_exp: &mut [f32]) {
    let rows = logits.chunks_exact(experts).zip(probs.chunks_exact_mut(experts));
    for ((logits, probs), log_sum_exp) in rows.zip(log_sum_exp) {
        probs.copy_from_slice(logits);
        let max = lane_max(probs);
        exp_less(probs, max);
        let sum = expert_sum(experts, |lane: f32, j| lane + probs[j]);
        for p in probs.iter_mut() {
            *p /= sum;
        }
        *log_sum_exp = max + math::log(sum);
    }
}
per_isa!(fn softmax = softmax_body; (logits: &[f32], experts: usize, probs: &mut [f32], log_sum_exp: &mut [f32]));

/// The largest of a row by insertion: `expert.len()` of them, largest first, the lower index first among equals, NaNs
/// last.
fn choose(probs: &[f32], normalize: bool, expert: &mut [i32], weight: &mut [f32]) {
    let top_k = expert.len();
    let ahead = |p: f32, w: f32| p > w || (w.is_nan() && !p.is_nan());
    for (j, &p) in probs.iter().enumerate() {
        let mut place = j;
        if j >= top_k {
            place = top_k - 1;
            if !ahead(p, weight[place]) {
                continue;
            }
        }
        while place > 0 && ahead(p, weight[place - 1]) {
            (weight[place], expert[place]) = (weight[place - 1], expert[place - 1]);
            place -= 1;
        }
        (weight[place], expert[place]) = (p, j as i32);
    }
    if normalize {
        let sum = slot_sum(weight.iter().copied());
        for w in weight {
            *w /= sum;
        }
    }
}

/// A sum over slots, in slot order.
fn slot_sum(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |sum, v| sum + v)
}

/// Rows one thread takes.
struct Share<'a> {
    logits: &'a [f32],
    probs: &'a mut [f32],
    expert: &'a mut [i32],
    weight: &'a mut [f32],
    log_sum_exp: &'a mut [f32],
}

/// Softmax and choice row by row, then the losses shard by shard.
pub(crate) fn route(cpu: &Cpu, op: Route<'_, Cpu>) -> Result<Routing<Cpu>> {
    const OP: &str = "route";
    let (tokens, experts, top_k) = (op.logits.rows, op.logits.cols, op.top_k);
    let logits = op.logits.f32(OP, "logits")?.as_slice();
    let mut out = op.result(cpu)?;
    let Routing { expert, weight, probs, log_sum_exp, load, losses } = &mut out;
    let (probs, log_sum_exp) = (f32::slice_mut(OP, probs)?, log_sum_exp.as_mut_slice());
    let (expert, weight) = (expert.as_mut_slice(), weight.as_mut_slice());
    let rows = rows_per_task(cpu, tokens, experts);
    let shares = logits
        .chunks(rows * experts)
        .zip(probs.chunks_mut(rows * experts))
        .zip(expert.chunks_mut(rows * top_k))
        .zip(weight.chunks_mut(rows * top_k))
        .zip(log_sum_exp.chunks_mut(rows))
        .map(|((((logits, probs), expert), weight), log_sum_exp)| Share {
            logits,
            probs,
            expert,
            weight,
            log_sum_exp,
        })
        .collect();
    run_shares(cpu, shares, |s: Share<'_>| {
        softmax(cpu.isa(), s.logits, experts, s.probs, s.log_sum_exp);
        let slots = s.expert.chunks_exact_mut(top_k).zip(s.weight.chunks_exact_mut(top_k));
        for (probs, (expert, weight)) in s.probs.chunks_exact(experts).zip(slots) {
            choose(probs, op.normalize, expert, weight);
        }
    });
    shard_losses(cpu, &op, (probs, expert, log_sum_exp), (load.as_mut_slice(), losses.as_mut_slice()));
    Ok(out)
}

/// Closes sixteen lanes of `width` sums.
fn close_lanes<T: Copy + AddAssign>(lanes: &mut [T], width: usize) {
    for half in [8, 4, 2, 1] {
        let (low, high) = lanes.split_at_mut(half * width);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
    }
}

/// Sums of `width` values over the tokens of a shard: `add(lane, token)` puts a token's on its lane.
fn token_sum(tokens: usize, width: usize, add: impl Fn(&mut [f32], usize)) -> Vec<f64> {
    let mut all = vec![0.0f64; LANES * width];
    let mut chunk = vec![0.0f32; LANES * width];
    for (i, first) in (0..tokens).step_by(Route::<Cpu>::CHUNK).enumerate() {
        chunk.fill(0.0);
        for token in first..tokens.min(first + Route::<Cpu>::CHUNK) {
            add(&mut chunk[token % LANES * width..][..width], token);
        }
        close_lanes(&mut chunk, width);
        let lane = &mut all[i % LANES * width..][..width];
        lane.iter_mut().zip(&chunk).for_each(|(lane, sum)| *lane += f64::from(*sum));
    }
    close_lanes(&mut all, width);
    all.truncate(width);
    all
}

/// Tokens·slots of each expert and the two losses, of each shard.
fn shard_losses(
    cpu: &Cpu,
    op: &Route<'_, Cpu>,
    (probs, expert, log_sum_exp): (&[f32], &[i32], &[f32]),
    (load, losses): (&mut [i32], &mut [f32]),
) {
    let (experts, tokens) = (op.logits.cols, op.logits.rows / op.shards);
    let slots = tokens * op.top_k;
    let all = load.chunks_mut(experts).zip(losses.chunks_mut(2)).enumerate();
    let body = |(shard, (load, losses)): (usize, (&mut [i32], &mut [f32]))| {
        load.fill(0);
        for &e in &expert[shard * slots..][..slots] {
            load[e as usize] += 1; // chosen by `choose`: an index below `experts`
        }
        let (probs, log_sum_exp) = (&probs[shard * tokens * experts..], &log_sum_exp[shard * tokens..]);
        // The probabilities' sums, then that of the squares of log Σ exp.
        let sums = token_sum(tokens, experts + 1, |lane, token| {
            let row = &probs[token * experts..][..experts];
            for (sum, &p) in lane.iter_mut().zip(row) {
                *sum += p;
            }
            lane[experts] += log_sum_exp[token] * log_sum_exp[token];
        });
        let balance: f64 = expert_sum(experts, |lane, j| lane + f64::from(load[j]) * sums[j]);
        let squares = sums[experts];
        // A shard without tokens has no loss, rather than 0 / 0.
        let (per_slot, per_token) = ((slots * tokens).max(1) as f64, tokens.max(1) as f64);
        losses[0] = (experts as f64 * balance / per_slot) as f32;
        losses[1] = (squares / per_token) as f32;
    };
    if probs.len() < 1 << 14 { all.for_each(body) } else { run_shares(cpu, all.collect(), body) }
}

/// dlogits = p ⊙ ((dp − Σ dp·p) + z · log Σ exp). `dp` comes in `out`, which is overwritten.
#[inline(always)]
fn softmax_backward_body(probs: &[f32], experts: usize, log_sum_exp: &[f32], z: f32, out: &mut [f32]) {
    let rows = probs.chunks_exact(experts).zip(out.chunks_exact_mut(experts));
    for ((p, out), log_sum_exp) in rows.zip(log_sum_exp) {
        let inner = expert_sum(experts, |lane, j| out[j].mul_add(p[j], lane));
        let shift = if z == 0.0 { 0.0 } else { z * log_sum_exp };
        for (d, p) in out.iter_mut().zip(p) {
            *d = p * ((*d - inner) + shift);
        }
    }
}
per_isa!(fn softmax_backward = softmax_backward_body; (probs: &[f32], experts: usize, log_sum_exp: &[f32], z: f32, out: &mut [f32]));

/// Back through the normalisation of the chosen weights, the softmax, and the two losses. The load share is a count: it
/// has no gradient.
pub(crate) fn route_backward(cpu: &Cpu, op: RouteBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    const OP: &str = "route_backward";
    let (tokens, experts) = op.routing.probs.shape();
    let (expert, pads) = (op.routing.expert.as_slice(), super::permute::Pads::Refused);
    super::permute::check_index(OP, "routing.expert", expert, experts, pads)?;
    let per_shard = tokens / op.shards;
    let log_sum_exp = op.routing.log_sum_exp.as_slice();
    let probs = op.routing.probs.f32(OP, "routing.probs")?.as_slice();
    let (factor, z) = op.loss_factors();
    let part = |n: f64| (factor * n) as f32;
    let balance: Vec<f32> = match op.batch_load {
        Some(load) => load.as_slice().iter().map(|&n| part(n)).collect(),
        None => op.routing.load.as_slice().iter().map(|&n| part(f64::from(n))).collect(),
    };
    let mut out = op.result(cpu)?;
    for_rows(cpu, f32::slice_mut(OP, &mut out)?, experts, |first, out| {
        for (token, out) in (first..).zip(out.chunks_exact_mut(experts)) {
            let shard = if op.batch_load.is_some() { 0 } else { token / per_shard };
            weights_backward(
                &op,
                token,
                &probs[token * experts..][..experts],
                &balance[shard * experts..],
                out,
            );
        }
        let log_sum_exp = &log_sum_exp[first..][..out.len() / experts];
        softmax_backward(cpu.isa(), &probs[first * experts..][..out.len()], experts, log_sum_exp, z, out);
    });
    Ok(out)
}

/// The gradient of one token's probabilities: of the load-balancing loss everywhere, of the gate weights where chosen.
fn weights_backward(
    op: &RouteBackward<'_, Cpu>,
    token: usize,
    probs: &[f32],
    balance: &[f32],
    out: &mut [f32],
) {
    let slots = token * op.top_k..(token + 1) * op.top_k;
    let expert = &op.routing.expert.as_slice()[slots.clone()];
    let weight = &op.routing.weight.as_slice()[slots.clone()];
    let dweight = &op.dweight.as_slice()[slots];
    out.fill(0.0);
    let (mut inner, mut sum) = (0.0, 1.0);
    if op.normalize {
        // w = p / Σp: dp = (dw − Σ dw·w) / Σp
        inner = slot_sum(dweight.iter().zip(weight).map(|(d, w)| d * w));
        sum = slot_sum(expert.iter().map(|&e| probs[e as usize]));
    }
    for (&e, d) in expert.iter().zip(dweight) {
        out[e as usize] = (d - inner) / sum;
    }
    out.iter_mut().zip(balance).for_each(|(d, balance)| *d += balance);
}

#[cfg(test)]
mod tests;
