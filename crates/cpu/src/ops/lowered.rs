//! Products of formats that the engine has no codes for. Where their codes times the scales of their blocks are BF16 numbers, exactly as
//! far as its exponents reach, they are multiplied as such; F32 scales, of blocks or of a tensor, stay beside them and multiply the sums.
//! Where they are not, both sides are multiplied as the F32 numbers that they stand for.

use super::elementwise::round_bf16;
use super::operands::{down_rows, gemm_element, view};
use super::quantize::source::{Lines, Scales};
use super::quantize::spec::Decoder;
use crate::gemm;
use crate::{CodePath, Cpu};
use half::bf16;
use nibble_core::formats::{BlockAxis, ScaleKind, ScalePlane};
use nibble_core::{BlockScaled, Operand, Result};
use rayon::prelude::*;

/// An operand as the engine takes it.
pub(super) enum Side<'a> {
    /// As it is.
    AsIs(&'a Operand<Cpu>),
    /// As plain numbers.
    Lowered(Lowered),
}

/// A quantized operand as plain numbers, in the order of its codes.
pub(super) struct Lowered {
    values: Values,
    /// Values of a line, along which the contraction runs.
    len: usize,
    /// Where there are F32 scales on either side: those of this one.
    scales: Option<Apart>,
}

/// Numbers `[lines][len]`.
enum Values {
    /// Without F32 scales.
    Bf16(Vec<bf16>),
    /// Whole.
    F32(Vec<f32>),
}

/// F32 scales `[lines][blocks]`, as bytes.
struct Apart {
    bytes: Vec<u8>,
    block: usize,
    blocks: usize,
}

/// How both operands of a product are taken, whose contraction runs along the lines that are stored.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// As they are.
    AsIs,
    /// As BF16, with F32 scales for so many values beside them, if there are any.
    Exact { apart: Option<usize> },
    /// As F32.
    Wide,
}

impl Way {
    /// For these two.
    pub fn of(a: &Operand<Cpu>, b: &Operand<Cpu>) -> Self {
        let (Operand::Block(x), Operand::Block(y)) = (a, b) else { return Self::AsIs };
        if has_codes(x) && has_codes(y) {
            return Self::AsIs;
        }
        if ![x, y].iter().all(|q| folds(q)) {
            return Self::Wide;
        }
        let of_tensor = [x, y].iter().any(|q| q.scale_kind().has_tensor_scale());
        let of_blocks = [x, y].iter().any(|q| q.scale_kind() == ScaleKind::F32);
        let block = match (of_blocks || x.axis == BlockAxis::Col, line_len(x)) {
            (true, len) => x.format.record_len(x.axis).min(len.next_multiple_of(2)),
            (false, len) => len.next_multiple_of(2),
        };
        Self::Exact { apart: (of_tensor || of_blocks).then_some(block.max(2)) }
    }

    /// One of them.
    pub fn side<'a>(self, cpu: &Cpu, x: &'a Operand<Cpu>) -> Result<Side<'a>> {
        match (self, x) {
            (Self::Exact { apart }, Operand::Block(q)) => Ok(Side::Lowered(lower(cpu, q, apart)?)),
            (Self::Wide, Operand::Block(q)) => Ok(Side::Lowered(widen(cpu, q)?)),
            _ => Ok(Side::AsIs(x)),
        }
    }
}

/// Both sides of a product.
pub(super) fn sides<'a>(cpu: &Cpu, a: &'a Operand<Cpu>, b: &'a Operand<Cpu>) -> Result<(Side<'a>, Side<'a>)> {
    let way = Way::of(a, b);
    Ok((way.side(cpu, a)?, way.side(cpu, b)?))
}

/// Whether the engine reads the codes themselves: of a known element, every line and block of whole bytes and pairs.
fn has_codes(q: &BlockScaled<Cpu>) -> bool {
    gemm_element(q).is_some() && (q.format.spec().code_bits == 8 || line_len(q).is_multiple_of(2))
}

/// Whether codes and scales, F32 scales aside, are BF16 numbers.
fn folds(q: &BlockScaled<Cpu>) -> bool {
    let codes_alone = q.scale_kind() == ScaleKind::F32 && q.format.spec().codec.decodes_by_levels();
    codes_alone || q.format.folds_into_bf16(q.rule)
}

