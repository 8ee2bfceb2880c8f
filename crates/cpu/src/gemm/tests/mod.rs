mod resume;

use super::*;
use half::bf16;
use nibble_formats::{Element, ScaleKind, ScalePlane, e8m0};

/// A buffer of F32 scales.
fn singles(values: &[f32]) -> ScalePlane<'_> {
    ScalePlane { kind: ScaleKind::F32, bytes: bytemuck::cast_slice(values) }
}

/// The SplitMix64 random number generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 33) % n
    }
    /// A roughly normally distributed number with variance one.
    fn value(&mut self) -> f32 {
        (0..12).map(|_| (self.next() >> 40) as f32 / 16_777_216.0).sum::<f32>() - 6.0
    }
}

/// Distributions of a matrix's values.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fill {
    Normal,
    /// Small integers, for which every sum is exact.
    Integer,
    /// Magnitudes around 2⁻⁶³, so that products are around 2⁻¹²⁶; zeros and subnormals also occur.
    Tiny,
    /// 2⁻⁶³ times 2⁻⁷⁵ or 2⁻⁷⁶, which gives sums half a step or a quarter step below the smallest normal number.
    Edge,
    /// The largest magnitudes for which cancellation can still give a tiny sum.
    Borderline,
    /// Random bits.
    Bits,
}

const FILLS: [Fill; 6] = [Fill::Normal, Fill::Integer, Fill::Tiny, Fill::Edge, Fill::Borderline, Fill::Bits];

fn bf16_value(fill: Fill, r: &mut Random) -> bf16 {
    match fill {
        Fill::Normal => bf16::from_f32(r.value()),
        Fill::Integer => bf16::from_f32(r.below(17) as f32 - 8.0),
        Fill::Tiny => match r.below(16) {
            0 => bf16::from_bits(r.below(0x80) as u16 | (r.below(2) << 15) as u16),
            1 => bf16::ZERO,
            _ => bf16::from_bits((r.next() & 0x807F) as u16 | ((60 + r.below(6)) << 7) as u16),
        },
        Fill::Edge => {
            bf16::from_bits((r.next() & 0x8000) as u16 | [64, 64, 52, 51][r.below(4) as usize] << 7)
        }
        Fill::Borderline => bf16::from_bits((r.next() & 0x807F) as u16 | 70 << 7),
        Fill::Bits => bf16::from_bits(r.next() as u16),
    }
}

fn f32_value(fill: Fill, r: &mut Random) -> f32 {
    match fill {
        Fill::Normal => r.value(),
        Fill::Bits => f32::from_bits(r.next() as u32),
        other => bf16_value(other, r).to_f32(),
    }
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

fn same(x: f32, y: f32) -> bool {
    x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan())
}

fn assert_same(got: &[f32], want: &[f32], what: impl std::fmt::Debug) {
    assert_eq!(got.len(), want.len());
    let wrong = got.iter().zip(want).filter(|(x, y)| !same(**x, **y)).count();
    if let Some(i) = (0..got.len()).find(|&i| !same(got[i], want[i])) {
        panic!("{what:?}: {wrong} of {} differ, first at {i}: {:e} for {:e}", got.len(), got[i], want[i]);
    }
}

/// A matrix [rows, k] in two forms: one that the engine reads (row-major or transposed, with margins of NaN), and one that the
/// specification reads.
struct Matrix<T> {
    stored: Vec<T>,
    offset: usize,
    stride: usize,
    transposed: bool,
    rows: Vec<Vec<T>>,
}

impl<T: Copy> Matrix<T> {
    fn new(rows: usize, k: usize, transposed: bool, nan: T, mut value: impl FnMut() -> T) -> Self {
        let rows: Vec<Vec<T>> = (0..rows).map(|_| (0..k).map(|_| value()).collect()).collect();
        let (outer, inner) = if transposed { (k, rows.len()) } else { (rows.len(), k) };
        let (offset, stride) = (6, inner + 4);
        let mut stored = vec![nan; offset + outer * stride];
        for (r, row) in rows.iter().enumerate() {
            for (c, &x) in row.iter().enumerate() {
                stored[offset + if transposed { c * stride + r } else { r * stride + c }] = x;
            }
        }
        Self { stored, offset, stride, transposed, rows }
    }

