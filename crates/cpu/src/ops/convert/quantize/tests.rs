use super::fixture::*;
use super::{dequantize, quantize};
use crate::Cpu;
use crate::ops::plain::elementwise::tests::normals;
use nibble_core::ops::{Dequantize, Hadamard, Planes, Quantize};
use nibble_core::{Backend, BlockScaled, DType, Groups, Operand, Tensor};
use nibble_formats::{BlockAxis, Codec, Format, Rounding, ScaleKind, ScaleLayout, ScaleRule, hadamard};

fn block(operand: &Option<Operand<Cpu>>) -> &BlockScaled<Cpu> {
    operand.as_ref().unwrap().block("test").unwrap()
}

fn op<'a>(
    x: &'a Tensor<Cpu>,
    codec: Codec,
    planes: Planes,
    groups: Option<&'a Groups<Cpu>>,
) -> Quantize<'a, Cpu> {
    Quantize { groups, random: Some(STREAM.into()), ..Quantize::new(x, codec, planes) }
}

const PLANES: [Planes; 3] = [Planes::Rows, Planes::Cols, Planes::Both];

#[test]
fn dense_planes_are_those_of_the_specification() {
    let (spec, backends) = (spec(), simd_backends());
    for (seed, (rows, cols)) in
        [(1, 32), (1, 96), (32, 160), (64, 128), (160, 288), (320, 64), (0, 32), (32, 0)]
            .into_iter()
            .enumerate()
    {
        for (i, codec) in codecs().into_iter().enumerate() {
            let x = tensor(&spec, i % 2 == 0, rows, cols, seed as u64, i % 3 == 0);
            for planes in PLANES {
                let Ok(()) = op(&x, codec, planes, None).check() else { continue };
                let expected = quantize(&spec, op(&x, codec, planes, None)).unwrap();
                for cpu in &backends {
                    let got = quantize(cpu, op(&x, codec, planes, None)).unwrap();
                    assert_same(&got, &expected, &format!("{codec:?} {planes:?} {rows}×{cols} on {cpu:?}"));
                }
            }
        }
    }
}

#[test]
fn every_format_takes_any_shape() {
    let (spec, backends) = (spec(), simd_backends());
    for (rows, cols) in [(1, 1), (7, 5), (129, 131), (200, 260), (3, 2500)] {
        for codec in codecs() {
            let x = tensor(&spec, false, rows, cols, 5, true);
            for planes in [Planes::Rows, Planes::Cols, Planes::Both, Planes::Tiles] {
                let expected = quantize(&spec, op(&x, codec, planes, None)).unwrap();
                for cpu in &backends {
                    let got = quantize(cpu, op(&x, codec, planes, None)).unwrap();
                    assert_same(&got, &expected, &format!("{codec:?} {planes:?} {rows}×{cols} on {cpu:?}"));
                }
            }
        }
    }
}

/// Tests all code bytes with all scale bytes, in every format and along every axis. F32 scales and other scale records are random.
#[test]
fn every_code_under_every_scale_is_decoded_as_specified() {
    let (spec, backends, mut words) = (spec(), simd_backends(), Words(9));
    for codec in codecs().into_iter().filter(|c| c.rounding() == Rounding::NearestEven) {
        let (format, kind) = (codec.format(), codec.scale_kind());
        for axis in [BlockAxis::Row, BlockAxis::Col, BlockAxis::Tile] {
            let tiles = axis == BlockAxis::Tile;
            if tiles && !format.spec().tiles {
                continue;
            }
            let stack = if tiles { 2 } else { 1 };
            let (rows, cols) = if axis == BlockAxis::Col { (287, 256) } else { (256, 287) };
            let stored = (format, codec.rule());
            let mut x = BlockScaled::unwritten(&spec, stored, axis, (rows, cols, stack)).unwrap();
            let line = if axis == BlockAxis::Col { rows } else { cols };
            let (bytes, records) = (format.row_code_bytes(line), x.shape_of_scales().1);
            for (i, byte) in x.codes.as_mut_slice().iter_mut().enumerate() {
                *byte = (i % bytes + i / bytes) as u8;
            }
            for (i, byte) in x.scales.as_mut_slice().iter_mut().enumerate() {
                let whole = kind.bytes() == 1;
                *byte = if whole { (i / records) as u8 } else { words.next() as u8 };
            }
            if let Some(scales) = &mut x.tensor_scale {
                scales.as_mut_slice().iter_mut().for_each(|scale| *scale = words.value(true));
            }
            for dtype in [DType::F32, DType::Bf16] {
                let expected = plain_bits(&dequantize(&spec, Dequantize { x: &x, dtype }).unwrap());
                for cpu in &backends {
                    let got = plain_bits(&dequantize(cpu, Dequantize { x: &x, dtype }).unwrap());
                    let at = got.iter().zip(&expected).position(|(a, b)| a != b);
                    assert_eq!(at, None, "{format} {:?} {axis} on {cpu:?}", codec.rule());
                }
            }
        }
    }
}

