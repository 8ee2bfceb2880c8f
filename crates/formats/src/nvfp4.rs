//! NVFP4: E2M1 in blocks of 16 with an E4M3 scale, with or without an F32 tensor scale.
//!
//! With a tensor scale, the scales are TransformerEngine's. For a tensor with the largest magnitude A, S = 2688/A (2688 = 6 · 448), so that
//! the largest block's scale is the largest E4M3 number. A block's scale is amax · (S · f32(1/6)). Without a tensor scale, a block has
//! torchao's scale, amax / 6. Either scale is rounded to E4M3 and may be subnormal or zero. Every operation is rounded to F32.
//!
//! Decoding multiplies by A/2688. Below A = 2688 · 2^-128, S is the largest F32 number instead of 2688/A. In this case A/2688 is not the
//! inverse of S, and all values decode too small, as in TransformerEngine. Headroom multiplies A and the largest magnitude of each block by
//! the same factor, so that even the tensor's largest block has its headroom.
//!
//! With two candidates (Four Over Six, arXiv 2512.02010), a block has either this scale or amax · (S / 4), which maps its largest magnitude
//! to 4. The second scale is rounded once, because a multiplication by 1/4 is exact. S is then 1536/A (1536 = 6 · 256). The candidates are
//! compared under nearest-even rounding, even if the codes are rounded otherwise. So the choice of a candidate depends only on the values,
//! and does not bias stochastic rounding.
//!
//! **Double blocks** (Chen et al., "TetraJet-v2", arXiv 2510.27527) have a scale per 128 values instead of a tensor scale: A / 2688 for the
//! largest magnitude A of these values. In the paper, this scale is an F32 number. Nibble rounds it up to a power of two, as
//! [`Outer::Power`] does for a tensor, so that the decoded values are BF16 numbers. Blocks of 16 are scaled as with a tensor scale. A scale
//! record covers 128 values: the power of two in the lowest byte, then seven bits per block of 16. The record has eight bytes, as many as
//! eight E4M3 scales.

use crate::block::{self, BlockCodec, BlockParams, BlockScale};
use crate::e8m0::{self, ScaleRule, ScaleRule::Amax, ScaleRule::TensorAmax};
use crate::element::Element;
use crate::rounding::Rounding;
use crate::scale::{Scale, ScaleKind};
use crate::scaling::{Candidates, Correction, Outer};
use crate::spec::{FormatSpec, PLAIN};

pub(crate) const NVFP4: FormatSpec = FormatSpec {
    name: "nvfp4",
    element: Some(Element::E2M1),
    code_bits: 4,
    block: 16,
    rules: &[TensorAmax, Amax],
    tiles: true,
    has_candidates: true,
    has_correction: true,
    scales,
    codec: &Nvfp4,
    ..PLAIN
};

pub(crate) const NVFP4_128: FormatSpec = FormatSpec {
    name: "nvfp4-128",
    element: Some(Element::E2M1),
    code_bits: 4,
    block: 128,
    rules: &[Amax],
    scales: |_| ScaleKind::POWER_AND_E4M3,
    codec: &DoubleBlocks,
    ..PLAIN
};

fn scales(rule: ScaleRule) -> ScaleKind {
    if rule == TensorAmax { ScaleKind::E4M3.under_tensor() } else { ScaleKind::E4M3 }
}

#[derive(Debug)]
struct Nvfp4;

impl BlockCodec for Nvfp4 {
    fn scale(&self, params: &BlockParams, x: &[f32], amax: f32) -> BlockScale {
        let tensor_inv = params.tensor_inv();
        // A product with f32(1/6) may round up to a tie while the quotient is below the tie.
        let wanted = match (params.kind.has_tensor_scale(), params.scaling.correction) {
            (true, Correction::None) => amax * (tensor_inv * (1.0 / 6.0)),
            (true, Correction::MsEden) => amax * (tensor_inv * (Correction::CLIP / 6.0)),
            (false, _) => amax / 6.0,
        };
        let six = nearest_scale(wanted, tensor_inv);
        if params.scaling.candidates == Candidates::Six || six.is_nan() {
            return six;
        }
        let four = nearest_scale(amax * (tensor_inv * 0.25), tensor_inv);
        let [of_six, of_four] = [six, four].map(|scale| error(params, x, scale, six.record));
        if of_four < of_six { four } else { six }
    }

