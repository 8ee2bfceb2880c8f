//! Faults of published conversion code, one test each: the faulty arithmetic is emulated on a concrete
//! input, shown to go wrong there, and ours shown to be right.

use nibble_formats::{Codec, Element, Format, Lift, Rounding, Scale, ScaleRule, bf16, e8m0, shift_e4m3};

/// BF16 bits of an E2M1 code.
fn bf16_bits(code: u8) -> u16 {
    bf16::from_f32(Element::E2M1.decode(code)).to_bits()
}

/// A released row kernel moves a value by subtracting octaves from the exponent bits of its BF16 form,
/// for zeros too, then clamps to ±448.
fn wrapping_lift(code: u8, octaves_below_max: u16) -> f32 {
    let bits = bf16_bits(code).wrapping_sub(octaves_below_max.wrapping_sub(6) << 7);
    bf16::from_bits(bits).to_f32().clamp(-448.0, 448.0)
}

#[test]
fn zero_wraps_to_448_seven_octaves_below_the_largest_scale() {
    let (largest, mine) = (130u8, 123u8);
    assert_eq!(wrapping_lift(0x0, 7), -448.0, "the fault: +0 becomes -448");
    assert_eq!(wrapping_lift(0x8, 7), 448.0, "the fault: -0 becomes +448");
    assert_eq!(wrapping_lift(0x0, 6), 0.0, "six octaves are safe");

    let target = Lift::E2M1.target([largest, mine].into_iter());
    for below in 7..=254 - 124 {
        let source = largest.saturating_sub(below);
        assert_eq!(Lift::E2M1.code(0x0, source, target), (0x00, false));
        assert_eq!(Lift::E2M1.code(0x8, source, target), (0x80, false));
    }
    // Codes other than zero it gets right, and so do we.
    for code in (1..8).chain(9..16) {
        let ours = Element::E4M3.decode(Lift::E2M1.code(code, mine, target).0);
        assert_eq!(ours, wrapping_lift(code, 7));
    }
}

#[test]
fn the_column_kernel_loses_signs() {
    let masked = |code: u8, below: u16| {
        let bits = bf16_bits(code).wrapping_sub(below.wrapping_sub(6) << 7) & 0x7FFF;
        bf16::from_bits(bits).to_f32().min(448.0)
    };
    assert_eq!(masked(0xE, 0), 256.0, "the fault: -4 under the largest scale becomes +4 · 2⁶");
    assert_eq!(masked(0x0, 7), 448.0, "the fault: zeros become +448");

    let target = Lift::E2M1.target([127].into_iter());
    assert_eq!(Element::E4M3.decode(Lift::E2M1.code(0xE, 127, target).0), -256.0);
    for code in 8..16 {
        assert_ne!(Lift::E2M1.code(code, 120, target).0 & 0x80, 0, "every negative code stays negative");
    }
}

#[test]
fn the_printed_algorithm_turns_zero_into_a_half_and_a_half_into_three_quarters() {
    // Fields sign | E | M; E is re-biased from 1 to 7 and moved by 6 − d octaves; an implicit one is
    // taken for granted.
    let printed = |code: u8, below: u8| {
        let (sign, e, m) = (code >> 3, (code >> 1) & 3, code & 1);
        Element::E4M3.decode(sign << 7 | (e + 6 + 6 - below) << 3 | m << 2)
    };
    // Six octaves below the largest scale the lifted scale equals the block's own.
    assert_eq!(printed(0x0, 6), 0.5, "the fault: 0 becomes 0.5");
    assert_eq!(printed(0x1, 6), 0.75, "the fault: 0.5 becomes 0.75");
    assert_eq!(printed(0x0, 0), 32.0, "the fault grows with the scale");

    let target = Lift::E2M1.target([127, 121].into_iter());
    for code in 0..16 {
        let ours = Element::E4M3.decode(Lift::E2M1.code(code, 121, target).0);
        assert_eq!(ours.to_bits(), Element::E2M1.decode(code).to_bits(), "the value itself");
        if code & 7 >= 2 {
            assert_eq!(printed(code, 6), ours, "with an implicit one the algorithm is right");
        }
    }
}

#[test]
fn the_shared_scale_byte_wraps_below_six() {
    let bytes = [5u8, 3, 0, 0];
    assert_eq!(bytes.iter().max().unwrap().wrapping_sub(6), 255, "the fault: 5 − 6 is 255, a NaN");
    assert_eq!(Lift::E2M1.target(bytes.into_iter()), 0);
    // 6 · 2^(5 − 127) under byte 0: 6 · 2⁵ = 192.
    assert_eq!(Element::E4M3.decode(Lift::E2M1.code(0x7, 5, 0).0), 192.0);
}

