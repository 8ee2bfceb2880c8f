//! What every format owes: each code under each scale is the number that its record says; encoding takes a code's value back to it, takes
//! any value to the nearest code, and keeps their order.

use nibble_formats::{BlockScale, Codec, Element, Format, Rounding, Scale, ScaleKind, ScaleNumber, amax};

/// Every block format under each of its rules, rounded to nearest.
fn codecs() -> Vec<Codec> {
    let blocks = Format::ALL.into_iter().filter(|format| format.is_block());
    blocks
        .flat_map(|format| {
            format.spec().rules.iter().map(move |&rule| {
                let codec = Codec::new(format, rule, format.spec().rounding).unwrap();
                if codec.scale_kind().has_tensor_scale() { codec.for_tensor(3.5 * 448.0) } else { codec }
            })
        })
        .collect()
}

fn all_codes(element: Element) -> impl Iterator<Item = u8> {
    0..=(0xFF >> (8 - element.code_bits()))
}

/// Every record of one byte, every first byte of a hierarchy with four patterns of the other bits; singles from all binades.
fn records(kind: ScaleKind) -> Vec<Scale> {
    match kind.levels() {
        [] => vec![Scale(0)],
        [first] if first.number == ScaleNumber::F32 => {
            (0..=255u64).map(|exponent| Scale(exponent << 23 | 0x0012_3456)).collect()
        }
        [_] => (0..=255).map(Scale::byte).collect(),
        _ => {
            let bits = [0, 0xFFFF_FFFF_FFFF_FF00, 0x789A_BCDE_1234_5600, 0xA5F0_0F00];
            (0..=255u64).flat_map(|byte| bits.map(|bits| Scale(byte | bits))).collect()
        }
    }
}

/// The multiplier by the definition of the numbers, in F64.
fn multiplier(kind: ScaleKind, record: Scale, i: usize, block: usize) -> f64 {
    let (mut product, mut at) = (1.0, 0);
    for level in kind.levels() {
        let share = i * level.count as usize / block.min(1 << 30);
        let bits = record.0 >> (at + level.number.bits() * share as u32);
        product *= match level.number {
            ScaleNumber::F32 => f64::from(f32::from_bits(bits as u32)),
            ScaleNumber::Bit => 1.0 + (bits & 1) as f64,
            ScaleNumber::E8m0 if bits & 0xFF == 0xFF => f64::NAN,
            ScaleNumber::E8m0 => 2f64.powi((bits & 0xFF) as i32 - 127),
            ScaleNumber::E6m2 if bits & 0xFF == 0xFF => f64::NAN,
            ScaleNumber::E6m2 => (1.0 + (bits & 3) as f64 / 4.0) * 2f64.powi((bits >> 2 & 63) as i32 - 48),
            ScaleNumber::E4m3 => f64::from(Element::E4M3.decode(bits as u8)),
            ScaleNumber::UnsignedE4m3 => f64::from(Element::E4M3.decode(bits as u8 & 0x7F)),
        };
        at += level.number.bits() * level.count;
    }
    product
}

#[test]
fn every_code_under_every_scale_is_what_the_record_says() {
    for codec in codecs().into_iter().filter(|codec| codec.format().spec().codec.decodes_by_levels()) {
        let (kind, block) = (codec.scale_kind(), codec.format().spec().block);
        for record in records(kind) {
            for code in all_codes(codec.element()) {
                for i in [0, 5, 11, block.min(128) - 1] {
                    let got = codec.decode(code, i, record);
                    let by = multiplier(kind, record, i, block);
                    // Two levels may be more than an F32 holds, of no block of F32 numbers.
                    if by > f64::from(f32::MAX) {
                        continue;
                    }
                    let exact = f64::from(codec.element().decode(code)) * by;
                    let mut want = exact as f32;
                    if kind.has_tensor_scale() {
                        want *= codec.tensor_scale();
                    }
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{codec:?} {record:?} {code:#x} at {i}: {got:e}, not {want:e}");
                }
            }
        }
    }
}

/// What is done to the values of a block at once is what is done to each of them.
#[test]
fn several_values_at_once_are_as_one_by_one() {
    for codec in codecs() {
        let (kind, params, format) = (codec.scale_kind(), codec.params(), codec.format().spec().codec);
        let whole = codec.format().spec().block.min(130);
        for len in [whole, whole - 1, 5, 1] {
            let mut multipliers = vec![0.0; len];
            for record in records(kind) {
                format.multipliers(params, record, &mut multipliers);
                for (i, got) in multipliers.iter().enumerate() {
                    let want = format.multiplier(params, i, record);
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{codec:?} {record:?} at {i} of {len}: {got:e}, not {want:e}");
                }
            }
        }
        for (mut x, _) in blocks(&codec) {
            let extremes = [f32::MAX, -f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), -0.0, 0.0, 2.5, -1.75];
            let places = x.len() / extremes.len();
            for (at, value) in extremes.into_iter().enumerate() {
                // Not too large for the blocks' other values to count, but in every second one.
                x[at * places] = if value.abs() > 1.0 && x[0].to_bits() & 1 == 1 { 0.375 } else { value };
            }
            for len in [x.len(), x.len() - 1, 3] {
                let scale = codec.block_scale(&x[..len], amax(&x[..len]));
                let mut scaled = x[..len].to_vec();
                format.scale_values(params, &mut scaled, scale);
                for (i, got) in scaled.iter().enumerate() {
                    let want = format.scaled(params, x[i], i, scale);
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{codec:?} {scale:?} at {i} of {len}: {got:e}, not {want:e}");
                }
            }
        }
    }
}

