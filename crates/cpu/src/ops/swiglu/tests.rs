use crate::ops::convert::quantize::fixture::*;
use crate::ops::convert::quantize::quantize;
use crate::ops::{swiglu, swiglu_backward};
use crate::{Buf, Cpu};
use nibble_core::ops::{Emit, Planes, Quantize, Swiglu, SwigluBackward, SwigluGrads, SwigluOut};
use nibble_core::{Backend, DType, Data, Groups, Operand, Tensor};
use nibble_formats::{Codec, Format, Rounding, ScaleRule};

fn codec(format: Format, rule: ScaleRule) -> Codec {
    Codec::new(format, rule, Rounding::NearestEven).unwrap()
}

fn e4m3() -> Codec {
    codec(Format::E4m3, ScaleRule::Rceil)
}

fn mxfp4() -> Codec {
    codec(Format::Mxfp4, ScaleRule::Rceil)
}

/// All formats that a result may have.
fn emits() -> Vec<Emit> {
    let mut all = vec![Emit::Plain(DType::F32), Emit::Plain(DType::Bf16)];
    for codec in [e4m3(), codec(Format::E4m3, ScaleRule::Amax), mxfp4()] {
        all.extend([Planes::Rows, Planes::Cols, Planes::Both].map(|planes| Emit::block(codec, planes)));
    }
    all
}

fn weights(cpu: &Cpu, rows: usize) -> Buf<f32> {
    let mut words = Words(77);
    let values: Vec<f32> = (0..rows).map(|_| (words.next() >> 8) as f32 / 16_777_216.0).collect();
    cpu.upload(&values).unwrap()
}

/// The gate weights with NaN in the padding.
fn poisoned_weights(cpu: &Cpu, weights: &Buf<f32>, groups: &Groups<Cpu>) -> Buf<f32> {
    let valid = valid_rows(groups).into_iter();
    let values: Vec<f32> =
        weights.as_slice().iter().zip(valid).map(|(&w, valid)| if valid { w } else { f32::NAN }).collect();
    cpu.upload(&values).unwrap()
}

fn assert_same_out(got: &SwigluOut<Cpu>, expected: &SwigluOut<Cpu>, what: &str) {
    assert_same(&got.a, &expected.a, &format!("{what}, a"));
    let h = |out: &SwigluOut<Cpu>| out.h.clone().map(Operand::Block);
    assert_same_operand(&h(got), &h(expected), &format!("{what}, h"));
}

fn assert_same_grads(got: &SwigluGrads<Cpu>, expected: &SwigluGrads<Cpu>, what: &str) {
    assert_same(&got.dh, &expected.dh, &format!("{what}, dh"));
    assert_eq!(got.a.is_some(), expected.a.is_some(), "{what}, a");
    for (got, expected) in got.a.iter().zip(&expected.a) {
        assert_same(got, expected, &format!("{what}, a"));
    }
    let dweight = |x: &SwigluGrads<Cpu>| {
        let rows = x.dweight.as_slice().len();
        Some(Operand::Plain(Tensor::new(Data::F32(x.dweight.clone()), rows, 1).unwrap()))
    };
    assert_same_operand(&dweight(got), &dweight(expected), &format!("{what}, dweight"));
}

#[test]
fn ragged_forward_is_that_of_the_specification_whatever_the_padding_holds() {
    let (spec, backends) = (spec(), simd_backends());
    let groups = groups(&spec, &[0, 1, 128, 130, 0, 37], 128, 128);
    for f in [32, 80, 128, 160] {
        for (i, a) in emits().into_iter().enumerate() {
            let h = tensor(&spec, i % 2 == 0, groups.capacity, 2 * f, 5, false);
            let weight = weights(&spec, groups.capacity);
            let save_h = [None, Some(mxfp4()), Some(e4m3())][i % 3];
            let op = Swiglu { h: &h, weight: Some(&weight), groups: Some(&groups), a, save_h };
            let Ok(()) = op.check() else { continue };
            let expected = swiglu(&spec, op).unwrap();
            let (h, weight) = (poisoned(&h, &groups), poisoned_weights(&spec, &weight, &groups));
            for cpu in backends.iter().chain([&spec]) {
                let op = Swiglu { h: &h, weight: Some(&weight), groups: Some(&groups), a, save_h };
                assert_same_out(&swiglu(cpu, op).unwrap(), &expected, &format!("f {f} {a:?} on {cpu:?}"));
            }
        }
    }
}

