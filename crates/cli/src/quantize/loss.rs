//! Measures the loss of quantization: rounding errors, and errors that rounding does not explain.

use nibble_command::say;
use nibble_core::ops::{Dequantize, Planes, Quantize};
use nibble_core::{Backend, BlockScaled, DType, Kernels, Tensor};
use nibble_formats::{BlockAxis, Codec, ScaleRule};

/// The difference between a tensor and its quantized and dequantized copy, both in the same data type. Values that were not finite before
/// quantization are left out.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// Number of compared values.
    values: u64,
    /// The largest magnitude.
    amax: f32,
    /// The largest error of values that are finite after dequantization.
    error: f32,
    /// Number of values that are infinite or NaN after dequantization.
    not_finite: u64,
    /// Number of values that became smaller because they exceed the [reach](Expected::of) of the format's scales by more than a sixteenth,
    /// half a step of the format's finest elements.
    beyond: u64,
    /// Number of nonzero values in blocks that became all zeros, because no scale is small enough.
    below: u64,
    /// Number of nonzero values in blocks whose largest value is nonzero after dequantization, but has an error larger than rounding. The
    /// smallest scale is too large for these blocks.
    off: u64,
    /// Number of nonzero values rounded to 0 because their block has larger values.
    rounded_away: u64,
    /// Number of blocks with a NaN or an infinity.
    bad_blocks: u64,
    /// Number of blocks of finite values that became NaN, because the rule has no scale for them.
    refused_blocks: u64,
}

/// The errors that are expected of a format with a scale rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    rule: ScaleRule,
    /// The largest magnitude that a dequantized value can have.
    reach: f32,
    /// Largest relative error of a block's largest value if the block's scale is in range.
    most_off: f32,
}

/// The division of a matrix into blocks whose values share a scale.
#[derive(Debug, Clone, Copy)]
pub struct Blocks {
    cols: usize,
    /// Number of rows and columns of a block.
    block_rows: usize,
    block_cols: usize,
}

impl Blocks {
    /// The division into blocks of a quantized matrix that has `rows` rows.
    pub fn of<B: Backend>(q: &BlockScaled<B>, rows: usize) -> Self {
        let (block, cols) = (q.format.spec().block, q.cols);
        let (block_rows, block_cols) = match q.axis {
            // The matrix as a whole has the only scale.
            _ if q.scale_kind().bytes() == 0 => (rows, cols),
            BlockAxis::Row => (1, block.min(cols)),
            BlockAxis::Col => (block.min(rows), 1),
            BlockAxis::Tile => (block, block),
        };
        Self { cols, block_rows, block_cols }
    }

    fn number(self, rows: usize) -> usize {
        rows.div_ceil(self.block_rows) * self.cols.div_ceil(self.block_cols)
    }

    fn index(self, value: usize) -> usize {
        let (row, col) = (value / self.cols, value % self.cols);
        row / self.block_rows * self.cols.div_ceil(self.block_cols) + col / self.block_cols
    }
}

impl Loss {
    /// Compares the values of a matrix before and after quantization, and adds the differences.
    pub fn compare(&mut self, before: &[f32], after: &[f32], blocks: Blocks, expected: Expected) {
        let mut all = vec![OfBlock::default(); blocks.number(before.len() / blocks.cols)];
        // The product is computed in F64, because it may exceed the largest F32.
        let most = f64::from(expected.reach) * (17.0 / 16.0);
        for (i, (&x, &y)) in before.iter().zip(after).enumerate() {
            let block = &mut all[blocks.index(i)];
            block.has_other |= y != 0.0;
            if !x.is_finite() {
                block.is_bad = true;
                continue;
            }
            self.values += 1;
            self.amax = self.amax.max(x.abs());
            block.has_nan |= y.is_nan();
            block.not_zero += u64::from(x != 0.0);
            if !y.is_finite() {
                self.not_finite += 1;
                continue;
            }
            self.error = self.error.max((x - y).abs());
            let is_beyond = f64::from(x.abs()) > most;
            self.beyond += u64::from(is_beyond);
            block.zeroed += u64::from(x != 0.0 && y == 0.0);
            if x.abs() > block.largest {
                (block.largest, block.largest_is_off) =
                    (x.abs(), !is_beyond && (x - y).abs() > x.abs() * expected.most_off);
            }
        }
        all.iter().for_each(|block| self.add(block));
    }

