use super::*;
use crate::Buf;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere};
use nibble_core::{Backend, DType};

/// A `Route` that selects the top-k of the softmax over all experts.
fn of(logits: &Tensor<Cpu>, (top_k, normalize): (usize, bool), shards: usize) -> Route<'_, Cpu> {
    Route { logits, bias: None, rule: RouteRule::softmax(top_k, normalize), shards, documents: None }
}

/// Shapes as (tokens, experts, top_k, shards).
const SHAPES: [(usize, usize, usize, usize); 10] = [
    (0, 4, 2, 2),
    (1, 1, 1, 1),
    (6, 1, 1, 2),
    (64, 8, 2, 4),
    (33, 17, 3, 1),
    (10, 5, 5, 1),
    (48, 64, 6, 2),
    (512, 128, 8, 4),
    (4000, 8, 2, 4),
    (1500, 20, 3, 1),
];

fn logits_of(cpu: &Cpu, tokens: usize, experts: usize) -> Tensor<Cpu> {
    let x: Vec<f32> = normals(21, tokens * experts).iter().map(|x| 2.0 * x).collect();
    Tensor::from_f32(cpu, &x, tokens, experts).unwrap()
}

/// All fields of a routing, with floats as bits.
#[derive(Debug, PartialEq)]
struct Contents {
    expert: Vec<i32>,
    weight: Vec<u32>,
    probs: Vec<u32>,
    load: Vec<i32>,
    losses: Vec<u32>,
}

/// Returns the fields; all NaNs become one pattern, because NaN payloads are not specified.
fn contents(r: &Routing<Cpu>) -> Contents {
    let one_nan = |b: u32| if f32::from_bits(b).is_nan() { f32::NAN.to_bits() } else { b };
    let of = |x: &Buf<f32>| x.as_slice().iter().map(|x| one_nan(x.to_bits())).collect();
    Contents {
        expert: r.expert.as_slice().to_vec(),
        weight: of(&r.weight),
        probs: bits(&r.kept).into_iter().map(one_nan).collect(),
        load: r.load.as_slice().to_vec(),
        losses: of(&r.losses),
    }
}

fn near(got: f32, want: f64, tolerance: f64) -> bool {
    (f64::from(got) - want).abs() <= tolerance * want.abs().max(1e-30)
}

/// Softmax and log Σ exp in double precision.
fn softmax_f64(logits: &[f64]) -> (Vec<f64>, f64) {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    (logits.iter().map(|x| (x - max).exp() / sum).collect(), max + sum.ln())
}

/// The losses of one shard in double precision, for a given load.
fn losses_f64(rows: &[Vec<f64>], load: &[i32], top_k: usize) -> (f64, f64) {
    let (tokens, experts) = (rows.len() as f64, load.len());
    let (mut mean, mut z) = (vec![0.0; experts], 0.0);
    for row in rows {
        let (p, log_sum_exp) = softmax_f64(row);
        p.iter().zip(&mut mean).for_each(|(p, mean)| *mean += p / tokens);
        z += log_sum_exp * log_sum_exp / tokens;
    }
    let share = load.iter().map(|&n| f64::from(n) / (tokens * top_k as f64));
    (experts as f64 * share.zip(&mean).map(|(s, m)| s * m).sum::<f64>(), z)
}

fn rows_f64(logits: &[f32], experts: usize) -> Vec<Vec<f64>> {
    logits.chunks(experts).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect()
}

#[test]
fn routing_is_softmax_and_the_largest_with_losses_of_each_shard() {
    for (tokens, experts, top_k, shards) in SHAPES {
        for normalize in [false, true] {
            same_everywhere(|cpu| {
                let logits = &logits_of(cpu, tokens, experts);
                contents(&route(cpu, of(logits, (top_k, normalize), shards)).unwrap())
            });
            let cpu = Cpu::new(2).unwrap();
            let logits = &logits_of(&cpu, tokens, experts);
            let r = route(&cpu, of(logits, (top_k, normalize), shards)).unwrap();
            let rows = rows_f64(&logits.to_f32_vec(&cpu).unwrap(), experts);
            let probs = r.kept.to_f32_vec(&cpu).unwrap();
            let mut load = vec![0; shards * experts];
            for (t, row) in rows.iter().enumerate() {
                let p = &probs[t * experts..][..experts];
                let want = softmax_f64(row).0;
                assert!(p.iter().zip(&want).all(|(&p, &want)| near(p, want, 1e-6)), "{p:?} {want:?}");
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|&a, &b| p[b].total_cmp(&p[a])); // the sort is stable: the lower index is first
                let kept: f64 = order[..top_k].iter().map(|&e| f64::from(p[e])).sum();
                for (slot, &e) in order[..top_k].iter().enumerate() {
                    let at = t * top_k + slot;
                    assert_eq!(r.expert.as_slice()[at], e as i32);
                    let want = if normalize { f64::from(p[e]) / kept } else { f64::from(p[e]) };
                    assert!(near(r.weight.as_slice()[at], want, 1e-6));
                    load[t / (tokens / shards) * experts + e] += 1;
                }
            }
            assert_eq!(r.load.as_slice(), load);
            for shard in 0..shards {
                let n = tokens / shards;
                let want = match n {
                    0 => (0.0, 0.0),
                    _ => losses_f64(&rows[shard * n..][..n], &load[shard * experts..][..experts], top_k),
                };
                let got = &r.losses.as_slice()[2 * shard..][..2];
                assert!(near(got[0], want.0, 1e-6) && near(got[1], want.1, 1e-6), "{got:?} {want:?}");
            }
        }
    }
}

