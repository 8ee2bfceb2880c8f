//! Changing the power-of-two scale under a code: MXFP4 onto E4M3, and E4M3 to a larger scale.
//!
//! Four MXFP4 blocks of a row (or 128 rows × one 32-column block) share one E4M3 scale: 2⁶ below the
//! largest of theirs, so that the largest value, 6 · 2⁶ = 384, still fits 448. A code is then exact
//! while its block's scale lies within 14 octaves of the largest; beyond, it rounds to nearest-even
//! into the subnormals and at last to a signed zero.

use crate::e8m0;
use crate::element::Element;

/// Octaves by which a lifted scale lies below the largest source scale.
pub const LIFT_HEADROOM_LOG2: u8 = 6;

/// The scale byte shared by lifted blocks: the largest source byte other than 0xFF, minus 6,
/// not below 0 (0 too where there is none).
pub fn lift_target(bytes: impl Iterator<Item = u8>) -> u8 {
    shift_target(bytes).saturating_sub(LIFT_HEADROOM_LOG2)
}

/// The scale byte shared by E4M3 rows that become columns: the largest byte other than 0xFF, 0 where
/// there is none.
pub fn shift_target(bytes: impl Iterator<Item = u8>) -> u8 {
    bytes.filter(|&b| b != e8m0::NAN).max().unwrap_or(0)
}

/// An E2M1 code under the scale byte `source` as an E4M3 code under the scale byte `target`, and
/// whether its value changed.
///
/// Zeros keep their sign. A NaN source (0xFF) gives 0x7F, which counts as unchanged. Total over all
/// targets: one more than 6 octaves below `source` (which [`lift_target`] never makes) saturates.
#[inline]
pub fn lift_code(code: u8, source: u8, target: u8) -> (u8, bool) {
    if source == e8m0::NAN || target == e8m0::NAN {
        return (0x7F, false);
    }
    rescale(Element::E2M1.decode(code), i32::from(source) - i32::from(target))
}

/// [`lift_code`] for all 16 codes at once, with bit `c` of the mask set where code `c` changed: a
/// block's whole conversion is one look-up in this table.
pub fn lift_table(source: u8, target: u8) -> ([u8; 16], u16) {
    let mut changed = 0u16;
    let table = std::array::from_fn(|c| {
        let (code, differs) = lift_code(c as u8, source, target);
        changed |= u16::from(differs) << c;
        code
    });
    (table, changed)
}

/// An E4M3 code whose scale grows by `octaves` powers of two: the exponent goes down, nearest-even
/// into the subnormals, at last a signed zero. A NaN stays the same NaN. Also whether the value
/// changed.
#[inline]
pub fn shift_e4m3(code: u8, octaves: u32) -> (u8, bool) {
    let value = Element::E4M3.decode(code);
    if value.is_nan() {
        return (code, false);
    }
    rescale(value, -(octaves.min(64) as i32))
}

/// [`shift_e4m3`] from the scale byte `source` to `target`; a NaN source (0xFF) gives 0x7F. A
/// `target` below `source` raises the exponent instead, saturating.
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

/// `value · 2^octaves` as E4M3. Past ±32 octaves nothing differs any more: every non-zero E2M1 or
/// E4M3 value has long saturated or vanished.
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
    fn a_lift_is_exact_within_14_octaves_and_no_further() {
        let inexact = |below: u8| {
            let target = lift_target([200, 200 - below].into_iter());
            (0..16).filter(|&code| lift_code(code, 200 - below, target).1).count()
        };
        assert!((0..=14).all(|below| inexact(below) == 0));
        assert!(inexact(15) > 0);
    }
}