    fn add(&mut self, block: &OfBlock) {
        *(if block.has_other { &mut self.rounded_away } else { &mut self.below }) += block.zeroed;
        self.bad_blocks += u64::from(block.is_bad);
        self.refused_blocks += u64::from(block.has_nan && !block.is_bad);
        if block.has_other && block.largest_is_off {
            self.off += block.not_zero;
        }
    }

    /// The largest error divided by the largest magnitude.
    fn relative(&self) -> f32 {
        if self.amax > 0.0 { self.error / self.amax } else { 0.0 }
    }

    /// Descriptions of the errors that rounding does not explain, one phrase per kind.
    fn findings(&self, expected: Expected) -> Vec<String> {
        let reach = match expected.reach {
            reach if reach < 1e9 => reach.to_string(),
            reach => format!("{reach:.3e}"),
        };
        let refused = match expected.rule {
            ScaleRule::Even => {
                "rule `even` rounds their largest value up to 2^128, for which there is no scale"
            }
            ScaleRule::Cann => {
                "rule `cann` has scales for largest values from 2^-45.2 to 372,500, and none for zeros"
            }
            _ => "there is no scale for them",
        };
        let off = format!(
            "values lie in blocks too small for any scale, whose largest value is off by more than {:.0} %",
            100.0 * expected.most_off
        );
        let all = [
            (self.bad_blocks, "blocks hold a NaN or an infinity; their scales are NaN".to_owned()),
            (self.refused_blocks, format!("blocks of finite values have the scale NaN: {refused}")),
            (self.not_finite, "values come back infinite or NaN".to_owned()),
            (self.beyond, format!("values come back smaller: the format holds nothing larger than {reach}")),
            (self.off, off),
            (self.below, "values lie in blocks too small for any scale, and come back as 0".to_owned()),
        ];
        all.iter()
            .filter(|(number, _)| *number > 0)
            .map(|(number, what)| format!("{number} {what}"))
            .collect()
    }
}

/// Statistics of one block.
#[derive(Debug, Clone, Copy, Default)]
struct OfBlock {
    /// Whether the block had a value that was not finite, and whether a finite value became NaN.
    is_bad: bool,
    has_nan: bool,
    /// Number of nonzero values, number of these that became 0, and whether any value is nonzero after dequantization.
    not_zero: u64,
    zeroed: u64,
    has_other: bool,
    /// The largest magnitude, and whether its error exceeds the [expected](Expected) error.
    largest: f32,
    largest_is_off: bool,
}

/// The quantization losses of all tensors.
#[derive(Debug, Default)]
pub struct Losses(Vec<(String, Loss, Expected)>);

impl Losses {
    /// Adds a tensor.
    pub fn add(&mut self, name: &str, loss: Loss, expected: Expected) {
        self.0.push((name.to_owned(), loss, expected));
    }

    /// Prints the errors that are larger than rounding explains, and the largest error.
    pub fn tell(mut self) {
        // The losses are sorted by name, so that the output does not depend on the order of tensors in the file.
        self.0.sort_by(|a, b| a.0.cmp(&b.0));
        let found: Vec<_> = self
            .0
            .iter()
            .map(|(name, loss, expected)| (name, loss.findings(*expected)))
            .filter(|(_, found)| !found.is_empty())
            .collect();
        for (name, findings) in found.iter().take(MOST_LINES) {
            say!("warning: `{name}`: {}", findings.join("; "));
        }
        if found.len() > MOST_LINES {
            say!("warning: {} more tensors have such values", found.len() - MOST_LINES);
        }
        let worst = self.0.iter().reduce(|a, b| if b.1.relative() > a.1.relative() { b } else { a });
        let Some((name, loss, _)) = worst else { return };
        let sum = |of: fn(&Loss) -> u64| self.0.iter().map(|(_, loss, _)| of(loss)).sum::<u64>();
        say!(
            "largest error: {:.3e}, {:.2}% of the largest value (`{name}`); {} of {} values are rounded to 0 beside larger ones",
            loss.error,
            100.0 * loss.relative(),
            sum(|loss| loss.rounded_away),
            sum(|loss| loss.values)
        );
    }
}

