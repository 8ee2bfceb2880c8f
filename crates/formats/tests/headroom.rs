//! What headroom is for: no code saturates, whatever mantissa a largest magnitude has, so that random rounding has no bias. Of decoded values alone, in F64.

use nibble_formats::{
    Candidates, Codec, Correction, Format, Headroom, Outer, Rounding, Scale, ScaleRule, Scaling, Thresholds,
    amax,
};

/// By so much of a value an F32 operation or three may be off.
const LAST_BITS: f64 = 1e-6;

fn stochastic(format: Format, rule: ScaleRule, scaling: Scaling) -> Codec {
    Codec::new(format, rule, Rounding::Stochastic).unwrap().with(scaling).unwrap()
}

/// Every format under every rule that has a setting without bias.
fn unbiased() -> Vec<Codec> {
    let rules = |format: Format| format.spec().rules.iter().map(move |rule| (format, *rule));
    let all = Format::ALL.into_iter().filter(|format| format.is_block()).flat_map(rules);
    all.filter_map(|(format, rule)| Some(stochastic(format, rule, Scaling::unbiased(format, rule)?)))
        .collect()
}

/// Whether one of the values comes back smaller however the dice fall: with the random bits that round up, its code stands for less. A value of
/// random bits 0 is rounded up wherever it is not a code itself.
fn saturates(codec: Codec, x: &[f32]) -> Option<f32> {
    let codec = codec.for_tensor(codec.tensor_amax(x.iter().copied()));
    under(codec, x)
}

/// The same under a scale of the tensor that is known already.
fn under(codec: Codec, x: &[f32]) -> Option<f32> {
    let mut codes = [0; 128];
    let codes = &mut codes[..x.len()];
    let (record, marked) = codec.quantize_block(x, |_| 0, codes);
    assert!(!marked, "{x:?}");
    let less = |(i, x): &(usize, &f32)| {
        let up = f64::from(codec.decode(codes[*i], *i, record)).abs();
        up < f64::from(x.abs()) * (1.0 - LAST_BITS)
    };
    x.iter().enumerate().find(less).map(|(_, x)| *x)
}

fn describe(codec: Codec) -> String {
    format!("{} {} {:?}", codec.format(), codec.rule(), codec.scaling())
}

/// (1 + m/128) · 2^e: the BF16 number.
fn number(m: u32, e: i32) -> f32 {
    f32::from_bits(((127 + e) as u32) << 23 | m << 16)
}

/// A block whose largest magnitude is `x`, at a place that goes with it; what is beside it is smaller, of many sizes.
fn block(x: f32, place: usize, len: usize) -> Vec<f32> {
    let part = |i: usize| [0.0, 0.99, 0.5, 0.26, 0.874, 1.0, 0.13, 0.61][(i * 5 + place) % 8];
    (0..len).map(|i| if i == place { x } else { -x * part(i + place / 8) }).collect()
}

/// Every BF16 mantissa, alone in its block and beside others; of F32 mantissas those around each BF16 one and many between.
#[test]
fn no_mantissa_of_a_block_saturates() {
    for codec in unbiased() {
        let len = codec.format().spec().block.min(128);
        for e in [-2, -1, 0, 1, 2, 3, 9] {
            for m in 0..128 {
                let x = number(m, e);
                let mut alone = vec![0.0; len];
                alone[m as usize % len] = x;
                let mixed = block(x, m as usize % len, len);
                for values in [&alone, &mixed] {
                    assert_eq!(saturates(codec, values), None, "{}: {x:e}", describe(codec));
                }
            }
        }
        for bits in (0x3F80_0000..0x4080_0000u32).step_by(1021) {
            let around = [bits & 0xFFFF_0000, bits, bits | 0xFFFF];
            for x in around.map(f32::from_bits) {
                let mut values = [0.0; 16];
                values[0] = x;
                assert_eq!(saturates(codec, &values), None, "{}: {x:e}", describe(codec));
            }
        }
    }
}