fn line_len(q: &BlockScaled<Cpu>) -> usize {
    if q.axis == BlockAxis::Col { q.rows } else { q.cols }
}

/// Its lines, with place (row, column) of a value by line and position.
fn lines(q: &BlockScaled<Cpu>) -> (usize, impl Fn(usize, usize) -> (usize, usize) + Sync) {
    let down = q.axis == BlockAxis::Col;
    (if down { q.cols } else { q.rows }, move |line, k| if down { (k, line) } else { (line, k) })
}

/// Every value, line by line: decoded by `line`, and kept as `keep` makes it of that.
fn values<T: Clone + Send>(
    cpu: &Cpu,
    q: &BlockScaled<Cpu>,
    with: Scales,
    zero: T,
    keep: impl Fn(&[f32], &mut [T]) + Sync,
) -> Result<Vec<T>> {
    let (len, (num_lines, place)) = (line_len(q), lines(q));
    let mut values = vec![zero; num_lines * len];
    let (decoder, stored) = (Decoder::of(q)?, Lines::of(q, with)?);
    let decode = |line: usize, out: &mut [f32]| match (cpu.path(), with) {
        (CodePath::Simd, _) => stored.load(cpu.isa(), line, 0, out),
        (CodePath::Scalar, Scales::All) => {
            (0..).zip(out).for_each(|(k, out)| *out = decoder.value(place(line, k).0, place(line, k).1));
        }
        (CodePath::Scalar, Scales::Exact) => {
            (0..).zip(out).for_each(|(k, out)| *out = decoder.exact(place(line, k).0, place(line, k).1));
        }
    };
    cpu.pool().install(|| {
        values.par_chunks_mut(len.max(1)).enumerate().for_each_init(Vec::new, |decoded, (line, out)| {
            decoded.resize(len, 0.0);
            decode(line, decoded);
            keep(decoded, out);
        });
    });
    Ok(values)
}

/// As F32, with every scale.
fn widen(cpu: &Cpu, q: &BlockScaled<Cpu>) -> Result<Lowered> {
    let values = Values::F32(values(cpu, q, Scales::All, 0.0, |x, out| out.copy_from_slice(x))?);
    Ok(Lowered { values, len: line_len(q), scales: None })
}

/// As BF16, with F32 scales, if there are any on either side, for as many values beside it.
fn lower(cpu: &Cpu, q: &BlockScaled<Cpu>, apart: Option<usize>) -> Result<Lowered> {
    let (decoder, len, (lines, place)) = (Decoder::of(q)?, line_len(q), lines(q));
    let round = |x: &[f32], out: &mut [bf16]| round_bf16(cpu.isa(), x, out);
    let values = Values::Bf16(values(cpu, q, Scales::Exact, bf16::ZERO, round)?);
    let scales = apart.map(|block| {
        let blocks = len.div_ceil(block);
        let at = |i: usize| place(i / blocks, i % blocks * block);
        let scale = |i: usize| decoder.beside(at(i).0, at(i).1);
        Apart { bytes: (0..lines * blocks).flat_map(|i| scale(i).to_le_bytes()).collect(), block, blocks }
    });
    Ok(Lowered { values, len, scales })
}

impl Lowered {
    /// From line `first` on.
    fn view(&self, first: usize) -> gemm::Operand<'_> {
        let values = match &self.values {
            Values::Bf16(values) => gemm::Data::Bf16(values),
            Values::F32(values) => gemm::Data::F32(values),
        };
        let rows = gemm::Operand::rows(values, self.len).at(first * self.len);
        match &self.scales {
            Some(Apart { bytes, block, blocks }) => {
                let plane = ScalePlane { kind: ScaleKind::F32, bytes };
                rows.scaled(gemm::OperandScales::rows(plane, *block, *blocks).at(first * blocks))
            }
            None => rows,
        }
    }
}

