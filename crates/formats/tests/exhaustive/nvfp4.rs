//! The scale of an NVFP4 block that is under no scale of its tensor, against whole numbers.

use super::oracle::magnitudes;
use nibble_formats::{Codec, Element, Format, Rounding, ScaleRule, bf16};

fn byte(amax: f32) -> u8 {
    let codec = Codec::new(Format::Nvfp4, ScaleRule::Amax, Rounding::NearestEven).unwrap();
    codec.block_scale(&[amax], Some(amax)).record.0 as u8
}

/// amax / 6 rounded to a single in whole numbers, for amax whose quotient is a normal number.
fn sixth(amax: f32) -> f32 {
    let bits = u64::from(amax.to_bits());
    let mantissa = bits & 0x7F_FFFF | 0x80_0000;
    // 2²² ≤ mantissa · 2ⁿ / 6 with the least n that makes a quotient of 24 bits.
    let n = if mantissa >= 0xC0_0000 { 2 } else { 3 };
    let (quotient, rest) = ((mantissa << n) / 6, (mantissa << n) % 6);
    let up = rest > 3 || rest == 3 && quotient & 1 == 1;
    f32::from_bits(((((bits >> 23) - n) << 23) + ((quotient + u64::from(up)) - 0x80_0000)) as u32)
}

#[test]
fn a_block_just_below_a_tie_of_scales_gets_the_lower_one() {
    let amax = f32::from_bits(0x43E3_FFFF);
    assert_eq!(byte(amax), 105);
    // A product with f32(1/6) is the tie itself, whose even neighbour is above.
    assert_eq!(Element::E4M3.encode(amax * (1.0 / 6.0)), 106);
    assert_eq!(byte(f32::from_bits(0x43E4_0000)), 106);
}

/// Every single of two binades, in which all mantissas are; singles around every tie of scales; and all over.
#[test]
fn scales_are_the_quotient_by_six() {
    let scales = magnitudes(Element::E4M3);
    let ties = scales.windows(2).map(|pair| (6.0 * (pair[0] + pair[1]) / 2.0) as f32);
    let near = ties.flat_map(|tie| (-3..=3).map(move |d| tie.to_bits().wrapping_add_signed(d)));
    let over = (0x3000_0000..0x7F80_0000u32).step_by(10_007);
    let mut checked = 0;
    for bits in (0x4340_0000..0x4440_0000u32).chain(near).chain(over) {
        let amax = f32::from_bits(bits);
        let want = sixth(amax);
        assert!(
            (f64::from(want) - f64::from(amax) / 6.0).abs() <= f64::from(want) * 2f64.powi(-24),
            "{amax:e}"
        );
        assert_eq!(byte(amax), Element::E4M3.encode(want), "{amax:e} ({bits:#x})");
        checked += 1;
    }
    assert!(checked > 1 << 24);
}

/// What a GPU computes instead of a division: of singles a product with f32(1/6) and its remainder, of BF16 numbers the product alone.
#[test]
fn short_ways_to_the_quotient_have_its_scales() {
    const SIXTH: f32 = 1.0 / 6.0;
    for bits in (0x4340_0000..0x4440_0000u32).chain((0..0x7F80_0000).step_by(10_007)) {
        let amax = f32::from_bits(bits);
        let near = amax * SIXTH;
        let corrected = (-6f32).mul_add(near, amax).mul_add(SIXTH, near);
        assert_eq!(Element::E4M3.encode(corrected), byte(amax), "{amax:e} ({bits:#x})");
        if amax >= 1e-30 {
            assert_eq!(corrected.to_bits(), (amax / 6.0).to_bits(), "{amax:e} ({bits:#x})");
        }
    }
    for bits in 0..0x7F80 {
        let amax = bf16::from_bits(bits).to_f32();
        assert_eq!(Element::E4M3.encode(amax * SIXTH), byte(amax), "{amax:e} ({bits:#x})");
    }
}
