//! HiFloat4: multiples of 1/4 up to 1.75 (S1P2) in blocks of 64 values. A block has an E6M2 scale, an optional factor of two per eighth of
//! the block, and another optional factor of two per sixteenth. A scale record has four bytes: the E6M2 byte, eight bits, and sixteen bits;
//! the first sub-block has the lowest bit.
//!
//! The scales follow from the largest magnitudes of the sub-blocks: a sub-block gets a factor of two if its largest magnitude reaches a
//! threshold. Values are multiplied by the BF16 reciprocal of the scale, which is up to 0.2 % off. Thresholds that avoid saturation use the
//! F32 reciprocal instead. Two conventions exist. Under the rule `amax`, a block of zeros has the smallest scale, blocks too large for E6M2
//! saturate, and elements are rounded from the exact product. Under `cann`, Ascend's rule, blocks that E6M2 cannot scale (including zeros)
//! get a NaN scale, and the product is rounded to BF16 before it is rounded to an element.

use crate::block::{BlockCodec, BlockParams, BlockScale};
use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::rounding::Rounding;
use crate::scale::{Scale, ScaleKind, ScaleNumber};
use crate::spec::{FormatSpec, PLAIN};
use crate::square::Square;
use half::bf16;

pub(crate) const HIF4: FormatSpec = FormatSpec {
    name: "hif4",
    element: Some(Element::S1P2),
    code_bits: 4,
    block: 64,
    rules: &[ScaleRule::Amax, ScaleRule::Cann],
    rounding: Rounding::NearestAway,
    squares: true,
    has_thresholds: true,
    scales: |_| ScaleKind::HIF4,
    codec: &Hif4,
    ..PLAIN
};

#[derive(Debug)]
struct Hif4;

/// 1/7 in BF16.
const SEVENTH: f64 = 73.0 / 512.0;
/// The smallest and the largest E6M2 number.
const LEAST: f64 = 1.0 / (1u64 << 48) as f64;
const MOST: f64 = 49152.0;

impl BlockCodec for Hif4 {
    fn scale(&self, params: &BlockParams, x: &[f32], amax: f32) -> BlockScale {
        let quads = quad_maxima(x);
        scale_of(params, amax, quads, std::array::from_fn(|share| quads[2 * share].max(quads[2 * share + 1])))
    }

    fn scale_in_square(
        &self,
        params: &BlockParams,
        square: Square<'_>,
        line: usize,
        amax: f32,
    ) -> BlockScale {
        let shares = |side: usize, i: usize| {
            let first = line / side * side;
            square.largest(first..first + side, i * side..(i + 1) * side)
        };
        let quads = std::array::from_fn(|quad| shares(4, quad));
        scale_of(params, amax, quads, std::array::from_fn(|share| shares(8, share)))
    }

    fn scaled(&self, params: &BlockParams, x: f32, i: usize, scale: BlockScale) -> f32 {
        let shift = shift(scale.record, i);
        match params.rule {
            ScaleRule::Cann => by_bf16(x, scale.inv, shift),
            _ => by_product(x, scale.inv, shift),
        }
    }

    fn scale_values(&self, params: &BlockParams, x: &mut [f32], scale: BlockScale) {
        let mut shifts = [0.0; 64];
        for (quad, shifts) in shifts.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *shifts = [shift(scale.record, 4 * quad); 4];
        }
        let values = x.iter_mut().zip(&shifts);
        match params.rule {
            ScaleRule::Cann => values.for_each(|(x, shift)| *x = by_bf16(*x, scale.inv, *shift)),
            _ => values.for_each(|(x, shift)| *x = by_product(*x, scale.inv, *shift)),
        }
    }
}

/// The scale of a block whose largest magnitude is `amax`, from the largest magnitudes of the values that share the octaves of each sixteenth
/// and of each eighth.
fn scale_of(params: &BlockParams, amax: f32, sixteenths: [f32; 16], eighths: [f32; 8]) -> BlockScale {
    let wanted = if params.rule == ScaleRule::Cann {
        let wanted = to_bits(f64::from(bf16::from_f32(amax)) * SEVENTH, 8);
        // From half a step above the largest number on, the byte would be NaN.
        if !(LEAST..1.625 * 32768.0).contains(&wanted) {
            return BlockScale { record: ScaleKind::HIF4.nan(), inv: f32::NAN };
        }
        wanted
    } else {
        to_bits(f64::from(amax) * SEVENTH, 8).clamp(LEAST, MOST)
    };
    let byte = e6m2_byte(to_bits(wanted, 3));
    let inv = 1.0 / ScaleNumber::E6m2.decode(byte);
    let inv = if params.scaling.thresholds.divides() { inv } else { bf16::from_f32(inv).to_f32() };
    let exact = |amax: f32| f64::from(amax) * f64::from(inv);
    let [high, low] = params.scaling.thresholds.bounds();
    let mut record = u64::from(byte);
    for (share, ([a, b], both)) in sixteenths.as_chunks::<2>().0.iter().zip(eighths).enumerate() {
        let doubled = exact(both) >= high;
        let bound = if doubled { high } else { low };
        let of_quads = u64::from(exact(*a) >= bound) | u64::from(exact(*b) >= bound) << 1;
        record |= u64::from(doubled) << (8 + share) | of_quads << (16 + 2 * share);
    }
    BlockScale { record: Scale(record), inv }
}

/// The reciprocal of the octaves of value `i` beyond those of E6M2.
#[inline]
fn shift(record: Scale, i: usize) -> f64 {
    let octaves = (record.0 >> (8 + i / 8) & 1) + (record.0 >> (16 + i / 4) & 1);
    1.0 / f64::from(1u32 << octaves)
}

