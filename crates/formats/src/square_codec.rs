//! Quantization of 2-D blocks whose rows store separate scale records ([`square`](crate::square)).

use crate::block::{BlockScale, amax};
use crate::codec::Codec;
use crate::scale::Scale;
use crate::square::Square;

/// The scales of a quantized 2-D block.
#[derive(Clone, Debug, PartialEq)]
pub struct SquareScales {
    /// The scale record of each row.
    pub rows: Vec<Scale>,
    /// The scale record of each column.
    pub cols: Vec<Scale>,
    /// Whether all records are NaN, because a value is NaN or infinite, or because the 2-D block is out of range.
    pub is_nan: bool,
}

impl Codec {
    /// The scale of each line (row or column) of a 2-D block. If any value is NaN or infinite, all scales are NaN.
    pub fn square_scales(&self, square: Square<'_>) -> Vec<BlockScale> {
        let marked = BlockScale { record: self.scale_kind().nan(), inv: f32::NAN };
        let Some(amax) = amax(square.values()) else { return vec![marked; square.lines()] };
        let amax = self.scaling().headroom.over(amax);
        // Lines of one share of the finest level have the same scales.
        let finest = self.scale_kind().levels().iter().map(|level| level.count as usize).max();
        let share = (self.params().block / finest.unwrap_or(1).max(1)).max(1);
        let of_share =
            |line: usize| self.format().spec().codec.scale_in_square(self.params(), square, line, amax);
        let lines = square.lines();
        (0..lines).step_by(share).flat_map(|line| vec![of_share(line); share.min(lines - line)]).collect()
    }

    /// Quantizes a 2-D block of `width` columns, with one code per byte, in the order of the values. The function `rand(i)` returns sixteen
    /// random bits for value `i`. Only stochastic roundings call `rand`. Codes whose scale is NaN are 0.
    pub fn quantize_square(
        &self,
        (x, width): (&[f32], usize),
        mut rand: impl FnMut(usize) -> u16,
        codes: &mut [u8],
    ) -> SquareScales {
        codes.fill(0);
        let square = Square::new(x, width);
        let scales = self.square_scales(square);
        let is_nan = scales.first().is_some_and(|scale| scale.is_nan());
        if !is_nan {
            let random = self.rounding().is_random();
            for (i, (code, &x)) in codes.iter_mut().zip(x).enumerate() {
                let r = if random { rand(i) } else { 0 };
                *code = self.encode(x, i % width, scales[i / width], r);
            }
        }
        let records = |scales: Vec<BlockScale>| scales.into_iter().map(|scale| scale.record).collect();
        let cols = records(self.square_scales(square.turned()));
        SquareScales { rows: records(scales), cols, is_nan }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockShape, Format, Rounding, ScaleRule, Scaling};
    use std::ops::Range;

    fn codecs() -> impl Iterator<Item = Codec> {
        let formats = Format::ALL.into_iter().filter(|format| format.spec().squares);
        formats.flat_map(|format| {
            format.spec().rules.iter().map(move |&rule| {
                let codec = Codec::new(format, rule, format.rounding(rule)).unwrap();
                codec.with(Scaling { block: BlockShape::Square, ..Scaling::default() }).unwrap()
            })
        })
    }

    /// Numbers of several octaves, with outliers.
    fn values(len: usize) -> Vec<f32> {
        let number = |i: usize| {
            let hash = (i as u32).wrapping_mul(2_654_435_761) ^ 0x9E37;
            let mantissa = 1.0 + (hash >> 9 & 0xFF) as f32 / 256.0;
            let exponent = (hash >> 20 & 7) as i32 - if hash.is_multiple_of(61) { -3 } else { 4 };
            mantissa * f32::powi(2.0, exponent) * if hash & 1 == 0 { 1.0 } else { -1.0 }
        };
        (0..len).map(number).collect()
    }

