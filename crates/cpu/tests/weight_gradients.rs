//! Weight gradients over groups of rows in every format, held to the product of the decoded values; and that a group's scales are its own.

use nibble_core::formats::{Codec, Format, Rounding, WHOLE_LINE};
use nibble_core::ops::{Dequantize, GroupedWgrad, Planes, Quantize};
use nibble_core::{Backend, DType, Groups, Operand, Tensor};
use nibble_cpu::Cpu;

const LENS: [usize; 4] = [130, 0, 37, 128];
const CAPACITY: usize = 512;

fn starts() -> Vec<usize> {
    LENS.iter()
        .scan(0, |next, len| Some(std::mem::replace(next, (*next + len).next_multiple_of(128))))
        .collect()
}

fn groups(cpu: &Cpu) -> Groups<Cpu> {
    let ints = |values: &[usize]| values.iter().map(|&v| v as i32).collect::<Vec<_>>();
    let (start, len) = (ints(&[starts(), vec![CAPACITY]].concat()), ints(&LENS));
    let mut row_id = vec![-1; CAPACITY];
    for (first, len) in starts().into_iter().zip(LENS) {
        (first..first + len).for_each(|row| row_id[row] = row as i32);
    }
    Groups {
        start: cpu.upload(&start).unwrap(),
        len: cpu.upload(&len).unwrap(),
        row_id: cpu.upload(&row_id).unwrap(),
        num_groups: LENS.len(),
        align: 128,
        capacity: CAPACITY,
        rows_each: None,
    }
}

/// Groups of very different sizes of values; NaN where no row is.
fn matrix(cpu: &Cpu, cols: usize, seed: usize) -> Tensor<Cpu> {
    let mut x = vec![f32::NAN; CAPACITY * cols];
    for (g, (first, len)) in starts().into_iter().zip(LENS).enumerate() {
        for (i, x) in (first * cols..).zip(&mut x[first * cols..(first + len) * cols]) {
            *x = (((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0) * 40f32.powi(g as i32);
        }
    }
    Tensor::from_f32(cpu, &x, CAPACITY, cols).unwrap()
}

fn columns(cpu: &Cpu, x: &Tensor<Cpu>, codec: Codec, groups: Option<&Groups<Cpu>>) -> Operand<Cpu> {
    Quantize { groups, ..Quantize::new(x, codec, Planes::Cols) }.run(cpu).unwrap().take_cols("test").unwrap()
}

fn decoded(cpu: &Cpu, q: &Operand<Cpu>) -> Vec<f64> {
    let x = Dequantize { x: q.block("test").unwrap(), dtype: DType::F32 }.run(cpu).unwrap();
    x.to_f32_vec(cpu).unwrap().into_iter().map(f64::from).collect()
}

#[test]
fn gradients_in_every_format_are_those_of_the_decoded_values() {
    let (n, k) = (11, 19);
    let backends = [Cpu::new(2).unwrap(), Cpu::scalar(1).unwrap()];
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        for &rule in format.spec().rules {
            let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
            let mut all: Vec<Vec<f32>> = Vec::new();
            for cpu in &backends {
                let groups = groups(cpu);
                let [dy, x] = [(n, 1), (k, 2)]
                    .map(|(cols, seed)| columns(cpu, &matrix(cpu, cols, seed), codec, Some(&groups)));
                let mut grad =
                    Tensor::from_f32(cpu, &vec![0.0; LENS.len() * n * k], LENS.len() * n, k).unwrap();
                let op = GroupedWgrad { dy: &dy, x: &x, groups: &groups, grad: &mut grad, accumulate: false };
                op.run(cpu).unwrap();
                let (dy, x, got) = (decoded(cpu, &dy), decoded(cpu, &x), grad.to_f32_vec(cpu).unwrap());
                for (i, got) in got.iter().enumerate() {
                    let (group, row, col) = (i / k / n, i / k % n, i % k);
                    let rows = starts()[group]..starts()[group] + LENS[group];
                    let terms = || rows.clone().map(|r| dy[r * n + row] * x[r * k + col]);
                    let (want, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                    let error = (f64::from(*got) - want).abs();
                    assert!(error <= 1e-6 * size, "{format} {rule} {group} {row} {col}: {got}, not {want}");
                }
                all.push(got);
            }
            assert_eq!(all[0], all[1], "{format} {rule}");
        }
    }
}

/// Codes and scales of a group of rows are those of its rows by themselves, whatever the other groups hold.
#[test]
fn a_column_has_a_scale_for_each_group() {
    let (cpu, cols) = (Cpu::new(2).unwrap(), 7);
    let (x, groups) = (matrix(&cpu, cols, 3), groups(&cpu));
    let values = x.to_f32_vec(&cpu).unwrap();
    for format in Format::ALL.into_iter().filter(|format| format.spec().block == WHOLE_LINE) {
        for &rule in format.spec().rules {
            let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
            let all = columns(&cpu, &x, codec, Some(&groups));
            let all = all.block("test").unwrap();
            let (codes, records) = (cpu.download(&all.codes).unwrap(), all.records(&cpu).unwrap());
            let per_line = CAPACITY / 128;
            for (first, len) in starts().into_iter().zip(LENS).filter(|(_, len)| *len > 0) {
                let rows =
                    Tensor::from_f32(&cpu, &values[first * cols..(first + len) * cols], len, cols).unwrap();
                let alone = columns(&cpu, &rows, codec, None);
                let alone = alone.block("test").unwrap();
                let (alone_codes, alone_records) =
                    (cpu.download(&alone.codes).unwrap(), alone.records(&cpu).unwrap());
                let (height, blocks) = (alone.rows, alone.rows / 128);
                for col in 0..cols {
                    let of_all = &codes[col * CAPACITY + first..][..height];
                    assert_eq!(of_all, &alone_codes[col * height..][..height], "{format} {rule} {first}");
                    let of_all = &records[col * per_line + first / 128..][..blocks];
                    assert_eq!(of_all, &alone_records[col * blocks..][..blocks], "{format} {rule} {first}");
                    assert!(of_all.iter().all(|record| *record == of_all[0]), "one scale a group");
                }
            }
        }
    }
}