/// Blocks of every mantissa under tensors of every mantissa, from as large as the block to the limit of normal scales.
#[test]
fn no_mantissa_of_a_block_under_a_tensor_saturates() {
    let rule = ScaleRule::TensorAmax;
    let room = Scaling::unbiased(Format::Nvfp4, rule).unwrap();
    for outer in [Outer::Tensor, Outer::Power] {
        let codec = stochastic(Format::Nvfp4, rule, Scaling { outer, ..room });
        for (m, of_tensor) in (0..128).flat_map(|m| (0..128).map(move |of_tensor| (m, of_tensor))) {
            for e in [0, 1, 5, 11] {
                let (x, tensor) = (number(m, -e), number(of_tensor, 0));
                if x <= tensor {
                    let found = under(codec.for_tensor(tensor), &block(x, m as usize % 16, 16));
                    assert_eq!(found, None, "{outer}: {x:e} of {tensor:e}");
                }
            }
        }
    }
}

/// A sixteenth less is too little for some mantissa: what is asked for is the least.
#[test]
fn a_sixteenth_less_saturates() {
    for codec in unbiased() {
        let scaling = codec.scaling();
        let Ok(less) = Headroom::new(f64::from(scaling.headroom.factor()) - 0.0625) else { continue };
        let codec = stochastic(codec.format(), codec.rule(), Scaling { headroom: less, ..scaling });
        // A tensor's own largest block has nothing rounded off its scale.
        let codec = codec.for_tensor(1.9);
        let one = |x: f32| under(codec, &[x]);
        let found = (0x3F00_0000..0x3FF0_0000u32).step_by(1021).find_map(|bits| one(f32::from_bits(bits)));
        assert!(found.is_some(), "{}", describe(codec));
    }
}

/// The block that showed 1.125 to be too little for HiFloat4, and the next factor.
#[test]
fn hifloat4_by_hand() {
    let mut x = [0.0; 64];
    x[0] = 3.515625;
    let of = |factor| Scaling {
        headroom: Headroom::new(factor).unwrap(),
        thresholds: Thresholds::OfLargestCode,
        ..Scaling::default()
    };
    let codec = |factor| stochastic(Format::Hif4, ScaleRule::Amax, of(factor));
    // 3.515625 · 1.125 · 73/512 is rounded to 0.5625 and that to 0.5, whose largest value is 3.5.
    assert_eq!([1.125, 1.1875].map(|factor| saturates(codec(factor), &x)), [Some(3.515625), None]);
}

