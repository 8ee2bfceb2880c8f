//! How scales are chosen, against the definitions written out: scales by search among all there are, codes by search among all numbers, in F64 or in
//! single F32 operations. Nothing of the codec is called but its constructor and what is under test.

use nibble_formats::{
    Candidates, Codec, Correction, Element, Format, Headroom, Outer, Purpose, Rounding, Scale, ScaleNumber,
    ScaleRule, Scaling, Stream, Thresholds, WHOLE_LINE,
};

/// Blocks of `len` values: normal ones, with heavy tails, tiny, huge, subnormal, with zeros, all zeros, each at several magnitudes.
fn blocks(len: usize) -> Vec<Vec<f32>> {
    let stream = Stream::new(3, Purpose::Data, 0, 0);
    let normal = |e: usize| f64::from(stream.normal_at(e as u64));
    let mut all = vec![vec![0.0; len], vec![-0.0; len], vec![f32::from_bits(1); len], vec![f32::MAX; len]];
    for set in 0..400 {
        let unit = [1.0, 3e-3, 40.0, 700.0, 1e-5, 1e-30, 1e30, 3e-39, 1e-42, 2e38][set % 10];
        let of = |i: usize| {
            let x = normal(set * len + i);
            let tailed = if set % 3 == 1 { x * x * x * (2.0 * x.abs()).exp() } else { x };
            let zeroed = if set % 7 == 0 && i.is_multiple_of(3) { 0.0 * x } else { tailed };
            ((zeroed * unit) as f32).clamp(-f32::MAX, f32::MAX)
        };
        all.push((0..len).map(of).collect());
    }
    all
}

fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |a, x| a.max(x.abs()))
}

/// amax · n/16 as one product, which ends at the largest number.
fn with_room(amax: f32, room: f64) -> f32 {
    let exact = f64::from(amax) * room;
    if exact >= f64::from(f32::MAX) { f32::MAX } else { exact as f32 }
}

/// The number of a list of (magnitude, code) that is nearest; of two as near the even code, or the larger magnitude.
fn nearest(all: &[(f64, u8)], x: f64, away: bool) -> (f64, u8) {
    let x = x.min(all[all.len() - 1].0);
    let better = |a: (f64, u8), b: (f64, u8)| {
        let (of_a, of_b) = ((a.0 - x).abs(), (b.0 - x).abs());
        let tie = if away { b.0 > a.0 } else { b.1.is_multiple_of(2) };
        if of_b < of_a || of_b == of_a && tie { b } else { a }
    };
    all.iter().copied().reduce(better).unwrap()
}

/// Magnitudes of an element with their codes, and of a kind of scales with their bits.
fn magnitudes(element: Element) -> Vec<(f64, u8)> {
    (0..=element.max_code()).map(|code| (f64::from(element.decode(code)), code)).collect()
}

fn scale_numbers(number: ScaleNumber) -> Vec<(f64, u8)> {
    let end = if number == ScaleNumber::E4m3 { 0x7Eu8 } else { 0xFE };
    (0..=end).map(|bits| (f64::from(number.decode(u32::from(bits))), bits)).collect()
}

/// The code of a value in the units of its element.
fn code_of(element: Element, y: f64, negative: bool, rounding: Rounding) -> u8 {
    let (_, code) = nearest(&magnitudes(element), y.abs(), rounding == Rounding::NearestAway);
    match (element.is_twos_complement(), negative) {
        (_, false) => code,
        (true, true) => code.wrapping_neg(),
        (false, true) => code | 1 << (element.code_bits() - 1),
    }
}

/// The byte of a power of two by the definitions of the rules.
fn power(rule: ScaleRule, element: Element, amax: f64) -> u8 {
    let (max, emax) = (f64::from(element.max()), f64::from(element.emax()));
    let all = scale_numbers(ScaleNumber::E8m0);
    let first =
        |fits: &dyn Fn(f64) -> bool| all.iter().find(|(s, _)| fits(*s)).map_or(0xFE, |(_, byte)| *byte);
    let binade = |amax: f64| {
        let below = |(s, _): &&(f64, u8)| s * emax.exp2() <= amax;
        all.iter().rev().find(below).map_or(0, |(_, byte)| *byte)
    };
    match rule {
        ScaleRule::Floor => binade(amax),
        ScaleRule::Rceil => first(&|s| amax <= max * s),
        ScaleRule::Ceil => first(&|s| amax <= emax.exp2() * s),
        _ => unreachable!("{rule}"),
    }
}