    fn view<'a>(&'a self, data: impl Fn(&'a [T]) -> Data<'a>) -> OperandView<'a> {
        let view = if self.transposed { OperandView::transposed } else { OperandView::rows };
        view(data(&self.stored), self.stride).at(self.offset)
    }
}

fn product<T>(a: &[Vec<T>], b: &[Vec<T>], dot: impl Fn(&[T], &[T]) -> f32) -> Vec<f32> {
    a.iter().flat_map(|x| b.iter().map(|y| dot(x, y)).collect::<Vec<_>>()).collect()
}

/// Sizes (m, n, k), some with remainders in each dimension and some without.
const SHAPES: [(usize, usize, usize); 15] = [
    (1, 1, 1),
    (1, 33, 7),
    (2, 16, 2),
    (3, 31, 65),
    (5, 48, 64),
    (12, 32, 128),
    (13, 65, 33),
    (11, 17, 3),
    (24, 64, 17),
    (100, 40, 70),
    (9, 8, 0),
    (0, 5, 4),
    (5, 0, 4),
    (4, 20, 2500),
    (260, 70, 40),
];

fn run(isa: Isa, shape: (usize, usize, usize), a: &OperandView, b: &OperandView) -> Vec<f32> {
    let (m, n, k) = shape;
    let (offset, stride) = (3, n + 5);
    let mut out = vec![-7.0; offset + m * stride];
    let engine = Engine::with_isa(isa).unwrap();
    engine.gemm(ProductDims { m, n, k }, a, b, Output::f32(&mut out, stride).at(offset)).unwrap();
    let mut inside = Vec::new();
    for (i, &x) in out.iter().enumerate() {
        let column = i.wrapping_sub(offset) % stride;
        if i >= offset && column < n { inside.push(x) } else { assert_eq!(x, -7.0, "margin at {i}") }
    }
    inside
}

#[test]
fn f32_products_equal_the_specification() {
    let mut r = Random(1);
    for shape in SHAPES {
        let (m, n, k) = shape;
        for fill in [Fill::Normal, Fill::Integer, Fill::Tiny, Fill::Bits] {
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let a = Matrix::new(m, k, ta, f32::NAN, || f32_value(fill, &mut r));
                let b = Matrix::new(n, k, tb, f32::NAN, || f32_value(fill, &mut r));
                let want = product(&a.rows, &b.rows, spec::dot_f32);
                for isa in isas() {
                    let got = run(isa, shape, &a.view(Data::F32), &b.view(Data::F32));
                    assert_same(&got, &want, (isa, shape, fill, ta, tb));
                }
            }
        }
    }
}

#[test]
fn bf16_products_equal_the_specification() {
    let mut r = Random(2);
    let nan = bf16::NAN;
    for shape in SHAPES {
        let (m, n, k) = shape;
        for fill in FILLS {
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let a = Matrix::new(m, k, ta, nan, || bf16_value(fill, &mut r));
                let b = Matrix::new(n, k, tb, nan, || bf16_value(fill, &mut r));
                let want = product(&a.rows, &b.rows, spec::dot_bf16);
                for isa in isas() {
                    let got = run(isa, shape, &a.view(Data::Bf16), &b.view(Data::Bf16));
                    assert_same(&got, &want, (isa, shape, fill, ta, tb));
                }
            }
        }
    }
}