#[test]
fn ragged_backward_is_that_of_the_specification_whatever_the_padding_holds() {
    let (spec, backends) = (spec(), simd_backends());
    let groups = groups(&spec, &[0, 1, 128, 130, 0, 37], 128, 0);
    for f in [16, 80, 128, 256] {
        for (i, dh) in emits().into_iter().enumerate() {
            // One case does not request `a`.
            let a = (i != 1).then(|| emits()[(i * 4 + f / 16) % emits().len()]);
            let plain = tensor(&spec, i % 2 == 0, groups.capacity, 2 * f, 5, false);
            let da = tensor(&spec, i % 3 == 0, groups.capacity, f, 6, false);
            let weight = weights(&spec, groups.capacity);
            let coded = quantize(&spec, Quantize::new(&plain, mxfp4(), Planes::Rows)).unwrap().rows.unwrap();
            for h in [&Operand::Plain(plain.clone()), &coded] {
                let ragged = Some(&groups);
                let op = SwigluBackward { h, da: &da, weight: Some(&weight), groups: ragged, dh, a };
                let Ok(()) = op.check() else { continue };
                let expected = swiglu_backward(&spec, op).unwrap();
                let h = &match h {
                    Operand::Plain(h) => Operand::Plain(poisoned(h, &groups)),
                    Operand::Block(h) => Operand::Block(poisoned_codes(h, &groups)),
                };
                let (da, weight) = (poisoned(&da, &groups), poisoned_weights(&spec, &weight, &groups));
                for cpu in backends.iter().chain([&spec]) {
                    let op = SwigluBackward { h, da: &da, weight: Some(&weight), groups: ragged, dh, a };
                    let what = format!("f {f} {dh:?} {a:?} on {cpu:?}");
                    assert_same_grads(&swiglu_backward(cpu, op).unwrap(), &expected, &what);
                }
            }
        }
    }
}

#[test]
fn dense_shapes_agree_too() {
    let (spec, backends) = (spec(), simd_backends());
    for (rows, f) in [(1, 1), (1, 7), (3, 33), (200, 65), (129, 128), (0, 4), (4, 0)] {
        let h = tensor(&spec, false, rows, 2 * f, 1, true);
        let da = tensor(&spec, false, rows, f, 2, true);
        for a in [Emit::Plain(DType::F32), Emit::block(e4m3(), Planes::Both)] {
            let forward = || Swiglu { h: &h, weight: None, groups: None, a, save_h: Some(e4m3()) };
            let h = Operand::Plain(h.clone());
            let backward =
                || SwigluBackward { h: &h, da: &da, weight: None, groups: None, dh: a, a: Some(a) };
            let (out, grads) =
                (swiglu(&spec, forward()).unwrap(), swiglu_backward(&spec, backward()).unwrap());
            for cpu in &backends {
                let what = format!("{rows}×{f} {a:?} on {cpu:?}");
                assert_same_out(&swiglu(cpu, forward()).unwrap(), &out, &what);
                let got = swiglu_backward(cpu, backward()).unwrap();
                assert_same_grads(&got, &grads, &what);
            }
        }
    }
}

