//! FP8 in blocks of 128 values, and with one scale per row or per tensor. Row scales follow torchao, and tensor scales follow
//! TransformerEngine's current scaling: values are multiplied by max/amax, and the reciprocal of that factor is stored. (Blocks of 128
//! store amax/max, which has different bits.)

use crate::block::{BlockCodec, BlockParams, BlockScale};
use crate::e8m0::ScaleRule::{self, Amax, Ceil, Even, Floor, Rceil, TensorAmax};
use crate::element::Element;
use crate::scale::{Scale, ScaleKind};
use crate::spec::{FormatSpec, PLAIN, WHOLE_LINE};

/// FP8 with one scale per block.
const BLOCKS: FormatSpec =
    FormatSpec { code_bits: 8, block: 128, rules: &[Amax, Rceil, Floor, Ceil, Even], tiles: true, ..PLAIN };

/// FP8 with one scale per row.
const ROW: FormatSpec =
    FormatSpec { block: WHOLE_LINE, rules: &[Amax, Rceil], tiles: false, codec: &Line, ..BLOCKS };

/// FP8 with one scale per tensor. Blocks store no scales. They are only the unit of the block counters, and groups start at multiples of
/// the block length.
const TENSOR: FormatSpec =
    FormatSpec { rules: &[TensorAmax], scales: |_| ScaleKind::NONE.under_tensor(), codec: &Tensor, ..BLOCKS };

pub(crate) const E4M3: FormatSpec = FormatSpec { name: "e4m3", element: Some(Element::E4M3), ..BLOCKS };
pub(crate) const E5M2: FormatSpec = FormatSpec { name: "e5m2", element: Some(Element::E5M2), ..BLOCKS };
pub(crate) const E4M3_ROW: FormatSpec = FormatSpec { name: "e4m3-row", element: Some(Element::E4M3), ..ROW };
pub(crate) const E5M2_ROW: FormatSpec = FormatSpec { name: "e5m2-row", element: Some(Element::E5M2), ..ROW };
pub(crate) const E4M3_TENSOR: FormatSpec =
    FormatSpec { name: "e4m3-tensor", element: Some(Element::E4M3), ..TENSOR };
pub(crate) const E5M2_TENSOR: FormatSpec =
    FormatSpec { name: "e5m2-tensor", element: Some(Element::E5M2), ..TENSOR };

/// The codec with one scale per row of codes: a row of an operand along the contraction.
#[derive(Debug)]
struct Line;

impl BlockCodec for Line {
    fn scale(&self, params: &BlockParams, _x: &[f32], amax: f32) -> BlockScale {
        if params.rule != ScaleRule::Amax || amax.is_nan() {
            return params.scale_of(amax);
        }
        // The division is in F64, as in torchao, with the lower bound that keeps the scale of a row of zeros finite.
        let inv = (f64::from(params.element.max()) / f64::from(amax.max(1e-12))) as f32;
        BlockScale { record: Scale::single(1.0 / inv), inv }
    }
}

/// The codec with one scale per tensor.
#[derive(Debug)]
struct Tensor;

impl BlockCodec for Tensor {
    fn scale(&self, params: &BlockParams, _x: &[f32], _amax: f32) -> BlockScale {
        BlockScale { record: Scale(0), inv: params.tensor_inv() }
    }

    fn tensor_scale(&self, params: &BlockParams, amax: f32) -> [f32; 2] {
        if amax == 0.0 {
            return [1.0, 1.0];
        }
        // `f32::min` would drop a NaN, which must make the tensor scale NaN.
        let inv = self.tensor_most(params) / amax;
        let inv = if inv == f32::INFINITY { f32::MAX } else { inv };
        [inv, 1.0 / inv]
    }
}

#[cfg(test)]
mod tests {
    use crate::{Codec, Format, Rounding, Scale, ScaleRule};

    /// For amax 3, values are multiplied by f32(448/3). The stored reciprocal of this factor differs from f32(3/448).
    #[test]
    fn the_reciprocal_of_the_multiplier_is_kept() {
        let x = [3.0, -1.5, 0.0, 1e-9];
        let inv = 448.0f32 / 3.0;
        let row = Codec::new(Format::E4m3Row, ScaleRule::Amax, Rounding::NearestEven).unwrap();
        let mut codes = [0; 4];
        assert_eq!(row.quantize_block(&x, |_| 0, &mut codes), (Scale::single(1.0 / inv), false));
        assert_eq!(codes, [0x7E, 0xF6, 0, 0]);
        let tensor = Codec::new(Format::E4m3Tensor, ScaleRule::TensorAmax, Rounding::NearestEven).unwrap();
        let tensor = tensor.for_tensor(tensor.tensor_amax(x.into_iter()));
        assert_eq!(tensor.quantize_block(&x, |_| 0, &mut codes), (Scale(0), false));
        assert_eq!((codes, tensor.tensor_scale()), ([0x7E, 0xF6, 0, 0], 1.0 / inv));
        assert_eq!(tensor.decode(0x7E, 0, Scale(0)), 448.0 * (1.0 / inv));
    }

    #[test]
    fn rows_may_have_powers_of_two() {
        let row = Codec::new(Format::E5m2Row, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
        let mut codes = [0; 2];
        let (scale, _) = row.quantize_block(&[57345.0, 1.0], |_| 0, &mut codes);
        assert_eq!((scale, codes), (Scale::byte(128), [0x77, 0x38]));
    }

    #[test]
    fn rows_and_tensors_of_zeros_and_of_the_smallest_numbers_stay_finite() {
        for (format, rule) in
            [(Format::E4m3Row, ScaleRule::Amax), (Format::E5m2Tensor, ScaleRule::TensorAmax)]
        {
            for least in [0.0, f32::from_bits(1)] {
                let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
                let codec = codec.for_tensor(codec.tensor_amax([least].into_iter()));
                let mut codes = [0; 1];
                let (scale, nonfinite) = codec.quantize_block(&[least], |_| 0, &mut codes);
                assert!(!nonfinite && codec.decode(codes[0], 0, scale).is_finite(), "{format} {least:e}");
            }
        }
    }
}
