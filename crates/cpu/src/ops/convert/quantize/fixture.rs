//! Helpers of the conversion tests: inputs, ragged groups with poisoned padding, all backends to compare, and bitwise comparisons.

use super::planes::scales_of;
use crate::gemm::Isa;
use crate::{CodePath, Cpu};
use half::bf16;
use nibble_core::ops::{Counts, Emitted};
use nibble_core::{Backend, BlockScaled, Data, Groups, Operand, Tensor};
use nibble_formats::{Codec, Format, Purpose, Rounding, Stream};

/// Every vectorised backend of this machine, with one to three threads.
pub(crate) fn simd_backends() -> Vec<Cpu> {
    let supported = Isa::ALL.into_iter().filter(|isa| isa.is_supported());
    supported.enumerate().map(|(i, isa)| Cpu::with(1 + i % 3, isa, CodePath::Simd).unwrap()).collect()
}

/// The backend that runs the specification.
pub(crate) fn spec() -> Cpu {
    Cpu::scalar(1).unwrap()
}

/// All codecs of all block formats: every combination of rule and rounding.
pub(crate) fn codecs() -> Vec<Codec> {
    let roundings = Rounding::PLAIN.into_iter().chain([Rounding::dither(0.3).unwrap()]);
    let mut all = Vec::new();
    for rounding in roundings {
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            for &rule in format.spec().rules {
                all.push(Codec::new(format, rule, rounding).unwrap());
            }
        }
    }
    all
}

/// A stream of random bits.
pub(crate) const STREAM: Stream = Stream::new(7, Purpose::Rounding, 11, 3);

/// A seeded sequence of words.
pub(crate) struct Words(pub u64);

impl Words {
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// A random number, usually around 1. Zeros of either sign, subnormals, huge and tiny numbers also occur, and with `specials` an
    /// occasional NaN or infinity.
    pub fn value(&mut self, specials: bool) -> f32 {
        let word = self.next();
        let sign = if word & 1 == 1 { -1.0 } else { 1.0 };
        let unit = (self.next() >> 8) as f32 / 16_777_216.0;
        match word >> 8 & 0x1FF {
            0..8 => 0.0 * sign,
            8..12 => f32::from_bits(self.next() & 0x7FFF_FFFF).clamp(0.0, 3e38) * sign,
            12..16 => unit * 1e-38 * sign,
            16..24 => (unit * 16.0).floor() / 2.0 * sign, // rounding ties
            24 if specials && self.next().is_multiple_of(16) => f32::NAN,
            25 if specials && self.next().is_multiple_of(16) => f32::INFINITY * sign,
            _ => unit * sign * 4.0,
        }
    }
}

/// A tensor of [`Words::value`]s, in which about one in eight runs of 64 values is zero.
pub(crate) fn tensor(
    cpu: &Cpu,
    is_bf16: bool,
    rows: usize,
    cols: usize,
    seed: u64,
    specials: bool,
) -> Tensor<Cpu> {
    let mut words = Words(seed);
    let mut values: Vec<f32> = (0..rows * cols).map(|_| words.value(specials)).collect();
    for run in values.chunks_mut(64) {
        if words.next().is_multiple_of(8) {
            run.fill(0.0);
        }
    }
    if is_bf16 {
        let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
        Tensor::from_bf16(cpu, &values, rows, cols).unwrap()
    } else {
        Tensor::from_f32(cpu, &values, rows, cols).unwrap()
    }
}

/// Groups of these lengths that start at multiples of `align`, with `spare` rows of capacity at the end; row ids are shuffled.
pub(crate) fn groups(cpu: &Cpu, lens: &[usize], align: usize, spare: usize) -> Groups<Cpu> {
    let mut start = vec![0i32];
    for len in lens {
        start.push(start[start.len() - 1] + len.next_multiple_of(align) as i32);
    }
    let capacity = start[lens.len()] as usize + spare;
    let mut row_id = vec![-1; capacity];
    for (&first, &len) in start.iter().zip(lens) {
        for i in 0..len {
            row_id[first as usize + i] = ((first as usize + i) * 7 + 3) as i32;
        }
    }
    let len: Vec<i32> = lens.iter().map(|&len| len as i32).collect();
    Groups {
        start: cpu.upload(&start).unwrap(),
        len: cpu.upload(&len).unwrap(),
        row_id: cpu.upload(&row_id).unwrap(),
        num_groups: lens.len(),
        align,
        capacity,
        rows_each: None,
    }
}

/// For each row, whether it is valid.
pub(crate) fn valid_rows(groups: &Groups<Cpu>) -> Vec<bool> {
    groups.row_id.as_slice().iter().map(|&id| id >= 0).collect()
}

