//! The CPU code of [`nibble_core::ops::Route`] and [`nibble_core::ops::RouteBackward`], which also document the order of sums.
//!
//! A row of logits with a NaN or +∞ (or only −∞) has NaN probabilities and chooses the first experts. The losses of the row's shard become
//! NaN, so that training detects the problem.

mod choice;

use self::choice::Choice;
use crate::Cpu;
use crate::ops::plain::elementwise::{for_rows, run_shares};
use crate::simd::{LANES, Real, exp_less, lane_max, per_isa, rows_per_task, tree_sum};
use nibble_core::ops::{Route, RouteBackward, RouteRule, Routing, Scores};
use nibble_core::{Result, Tensor};
use nibble_formats::math;
use std::ops::{Add, AddAssign};

/// Number of lanes of a sum over experts.
const EXPERT_LANES: usize = 4 * LANES;

/// A sum over experts: `add(lane, j)` adds the term of expert j to the expert's lane.
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

/// Computes the softmax and log Σ exp of each row.
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

/// Computes the sigmoid of each logit. A row whose log Σ exp is NaN becomes NaN; see [`Route`].
#[inline(always)]
fn sigmoids_body(logits: &[f32], experts: usize, log_sum_exp: &[f32], scores: &mut [f32]) {
    let rows = logits.chunks_exact(experts).zip(scores.chunks_exact_mut(experts));
    for ((logits, scores), log_sum_exp) in rows.zip(log_sum_exp) {
        scores.iter_mut().zip(logits).for_each(|(score, logit)| *score = math::sigmoid(*logit));
        if log_sum_exp.is_nan() {
            scores.fill(f32::NAN);
        }
    }
}
per_isa!(fn sigmoids = sigmoids_body; (logits: &[f32], experts: usize, log_sum_exp: &[f32], scores: &mut [f32]));

/// The divisor that turns sigmoids into fractions of their sum.
#[inline(always)]
fn sigmoid_sum(scores: &[f32]) -> f32 {
    expert_sum(scores.len(), |lane: f32, j| lane + scores[j]) + RouteRule::TINY
}

/// Replaces each sigmoid by its fraction of the row's sum.
#[inline(always)]
fn shares_body(experts: usize, scores: &mut [f32]) {
    for row in scores.chunks_exact_mut(experts) {
        let sum = sigmoid_sum(row);
        row.iter_mut().for_each(|s| *s /= sum);
    }
}
per_isa!(fn shares_of_sum = shares_body; (experts: usize, scores: &mut [f32]));

/// A sum over slots, in slot order.
fn slot_sum(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |sum, v| sum + v)
}

/// The rows that one thread routes.
struct Share<'a> {
    /// Index of the first row, followed by the number of rows per shard.
    first: usize,
    per_shard: usize,
    logits: &'a [f32],
    scores: &'a mut [f32],
    expert: &'a mut [i32],
    weight: &'a mut [f32],
    log_sum_exp: &'a mut [f32],
}

