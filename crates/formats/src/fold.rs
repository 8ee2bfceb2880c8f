//! Exact folding: whether the codes of a block, multiplied by the block's scales, are BF16 numbers.
//!
//! The products are BF16 numbers if no product has more than eight significant bits. The answer is computed from the `FormatSpec`, so that
//! a new format needs no entry here.

use crate::e8m0::ScaleRule;
use crate::format::Format;
use crate::scale::ScaleNumber;

impl Format {
    /// Whether the product of every code and its block's scales is a BF16 number, within the range of BF16's exponents. Tensor scales are
    /// not included, because they multiply the output of a GEMM. The result is false for formats in which a decoded value is not the
    /// product of code and scales.
    pub fn folds_into_bf16(self, rule: ScaleRule) -> bool {
        let Some(element) = self.spec().element.filter(|_| self.spec().codec.decodes_by_levels()) else {
            return false;
        };
        let of_scales: Vec<u32> = self.scale_kind(rule).levels().iter().map(|l| numbers(l.number)).collect();
        // Significands are odd integers below 2^bits; the product of the largest significands has the most bits.
        let codes = (0..=element.max_code()).map(|code| significand(element.decode(code)));
        let largest = codes.max().unwrap_or(0);
        let product =
            of_scales.iter().try_fold(largest, |product, &scale| product.checked_mul(u64::from(scale)));
        product.is_some_and(|product| product < 1 << 8)
    }
}

/// The largest significand among scales of this number kind.
fn numbers(number: ScaleNumber) -> u32 {
    let all = |last: u32| (0..=last).map(|bits| number.decode(bits)).filter(|v| v.is_finite() && *v > 0.0);
    match number {
        ScaleNumber::F32 => (1 << 24) - 1,
        ScaleNumber::Bit => 1,
        _ => all(0xFF).map(significand).max().unwrap_or(0) as u32,
    }
}

/// The odd integer m of a finite magnitude m · 2^k; 0 for zero.
fn significand(x: f32) -> u64 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    let (exponent, mantissa) = (bits >> 23, bits & 0x7F_FFFF);
    let whole = u64::from(if exponent == 0 { mantissa } else { mantissa | 0x80_0000 });
    if whole == 0 { 0 } else { whole >> whole.trailing_zeros() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Codec, Rounding, Scale};

    #[test]
    fn significands_by_hand() {
        // 127 has seven bits; multiplied by a scale of three bits, it would have more than eight.
        assert_eq!((significand(127.0 / 64.0), significand(0.0), significand(6.0)), (127, 0, 3));
    }

    /// By brute force: a format that folds does so under every scale record tried. A format that does not fold has at least one value that
    /// is not a BF16 number.
    #[test]
    fn a_bf16_holds_what_is_said_to_fold_and_nothing_else() {
        for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
            for &rule in format.spec().rules {
                let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap().under(1.0);
                let others = [0, 0xFFFF_FFFF_FFFF_FF00u64, 0x1234_5600, 0x3A35_0F00];
                let records = (0..=255u64).flat_map(|byte| others.map(|bits| Scale(byte | bits)));
                let fits = |value: f32| {
                    let reached = value.abs() >= f32::MIN_POSITIVE || value == 0.0;
                    !reached || !value.is_finite() || half::bf16::from_f32(value).to_f32() == value
                };
                let all = 0..=0xFFu8 >> (8 - codec.element().code_bits());
                let fit = records.into_iter().all(|record| {
                    let places = [0, 5, format.spec().block.min(128) - 1];
                    all.clone().all(|code| places.iter().all(|&i| fits(codec.decode(code, i, record))))
                });
                assert_eq!(format.folds_into_bf16(rule), fit, "{format} {rule}");
            }
        }
    }
}