/// A copy of the tensor with NaNs (quiet, all bits set) in the padding.
pub(crate) fn poisoned(x: &Tensor<Cpu>, groups: &Groups<Cpu>) -> Tensor<Cpu> {
    let mut x = x.clone();
    for (row, valid) in valid_rows(groups).into_iter().enumerate().filter(|(_, valid)| !valid) {
        assert!(!valid);
        let range = row * x.cols..(row + 1) * x.cols;
        match &mut x.data {
            Data::F32(x) => x.as_mut_slice()[range].fill(f32::from_bits(u32::MAX)),
            Data::Bf16(x) => x.as_mut_slice()[range].fill(bf16::from_bits(u16::MAX)),
        }
    }
    x
}

/// A copy of a row-blocked tensor in which all bytes of the padding are 0xFF.
pub(crate) fn poisoned_codes(x: &BlockScaled<Cpu>, groups: &Groups<Cpu>) -> BlockScaled<Cpu> {
    let mut x = x.clone();
    let bytes = x.format.row_code_bytes(x.cols);
    let scale_bytes = x.format.scales_per_row(x.cols) * x.scale_kind().bytes();
    for (row, _) in valid_rows(groups).into_iter().enumerate().filter(|(_, valid)| !valid) {
        x.codes.as_mut_slice()[row * bytes..][..bytes].fill(0xFF);
        x.scales.as_mut_slice()[row * scale_bytes..][..scale_bytes].fill(0xFF);
    }
    x
}

/// Bits of the scales; all NaNs have the same bits.
pub(crate) fn scale_bits(x: &BlockScaled<Cpu>) -> Vec<u64> {
    let num = BlockScaled::<Cpu>::num_scales(x.format, x.axis, x.rows, x.cols, x.stack);
    let (kind, scales) = (x.scale_kind(), scales_of(x));
    (0..num).map(|i| scales.get(i)).map(|s| if kind.is_nan(s) { kind.nan().0 } else { s.0 }).collect()
}

/// Bits of a plain tensor; all NaNs have the same bits.
pub(crate) fn plain_bits(x: &Tensor<Cpu>) -> Vec<u32> {
    let canonical = |v: f32| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() };
    match &x.data {
        Data::F32(x) => x.as_slice().iter().map(|&v| canonical(v)).collect(),
        Data::Bf16(x) => x.as_slice().iter().map(|v| canonical(v.to_f32())).collect(),
    }
}

pub(crate) fn assert_same_block(got: &BlockScaled<Cpu>, expected: &BlockScaled<Cpu>, what: &str) {
    let shape = |x: &BlockScaled<Cpu>| (x.format, x.axis, x.rule, x.rows, x.cols, x.stack);
    assert_eq!(shape(got), shape(expected), "{what}");
    let (codes, expected_codes) = (got.codes.as_slice(), expected.codes.as_slice());
    assert_eq!(codes.len(), expected_codes.len(), "{what}: bytes of codes");
    let wrong = codes.iter().zip(expected_codes).filter(|(a, b)| a != b).count();
    if let Some(at) = codes.iter().zip(expected_codes).position(|(a, b)| a != b) {
        let (a, b) = (codes[at], expected_codes[at]);
        panic!("{what}: {wrong} code bytes differ, first {at}: {a:#04x}, expected {b:#04x}");
    }
    let (scales, expected_scales) = (scale_bits(got), scale_bits(expected));
    let at = scales.iter().zip(&expected_scales).position(|(a, b)| a != b);
    assert_eq!(
        at,
        None,
        "{what}: scales {:?}, expected {:?}",
        at.map(|i| scales[i]),
        at.map(|i| expected_scales[i])
    );
}

pub(crate) fn assert_same_operand(got: &Option<Operand<Cpu>>, expected: &Option<Operand<Cpu>>, what: &str) {
    match (got, expected) {
        (None, None) => {}
        (Some(Operand::Block(got)), Some(Operand::Block(expected))) => assert_same_block(got, expected, what),
        (Some(Operand::Plain(got)), Some(Operand::Plain(expected))) => {
            assert_eq!((got.shape(), got.dtype()), (expected.shape(), expected.dtype()), "{what}");
            let (got, expected) = (plain_bits(got), plain_bits(expected));
            let at = got.iter().zip(&expected).position(|(a, b)| a != b);
            let value = |bits: &[u32]| at.map(|i| f32::from_bits(bits[i]));
            assert_eq!(at, None, "{what}: {:?}, expected {:?}", value(&got), value(&expected));
        }
        _ => panic!("{what}: {got:?}, expected {expected:?}"),
    }
}

pub(crate) fn tally(counts: &Counts<Cpu>) -> [u64; 3] {
    counts.0.as_slice().try_into().unwrap()
}

pub(crate) fn assert_same(got: &Emitted<Cpu>, expected: &Emitted<Cpu>, what: &str) {
    assert_same_operand(&got.rows, &expected.rows, &format!("{what}, rows"));
    assert_same_operand(&got.cols, &expected.cols, &format!("{what}, columns"));
    assert_eq!(got.counts.as_ref().map(tally), expected.counts.as_ref().map(tally), "{what}, counts");
}