/// Computes scores and selects experts row by row, then computes the losses shard by shard.
pub(crate) fn route(cpu: &Cpu, op: Route<'_, Cpu>) -> Result<Routing<Cpu>> {
    const OP: &str = "route";
    let (tokens, experts, top_k) = (op.logits.rows, op.logits.cols, op.rule.top_k);
    let logits = op.logits.f32(OP, "logits")?.as_slice();
    let mut out = op.result(cpu)?;
    let Routing { expert, weight, kept, log_sum_exp, load, losses } = &mut out;
    let log_sum_exp = log_sum_exp.as_mut_slice();
    let (expert, weight) = (expert.as_mut_slice(), weight.as_mut_slice());
    let mut sigmoids = Vec::new();
    let scores = match op.rule.scores {
        Scores::Softmax => f32::slice_mut(OP, kept)?,
        Scores::Sigmoid => {
            sigmoids.resize(logits.len(), 0.0);
            &mut sigmoids[..]
        }
    };
    let rows = rows_per_task(cpu, tokens, experts);
    let shares = logits
        .chunks(rows * experts)
        .zip(scores.chunks_mut(rows * experts))
        .zip(expert.chunks_mut(rows * top_k))
        .zip(weight.chunks_mut(rows * top_k))
        .zip(log_sum_exp.chunks_mut(rows))
        .enumerate()
        .map(|(i, ((((logits, scores), expert), weight), log_sum_exp))| Share {
            first: i * rows,
            per_shard: tokens / op.shards,
            logits,
            scores,
            expert,
            weight,
            log_sum_exp,
        })
        .collect();
    let bias = op.bias.map(|bias| bias.as_slice());
    run_shares(cpu, shares, |s: Share<'_>| route_rows(cpu, &op.rule, bias, experts, s));
    let documents = op
        .documents
        .map(|starts| DocumentSlots::of(starts.as_slice(), expert, (tokens / op.shards, experts, top_k)));
    let (of_rows, made) = ((&*scores, &*expert, &*log_sum_exp), (load.as_mut_slice(), losses.as_mut_slice()));
    shard_losses(cpu, &op, documents.as_ref(), of_rows, made);
    Ok(out)
}

/// Selects experts. Scores become the values that the load-balancing loss uses (fractions of the row's sum).
fn route_rows(cpu: &Cpu, rule: &RouteRule, bias: Option<&[f32]>, experts: usize, s: Share<'_>) {
    let Share { first, per_shard, logits, scores, expert, weight, log_sum_exp } = s;
    softmax(cpu.isa(), logits, experts, scores, log_sum_exp);
    if rule.scores == Scores::Sigmoid {
        sigmoids(cpu.isa(), logits, experts, log_sum_exp, scores);
    }
    let mut choice = Choice::new(rule, bias);
    let slots = expert.chunks_exact_mut(rule.top_k).zip(weight.chunks_exact_mut(rule.top_k));
    for (i, (scores, (expert, weight))) in scores.chunks_exact(experts).zip(slots).enumerate() {
        if rule.in_turn {
            let token = (first + i) % per_shard;
            for (slot, (expert, weight)) in expert.iter_mut().zip(weight.iter_mut()).enumerate() {
                let e = rule.turn(token, slot, experts);
                (*expert, *weight) = (e as i32, scores[e]);
            }
        } else {
            choice.of(scores, expert, weight);
        }
        weigh(rule, weight);
    }
    if rule.scores == Scores::Sigmoid {
        shares_of_sum(cpu.isa(), experts, scores);
    }
}

/// Converts the selected scores to gate weights, in place.
fn weigh(rule: &RouteRule, weight: &mut [f32]) {
    if rule.normalize {
        let sum = slot_sum(weight.iter().copied()) + rule.tiny();
        weight.iter_mut().for_each(|w| *w /= sum);
    }
    weight.iter_mut().for_each(|w| *w *= rule.scale);
}

/// Reduces sixteen lanes of `width` sums each to one.
fn close_lanes<T: Copy + AddAssign>(lanes: &mut [T], width: usize) {
    for half in [8, 4, 2, 1] {
        let (low, high) = lanes.split_at_mut(half * width);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
    }
}

/// Sums of `width` values over the tokens of a shard: `add(lane, token)` adds a token's values to its lane.
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

/// The documents of a load-balancing loss. A document's data is in the row of its first token.
struct DocumentSlots<'a> {
    starts: &'a [i32],
    per_shard: usize,
    experts: usize,
    /// For each document, the number of slots that chose each expert, in the row of its first token.
    slots: Vec<i32>,
    /// For each document, its number of tokens, in the row of its first token.
    tokens: Vec<i32>,
}

impl<'a> DocumentSlots<'a> {
    fn of(starts: &'a [i32], expert: &[i32], (per_shard, experts, top_k): (usize, usize, usize)) -> Self {
        let (slots, tokens) = (vec![0; starts.len() * experts], vec![0; starts.len()]);
        let mut all = Self { starts, per_shard, experts, slots, tokens };
        for (token, chosen) in expert.chunks_exact(top_k).enumerate() {
            let row = all.row(token);
            all.tokens[row] += 1;
            chosen.iter().for_each(|&e| all.slots[row * experts + e as usize] += 1);
        }
        all
    }

    /// The row that holds the data of a token's document.
    fn row(&self, token: usize) -> usize {
        let at = token % self.per_shard;
        token - at + (self.starts[token].max(0) as usize).min(at)
    }

    /// The slots per expert and the number of tokens of a token's document.
    fn document(&self, token: usize) -> (&[i32], i32) {
        let row = self.row(token);
        (&self.slots[row * self.experts..][..self.experts], self.tokens[row])
    }
}