/// A weight in row blocks: the random bits of an element depend on the element, not on its position in a buffer. If all scales are equal,
/// the weight and its transpose have the same codes, which differ from those of nearest rounding.
#[test]
fn both_planes_of_a_weight_round_an_element_alike() {
    let cpu = spec();
    let (stack, n, k) = (2, 40, 72);
    let mut values: Vec<f32> = normals(3, stack * n * k).iter().map(|v| v.clamp(-5.0, 5.0)).collect();
    // One element in every row block and column block has the largest magnitude.
    for i in (0..stack * n * k).filter(|i| (i / k % n + i % k) % 8 == 0) {
        values[i] = 6.0;
    }
    let x = Tensor::from_f32(&cpu, &values, stack * n, k).unwrap();
    let codes = |rounding| {
        let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, rounding).unwrap();
        let op = Quantize { stack, ..op(&x, codec, Planes::Tiles, None) };
        let made = op.run(&cpu).unwrap();
        [made.rows, made.cols].map(|plane| {
            let plane = block(&plane).clone();
            assert!(plane.scales.as_slice().iter().all(|&byte| byte == 127));
            let x = &plane;
            plain_bits(&dequantize(&cpu, Dequantize { x, dtype: DType::F32 }).unwrap())
        })
    };
    let [upright, turned] = codes(Rounding::Stochastic);
    for (i, value) in upright.iter().enumerate() {
        let (matrix, row, col) = (i / k / n, i / k % n, i % k);
        assert_eq!(turned[(matrix * k + col) * n + row], *value, "{matrix}: {row}, {col}");
    }
    assert_ne!(codes(Rounding::NearestEven)[0], upright);
}

/// Group lengths: empty, one row, a whole block, and longer than a block.
const LENS: [usize; 6] = [0, 1, 128, 130, 0, 37];

#[test]
fn ragged_planes_are_those_of_the_specification_whatever_the_padding_holds() {
    let (spec, backends) = (spec(), simd_backends());
    for (i, codec) in codecs().into_iter().enumerate() {
        let align = if codec.format() == Format::Mxfp4 && i % 2 == 0 { 32 } else { 128 };
        let groups = groups(&spec, &LENS, align, if i % 3 == 0 { align } else { 0 });
        let x = tensor(&spec, i % 2 == 1, groups.capacity, 96, 9, i % 4 == 0);
        let bad = poisoned(&x, &groups);
        for planes in PLANES {
            let expected = quantize(&spec, op(&x, codec, planes, Some(&groups))).unwrap();
            let what = format!("{codec:?} {planes:?}");
            assert_same(&quantize(&spec, op(&bad, codec, planes, Some(&groups))).unwrap(), &expected, &what);
            for cpu in &backends {
                let got = quantize(cpu, op(&bad, codec, planes, Some(&groups))).unwrap();
                assert_same(&got, &expected, &format!("{what} on {cpu:?}"));
            }
        }
    }
}

/// Without column blocks, the rows of a group need no alignment; padding is zero.
#[test]
fn ragged_rows_need_no_alignment_and_padding_is_zero() {
    for cpu in simd_backends().into_iter().chain([spec()]) {
        let groups = groups(&cpu, &[3, 0, 5], 4, 2);
        let x = poisoned(&tensor(&cpu, true, groups.capacity, 64, 2, false), &groups);
        let dense = tensor(&cpu, true, groups.capacity, 64, 2, false);
        let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
        let got = quantize(&cpu, op(&x, codec, Planes::Rows, Some(&groups))).unwrap();
        let all = quantize(&cpu, op(&dense, codec, Planes::Rows, None)).unwrap();
        let (got, all) = (block(&got.rows), block(&all.rows));
        for (row, valid) in valid_rows(&groups).into_iter().enumerate() {
            let codes = &got.codes.as_slice()[row * 32..][..32];
            if valid {
                assert_eq!(codes, &all.codes.as_slice()[row * 32..][..32]);
                assert_eq!(scale_bits(got)[row * 2..][..2], scale_bits(all)[row * 2..][..2]);
            } else {
                assert!(codes.iter().all(|&c| c == 0) && scale_bits(got)[row * 2..][..2] == [0, 0]);
            }
        }
    }
}

