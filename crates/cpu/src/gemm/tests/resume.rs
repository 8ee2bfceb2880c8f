//! Tests of a contraction in several parts, in which each part resumes the sums of the previous part.

use super::*;

/// The GEMM over `0..cuts[0]`, `cuts[0]..cuts[1]`, … of the contraction, part by part into the same output.
fn in_parts(isa: Isa, cuts: &[usize], (m, n): (usize, usize), a: &OperandView, b: &OperandView) -> Vec<f32> {
    let (offset, stride) = (3, n + 5);
    let mut out = vec![-7.0; offset + m * stride];
    let engine = Engine::with_isa(isa).unwrap();
    let mut start = 0;
    for &end in cuts {
        let to = Output::f32(&mut out, stride).at(offset);
        let to = if start == 0 { to } else { to.resume() };
        engine.ragged(&[Group { start, len: end - start }], m, n, a, b, to).unwrap();
        start = end;
    }
    let margins = out.iter().enumerate().filter(|(i, _)| *i < offset || (i - offset) % stride >= n);
    assert!(margins.into_iter().all(|(_, &x)| x == -7.0), "a margin was written");
    out[offset..].chunks(stride).flat_map(|row| row[..n].to_vec()).collect()
}

/// Cuts with even parts and an odd last part, parts longer than a packed chunk, and an empty part.
const CUTS: [&[usize]; 6] = [&[7], &[2, 4, 9], &[64, 128, 200], &[128, 128, 131], &[2, 2500], &[2100, 2103]];

#[test]
fn a_resumed_contraction_is_the_whole_one() {
    let mut r = Random(77);
    // The shapes have whole tiles, and remainders in both dimensions.
    for (m, n) in [(24, 64), (1, 1), (30, 50), (13, 33)] {
        for fill in FILLS {
            for cuts in CUTS.into_iter().filter(|cuts| cuts.len() < 3 || m * n < 1000 || fill == Fill::Tiny) {
                let k = *cuts.last().unwrap();
                let a = Matrix::new(m, k, true, bf16::NAN, || bf16_value(fill, &mut r));
                let b = Matrix::new(n, k, true, bf16::NAN, || bf16_value(fill, &mut r));
                let want = product(&a.rows, &b.rows, spec::dot_bf16);
                for isa in isas() {
                    let got = in_parts(isa, cuts, (m, n), &a.view(Data::Bf16), &b.view(Data::Bf16));
                    assert_same(&got, &want, (isa, m, n, fill, cuts));
                }
                let a = Matrix::new(m, k, true, f32::NAN, || f32_value(fill, &mut r));
                let b = Matrix::new(n, k, true, f32::NAN, || f32_value(fill, &mut r));
                let want = product(&a.rows, &b.rows, spec::dot_f32);
                for isa in isas() {
                    let got = in_parts(isa, cuts, (m, n), &a.view(Data::F32), &b.view(Data::F32));
                    assert_same(&got, &want, (isa, m, n, fill, cuts));
                }
            }
        }
    }
}

/// The first part leaves 2⁻¹¹¹ · (1 + 2⁻⁶ + 2⁻²⁰) (the second element of a pair is added first). The second part subtracts 2⁻¹¹¹ · (1 +
/// 2⁻⁶). The second part's operands alone could not give a tiny sum, but the remainder is 2⁻¹³¹, which is flushed.
#[test]
fn a_small_sum_of_an_earlier_part_is_flushed_as_in_the_whole() {
    let value = |x: f32, log2: f32| bf16::from_f32(x * log2.exp2());
    let x = 1.0 + 1.0 / 64.0;
    let a = vec![vec![value(1.0, -65.0), value(x, -55.0), value(-x, -55.0), bf16::ZERO]; 30];
    let b = vec![vec![value(1.0, -66.0), value(1.0, -56.0), value(1.0, -56.0), bf16::ZERO]; 50];
    let want = product(&a, &b, spec::dot_bf16);
    assert!(want.iter().all(|&x| x == 0.0));
    let first = product(&[a[0][..2].to_vec()], &[b[0][..2].to_vec()], spec::dot_bf16);
    assert_eq!(first[0], (1.0 + 1.0 / 64.0 + (-20f32).exp2()) * (-111f32).exp2());
    let (mut in_a, mut in_b) = (a.concat().into_iter(), b.concat().into_iter());
    let a = Matrix::new(30, 4, true, bf16::NAN, || in_a.next().unwrap());
    let b = Matrix::new(50, 4, true, bf16::NAN, || in_b.next().unwrap());
    for isa in isas() {
        assert_same(&in_parts(isa, &[2, 4], (30, 50), &a.view(Data::Bf16), &b.view(Data::Bf16)), &want, isa);
    }
}

#[test]
fn only_sums_in_f32_can_be_resumed() {
    let h = vec![bf16::ONE; 64];
    let x = OperandView::rows(Data::Bf16(&h), 8);
    let shape = ProductDims { m: 8, n: 8, k: 8 };
    let (mut sums, mut narrow) = (vec![0.0; 64], h.clone());
    let engine = Engine::default();
    let error = engine.gemm(shape, &x, &x, Output::bf16(&mut narrow, 8).resume()).unwrap_err();
    assert_eq!(error.argument, "out");
    let error = engine.gemm(shape, &x, &x, Output::f32(&mut sums, 8).accumulate().resume()).unwrap_err();
    assert_eq!(error.argument, "out");
}
