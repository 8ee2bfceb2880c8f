use super::*;
use crate::ops::plain::column_sums::tests::tree;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere};
use nibble_core::Tensor;

/// Numbers of rows, columns and shards, with sizes around the vectors, the blocks of columns and the chunks of rows.
const SHAPES: [(usize, usize, usize); 7] =
    [(0, 5, 1), (1, 1, 1), (4, 17, 4), (130, 64, 2), (65, 81, 1), (900, 40, 2), (2000, 200, 4)];

fn tensor(cpu: &Cpu, x: &[f32], (rows, cols): (usize, usize), dtype: DType) -> Tensor<Cpu> {
    match dtype {
        DType::F32 => Tensor::from_f32(cpu, x, rows, cols).unwrap(),
        DType::Bf16 => {
            let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            Tensor::from_bf16(cpu, &x, rows, cols).unwrap()
        }
    }
}

/// Compares the result with the definition, element by element.
#[test]
fn each_row_has_the_bias_added_and_rounded_once() {
    for (rows, d, _) in SHAPES {
        let (x, bias) = (normals(1, rows * d), normals(2, d));
        for dtype in [DType::F32, DType::Bf16] {
            let round = |x: f32| if dtype == DType::F32 { x } else { bf16::from_f32(x).to_f32() };
            let got = same_everywhere(|cpu| {
                let (mut x, bias) =
                    (tensor(cpu, &x, (rows, d), dtype), tensor(cpu, &bias, (1, d), DType::F32));
                AddBias { x: &mut x, bias: &bias }.run(cpu).unwrap();
                x.to_f32_vec(cpu).unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            for (i, (got, x)) in got.iter().zip(&x).enumerate() {
                let want = round(round(*x) + bias[i % d]);
                assert_eq!(*got, want.to_bits(), "{rows} x {d} {dtype}, number {i}");
            }
        }
    }
}

/// The definition of the gradient of one column.
fn column_sum(dy: &[f32], d: usize, column: usize) -> f32 {
    let column: Vec<f32> = dy.iter().skip(column).step_by(d).copied().collect();
    tree(column.chunks(64).map(|chunk| chunk.iter().fold(0.0, |a, b| a + b)).collect())
}

#[test]
fn gradients_are_summed_in_chunks_of_64_rows_of_each_shard() {
    for (rows, d, shards) in SHAPES {
        let dy: Vec<f32> = normals(3, rows * d).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        for dtype in [DType::F32, DType::Bf16] {
            let got = same_everywhere(|cpu| {
                let dy = tensor(cpu, &dy, (rows, d), dtype);
                let mut dbias = tensor(cpu, &vec![0.5; shards * d], (shards, d), DType::F32);
                AddBiasBackward { dy: &dy, dbias: &mut dbias }.run(cpu).unwrap();
                bits(&dbias)
            });
            let each = rows / shards * d;
            for (i, got) in got.iter().enumerate() {
                let dy = &dy[i / d * each..][..each];
                let want = if dy.is_empty() { 0.0 } else { column_sum(dy, d, i % d) };
                assert_eq!(*got, (0.5 + want).to_bits(), "{rows} x {d} {dtype}, {shards} shards, sum {i}");
            }
        }
    }
}
