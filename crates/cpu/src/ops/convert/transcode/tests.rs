use super::transcode;
use crate::Cpu;
use crate::ops::convert::quantize::fixture::*;
use crate::ops::convert::quantize::planes::put_codes;
use crate::ops::convert::quantize::{dequantize, quantize};
use nibble_core::ops::{Dequantize, Planes, Quantize, Transcode};
use nibble_core::{Backend, BlockScaled, DType, Groups, RowKind};
use nibble_formats::{BlockAxis, Codec, Element, Format, Rounding, ScaleRule, e8m0};

fn op<'a>(
    x: &'a BlockScaled<Cpu>,
    to: Format,
    axis: BlockAxis,
    groups: Option<&'a Groups<Cpu>>,
) -> Transcode<'a, Cpu> {
    Transcode { x, to, axis, rule: ScaleRule::Rceil, groups }
}

/// Random codes with random scale bytes that differ from `centre` by at most `spread`; with `specials`, a few blocks are NaN.
fn random_rows(
    cpu: &Cpu,
    format: Format,
    (rows, cols): (usize, usize),
    (centre, spread): (u32, u32),
    specials: bool,
) -> BlockScaled<Cpu> {
    let mut words = Words(u64::from(centre * 1000 + spread) + rows as u64);
    let mut codes: Vec<u8> = (0..rows * format.row_code_bytes(cols)).map(|_| words.next() as u8).collect();
    // Some blocks contain only zeros of either sign.
    for run in codes.chunks_mut(16) {
        if words.next().is_multiple_of(6) {
            run.fill(if format == Format::Mxfp4 { 0x80 } else { 0 });
        }
    }
    if format == Format::E4m3 && !specials {
        codes.iter_mut().filter(|code| **code & 0x7F == 0x7F).for_each(|code| *code ^= 1);
    }
    let scales: Vec<u8> = (0..rows * format.scales_per_row(cols))
        .map(|_| match words.next() % 20 {
            0 if specials => e8m0::NAN,
            _ => (centre + words.next() % (2 * spread + 1)).saturating_sub(spread).min(254) as u8,
        })
        .collect();
    let (codes, scales) = (cpu.upload(&codes).unwrap(), cpu.upload(&scales).unwrap());
    RowKind { format, rule: ScaleRule::Rceil, cols }.block_rows(rows, codes, scales, None)
}

/// (centre, spread) of the scale bytes for which the code paths are compared.
const SCALES: [(u32, u32); 4] = [(127, 3), (100, 30), (2, 8), (250, 12)];

/// Source format, target format and axis of every conversion.
const CONVERSIONS: [(Format, Format, BlockAxis); 4] = [
    (Format::Mxfp4, Format::E4m3, BlockAxis::Row),
    (Format::Mxfp4, Format::E4m3, BlockAxis::Col),
    (Format::E4m3, Format::E4m3, BlockAxis::Col),
    (Format::E4m3, Format::Mxfp4, BlockAxis::Row),
];

#[test]
fn dense_conversions_are_those_of_the_specification() {
    let (spec, backends) = (spec(), simd_backends());
    for (from, to, axis) in CONVERSIONS {
        for shape in
            [(1, 32), (1, 96), (5, 160), (130, 288), (256, 128), (0, 32), (3, 0), (7, 33), (129, 131), (3, 1)]
        {
            for scales in SCALES {
                let x = random_rows(&spec, from, shape, scales, true);
                op(&x, to, axis, None).check().unwrap();
                let expected = transcode(&spec, op(&x, to, axis, None)).unwrap();
                for cpu in &backends {
                    let what = format!("{from} → {to} {axis} {shape:?} {scales:?} on {cpu:?}");
                    let got = transcode(cpu, op(&x, to, axis, None)).unwrap();
                    assert_same_block(&got.out, &expected.out, &what);
                    assert_eq!(tally(&got.counts), tally(&expected.counts), "{what}");
                }
            }
        }
    }
}