/// Blocks with a spread of values, and the scale that the codec gives each.
fn blocks(codec: &Codec) -> Vec<(Vec<f32>, BlockScale)> {
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let len = codec.format().spec().block.min(128);
    (0..40)
        .map(|n| {
            let unit = 2f32.powi(n % 9 - 2);
            let x: Vec<f32> = (0..len).map(|_| random() * unit * 4f32.powf(random() * 4.0)).collect();
            let scale = codec.block_scale(&x, amax(&x));
            (x, scale)
        })
        .collect()
}

#[test]
fn a_codes_value_is_encoded_as_that_code() {
    for codec in codecs() {
        for (x, scale) in blocks(&codec).into_iter().filter(|(_, scale)| !scale.is_nan()) {
            for i in 0..x.len() {
                for code in all_codes(codec.element()) {
                    let value = codec.decode(code, i, scale.record);
                    let unused = codec.element() == Element::INT8 && code == 0x80;
                    if !value.is_finite() || unused || (value == 0.0 && !codec.element().is_zero(code)) {
                        continue;
                    }
                    let again = codec.encode(value, i, scale, 0);
                    assert_eq!(again, code, "{codec:?} {scale:?} at {i}: {value:e}");
                }
            }
        }
    }
}

#[test]
fn values_go_to_the_nearest_code_and_keep_their_order() {
    for codec in codecs() {
        for (x, scale) in blocks(&codec).into_iter().filter(|(_, scale)| !scale.is_nan()) {
            for i in (0..x.len()).step_by(7) {
                // The integer that is never written has no counterpart.
                let written = |code: &u8| codec.element() != Element::INT8 || *code != 0x80;
                let codes = all_codes(codec.element()).filter(written);
                let mut values: Vec<f32> = codes.map(|code| codec.decode(code, i, scale.record)).collect();
                values.retain(|value| value.is_finite());
                let largest = values.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
                let mut last = f32::NEG_INFINITY;
                for n in -300..=300 {
                    let x = largest * 1.2 * n as f32 / 300.0;
                    let value = codec.decode(codec.encode(x, i, scale, 0), i, scale.record);
                    assert!(
                        value >= last,
                        "{codec:?} {scale:?} at {i}: {x:e} gives {value:e} after {last:e}"
                    );
                    last = value;
                    let error = f64::from((value - x).abs());
                    let best = values.iter().map(|v| f64::from((v - x).abs())).fold(f64::MAX, f64::min);
                    // Multipliers are rounded to BF16 in HiF4, to F32 in others; two codes that lie as near are both right.
                    let slack = f64::from(x.abs()) * if codec.format() == Format::Hif4 { 0.01 } else { 1e-6 };
                    assert!(error <= best + slack, "{codec:?} {scale:?} at {i}: {x:e} gives {value:e}");
                }
            }
        }
    }
}

#[test]
fn a_blocks_scale_lets_its_largest_value_in() {
    for codec in codecs() {
        // Rules that cut the largest values off, by at most a quarter.
        let cut = 0.25;
        for (x, scale) in blocks(&codec).into_iter().filter(|(_, scale)| !scale.is_nan()) {
            let most = amax(&x).unwrap();
            let reach = all_codes(codec.element())
                .flat_map(|code| (0..x.len()).map(move |i| (code, i)))
                .map(|(code, i)| codec.decode(code, i, scale.record))
                .filter(|value| value.is_finite())
                .fold(0.0, f32::max);
            assert!(reach >= most * (1.0 - cut), "{codec:?} {scale:?}: {most} beyond {reach}");
        }
    }
}

#[test]
fn stochastic_rounding_is_unbiased_in_every_format() {
    for codec in codecs() {
        let codec = Codec::new(codec.format(), codec.rule(), Rounding::Stochastic).unwrap();
        let codec = if codec.scale_kind().has_tensor_scale() { codec.for_tensor(6.0) } else { codec };
        let mut x = [0.3f32; 64];
        x[63] = 6.0;
        let x = &x[64 - codec.format().spec().block.min(64)..];
        let scale = codec.block_scale(x, amax(x));
        let value = |r: u16| f64::from(codec.decode(codec.encode(0.3, 0, scale, r), 0, scale.record));
        let mean = (0..=u16::MAX).map(value).sum::<f64>() / 65536.0;
        // The reciprocal of an E6M2 number is a BF16.
        let tolerance = if codec.format() == Format::Hif4 { 0.3 / 256.0 } else { 1e-4 };
        assert!((mean - 0.3).abs() < tolerance, "{codec:?}: {mean}");
    }
}
