use super::*;
use crate::ops::plain::elementwise::tests::{bits, normals, same_everywhere};
use nibble_core::Backend;
use nibble_testkit::Documents;

/// Cosines, followed by sines, of position · 10000^(−2i/head_dim).
fn table(positions: usize, head_dim: usize) -> Vec<f32> {
    let angle = |p: usize, i: usize| p as f64 * 10_000f64.powf(-2.0 * i as f64 / head_dim as f64);
    let half = head_dim / 2;
    let row = |p| (0..half).map(move |i| angle(p, i).cos()).chain((0..half).map(move |i| angle(p, i).sin()));
    (0..positions).flat_map(row).map(|x| x as f32).collect()
}

/// Shapes as (sequences, seq_len, first_position, heads, head_dim).
const SHAPES: [(usize, usize, usize, usize, usize); 8] = [
    (1, 1, 0, 1, 2),
    (2, 3, 4, 1, 16),
    (3, 5, 0, 4, 32),
    (2, 7, 1, 3, 64),
    (1, 9, 0, 2, 128),
    (2, 4, 3, 5, 6),
    (0, 4, 0, 2, 16),
    (4, 200, 2, 4, 16),
];

fn turned(
    cpu: &Cpu,
    x: &Tensor<Cpu>,
    shape: (usize, usize, usize, usize, usize),
    inverse: bool,
) -> Tensor<Cpu> {
    let (_, seq_len, first_position, _, head_dim) = shape;
    let positions = seq_len + first_position + 1;
    let table = Tensor::from_f32(cpu, &table(positions, head_dim), positions, head_dim).unwrap();
    let positions = &Positions { first: first_position, ..Positions::of_sequences(seq_len) };
    let op = Rope { x, table: &table, head_dim, positions, inverse };
    op.check().unwrap();
    rope(cpu, op).unwrap()
}

#[test]
fn every_pair_turns_by_its_angle_and_back() {
    for shape in SHAPES {
        let (sequences, seq_len, first_position, heads, head_dim) = shape;
        let (rows, cols) = (sequences * seq_len, heads * head_dim);
        let x = normals(1, rows * cols);
        let [there, back] = same_everywhere(|cpu| {
            let x = Tensor::from_f32(cpu, &x, rows, cols).unwrap();
            let there = turned(cpu, &x, shape, false);
            assert_eq!(there.shape(), (rows, cols));
            let back = turned(cpu, &there, shape, true);
            [bits(&there), bits(&back)]
        });
        let half = head_dim / 2;
        for (e, &got) in there.iter().enumerate() {
            let (row, i) = (e / cols, e % head_dim);
            let position = (row % seq_len + first_position) as f64;
            let angle = position * 10_000f64.powf(-2.0 * (i % half) as f64 / head_dim as f64);
            let start = e - i + i % half;
            let (x0, x1) = (f64::from(x[start]), f64::from(x[start + half]));
            let (sin, cos) = angle.sin_cos();
            let want = if i < half { x0 * cos - x1 * sin } else { x1 * cos + x0 * sin };
            let got = f64::from(f32::from_bits(got));
            assert!((got - want).abs() < 1e-6, "{shape:?} element {e}: {got} for {want}");
        }
        for (&got, want) in back.iter().zip(&x) {
            assert!((f32::from_bits(got) - want).abs() < 2e-6);
        }
    }
}

