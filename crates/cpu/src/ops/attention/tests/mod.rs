mod agreement;
mod windows;

use super::*;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere};
use nibble_core::Backend;
use nibble_core::ops::{Windows, attention_scale};
use nibble_testkit::Hiding;

/// An attention problem in host memory.
struct Case {
    sizes: Heads,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    hiding: Option<Hiding>,
    /// One sink score per query head.
    sinks: Option<Vec<f32>>,
}

impl Case {
    /// A problem with normally distributed values; q and k have standard deviation `spread`.
    fn new(
        sequences: usize,
        seq_len: usize,
        heads: usize,
        kv_heads: usize,
        (head_dim, value_dim): (usize, usize),
        spread: f32,
    ) -> Self {
        let scale = attention_scale(head_dim);
        let sizes = Heads { sequences, seq_len, heads, kv_heads, head_dim, value_dim, scale };
        let wide = |site, n: usize, by: f32| -> Vec<f32> {
            let x = normals(site, sizes.tokens() * n);
            // BF16 represents these values exactly, so that both types share one reference.
            x.iter().map(|x| bf16::from_f32(x * by).to_f32()).collect()
        };
        let (q, k) = (wide(1, heads * head_dim, spread), wide(2, kv_heads * head_dim, spread));
        Self {
            sizes,
            q,
            k,
            v: wide(3, kv_heads * value_dim, 1.0),
            dout: wide(4, heads * value_dim, 1.0),
            hiding: None,
            sinks: None,
        }
    }

    /// Cases with relevant head ratios and lengths: one token, lengths around tiles and blocks, head sizes around panels, and values of
    /// another head size.
    fn all() -> Vec<Self> {
        let sizes = [
            (1, 1, 1, 1, (16, 16)),
            (3, 1, 4, 1, (8, 8)),
            (2, 7, 2, 2, (16, 16)),
            (1, 8, 4, 1, (32, 32)),
            (2, 9, 4, 2, (5, 5)),
            (1, 17, 8, 2, (24, 24)),
            (3, 40, 4, 1, (16, 16)),
            (2, 65, 6, 3, (48, 48)),
            (1, 100, 2, 1, (128, 128)),
            (2, 35, 4, 2, (24, 16)),
            (1, 20, 2, 1, (7, 40)),
            (2, 18, 3, 1, (48, 20)),
        ];
        let mut cases: Vec<Self> =
            sizes.into_iter().map(|(s, l, h, g, dims)| Self::new(s, l, h, g, dims, 1.0)).collect();
        // These softmax scales differ from the default.
        cases[5].sizes.scale = 0.07;
        cases[9].sizes.scale = 0.3;
        let documents = Hiding::documents(&[5, 1, 17, 8, 30]);
        for (s, l, h, g, dims, hiding) in [
            (3, 40, 4, 2, (16, 16), documents),
            (1, 65, 2, 1, (24, 16), Hiding::window(1)),
            (2, 50, 2, 2, (8, 24), Hiding::window(9)),
            (1, 90, 4, 1, (16, 16), Hiding::window(100)),
            (2, 77, 2, 1, (32, 32), Hiding { window: Some(6), ..documents }),
        ] {
            cases.push(Self { hiding: Some(hiding), ..Self::new(s, l, h, g, dims, 1.0) });
        }
        // These sinks are about as large as the scores, far above them, or negligible.
        for (s, l, h, g, dims, hiding) in [
            (1, 1, 3, 1, (16, 16), None),
            (2, 19, 4, 2, (16, 16), None),
            (1, 41, 6, 3, (24, 40), None),
            (2, 50, 3, 3, (8, 24), Some(Hiding::window(9))),
            (3, 40, 4, 1, (32, 16), Some(documents)),
        ] {
            let extremes = [-1e30, 80.0, 0.0].into_iter().cycle().take(h).collect();
            for sinks in [normals(5, h), extremes] {
                cases.push(Self { hiding, sinks: Some(sinks), ..Self::new(s, l, h, g, dims, 1.0) });
            }
        }
        cases
    }

    fn tensor(&self, cpu: &Cpu, x: &[f32], dtype: DType) -> Tensor<Cpu> {
        let (rows, cols) = (self.sizes.tokens(), x.len() / self.sizes.tokens());
        match dtype {
            DType::F32 => Tensor::from_f32(cpu, x, rows, cols).unwrap(),
            DType::Bf16 => {
                let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
                Tensor::from_bf16(cpu, &x, rows, cols).unwrap()
            }
        }
    }

