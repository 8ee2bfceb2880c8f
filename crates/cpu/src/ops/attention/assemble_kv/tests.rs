use super::*;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere};
use nibble_core::Tensor;
use nibble_core::ops::{Positions, Rope};
use nibble_testkit::Documents;

/// Shapes as (sequences, seq_len, first_position, heads, key_dim, value_dim, turned), where `turned` is the width of the rotated key.
const SHAPES: [(usize, usize, usize, usize, usize, usize, usize); 6] = [
    (1, 1, 0, 1, 1, 1, 2),
    (2, 3, 4, 3, 16, 12, 8),
    (3, 5, 0, 11, 6, 10, 4),
    (2, 40, 1, 16, 32, 16, 16),
    (0, 4, 0, 2, 16, 8, 8),
    (2, 17, 0, 8, 128, 128, 64),
];

fn table(cpu: &Cpu, positions: usize, turned: usize) -> Tensor<Cpu> {
    let half = turned / 2;
    let angle = |p: usize, i: usize| p as f64 * 10_000f64.powf(-(i as f64) / half as f64);
    let row = |p| (0..half).map(move |i| angle(p, i).cos()).chain((0..half).map(move |i| angle(p, i).sin()));
    let values: Vec<f32> = (0..positions).flat_map(row).map(|x| x as f32).collect();
    Tensor::from_f32(cpu, &values, positions, turned).unwrap()
}

fn tensor(cpu: &Cpu, dtype: DType, seed: u32, rows: usize, cols: usize) -> Tensor<Cpu> {
    let values = normals(seed, rows * cols);
    match dtype {
        DType::F32 => Tensor::from_f32(cpu, &values, rows, cols).unwrap(),
        DType::Bf16 => {
            let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
            Tensor::from_bf16(cpu, &values, rows, cols).unwrap()
        }
    }
}

/// Compares the result with the definition, row by row and head by head; the rope operation rotates the shared key.
#[test]
fn heads_are_their_own_elements_and_the_turned_shared_key() {
    for (sequences, seq_len, first_position, heads, key_dim, value_dim, turned) in SHAPES {
        for dtype in [DType::F32, DType::Bf16] {
            let rows = sequences * seq_len;
            let documents = (heads % 2 == 1).then_some(Documents::Random);
            let positions = |cpu: &Cpu| {
                Documents::positions(documents, cpu, (sequences, seq_len), first_position).unwrap()
            };
            let [k, v] = same_everywhere(|cpu| {
                let up = tensor(cpu, dtype, 1, rows, heads * (key_dim + value_dim));
                let shared = tensor(cpu, dtype, 2, rows, turned);
                let table = table(cpu, first_position + seq_len, turned);
                let (up, shared, table, positions) = (&up, &shared, &table, &positions(cpu));
                let op = AssembleKv { up, shared, table, key_dim, value_dim, positions };
                op.check().unwrap();
                let out = assemble_kv(cpu, op).unwrap();
                [bits(&out.k), bits(&out.v)]
            });
            let cpu = Cpu::scalar(1).unwrap();
            let up = bits(&tensor(&cpu, dtype, 1, rows, heads * (key_dim + value_dim)));
            let shared = tensor(&cpu, dtype, 2, rows, turned);
            let table = table(&cpu, first_position + seq_len, turned);
            let (x, table, positions) = (&shared, &table, &positions(&cpu));
            let op = Rope { x, table, head_dim: turned, positions, inverse: false };
            let shared = bits(&op.run(&cpu).unwrap());
            let (mut want_k, mut want_v) = (Vec::new(), Vec::new());
            for row in 0..rows {
                for head in 0..heads {
                    let own = &up[(row * heads + head) * (key_dim + value_dim)..][..key_dim + value_dim];
                    want_k.extend_from_slice(&own[..key_dim]);
                    want_k.extend_from_slice(&shared[row * turned..][..turned]);
                    want_v.extend_from_slice(&own[key_dim..]);
                }
            }
            assert!(
                k == want_k && v == want_v,
                "{heads} heads of {key_dim} + {turned}, {value_dim}, {dtype}"
            );
        }
    }
}