/// Ascend's convention gives a block of zeros a NaN scale. Padding gets no NaN scale and is not counted.
#[test]
fn padding_is_not_quantized() {
    let cpu = spec();
    let groups = groups(&cpu, &[10, 0, 70], 128, 128);
    let values = normals(1, groups.capacity * 64);
    let x = poisoned(&Tensor::from_f32(&cpu, &values, groups.capacity, 64).unwrap(), &groups);
    let codec = Codec::new(Format::Hif4, ScaleRule::Cann, Rounding::NearestEven).unwrap();
    let got = quantize(&cpu, op(&x, codec, Planes::Both, Some(&groups))).unwrap();
    let counts = got.counts.as_ref().unwrap().0.as_slice();
    assert_eq!(counts, [80, counts[1], 0], "a block a row, none of them marked");
    let (rows, cols) = (block(&got.rows), block(&got.cols));
    let valid = valid_rows(&groups);
    for (row, record) in rows.scales.as_slice().chunks(4).enumerate() {
        assert_eq!(record == [0; 4], !valid[row], "row {row}");
    }
    // The second group has 70 valid rows of 128: the first 64 fill a block, and the other six are in the next block.
    let of_block = |b: usize| &cols.scales.as_slice()[4 * b..][..4];
    for (b, rows) in valid.chunks(64).enumerate() {
        assert_eq!(of_block(b) == [0; 4], !rows.contains(&true), "block {b}");
    }
}

