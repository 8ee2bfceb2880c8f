//! Changes of a code's power-of-two scale: short blocks of small elements to E4M3, and E4M3 codes to a larger scale.
//!
//! Four MX blocks of a row, or 128 rows of one block of 32 columns, share one E4M3 scale. This shared scale is smaller than the largest of
//! the source scales. The ratio is the largest power of two that keeps the element's largest number within 448: 2⁶ for E2M1 (6 · 2⁶ = 384).
//! A code is exact while its block's scale is at most 2^[`Lift::octaves`] times smaller than the largest source scale. With smaller source
//! scales, the code is rounded to the nearest E4M3 subnormal, ties to even, and finally to a signed zero.
//!
//! | element | headroom (powers of two) | exact within (powers of two) |
//! |---|---|---|
//! | E2M1 | 6 | 14 |
//! | E2M3 | 5 | 11 |
//! | E3M2 | 4 | 9 |

use crate::e8m0::{self, ScaleRule};
use crate::element::Element;
use crate::format::Format;
use crate::layout::BlockAxis;
use crate::scale::ScaleKind;

/// The number of values that share a scale after a conversion to E4M3 (lift).
pub const LIFTED_BLOCK: usize = 128;

/// The conversion of codes to E4M3 (lift), for an element type whose numbers are E4M3 numbers times a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lift {
    element: Element,
    headroom_log2: u8,
    octaves: u8,
}

impl Lift {
    /// The lift of MXFP4's element.
    pub const E2M1: Lift = match Lift::of(Element::E2M1) {
        Some(lift) => lift,
        None => panic!("E4M3 holds E2M1"),
    };

    /// The lift of an element type whose numbers are all E4M3 numbers, because they have at most four significant bits and do not exceed
    /// 448. `None` for other elements.
    pub const fn of(element: Element) -> Option<Lift> {
        let most = Element::E4M3;
        // `numbers` is false for elements with a NaN, and for integers in two's complement.
        let numbers = element.nan_code() == 0 && !element.is_twos_complement();
        let (largest, least) = (element.max(), element.decode(1));
        if !numbers || element.mantissa_bits() > most.mantissa_bits() || largest > most.max() {
            return None;
        }
        let (mut headroom_log2, mut up) = (0, 1.0);
        while largest * (2.0 * up) <= most.max() {
            (headroom_log2, up) = (headroom_log2 + 1, 2.0 * up);
        }
        let (mut octaves, mut step) = (0, least * up);
        while step / 2.0 >= most.decode(1) {
            (octaves, step) = (octaves + 1, step / 2.0);
        }
        Some(Lift { element, headroom_log2, octaves })
    }

    /// The source element.
    pub const fn element(self) -> Element {
        self.element
    }

    /// The base-2 logarithm of the ratio of the largest source scale to the scale of the lifted block.
    pub const fn headroom_log2(self) -> u8 {
        self.headroom_log2
    }

    /// The number of powers of two by which a source scale may be below the largest source scale of the block, so that every code is still
    /// converted exactly.
    pub const fn octaves(self) -> u8 {
        self.octaves
    }

    /// The scale byte of a lifted block, which is the largest source byte other than 0xFF minus the headroom, but at least 0. The result is
    /// 0 if there are no source bytes, or if all of them are 0xFF.
    pub fn target(self, bytes: impl Iterator<Item = u8>) -> u8 {
        shift_target(bytes).saturating_sub(self.headroom_log2)
    }

    /// Converts a code with the scale byte `source` to an E4M3 code with the scale byte `target`. The function also returns whether the
    /// represented value changed.
    ///
    /// Zeros keep their sign. If `source` is 0xFF (NaN), the result is the code 0x7F, which counts as unchanged. All targets are allowed.
    /// If `target` is below `source` by more than the headroom, large values saturate. [`target`](Self::target) never returns such a scale
    /// byte.
    #[inline]
    pub fn code(self, code: u8, source: u8, target: u8) -> (u8, bool) {
        if source == e8m0::NAN || target == e8m0::NAN {
            return (0x7F, false);
        }
        rescale(self.element.decode(code), i32::from(source) - i32::from(target))
    }

    /// The results of [`code`](Self::code) for all six-bit codes (for four-bit codes the upper two bits are ignored). Bit `c` of the mask
    /// is set if the value of code `c` changes. With this table, one look-up per code converts a block.
    pub fn table(self, source: u8, target: u8) -> ([u8; 64], u64) {
        let mut changed = 0;
        let table = std::array::from_fn(|c| {
            let (code, differs) = self.code(c as u8, source, target);
            changed |= u64::from(differs) << c;
            code
        });
        (table, changed)
    }
}

impl Format {
    /// The format and rule of a lift's result: E4M3 in blocks of [`LIFTED_BLOCK`] with power-of-two scales.
    pub const LIFTED: (Format, ScaleRule) = (Format::E4m3, ScaleRule::Rceil);