#[test]
fn ragged_conversions_do_not_see_the_padding() {
    let (spec, backends) = (spec(), simd_backends());
    let groups = groups(&spec, &[0, 1, 128, 130, 0, 37], 128, 128);
    for (from, to, axis) in CONVERSIONS {
        for scales in SCALES {
            let x = random_rows(&spec, from, (groups.capacity, 160), scales, true);
            let bad = poisoned_codes(&x, &groups);
            let expected = transcode(&spec, op(&x, to, axis, Some(&groups))).unwrap();
            for cpu in backends.iter().chain([&spec]) {
                let what = format!("{from} → {to} {axis} {scales:?} on {cpu:?}");
                let got = transcode(cpu, op(&bad, to, axis, Some(&groups))).unwrap();
                assert_same_block(&got.out, &expected.out, &what);
                assert_eq!(tally(&got.counts), tally(&expected.counts), "{what}");
            }
            // The padding of the result must be zero.
            let decoded = dequantize(&spec, Dequantize { x: &expected.out, dtype: DType::F32 }).unwrap();
            let bits = plain_bits(&decoded);
            for (row, valid) in valid_rows(&groups).into_iter().enumerate() {
                assert!(valid || bits[row * 160..][..160].iter().all(|&b| b == 0), "{from} → {to} {axis}");
            }
        }
    }
}

/// Tests stacked matrices whose sizes are not multiples of the tile in either dimension.
#[test]
fn tiles_are_those_of_the_specification() {
    let (spec, backends) = (spec(), simd_backends());
    for (stack, n, k) in
        [(1, 1, 32), (2, 5, 160), (3, 130, 288), (1, 256, 128), (2, 0, 32), (1, 3, 0), (2, 37, 131)]
    {
        for scales in SCALES {
            let x = random_rows(&spec, Format::Mxfp4, (stack * n, k), scales, true);
            let x = BlockScaled { stack, ..x };
            let expected = op(&x, Format::E4m3, BlockAxis::Tile, None).run(&spec).unwrap();
            for cpu in &backends {
                let what = format!("{stack} × {n} × {k} {scales:?} on {cpu:?}");
                let got = op(&x, Format::E4m3, BlockAxis::Tile, None).run(cpu).unwrap();
                assert_same_block(&got.out, &expected.out, &what);
                assert_same_block(&got.transposed.unwrap(), expected.transposed.as_ref().unwrap(), &what);
                assert_eq!(tally(&got.counts), tally(&expected.counts), "{what}");
            }
        }
    }
    let x = random_rows(&spec, Format::Mxfp4, (128, 64), (127, 0), false);
    let groups = groups(&spec, &[128], 128, 0);
    op(&x, Format::E4m3, BlockAxis::Tile, Some(&groups)).run(&spec).expect_err("weights have no groups");
    op(&BlockScaled { stack: 3, ..x }, Format::E4m3, BlockAxis::Tile, None).run(&spec).expect_err("128 / 3");
}

/// Each tile has a separate scale; both orders decode to the source matrices.
#[test]
fn tiles_decode_to_the_source_both_ways() {
    let (stack, n, k) = (2, 200, 160);
    for cpu in simd_backends().into_iter().chain([spec()]) {
        let mut x =
            BlockScaled { stack, ..random_rows(&cpu, Format::Mxfp4, (stack * n, k), (127, 7), false) };
        // Scales differ widely from tile to tile.
        for (i, byte) in x.scales.as_mut_slice().iter_mut().enumerate() {
            let (row, col) = (i / (k / 32), i % (k / 32) * 32);
            let tile = row / n * 4 + row % n / 128 * 2 + col / 128;
            *byte = (usize::from(*byte) + 14 * tile - 40) as u8;
        }
        let got = op(&x, Format::E4m3, BlockAxis::Tile, None).run(&cpu).unwrap();
        assert_eq!(tally(&got.counts)[1], 0);
        let decode = |x| plain_bits(&dequantize(&cpu, Dequantize { x, dtype: DType::F32 }).unwrap());
        let source = decode(&x);
        assert_eq!(decode(&got.out), source);
        let transposed = decode(&got.transposed.unwrap());
        for (i, bits) in source.iter().enumerate() {
            let (matrix, row, col) = (i / k / n, i / k % n, i % k);
            assert_eq!(transposed[(matrix * k + col) * n + row], *bits, "{matrix}: {row}, {col}");
        }
    }
}