/// Scales under headroom are those that values so much larger have without: of blocks, and of the tensor above them, up to its largest block.
#[test]
fn headroom_is_larger_values() {
    let scalings = |format: Format| {
        let more = [(Outer::Power, Correction::None), (Outer::Tensor, Correction::MsEden)];
        let more = more.map(|(outer, correction)| Scaling { outer, correction, ..Scaling::default() });
        [Scaling::default()].into_iter().chain(more.into_iter().filter(move |_| format == Format::Nvfp4))
    };
    let mut compared = 0;
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        for (&rule, scaling) in
            format.spec().rules.iter().flat_map(|rule| scalings(format).map(move |s| (rule, s)))
        {
            for sixteenths in 17..=32u16 {
                let factor = f32::from(sixteenths) / 16.0;
                let headroom = Headroom::new(f64::from(factor)).unwrap();
                let with = |scaling| Codec::new(format, rule, Rounding::NearestEven).unwrap().with(scaling);
                let (Ok(roomy), Ok(plain)) = (with(Scaling { headroom, ..scaling }), with(scaling)) else {
                    continue;
                };
                for m in 0..128 {
                    // Ten bits of mantissa and five are F32 numbers; the block is the tensor's largest, or all but.
                    let (x, tensor) = (number(m, 3), number(if m < 100 { m } else { 127 }, 3));
                    let scales = |codec: Codec, of: f32| {
                        let codec = codec.for_tensor(tensor * of);
                        let scale = codec.block_scale(&[x * of], amax(&[x * of]));
                        // Octaves of HiFloat4's shares are for the values as they are.
                        let record =
                            if format == Format::Hif4 { scale.record.0 & 0xFF } else { scale.record.0 };
                        (Scale(record), codec.tensor_scale().to_bits(), codec.tensor_inv().to_bits())
                    };
                    let (got, want) = (scales(roomy, 1.0), scales(plain, factor));
                    assert_eq!(got, want, "{format} {rule} {scaling:?} {headroom}: {x} of {tensor}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 40_000, "{compared}");
}

/// The scale of 4 is the E4M3 number nearest to amax / 4, of the quotient itself, wherever scales above it are powers of two or none. Ties go to the even one.
#[test]
fn the_scale_of_four_is_rounded_once() {
    for (rule, outer) in [(ScaleRule::Amax, Outer::Tensor), (ScaleRule::TensorAmax, Outer::Power)] {
        for candidates in [Candidates::FourOrSixMse, Candidates::FourOrSixMae] {
            let scaling = Scaling { candidates, outer, ..Scaling::default() };
            let codec =
                Codec::new(Format::Nvfp4, rule, Rounding::NearestEven).unwrap().with(scaling).unwrap();
            let mut of_four = 0;
            for (m, e) in (0..128).flat_map(|m| [-3, 0, 2, 5].map(|e| (m, e))) {
                let x = number(m, e);
                let codec = codec.for_tensor(x);
                // All but exact under 4: 3/4, 1/4 and 1/2 of the largest.
                let values: Vec<f32> = [1.0, 0.75, 0.25, 0.75, -0.5].iter().map(|part| x * part).collect();
                let mut codes = [0; 5];
                let (record, _) = codec.quantize_block(&values, |_| 0, &mut codes);
                let scale = f64::from(codec.decode(2, 0, record));
                let nearest_to = |wanted: f64| {
                    let wanted = wanted / f64::from(codec.tensor_scale());
                    let unit = (wanted.log2().floor() - 3.0).exp2();
                    (wanted / unit).round_ties_even() * unit * f64::from(codec.tensor_scale())
                };
                let [six, four] = [6.0, 4.0].map(|most| nearest_to(f64::from(x) / most));
                assert!(scale == six || scale == four, "{x}: {scale}, not {six} or {four}");
                of_four += usize::from(scale == four);
            }
            assert!(of_four > 100, "{rule} {candidates}: {of_four}");
        }
    }
}

/// By hand: 3.125 / 4 · 256 is 200, between the E4M3 numbers 192 and 208, of which 192 is even: 0.75 for 3.125 / 4.
#[test]
fn a_tie_of_four_by_hand() {
    let scaling = Scaling { candidates: Candidates::FourOrSixMse, outer: Outer::Power, ..Scaling::default() };
    let codec = Codec::new(Format::Nvfp4, ScaleRule::TensorAmax, Rounding::NearestEven).unwrap();
    let codec = codec.with(scaling).unwrap().for_tensor(3.125);
    let mut x = [0.0; 16];
    x[..5].copy_from_slice(&[3.125, 2.34375, 0.78125, 2.34375, -1.5625]);
    let mut codes = [0; 16];
    let (record, _) = codec.quantize_block(&x, |_| 0, &mut codes);
    let back: Vec<f32> = (0..5).map(|i| codec.decode(codes[i], i, record)).collect();
    assert_eq!(back, [3.0, 2.25, 0.75, 2.25, -1.5]);
}

/// A tensor comes back, however small it is, unless its multiplier would be beyond F32: then it comes back smaller as a whole, as TransformerEngine's does. A
/// power of two has no such end.
#[test]
fn tensors_come_back_down_to_the_ends_of_f32() {
    let rule = ScaleRule::TensorAmax;
    let scalings: Vec<Scaling> = Outer::ALL
        .iter()
        .flat_map(|&outer| Candidates::ALL.iter().map(move |&candidates| (outer, candidates)))
        .map(|(outer, candidates)| Scaling { candidates, outer, ..Scaling::default() })
        .collect();
    let mut seen = [0; 2];
    for format in Format::ALL.into_iter().filter(|format| format.spec().rules.contains(&rule)) {
        let codecs = scalings.iter().filter_map(|scaling| {
            Codec::new(format, rule, Rounding::NearestEven).unwrap().with(*scaling).ok()
        });
        for (codec, e) in codecs.flat_map(|codec| (-126..=127).map(move |e| (codec, e))) {
            let x = (f64::from(e).exp2() * 1.5) as f32;
            let is_beyond = f64::from(codec.tensor_most()) / f64::from(x) > f64::from(f32::MAX);
            let codec = codec.for_tensor(x);
            let mut codes = [0; 1];
            let (record, marked) = codec.quantize_block(&[x], |_| 0, &mut codes);
            let of_it = f64::from(codec.decode(codes[0], 0, record)) / f64::from(x);
            let shrinks = is_beyond && format == Format::Nvfp4 && codec.scaling().outer == Outer::Tensor;
            // Half a step of E2M1 and of its scale.
            let is_back = (of_it - 1.0).abs() < 0.13;
            assert!(
                !marked && (is_back || shrinks && of_it < 0.9),
                "{}: 1.5 · 2^{e}: {of_it} of it",
                describe(codec)
            );
            seen[usize::from(shrinks)] += 1;
        }
    }
    assert!(seen[0] > 1500 && seen[1] > 20, "{seen:?}");
}

/// Where values become 0, as the guide's table has it: on either side of each end.
#[test]
fn the_small_ends_of_formats() {
    let back = |codec: Codec, x: f32| {
        let mut codes = [0; 16];
        let (record, _) = codec.quantize_block(&[x; 16], |_| 0, &mut codes);
        codec.decode(codes[0], 0, record)
    };
    let of = |format: Format, rule, scaling| {
        Codec::new(format, rule, format.rounding(rule)).unwrap().with(scaling).unwrap()
    };
    let (default, two) = (Scaling::default(), |e: i32| f64::from(e).exp2() as f32);
    let corrected = Scaling { correction: Correction::MsEden, ..default };
    let candidates = Scaling { candidates: Candidates::FourOrSixMse, ..default };
    let nvfp4 = |scaling| of(Format::Nvfp4, ScaleRule::TensorAmax, scaling).for_tensor(1.0);
    for (codec, end) in [
        (of(Format::Nvfp4, ScaleRule::Amax, default), 6.0 * two(-10)),
        (nvfp4(default), 1.0 / 458_752.0),
        // The scale of 4 is half as large again.
        (nvfp4(candidates), 1.0 / 393_216.0),
        (nvfp4(corrected), two(-18)),
    ] {
        let [below, above] = [0.999, 1.001].map(|part| back(codec, end * part));
        assert!(below == 0.0 && above > 0.0, "{}: {below} and {above}", describe(codec));
    }
    let hif4 = of(Format::Hif4, ScaleRule::Amax, default);
    assert_eq!([two(-51).next_down(), two(-51)].map(|x| back(hif4, x)), [0.0, two(-50)]);
    assert_eq!([344_064.0, 3e38].map(|x| back(hif4, x)), [344_064.0; 2]);
    let cann = of(Format::Hif4, ScaleRule::Cann, default);
    let is_nan = [0.0, two(-46), two(-45), 371_711.0, 371_712.0].map(|x| back(cann, x).is_nan());
    assert_eq!(is_nan, [true, true, false, false, true]);
}

/// Every format keeps the sign of a zero, and of what is rounded to one, but two's complement, which has no such code.
#[test]
fn signs_of_zeros() {
    for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
        for &rule in format.spec().rules {
            let codec = Codec::new(format, rule, format.rounding(rule)).unwrap().for_tensor(4.0);
            let mut codes = [0; 4];
            let (record, marked) = codec.quantize_block(&[4.0, -0.0, -1e-30, 0.0], |_| 0, &mut codes);
            assert!(!marked, "{format} {rule}");
            let back: Vec<f32> = (1..4).map(|i| codec.decode(codes[i], i, record)).collect();
            let signs: Vec<bool> = back.iter().map(|x| x.is_sign_negative()).collect();
            let keeps = !codec.element().is_twos_complement();
            assert_eq!((back, signs), (vec![0.0; 3], vec![keeps, keeps, false]), "{format} {rule}");
        }
    }
}