/// 2⁻¹³⁰ enters a sum early, and is all that remains when large numbers cancel thousands of elements later. So whether a sum can be tiny
/// depends on all earlier terms.
#[test]
fn tiny_remainders_are_flushed_however_late_they_show() {
    let (m, n, k) = (3, 20, 4100);
    let power = |e: i32| bf16::from_bits(((127 + e) << 7) as u16);
    let mut a = vec![bf16::ZERO; m * k];
    for row in a.chunks_mut(k) {
        (row[0], row[2], row[k - 1]) = (power(-55), power(-75), -power(-55));
    }
    let b = vec![power(-55); n * k];
    assert_eq!(spec::dot_bf16(&a[..k], &b[..k]), 0.0);
    for isa in isas() {
        let (a, b) = (OperandView::rows(Data::Bf16(&a), k), OperandView::rows(Data::Bf16(&b), k));
        assert_same(&run(isa, (m, n, k), &a, &b), &vec![0.0; m * n], isa);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn vdpbf16ps(acc: [f32; 16], a: [u32; 16], b: [u32; 16]) -> [f32; 16] {
    use std::arch::x86_64::*;
    // SAFETY: all of these types have 64 bytes, and every bit pattern is valid.
    unsafe {
        let words = |x| std::mem::transmute::<[u32; 16], __m512bh>(x);
        let acc = std::mem::transmute::<[f32; 16], __m512>(acc);
        std::mem::transmute::<__m512, [f32; 16]>(_mm512_dpbf16_ps(acc, words(a), words(b)))
    }
}

/// Compares the instruction with its definition near every edge case: cancellation to the last bits, sums that round up to the smallest
/// normal number, subnormals, and infinities.
#[cfg(target_arch = "x86_64")]
#[test]
fn vdpbf16ps_is_the_bf16_dot() {
    if !Isa::Avx512Bf16.is_supported() {
        println!("skipped: AVX-512 BF16 (not on this machine)");
        return;
    }
    let mut r = Random(3);
    let value = |r: &mut Random, kind: u64| {
        let exponent = match kind {
            0 => return r.next() as u16,
            1 => 120 + r.below(16),
            2 => r.below(70),
            3 => 185 + r.below(71),
            4 => 60 + r.below(8),
            _ => {
                return [0, 0x8000, 1, 0x807F, 0x80, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x3F80]
                    [r.below(10) as usize];
            }
        };
        (r.next() & 0x807F) as u16 | (exponent << 7) as u16
    };
    // An earlier pair sets the accumulator: (x, y)·(1, 1) can be any sum of two BF16 numbers.
    for round in 0..40_000u64 {
        let (mut first, mut a, mut b) = ([0u32; 16], [0u32; 16], [0u32; 16]);
        for lane in 0..16 {
            let kind = if round % 8 == 7 { r.below(6) } else { round % 8 };
            let word = |r: &mut Random| u32::from(value(r, kind)) | u32::from(value(r, kind)) << 16;
            (first[lane], a[lane], b[lane]) = (word(&mut r), word(&mut r), word(&mut r));
            if round % 2 == 0 {
                // The accumulator is 2⁻¹²⁶; a product of ±2⁻¹⁵⁰ or ±2⁻¹⁵¹ decides whether the sum is tiny.
                first[lane] = 0x0080 | (r.below(2) as u32) << 15;
                let exponent = 127 - 75 - r.below(2) as u32;
                a[lane] =
                    (exponent << 7 | (r.below(2) as u32) << 15 | r.below(2) as u32) << (16 * r.below(2));
                b[lane] = (127 - 75) << 7 | (127 - 75) << 23;
            }
        }
        let ones = [0x3F80_3F80; 16];
        // SAFETY: support was checked above.
        let got = unsafe { vdpbf16ps(vdpbf16ps([0.0; 16], first, ones), a, b) };
        for lane in 0..16 {
            let split = |x: u32, y: u32| [x, x >> 16, y, y >> 16].map(|v| bf16::from_bits(v as u16));
            let want = spec::dot_bf16(&split(first[lane], a[lane]), &split(ones[lane], b[lane]));
            assert!(same(got[lane], want), "{:08x} {:08x} {:08x}", first[lane], a[lane], b[lane]);
        }
    }
}

/// Operands of a block-scaled GEMM: codes and scales, in the engine's and in the specification's form.
struct Scaled {
    codes: Matrix<u8>,
    scales_f32: Vec<f32>,
    scales_e8m0: Vec<u8>,
    stride: usize,
    rows_per_scale: usize,
    block: usize,
}

impl Scaled {
    fn new(r: &mut Random, rows: usize, k: usize, block: usize, rows_per_scale: usize, kind: Kind) -> Self {
        let stride = k.div_ceil(block) + 1;
        let num_scales = rows.div_ceil(rows_per_scale) * stride;
        let special = kind == Kind::Special;
        let codes = Matrix::new(rows, k, false, 0x7F, || match kind {
            Kind::Special => r.next() as u8,
            // Magnitudes up to 2^7 of E4M3 and 2^8 of E5M2, which are finite in both.
            _ => (r.next() as u8) & 0xF7 & 0xBF | (r.below(2) as u8) << 3,
        });
        let byte = |r: &mut Random| if special && r.below(9) == 0 { 0xFF } else { 117 + r.below(20) as u8 };
        let scales_e8m0: Vec<u8> = (0..num_scales).map(|_| byte(r)).collect();
        let value = |r: &mut Random| if special && r.below(9) == 0 { f32::NAN } else { r.value().abs() };
        let scales_f32 = (0..num_scales).map(|_| value(r)).collect();
        Self { codes, scales_f32, scales_e8m0, stride, rows_per_scale, block }
    }

    fn view<'a>(&'a self, e8m0: bool, data: fn(&'a [u8]) -> Data<'a>) -> OperandView<'a> {
        let values = if e8m0 { ScalePlane::powers(&self.scales_e8m0) } else { singles(&self.scales_f32) };
        let scales = OperandScales {
            values,
            block: self.block,
            rows_per_scale: self.rows_per_scale,
            offset: 0,
            stride: self.stride,
        };
        self.codes.view(data).scaled(scales)
    }

    /// The decoded values of a row, and the row's scales.
    fn row(&self, row: usize, e8m0: bool, element: Element) -> (Vec<bf16>, Vec<f32>) {
        let codes = self.codes.rows[row].iter().map(|&c| bf16::from_f32(element.decode(c))).collect();
        let first = row / self.rows_per_scale * self.stride;
        let scales = (first..first + self.stride)
            .map(|i| if e8m0 { e8m0::decode(self.scales_e8m0[i]) } else { self.scales_f32[i] });
        (codes, scales.collect())
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Finite,
    /// All codes and scales, including NaN.
    Special,
}

#[test]
fn block_scaled_products_equal_the_specification() {
    let mut r = Random(4);
    let shapes =
        [(1, 5, 1), (3, 33, 128), (13, 40, 200), (25, 140, 384), (2, 3, 127), (130, 31, 290), (3, 4, 2432)];
    for (m, n, k) in shapes {
        for (block, b_rows, kind) in [
            (128, 128, Kind::Finite),
            (128, 1, Kind::Special),
            (32, 1, Kind::Finite),
            (32, 32, Kind::Special),
        ] {
            let a = Scaled::new(&mut r, m, k, block, 1, kind);
            let b = Scaled::new(&mut r, n, k, block, b_rows, kind);
            for (e8m0_a, e8m0_b) in [(false, false), (true, false), (true, true)] {
                let x: Vec<_> = (0..m).map(|i| vec![a.row(i, e8m0_a, Element::E5M2)]).collect();
                let y: Vec<_> = (0..n).map(|i| vec![b.row(i, e8m0_b, Element::E4M3)]).collect();
                let want =
                    product(&x, &y, |x, y| spec::dot_block_scaled(&x[0].0, &y[0].0, &x[0].1, &y[0].1, block));
                if kind == Kind::Finite {
                    assert!(want.iter().all(|x| x.is_finite()));
                }
                for isa in isas() {
                    let got = run(isa, (m, n, k), &a.view(e8m0_a, Data::E5m2), &b.view(e8m0_b, Data::E4m3));
                    assert_same(&got, &want, (isa, (m, n, k), block, b_rows, kind, e8m0_a, e8m0_b));
                }
            }
        }
    }
}

#[test]
fn a_nan_scale_reaches_exactly_the_outputs_it_touches() {
    let (m, n, k) = (3, 4, 256);
    let codes = vec![0x38u8; 4 * 256];
    let mut bytes = vec![127u8; 8];
    bytes[2 + 1] = 0xFF; // row 1, block 1
    let good = vec![127u8; 8];
    for isa in isas() {
        let a = OperandView::rows(Data::E4m3(&codes), k).scaled(OperandScales::rows(
            ScalePlane::powers(&bytes),
            128,
            2,
        ));
        let b = OperandView::rows(Data::E4m3(&codes), k).scaled(OperandScales::rows(
            ScalePlane::powers(&good),
            128,
            2,
        ));
        for (i, x) in run(isa, (m, n, k), &a, &b).into_iter().enumerate() {
            assert!(if i / n == 1 { x.is_nan() } else { x == 256.0 }, "{isa:?} {i} {x}");
        }
    }
}

#[test]
fn fp4_codes_multiply_like_their_values() {
    let mut r = Random(5);
    for (m, n, k) in [(1, 1, 1), (5, 37, 63), (14, 20, 200)] {
        let a = Scaled::new(&mut r, m, k, 32, 1, Kind::Special);
        let fp4: Vec<Vec<u8>> = (0..n).map(|_| (0..k).map(|_| r.below(16) as u8).collect()).collect();
        let stride = (k + 1).next_multiple_of(2);
        let mut packed = vec![0x77u8; n * stride / 2];
        for (row, codes) in fp4.iter().enumerate() {
            for (i, code) in codes.iter().enumerate() {
                let byte = &mut packed[(row * stride + i) / 2];
                *byte = if i % 2 == 0 { *byte & 0xF0 | code } else { *byte & 0x0F | code << 4 };
            }
        }
        let ones = vec![127u8; n * k.div_ceil(32)];
        let scales = OperandScales::rows(ScalePlane::powers(&ones), 32, k.div_ceil(32));
        let b = OperandView::rows(Data::E2m1(&packed), stride).scaled(scales);
        let x: Vec<_> = (0..m).map(|i| vec![a.row(i, true, Element::E4M3)]).collect();
        let decoded = |row: &Vec<u8>| row.iter().map(|&c| bf16::from_f32(Element::E2M1.decode(c))).collect();
        let y: Vec<_> = fp4.iter().map(|row| vec![(decoded(row), vec![1.0; k])]).collect();
        let want = product(&x, &y, |x, y| spec::dot_block_scaled(&x[0].0, &y[0].0, &x[0].1, &y[0].1, 32));
        for isa in isas() {
            assert_same(&run(isa, (m, n, k), &a.view(true, Data::E4m3), &b), &want, (isa, m, n, k));
        }
    }
}

#[test]
fn products_are_near_float64() {
    let mut r = Random(6);
    let (m, n, k) = (40, 50, 600);
    let a = Matrix::new(m, k, false, bf16::NAN, || bf16_value(Fill::Normal, &mut r));
    let b = Matrix::new(n, k, true, bf16::NAN, || bf16_value(Fill::Normal, &mut r));
    let exact: Vec<f64> = a
        .rows
        .iter()
        .flat_map(|x| {
            b.rows.iter().map(move |y| x.iter().zip(y).map(|(x, y)| x.to_f64() * y.to_f64()).sum::<f64>())
        })
        .collect();
    let got = run(Isa::best(), (m, n, k), &a.view(Data::Bf16), &b.view(Data::Bf16));
    let error: f64 = got.iter().zip(&exact).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum();
    let norm: f64 = exact.iter().map(|y| y * y).sum();
    assert!((error / norm).sqrt() < 1e-6, "{}", (error / norm).sqrt());
}

#[test]
fn outputs_round_to_bf16_and_accumulate() {
    let mut r = Random(7);
    let (m, n, k) = (29, 45, 90);
    let a = Matrix::new(m, k, false, f32::NAN, || f32_value(Fill::Normal, &mut r));
    let b = Matrix::new(n, k, false, f32::NAN, || f32_value(Fill::Normal, &mut r));
    let before: Vec<f32> = (0..m * n).map(|_| r.value()).collect();
    let want = product(&a.rows, &b.rows, spec::dot_f32);
    let shape = ProductDims { m, n, k };
    for isa in isas() {
        let engine = Engine::with_isa(isa).unwrap();
        let mut rounded = vec![bf16::NAN; m * n];
        engine.gemm(shape, &a.view(Data::F32), &b.view(Data::F32), Output::bf16(&mut rounded, n)).unwrap();
        assert!(rounded.iter().zip(&want).all(|(x, y)| x.to_bits() == bf16::from_f32(*y).to_bits()));
        let mut sums = before.clone();
        engine
            .gemm(shape, &a.view(Data::F32), &b.view(Data::F32), Output::f32(&mut sums, n).accumulate())
            .unwrap();
        let added: Vec<f32> = before.iter().zip(&want).map(|(x, y)| x + y).collect();
        assert_same(&sums, &added, isa);
        let before: Vec<bf16> = before.iter().map(|x| bf16::from_f32(*x)).collect();
        let mut sums = before.clone();
        engine
            .gemm(shape, &a.view(Data::F32), &b.view(Data::F32), Output::bf16(&mut sums, n).accumulate())
            .unwrap();
        let added = before.iter().zip(&want).map(|(x, y)| bf16::from_f32(x.to_f32() + y));
        assert!(sums.iter().zip(added).all(|(x, y)| x.to_bits() == y.to_bits()));
    }
    for x in [f32::NAN, f32::INFINITY, f32::MAX, 1.0 + 1.0 / 256.0, -1e-40, f32::from_bits(0x7F80_0001)] {
        assert_eq!(pack::round_to_bf16(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
    }
}

#[test]
fn groups_multiply_their_own_expert() {
    let mut r = Random(8);
    let (n, k, rows) = (37, 70, 400);
    let groups =
        [(0, 100), (128, 0), (128, 1), (140, 131), (300, 99)].map(|(start, len)| Group { start, len });
    let a = Matrix::new(rows, k, false, bf16::NAN, || bf16_value(Fill::Normal, &mut r));
    let b: Vec<_> =
        groups.map(|_| Matrix::new(n, k, true, bf16::NAN, || bf16_value(Fill::Normal, &mut r))).into();
    let views: Vec<_> = b.iter().map(|b| b.view(Data::Bf16)).collect();
    let mut want = vec![5.0; rows * n];
    for (group, b) in groups.iter().zip(&b) {
        let rows = group.start..group.start + group.len;
        let part = product(&a.rows[rows.clone()], &b.rows, spec::dot_bf16);
        want[rows.start * n..rows.end * n].copy_from_slice(&part);
    }
    for isa in isas() {
        let mut out = vec![5.0; rows * n];
        let engine = Engine::with_isa(isa).unwrap();
        engine.grouped(&groups, n, k, &a.view(Data::Bf16), &views, Output::f32(&mut out, n)).unwrap();
        assert_same(&out, &want, isa);
    }
}

#[test]
fn ragged_contractions_sum_over_each_group() {
    let mut r = Random(9);
    let (m, n, rows) = (30, 50, 400);
    let groups = [(0, 100), (128, 0), (128, 1), (256, 99)].map(|(start, len)| Group { start, len });
    let dy = Matrix::new(m, rows, true, bf16::NAN, || bf16_value(Fill::Normal, &mut r));
    let x = Matrix::new(n, rows, true, bf16::NAN, || bf16_value(Fill::Normal, &mut r));
    let dy8 = Scaled::new(&mut r, m, rows, 128, 1, Kind::Finite);
    let x8 = Scaled::new(&mut r, n, rows, 128, 1, Kind::Finite);
    let (mut plain, mut scaled) = (Vec::new(), Vec::new());
    for Group { start, len } in groups {
        let cut =
            |rows: &[Vec<bf16>]| rows.iter().map(|x| x[start..start + len].to_vec()).collect::<Vec<_>>();
        plain.extend(product(&cut(&dy.rows), &cut(&x.rows), spec::dot_bf16));
        let cut = |s: &Scaled, i| {
            let (codes, scales) = s.row(i, true, Element::E4M3);
            vec![(codes[start..start + len].to_vec(), scales[start / 128..].to_vec())]
        };
        let dy: Vec<_> = (0..m).map(|i| cut(&dy8, i)).collect();
        let x: Vec<_> = (0..n).map(|i| cut(&x8, i)).collect();
        let dot = |x: &[(Vec<bf16>, Vec<f32>)], y: &[(Vec<bf16>, Vec<f32>)]| {
            spec::dot_block_scaled(&x[0].0, &y[0].0, &x[0].1, &y[0].1, 128)
        };
        scaled.extend(product(&dy, &x, dot));
    }
    for isa in isas() {
        let engine = Engine::with_isa(isa).unwrap();
        let (a, b) = (dy.view(Data::Bf16), x.view(Data::Bf16));
        let mut out = vec![5.0; groups.len() * m * n];
        engine.ragged(&groups, m, n, &a, &b, Output::f32(&mut out, n)).unwrap();
        assert_same(&out, &plain, isa);
        assert!(out[m * n..2 * m * n].iter().all(|&x| x == 0.0), "an empty group's gradient is zero");
        engine.ragged(&groups, m, n, &a, &b, Output::f32(&mut out, n).accumulate()).unwrap();
        let twice: Vec<f32> = plain.iter().map(|x| x + x).collect();
        assert_same(&out, &twice, isa);
        let (a, b) = (dy8.view(true, Data::E4m3), x8.view(true, Data::E4m3));
        engine.ragged(&groups, m, n, &a, &b, Output::f32(&mut out, n)).unwrap();
        assert_same(&out, &scaled, isa);
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let mut r = Random(10);
    for (m, n, k) in [(700, 200, 130), (1, 3000, 400), (130, 900, 2300)] {
        let a = Matrix::new(m, k, false, bf16::NAN, || bf16_value(Fill::Normal, &mut r));
        let b = Matrix::new(n, k, false, bf16::NAN, || bf16_value(Fill::Normal, &mut r));
        let (a, b) = (a.view(Data::Bf16), b.view(Data::Bf16));
        let mut want = vec![0.0; m * n];
        let shape = ProductDims { m, n, k };
        let mut scratch = Scratch::default();
        Engine::default().gemm_serial(shape, &a, &b, Output::f32(&mut want, n), &mut scratch).unwrap();
        for threads in [1, 2, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let got = pool.install(|| run(Isa::best(), (m, n, k), &a, &b));
            assert_same(&got, &want, (threads, m, n, k));
        }
    }
}

#[test]
fn mistakes_are_named() {
    let (x, codes, mut out) = (vec![0f32; 100], vec![0u8; 100], vec![0f32; 100]);
    let h = vec![bf16::ZERO; 100];
    let shape = ProductDims { m: 10, n: 10, k: 10 };
    let f32s = OperandView::rows(Data::F32(&x), 10);
    let bf16s = OperandView::rows(Data::Bf16(&h), 10);
    let one = [1f32; 10];
    let scaled = OperandView::rows(Data::E4m3(&codes), 10).scaled(OperandScales::rows(singles(&one), 128, 1));
    let engine = Engine::default();
    let mut argument = |shape, a: &OperandView, b: &OperandView| {
        let error = engine.gemm(shape, a, b, Output::f32(&mut out, 10)).unwrap_err();
        assert!(error.to_string().contains("expected"), "{error}");
        error.argument
    };
    assert_eq!(argument(ProductDims { k: 11, ..shape }, &f32s, &f32s), "a");
    assert_eq!(argument(shape, &f32s, &f32s.at(1)), "b");
    assert_eq!(argument(shape, &OperandView { stride: usize::MAX, ..f32s }, &f32s), "a");
    assert_eq!(argument(shape, &f32s, &bf16s), "b");
    assert_eq!(argument(shape, &scaled, &bf16s), "b");
    assert_eq!(argument(shape, &OperandView { transposed: true, ..scaled }, &scaled), "a");
    let tile = OperandScales::rows(singles(&one), 64, 1);
    assert_eq!(argument(shape, &scaled, &scaled.scaled(tile)), "b");
    assert_eq!(
        argument(shape, &scaled.scaled(OperandScales::rows(singles(&one[1..]), 128, 1)), &scaled),
        "a"
    );
    assert_eq!(argument(ProductDims { m: 3, n: 11, k: 9 }, &f32s, &OperandView { stride: 9, ..f32s }), "out");
    let mut narrow = [bf16::ZERO; 100];
    assert_eq!(
        engine.gemm(shape, &f32s, &f32s, Output::bf16(&mut narrow[1..], 10)).unwrap_err().argument,
        "out"
    );
    let groups = [Group { start: 0, len: 6 }, Group { start: 5, len: 5 }];
    let mut grouped = |groups: &[Group], b: &[OperandView]| {
        engine.grouped(groups, 10, 10, &f32s, b, Output::f32(&mut out, 10)).unwrap_err().argument
    };
    assert_eq!(grouped(&groups, &[f32s, f32s]), "groups");
    assert_eq!(grouped(&groups, &[f32s]), "b");
    assert_eq!(grouped(&[Group { start: 8, len: 3 }], &[f32s]), "a");
    assert_eq!(grouped(&[Group { start: usize::MAX, len: 3 }], &[f32s]), "groups");
    let inside_a_block = [Group { start: 5, len: 5 }];
    assert_eq!(
        engine
            .ragged(&inside_a_block, 5, 5, &scaled, &scaled, Output::f32(&mut out, 5))
            .unwrap_err()
            .argument,
        "a"
    );
}