/// A token's contribution to its document's load-balancing loss.
#[inline(always)]
fn document_share_body(scores: &[f32], (slots, tokens): (&[i32], i32)) -> f32 {
    expert_sum(scores.len(), |lane, j| (slots[j] as f32).mul_add(scores[j], lane)) / tokens as f32
}
per_isa!(fn document_share = document_share_body; (scores: &[f32], document: (&[i32], i32)) -> f32);

/// For each shard: the number of slots of each expert, and the two losses.
fn shard_losses(
    cpu: &Cpu,
    op: &Route<'_, Cpu>,
    documents: Option<&DocumentSlots<'_>>,
    (scores, expert, log_sum_exp): (&[f32], &[i32], &[f32]),
    (load, losses): (&mut [i32], &mut [f32]),
) {
    let (experts, tokens) = (op.logits.cols, op.logits.rows / op.shards);
    let slots = tokens * op.rule.top_k;
    let all = load.chunks_mut(experts).zip(losses.chunks_mut(2)).enumerate();
    let body = |(shard, (load, losses)): (usize, (&mut [i32], &mut [f32]))| {
        load.fill(0);
        for &e in &expert[shard * slots..][..slots] {
            load[e as usize] += 1; // chosen by `choose`, so the index is below `experts`
        }
        let (scores, log_sum_exp) = (&scores[shard * tokens * experts..], &log_sum_exp[shard * tokens..]);
        // The sums are those of the probabilities, or of the tokens' contributions to document losses, followed by the sum of squares of
        // log Σ exp.
        let width = if documents.is_some() { 1 } else { experts };
        let sums = token_sum(tokens, width + 1, |lane, token| {
            let row = &scores[token * experts..][..experts];
            match documents {
                Some(all) => lane[0] += document_share(cpu.isa(), row, all.document(shard * tokens + token)),
                None => lane.iter_mut().zip(row).for_each(|(sum, &p)| *sum += p),
            }
            lane[width] += log_sum_exp[token] * log_sum_exp[token];
        });
        let (balance, per_slot) = match documents {
            Some(_) => (sums[0], slots),
            None => (expert_sum(experts, |lane, j| lane + f64::from(load[j]) * sums[j]), slots * tokens),
        };
        // A shard without tokens has the loss 0, not 0 / 0.
        losses[0] = (experts as f64 * balance / per_slot.max(1) as f64) as f32;
        losses[1] = (sums[width] / tokens.max(1) as f64) as f32;
    };
    if scores.len() < 1 << 14 { all.for_each(body) } else { run_shares(cpu, all.collect(), body) }
}

/// dlogits = p ⊙ ((dp − Σ dp·p) + z · log Σ exp). `out` holds `dp` and is overwritten.
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

/// The inputs of a row's backward pass through the sigmoids.
struct SigmoidRow<'a> {
    logits: &'a [f32],
    scores: &'a [f32],
    balance: &'a [f32],
    log_sum_exp: f32,
    z: f32,
}

