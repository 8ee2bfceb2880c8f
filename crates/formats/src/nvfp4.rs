//! NVFP4: E2M1 in blocks of 16 under an E4M3 scale, under an F32 scale of the tensor or by itself.
//!
//! Under a scale of the tensor the scales are TransformerEngine's: of a tensor whose largest magnitude is A, S = 2688/A (2688 = 6 · 448), so
//! that the largest block's scale is the largest E4M3 number; of a block, amax · (S · f32(1/6)). By itself a block has torchao's, amax / 6. Both
//! as E4M3, subnormals and zero included. Every operation is rounded to F32.

use crate::block::{BlockCodec, BlockParams, BlockScale};
use crate::e8m0::ScaleRule::{self, Amax, TensorAmax};
use crate::element::Element;
use crate::scale::{Scale, ScaleKind};
use crate::spec::{FormatSpec, PLAIN};

pub(crate) const NVFP4: FormatSpec = FormatSpec {
    name: "nvfp4",
    element: Some(Element::E2M1),
    code_bits: 4,
    block: 16,
    rules: &[TensorAmax, Amax],
    tiles: true,
    scales,
    codec: &Nvfp4,
    ..PLAIN
};

fn scales(rule: ScaleRule) -> ScaleKind {
    if rule == TensorAmax { ScaleKind::E4M3.under_tensor() } else { ScaleKind::E4M3 }
}

#[derive(Debug)]
struct Nvfp4;

impl BlockCodec for Nvfp4 {
    fn scale(&self, params: &BlockParams, _x: &[f32], amax: f32) -> BlockScale {
        let tensor_inv = params.tensor_inv();
        // A product with f32(1/6) may round up to a tie that the quotient lies below.
        let wanted =
            if params.kind.has_tensor_scale() { amax * (tensor_inv * (1.0 / 6.0)) } else { amax / 6.0 };
        let byte = Element::E4M3.encode(wanted);
        let value = Element::E4M3.decode(byte) * (1.0 / tensor_inv);
        // A scale of zero takes what is not zero to the largest code, which decodes as zero.
        // The smaller of NaN and a number would be the number.
        let inv = if value.is_nan() { value } else { (1.0 / value).min(f32::MAX) };
        BlockScale { record: Scale::byte(byte), inv }
    }

    fn tensor_scale(&self, _params: &BlockParams, amax: f32) -> [f32; 2] {
        const LARGEST: f32 = 6.0 * 448.0;
        if amax.is_nan() {
            return [f32::NAN, f32::NAN];
        }
        let inv = (LARGEST / amax).min(f32::MAX);
        if amax == 0.0 || inv == 0.0 { [1.0, 1.0] } else { [inv, amax / LARGEST] }
    }
}