    /// The head sizes, the softmax scale, and the number of tokens per sequence.
    fn numbers(&self) -> ((usize, usize), f32, usize) {
        let Heads { head_dim, value_dim, scale, seq_len, .. } = self.sizes;
        ((head_dim, value_dim), scale, seq_len)
    }

    fn windows(&self, cpu: &Cpu) -> Option<Windows<Cpu>> {
        self.hiding.map(|hiding| hiding.upload(cpu, self.sizes.sequences, self.sizes.seq_len).unwrap())
    }

    fn sinks(&self, cpu: &Cpu) -> Option<Tensor<Cpu>> {
        self.sinks.as_ref().map(|sinks| Tensor::from_f32(cpu, sinks, 1, sinks.len()).unwrap())
    }

    fn forward(&self, cpu: &Cpu, dtype: DType) -> AttentionOut<Cpu> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| self.tensor(cpu, x, dtype));
        let (dims, scale, seq_len) = self.numbers();
        let (windows, sinks) = (self.windows(cpu), self.sinks(cpu));
        let (windows, sinks) = (windows.as_ref(), sinks.as_ref());
        let op = Attention { scale, windows, sinks, ..Attention::new([&q, &k, &v], dims, seq_len) };
        op.check().unwrap();
        attention(cpu, op).unwrap()
    }

    fn backward(&self, cpu: &Cpu, dtype: DType) -> AttentionGrads<Cpu> {
        let AttentionOut { out, lse } = self.forward(cpu, dtype);
        let [q, k, v, dout] = [&self.q, &self.k, &self.v, &self.dout].map(|x| self.tensor(cpu, x, dtype));
        let (dims, scale, seq_len) = self.numbers();
        let (windows, sinks, made) = (self.windows(cpu), self.sinks(cpu), (&out, &lse));
        let (windows, sinks) = (windows.as_ref(), sinks.as_ref());
        let op = AttentionBackward::new([&q, &k, &v], made, &dout, dims, seq_len);
        let op = AttentionBackward { scale, windows, sinks, ..op };
        op.check().unwrap();
        attention_backward(cpu, op).unwrap()
    }
}

