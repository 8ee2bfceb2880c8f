//! The random Hadamard transform of a matrix before quantization: along the rows, or along the columns of each group.

use super::drawn::Drawn;
use super::source::ValueSource;
use super::spans::Spans;
use super::spec::Matrix;
use crate::ops::plain::elementwise::for_rows;
use crate::simd::per_isa;
use crate::{CodePath, Cpu};
use nibble_core::ops::{Hadamard, Planes, Random};
use nibble_core::{Data, Result, Tensor};
use nibble_formats::hadamard;

/// Returns the transform of `x` in F32, and the spans of its valid rows. After a transform along the columns, a group ends with its last
/// transform block, and the matrix has as many rows as the column blocks.
pub(super) fn transform<'a>(
    cpu: &Cpu,
    x: &Tensor<Cpu>,
    planes: Planes,
    Hadamard { len, signs, step, first }: Hadamard<'_, Cpu>,
    spans: &Spans<'a>,
) -> Result<(Tensor<Cpu>, Spans<'a>)> {
    let down = planes == Planes::Cols;
    let whole = spans.in_whole(if down { len } else { 1 });
    let longest = whole.spans.iter().map(|s| s.len).max().unwrap_or(0);
    let mut sign = vec![0.0; if down { longest } else { x.cols }];
    let signs = Drawn::new(Random { step, ..signs.into() })?;
    hadamard::fill_signs(&signs.stream, first, &mut sign);
    let made = match (cpu.path(), down) {
        (CodePath::Scalar, false) => rows_by_spec(cpu, x, spans, &sign, len),
        (CodePath::Scalar, true) => cols_by_spec(cpu, x, spans, &whole, &sign, len),
        (CodePath::Simd, false) => rows_vectorised(cpu, x, spans, &sign, len),
        (CodePath::Simd, true) => cols_vectorised(cpu, x, spans, &whole, &sign, len),
    };
    Ok((made?, whole))
}

/// The specification of the transform along rows.
fn rows_by_spec(cpu: &Cpu, x: &Tensor<Cpu>, spans: &Spans, sign: &[f32], len: usize) -> Result<Tensor<Cpu>> {
    let mut values = Matrix::of(x, spans).values;
    for row in spans.valid() {
        hadamard::rht(&mut values[row * x.cols..][..x.cols], sign, len)?;
    }
    Tensor::new(Data::F32(cpu.computed(&values)), x.rows, x.cols)
}

/// The specification of the transform along columns, block by block.
fn cols_by_spec(
    cpu: &Cpu,
    x: &Tensor<Cpu>,
    spans: &Spans,
    whole: &Spans,
    sign: &[f32],
    len: usize,
) -> Result<Tensor<Cpu>> {
    let cols = x.cols;
    let mut values = Matrix::of(x, spans).values;
    values.resize(whole.rows * cols, 0.0);
    let mut block = vec![0.0; len];
    for span in &whole.spans {
        for k in (0..span.len).step_by(len) {
            for col in 0..cols {
                let at = |i| (span.start + k + i) * cols + col;
                (0..len).for_each(|i| block[i] = values[at(i)]);
                hadamard::rht(&mut block, &sign[k..][..len], len)?;
                (0..len).for_each(|i| values[at(i)] = block[i]);
            }
        }
    }
    Tensor::new(Data::F32(cpu.computed(&values)), whole.rows, cols)
}

fn rows_vectorised(
    cpu: &Cpu,
    x: &Tensor<Cpu>,
    spans: &Spans,
    sign: &[f32],
    len: usize,
) -> Result<Tensor<Cpu>> {
    let (isa, cols, from) = (cpu.isa(), x.cols, ValueSource::plain(x));
    let factor = hadamard::inv_sqrt_len(len)?;
    let mut counts = vec![false; x.rows];
    spans.valid().for_each(|row| counts[row] = true);
    let mut out = cpu.scratch::<f32>(x.rows * cols);
    for_rows(cpu, out.as_mut_slice(), cols, |first, out| {
        for (row, out) in (first..).zip(out.chunks_exact_mut(cols)) {
            if counts[row] {
                from.load(isa, row, 0, out);
                transform_row(isa, out, sign, len, factor);
            } else {
                out.fill(0.0);
            }
        }
    });
    Tensor::new(Data::F32(out), x.rows, cols)
}

fn cols_vectorised(
    cpu: &Cpu,
    x: &Tensor<Cpu>,
    spans: &Spans,
    whole: &Spans,
    sign: &[f32],
    len: usize,
) -> Result<Tensor<Cpu>> {
    let (isa, cols, from) = (cpu.isa(), x.cols, ValueSource::plain(x));
    let factor = hadamard::inv_sqrt_len(len)?;
    // `places` has, for each transform block, its position in the group and its number of valid rows; `None` for padding.
    let mut places = vec![None; whole.rows / len];
    for (span, whole) in spans.spans.iter().zip(&whole.spans) {
        for k in (0..whole.len).step_by(len) {
            places[(span.start + k) / len] = Some((k, (span.len - k).min(len)));
        }
    }
    let mut out = cpu.scratch::<f32>(whole.rows * cols);
    for_rows(cpu, out.as_mut_slice(), len * cols, |first, out| {
        for (block, out) in (first..).zip(out.chunks_exact_mut(len * cols)) {
            let Some((k, rows)) = places[block] else {
                out.fill(0.0);
                continue;
            };
            let (values, missing) = out.split_at_mut(rows * cols);
            missing.fill(0.0);
            for (i, row) in values.chunks_exact_mut(cols).enumerate() {
                from.load(isa, block * len + i, 0, row);
            }
            transform_down(isa, out, cols, &sign[k..][..len], factor);
        }
    });
    Tensor::new(Data::F32(out), whole.rows, cols)
}

#[inline(always)]
fn transform_row_body(x: &mut [f32], sign: &[f32], len: usize, factor: f32) {
    for (x, sign) in x.chunks_exact_mut(len).zip(sign.chunks_exact(len)) {
        transform_down_body(x, 1, sign, factor);
    }
}

per_isa! {
    // Transforms a row block by block.
    fn transform_row = transform_row_body; (x: &mut [f32], sign: &[f32], len: usize, factor: f32)
}

/// Transforms one block of rows `[sign.len()][cols]`: applies the signs, butterflies of whole rows with strides 1, 2, 4, …, then the
/// factor.
#[inline(always)]
fn transform_down_body(x: &mut [f32], cols: usize, sign: &[f32], factor: f32) {
    for (row, sign) in x.chunks_exact_mut(cols).zip(sign) {
        row.iter_mut().for_each(|x| *x *= sign);
    }
    let mut half = cols;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    x.iter_mut().for_each(|x| *x *= factor);
}

per_isa! {
    // Transforms one block of rows along the columns.
    fn transform_down = transform_down_body; (x: &mut [f32], cols: usize, sign: &[f32], factor: f32)
}