    fn corrected(&self, params: &BlockParams, x: &[f32], scale: BlockScale, r: u16) -> BlockScale {
        let of_code = Element::E4M3.decode(scale.record.0 as u8);
        // If the scale is zero, all values decode to zero.
        if params.scaling.correction == Correction::None || of_code == 0.0 {
            return scale;
        }
        let factor = eden_factor(x, scale.inv);
        let byte = Element::E4M3.encode_rounded(of_code * factor, Rounding::Stochastic, r);
        BlockScale { record: Scale::byte(byte), ..scale }
    }

    fn tensor_scale(&self, params: &BlockParams, amax: f32) -> [f32; 2] {
        if amax.is_nan() {
            return [f32::NAN, f32::NAN];
        }
        let largest = self.tensor_most(params);
        let inv = (largest / amax).min(f32::MAX);
        if amax == 0.0 || inv == 0.0 {
            return [1.0, 1.0];
        }
        match params.scaling.outer {
            Outer::Tensor => [inv, amax / largest],
            Outer::Power => {
                let scale = power_above(amax / largest);
                [1.0 / scale, scale]
            }
        }
    }

    fn tensor_most(&self, params: &BlockParams) -> f32 {
        // The range above the scales of candidate 6 is left for the scales of candidate 4, or for corrections.
        match (params.scaling.candidates, params.scaling.correction) {
            (_, Correction::MsEden) => 6.0 * 256.0 / Correction::CLIP,
            (Candidates::Six, Correction::None) => 6.0 * 448.0,
            (_, Correction::None) => 6.0 * 256.0,
        }
    }
}

/// The codec of double blocks: blocks of 16 values, and a power of two per 128 values.
#[derive(Debug)]
struct DoubleBlocks;

impl DoubleBlocks {
    /// Values of an inner block.
    const INNER: usize = 16;

    /// Factor by which the values of inner block `i` are multiplied when they are encoded.
    fn inverse(scale: BlockScale, i: usize) -> f32 {
        let byte = (scale.record.0 >> (8 + 7 * i)) as u8 & 0x7F;
        inverse_of(byte, scale.inv)
    }
}

impl BlockCodec for DoubleBlocks {
    fn scale(&self, params: &BlockParams, x: &[f32], amax: f32) -> BlockScale {
        if amax == 0.0 {
            return BlockScale { record: ScaleKind::POWER_AND_E4M3.least(), inv: e8m0::inv(0) };
        }
        // The power of two is a normal number without mantissa bits.
        let power = (power_above(amax / (6.0 * 448.0)).to_bits() >> 23) as u8;
        let inv = e8m0::inv(power);
        let mut record = u64::from(power);
        for (i, x) in x.chunks(Self::INNER).enumerate() {
            // The caller guarantees finite values.
            let amax = params.scaling.headroom.over(block::amax(x).unwrap_or(f32::NAN));
            record |= nearest_scale(amax * (inv * (1.0 / 6.0)), inv).record.0 << (8 + 7 * i);
        }
        BlockScale { record: Scale(record), inv }
    }

    fn scaled(&self, _params: &BlockParams, x: f32, i: usize, scale: BlockScale) -> f32 {
        x * Self::inverse(scale, i / Self::INNER)
    }

    fn scale_values(&self, _params: &BlockParams, x: &mut [f32], scale: BlockScale) {
        for (i, x) in x.chunks_mut(Self::INNER).enumerate() {
            let inverse = Self::inverse(scale, i);
            x.iter_mut().for_each(|x| *x *= inverse);
        }
    }
}

/// The scale for the E4M3 number nearest to `wanted`.
fn nearest_scale(wanted: f32, tensor_inv: f32) -> BlockScale {
    let byte = Element::E4M3.encode(wanted);
    BlockScale { record: Scale::byte(byte), inv: inverse_of(byte, tensor_inv) }
}