/// Tests all codes with all pairs of scale bytes. The test has one row per source byte; the row's four blocks have the source byte and the
/// largest byte of the 128 values. The result is decoded in f64 and compared with the definition.
#[test]
fn every_code_under_every_pair_of_scales_lifts_to_the_nearest() {
    let spec = spec();
    let mut codes = spec.zeros::<u8>(256 * 64).unwrap();
    let all: Vec<u8> = (0..32).map(|c| c % 16).collect();
    (0..256).for_each(|row| put_codes(&mut codes, Format::Mxfp4, (row, 128), 0, &all));
    for largest in 0..=254u8 {
        let scales: Vec<u8> = (0..256).flat_map(|source| [source as u8, largest, 0, 0]).collect();
        let x = BlockScaled {
            codes: codes.clone(),
            scales: spec.upload(&scales).unwrap(),
            ..random_rows(&spec, Format::Mxfp4, (256, 128), (127, 0), false)
        };
        let lifted = transcode(&spec, op(&x, Format::E4m3, BlockAxis::Row, None)).unwrap();
        for cpu in simd_backends() {
            let got = transcode(&cpu, op(&x, Format::E4m3, BlockAxis::Row, None)).unwrap();
            assert_same_block(&got.out, &lifted.out, &format!("largest {largest} on {cpu:?}"));
            assert_eq!(tally(&got.counts), tally(&lifted.counts));
        }
        let mut inexact = 0;
        for source in 0..=255u8 {
            let lifted_codes = &lifted.out.codes.as_slice()[usize::from(source) * 128..][..32];
            if source == e8m0::NAN {
                assert!(lifted_codes.iter().all(|&code| code == 0x7F));
                continue;
            }
            let target = i32::from(source.max(largest)).saturating_sub(6).max(0);
            assert_eq!(scale_bits(&lifted.out)[usize::from(source)], target as u64);
            let mut changed = false;
            for (&code, &lifted) in all.iter().zip(lifted_codes) {
                let exact =
                    f64::from(Element::E2M1.decode(code)) * f64::from(i32::from(source) - target).exp2();
                let got = f64::from(Element::E4M3.decode(lifted));
                changed |= got != exact;
                assert_eq!(got.is_sign_negative(), code >= 8, "signs stay, of zeros too");
                // The code is exact within 14 powers of two of the largest scale. Beyond that, it is the nearest code, with an error of at
                // most half the step 2⁻⁹.
                let near = if i32::from(source) >= target - 8 { 0.0 } else { 2f64.powi(-10) };
                assert!((got - exact).abs() <= near, "{code} × {source} under {target}: {got} for {exact}");
            }
            inexact += u64::from(changed);
        }
        assert_eq!(tally(&lifted.counts), [256, inexact, 1]);
    }
}

/// If column scales are within 14 powers of two, the columns decode to exactly the source.
#[test]
fn exact_lifts_decode_to_the_source() {
    for cpu in simd_backends() {
        for (format, axis) in
            [(Format::Mxfp4, BlockAxis::Row), (Format::Mxfp4, BlockAxis::Col), (Format::E4m3, BlockAxis::Col)]
        {
            let spread = if format == Format::Mxfp4 { 7 } else { 0 };
            let x = random_rows(&cpu, format, (256, 96), (127, spread), false);
            let got = transcode(&cpu, op(&x, Format::E4m3, axis, None)).unwrap();
            assert_eq!(tally(&got.counts)[1], 0, "{format} {axis}");
            let decode = |x| plain_bits(&dequantize(&cpu, Dequantize { x, dtype: DType::F32 }).unwrap());
            assert_eq!(decode(&got.out), decode(&x), "{format} {axis}");
        }
    }
}

/// A block whose scale is out of its neighbours' range changes and is counted; blocks of zeros are not counted.
#[test]
fn inexact_blocks_are_counted() {
    for cpu in simd_backends().into_iter().chain([spec()]) {
        let mut x = random_rows(&cpu, Format::Mxfp4, (1, 128), (127, 0), false);
        put_codes(&mut x.codes, x.format, (0, 128), 0, &[[1; 32], [1; 32], [8; 32], [2; 32]].concat());
        x.scales = cpu.upload(&[127u8 - 15, 127, 0, 0xFF]).unwrap();
        for axis in [BlockAxis::Row, BlockAxis::Col, BlockAxis::Tile] {
            // With column blocks, each block of columns has a separate scale, so nothing changes.
            let inexact = u64::from(axis != BlockAxis::Col);
            let got = transcode(&cpu, op(&x, Format::E4m3, axis, None)).unwrap();
            assert_eq!(tally(&got.counts), [3, inexact, 1], "{axis} on {cpu:?}");
        }
    }
}

