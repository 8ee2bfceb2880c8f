//! See [`nibble_core::ops::Route`] and [`nibble_core::ops::RouteBackward`].
//!
//! The order of every sum, which other backends keep:
//! * over experts: 16 lanes, expert j to lane j mod 16 in order, closed by the tree 8, 4, 2, 1, in F32; products by fma;
//! * over slots: in slot order, in F32;
//! * over the tokens of a shard: in order, in F64, rounded to F32 once, at the end of the loss.
//!
//! Experts are chosen by probability. A row of logits with a NaN or +∞ (or with −∞ alone) has probabilities that are
//! all NaN, chooses the first experts, and makes the losses of its shard NaN: training sees it there.

use super::elementwise::{for_rows, run_shares};
use crate::simd::{lane_dot, per_isa, rows_per_task, softmax_terms};
use crate::{Buf, Cpu};
use nibble_core::ops::{Route, RouteBackward, Routing};
use nibble_core::{Data, Error, Result, Tensor};
use nibble_formats::math;

/// Softmax of each row and its log Σ exp.
#[inline(always)]
fn softmax_body(logits: &[f32], experts: usize, probs: &mut [f32], log_sum_exp: &mut [f32]) {
    let rows = logits.chunks_exact(experts).zip(probs.chunks_exact_mut(experts));
    for ((logits, probs), log_sum_exp) in rows.zip(log_sum_exp) {
        probs.copy_from_slice(logits);
        let (max, sum) = softmax_terms(probs);
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
    if op.shards == 0 {
        return Err(Error::shape(OP, "shards", 0, "at least 1"));
    }
    let logits = op.logits.f32(OP, "logits")?.as_slice();
    let mut probs = cpu.scratch::<f32>(tokens * experts);
    let mut expert = cpu.scratch::<i32>(tokens * top_k);
    let mut weight = cpu.scratch::<f32>(tokens * top_k);
    let mut log_sum_exp = cpu.scratch::<f32>(tokens);
    let rows = rows_per_task(cpu, tokens, experts);
    let shares = logits
        .chunks(rows * experts)
        .zip(probs.as_mut_slice().chunks_mut(rows * experts))
        .zip(expert.as_mut_slice().chunks_mut(rows * top_k))
        .zip(weight.as_mut_slice().chunks_mut(rows * top_k))
        .zip(log_sum_exp.as_mut_slice().chunks_mut(rows))
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
    let (load, losses) = shard_losses(cpu, &op, probs.as_slice(), expert.as_slice(), log_sum_exp.as_slice());
    Ok(Routing { expert, weight, probs: Tensor::new(Data::F32(probs), tokens, experts)?, load, losses })
}

/// Tokens·slots of each expert and the two losses, of each shard.
fn shard_losses(
    cpu: &Cpu,
    op: &Route<'_, Cpu>,
    probs: &[f32],
    expert: &[i32],
    log_sum_exp: &[f32],
) -> (Buf<i32>, Buf<f32>) {
    let (experts, tokens) = (op.logits.cols, op.logits.rows / op.shards);
    let slots = tokens * op.top_k;
    let mut load = cpu.scratch::<i32>(op.shards * experts);
    let mut losses = cpu.scratch::<f32>(op.shards * 2);
    let all = load.as_mut_slice().chunks_mut(experts).zip(losses.as_mut_slice().chunks_mut(2)).enumerate();
    let body = |(shard, (load, losses)): (usize, (&mut [i32], &mut [f32]))| {
        load.fill(0);
        for &e in &expert[shard * slots..][..slots] {
            load[e as usize] += 1; // chosen by `choose`: an index below `experts`
        }
        let mut prob_sums = vec![0.0f64; experts];
        for row in probs[shard * tokens * experts..][..tokens * experts].chunks_exact(experts) {
            for (sum, &p) in prob_sums.iter_mut().zip(row) {
                *sum += f64::from(p);
            }
        }
        let balance = load.iter().zip(&prob_sums).fold(0.0, |sum, (&n, p)| sum + f64::from(n) * p);
        let square = |&x: &f32| f64::from(x) * f64::from(x);
        let squares = log_sum_exp[shard * tokens..][..tokens].iter().fold(0.0, |sum, x| sum + square(x));
        // A shard without tokens has no loss, rather than 0 / 0.
        let (per_slot, per_token) = ((slots * tokens).max(1) as f64, tokens.max(1) as f64);
        losses[0] = (experts as f64 * balance / per_slot) as f32;
        losses[1] = (squares / per_token) as f32;
    };
    if probs.len() < 1 << 14 {
        all.for_each(body)
    } else {
        run_shares(cpu, all.collect(), body)
    }
    (load, losses)
}

/// dlogits = p ⊙ ((dp − Σ dp·p) + shift). `dp` comes in `out`, which is overwritten.
#[inline(always)]
fn softmax_backward_body(probs: &[f32], experts: usize, shift: &[f32], out: &mut [f32]) {
    let rows = probs.chunks_exact(experts).zip(out.chunks_exact_mut(experts));
    for ((p, out), shift) in rows.zip(shift) {
        let inner = lane_dot(out, p);
        for (d, p) in out.iter_mut().zip(p) {
            *d = p * ((*d - inner) + shift);
        }
    }
}
per_isa!(fn softmax_backward = softmax_backward_body; (probs: &[f32], experts: usize, shift: &[f32], out: &mut [f32]));

/// Back through the normalisation of the chosen weights, the softmax, and the two losses. The load share is a count: it
/// has no gradient.
pub(crate) fn route_backward(cpu: &Cpu, op: RouteBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    const OP: &str = "route_backward";
    check_routing(OP, &op)?;
    let (tokens, experts) = op.logits.shape();
    let per_shard = tokens / op.shards;
    let logits = op.logits.f32(OP, "logits")?.as_slice();
    let probs = op.routing.probs.f32(OP, "routing.probs")?.as_slice();
    let per_slot = (per_shard * op.top_k * per_shard).max(1) as f64;
    let factor = f64::from(op.aux_scale) * experts as f64 / per_slot;
    let balance: Vec<f32> =
        op.routing.load.as_slice().iter().map(|&n| (factor * f64::from(n)) as f32).collect();
    let z = (2.0 * f64::from(op.z_scale) / per_shard.max(1) as f64) as f32;
    let mut out = cpu.scratch::<f32>(tokens * experts);
    for_rows(cpu, out.as_mut_slice(), experts, |first, out| {
        let rows = out.len() / experts;
        let mut shift = vec![0.0f32; rows];
        if z != 0.0 {
            // `out` is a place for the probabilities, which are known already.
            softmax(cpu.isa(), &logits[first * experts..][..out.len()], experts, out, &mut shift);
            shift.iter_mut().for_each(|x| *x *= z);
        }
        for (token, out) in (first..).zip(out.chunks_exact_mut(experts)) {
            let shard = token / per_shard;
            weights_backward(
                &op,
                token,
                &probs[token * experts..][..experts],
                &balance[shard * experts..],
                out,
            );
        }
        softmax_backward(cpu.isa(), &probs[first * experts..][..out.len()], experts, &shift, out);
    });
    Tensor::new(Data::F32(out), tokens, experts)
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
    out.copy_from_slice(&balance[..out.len()]);
    let (mut inner, mut sum) = (0.0, 1.0);
    if op.normalize {
        // w = p / Σp: dp = (dw − Σ dw·w) / Σp
        inner = slot_sum(dweight.iter().zip(weight).map(|(d, w)| d * w));
        sum = slot_sum(expert.iter().map(|&e| probs[e as usize]));
    }
    for (&e, d) in expert.iter().zip(dweight) {
        out[e as usize] += (d - inner) / sum;
    }
}

/// The routing must be one that [`route`] returned for arguments like these.
fn check_routing(op: &'static str, args: &RouteBackward<'_, Cpu>) -> Result<()> {
    let (tokens, experts) = args.logits.shape();
    if args.shards == 0 || !tokens.is_multiple_of(args.shards) {
        return Err(Error::shape(op, "shards", args.shards, format!("a divisor of {tokens} tokens")));
    }
    let lengths = [
        ("routing.expert.len()", args.routing.expert.as_slice().len(), tokens * args.top_k),
        ("routing.weight.len()", args.routing.weight.as_slice().len(), tokens * args.top_k),
        ("routing.load.len()", args.routing.load.as_slice().len(), args.shards * experts),
    ];
    for (argument, got, expected) in lengths {
        if got != expected {
            return Err(Error::shape(op, argument, got, expected));
        }
    }
    super::permute::check_index(
        op,
        "routing.expert",
        args.routing.expert.as_slice(),
        experts,
        super::permute::Pads::Refused,
    )
}

#[cfg(test)]
mod tests;