/// Column blocks are the row blocks of the transposed matrix, and are stored in the same way.
#[test]
fn columns_are_rows_of_the_transpose() {
    let cpu = Cpu::new(2).unwrap();
    for codec in codecs().into_iter().filter(|c| !c.rounding().is_random()) {
        let (rows, cols) = (256, 96);
        let x = tensor(&cpu, false, rows, cols, 4, true);
        let values = x.to_f32_vec(&cpu).unwrap();
        let turned: Vec<f32> = (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect();
        let turned = Tensor::from_f32(&cpu, &turned, cols, rows).unwrap();
        let down = quantize(&cpu, op(&x, codec, Planes::Cols, None)).unwrap();
        let along = quantize(&cpu, op(&turned, codec, Planes::Rows, None)).unwrap();
        assert_eq!(block(&down.cols).codes.as_slice(), block(&along.rows).codes.as_slice(), "{codec:?}");
        // A column with a single scale stores this scale once per 128 rows.
        let (of_cols, of_rows) = (scale_bits(block(&down.cols)), scale_bits(block(&along.rows)));
        let each = of_cols.len() / of_rows.len().max(1);
        let repeated: Vec<u64> = of_rows.into_iter().flat_map(|s| std::iter::repeat_n(s, each)).collect();
        assert_eq!(of_cols, repeated, "{codec:?}");
        assert_eq!(down.counts.as_ref().map(tally), along.counts.as_ref().map(tally), "{codec:?}");
    }
}

/// Kernels of GPUs lay the scales of columns out block by block. Files have them line by line.
#[test]
fn scales_of_any_layout_are_read_line_by_line() {
    let cpu = Cpu::new(1).unwrap();
    let x = Tensor::from_f32(&cpu, &normals(7, 160 * 24), 160, 24).unwrap();
    for format in [Format::Mxfp4, Format::Nvfp4, Format::Hif4, Format::E4m3] {
        let rule = format.spec().rules[0];
        let codec = Codec::new(format, rule, format.rounding(rule)).unwrap();
        let made = quantize(&cpu, Quantize::new(&x, codec, Planes::Cols)).unwrap();
        let q = block(&made.cols);
        let (expected, each) = (cpu.download(&q.scales).unwrap(), q.scale_kind().bytes());
        let (lines, blocks) = q.shape_of_scales();
        let layout = ScaleLayout::MnMajor;
        let mut laid_out = vec![0xAA; each * layout.len(lines, blocks, each)];
        for (i, scale) in expected.chunks(each).enumerate() {
            let at = each * layout.offset(i / blocks, i % blocks, lines, blocks, each);
            laid_out[at..at + each].copy_from_slice(scale);
        }
        let q = BlockScaled { scales: cpu.upload(&laid_out).unwrap(), scale_layout: layout, ..q.clone() };
        assert_eq!(q.scales_by_line(&cpu).unwrap(), expected, "{format}");
    }
}

#[test]
fn tiles_of_a_stack_are_those_of_the_specification() {
    let (spec, backends) = (spec(), simd_backends());
    for (stack, n, k) in [(1, 128, 128), (3, 40, 200), (2, 130, 129), (2, 256, 64), (2, 0, 8)] {
        for codec in codecs().into_iter().filter(|c| c.format().spec().tiles) {
            let x = tensor(&spec, false, stack * n, k, 21, true);
            let with_stack = || Quantize { stack, ..op(&x, codec, Planes::Tiles, None) };
            let expected = quantize(&spec, with_stack()).unwrap();
            // Each of the two tensors decodes to the transpose of the other.
            let decode = |x| dequantize(&spec, Dequantize { x, dtype: DType::F32 }).unwrap();
            let (upright, turned) = (decode(block(&expected.rows)), decode(block(&expected.cols)));
            let (upright, turned) = (plain_bits(&upright), plain_bits(&turned));
            for (i, &upright) in upright.iter().enumerate() {
                let (matrix, row, col) = (i / (n * k), i / k % n, i % k);
                assert_eq!(upright, turned[matrix * n * k + col * n + row]);
            }
            for cpu in &backends {
                let got = quantize(cpu, with_stack()).unwrap();
                assert_same(&got, &expected, &format!("{codec:?} {stack}×{n}×{k} on {cpu:?}"));
            }
        }
    }
}

/// Compares the error of every element with f64: nearest rounding is off by at most half a code step.
#[test]
fn decoded_values_are_as_near_as_the_format_allows() {
    for cpu in simd_backends() {
        // Only formats with one scale per block are tested; other tests cover the scale definitions of the other formats.
        let one_number = |c: &Codec| [ScaleKind::E8M0, ScaleKind::F32].contains(&c.scale_kind());
        for codec in codecs().into_iter().filter(|c| c.rounding() == Rounding::NearestEven && one_number(c)) {
            let x = tensor(&cpu, true, 64, 128, 3, false);
            let out = quantize(&cpu, op(&x, codec, Planes::Rows, None)).unwrap();
            let q = block(&out.rows);
            let got = dequantize(&cpu, Dequantize { x: q, dtype: DType::F32 }).unwrap();
            let got = got.to_f32_vec(&cpu).unwrap();
            let values = x.to_f32_vec(&cpu).unwrap();
            let element = codec.element();
            let b = codec.format().spec().block;
            for (i, (&x, &y)) in values.iter().zip(&got).enumerate() {
                let scale = super::planes::scales_of(q).value(i / 128 * 128usize.div_ceil(b) + i % 128 / b);
                let scaled = (f64::from(x) / f64::from(scale)).abs().min(f64::from(element.max()));
                let exponent = scaled.log2().floor().max(f64::from(1 - element.bias()));
                let half_step = (exponent - f64::from(element.mantissa_bits()) - 1.0).exp2();
                let error = (f64::from(y) / f64::from(scale)).abs() - scaled;
                // In addition to the half step, the reciprocal of an F32 scale and the product are each rounded once.
                assert!(
                    error.abs() <= half_step + scaled * 2.5e-7,
                    "{codec:?} {x:e} → {y:e} under {scale:e}"
                );
            }
        }
    }
}

const E4M3: fn() -> Codec = || Codec::new(Format::E4m3, ScaleRule::Rceil, Rounding::Stochastic).unwrap();

/// The test applies `rht` to each transform block of each group, and quantizes the result without a transform.
#[test]
fn a_transform_is_that_of_each_group_from_its_start() {
    for (cpu, len) in simd_backends().into_iter().chain([spec()]).flat_map(|c| [(c.clone(), 16), (c, 128)]) {
        let groups = groups(&cpu, &LENS, 128, 128);
        let x = tensor(&cpu, true, groups.capacity, 48, 6, false);
        let transform = Hadamard { len, ..Hadamard::new(3, 5) };
        let asked = Quantize { hadamard: Some(transform), ..op(&x, E4M3(), Planes::Cols, Some(&groups)) };
        let got = quantize(&cpu, asked).unwrap();
        // The test computes the same result by hand: lengths rounded up to whole transform blocks, and id 0 for rows that were padding.
        let (mut whole, mut values) = (groups.clone(), x.to_f32_vec(&cpu).unwrap());
        for (g, valid) in LENS.iter().enumerate() {
            let start = groups.start.as_slice()[g] as usize;
            let rows = valid.next_multiple_of(len);
            values[(start + valid) * 48..][..(rows - valid) * 48].fill(0.0);
            whole.len.as_mut_slice()[g] = rows as i32;
            whole.row_id.as_mut_slice()[start + valid..start + rows].fill(0);
            let mut signs = vec![0.0; rows];
            hadamard::fill_signs(&transform.signs, 0, &mut signs);
            for col in 0..48 {
                let at = |row: usize| (start + row) * 48 + col;
                let mut column: Vec<f32> = (0..rows).map(|row| values[at(row)]).collect();
                hadamard::rht(&mut column, &signs, len).unwrap();
                column.into_iter().enumerate().for_each(|(row, value)| values[at(row)] = value);
            }
        }
        let by_hand = Tensor::from_f32(&cpu, &values, groups.capacity, 48).unwrap();
        let expected = quantize(&cpu, op(&by_hand, E4M3(), Planes::Cols, Some(&whole))).unwrap();
        assert_same(&got, &expected, &format!("{len} on {cpu:?}"));
    }
}

#[test]
fn transforms_that_do_not_fit_are_refused() {
    let cpu = Cpu::new(1).unwrap();
    let mxfp4 = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let x = tensor(&cpu, true, 96, 32, 1, false);
    let groups = groups(&cpu, &[30, 20], 32, 32);
    let refused = |codec, planes, groups, len, expected: &str| {
        let hadamard = Some(Hadamard { len, ..Hadamard::new(1, 2) });
        let e = Quantize { hadamard, ..op(&x, codec, planes, groups) }.check().unwrap_err().to_string();
        assert!(e.contains(expected), "{e}");
    };
    refused(mxfp4, Planes::Rows, None, 24, "`hadamard.len` is 24, expected 16, 32, 64 or 128");
    refused(mxfp4, Planes::Rows, None, 64, "`columns of x` is 32");
    refused(mxfp4, Planes::Cols, None, 64, "`rows of x` is 96");
    refused(mxfp4, Planes::Cols, Some(&groups), 64, "`groups.align` is 32");
    refused(mxfp4, Planes::Both, None, 16, "`planes (with hadamard)` is Both");
    let hadamard = Some(Hadamard { signs: STREAM, ..Hadamard::new(1, 2) });
    let e = Quantize { hadamard, ..op(&x, E4M3(), Planes::Cols, None) }.check().unwrap_err().to_string();
    assert!(e.contains("Rounding, expected Sign"), "{e}");
}

#[test]
fn what_cannot_be_done_is_an_error_that_names_the_argument() {
    let cpu = Cpu::new(1).unwrap();
    let mxfp4 = |rounding| Codec::new(Format::Mxfp4, ScaleRule::Rceil, rounding).unwrap();
    let x = tensor(&cpu, true, 64, 64, 1, false);
    let dither = mxfp4(Rounding::dither(0.25).unwrap());
    let no_bits = Quantize::new(&x, dither, Planes::Rows).run(&cpu).unwrap_err().to_string();
    assert!(no_bits.contains("`random`") && no_bits.contains("dither"), "{no_bits}");
    let mut bad = groups(&cpu, &[30, 20], 32, 0);
    bad.len.as_mut_slice()[0] = 33;
    let nearest = mxfp4(Rounding::NearestEven);
    let e = quantize(&cpu, op(&x, nearest, Planes::Rows, Some(&bad))).unwrap_err().to_string();
    assert!(e.contains("`groups`"), "{e}");
    let mut bad = groups(&cpu, &[30, 20], 32, 0);
    bad.start.as_mut_slice()[1] = 31;
    let e = quantize(&cpu, op(&x, nearest, Planes::Cols, Some(&bad))).unwrap_err().to_string();
    assert!(e.contains("groups.start"), "{e}");
    // Without the tensor scale, values would decode with a scale of 1.
    let nvfp4 = Codec::new(Format::Nvfp4, ScaleRule::TensorAmax, Rounding::NearestEven).unwrap();
    let rows = quantize(&cpu, Quantize::new(&x, nvfp4, Planes::Rows)).unwrap().rows;
    let mut lost = block(&rows).clone();
    lost.tensor_scale = None;
    let e = dequantize(&cpu, Dequantize { x: &lost, dtype: DType::F32 }).unwrap_err().to_string();
    assert!(e.contains("`tensor_scale` is none"), "{e}");
}