#[test]
fn equal_logits_choose_the_lower_index_and_balance_to_one() {
    let cpu = Cpu::new(1).unwrap();
    let logits = &Tensor::from_f32(&cpu, &[1.0, 3.0, 2.0, 3.0, 0.5, 0.5, 0.5, 0.5], 2, 4).unwrap();
    let r = route(&cpu, of(logits, (2, true), 2)).unwrap();
    assert_eq!(r.expert.as_slice(), [1, 3, 0, 1]);
    assert_eq!(r.weight.as_slice(), [0.5; 4]);
    assert_eq!(r.load.as_slice(), [0, 1, 0, 1, 1, 1, 0, 0]);
    // With equal probabilities, e · Σ share · mean is 1, whatever the load; z is (0.5 + ln 4)².
    assert_eq!(r.losses.as_slice()[2], 1.0);
    assert!(near(r.losses.as_slice()[3], (0.5 + 4f64.ln()).powi(2), 1e-6));
}

#[test]
fn what_is_not_finite_is_seen_in_its_own_shard_and_routes_to_the_first_experts() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = normals(22, 4 * 20);
        x[20 + 18] = bad;
        let got = same_everywhere(|cpu| {
            let logits = &Tensor::from_f32(cpu, &x, 4, 20).unwrap();
            contents(&route(cpu, of(logits, (3, true), 2)).unwrap())
        });
        let nan = |bits: &[u32]| bits.iter().map(|&b| f32::from_bits(b).is_nan()).collect::<Vec<_>>();
        assert_eq!(got.expert[3..6], [0, 1, 2], "{bad}");
        // Only the second token's weights and probabilities and the first shard's losses are NaN.
        let rows = |per_row: usize| (0..4 * per_row).map(|i| i / per_row == 1).collect::<Vec<_>>();
        assert_eq!(nan(&got.weight), rows(3), "{bad}");
        assert_eq!(nan(&got.probs), rows(20), "{bad}");
        assert_eq!(nan(&got.losses), [true, true, false, false], "{bad}");
    }
    // An expert excluded by −∞ has probability zero, which is finite.
    let cpu = Cpu::new(1).unwrap();
    let logits = &Tensor::from_f32(&cpu, &[f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 1.0], 1, 4).unwrap();
    let r = route(&cpu, of(logits, (3, true), 1)).unwrap();
    assert_eq!((r.expert.as_slice(), r.weight.as_slice()), (&[1, 3, 0][..], &[0.5, 0.5, 0.0][..]));
}

/// The scalar whose gradient `route_backward` returns, in double precision; the selected experts and the load are constant.
fn objective(rows: &[Vec<f64>], r: &Routing<Cpu>, args: &RouteBackward<'_, Cpu>) -> f64 {
    let (experts, k) = (r.kept.cols, args.rule.top_k);
    let mut total = 0.0;
    for (t, row) in rows.iter().enumerate() {
        let p = softmax_f64(row).0;
        let chosen: Vec<f64> = r.expert.as_slice()[t * k..][..k].iter().map(|&e| p[e as usize]).collect();
        let divisor = if args.rule.normalize { chosen.iter().sum() } else { 1.0 };
        let dweight = &args.dweight.as_slice()[t * k..][..k];
        total += chosen.iter().zip(dweight).map(|(p, d)| p / divisor * f64::from(*d)).sum::<f64>();
    }
    let n = rows.len() / args.shards;
    for (shard, rows) in rows.chunks(n).enumerate() {
        let (balance, z) = losses_f64(rows, &r.load.as_slice()[shard * experts..][..experts], k);
        total += f64::from(args.aux_scale) * balance + f64::from(args.z_scale) * z;
    }
    total
}

/// The arguments, with a separate load-balancing loss for each shard.
fn backward<'a>(
    routing: &'a Routing<Cpu>,
    (top_k, normalize, shards): (usize, bool, usize),
    dweight: &'a <Cpu as Backend>::Buf<f32>,
    (aux_scale, z_scale): (f32, f32),
) -> RouteBackward<'a, Cpu> {
    let (batch_load, batch_rows) = (None, 0);
    let rule = RouteRule::softmax(top_k, normalize);
    let documents = None;
    RouteBackward { routing, rule, shards, documents, dweight, aux_scale, z_scale, batch_load, batch_rows }
}