impl Side<'_> {
    /// An operand whose contraction runs along its rows, from row `first` on.
    pub fn view(&self, op: &'static str, first: usize) -> Result<gemm::Operand<'_>> {
        match self {
            Self::AsIs(x) => view(op, x, first),
            Self::Lowered(x) => Ok(x.view(first)),
        }
    }

    /// An operand whose contraction runs down its rows.
    pub fn down_rows(&self, op: &'static str) -> Result<gemm::Operand<'_>> {
        match self {
            Self::AsIs(x) => down_rows(op, x),
            Self::Lowered(x) => Ok(x.view(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::formats::{Codec, Format, Rounding};
    use nibble_core::ops::{Dequantize, Gemm, Planes, Quantize};
    use nibble_core::{DType, Tensor};

    fn matrix(cpu: &Cpu, rows: usize, cols: usize, seed: usize) -> Tensor<Cpu> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0;
        let x: Vec<f32> = (0..rows * cols).map(value).collect();
        Tensor::from_f32(cpu, &x, rows, cols).unwrap()
    }

    fn decoded(cpu: &Cpu, q: &Operand<Cpu>) -> Vec<f64> {
        let x = Dequantize { x: q.block("test").unwrap(), dtype: DType::F32 }.run(cpu).unwrap();
        x.to_f32_vec(cpu).unwrap().into_iter().map(f64::from).collect()
    }

    /// Every format and rule that may be multiplied with itself, weights as well: the product of the decoded values, in F64, on every
    /// instruction set and the specification with the same bits.
    #[test]
    fn products_of_every_format_are_those_of_the_decoded_values() {
        let backends = [Cpu::new(2).unwrap(), Cpu::scalar(1).unwrap()];
        for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
            // Contractions that end inside a block, of an odd number of values and of an even one.
            for (&rule, k) in format.spec().rules.iter().flat_map(|rule| [147, 150].map(|k| (rule, k))) {
                let (m, n) = (37, 19);
                let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
                let mut all: Vec<Vec<f32>> = Vec::new();
                for cpu in &backends {
                    let planes = |x: Tensor<Cpu>, planes| Quantize::new(&x, codec, planes).run(cpu).unwrap();
                    let a = planes(matrix(cpu, m, k, 1), Planes::Rows).take_rows("test").unwrap();
                    let b = planes(matrix(cpu, n, k, 2), Planes::Tiles).take_rows("test").unwrap();
                    let y = Gemm { a: &a, b: &b, out: DType::F32 }.run(cpu).unwrap();
                    let got = y.to_f32_vec(cpu).unwrap();
                    let (a, b) = (decoded(cpu, &a), decoded(cpu, &b));
                    for (i, got) in got.iter().enumerate() {
                        let terms = || (0..k).map(|j| a[i / n * k + j] * b[i % n * k + j]);
                        let (want, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                        let error = (f64::from(*got) - want).abs();
                        assert!(error <= 1e-6 * size, "{format} {rule} {i}: {got}, not {want}");
                    }
                    all.push(got);
                }
                assert_eq!(all[0], all[1], "{format} {rule}");
            }
        }
    }

    /// The transposed plane of a weight holds the transposed matrix, of each of a stack, within what two quantizations differ by.
    #[test]
    fn weights_have_both_planes_in_every_format() {
        let cpu = Cpu::new(2).unwrap();
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            let (stack, n, k) = (2, 36, 50);
            let codec =
                Codec::new(format, format.spec().default_rule().unwrap(), Rounding::NearestEven).unwrap();
            let x = matrix(&cpu, stack * n, k, 3);
            let made = Quantize { stack, ..Quantize::new(&x, codec, Planes::Tiles) }.run(&cpu).unwrap();
            let (upright, turned) = (made.take_rows("test").unwrap(), made.cols.clone().unwrap());
            assert_eq!((turned.rows(), turned.cols()), (stack * k, n), "{format}");
            let (up, across) = (decoded(&cpu, &upright), decoded(&cpu, &turned));
            for (i, value) in up.iter().enumerate() {
                let (matrix, row, col) = (i / k / n, i / k % n, i % k);
                let other = across[(matrix * k + col) * n + row];
                let bound = if format.spec().code_bits == 4 { 0.8 } else { 0.3 };
                let same = !format.spec().tiles || *value == other;
                assert!(same && (value - other).abs() <= bound, "{format} {i}: {value} and {other}");
            }
        }
    }
}