/// dlogits = (ds + (b − Σ b·s / S) / S) · s(1 − s) + z · lse · exp(logit − lse). `out` holds `ds` and is overwritten.
#[inline(always)]
fn sigmoid_backward_body(row: SigmoidRow<'_>, out: &mut [f32]) {
    let SigmoidRow { logits, scores, balance, log_sum_exp, z } = row;
    let sum = sigmoid_sum(scores);
    let mean = expert_sum(scores.len(), |lane: f32, j| balance[j].mul_add(scores[j], lane)) / sum;
    for ((d, logit), balance) in out.iter_mut().zip(logits).zip(balance) {
        // 1 − sigmoid(x) = sigmoid(−x), which is accurate even if the sigmoid is close to 1.
        let slope = math::sigmoid(*logit) * math::sigmoid(-logit);
        *d = (*d + (balance - mean) / sum) * slope;
    }
    if z != 0.0 {
        let shift = z * log_sum_exp;
        out.iter_mut().zip(logits).for_each(|(d, logit)| *d += shift * math::exp(logit - log_sum_exp));
    }
    if log_sum_exp.is_nan() {
        out.fill(f32::NAN);
    }
}
per_isa!(fn sigmoid_backward = sigmoid_backward_body; (row: SigmoidRow<'_>, out: &mut [f32]));

/// The backward pass through the normalisation of gate weights, through the scores, and through both losses. The load is a count and has no
/// gradient.
pub(crate) fn route_backward(cpu: &Cpu, op: RouteBackward<'_, Cpu>) -> Result<Tensor<Cpu>> {
    const OP: &str = "route_backward";
    let (tokens, experts) = op.routing.kept.shape();
    let (expert, pads) = (op.routing.expert.as_slice(), crate::ops::routing::permute::Pads::Refused);
    crate::ops::routing::permute::check_index(OP, "routing.expert", expert, experts, pads)?;
    let per_shard = tokens / op.shards;
    let log_sum_exp = op.routing.log_sum_exp.as_slice();
    let kept = op.routing.kept.f32(OP, "routing.kept")?.as_slice();
    let (factor, z) = op.loss_factors();
    let part = |n: f64| (factor * n) as f32;
    let documents = op
        .documents
        .map(|starts| DocumentSlots::of(starts.as_slice(), expert, (per_shard, experts, op.rule.top_k)));
    // With documents, the factors depend on the row and are computed where the row is processed.
    let of_all: Vec<f32> = match (op.batch_load, &documents) {
        (Some(load), _) => load.as_slice().iter().map(|&n| part(n)).collect(),
        (None, Some(_)) => Vec::new(),
        (None, None) => op.routing.load.as_slice().iter().map(|&n| part(f64::from(n))).collect(),
    };
    let balance = |token: usize, own: &mut [f32]| match &documents {
        Some(all) => {
            let (slots, tokens) = all.document(token);
            let each = factor / f64::from(tokens);
            own.iter_mut().zip(slots).for_each(|(own, &n)| *own = (each * f64::from(n)) as f32);
        }
        None => {
            let shard = if op.batch_load.is_some() { 0 } else { token / per_shard };
            own.copy_from_slice(&of_all[shard * experts..][..experts]);
        }
    };
    let mut out = op.result(cpu)?;
    for_rows(cpu, f32::slice_mut(OP, &mut out)?, experts, |first, out| {
        let log_sum_exp = &log_sum_exp[first..][..out.len() / experts];
        let kept = &kept[first * experts..][..out.len()];
        let rows = (first..).zip(kept.chunks_exact(experts)).zip(out.chunks_exact_mut(experts));
        let mut own = vec![0.0; experts];
        match op.rule.scores {
            Scores::Softmax => {
                for ((token, probs), out) in rows {
                    weights_backward(&op, token, probs, out);
                    balance(token, &mut own);
                    out.iter_mut().zip(&own).for_each(|(d, balance)| *d += balance);
                }
                softmax_backward(cpu.isa(), kept, experts, log_sum_exp, z, out);
            }
            Scores::Sigmoid => {
                let mut scores = vec![0.0; experts];
                for (((token, logits), out), &log_sum_exp) in rows.zip(log_sum_exp) {
                    sigmoids(cpu.isa(), logits, experts, &[log_sum_exp], &mut scores);
                    weights_backward(&op, token, &scores, out);
                    balance(token, &mut own);
                    let row = SigmoidRow { logits, scores: &scores, balance: &own, log_sum_exp, z };
                    sigmoid_backward(cpu.isa(), row, out);
                }
            }
        }
    });
    Ok(out)
}

/// The gradient of one token's scores through the gate weights of the selected experts.
fn weights_backward(op: &RouteBackward<'_, Cpu>, token: usize, scores: &[f32], out: &mut [f32]) {
    let RouteRule { top_k, normalize, scale, .. } = op.rule;
    let slots = token * top_k..(token + 1) * top_k;
    let expert = &op.routing.expert.as_slice()[slots.clone()];
    let weight = &op.routing.weight.as_slice()[slots.clone()];
    let dweight = &op.dweight.as_slice()[slots];
    out.fill(0.0);
    let (mut inner, mut sum) = (0.0, 1.0);
    if normalize {
        // w = f·s / Σs: ds = (f·dw − Σ dw·w) / Σs
        inner = slot_sum(dweight.iter().zip(weight).map(|(d, w)| d * w));
        sum = slot_sum(expert.iter().map(|&e| scores[e as usize])) + op.rule.tiny();
    }
    for (&e, d) in expert.iter().zip(dweight) {
        out[e as usize] = (scale * d - inner) / sum;
    }
}

#[cfg(test)]
mod document_tests;
#[cfg(test)]
mod rule_tests;
#[cfg(test)]
mod tests;