fn codec(format: Format, rule: ScaleRule, scaling: Scaling) -> Codec {
    Codec::new(format, rule, format.rounding(rule)).unwrap().with(scaling).unwrap()
}

fn rooms() -> impl Iterator<Item = Headroom> {
    (16..=32).map(|sixteenths| Headroom::new(f64::from(sixteenths) / 16.0).unwrap())
}

/// Scales that are powers of two and singles, of every format that has them.
#[test]
fn room_above_powers_and_singles() {
    let mut seen = 0;
    for format in
        Format::ALL.into_iter().filter(|format| format.is_block() && format.spec().block != WHOLE_LINE)
    {
        let rules = [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Amax];
        for &rule in format.spec().rules.iter().filter(|rule| rules.contains(rule)) {
            let number = match format.scale_kind(rule).levels() {
                [level] if matches!(level.number, ScaleNumber::E8m0 | ScaleNumber::F32) => level.number,
                _ => continue,
            };
            for (headroom, x) in rooms().flat_map(|room| blocks(32).into_iter().map(move |x| (room, x))) {
                let codec = codec(format, rule, Scaling { headroom, ..Scaling::default() });
                let mut codes = [0; 32];
                let (record, marked) = codec.quantize_block(&x, |_| 0, &mut codes);
                let amax = with_room(largest(&x), f64::from(headroom.factor()));
                let (want, inv) = if number == ScaleNumber::F32 {
                    let scale = (amax / codec.element().max()).max(f32::MIN_POSITIVE);
                    (Scale::single(scale), 1.0 / scale)
                } else {
                    let byte = power(rule, codec.element(), f64::from(amax));
                    (Scale::byte(byte), (127.0 - f64::from(byte)).exp2() as f32)
                };
                assert_eq!((record, marked), (want, false), "{format} {rule} {headroom} {amax}");
                for (x, code) in x.iter().zip(codes) {
                    let y = f64::from(x * inv);
                    let want = code_of(codec.element(), y, x.is_sign_negative(), codec.rounding());
                    assert_eq!(code, want, "{format} {rule} {headroom}: {x} · {inv}");
                }
                seen += 1;
            }
        }
    }
    assert!(seen > 100_000, "{seen}");
}

/// HiFloat4: E6M2 by search from BF16(amax · 73/512), and octaves by the thresholds.
#[test]
fn room_and_thresholds_of_shares() {
    let scales = scale_numbers(ScaleNumber::E6m2);
    for headroom in rooms() {
        for &thresholds in Thresholds::ALL {
            let is_authors = thresholds == Thresholds::FourTwo;
            let codec =
                codec(Format::Hif4, ScaleRule::Amax, Scaling { headroom, thresholds, ..Scaling::default() });
            let [high, low] = if is_authors { [4.0, 2.0] } else { [3.5, 1.75] };
            for x in blocks(64) {
                let mut codes = [0; 64];
                let (record, marked) = codec.quantize_block(&x, |_| 0, &mut codes);
                assert!(!marked);
                let amax = with_room(largest(&x), f64::from(headroom.factor()));
                let wanted = to_eight_bits(f64::from(amax) * 73.0 / 512.0);
                let (scale, byte) = nearest(&scales, wanted, false);
                let inv =
                    if is_authors { to_eight_bits(1.0 / scale) } else { f64::from((1.0 / scale) as f32) };
                let (mut record_of, mut shifts) = (u64::from(byte), [0; 64]);
                for (eighth, values) in x.chunks(8).enumerate() {
                    let first = f64::from(largest(values)) * inv >= high;
                    record_of |= u64::from(first) << (8 + eighth);
                    for (half, values) in values.chunks(4).enumerate() {
                        let bound = if first { high } else { low };
                        let second = f64::from(largest(values)) * inv >= bound;
                        record_of |= u64::from(second) << (16 + 2 * eighth + half);
                        shifts[8 * eighth + 4 * half..][..4].fill(i32::from(first) + i32::from(second));
                    }
                }
                assert_eq!(record, Scale(record_of), "{headroom} {thresholds} {amax}");
                for ((x, shift), code) in x.iter().zip(shifts).zip(codes) {
                    let y = f64::from(*x) * inv / f64::from(1 << shift);
                    let want = code_of(Element::S1P2, y, x.is_sign_negative(), Rounding::NearestAway);
                    assert_eq!(code, want, "{headroom} {thresholds}: {x}");
                }
            }
        }
    }
}