/// A conversion from E4M3 to MXFP4 gives the bits of quantizing the decoded values, with F32 scales too.
#[test]
fn requantized_rows_are_those_of_the_decoded_values() {
    for cpu in simd_backends().into_iter().chain([spec()]) {
        for rule in [ScaleRule::Amax, ScaleRule::Rceil] {
            let x = tensor(&cpu, true, 40, 160, 3, true);
            let e4m3 = Codec::new(Format::E4m3, rule, Rounding::NearestEven).unwrap();
            let q = quantize(&cpu, Quantize::new(&x, e4m3, Planes::Rows)).unwrap().rows.unwrap();
            let q = q.block("test").unwrap();
            for to in Format::Mxfp4.spec().rules {
                let op = Transcode { rule: *to, ..op(q, Format::Mxfp4, BlockAxis::Row, None) };
                let got = transcode(&cpu, op).unwrap();
                let decoded = dequantize(&cpu, Dequantize { x: q, dtype: DType::F32 }).unwrap();
                let mxfp4 = Codec::new(Format::Mxfp4, *to, Rounding::NearestEven).unwrap();
                let direct = quantize(&cpu, Quantize::new(&decoded, mxfp4, Planes::Rows)).unwrap();
                let direct = direct.rows.unwrap();
                assert_same_block(&got.out, direct.block("test").unwrap(), &format!("{rule} {to} {cpu:?}"));
            }
        }
    }
}

#[test]
fn dequantize_is_that_of_the_specification() {
    let (spec, backends) = (spec(), simd_backends());
    for codec in codecs().into_iter().filter(|c| c.rounding() == Rounding::NearestEven) {
        for planes in [Planes::Rows, Planes::Cols, Planes::Tiles] {
            for (rows, cols) in [(32, 32), (160, 288), (320, 160)] {
                let x = tensor(&spec, false, rows, cols, 8, true);
                let stack = if planes == Planes::Tiles { 2 } else { 1 };
                let quantization = Quantize { stack, ..Quantize::new(&x, codec, planes) };
                let Ok(()) = quantization.check() else { continue };
                let q = quantize(&spec, quantization).unwrap();
                for q in [q.rows, q.cols].into_iter().flatten() {
                    for dtype in [DType::F32, DType::Bf16] {
                        let op = || Dequantize { x: q.block("test").unwrap(), dtype };
                        let expected = Some(nibble_core::Operand::Plain(dequantize(&spec, op()).unwrap()));
                        for cpu in &backends {
                            let got = Some(nibble_core::Operand::Plain(dequantize(cpu, op()).unwrap()));
                            assert_same_operand(&got, &expected, &format!("{codec:?} {planes:?} {cpu:?}"));
                        }
                    }
                }
            }
        }
    }
}

/// Tests all codes of all elements with scales at the ends of their range.
#[test]
fn every_code_decodes() {
    for cpu in simd_backends() {
        for format in [Format::Mxfp4, Format::E4m3, Format::E5m2] {
            let element = format.spec().element.unwrap();
            for byte in [0u8, 1, 127, 253, 254, 255] {
                let mut x = random_rows(&cpu, format, (2, 128), (u32::from(byte), 0), false);
                let bytes: Vec<u8> = (0..=255).collect();
                let len = x.codes.as_slice().len();
                x.codes = cpu.upload(&bytes[256 - len..]).unwrap();
                let scales = vec![byte; 2 * format.scales_per_row(128)];
                x.scales = cpu.upload(&scales).unwrap();
                let got = plain_bits(&dequantize(&cpu, Dequantize { x: &x, dtype: DType::F32 }).unwrap());
                for (i, got) in got.into_iter().enumerate() {
                    let code = crate::ops::convert::quantize::planes::get_code(
                        x.codes.as_slice(),
                        format,
                        (i / 128, 128),
                        i % 128,
                    );
                    let value = element.decode(code) * e8m0::decode(byte);
                    let expected = if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
                    assert_eq!(got, expected, "{format} {code:#x} under {byte}");
                }
            }
        }
    }
}