#[test]
fn a_nan_is_masked_and_an_infinity_shrinks_to_three() {
    let mut x = [1.0f32; 32];
    x[3] = f32::NAN;
    // A maximum that drops NaN, then a clamp that does.
    let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let inv = e8m0::inv(e8m0::encode(ScaleRule::Rceil, Element::E2M1, amax));
    #[expect(clippy::manual_clamp, reason = "`clamp` would keep the NaN; the fault is that this does not")]
    let code = Element::E2M1.encode((x[3] * inv).max(-6.0).min(6.0));
    assert_eq!(code, 0xF, "the fault: a NaN becomes -6 times a healthy scale");

    let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let mut codes = [9; 32];
    let made = codec.quantize_block(&x, |_| 0, &mut codes);
    assert_eq!((made, codes), ((Scale::byte(0xFF), true), [0; 32]));

    // An infinite amax wrapped the byte to 126 and both infinities decoded to -6 · 2⁻¹.
    assert_eq!(Element::E2M1.decode(0xF) * e8m0::decode(126), -3.0, "the fault");
    for infinity in [f32::INFINITY, f32::NEG_INFINITY] {
        x[3] = infinity;
        let (scale, nonfinite) = codec.quantize_block(&x, |_| 0, &mut codes);
        assert!(nonfinite && codec.decode(codes[3], 3, scale).is_nan());
        assert!(codec.decode(codes[0], 0, scale).is_nan(), "and no neighbour passes for finite");
    }
}

#[test]
fn scale_bytes_0_and_255_decode_as_zero_and_infinity() {
    let shifted = |byte: u8| bf16::from_bits(u16::from(byte) << 7).to_f32();
    assert_eq!((shifted(0), shifted(255)), (0.0, f32::INFINITY), "the fault");
    assert_eq!(e8m0::decode(0), 2f32.powi(-127));
    assert!(e8m0::decode(255).is_nan());
    assert_eq!(Lift::E2M1.code(0x7, 255, 121).0, 0x7F, "a NaN block is lifted to NaN codes");
}

/// A released transpose lowers the exponent field by `octaves`; below 1 it writes 0 and leaves the
/// mantissa where it was; it writes 0 for subnormal sources.
fn unshifted_transpose(code: u8, octaves: u8) -> u8 {
    let (sign, e, m) = (code & 0x80, (code >> 3) & 15, code & 7);
    match e {
        0 => 0,
        _ => sign | e.saturating_sub(octaves) << 3 | m,
    }
}

#[test]
fn the_transpose_leaves_subnormal_mantissas_unshifted() {
    // 2⁻⁶ is the smallest normal; half of it is the subnormal 4 · 2⁻⁹.
    assert_eq!(Element::E4M3.decode(unshifted_transpose(0x08, 1)), 0.0, "the fault: 2⁻⁶ / 2 becomes 0");
    assert_eq!(shift_e4m3(0x08, 1), (0x04, false));
    assert_eq!(Element::E4M3.decode(0x04), 2f32.powi(-7));

    // 1.875 · 2⁻⁶, four octaves down, is 0.9375 of the smallest subnormal; the fault makes it 7.
    assert_eq!(unshifted_transpose(0x0F, 4), 0x07, "the fault");
    assert_eq!(shift_e4m3(0x0F, 4), (0x01, true));
    assert_eq!(unshifted_transpose(0x0F, 40), 0x07, "the fault: never vanishes");
    assert_eq!(shift_e4m3(0x0F, 40), (0x00, true));

    let error = |code: u8, octaves: u8, got: u8| {
        let exact = f64::from(Element::E4M3.decode(code)) * 2f64.powi(-i32::from(octaves));
        (f64::from(Element::E4M3.decode(got)) - exact).abs()
    };
    let pairs = || (0..0x7Fu8).flat_map(|code| (0..32u8).map(move |octaves| (code, octaves)));
    let worst = |f: &dyn Fn(u8, u8) -> u8| pairs().map(|(c, k)| error(c, k, f(c, k))).fold(0.0, f64::max);
    assert!(worst(&unshifted_transpose) > 6.9 * 2f64.powi(-9), "the fault: up to 7 steps");
    assert_eq!(worst(&|c, k| shift_e4m3(c, u32::from(k)).0), 0.5 * 2f64.powi(-9), "ours: half a step");
}

#[test]
fn the_transpose_flushes_subnormals_and_makes_nan_finite() {
    let flushed =
        (0..=255u8).filter(|&c| !matches!(c, 0x00 | 0x80) && unshifted_transpose(c, 0) != c).count();
    assert_eq!(flushed, 14, "the fault: 14 codes change although nothing was shifted");
    assert_eq!(unshifted_transpose(0x80, 0), 0, "the fault: -0 loses its sign");
    assert_eq!(Element::E4M3.decode(unshifted_transpose(0x7F, 1)), 240.0, "the fault: NaN becomes 240");

    for code in 0..=255u8 {
        assert_eq!(shift_e4m3(code, 0), (code, false));
    }
    for octaves in [1, 7, 200] {
        assert_eq!(shift_e4m3(0x7F, octaves), (0x7F, false));
        assert_eq!(shift_e4m3(0xFF, octaves), (0xFF, false));
    }
}

#[test]
fn a_float_logarithm_misses_the_first_value_above_a_power_of_two() {
    // 2^⌈log2(amax / 6)⌉ with the logarithm of a single: just above 6 · 2¹⁰⁰ it does not round up, and
    // the largest element saturates.
    let amax = f32::from_bits((6.0 * 2f32.powi(100)).to_bits() + 1);
    let quotient = f64::from(amax / 6.0);
    let by_logarithm = (quotient.log2() as f32).ceil() as i32 + 127;
    assert_eq!(by_logarithm, 227, "the fault");
    assert!(f64::from(amax) > 6.0 * f64::from(e8m0::decode(227)));
    assert_eq!(e8m0::encode(ScaleRule::Rceil, Element::E2M1, amax), 228);
}
