//! One quantization block: its scale, the parameters of its arithmetic, and the codec of formats with one scale per block.

use crate::e8m0::{self, ScaleRule};
use crate::element::Element;
use crate::rounding::Rounding;
use crate::scale::{Scale, ScaleKind};
use crate::scaling::Scaling;
use crate::square::Square;

/// The scale of a block, as the encoder uses it: the stored scale record, and the factor by which values are multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockScale {
    /// The stored scale record.
    pub record: Scale,
    /// The factor by which all values of a block are multiplied when they are encoded, before factors that depend on the position of a
    /// value. The factor is NaN if the block contained a NaN or an infinity.
    pub inv: f32,
}

impl BlockScale {
    /// Whether this scale marks a block that contained a NaN or an infinity.
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.inv.is_nan()
    }

    /// A power-of-two scale: values are multiplied by 2^(127 − byte).
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

/// The parameters with which a block is encoded and decoded. The parameters follow from the format of the block and from its codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockParams {
    /// The element format of the codes.
    pub element: Element,
    /// The scale rule.
    pub rule: ScaleRule,
    /// The rounding of the elements.
    pub rounding: Rounding,
    /// The kind of scales in a block's scale record.
    pub kind: ScaleKind,
    /// The options of the scale rule.
    pub scaling: Scaling,
    /// Values per block.
    pub block: usize,
    /// Bits of two F32 factors, the tensor scale's multipliers for encoding and for decoding.
    pub(crate) tensor: [u32; 2],
}

impl BlockParams {
    /// The factor by which values are multiplied when they are encoded, instead of being divided by the tensor scale.
    #[inline]
    pub const fn tensor_inv(&self) -> f32 {
        f32::from_bits(self.tensor[0])
    }

    /// The tensor scale; 1 if the format has none.
    #[inline]
    pub const fn tensor_scale(&self) -> f32 {
        f32::from_bits(self.tensor[1])
    }

    /// The scale of a block whose largest magnitude is `amax`, as one power of two or one F32. The scale is NaN if `amax` is NaN or
    /// infinite. The method may be called only for formats whose blocks have one such scale.
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

/// The arithmetic of a format on one block. In the default methods, the code of a value depends only on the value and on the scale of its
/// block. A format overrides these methods if its factors depend on the position of a value, or if it has rules of its own.
///
/// [`scaled`](Self::scaled) and [`multiplier`](Self::multiplier) define the arithmetic of one value. Other methods process several values
/// from the start of a block together, and formats override such methods only for speed.
pub trait BlockCodec: std::fmt::Debug + Sync {
    /// The scale of a block of finite values with the largest magnitude `amax`. `amax` already includes [`Headroom`](crate::Headroom).
    fn scale(&self, params: &BlockParams, x: &[f32], amax: f32) -> BlockScale;

    /// The scale of one line of a 2-D block ([`square`](crate::square)) with the largest magnitude `amax`. Formats with several levels of
    /// scales override this method.
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

    /// Factor by which the decoded element of value `i` is multiplied, without the tensor scale.
    fn multiplier(&self, params: &BlockParams, i: usize, record: Scale) -> f32 {
        params.kind.multiplier(record, i, params.block)
    }

    /// Whether [`multiplier`](Self::multiplier) is the product of one number per scale level: true unless a format overrides `multiplier`.
    fn decodes_by_levels(&self) -> bool {
        true
    }

    /// Applies [`scaled`](Self::scaled) to the first values of a block, in place.
    fn scale_values(&self, params: &BlockParams, x: &mut [f32], scale: BlockScale) {
        for (i, x) in x.iter_mut().enumerate() {
            *x = self.scaled(params, *x, i, scale);
        }
    }

    /// Writes [`multiplier`](Self::multiplier) for the first values of a block.
    fn multipliers(&self, params: &BlockParams, record: Scale, out: &mut [f32]) {
        if self.decodes_by_levels() {
            return params.kind.multipliers(record, params.block, out);
        }
        for (i, out) in out.iter_mut().enumerate() {
            *out = self.multiplier(params, i, record);
        }
    }

    /// The scale with which a finite block's codes are decoded, after its [`Correction`](crate::Correction) if it has one. `r` holds
    /// sixteen random bits of the block.
    fn corrected(&self, _params: &BlockParams, _x: &[f32], scale: BlockScale, _r: u16) -> BlockScale {
        scale
    }

    /// Multipliers for encoding and for decoding a tensor whose largest magnitude is `amax` (which may include headroom).
    fn tensor_scale(&self, _params: &BlockParams, _amax: f32) -> [f32; 2] {
        [1.0, 1.0]
    }

    /// The magnitude to which a tensor's largest magnitude is scaled: the largest code times the largest block scale.
    fn tensor_most(&self, params: &BlockParams) -> f32 {
        params.element.max()
    }
}

/// The codec of formats with one scale per block, computed from the largest magnitude: a power of two or an F32
/// ([`BlockParams::scale_of`]).
#[derive(Debug)]
pub(crate) struct OneNumber;

impl BlockCodec for OneNumber {
    fn scale(&self, params: &BlockParams, _x: &[f32], amax: f32) -> BlockScale {
        params.scale_of(amax)
    }
}

/// The largest magnitude of a block. The result is 0 if the block is empty, and `None` if a value is NaN or infinite.
#[inline]
pub fn amax(x: &[f32]) -> Option<f32> {
    // Magnitudes have the same order as their bits read as integers; infinity and NaNs are above all others.
    let bits = x.iter().map(|v| v.to_bits() & 0x7FFF_FFFF).fold(0, u32::max);
    (bits < 0x7F80_0000).then_some(f32::from_bits(bits))
}