/// The nearest number of eight significant bits, ties to even: BF16 without ends.
fn to_eight_bits(x: f64) -> f64 {
    if x == 0.0 {
        return x;
    }
    let unit = (x.log2().floor() - 7.0).exp2();
    let steps = x / unit; // exact: a power of two
    let near = steps.round_ties_even();
    near * unit
}

/// All that NVFP4 may be told at once: room, candidates, and what is shared by the tensor.
#[test]
fn room_candidates_and_outer_of_nvfp4() {
    let (scales, mut chosen) = (scale_numbers(ScaleNumber::E4m3), [0u64; 2]);
    for headroom in rooms().step_by(3).chain([Headroom::new(1.0625).unwrap()]) {
        for (&candidates, outer) in Candidates::ALL
            .iter()
            .flat_map(|c| [None, Some(Outer::Tensor), Some(Outer::Power)].map(|o| (c, o)))
        {
            let rule = if outer.is_some() { ScaleRule::TensorAmax } else { ScaleRule::Amax };
            let scaling =
                Scaling { headroom, candidates, outer: outer.unwrap_or_default(), ..Scaling::default() };
            for (i, x) in blocks(16).into_iter().enumerate() {
                // The tensor has other blocks, some with larger values.
                let tensor = with_room(largest(&x), [1.0, 1.3, 40.0, 3000.0][i % 4]);
                let codec = codec(Format::Nvfp4, rule, scaling).for_tensor(tensor);
                let mut codes = [0; 16];
                let (record, marked) = codec.quantize_block(&x, |_| 0, &mut codes);
                assert!(!marked);
                let roomy = with_room(tensor, f64::from(headroom.factor()));
                let [inv, scale] = outer.map_or([1.0, 1.0], |outer| outer_scale(roomy, candidates, outer));
                let bits = |numbers: [f32; 2]| numbers.map(f32::to_bits);
                let got = [codec.tensor_inv(), codec.tensor_scale()];
                assert_eq!(bits(got), bits([inv, scale]), "{scaling:?} {tensor}");
                let amax = with_room(largest(&x), f64::from(headroom.factor()));
                let wanted = if outer.is_some() { amax * (inv * (1.0f32 / 6.0)) } else { amax / 6.0 };
                let with = |wanted: f32| nearest(&scales, f64::from(wanted), false);
                let six = with(wanted);
                let factor = |of: (f64, u8)| (1.0 / (of.0 as f32 * (1.0 / inv))).min(f32::MAX);
                let lost = |of: (f64, u8)| lost(&x, inv, factor(of), of.0, six.0, candidates);
                let four = with(amax * (inv * 0.25));
                let is_four = candidates != Candidates::Six && lost(four) < lost(six);
                chosen[usize::from(is_four)] += u64::from(candidates != Candidates::Six);
                let want = if is_four { four } else { six };
                assert_eq!(record, Scale::byte(want.1), "{scaling:?} {x:?}");
                for (x, code) in x.iter().zip(codes) {
                    let y = f64::from(x * factor(want));
                    assert_eq!(code, code_of(Element::E2M1, y, x.is_sign_negative(), Rounding::NearestEven));
                }
            }
        }
    }
    assert!(chosen.iter().all(|n| *n > 1000), "{chosen:?}");
}

