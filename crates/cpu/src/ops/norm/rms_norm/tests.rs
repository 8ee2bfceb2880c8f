use super::*;
use crate::ops::plain::column_sums::tests::tree;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere, tensor};
use nibble_core::Backend;

/// Numbers of rows, columns and shards, with sizes around the lanes and the blocks of columns.
const SHAPES: [(usize, usize, usize); 9] = [
    (0, 5, 1),
    (1, 1, 1),
    (4, 16, 4),
    (6, 15, 2),
    (8, 17, 4),
    (12, 64, 1),
    (4, 200, 2),
    (1024, 32, 4),
    (40, 1000, 4),
];

const EPS: f32 = 1e-6;

/// Numbers that BF16 represents exactly, so that both types share one reference.
fn short(site: u32, len: usize) -> Vec<f32> {
    normals(site, len).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect()
}

/// Computes y in f64.
fn reference(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let d = weight.len();
    let row = |x: &[f64]| {
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / d as f64 + f64::from(EPS)).sqrt();
        x.iter().zip(weight).map(|(x, w)| x / rms * w).collect::<Vec<_>>()
    };
    x.chunks_exact(d).flat_map(row).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn forward_on(cpu: &Cpu, x: &[f32], weight: &[f32], dtype: DType) -> RmsNormOut<Cpu> {
    let x = tensor(cpu, x, weight.len(), dtype);
    let weight = tensor(cpu, weight, weight.len(), DType::F32);
    let op = RmsNorm::new(&x, &weight, EPS);
    op.check().unwrap();
    rms_norm(cpu, op).unwrap()
}

