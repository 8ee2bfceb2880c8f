//! One quantization block: its scale, the parameters of its arithmetic, and the arithmetic of formats with one scale per block.

use crate::e8m0::{self, ScaleRule};
use crate::element::Element;
use crate::rounding::Rounding;
use crate::scale::{Scale, ScaleKind};
use crate::scaling::Scaling;
use crate::square::Square;

/// The scale of a block as its values are encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockScale {
    /// The stored record.
    pub record: Scale,
    /// Factor of values when they are encoded, before factors by position; NaN if the block held a NaN or an infinity.
    pub inv: f32,
}

impl BlockScale {
    /// Whether it marks a block that held a NaN or an infinity.
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.inv.is_nan()
    }

    /// A power of two: values are multiplied by 2^(127 − byte).
    #[inline]
    const fn power(byte: u8) -> BlockScale {
        BlockScale { record: Scale::byte(byte), inv: e8m0::inv(byte) }
    }

    /// An F32 scale: values are multiplied by f32(1 / scale).
    #[inline]
    const fn single(scale: f32) -> BlockScale {
        BlockScale { record: Scale::single(scale), inv: 1.0 / scale }
    }
}

/// Parameters of a block's arithmetic: facts of its format, and the choices of its codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockParams {
    /// The element of the codes.
    pub element: Element,
    /// The scale rule.
    pub rule: ScaleRule,
    /// The rounding of the elements.
    pub rounding: Rounding,
    /// The scales in a block's record.
    pub kind: ScaleKind,
    /// How scales are chosen within the rule.
    pub scaling: Scaling,
    /// Values per block.
    pub block: usize,
    /// Bits of the factors of the tensor scale, for encoding and for decoding.
    pub(crate) tensor: [u32; 2],
}

impl BlockParams {
    /// Factor of values by the tensor scale, when they are encoded.
    #[inline]
    pub const fn tensor_inv(&self) -> f32 {
        f32::from_bits(self.tensor[0])
    }

    /// The tensor scale; 1 if the format has none.
    #[inline]
    pub const fn tensor_scale(&self) -> f32 {
        f32::from_bits(self.tensor[1])
    }

    /// The scale, one power of two or one F32, of a block whose largest magnitude is `amax`; NaN if `amax` is NaN or infinite. Only for
    /// formats with one such scale per block.
    #[inline]
    pub fn scale_of(&self, amax: f32) -> BlockScale {
        match (self.rule, amax.is_finite()) {
            (ScaleRule::Amax, false) => BlockScale::single(f32::NAN),
            (ScaleRule::Amax, true) => {
                BlockScale::single((amax.abs() / self.element.max()).max(f32::MIN_POSITIVE))
            }
            (_, false) => BlockScale::power(e8m0::NAN),
            (rule, true) => BlockScale::power(e8m0::encode(rule, self.element, amax)),
        }
    }
}

/// The arithmetic of a format on one block. With the defaults, a value's code depends only on its block's scale. A format whose values have
/// factors by position, or rules of their own, overrides them.
///
/// [`scaled`](Self::scaled) and [`multiplier`](Self::multiplier) define the arithmetic of one value. The methods for several values apply
/// it to the first values of a block at once; they are overridden only for speed.
pub trait BlockCodec: std::fmt::Debug + Sync {
    /// The scale of a block of finite values, for the largest magnitude `amax`, which includes [`Headroom`](crate::Headroom).
    fn scale(&self, params: &BlockParams, x: &[f32], amax: f32) -> BlockScale;

    /// The scale of a line of a square ([`square`](crate::square)), whose largest magnitude is `amax`. Overridden by formats with scales of
    /// shares of a block.
    fn scale_in_square(
        &self,
        params: &BlockParams,
        _square: Square<'_>,
        _line: usize,
        amax: f32,
    ) -> BlockScale {
        self.scale(params, &[], amax)
    }

    /// Value `i` of a block in units of its element: the number that is rounded to a code.
    fn scaled(&self, _params: &BlockParams, x: f32, _i: usize, scale: BlockScale) -> f32 {
        x * scale.inv
    }

    /// Factor of the element of value `i` of a block when it is decoded, without the tensor scale.
    fn multiplier(&self, params: &BlockParams, i: usize, record: Scale) -> f32 {
        params.kind.multiplier(record, i, params.block)
    }

    /// Whether [`multiplier`](Self::multiplier) is the product of the numbers of its levels: true unless it is overridden.
    fn decodes_by_levels(&self) -> bool {
        true
    }

    /// [`scaled`](Self::scaled) of the first values of a block, in place.
    fn scale_values(&self, params: &BlockParams, x: &mut [f32], scale: BlockScale) {
        for (i, x) in x.iter_mut().enumerate() {
            *x = self.scaled(params, *x, i, scale);
        }
    }

    /// [`multiplier`](Self::multiplier) of the first values of a block.
    fn multipliers(&self, params: &BlockParams, record: Scale, out: &mut [f32]) {
        if self.decodes_by_levels() {
            return params.kind.multipliers(record, params.block, out);
        }
        for (i, out) in out.iter_mut().enumerate() {
            *out = self.multiplier(params, i, record);
        }
    }

    /// The scale with the record for decoding a finite block's codes, if it is corrected ([`Correction`](crate::Correction)). `r`: sixteen
    /// random bits of the block.
    fn corrected(&self, _params: &BlockParams, _x: &[f32], scale: BlockScale, _r: u16) -> BlockScale {
        scale
    }

    /// Factors for encoding and for decoding the values of a tensor with the largest magnitude `amax` (which may include headroom).
    fn tensor_scale(&self, _params: &BlockParams, _amax: f32) -> [f32; 2] {
        [1.0, 1.0]
    }

    /// What this magnitude is scaled to: the largest code times the largest block scale.
    fn tensor_most(&self, params: &BlockParams) -> f32 {
        params.element.max()
    }
}

/// One number per block, from its largest magnitude: a power of two or an F32 ([`BlockParams::scale_of`]).
#[derive(Debug)]
pub(crate) struct OneNumber;

impl BlockCodec for OneNumber {
    fn scale(&self, params: &BlockParams, _x: &[f32], amax: f32) -> BlockScale {
        params.scale_of(amax)
    }
}

/// Largest magnitude of a block, 0 for an empty one; `None` if a value is NaN or infinite.
#[inline]
pub fn amax(x: &[f32]) -> Option<f32> {
    // As integers, magnitudes order as their bits do, with infinity and the NaNs above all others.
    let bits = x.iter().map(|v| v.to_bits() & 0x7FFF_FFFF).fold(0, u32::max);
    (bits < 0x7F80_0000).then_some(f32::from_bits(bits))
}