/// x · inv · shift, exact except for the last bit, which [`to_odd`] sets.
#[inline]
fn by_product(x: f32, inv: f32, shift: f64) -> f32 {
    to_odd(f64::from(x) * f64::from(inv) * shift)
}

/// The same product, with x · inv rounded to BF16, as in Ascend's operators.
#[inline]
fn by_bf16(x: f32, inv: f32, shift: f64) -> f32 {
    (f64::from(bf16::from_f32(x * inv).to_f32()) * shift) as f32
}

/// The largest magnitude of every four values of a block; 0 for groups past the end of the block.
fn quad_maxima(x: &[f32]) -> [f32; 16] {
    let mut extended = [0.0; 64];
    let whole = x.first_chunk().unwrap_or_else(|| {
        extended[..x.len()].copy_from_slice(x);
        &extended
    });
    let quads = whole.as_chunks::<4>().0;
    std::array::from_fn(|i| f32::from_bits(quads[i].iter().fold(0, |a, x| a.max(x.to_bits() & 0x7FFF_FFFF))))
}

/// A positive number rounded to `significant` bits; ties go to even.
fn to_bits(x: f64, significant: u32) -> f64 {
    if x <= 0.0 || !x.is_finite() {
        return x;
    }
    let (bits, cut) = (x.to_bits(), 53 - significant);
    let odd = bits >> cut & 1;
    f64::from_bits((bits + (1 << (cut - 1)) - 1 + odd) >> cut << cut)
}

/// The byte of an E6M2 number.
fn e6m2_byte(x: f64) -> u32 {
    let bits = x.to_bits();
    let exponent = (bits >> 52) as u32 + 48 - 1023;
    exponent << 2 | (bits >> 50 & 3) as u32
}

/// A number truncated to F32, with the last bit set if the truncation was inexact (round to odd). So a second rounding gives the same
/// result as rounding the number itself.
#[inline]
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    // Truncate towards zero; the last bit marks an inexact result.
    let (beyond, inexact) = (back.abs() > x.abs(), back != x);
    f32::from_bits((nearest.to_bits() - u32::from(beyond)) | u32::from(inexact))
}

#[cfg(test)]
mod tests {
    use crate::{Codec, Format, Rounding, Scale, ScaleRule};

    /// The example block of the format's description, with scales and codes computed by hand.
    fn block() -> [f32; 64] {
        let mut x = [0.0; 64];
        x[..16].copy_from_slice(&[
            11.0, -3.0, 0.5, 6.5, 1.0, -2.0, 0.75, 0.1875, 4.0, -1.0, 2.5, 1.5, 3.5, 0.25, -0.25, 1.25,
        ]);
        x[16..24].copy_from_slice(&[0.5, -0.5, 1.75, 0.125, 0.0, -0.0, 0.0625, -0.125]);
        x[24..32].copy_from_slice(&[7.0, -5.0, 4.5, 3.0, 2.0, 1.0, -1.5, 0.375]);
        for i in 0..32 {
            x[32 + i] = (i + 1) as f32 / 16.0 * if i % 2 == 0 { 1.0 } else { -1.0 };
        }
        x
    }

    #[test]
    fn a_block_by_hand_under_both_conventions() {
        let x = block();
        let (mut here, mut cann) = ([0; 64], [0; 64]);
        let codec = |rule, rounding| Codec::new(Format::Hif4, rule, rounding).unwrap();
        let ours = codec(ScaleRule::Amax, Rounding::NearestAway);
        assert_eq!(ours.quantize_block(&x, |_| 0, &mut here), (Scale(0x004D_09C2), false));
        assert_eq!(here[..8], [7, 0xA, 0, 4, 1, 0xB, 1, 0]);
        let values: Vec<f32> = (0..8).map(|i| ours.decode(here[i], i, Scale(0x004D_09C2))).collect();
        assert_eq!(values, [10.5, -3.0, 0.0, 6.0, 0.75, -2.25, 0.75, 0.0]);
        let theirs = codec(ScaleRule::Cann, Rounding::NearestEven);
        assert_eq!(theirs.quantize_block(&x, |_| 0, &mut cann), (Scale(0x004D_09C2), false));
        let differing: Vec<usize> = (0..64).filter(|&i| here[i] != cann[i]).collect();
        assert_eq!(differing, [31, 34, 46, 58]);
    }

    #[test]
    fn zeros_are_finite_here_and_not_under_the_other_convention() {
        for (rule, marked) in [(ScaleRule::Amax, false), (ScaleRule::Cann, true)] {
            let codec = Codec::new(Format::Hif4, rule, Rounding::NearestAway).unwrap();
            let (scale, nonfinite) = codec.quantize_block(&[0.0; 64], |_| 0, &mut [0; 64]);
            assert_eq!((scale, nonfinite), (Scale(if marked { 0xFF } else { 0 }), marked), "{rule}");
        }
    }

    /// Elements slightly above and below a tie, closer to it than F32 can represent after the multiplication.
    #[test]
    fn elements_are_rounded_once() {
        let mut x = [0.0f32; 64];
        x[0] = 7.0;
        let codec = Codec::new(Format::Hif4, ScaleRule::Amax, Rounding::NearestAway).unwrap();
        let mut codes = [0; 64];
        let (scale, _) = codec.quantize_block(&x, |_| 0, &mut codes);
        assert_eq!(scale.0 & 0xFF, 48 << 2); // the scale is 1: values of the second eighth are multiplied by one
        for (value, code) in [(0.125f32, 1), (0.125f32.next_down(), 0), (0.125f32.next_up(), 1)] {
            x[8] = value;
            codec.quantize_block(&x, |_| 0, &mut codes);
            assert_eq!(codes[8], code, "{value:e}");
        }
    }
}
