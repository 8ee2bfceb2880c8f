use super::oracle::{Oracle, elements, inputs, magnitudes, with_sign};
use nibble_formats::{Element, Rounding};

#[test]
fn decode_gives_the_values_of_the_fields() {
    for element in elements() {
        let values = magnitudes(element);
        for (code, &v) in values.iter().enumerate() {
            assert_eq!(f64::from(element.decode(code as u8)), v, "{element} {code:#x}");
            let negative = element.decode(with_sign(element, code, true));
            assert_eq!(f64::from(negative), -v, "{element} -{code:#x}");
            // Two's complement alone has one zero.
            assert_eq!(negative.is_sign_negative(), code > 0 || element != Element::INT8);
            assert_eq!(element.is_zero(code as u8), code == 0);
            assert_eq!(element.is_zero(with_sign(element, code, true)), code == 0);
        }
        assert_eq!(f64::from(element.max()), values[values.len() - 1]);
        assert_eq!(usize::from(element.max_code()), values.len() - 1);
        assert_eq!(element.emax(), element.max().log2().floor() as i32);
    }
    for code in [0x7F, 0xFF] {
        assert!(Element::E4M3.decode(code).is_nan());
    }
    assert_eq!(Element::INT8.decode(0x80), -2.0);
    assert!(!Element::INT8.is_zero(0x80));
    assert_eq!(Element::E5M2.decode(0x7C), f32::INFINITY);
    assert_eq!(Element::E5M2.decode(0xFC), f32::NEG_INFINITY);
    for code in [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF] {
        assert!(Element::E5M2.decode(code).is_nan());
    }
}

#[test]
fn every_code_survives_decode_and_encode() {
    for element in elements() {
        for code in 0..=(0xFFu8 >> (8 - element.code_bits())) {
            let value = element.decode(code);
            let unused = element == Element::INT8 && code == 0x80;
            if value.is_finite() && !unused {
                for rounding in [Rounding::NearestEven, Rounding::NearestAway, Rounding::Stochastic] {
                    assert_eq!(element.encode_rounded(value, rounding, 0), code, "{element} {code:#x}");
                }
            }
        }
    }
}

#[test]
fn nearest_even_equals_the_search_on_all_bf16_and_all_midpoints() {
    for element in elements() {
        let oracle = Oracle::new(element);
        for x in inputs(element) {
            let (got, want) = (element.encode(x), oracle.nearest_even(f64::from(x)));
            assert_eq!(got, want, "{element}: {x:e} ({:#010x})", x.to_bits());
        }
    }
}

#[test]
fn nearest_away_equals_the_search_on_all_bf16_and_all_midpoints() {
    for element in elements() {
        let oracle = Oracle::new(element);
        for x in inputs(element) {
            let got = element.encode_rounded(x, Rounding::NearestAway, 0);
            assert_eq!(got, oracle.nearest_away(f64::from(x)), "{element}: {x:e}");
        }
    }
}

#[test]
fn stochastic_rounding_goes_up_for_exactly_the_promised_share_of_random_values() {
    for element in elements() {
        let (oracle, values) = (Oracle::new(element), magnitudes(element));
        for x in inputs(element) {
            let ups = oracle.ups_of_65536(f64::from(x));
            let low = oracle.floor(f64::from(x)) as u8;
            let magnitude = |r| {
                let code = element.encode_sr(x, r);
                values.iter().position(|v| *v == f64::from(element.decode(code).abs())).unwrap() as u8
            };
            if ups > 0 {
                assert_eq!(magnitude((ups - 1) as u16), low + 1, "{element}: {x:e}");
            }
            if ups < 65536 {
                assert_eq!(magnitude(ups as u16), low, "{element}: {x:e}");
            }
            assert_eq!(magnitude(u16::MAX), low, "{element}: {x:e}");
            let value = element.decode(element.encode_sr(x, 9));
            let has_sign = value != 0.0 || element != Element::INT8;
            assert!(!has_sign || value.is_sign_negative() == x.is_sign_negative(), "{element}: {x:e}");
        }
    }
}

#[test]
fn dither_of_zero_is_nearest_even_and_of_a_half_is_unbiased() {
    let (none, half) = (Rounding::dither(0.0).unwrap(), Rounding::dither(0.5).unwrap());
    for element in elements() {
        let oracle = Oracle::new(element);
        for (i, x) in inputs(element).into_iter().enumerate() {
            let r = (i * 40503) as u16;
            assert_eq!(element.encode_rounded(x, none, r), element.encode(x), "{element}: {x:e}");
        }
        for x in [0.3, 1.0, 1.1, 2.25, 5.0] {
            let low = oracle.floor(x) as u8;
            let ups = (0..=u16::MAX).filter(|&r| element.encode_rounded(x as f32, half, r) > low).count();
            let want = f64::from(oracle.ups_of_65536(x));
            assert!((ups as f64 - want).abs() <= 1.0, "{element}: {x}: {ups} of {want}");
        }
    }
}

/// The largest d of δ = ½ is ½ − 2⁻¹⁷: with a fraction of 2⁻¹⁷ it is a tie, which the last bit of a
/// single just above that breaks although it lies below the 32 bits that are kept.
#[test]
fn dither_breaks_ties_by_what_was_cut_off() {
    let half = Rounding::dither(0.5).unwrap();
    let tie = 0.5 * 2f32.powi(-17);
    assert_eq!(Element::E2M1.encode_rounded(tie, half, u16::MAX), 0);
    assert_eq!(Element::E2M1.encode_rounded(tie.next_up(), half, u16::MAX), 1);
}

#[test]
fn a_quarter_dither_moves_only_values_within_a_quarter_step_of_a_midpoint() {
    let quarter = Rounding::dither(0.25).unwrap();
    let codes = |x| (0..=u16::MAX).map(move |r| Element::E2M1.encode_rounded(x, quarter, r));
    assert!(codes(4.4).all(|c| c == 6)); // 0.2 of the step from 4 to 6
    assert!(codes(5.6).all(|c| c == 7));
    let ups = codes(4.75).filter(|&c| c == 7).count(); // fraction 3/8: up iff d ≥ 1/8, a quarter of (−¼, ¼)
    assert!((16383..=16385).contains(&ups), "{ups}");
}

#[test]
fn saturation_nan_and_the_sign_of_zero() {
    let roundings =
        [Rounding::NearestEven, Rounding::NearestAway, Rounding::Stochastic, Rounding::dither(0.5).unwrap()];
    for element in elements() {
        let (most, sign) = (with_sign(element, element.max_code().into(), true), element.encode(-0.0));
        assert_eq!(sign, if element == Element::INT8 { 0 } else { 1u8 << (element.code_bits() - 1) });
        for rounding in roundings {
            let encode = |x| element.encode_rounded(x, rounding, 0);
            for big in [element.max(), f32::MAX, f32::INFINITY] {
                assert_eq!(encode(big), element.max_code());
                assert_eq!(encode(-big), most);
            }
            assert_eq!((encode(0.0), encode(-0.0)), (0, sign));
            for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7F80_0001)] {
                assert_eq!(encode(nan), element.nan_code());
            }
        }
        // The smallest single is far below half a step: zero with its sign, never up by chance.
        assert_eq!(element.encode(-f32::from_bits(1)), sign);
        assert_eq!(element.encode_sr(-f32::from_bits(1), 0), sign);
    }
}