#[test]
fn what_does_not_turn_is_copied_and_the_rest_turns_as_a_head_of_its_own() {
    for (kept, turns) in [(2, 2), (16, 8), (128, 64), (6, 10)] {
        let (rows, heads, seq_len) = (6, 3, 3);
        let head_dim = kept + turns;
        let x = normals(1, rows * heads * head_dim);
        let y = same_everywhere(|cpu| {
            let table = Tensor::from_f32(cpu, &table(seq_len, turns), seq_len, turns).unwrap();
            let x = Tensor::from_f32(cpu, &x, rows, heads * head_dim).unwrap();
            let positions = &Positions::of_sequences(seq_len);
            let op = Rope { x: &x, table: &table, head_dim, positions, inverse: false };
            bits(&op.run(cpu).unwrap())
        });
        let of = |which: fn(&[f32], usize) -> &[f32]| -> Vec<f32> {
            x.chunks(head_dim).flat_map(|head| which(head, kept).to_vec()).collect()
        };
        let (first, last) = (of(|head, kept| &head[..kept]), of(|head, kept| &head[kept..]));
        let cpu = Cpu::scalar(1).unwrap();
        let last = Tensor::from_f32(&cpu, &last, rows, heads * turns).unwrap();
        let last = bits(&turned(&cpu, &last, (2, seq_len, 0, heads, turns), false));
        let want = first.chunks(kept).zip(last.chunks(turns));
        let want: Vec<u32> = want
            .flat_map(|(first, last)| first.iter().map(|x| x.to_bits()).chain(last.iter().copied()))
            .collect();
        assert!(y == want, "{kept} and {turns}");
    }
}

/// Each row is rotated like the row at the same position in a sequence of a single document.
#[test]
fn positions_begin_anew_with_each_document() {
    let (sequences, seq_len, first, heads, head_dim) = (3, 17, 2, 2, 16);
    let (rows, cols, positions) = (sequences * seq_len, heads * head_dim, first + seq_len);
    let x = normals(1, rows * cols);
    for documents in [Documents::Random, Documents::Tokens, Documents::Whole, Documents::Wild] {
        let starts = documents.starts(sequences, seq_len);
        let y = same_everywhere(|cpu| {
            let table = Tensor::from_f32(cpu, &table(positions, head_dim), positions, head_dim).unwrap();
            let x = Tensor::from_f32(cpu, &x, rows, cols).unwrap();
            let positions = &Positions { seq_len, first, starts: Some(cpu.upload(&starts).unwrap()) };
            bits(&Rope { x: &x, table: &table, head_dim, positions, inverse: false }.run(cpu).unwrap())
        });
        let cpu = Cpu::scalar(1).unwrap();
        for (row, start) in starts.into_iter().enumerate() {
            let at = row % seq_len;
            let position = at - start.clamp(0, at as i32) as usize;
            let x = Tensor::from_f32(&cpu, &x[row * cols..][..cols], 1, cols).unwrap();
            let want = bits(&turned(&cpu, &x, (1, 1, first + position, heads, head_dim), false));
            assert_eq!(y[row * cols..][..cols], want, "{documents:?}, row {row}");
        }
    }
    let cpu = Cpu::scalar(1).unwrap();
    let (x, table) =
        (Tensor::zeros(&cpu, DType::F32, 4, 2).unwrap(), Tensor::zeros(&cpu, DType::F32, 2, 2).unwrap());
    let starts = Some(cpu.zeros::<i32>(3).unwrap());
    let positions = &Positions { seq_len: 2, first: 0, starts };
    let error = Rope { x: &x, table: &table, head_dim: 2, positions, inverse: false }.check().unwrap_err();
    assert_eq!(error.to_string(), "rope: `starts.len()` is 3, expected 4");
}

#[test]
fn bf16_is_rounded_once() {
    for shape in SHAPES {
        let (sequences, seq_len, _, heads, head_dim) = shape;
        let (rows, cols) = (sequences * seq_len, heads * head_dim);
        let x: Vec<bf16> = normals(1, rows * cols).into_iter().map(bf16::from_f32).collect();
        let got = same_everywhere(|cpu| {
            bits(&turned(cpu, &Tensor::from_bf16(cpu, &x, rows, cols).unwrap(), shape, false))
        });
        let cpu = Cpu::scalar(1).unwrap();
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let wide = turned(&cpu, &Tensor::from_f32(&cpu, &wide, rows, cols).unwrap(), shape, false);
        let want = wide.to_f32_vec(&cpu).unwrap();
        let want: Vec<u32> = want.into_iter().map(|x| u32::from(bf16::from_f32(x).to_bits())).collect();
        assert!(got == want, "{shape:?}");
    }
}