/// Double blocks: of 128 values a power of two, found by search, and under it of each 16 the nearest E4M3 number, of each value the nearest code. They are
/// what NVFP4 under a power of two is, of a tensor of these values alone.
#[test]
fn double_blocks_have_the_scales_of_a_tensor_each() {
    let scales = scale_numbers(ScaleNumber::E4m3);
    for headroom in rooms().step_by(3).chain([Headroom::new(1.0625).unwrap()]) {
        let scaling = Scaling { headroom, ..Scaling::default() };
        let codec = codec(Format::Nvfp4In128, ScaleRule::Amax, scaling);
        let tensors = Codec::new(Format::Nvfp4, ScaleRule::TensorAmax, Rounding::NearestEven).unwrap();
        let tensors = tensors.with(Scaling { outer: Outer::Power, ..scaling }).unwrap();
        // Short ones, too: what is missing counts as zeros.
        for (i, x) in blocks(128).into_iter().enumerate() {
            let x = &x[..[128, 128, 100, 16, 7][i % 5]];
            let mut codes = vec![0; x.len()];
            let (record, marked) = codec.quantize_block(x, |_| 0, &mut codes);
            assert!(!marked);
            let room = f64::from(headroom.factor());
            let amax = with_room(largest(x), room);
            if amax == 0.0 {
                assert_eq!((record, codes.iter().all(|code| code & 7 == 0)), (Scale(0), true));
                continue;
            }
            let [inv, power] = outer_scale(amax, Candidates::Six, Outer::Power);
            let of_tensor = tensors.for_tensor(largest(x));
            assert_eq!(power.log2() + 127.0, (record.0 & 0xFF) as f32, "{amax}");
            for (i, (x, codes)) in x.chunks(16).zip(codes.chunks(16)).enumerate() {
                let wanted = with_room(largest(x), room) * (inv * (1.0f32 / 6.0));
                let (scale, bits) = nearest(&scales, f64::from(wanted), false);
                assert_eq!(record.0 >> (8 + 7 * i) & 0x7F, u64::from(bits), "{headroom} {wanted}");
                let factor = (1.0 / (scale as f32 * (1.0 / inv))).min(f32::MAX);
                let mut of_nvfp4 = vec![0; x.len()];
                let (byte, _) = of_tensor.quantize_block(x, |_| 0, &mut of_nvfp4);
                assert_eq!((byte, &of_nvfp4[..]), (Scale::byte(bits), codes));
                for (j, (x, code)) in x.iter().zip(codes).enumerate() {
                    let want = code_of(
                        Element::E2M1,
                        f64::from(x * factor),
                        x.is_sign_negative(),
                        Rounding::NearestEven,
                    );
                    assert_eq!(*code, want);
                    let value = f64::from(Element::E2M1.decode(*code)) * scale * f64::from(power);
                    assert_eq!(codec.decode(*code, 16 * i + j, record), value as f32, "{record:?}");
                }
            }
            let beyond = record.0.checked_shr(8 + 7 * x.len().div_ceil(16) as u32).unwrap_or(0);
            assert_eq!(beyond, 0, "no scales of values that there are none of");
        }
    }
}

/// What a tensor with this largest magnitude is multiplied by, and what undoes that.
fn outer_scale(amax: f32, candidates: Candidates, outer: Outer) -> [f32; 2] {
    let most = 6.0 * if candidates == Candidates::Six { 448.0 } else { 256.0 };
    if amax == 0.0 {
        return [1.0, 1.0];
    }
    match outer {
        Outer::Tensor => [(most / amax).min(f32::MAX), amax / most],
        Outer::Power => {
            let power = (-126..128).map(|e| f64::from(e).exp2() as f32).find(|p| *p >= amax / most).unwrap();
            [1.0 / power, power]
        }
    }
}

/// What values lose under a scale, in whole numbers of 2^-20 of the power of two of the scale of 6.
fn lost(x: &[f32], inv: f32, factor: f32, scale: f64, six: f64, candidates: Candidates) -> u64 {
    let unit = six.max(1.0 / 512.0).log2().floor().exp2();
    let all = magnitudes(Element::E2M1);
    let of = |x: &f32| {
        let (code, _) = nearest(&all, f64::from((x * factor).abs()), false);
        let rest = f64::from((x * inv).abs()) - code * scale; // exact
        let rest = (rest as f32).abs() / unit as f32;
        let share = if candidates == Candidates::FourOrSixMse { rest * rest } else { rest };
        (f64::from(share) * 1048576.0).floor().min(16777215.0) as u64
    };
    x.iter().map(of).sum()
}

/// In F64, without the cut to whole numbers: no block loses noticeably more than it would under the other scale, and under both together
/// blocks lose less than under 6 alone.
#[test]
fn the_better_of_two_candidates_is_kept() {
    for &candidates in &Candidates::ALL[1..] {
        let loss = |codec: Codec, x: &[f32]| -> f64 {
            let mut codes = [0; 16];
            let (record, _) = codec.quantize_block(x, |_| 0, &mut codes);
            let each = x.iter().zip(codes).enumerate().map(|(i, (x, code))| {
                let error = f64::from(codec.decode(code, i, record)) - f64::from(*x);
                if candidates == Candidates::FourOrSixMse { error * error } else { error.abs() }
            });
            each.sum()
        };
        let scaling = Scaling { candidates, ..Scaling::default() };
        let [mut of_both, mut of_six] = [0.0; 2];
        for x in blocks(16).into_iter().filter(|x| (1e-3..1e3).contains(&largest(x))) {
            let both = codec(Format::Nvfp4, ScaleRule::TensorAmax, scaling).for_tensor(largest(&x));
            // The same scales without the choice: the tensor's is what decides.
            let alone = codec(Format::Nvfp4, ScaleRule::TensorAmax, Scaling::default());
            let six = alone.under(both.tensor_scale());
            let unit =
                f64::from(largest(&x)).powi(if candidates == Candidates::FourOrSixMse { 2 } else { 1 });
            let (a, b) = (loss(both, &x) / unit, loss(six, &x) / unit);
            assert!(a <= b + 1e-5, "{candidates}: {a} > {b}");
            of_both += a;
            of_six += b;
        }
        assert!(of_both < 0.97 * of_six, "{candidates}: {of_both} of {of_six}");
    }
}