#[test]
fn forward_is_the_formula_and_the_same_everywhere() {
    for (rows, d, _) in SHAPES {
        let (x, weight) = (short(1, rows * d), short(2, d));
        for (dtype, bound) in [(DType::F32, 1e-6), (DType::Bf16, 1.0 / 256.0)] {
            let got = same_everywhere(|cpu| {
                let got = forward_on(cpu, &x, &weight, dtype);
                (bits(&got.y), got.inv_rms.as_slice().iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            });
            let shift = if dtype == DType::F32 { 0 } else { 16 };
            for (got, want) in got.0.iter().zip(reference(&wide(&x), &wide(&weight))) {
                let got = f64::from(f32::from_bits(got << shift));
                assert!(
                    (got - want).abs() <= bound * want.abs() + 1e-30,
                    "{rows}×{d} {dtype}: {got} for {want}"
                );
            }
            for (inv, x) in got.1.iter().zip(x.chunks_exact(d)) {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / d as f64;
                let want = 1.0 / (mean + f64::from(EPS)).sqrt();
                assert!((f64::from(f32::from_bits(*inv)) / want - 1.0).abs() < 5e-7);
            }
        }
    }
}

/// Computes dx and dweight for tensors of one type.
fn backward_on(
    cpu: &Cpu,
    [x, weight, dy]: [&[f32]; 3],
    shards: usize,
    dtype: DType,
) -> (Tensor<Cpu>, Tensor<Cpu>) {
    let d = weight.len();
    let inv_rms = forward_on(cpu, x, weight, dtype).inv_rms;
    let weight = tensor(cpu, weight, weight.len(), DType::F32);
    let [x, dy] = [x, dy].map(|x| tensor(cpu, x, d, dtype));
    let mut dweight = tensor(cpu, &vec![0.5; shards * d], d, DType::F32);
    let op = RmsNormBackward {
        x: &x,
        weight: &weight,
        inv_rms: &inv_rms,
        dy: &dy,
        plus: None,
        dweight: &mut dweight,
    };
    op.check().unwrap();
    (rms_norm_backward(cpu, op).unwrap(), dweight)
}

#[test]
fn backward_is_the_same_everywhere() {
    for (rows, d, shards) in SHAPES {
        let (x, weight, dy) = (short(1, rows * d), short(2, d), short(3, rows * d));
        for dtype in [DType::F32, DType::Bf16] {
            same_everywhere(|cpu| {
                let (dx, dweight) = backward_on(cpu, [&x, &weight, &dy], shards, dtype);
                (bits(&dx), bits(&dweight))
            });
        }
    }
}

#[test]
fn backward_is_the_derivative_of_the_formula() {
    let cpu = Cpu::new(2).unwrap();
    for (rows, d, shards) in SHAPES.into_iter().filter(|(rows, d, _)| *rows > 0 && *d > 1) {
        let (x, weight, dy) = (short(1, rows * d), short(2, d), short(3, rows * d));
        let (dx, dweight) = backward_on(&cpu, [&x, &weight, &dy], shards, DType::F32);
        let (dx, dweight) = (dx.to_f32_vec(&cpu).unwrap(), dweight.to_f32_vec(&cpu).unwrap());
        let loss = |x: &[f64], weight: &[f64], rows: std::ops::Range<usize>| -> f64 {
            let y = reference(&x[rows.start * d..rows.end * d], weight);
            y.iter().zip(&dy[rows.start * d..]).map(|(y, &dy)| y * f64::from(dy)).sum()
        };
        let (x, weight) = (wide(&x), wide(&weight));
        for i in (0..rows * d).step_by((rows * d).div_ceil(23)) {
            let moved = |by: f64| {
                let mut x = x.clone();
                x[i] += by;
                loss(&x, &weight, i / d..i / d + 1)
            };
            let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            assert!((f64::from(dx[i]) - want).abs() < 1e-5, "dx[{i}] of {rows}×{d}: {} for {want}", dx[i]);
        }
        for shard in 0..shards {
            let range = shard * rows / shards..(shard + 1) * rows / shards;
            for c in (0..d).step_by(d.div_ceil(7)) {
                let moved = |by: f64| {
                    let mut weight = weight.clone();
                    weight[c] += by;
                    loss(&x, &weight, range.clone())
                };
                let want = 0.5 + (moved(1e-4) - moved(-1e-4)) / 2e-4;
                let got = f64::from(dweight[shard * d + c]);
                assert!((got - want).abs() < 1e-4, "dweight[{shard}, {c}] of {rows}×{d}: {got} for {want}");
            }
        }
    }
}

/// The definition of dweight, one column at a time.
fn column_sum(x: &[f32], inv_rms: &[f32], dy: &[f32], d: usize, column: usize) -> f32 {
    let rows: Vec<usize> = (0..inv_rms.len()).collect();
    let chunk = |rows: &[usize]| {
        rows.iter()
            .fold(0.0f32, |sum, row| dy[row * d + column].mul_add(x[row * d + column] * inv_rms[*row], sum))
    };
    tree(rows.chunks(64).map(chunk).collect())
}

#[test]
fn dweight_is_summed_in_chunks_of_64_rows() {
    for (rows, d, shards) in [(64, 5, 1), (65, 16, 1), (2 * 450, 81, 2), (4 * 128, 33, 4), (7 * 64, 20, 1)] {
        let (x, weight, dy) = (short(1, rows * d), short(2, d), short(3, rows * d));
        let (inv_rms, dweight) = same_everywhere(|cpu| {
            let inv_rms = forward_on(cpu, &x, &weight, DType::F32).inv_rms.as_slice().to_vec();
            (inv_rms, bits(&backward_on(cpu, [&x, &weight, &dy], shards, DType::F32).1))
        });
        let each = rows / shards;
        for (shard, dweight) in dweight.chunks_exact(d).enumerate() {
            let (rows, elements) =
                (shard * each..(shard + 1) * each, shard * each * d..(shard + 1) * each * d);
            for (column, got) in dweight.iter().enumerate() {
                let sum = column_sum(
                    &x[elements.clone()],
                    &inv_rms[rows.clone()],
                    &dy[elements.clone()],
                    d,
                    column,
                );
                assert_eq!(*got, (0.5 + sum).to_bits(), "{each} rows of {d}, shard {shard}, column {column}");
            }
        }
    }
}

/// The sum of a row over all 256 lanes, by definition.
fn lanes_sum(terms: impl Iterator<Item = (f32, f32)>) -> f32 {
    let mut lanes = [0.0f32; 256];
    terms.enumerate().for_each(|(i, (a, b))| lanes[i % 256] = a.mul_add(b, lanes[i % 256]));
    for half in [128, 64, 32, 16, 8, 4, 2, 1] {
        (0..half).for_each(|l| lanes[l] += lanes[l + half]);
    }
    lanes[0]
}

#[test]
fn sums_of_a_row_run_over_256_lanes() {
    for (rows, d) in [(3, 16), (3, 64), (2, 100), (3, 128), (2, 300), (2, 1024)] {
        let (x, weight, dy) = (short(1, rows * d), short(2, d), short(3, rows * d));
        let (inv_rms, dx) = same_everywhere(|cpu| {
            let inv_rms = forward_on(cpu, &x, &weight, DType::F32).inv_rms.as_slice().to_vec();
            (inv_rms, bits(&backward_on(cpu, [&x, &weight, &dy], 1, DType::F32).0))
        });
        for (row, inv) in inv_rms.iter().enumerate() {
            let (x, dy) = (&x[row * d..][..d], &dy[row * d..][..d]);
            let mean = lanes_sum(x.iter().map(|x| (*x, *x))) / d as f32;
            assert_eq!(inv.to_bits(), rsqrt(mean + EPS).to_bits(), "row {row} of {d}");
            let terms = x.iter().zip(dy).zip(&weight).map(|((x, dy), w)| (dy * w, x * inv));
            let mean = lanes_sum(terms) / d as f32;
            for i in 0..d {
                let want = inv * (dy[i] * weight[i] - x[i] * inv * mean);
                assert_eq!(dx[row * d + i], want.to_bits(), "row {row} of {d}, element {i}");
            }
        }
    }
}

#[test]
fn mistakes_are_named() {
    let cpu = Cpu::new(1).unwrap();
    let (x, weight) = (tensor(&cpu, &[1.0; 8], 4, DType::F32), tensor(&cpu, &[1.0; 4], 4, DType::F32));
    let inv_rms = cpu.zeros::<f32>(2).unwrap();
    let mut none = Tensor::zeros(&cpu, DType::F32, 0, 4).unwrap();
    let op =
        RmsNormBackward { x: &x, weight: &weight, inv_rms: &inv_rms, dy: &x, plus: None, dweight: &mut none };
    let error = rms_norm_backward(&cpu, op).unwrap_err().to_string();
    assert_eq!(error, "rms_norm_backward: `rows of dweight` is 0, expected at least one shard");
    let mut half = Tensor::zeros(&cpu, DType::Bf16, 1, 4).unwrap();
    let op =
        RmsNormBackward { x: &x, weight: &weight, inv_rms: &inv_rms, dy: &x, plus: None, dweight: &mut half };
    let error = rms_norm_backward(&cpu, op).unwrap_err().to_string();
    assert_eq!(error, "rms_norm_backward: `type of dweight` is bf16, expected f32");
    let empty = Tensor::zeros(&cpu, DType::F32, 3, 0).unwrap();
    let no_weight = Tensor::zeros(&cpu, DType::F32, 1, 0).unwrap();
    let error = rms_norm(&cpu, RmsNorm::new(&empty, &no_weight, EPS)).unwrap_err().to_string();
    assert_eq!(error, "rms_norm: `columns of x` is 0, expected at least one");
}