/// Factor by which values are multiplied for an E4M3 scale.
fn inverse_of(byte: u8, tensor_inv: f32) -> f32 {
    let value = Element::E4M3.decode(byte) * (1.0 / tensor_inv);
    // With a scale of zero, non-zero values get the largest code, which decodes to zero. The NaN check is explicit because `min` of NaN and
    // a number returns the number.
    if value.is_nan() { value } else { (1.0 / value).min(f32::MAX) }
}

/// The sum of errors of a block's values with a scale, as an integer. The unit is the same for both candidates.
///
/// For a value x with the code c: r = (|x · S| − c · scale) · 2^−e, where 2^e is the power of two of candidate 6's scale, at least 2^−9.
/// The value adds r² · 2^20, or |r| · 2^20, truncated to an integer of at most 2^24 − 1. Every operation is rounded to F32; c · scale and
/// the powers are exact.
fn error(params: &BlockParams, x: &[f32], scale: BlockScale, six: Scale) -> u64 {
    const ONE: f32 = (1 << 20) as f32;
    const MOST: f32 = ((1 << 24) - 1) as f32;
    let of_code = Element::E4M3.decode(scale.record.0 as u8);
    let exponent = Element::E4M3.decode(six.0 as u8).max(1.0 / 512.0).to_bits() >> 23;
    let unit = f32::from_bits((254 - exponent) << 23);
    let is_squared = params.scaling.candidates == Candidates::FourOrSixMse;
    let share = |x: &f32| {
        let r = ((x * params.tensor_inv()).abs() - nearest_code(x.abs() * scale.inv) * of_code) * unit;
        let share = if is_squared { r * r } else { r.abs() };
        u64::from((share * ONE).min(MOST) as u32)
    };
    x.iter().map(share).sum()
}

/// Σ v² / Σ v·c of the values v = x · inv and their codes c; 1 if all codes are zero. Every operation is rounded to F32. The sum has
/// sixteen partial sums; the i-th adds the i-th of every sixteen values in order. The partial sums are added in pairs at distances 8, 4, 2
/// and 1.
fn eden_factor(x: &[f32], inv: f32) -> f32 {
    let (mut squares, mut products) = ([0.0f32; 16], [0.0f32; 16]);
    for sixteen in x.chunks(16) {
        for ((x, square), product) in sixteen.iter().zip(&mut squares).zip(&mut products) {
            let v = (x * inv).abs();
            *square += v * v;
            *product += v * nearest_code(v);
        }
    }
    let [square, product] = [squares, products].map(sum_of_halves);
    if product > 0.0 { square / product } else { 1.0 }
}

fn sum_of_halves(mut x: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            x[i] += x[i + half];
        }
    }
    x[0]
}

/// The E2M1 number nearest to a magnitude, with ties to the even code. The result equals that of decoding [`Element::encode`], but is
/// computed without branches.
#[inline]
fn nearest_code(x: f32) -> f32 {
    // The unit in the last place of this number is the step between codes.
    let far = if x < 2.0 { 4_194_304.0 } else { 8_388_608.0 } * if x < 4.0 { 1.0 } else { 2.0 };
    (x.min(6.0) + far) - far
}

/// The smallest normal power of two that is not below a positive number.
fn power_above(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0x7F_FFFF) & 0xFF80_0000).max(f32::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_code_is_the_encoders() {
        let around = |x: f32| [-1, 0, 1].map(|by| f32::from_bits((x.to_bits() as i32 + by).max(0) as u32));
        let steps = (0..4000).map(|i| i as f32 / 512.0).chain([f32::MIN_POSITIVE, 1e9, f32::MAX]);
        for x in steps.flat_map(around) {
            let code = Element::E2M1.encode(x);
            assert_eq!(nearest_code(x), Element::E2M1.decode(code), "{x}");
        }
    }

    #[test]
    fn powers_above_by_hand() {
        for (x, power) in [(1.0, 1.0), (1.0000001, 2.0), (3.0, 4.0), (0.75, 1.0), (1e-45, f32::MIN_POSITIVE)]
        {
            assert_eq!(power_above(x), power, "{x}");
        }
    }
}
