use super::oracle::elements;
use nibble_formats::{Element, ScaleRule, e8m0};

/// All finite BF16 magnitudes, and singles around each power of two and each multiple of `max` by one.
fn amaxes(element: Element) -> Vec<f32> {
    let mut all: Vec<f32> = (0..0x7F80u32).map(|b| f32::from_bits(b << 16)).collect();
    for exponent in -149..=127 {
        for base in [1.0, f64::from(element.max()), 1.75, 1.25, 1.5, 1.875] {
            let x = (base * 2f64.powi(exponent)) as f32;
            if x > 0.0 && x.is_finite() {
                all.extend([-1i32, 0, 1].map(|d| f32::from_bits(x.to_bits().wrapping_add_signed(d))));
            }
        }
    }
    all.retain(|x| x.is_finite());
    all.extend((0..0x7F80_0000u32).step_by(10_007).map(f32::from_bits));
    all
}

/// ⌊log2 x⌋ by comparison, for x > 0.
fn floor_log2(x: f64) -> i32 {
    let mut k = x.log2().floor() as i32;
    while 2f64.powi(k) > x {
        k -= 1;
    }
    while 2f64.powi(k + 1) <= x {
        k += 1;
    }
    k
}

#[test]
fn decode_and_inv_are_exact_powers_of_two() {
    for b in 0..=254u8 {
        assert_eq!(f64::from(e8m0::decode(b)), 2f64.powi(i32::from(b) - 127));
        assert_eq!(f64::from(e8m0::inv(b)), 2f64.powi(127 - i32::from(b)));
    }
    assert!(e8m0::decode(0xFF).is_nan() && e8m0::inv(0xFF).is_nan());
    assert!(e8m0::decode(0) > 0.0);
}

#[test]
fn rceil_is_the_smallest_power_of_two_that_does_not_saturate() {
    for element in elements() {
        let max = f64::from(element.max());
        for amax in amaxes(element) {
            let b = e8m0::encode(ScaleRule::Rceil, element, amax);
            let fits = |b: u8| f64::from(amax) <= max * 2f64.powi(i32::from(b) - 127);
            let largest = b == 254 && element.emax() == 0; // there is no scale beyond
            assert!(b < 255 && (fits(b) || largest), "{element}: {amax:e} -> {b}");
            assert!(b == 0 || !fits(b - 1), "{element}: {amax:e} -> {b}, but {} would do", b - 1);
        }
    }
}

#[test]
fn floor_ceil_and_even_follow_their_formulas() {
    for element in elements() {
        for amax in amaxes(element).into_iter().filter(|&a| a >= f32::MIN_POSITIVE) {
            let x = f64::from(amax);
            let byte = |log2: i32| (log2 - element.emax() + 127).clamp(0, 254) as u8;
            let encode = |rule| e8m0::encode(rule, element, amax);
            let floor = floor_log2(x);
            assert_eq!(encode(ScaleRule::Floor), byte(floor), "{element} {amax:e}");
            let exact = 2f64.powi(floor) == x;
            assert_eq!(encode(ScaleRule::Ceil), byte(floor + i32::from(!exact)), "{element} {amax:e}");
            // Rounded to 1 + mantissa bits, ties up.
            let step = 2f64.powi(floor - element.mantissa_bits() as i32);
            let rounded = floor_log2((x / step + 0.5).floor() * step);
            let want = if rounded == 128 { 0xFF } else { byte(rounded) };
            assert_eq!(encode(ScaleRule::Even), want, "{element} {amax:e}");
        }
    }
}

#[test]
fn zero_subnormals_and_the_nonfinite() {
    for element in elements() {
        for rule in ScaleRule::ALL {
            // Just below 2⁻¹²⁶ does not fit the smallest scale of an element that ends below 2.
            let below_normal = f32::from_bits(if element.emax() > 0 { 0x007F_FFFF } else { 0x0040_0000 });
            for tiny in [0.0, -0.0, f32::from_bits(1), below_normal] {
                assert_eq!(e8m0::encode(rule, element, tiny), 0, "{element} {rule} {tiny:e}");
            }
            for bad in [
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::NAN,
                f32::from_bits(0x7F80_0001),
                f32::from_bits(u32::MAX),
            ] {
                assert_eq!(e8m0::encode(rule, element, bad), 0xFF, "{element} {rule} {bad}");
            }
        }
    }
}

#[test]
fn subnormal_magnitudes_above_the_smallest_scale_of_integers() {
    let byte = |rule, bits| e8m0::encode(rule, Element::INT8, f32::from_bits(bits));
    for (rule, bytes) in
        [(ScaleRule::Floor, [0, 0, 0]), (ScaleRule::Rceil, [0, 0, 1]), (ScaleRule::Ceil, [0, 1, 1])]
    {
        assert_eq!([0x0040_0000, 0x0040_0001, 0x007F_0001].map(|bits| byte(rule, bits)), bytes, "{rule}");
    }
    assert_eq!(byte(ScaleRule::Rceil, 0x007F_0000), 0); // 127/64 · 2⁻¹²⁷
}

/// The table that tells the rules apart (scale exponents without bias).
#[test]
fn rules_differ_where_they_are_known_to() {
    use ScaleRule::{Ceil, Even, Floor, Rceil};
    let check = |element, amax: f32, want: [i32; 4]| {
        let got = [Floor, Ceil, Rceil, Even].map(|r| i32::from(e8m0::encode(r, element, amax)) - 127);
        assert_eq!(got, want, "{element} amax {amax}");
    };
    let e2m1 = [
        (4.0, [0, 0, 0, 0]),
        (5.0, [0, 1, 0, 0]),
        (6.0, [0, 1, 0, 0]),
        (6.03125, [0, 1, 1, 0]),
        (6.96875, [0, 1, 1, 0]),
        (7.0, [0, 1, 1, 1]),
        (8.0, [1, 1, 1, 1]),
    ];
    let e4m3 = [
        (256.0, [0, 0, 0, 0]),
        (300.0, [0, 1, 0, 0]),
        (448.0, [0, 1, 0, 0]),
        (450.0, [0, 1, 1, 0]),
        (480.0, [0, 1, 1, 0]),
        (496.0, [0, 1, 1, 1]),
        (512.0, [1, 1, 1, 1]),
    ];
    e2m1.into_iter().for_each(|(amax, want)| check(Element::E2M1, amax, want));
    e4m3.into_iter().for_each(|(amax, want)| check(Element::E4M3, amax, want));
}

#[test]
fn names_go_there_and_back() {
    for rule in ScaleRule::ALL {
        assert_eq!(rule.to_string().parse(), Ok(rule));
    }
    let e = "round".parse::<ScaleRule>().unwrap_err().to_string();
    assert_eq!(
        e,
        "unknown scale rule `round`: expected one of amax, floor, rceil, ceil, even, tensor-amax, cann"
    );
}