/// Maximum number of tensors that get a separate warning.
const MOST_LINES: usize = 5;

impl Expected {
    /// The errors that are expected of a codec. For tensor scales and F32 scales, the range of representable values has no limit. For other
    /// scales, the largest representable value is found by quantizing the largest finite number.
    ///
    /// # Errors
    /// Returns the backend's errors.
    pub fn of<B: Kernels>(b: &B, codec: Codec) -> nibble_core::Result<Expected> {
        // A value of at least half the largest code is off by at most a step of two, or by half of that with rounding to nearest. With
        // `floor`, scaled values are below 4/3 of the largest code.
        let most_off = if codec.rounding().is_random() { 0.5 } else { 0.25 };
        Ok(Expected { rule: codec.rule(), reach: reach(b, codec)?, most_off })
    }
}

fn reach<B: Kernels>(b: &B, codec: Codec) -> nibble_core::Result<f32> {
    let (format, rule) = (codec.format(), codec.rule());
    if format.scale_kind(rule).has_tensor_scale() {
        return Ok(f32::MAX);
    }
    // The rounding mode has no effect here, and the format's own rounding needs no random bits.
    let codec = Codec::new(format, rule, format.rounding(rule))?;
    let x = Tensor::from_f32(b, &[f32::MAX; WIDTH], 1, WIDTH)?;
    let rows = Quantize::new(&x, codec, Planes::Rows).run(b)?.take_rows("quantize")?;
    let plain = Dequantize { x: rows.block("quantize")?, dtype: DType::F32 }.run(b)?;
    let largest = plain.to_f32_vec(b)?.into_iter().fold(0f32, |m, y| m.max(y.abs()));
    Ok(if largest.is_finite() && largest > 0.0 { largest } else { f32::MAX })
}

/// A number of columns that every format accepts.
const WIDTH: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rounding_explains_is_told_from_the_rest() {
        let blocks = Blocks { cols: 4, block_rows: 1, block_cols: 2 };
        let before = [1.0, 0.1, 1e-9, -1e-9, 0.0, f32::NAN, 9.0, 65504.0];
        let after = [1.5, 0.0, 0.0, 0.0, 0.0, f32::NAN, 4.0, f32::INFINITY];
        let expected = Expected { rule: ScaleRule::Floor, reach: 4.0, most_off: 0.25 };
        let found = Loss {
            values: 7,
            amax: 65504.0,
            error: 5.0,
            not_finite: 1,
            beyond: 1,
            below: 2,
            off: 2,
            rounded_away: 1,
            bad_blocks: 1,
            refused_blocks: 0,
        };
        let mut loss = Loss::default();
        loss.compare(&before, &after, blocks, expected);
        assert_eq!(loss, found);
        assert_eq!(loss.findings(expected).len(), 5);
        let mut none = Loss::default();
        none.compare(&[4.2, 0.0], &[4.0, 0.0], Blocks { cols: 2, block_rows: 1, block_cols: 2 }, expected);
        assert!(none.findings(expected).is_empty());
        let mut refused = Loss::default();
        refused.compare(&[0.0, 3.0], &[f32::NAN; 2], blocks_of_one(), expected);
        assert_eq!((refused.bad_blocks, refused.refused_blocks), (0, 2));
    }

    fn blocks_of_one() -> Blocks {
        Blocks { cols: 2, block_rows: 1, block_cols: 1 }
    }

    #[test]
    fn a_value_is_in_its_block() {
        let tile = Blocks { cols: 5, block_rows: 2, block_cols: 2 };
        assert_eq!(tile.number(3), 6);
        assert_eq!([0, 1, 4, 5, 10, 14].map(|i| tile.index(i)), [0, 0, 2, 0, 3, 5]);
    }
}