    /// The conversion to E4M3 with one power-of-two scale per [`LIFTED_BLOCK`] values (lift); `None` if the format has no lift. A lift
    /// requires power-of-two scales only, an element type that E4M3 can represent, and blocks along rows or columns whose length is a
    /// proper divisor of [`LIFTED_BLOCK`].
    pub fn lift(self, rule: ScaleRule, axis: BlockAxis) -> Option<Lift> {
        let spec = self.spec();
        let shorter = spec.block < LIFTED_BLOCK && LIFTED_BLOCK.is_multiple_of(spec.block);
        let by_powers = self.scale_kind(rule) == ScaleKind::E8M0 && spec.codec.decodes_by_levels();
        let lines = axis != BlockAxis::Tile;
        spec.element.filter(|_| shorter && by_powers && lines).and_then(Lift::of)
    }
}

/// The scale byte of a column block that is converted from E4M3 row blocks. The result is the largest scale byte of the row blocks other
/// than 0xFF, or 0 if there is no such byte.
pub fn shift_target(bytes: impl Iterator<Item = u8>) -> u8 {
    bytes.filter(|&b| b != e8m0::NAN).max().unwrap_or(0)
}

/// Converts an E4M3 code to the code of the same value under a scale that is 2^`octaves` times larger. The exponent of the code decreases.
/// If it becomes too small, the result is rounded to the nearest subnormal (ties to even) or to a signed zero. A NaN code is returned
/// unchanged. The function also returns whether the represented value changed.
#[inline]
pub fn shift_e4m3(code: u8, octaves: u32) -> (u8, bool) {
    let value = Element::E4M3.decode(code);
    if value.is_nan() {
        return (code, false);
    }
    rescale(value, -(octaves.min(64) as i32))
}

/// Like [`shift_e4m3`], from the scale byte `source` to the scale byte `target`. A NaN source (0xFF) gives 0x7F. If `target` is below
/// `source`, the exponent of the code increases instead, and large values saturate.
#[inline]
pub fn shift_code(code: u8, source: u8, target: u8) -> (u8, bool) {
    let value = Element::E4M3.decode(code);
    if source == e8m0::NAN || target == e8m0::NAN {
        return (0x7F, false);
    }
    if value.is_nan() {
        return (code, false);
    }
    rescale(value, i32::from(source) - i32::from(target))
}

/// `value · 2^octaves` as E4M3. The result is the same for all `octaves` beyond ±32, because every non-zero E2M1 or E4M3 value has then
/// saturated or become zero.
#[inline]
fn rescale(value: f32, octaves: i32) -> (u8, bool) {
    let octaves = octaves.clamp(-32, 32);
    let scaled = value * f32::from_bits(((127 + octaves) as u32) << 23);
    let code = Element::E4M3.encode(scaled);
    (code, Element::E4M3.decode(code) != scaled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_has_its_headroom_and_its_octaves() {
        let facts = |element| Lift::of(element).map(|lift| (lift.headroom_log2(), lift.octaves()));
        assert_eq!(facts(Element::E2M1), Some((6, 14)));
        assert_eq!(facts(Element::E2M3), Some((5, 11)));
        assert_eq!(facts(Element::E3M2), Some((4, 9)));
        assert_eq!([Element::E4M3, Element::E5M2, Element::INT8].map(facts), [None; 3]);
    }

    #[test]
    fn a_lift_is_exact_within_its_octaves_and_no_further() {
        for lift in [Element::E2M1, Element::E2M3, Element::E3M2].map(|element| Lift::of(element).unwrap()) {
            let codes = 0..1u8 << lift.element().code_bits();
            let inexact = |below: u8| {
                let target = lift.target([200, 200 - below].into_iter());
                codes.clone().filter(|&code| lift.code(code, 200 - below, target).1).count()
            };
            assert!((0..=lift.octaves()).all(|below| inexact(below) == 0), "{lift:?}");
            assert!(inexact(lift.octaves() + 1) > 0, "{lift:?}");
        }
    }

    #[test]
    fn mx_blocks_along_lines_are_lifted_and_nothing_else() {
        for format in Format::ALL {
            for &rule in format.spec().rules {
                for axis in [BlockAxis::Row, BlockAxis::Col, BlockAxis::Tile] {
                    let lifted = ["mxfp4", "mxfp6-e2m3", "mxfp6-e3m2"].contains(&format.name());
                    let expected = lifted && axis != BlockAxis::Tile;
                    assert_eq!(format.lift(rule, axis).is_some(), expected, "{format} {rule} {axis}");
                }
            }
        }
        let (format, rule) = Format::LIFTED;
        let spec = format.spec();
        assert_eq!((spec.block, spec.element), (LIFTED_BLOCK, Some(Element::E4M3)));
        assert_eq!(format.scale_kind(rule), ScaleKind::E8M0);
    }
}
