use super::*;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere, tensor};

/// x/2 · (1 + erf(x/√2)) in F64, with erf as Σ over n of 2/√π · (−1)ⁿ x^(2n+1) / (n! (2n+1)).
fn gelu_f64(x: f64) -> f64 {
    let z = x / std::f64::consts::SQRT_2;
    let (mut term, mut sum) = (z, z);
    for n in 1..200 {
        term *= -z * z / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    x / 2.0 * (1.0 + sum * 2.0 / std::f64::consts::PI.sqrt())
}

/// Numbers that BF16 represents exactly, up to 4, where the series of [`gelu_f64`] still has 9 digits.
fn short(site: u32, len: usize) -> Vec<f32> {
    normals(site, len).into_iter().map(|x| bf16::from_f32(x.clamp(-4.0, 4.0)).to_f32()).collect()
}

#[test]
fn values_and_gradients_are_those_of_the_formula_in_f64() {
    for len in [0, 1, 15, 17, 5000] {
        let (h, da) = (short(1, len), short(2, len));
        for (dtype, bound) in [(DType::F32, 3e-7), (DType::Bf16, 1.0 / 256.0)] {
            let (a, dh) = same_everywhere(|cpu| {
                let [h, da] = [&h, &da].map(|x| tensor(cpu, x, x.len(), dtype));
                let dh = GeluBackward { h: &h, da: &da }.run(cpu).unwrap();
                (bits(&Gelu { h: &h }.run(cpu).unwrap()), bits(&dh))
            });
            let shift = if dtype == DType::F32 { 0 } else { 16 };
            let number = |bits: u32| f64::from(f32::from_bits(bits << shift));
            for i in 0..len {
                let [x, d] = [h[i], da[i]].map(f64::from);
                let slope = (gelu_f64(x + 1e-4) - gelu_f64(x - 1e-4)) / 2e-4;
                for (got, want, size) in [(a[i], gelu_f64(x), x), (dh[i], d * slope, 1.2 * d)] {
                    let off = (number(got) - want).abs();
                    assert!(off <= bound * size.abs() + 1e-30, "{dtype} {x}: {} for {want}", number(got));
                }
            }
        }
    }
}

#[test]
fn a_gradient_of_another_shape_or_type_is_an_error() {
    let cpu = Cpu::new(1).unwrap();
    let h = tensor(&cpu, &[1.0, 2.0], 2, DType::F32);
    for da in [tensor(&cpu, &[1.0], 1, DType::F32), tensor(&cpu, &[1.0, 2.0], 2, DType::Bf16)] {
        let e = GeluBackward { h: &h, da: &da }.run(&cpu).unwrap_err().to_string();
        assert!(e.contains("da"), "{e}");
    }
}