#[test]
fn the_gradient_is_that_of_finite_differences() {
    let cpu = Cpu::new(2).unwrap();
    for (tokens, experts, top_k, shards) in
        [(4, 8, 2, 2), (6, 17, 3, 1), (4, 5, 5, 4), (3, 4, 1, 1), (8, 33, 4, 2)]
    {
        for normalize in [false, true] {
            for (aux_scale, z_scale) in [(0.0, 0.0), (1.5, 0.0), (0.0, 0.25), (0.5, 0.1)] {
                let logits = &logits_of(&cpu, tokens, experts);
                let routing = &route(&cpu, of(logits, (top_k, normalize), shards)).unwrap();
                let dweight = &cpu.upload(&normals(23, tokens * top_k)).unwrap();
                let op = || backward(routing, (top_k, normalize, shards), dweight, (aux_scale, z_scale));
                let got = route_backward(&cpu, op()).unwrap().to_f32_vec(&cpu).unwrap();
                let rows = rows_f64(&logits.to_f32_vec(&cpu).unwrap(), experts);
                let mut largest = 0.0f64;
                let mut worst = 0.0f64;
                for (i, &got) in got.iter().enumerate() {
                    let at = |h: f64| {
                        let mut rows = rows.clone();
                        rows[i / experts][i % experts] += h;
                        objective(&rows, routing, &op())
                    };
                    let want = (at(1e-5) - at(-1e-5)) / 2e-5;
                    worst = worst.max((f64::from(got) - want).abs());
                    largest = largest.max(want.abs());
                }
                // The normalised weight of a single expert is constant, so without auxiliary losses the gradient is zero.
                let constant = normalize && top_k == 1 && aux_scale == 0.0 && z_scale == 0.0;
                assert_eq!(largest < 1e-8, constant, "{largest}");
                assert!(
                    worst <= 1e-6 * largest + 1e-7,
                    "{worst} of {largest}: {tokens} {experts} {top_k} {normalize}"
                );
            }
        }
    }
}

#[test]
fn the_gradient_has_the_same_bits_everywhere() {
    for (tokens, experts, top_k, shards) in SHAPES {
        for (normalize, aux_scale, z_scale) in [(true, 0.01, 0.001), (false, 0.0, 0.0)] {
            same_everywhere(|cpu| {
                let logits = &logits_of(cpu, tokens, experts);
                let routing = &route(cpu, of(logits, (top_k, normalize), shards)).unwrap();
                let dweight = &cpu.upload(&normals(24, tokens * top_k)).unwrap();
                let op = backward(routing, (top_k, normalize, shards), dweight, (aux_scale, z_scale));
                bits(&route_backward(cpu, op).unwrap())
            });
        }
    }
}

#[test]
fn a_routing_of_other_arguments_is_refused() {
    let cpu = Cpu::new(1).unwrap();
    let logits = &logits_of(&cpu, 4, 8);
    let routing = route(&cpu, of(logits, (2, true), 2)).unwrap();
    let refused = |routing: &Routing<Cpu>, top_k, shards| {
        let dweight = &cpu.zeros(4 * top_k).unwrap();
        let op = backward(routing, (top_k, true, shards), dweight, (0.0, 0.0));
        op.run(&cpu).unwrap_err().to_string()
    };
    assert_eq!(refused(&routing, 3, 2), "route_backward: `routing.expert.len()` is 8, expected 12");
    assert_eq!(refused(&routing, 2, 4), "route_backward: `routing.load.len()` is 16, expected 32");
    let (dweight, sums) = (&cpu.zeros(8).unwrap(), cpu.zeros(7).unwrap());
    let op = RouteBackward {
        batch_load: Some(&sums),
        batch_rows: 4,
        ..backward(&routing, (2, true, 2), dweight, (0.0, 0.0))
    };
    let e = op.run(&cpu).unwrap_err().to_string();
    assert_eq!(e, "route_backward: `batch_load.len()` is 7, expected 8");
    assert!(refused(&routing, 2, 3).contains("`shards` is 3"));
    let expert = cpu.upload(&[0, 1, 2, 3, 4, 5, 6, 8]).unwrap();
    let e = refused(&Routing { expert, ..routing }, 2, 2);
    assert_eq!(e, "route_backward: `routing.expert` is 8 at 7, expected at least 0 and below 8");
    let half = &Tensor::zeros(&cpu, DType::Bf16, 4, 8).unwrap();
    let e = of(half, (2, true), 1).run(&cpu).unwrap_err().to_string();
    assert!(e.contains("`type of logits` is Bf16"), "{e}");
    let e = of(logits, (2, true), 0).run(&cpu).unwrap_err().to_string();
    assert!(e.contains("`shards` is 0"), "{e}");
}
