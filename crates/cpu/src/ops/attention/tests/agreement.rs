//! The tolerance between backends allows a kernel to round P and dS to BF16, and no larger error.
//!
//! The tests compare this crate's attention with an emulated kernel, written as the formula: BF16 inputs, F32 sums, and P and dS rounded to
//! BF16 before their products. With one additional defect, the emulation must exceed the tolerance.

use super::*;
use nibble_core::Agreement;
use nibble_core::ops::attention_agreement;
use nibble_testkit::conformance::after_rounding_to_bf16;

/// The emulated kernel's defect.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Defect {
    None,
    /// Each query also attends to the next key after its own.
    OneKeyMore,
    /// No query except the first attends to its own key.
    OneKeyLess,
    /// Scores are 1 % too large.
    Scale,
    /// The softmax scale in dS is 1 % too small.
    GradientScale,
}

fn to_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// Computes out, dq, dk and dv of one sequence with one query head and one key/value head, `[seq, dim]`.
fn emulated(
    [q, k, v, dout]: [&[f32]; 4],
    seq: usize,
    dim: usize,
    round: fn(f32) -> f32,
    defect: Defect,
) -> [Vec<f32>; 4] {
    let scale = 1.0 / (dim as f32).sqrt();
    let score_scale = if defect == Defect::Scale { 1.01 * scale } else { scale };
    let grad_scale = if defect == Defect::GradientScale { 0.99 * scale } else { scale };
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let row = |x: &[f32], i: usize| x[i * dim..][..dim].to_vec();
    let [mut out, mut dq, mut dk, mut dv] = [(); 4].map(|()| vec![0.0f32; seq * dim]);
    let add = |to: &mut [f32], i: usize, by: f32, x: &[f32]| {
        to[i * dim..][..dim].iter_mut().zip(x).for_each(|(to, x)| *to += by * x);
    };
    for i in 0..seq {
        let keys = match defect {
            Defect::OneKeyMore => (i + 2).min(seq),
            Defect::OneKeyLess => i.max(1),
            _ => i + 1,
        };
        let scores: Vec<f32> = (0..keys).map(|j| score_scale * dot(&row(q, i), &row(k, j))).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let e: Vec<f32> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f32 = e.iter().sum();
        let p: Vec<f32> = e.iter().map(|e| e / sum).collect();
        for (j, p) in p.iter().enumerate() {
            add(&mut out, i, round(*p), &row(v, j));
        }
        let given: Vec<f32> = row(&out, i).into_iter().map(to_bf16).collect();
        let delta = dot(&row(dout, i), &given);
        for (j, p) in p.iter().enumerate() {
            let ds = round(p * (dot(&row(dout, i), &row(v, j)) - delta));
            add(&mut dv, j, round(*p), &row(dout, i));
            add(&mut dq, i, grad_scale * ds, &row(k, j));
            add(&mut dk, j, grad_scale * ds, &row(q, i));
        }
    }
    [out, dq, dk, dv].map(|x| x.into_iter().map(to_bf16).collect())
}

/// The relative error ‖got − want‖ / ‖want‖.
fn relative(got: &[f32], want: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = got.iter().zip(want).map(|(got, want)| square(got - want)).sum();
    (error / want.iter().map(|want| square(*want)).sum::<f64>()).sqrt()
}

/// Computes out, dq, dk and dv with this crate.
fn ours([q, k, v, dout]: [&[f32]; 4], seq: usize, dim: usize) -> [Vec<f32>; 4] {
    let cpu = Cpu::new(1).unwrap();
    let tensor = |x: &[f32]| {
        let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
        Tensor::from_bf16(&cpu, &x, seq, dim).unwrap()
    };
    let [q, k, v, dout] = [q, k, v, dout].map(tensor);
    let (qkv, dims) = ([&q, &k, &v], (dim, dim));
    let AttentionOut { out, lse } = attention(&cpu, Attention::new(qkv, dims, seq)).unwrap();
    let op = AttentionBackward::new(qkv, (&out, &lse), &dout, dims, seq);
    let AttentionGrads { dq, dk, dv, .. } = attention_backward(&cpu, op).unwrap();
    [&out, &dq, &dk, &dv].map(|x| x.to_f32_vec(&cpu).unwrap())
}

/// BF16 values of q, k, v and dout. `spread` sets the spread of the scores, and `power` the tail weight of v and dout.
fn inputs(seq: usize, dim: usize, spread: f32, power: i32) -> [Vec<f32>; 4] {
    let of = |site: u32, by: f32, power: i32| {
        normals(site, seq * dim).into_iter().map(|x| to_bf16(by * x.powi(power))).collect()
    };
    [of(21, spread, 1), of(22, 1.0, 1), of(23, 1.0, power), of(24, 1.0, power)]
}

fn bound() -> f64 {
    match attention_agreement(DType::Bf16) {
        Agreement::RelL2(e) => after_rounding_to_bf16(e),
        other => panic!("{other:?}"),
    }
}

const SHAPES: [(usize, usize); 6] = [(17, 16), (33, 20), (65, 32), (130, 64), (64, 128), (300, 16)];

#[test]
fn rounding_p_and_ds_to_bf16_is_within_the_bound() {
    let mut worst: f64 = 0.0;
    for (seq, dim) in SHAPES {
        // The cases have flat, ordinary and peaked scores, and ordinary and heavy-tailed values.
        for (spread, power) in [(0.1, 1), (1.0, 1), (1.0, 3), (4.0, 1), (4.0, 3)] {
            let x = inputs(seq, dim, spread, power);
            let x = x.each_ref().map(|x| &x[..]);
            let (want, got) = (ours(x, seq, dim), emulated(x, seq, dim, to_bf16, Defect::None));
            for ((name, got), want) in ["out", "dq", "dk", "dv"].into_iter().zip(got).zip(want) {
                let error = relative(&got, &want);
                // If one key has nearly all of P, dS is a small difference of large numbers. One of these numbers is computed from the
                // rounded output, so the tolerance does not cover dS.
                let peaked = spread > 1.0 && ["dq", "dk"].contains(&name);
                let bound = if peaked { 4.0 * bound() } else { bound() };
                worst = worst.max(if peaked { 0.0 } else { error });
                assert!(
                    error < bound,
                    "{name} of {seq}·{dim}, scores ·{spread}, power {power}: {error:.2e}, bound {bound:.2e}"
                );
            }
        }
    }
    assert!(worst > 0.7 * bound(), "the bound is much wider than it need be: {worst:.2e} of {:.2e}", bound());
}

#[test]
fn a_defect_is_outside_of_the_bound() {
    for (seq, dim) in SHAPES {
        let x = inputs(seq, dim, 1.0, 1);
        let x = x.each_ref().map(|x| &x[..]);
        let want = ours(x, seq, dim);
        for defect in [Defect::OneKeyMore, Defect::OneKeyLess, Defect::Scale, Defect::GradientScale] {
            // P and dS are rounded, or not rounded: the defect alone must exceed the tolerance.
            for round in [to_bf16, |x| x] {
                let got = emulated(x, seq, dim, round, defect);
                let errors: Vec<f64> = got.iter().zip(&want).map(|(got, want)| relative(got, want)).collect();
                // dS does not affect out and dv.
                let found = if defect == Defect::GradientScale { &errors[1..3] } else { &errors[..3] };
                let bound = bound();
                assert!(
                    found.iter().all(|error| *error > bound),
                    "{defect:?} at {seq}·{dim}: {errors:?}, bound {bound:.2e}"
                );
            }
        }
    }
}