/// Computes silu(g)·u·w and its derivatives by central differences, all in f64.
#[test]
fn values_and_gradients_are_those_of_the_formula_in_f64() {
    let a_of = |gate: f64, up: f64, weight: f64| gate / (1.0 + (-gate).exp()) * up * weight;
    let close = |got: f32, expected: f64, scale: f64| {
        assert!((f64::from(got) - expected).abs() <= 4e-6 * scale, "{got} for {expected}");
    };
    let (rows, f) = (9, 40);
    for cpu in simd_backends().into_iter().chain([spec()]) {
        let mut words = Words(3);
        let mut numbers = |n| (0..n).map(|_| (words.next() >> 8) as f32 / 2e6 - 4.0).collect::<Vec<f32>>();
        let (h, da, w) = (numbers(rows * 2 * f), numbers(rows * f), numbers(rows));
        let h_t = Tensor::from_f32(&cpu, &h, rows, 2 * f).unwrap();
        let da_t = Tensor::from_f32(&cpu, &da, rows, f).unwrap();
        let weight = cpu.upload(&w).unwrap();
        let plain = Emit::Plain(DType::F32);
        let forward = Swiglu { h: &h_t, weight: Some(&weight), groups: None, a: plain, save_h: None };
        let out = swiglu(&cpu, forward).unwrap();
        let h_op = Operand::Plain(h_t);
        let weight = Some(&weight);
        let backward =
            SwigluBackward { h: &h_op, da: &da_t, weight, groups: None, dh: plain, a: Some(plain) };
        let grads = swiglu_backward(&cpu, backward).unwrap();
        let values =
            |x: &Option<Operand<Cpu>>| x.as_ref().unwrap().plain("test").unwrap().to_f32_vec(&cpu).unwrap();
        assert_eq!(values(&out.a.rows), values(&grads.a.as_ref().unwrap().rows));
        let (a, dh) = (values(&out.a.rows), values(&grads.dh.rows));
        for row in 0..rows {
            let (mut dw, mut size) = (0.0, 0.0);
            for i in 0..f {
                let at = row * 2 * f + i;
                let [gate, up, d, weight] = [h[at], h[at + f], da[row * f + i], w[row]].map(f64::from);
                close(a[row * f + i], a_of(gate, up, weight), 16.0);
                let step = 1e-4;
                let dg = (a_of(gate + step, up, weight) - a_of(gate - step, up, weight)) / (2.0 * step);
                let du = (a_of(gate, up + step, weight) - a_of(gate, up - step, weight)) / (2.0 * step);
                close(dh[at], dg * d, 64.0);
                close(dh[at + f], du * d, 64.0);
                dw += a_of(gate, up, 1.0) * d;
                size += (a_of(gate, up, 1.0) * d).abs();
            }
            close(grads.dweight.as_slice()[row], dw, size);
        }
    }
}

#[test]
fn what_cannot_be_done_is_an_error_that_names_the_argument() {
    let cpu = Cpu::new(1).unwrap();
    let h = tensor(&cpu, true, 33, 64, 1, false);
    let stochastic = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic).unwrap();
    let a = Emit::block(stochastic, Planes::Rows);
    let op = Swiglu { h: &h, weight: None, groups: None, a, save_h: None };
    let e = swiglu(&cpu, op).unwrap_err().to_string();
    assert!(e.contains("`random`"), "{e}");
}

/// In a fused operation, as in [`Quantize`], each group must start where a scale record starts.
#[test]
fn fused_columns_of_groups_are_held_to_their_blocks() {
    let cpu = Cpu::new(1).unwrap();
    let groups = groups(&cpu, &[3, 5], 32, 0);
    let h = tensor(&cpu, true, groups.capacity, 256, 1, false);
    let column = Emit::block(codec(Format::E4m3Row, ScaleRule::Amax), Planes::Cols);
    let forward = Swiglu { h: &h, weight: None, groups: Some(&groups), a: column, save_h: None };
    let e = forward.run(&cpu).unwrap_err().to_string();
    assert!(e.contains("`groups.align`") && e.contains("block of 128"), "{e}");
    let (h, da) = (Operand::Plain(h), tensor(&cpu, true, groups.capacity, 128, 2, false));
    let plain = Emit::Plain(DType::Bf16);
    for (dh, a) in [(column, None), (plain, Some(column))] {
        let backward = SwigluBackward { h: &h, da: &da, weight: None, groups: Some(&groups), dh, a };
        let e = backward.run(&cpu).unwrap_err().to_string();
        assert!(e.contains("`groups.align`"), "{e}");
    }
}