/// Gradients of a head's own elements must be exact copies; the shared key's gradient is compared with an F64 sum over heads.
#[test]
fn gradients_of_heads_are_copied_and_those_of_the_shared_key_summed_and_turned_back() {
    for (sequences, seq_len, _, heads, key_dim, value_dim, turned) in SHAPES {
        for dtype in [DType::F32, DType::Bf16] {
            let (rows, width) = (sequences * seq_len, key_dim + turned);
            let documents = Documents::Random;
            let starts = documents.starts(sequences, seq_len);
            let cpu = Cpu::scalar(1).unwrap();
            let dk = tensor(&cpu, dtype, 1, rows, heads * width);
            let dv = tensor(&cpu, dtype, 2, rows, heads * value_dim);
            let out = same_everywhere(|cpu| {
                let table = table(cpu, seq_len, turned);
                let dk = tensor(cpu, dtype, 1, rows, heads * width);
                let dv = tensor(cpu, dtype, 2, rows, heads * value_dim);
                let positions = Documents::positions(Some(documents), cpu, (sequences, seq_len), 0).unwrap();
                let (dk, dv, table, positions) = (&dk, &dv, &table, &positions);
                let op = AssembleKvBackward { dk, dv, table, key_dim, value_dim, positions };
                op.check().unwrap();
                let out = assemble_kv_backward(cpu, op).unwrap();
                let values = |x: &Tensor<Cpu>| -> Vec<u32> {
                    x.to_f32_vec(cpu).unwrap().into_iter().map(f32::to_bits).collect()
                };
                [values(&out.dup), values(&out.dshared)]
            });
            let [dup, dshared] = out.map(|bits| bits.into_iter().map(f32::from_bits).collect::<Vec<_>>());
            let (dk, dv) = (dk.to_f32_vec(&cpu).unwrap(), dv.to_f32_vec(&cpu).unwrap());
            let half = turned / 2;
            for row in 0..rows {
                let sum = |i: usize| -> f64 {
                    (0..heads).map(|head| f64::from(dk[(row * heads + head) * width + key_dim + i])).sum()
                };
                for i in 0..half {
                    let position = row % seq_len - starts[row] as usize;
                    let angle = position as f64 * 10_000f64.powf(-(i as f64) / half as f64);
                    let (sin, cos) = angle.sin_cos();
                    let want = [sum(i) * cos + sum(i + half) * sin, sum(i + half) * cos - sum(i) * sin];
                    let got = [i, i + half].map(|i| f64::from(dshared[row * turned + i]));
                    let allowed = if dtype == DType::F32 { 1e-6 } else { 1.0 / 256.0 };
                    for (got, want) in got.into_iter().zip(want) {
                        assert!(
                            (got - want).abs() <= allowed * (1.0 + want.abs() + heads as f64 * 0.1),
                            "{got}, {want}"
                        );
                    }
                }
                for head in 0..heads {
                    let at = row * heads + head;
                    let (own, values) = dup[at * (key_dim + value_dim)..].split_at(key_dim);
                    assert_eq!(own, &dk[at * width..][..key_dim]);
                    assert_eq!(&values[..value_dim], &dv[at * value_dim..][..value_dim]);
                }
            }
        }
    }
}

/// Checks the order of summation that the operation documents.
#[test]
fn eight_partial_sums_over_heads_become_one_by_halves() {
    let cpu = Cpu::scalar(1).unwrap();
    let heads = 21;
    let dk = tensor(&cpu, DType::F32, 1, 1, heads * 3);
    let dv = tensor(&cpu, DType::F32, 2, 1, heads);
    let table = table(&cpu, 1, 2);
    let (dk_of, dv, table, positions) = (&dk, &dv, &table, &Positions::of_sequences(1));
    let op = AssembleKvBackward { dk: dk_of, dv, table, key_dim: 1, value_dim: 1, positions };
    let got = op.run(&cpu).unwrap().dshared.to_f32_vec(&cpu).unwrap();
    let dk = dk.to_f32_vec(&cpu).unwrap();
    for (i, got) in got.into_iter().enumerate() {
        let p = |part: usize| (part..heads).step_by(8).fold(0f32, |sum, head| sum + dk[head * 3 + 1 + i]);
        let want = ((p(0) + p(4)) + (p(2) + p(6))) + ((p(1) + p(5)) + (p(3) + p(7)));
        assert_eq!(got, want);
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_by_name() {
    let cpu = Cpu::scalar(1).unwrap();
    let zeros = |rows, cols| Tensor::zeros(&cpu, DType::F32, rows, cols).unwrap();
    let (up, shared, table) = (zeros(6, 2 * 7), zeros(6, 4), zeros(3, 4));
    let [whole, long, none] = [3, 4, 0].map(Positions::of_sequences);
    let late = Positions { first: 1, ..whole.clone() };
    let op = || AssembleKv {
        up: &up,
        shared: &shared,
        table: &table,
        key_dim: 4,
        value_dim: 3,
        positions: &whole,
    };
    op().check().unwrap();
    let (narrow, wide, odd) = (zeros(6, 2), zeros(6, 15), zeros(3, 3));
    for (op, name) in [
        (AssembleKv { key_dim: 0, ..op() }, "key_dim"),
        (AssembleKv { value_dim: 0, ..op() }, "value_dim"),
        (AssembleKv { up: &wide, ..op() }, "columns of up"),
        (AssembleKv { shared: &narrow, ..op() }, "shape of shared"),
        (AssembleKv { table: &odd, ..op() }, "columns of table"),
        (AssembleKv { positions: &late, ..op() }, "positions"),
        (AssembleKv { positions: &long, ..op() }, "positions"),
        (AssembleKv { positions: &none, ..op() }, "positions"),
    ] {
        let error = op.check().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}