/// Softmax attention in f64, directly from the formula: (out, lse). `sinks` is empty or has one value per head.
fn reference(case: &Case, q: &[f64], k: &[f64], v: &[f64], sinks: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let sizes = &case.sizes;
    let first_key = case.hiding.map(|hiding| hiding.lists(sizes.sequences, sizes.seq_len)[0].clone());
    let (d, c) = (sizes.head_dim, sizes.value_dim);
    let (mut out, mut lse) = (vec![0.0; q.len() / d * c], vec![0.0; q.len() / d]);
    for token in 0..sizes.tokens() {
        let hidden = first_key.as_ref().map_or(0, |first_key| first_key[token] as usize);
        let first = token - token % sizes.seq_len + hidden;
        for head in 0..sizes.heads {
            let at = token * sizes.heads + head;
            let kv = |other: usize| other * sizes.kv_heads + head / (sizes.heads / sizes.kv_heads);
            let dot = |other: usize| (0..d).map(|i| q[at * d + i] * k[kv(other) * d + i]).sum::<f64>();
            let scores: Vec<f64> = (first..=token).map(|other| dot(other) * f64::from(sizes.scale)).collect();
            let sink = sinks.get(head).copied().unwrap_or(f64::NEG_INFINITY);
            let max = scores.iter().copied().fold(sink, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + (sink - max).exp();
            lse[at] = max + sum.ln();
            for (j, s) in scores.iter().enumerate() {
                let p = (s - lse[at]).exp();
                (0..c).for_each(|i| out[at * c + i] += p * v[kv(first + j) * c + i]);
            }
        }
    }
    (out, lse)
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn rel_l2(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    (error / want.iter().map(|w| w * w).sum::<f64>().max(1e-30)).sqrt()
}

#[test]
fn forward_is_the_formula_and_the_same_everywhere() {
    for case in Case::all() {
        let sinks = wide(case.sinks.as_deref().unwrap_or_default());
        let (out, lse) = reference(&case, &wide(&case.q), &wide(&case.k), &wide(&case.v), &sinks);
        for (dtype, bound) in [(DType::F32, 1e-6), (DType::Bf16, 3e-3)] {
            let (got, got_lse) = same_everywhere(|cpu| {
                let got = case.forward(cpu, dtype);
                assert_eq!((got.out.dtype(), got.out.cols), (dtype, case.sizes.heads * case.sizes.value_dim));
                (bits(&got.out), got.lse.as_slice().iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            });
            let got: Vec<f32> = match dtype {
                DType::F32 => got.iter().map(|&x| f32::from_bits(x)).collect(),
                DType::Bf16 => got.iter().map(|&x| f32::from_bits(x << 16)).collect(),
            };
            let got_lse: Vec<f32> = got_lse.iter().map(|&x| f32::from_bits(x)).collect();
            assert!(rel_l2(&got, &out) < bound, "out {dtype} is off by {:e}", rel_l2(&got, &out));
            assert!(rel_l2(&got_lse, &lse) < 1e-6, "lse {dtype} is off by {:e}", rel_l2(&got_lse, &lse));
        }
    }
}

#[test]
fn backward_is_the_same_everywhere() {
    for case in Case::all() {
        for dtype in [DType::F32, DType::Bf16] {
            same_everywhere(|cpu| {
                let got = case.backward(cpu, dtype);
                assert_eq!([&got.dq, &got.dk, &got.dv].map(Tensor::dtype), [dtype; 3]);
                (
                    [&got.dq, &got.dk, &got.dv].map(bits),
                    got.dsinks.as_ref().map(|dsinks| (dsinks.shape(), bits(dsinks))),
                )
            });
        }
    }
}

/// A sink of −∞ has no effect; with a sink far above all scores, the output is zero.
#[test]
fn sinks_at_their_ends() {
    let cpu = Cpu::new(2).unwrap();
    let of = |sink: Option<f32>| {
        let sinks = sink.map(|sink| vec![sink; 4]);
        let case = Case { sinks, ..Case::new(2, 19, 4, 2, (16, 16), 1.0) };
        let (made, grads) = (case.forward(&cpu, DType::F32), case.backward(&cpu, DType::F32));
        let lse = made.lse.as_slice().to_vec();
        ([&made.out, &grads.dq, &grads.dk, &grads.dv].map(|x| x.to_f32_vec(&cpu).unwrap()), lse, grads.dsinks)
    };
    let (none, least, most) = (of(None), of(Some(f32::NEG_INFINITY)), of(Some(1e30)));
    assert!(none.2.is_none());
    assert_eq!((&none.0, &none.1), (&least.0, &least.1));
    let zeros = |x: &[f32]| x.iter().all(|x| *x == 0.0);
    assert!(most.0.iter().all(|x| zeros(x)) && most.1.iter().all(|lse| *lse == 1e30));
    for dsinks in [least.2, most.2] {
        assert!(zeros(&dsinks.unwrap().to_f32_vec(&cpu).unwrap()));
    }
}

#[test]
fn sinks_of_another_shape_or_type_are_named() {
    let cpu = Cpu::new(1).unwrap();
    let (x, lse) = (Tensor::zeros(&cpu, DType::F32, 1, 48).unwrap(), cpu.zeros::<f32>(3).unwrap());
    let of = |dtype, rows, cols| {
        let sinks = Tensor::zeros(&cpu, dtype, rows, cols).unwrap();
        let (sinks, dims) = (Some(&sinks), (16, 16));
        let backward = AttentionBackward::new([&x; 3], (&x, &lse), &x, dims, 1);
        [
            Attention { sinks, ..Attention::new([&x; 3], dims, 1) }.check(),
            AttentionDecode { sinks, ..AttentionDecode::new([&x; 3], dims, 1) }.check(),
            AttentionBackward { sinks, ..backward }.check(),
        ]
        .map(|checked| checked.map_err(|error| error.to_string()))
    };
    assert_eq!(of(DType::F32, 1, 3), [const { Ok(()) }; 3]);
    for (dtype, rows, cols, why) in [
        (DType::F32, 1, 2, "`shape of sinks` is (1, 2), expected (1, 3)"),
        (DType::F32, 3, 1, "`shape of sinks` is (3, 1), expected (1, 3)"),
        (DType::Bf16, 1, 3, "`type of sinks` is Bf16, expected F32"),
    ] {
        let of_ops = ["attention", "attention_decode", "attention_backward"];
        assert_eq!(of(dtype, rows, cols), of_ops.map(|op| Err(format!("{op}: {why}"))));
    }
}

/// Compares backward gradients with central differences of the f64 reference: each gradient projected on a random direction, and single
/// elements along their coordinates.
#[test]
fn backward_is_the_derivative_of_the_formula() {
    let cpu = Cpu::new(2).unwrap();
    for case in Case::all() {
        let grads = case.backward(&cpu, DType::F32);
        let sinks = case.sinks.clone().unwrap_or_default();
        let inputs = [&case.q, &case.k, &case.v, &sinks].map(|x| wide(x));
        let dout = wide(&case.dout);
        let loss = |x: &[Vec<f64>; 4]| -> f64 {
            let (out, _) = reference(&case, &x[0], &x[1], &x[2], &x[3]);
            out.iter().zip(&dout).map(|(o, d)| o * d).sum()
        };
        let mut all = [&grads.dq, &grads.dk, &grads.dv].map(|grad| grad.to_f32_vec(&cpu).unwrap()).to_vec();
        all.extend(grads.dsinks.map(|dsinks| {
            let rows = dsinks.to_f32_vec(&cpu).unwrap();
            let of_head = |head| rows.iter().skip(head).step_by(sinks.len()).sum::<f32>();
            (0..sinks.len()).map(of_head).collect()
        }));
        assert_eq!(all.len(), if sinks.is_empty() { 3 } else { 4 });
        for (which, grad) in all.into_iter().enumerate() {
            let norm = grad.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            for trial in 0..4 {
                let direction = wide(&normals(100 + trial, grad.len()));
                let moved = |by: f64| {
                    let mut x = inputs.clone();
                    x[which].iter_mut().zip(&direction).for_each(|(x, d)| *x += by * d);
                    loss(&x)
                };
                let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let got: f64 = grad.iter().zip(&direction).map(|(&g, d)| f64::from(g) * d).sum();
                let error = (got - want).abs();
                assert!(error < 2e-6 * norm + 1e-5, "input {which}: {got} for {want}, |grad| {norm}");
            }
            for i in (0..grad.len()).step_by(grad.len().div_ceil(5)) {
                let moved = |by: f64| {
                    let mut x = inputs.clone();
                    x[which][i] += by;
                    loss(&x)
                };
                let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!(
                    (f64::from(grad[i]) - want).abs() < 1e-5,
                    "input {which}[{i}]: {} for {want}",
                    grad[i]
                );
            }
        }
    }
}

#[test]
fn scores_of_ten_thousand_neither_overflow_nor_lose_the_sum() {
    // Scores are of the order of ±1e4: the softmax is one-hot nearly everywhere.
    let case = Case::new(2, 33, 4, 2, (16, 16), 50.0);
    let (out, lse) = reference(&case, &wide(&case.q), &wide(&case.k), &wide(&case.v), &[]);
    assert!(lse.iter().any(|x| *x > 5e3), "the case is too tame");
    let got = same_everywhere(|cpu| bits(&case.forward(cpu, DType::F32).out));
    let got: Vec<f32> = got.into_iter().map(f32::from_bits).collect();
    // A score of 1e4 has an error of 1e-3 in F32, and so has the weight.
    assert!(rel_l2(&got, &out) < 2e-3, "{:e}", rel_l2(&got, &out));
    let grads = same_everywhere(|cpu| {
        let got = case.backward(cpu, DType::F32);
        [bits(&got.dq), bits(&got.dk), bits(&got.dv)]
    });
    assert!(grads.iter().flatten().all(|&x| f32::from_bits(x).is_finite()));
}

/// A token changes no earlier output and gets no gradient from one; sequences do not see each other.
#[test]
fn nothing_looks_ahead() {
    let cpu = Cpu::new(2).unwrap();
    let case = Case::new(2, 30, 4, 2, (16, 16), 1.0);
    let before = case.forward(&cpu, DType::F32).out.to_f32_vec(&cpu).unwrap();
    for token in [5, 16, 29, 30 + 13] {
        let mut changed = Case::new(2, 30, 4, 2, (16, 16), 1.0);
        changed.k[token * 32..][..32].fill(3.0);
        changed.v[token * 32..][..32].fill(-2.0);
        let after = changed.forward(&cpu, DType::F32).out.to_f32_vec(&cpu).unwrap();
        for i in 0..60 {
            let sees = i >= token && i / 30 == token / 30;
            assert_eq!(before[i * 64..][..64] != after[i * 64..][..64], sees, "token {token}, query {i}");
        }
        // A gradient that arrives at one token alone reaches that token and earlier ones.
        let mut alone = Case::new(2, 30, 4, 2, (16, 16), 1.0);
        alone.dout.iter_mut().enumerate().filter(|(e, _)| e / 64 != token).for_each(|(_, d)| *d = 0.0);
        let dv = alone.backward(&cpu, DType::F32).dv.to_f32_vec(&cpu).unwrap();
        for i in 0..60 {
            let seen = i <= token && i / 30 == token / 30;
            assert_eq!(dv[i * 32..][..32].iter().any(|&x| x != 0.0), seen, "token {token}, key {i}");
        }
    }
}

#[test]
fn no_tokens_give_no_output() {
    for cpu in [Cpu::new(2).unwrap(), Cpu::scalar(1).unwrap()] {
        let none = |cols| Tensor::zeros(&cpu, DType::F32, 0, cols).unwrap();
        let (q, k) = (none(32), none(16));
        let got = attention(&cpu, Attention::new([&q, &k, &k], (16, 16), 8)).unwrap();
        assert_eq!((got.out.shape(), Cpu::len(&got.lse)), ((0, 32), 0));
    }
}

#[test]
fn a_type_that_differs_is_named() {
    let cpu = Cpu::new(1).unwrap();
    let x = Tensor::zeros(&cpu, DType::F32, 4, 16).unwrap();
    let half = Tensor::zeros(&cpu, DType::Bf16, 4, 16).unwrap();
    let lse = cpu.zeros::<f32>(4).unwrap();
    let op = AttentionBackward::new([&x; 3], (&x, &lse), &half, (16, 16), 4);
    let error = attention_backward(&cpu, op).unwrap_err().to_string();
    assert_eq!(error, "attention_backward: `dout` is bf16, expected f32");
}

#[test]
fn sizes_that_do_not_fit_are_named() {
    let cpu = Cpu::new(1).unwrap();
    let of = |cols| Tensor::zeros(&cpu, DType::F32, 4, cols).unwrap();
    // 4 query heads of 6, 2 key heads; values of 5.
    let (q, k, v, wrong) = (of(24), of(12), of(10), of(12));
    let forward = |v, value_dim| {
        Attention::new([&q, &k, v], (6, value_dim), 4).check().map_err(|error| error.to_string())
    };
    assert_eq!(forward(&v, 5), Ok(()));
    assert_eq!(forward(&wrong, 5).unwrap_err(), "attention: `shape of v` is (4, 12), expected (4, 10)");
    assert_eq!(forward(&v, 0).unwrap_err(), "attention: `value_dim` is 0, expected at least 1");
    let one = Tensor::zeros(&cpu, DType::F32, 1, 24).unwrap();
    let decode = |v, first| {
        let op = AttentionDecode { first, ..AttentionDecode::new([&one, &k, v], (6, 5), 3) };
        op.check().map_err(|error| error.to_string())
    };
    assert_eq!(decode(&v, 2), Ok(()));
    assert_eq!(decode(&wrong, 0).unwrap_err(), "attention_decode: `shape of v` is (4, 12), expected (4, 10)");
    assert_eq!(decode(&v, 3).unwrap_err(), "attention_decode: `first` is 3, expected below len = 3");
    let (lse, out) = (cpu.zeros::<f32>(16).unwrap(), of(20));
    let backward = |out, dout| AttentionBackward::new([&q, &k, &v], (out, &lse), dout, (6, 5), 4).check();
    backward(&out, &out).unwrap();
    let error = backward(&out, &q).unwrap_err().to_string();
    assert_eq!(error, "attention_backward: `shape of dout` is (4, 24), expected (4, 20)");
}

#[test]
fn a_scale_that_is_no_number_above_zero_is_named() {
    let cpu = Cpu::new(1).unwrap();
    let x = Tensor::zeros(&cpu, DType::F32, 1, 16).unwrap();
    let lse = cpu.zeros::<f32>(1).unwrap();
    let (qkv, dims) = ([&x; 3], (16, 16));
    let forward = |scale| Attention { scale, ..Attention::new(qkv, dims, 1) }.check();
    let decode = |scale| AttentionDecode { scale, ..AttentionDecode::new(qkv, dims, 1) }.check();
    let backward =
        |scale| AttentionBackward { scale, ..AttentionBackward::new(qkv, (&x, &lse), &x, dims, 1) }.check();
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.25] {
        for (name, checked) in [
            ("attention", forward(scale)),
            ("attention_decode", decode(scale)),
            ("attention_backward", backward(scale)),
        ] {
            let want = format!("{name}: `scale` is {scale}, expected a finite number above 0");
            assert_eq!(checked.unwrap_err().to_string(), want);
        }
    }
    for scale in [f32::MIN_POSITIVE, 1.0, 3.0] {
        forward(scale).and(decode(scale)).and(backward(scale)).unwrap();
    }
}
