use super::*;
use crate::ops::plain::column_sums::tests::tree;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere, tensor};

/// Numbers of rows, columns and shards, with sizes around the lanes and the blocks of columns.
const SHAPES: [(usize, usize, usize); 9] = [
    (0, 5, 1),
    (1, 2, 1),
    (4, 16, 4),
    (6, 15, 2),
    (8, 17, 4),
    (12, 64, 1),
    (4, 200, 2),
    (1024, 32, 4),
    (40, 1000, 4),
];

const EPS: f32 = 1e-5;

/// Numbers with a mean of about 0.5 that BF16 represents exactly, so that both types share one reference.
fn short(site: u32, len: usize) -> Vec<f32> {
    normals(site, len).into_iter().map(|x| bf16::from_f32(x + 0.5).to_f32()).collect()
}

/// Mean and 1 / standard deviation of a row in F64.
fn statistics(x: &[f64]) -> (f64, f64) {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    (mean, 1.0 / (variance + f64::from(EPS)).sqrt())
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn number(bits: u32, dtype: DType) -> f64 {
    f64::from(f32::from_bits(bits << if dtype == DType::F32 { 0 } else { 16 }))
}

#[test]
fn values_are_those_of_the_formula_and_the_same_everywhere() {
    for (rows, d, _) in SHAPES {
        let (x, weight, bias) = (short(1, rows * d), short(2, d), short(3, d));
        for (dtype, bound) in [(DType::F32, 2e-6), (DType::Bf16, 1.0 / 128.0)] {
            let got = same_everywhere(|cpu| {
                let [weight, bias] = [&weight, &bias].map(|x| tensor(cpu, x, d, DType::F32));
                let x = tensor(cpu, &x, d, dtype);
                let op = LayerNorm { x: &x, plus: None, weight: &weight, bias: &bias, eps: EPS };
                let out = op.run(cpu).unwrap();
                let of_rows = [&out.mean, &out.inv_std].map(|x| x.as_slice().to_vec());
                (bits(&out.y), of_rows)
            });
            let (x, weight, bias) = (wide(&x), wide(&weight), wide(&bias));
            for (row, x) in x.chunks_exact(d).enumerate() {
                let (mean, inv) = statistics(x);
                assert!((f64::from(got.1[0][row]) - mean).abs() < 1e-6);
                assert!((f64::from(got.1[1][row]) / inv - 1.0).abs() < 2e-6);
                for (i, x) in x.iter().enumerate() {
                    let normal = (x - mean) * inv * weight[i];
                    let (got, size) = (number(got.0[row * d + i], dtype), normal.abs() + bias[i].abs() + 1.0);
                    assert!((got - normal - bias[i]).abs() <= bound * size, "{rows} x {d} {dtype}: {got}");
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_the_formula_and_the_same_everywhere() {
    for (rows, d, shards) in SHAPES {
        let (x, weight, dy) = (short(1, rows * d), short(2, d), short(4, rows * d));
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::Bf16, 1.0 / 64.0)] {
            let (dx, dweight, terms) = same_everywhere(|cpu| {
                let [x, dy] = [&x, &dy].map(|x| tensor(cpu, x, d, dtype));
                let weight = tensor(cpu, &weight, d, DType::F32);
                let op = LayerNorm { x: &x, plus: None, weight: &weight, bias: &weight, eps: EPS };
                let LayerNormOut { mean, inv_std, .. } = op.run(cpu).unwrap();
                let mut dweight = tensor(cpu, &vec![0.5; shards * d], d, DType::F32);
                let (into, mean, inv_std) = (&mut dweight, &mean, &inv_std);
                let of = (&weight, &x, &dy);
                let op = LayerNormBackward {
                    x: of.1,
                    weight: of.0,
                    mean,
                    inv_std,
                    dy: of.2,
                    plus: None,
                    dweight: into,
                };
                let dx = op.run(cpu).unwrap();
                (bits(&dx), bits(&dweight), [mean, inv_std].map(|x| x.as_slice().to_vec()))
            });
            for (row, (x, dy)) in x.chunks_exact(d).zip(dy.chunks_exact(d)).enumerate() {
                let (x, (mean, inv)) = (wide(x), statistics(&wide(x)));
                let g: Vec<f64> =
                    dy.iter().zip(&weight).map(|(g, w)| f64::from(*g) * f64::from(*w)).collect();
                let mean_g = g.iter().sum::<f64>() / d as f64;
                let mean_gx = g.iter().zip(&x).map(|(g, x)| g * (x - mean) * inv).sum::<f64>() / d as f64;
                for i in 0..d {
                    let want = inv * (g[i] - mean_g - (x[i] - mean) * inv * mean_gx);
                    let (got, size) = (number(dx[row * d + i], dtype), inv * (g[i].abs() + 2.0));
                    assert!((got - want).abs() <= bound * size, "{rows} x {d} {dtype}: {got} for {want}");
                }
            }
            let each = rows / shards;
            for (i, got) in dweight.iter().enumerate() {
                let (shard, column) = (i / d, i % d);
                let term = |sum: f32, row: usize| {
                    let normal = (x[row * d + column] - terms[0][row]) * terms[1][row];
                    dy[row * d + column].mul_add(normal, sum)
                };
                let rows: Vec<usize> = (shard * each..(shard + 1) * each).collect();
                let chunks = rows.chunks(64).map(|rows| rows.iter().fold(0.0, |sum, &row| term(sum, row)));
                assert_eq!(*got, (0.5 + tree(chunks.collect())).to_bits(), "{d} {dtype}: column {column}");
            }
        }
    }
}

#[test]
fn a_tensor_that_is_added_has_the_bits_of_a_separate_addition() {
    use nibble_core::ops::Add;
    let (rows, d) = (30, 48);
    for dtype in [DType::F32, DType::Bf16] {
        same_everywhere(|cpu| {
            let [x, plus] = [5, 6].map(|site| tensor(cpu, &short(site, rows * d), d, dtype));
            let weight = tensor(cpu, &short(7, d), d, DType::F32);
            let sum = Add { a: &x, b: &plus, plus: None }.run(cpu).unwrap();
            let of =
                |x, plus| LayerNorm { x, plus, weight: &weight, bias: &weight, eps: EPS }.run(cpu).unwrap();
            let (both, apart) = (of(&x, Some(&plus)), of(&sum, None));
            assert_eq!(bits(&both.y), bits(&apart.y));
            assert_eq!(bits(both.sum.as_ref().unwrap()), bits(&sum));
            bits(&both.y)
        });
    }
}
