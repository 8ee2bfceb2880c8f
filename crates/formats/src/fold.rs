//! What folds exactly: whether the codes of a block, with the scales of the block, are numbers of a wider element.
//!
//! Tensor cores of eight bits take E4M3 under one scale for 128 values. Blocks of a smaller element share that scale exactly while their own
//! lie within so many octaves of the largest. BF16 units take a value with all of its block's scales, if that has at most eight significant
//! bits. Both are computed of the record, so that a new format has its answer without being named.

use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::format::Format;
use crate::scale::{ScaleKind, ScaleNumber};

/// How blocks under powers of two fold into one block of a wider element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fold {
    /// Octaves by which the common scale lies below the largest of the blocks': the most that the largest code leaves room for.
    pub headroom_log2: u8,
    /// Octaves below the largest scale within which every code of a block stays exact.
    pub octaves: u32,
}

impl Element {
    /// How blocks of this element fold into blocks of `wider`; `None` if some code of it is no number of `wider` under any scale.
    ///
    /// ```
    /// use nibble_formats::Element;
    /// let fold = Element::E2M1.fold_into(Element::E4M3).unwrap();
    /// assert_eq!((fold.headroom_log2, fold.octaves), (6, 14)); // 6 · 2⁶ = 384 ≤ 448; 0.5 · 2⁶⁻¹⁴ = 2⁻⁹
    /// ```
    pub fn fold_into(self, wider: Element) -> Option<Fold> {
        let magnitudes: Vec<f32> = (0..=self.max_code()).map(|code| self.decode(code)).collect();
        let exact = |octaves: i32| {
            let scale = f32::from_bits(((127 + octaves) as u32) << 23);
            magnitudes.iter().all(|v| wider.decode(wider.encode(v * scale)) == v * scale)
        };
        let headroom = (0..=30).rev().find(|&up| self.max() * 2f32.powi(up) <= wider.max())?;
        let octaves = (0..=60).take_while(|below| exact(headroom - below)).count();
        Some(Fold { headroom_log2: headroom as u8, octaves: octaves.checked_sub(1)? as u32 })
    }
}

impl Format {
    /// How blocks of this format fold into E4M3 under one power of two for 128 values; `None` where scales are of another kind, or codes do
    /// not fit.
    pub fn folds_into_e4m3(self, rule: ScaleRule) -> Option<Fold> {
        let powers = self.scale_kind(rule) == ScaleKind::E8M0;
        self.spec().element.filter(|_| powers)?.fold_into(Element::E4M3)
    }

    /// Whether every code times its block's scales is a BF16 number, as far as BF16's exponents reach. A tensor's scale is not among them:
    /// it multiplies a product's sums. Of values that are more than that product nothing is known: no.
    pub fn folds_into_bf16(self, rule: ScaleRule) -> bool {
        let Some(element) = self.spec().element.filter(|_| self.spec().codec.decodes_by_levels()) else {
            return false;
        };
        let of_scales: Vec<u32> = self.scale_kind(rule).levels().iter().map(|l| numbers(l.number)).collect();
        // Significands are odd integers below 2^bits; the largest product has the most bits, and all others have no more.
        let codes = (0..=element.max_code()).map(|code| significand(element.decode(code)));
        let largest = codes.max().unwrap_or(0);
        let product =
            of_scales.iter().try_fold(largest, |product, &scale| product.checked_mul(u64::from(scale)));
        product.is_some_and(|product| product < 1 << 8)
    }
}

/// The largest significand of a kind of scales.
fn numbers(number: ScaleNumber) -> u32 {
    let all = |last: u32| (0..=last).map(|bits| number.decode(bits)).filter(|v| v.is_finite() && *v > 0.0);
    match number {
        ScaleNumber::F32 => (1 << 24) - 1,
        ScaleNumber::Bit => 1,
        _ => all(0xFF).map(significand).max().unwrap_or(0) as u32,
    }
}

/// The odd integer that a finite magnitude is a power of two times; 0 of zero.
fn significand(x: f32) -> u64 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    let (exponent, mantissa) = (bits >> 23, bits & 0x7F_FFFF);
    let whole = u64::from(if exponent == 0 { mantissa } else { mantissa | 0x80_0000 });
    if whole == 0 { 0 } else { whole >> whole.trailing_zeros() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lift::{LIFT_HEADROOM_LOG2, lift_code};
    use crate::{Codec, Rounding, Scale};

    #[test]
    fn octaves_that_elements_stay_exact_for() {
        let octaves = |element: Element| element.fold_into(Element::E4M3).map(|fold| fold.octaves);
        let want = [
            (Element::E2M1, Some(14)),
            (Element::E2M3, Some(11)),
            (Element::E3M2, Some(9)),
            (Element::E4M3, Some(0)),
            (Element::E5M2, None),
            (Element::INT8, None),
            (Element::S1P2, Some(15)),
        ];
        for (element, want) in want {
            assert_eq!(octaves(element), want, "{element}");
        }
    }

    /// The lift of MXFP4 is this fold: exact up to its octaves for every code, and not one further.
    #[test]
    fn the_lift_is_exact_as_far_as_computed_and_no_further() {
        let fold = Format::Mxfp4.folds_into_e4m3(ScaleRule::Rceil).unwrap();
        assert_eq!(fold.headroom_log2, LIFT_HEADROOM_LOG2);
        let inexact =
            |below: u32| (0..16).filter(|&code| lift_code(code, (200 - below) as u8, 194).1).count();
        assert!((0..=fold.octaves).all(|below| inexact(below) == 0));
        assert!(inexact(fold.octaves + 1) > 0);
    }

    #[test]
    fn formats_that_fold_into_e4m3() {
        for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
            for &rule in format.spec().rules {
                let powers = format.scale_kind(rule) == ScaleKind::E8M0;
                let fits = format.spec().element.unwrap().fold_into(Element::E4M3).is_some();
                assert_eq!(format.folds_into_e4m3(rule).is_some(), powers && fits, "{format} {rule}");
            }
        }
        // Seven bits of an integer times three of a scale would not be.
        assert_eq!((significand(127.0 / 64.0), significand(0.0), significand(6.0)), (127, 0, 3));
    }

    /// By brute force: what is said to fold does under every record that is tried, and of what is not some value does not.
    #[test]
    fn a_bf16_holds_what_is_said_to_fold_and_nothing_else() {
        for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
            for &rule in format.spec().rules {
                let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap().under(1.0);
                let others = [0, 0xFFFF_FF00u32, 0x1234_5600, 0x3A35_0F00];
                let records = (0..=255u32).flat_map(|byte| others.map(|bits| Scale(byte | bits)));
                let fits = |value: f32| {
                    let reached = value.abs() >= f32::MIN_POSITIVE || value == 0.0;
                    !reached || !value.is_finite() || half::bf16::from_f32(value).to_f32() == value
                };
                let all = 0..=0xFFu8 >> (8 - codec.element().code_bits());
                let fit = records.into_iter().all(|record| {
                    let places = [0, 5, format.spec().block.min(64) - 1];
                    all.clone().all(|code| places.iter().all(|&i| fits(codec.decode(code, i, record))))
                });
                assert_eq!(format.folds_into_bf16(rule), fit, "{format} {rule}");
            }
        }
    }
}