    /// A code stands for the same number along its row and down its column, and the transposed square has the transposed codes.
    #[test]
    fn a_square_and_its_transpose_are_the_same_numbers() {
        for codec in codecs() {
            let block = codec.format().spec().block;
            for (height, width) in [(block, block), (block, 7), (5, block), (block - 3, block / 2 + 1)] {
                let x = values(height * width);
                let turned: Vec<f32> = (0..x.len()).map(|i| x[i % height * width + i / height]).collect();
                let (mut codes, mut of_turned) = (vec![9; x.len()], vec![9; x.len()]);
                let scales = codec.quantize_square((&x, width), |_| unreachable!(), &mut codes);
                let other = codec.quantize_square((&turned, height), |_| unreachable!(), &mut of_turned);
                assert_eq!((&scales.rows, &scales.cols), (&other.cols, &other.rows));
                for (i, &code) in codes.iter().enumerate() {
                    let (row, col) = (i / width, i % width);
                    let along = codec.decode(code, col, scales.rows[row]);
                    let down = codec.decode(code, row, scales.cols[col]);
                    assert_eq!(along.to_bits(), down.to_bits(), "{:?} at {row}, {col}", codec.format());
                    assert_eq!(code, of_turned[col * height + row]);
                }
            }
        }
    }

    /// With one scale for a block, a square is a block of all its values.
    #[test]
    fn a_square_with_one_scale_is_one_long_block() {
        for codec in codecs().filter(|codec| codec.scale_kind().levels().len() == 1) {
            let block = codec.format().spec().block;
            for (height, width) in [(block, block), (3, block), (block, 1)] {
                let x = values(height * width);
                let (mut codes, mut of_block) = (vec![9; x.len()], vec![9; x.len()]);
                let scales = codec.quantize_square((&x, width), |_| 0, &mut codes);
                let (record, _) = codec.quantize_block(&x, |_| 0, &mut of_block);
                assert_eq!((codes, scales.rows), (of_block, vec![record; height]));
                assert_eq!(scales.cols, vec![record; width]);
            }
        }
    }

    /// HiFloat4 from its definition: the scale of 64 x 64, octaves of 8 x 8 and of 4 x 4 from 4 and 2 on.
    #[test]
    fn octaves_are_those_of_eighths_and_sixteenths_of_the_side() {
        let codec = codecs().find(|codec| codec.format() == Format::Hif4 && codec.rule() == ScaleRule::Amax);
        let codec = codec.unwrap();
        let x = values(64 * 64);
        let scales = codec.quantize_square((&x, 64), |_| 0, &mut vec![0; x.len()]);
        let largest = |rows: Range<usize>, cols: Range<usize>| {
            let of_row =
                |row: usize| x[row * 64..][cols.clone()].iter().fold(0.0, |a: f32, x| a.max(x.abs()));
            rows.map(of_row).fold(0.0, f32::max)
        };
        // The E6M2 byte and the reciprocal of a line whose largest magnitude is the square's.
        let mut line = [0.0; 64];
        line[0] = largest(0..64, 0..64);
        let of_line = codec.block_scale(&line, Some(line[0]));
        for (row, record) in scales.rows.iter().enumerate() {
            assert_eq!(record.0 & 0xFF, of_line.record.0 & 0xFF);
            for col in (0..64).step_by(4) {
                let square = |side: usize| {
                    let (top, left) = (row / side * side, col / side * side);
                    f64::from(largest(top..top + side, left..left + side)) * f64::from(of_line.inv)
                };
                let eighth = square(8) >= 4.0;
                let sixteenth = square(4) >= if eighth { 4.0 } else { 2.0 };
                let bits = (record.0 >> (8 + col / 8) & 1 == 1, record.0 >> (16 + col / 4) & 1 == 1);
                assert_eq!(bits, (eighth, sixteenth), "row {row}, column {col}");
            }
        }
    }

    #[test]
    fn a_value_that_is_not_finite_marks_the_square() {
        for codec in codecs() {
            let block = codec.format().spec().block;
            let mut x = values(block * 8);
            x[block + 1] = f32::INFINITY;
            let mut codes = vec![9; x.len()];
            let scales = codec.quantize_square((&x, block), |_| 0, &mut codes);
            assert!(scales.is_nan && codes.iter().all(|code| *code == 0));
            let marked = |record: &Scale| codec.scale_kind().is_nan(*record);
            assert!(scales.rows.iter().chain(&scales.cols).all(marked), "{}", codec.format());
        }
        let codec = Codec::new(Format::Nvfp4, ScaleRule::TensorAmax, Rounding::NearestEven).unwrap();
        assert!(codec.with(Scaling { block: BlockShape::Square, ..Scaling::default() }).is_err());
    }
}