/// MS-EDEN by its definition in F64: codes are the nearest under a scale that lets a little saturate, and the scale that is stored is S times that, rounded
/// up for as many of the random bits as it lies above the number below.
#[test]
fn corrected_scales_of_nvfp4() {
    let scales = scale_numbers(ScaleNumber::E4m3);
    let elements = magnitudes(Element::E2M1);
    let (clip, scaling) =
        (0.93f32 * 17.0 / 16.0, Scaling { correction: Correction::MsEden, ..Scaling::default() });
    let mut seen = [0; 4];
    for (i, x) in blocks(16).into_iter().enumerate() {
        let tensor = with_room(largest(&x), [1.0, 1.3, 40.0, 3000.0][i % 4]);
        let codec = codec(Format::Nvfp4, ScaleRule::TensorAmax, scaling).for_tensor(tensor);
        let most = 6.0 * 256.0 / clip;
        let [inv, scale] =
            if tensor == 0.0 { [1.0, 1.0] } else { [(most / tensor).min(f32::MAX), tensor / most] };
        assert_eq!([codec.tensor_inv(), codec.tensor_scale()], [inv, scale]);
        let encoded = nearest(&scales, f64::from(largest(&x) * (inv * (clip / 6.0))), false);
        let factor = (1.0 / (encoded.0 as f32 * (1.0 / inv))).min(f32::MAX);
        let values: Vec<f64> = x.iter().map(|x| f64::from(x * factor)).collect();
        let of = |v: &f64| nearest(&elements, v.abs(), false).0 * v.signum();
        let square: f64 = values.iter().map(|v| v * v).sum();
        let product: f64 = values.iter().map(|v| v * of(v)).sum();
        let wanted = encoded.0 * if product > 0.0 && encoded.0 > 0.0 { square / product } else { 1.0 };
        let above = scales.iter().position(|(s, _)| *s > wanted).unwrap();
        let (low, high) = (scales[above - 1], scales[above]);
        let bits = (wanted - low.0) / (high.0 - low.0) * 65536.0;
        for r in [0, 1, 20_000, 40_000, 65_535, bits as u16, (bits + 40.0) as u16, (bits - 40.0) as u16] {
            let mut codes = [0; 16];
            let (record, marked) = codec.quantize_block(
                &x,
                |at| {
                    assert_eq!(at, 0);
                    r
                },
                &mut codes,
            );
            assert!(!marked);
            // F32 sums are off by less than 16 of the 65,536.
            if (f64::from(r) - bits).abs() > 16.0 {
                let up = f64::from(r) < bits;
                assert_eq!(record, Scale::byte(if up { high.1 } else { low.1 }), "{x:?}: {wanted} {r}");
                seen[usize::from(up)] += 1;
            }
            for (x, code) in x.iter().zip(codes) {
                let y = f64::from(x * factor);
                assert_eq!(code, code_of(Element::E2M1, y, x.is_sign_negative(), Rounding::NearestEven));
            }
        }
        seen[2] += usize::from(values.iter().any(|v| v.abs() > 6.0));
        seen[3] += usize::from(wanted != encoded.0);
    }
    assert!(seen.iter().all(|n| *n > 100), "{seen:?}");
}

/// Codes times scales times a power of two are BF16 numbers.
#[test]
fn under_an_outer_power_all_that_decodes_is_bf16() {
    let codec =
        codec(Format::Nvfp4, ScaleRule::TensorAmax, Scaling { outer: Outer::Power, ..Scaling::default() });
    for x in blocks(16).into_iter().filter(|x| (1e-25..1e30).contains(&largest(x))) {
        let codec = codec.for_tensor(largest(&x) * 1.7);
        assert_eq!(codec.tensor_scale().to_bits() & 0x7F_FFFF, 0);
        let mut codes = [0; 16];
        let (record, _) = codec.quantize_block(&x, |_| 0, &mut codes);
        for (i, code) in codes.into_iter().enumerate() {
            let value = codec.decode(code, i, record);
            assert_eq!(value.to_bits() & 0xFFFF, 0, "{value}");
        }
    }
}
