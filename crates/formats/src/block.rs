//! One quantization block: its scale, what its arithmetic is told, and the arithmetic of formats whose blocks have one number.

use crate::e8m0::{self, ScaleRule};
use crate::element::Element;
use crate::rounding::Rounding;
use crate::scale::{Scale, ScaleKind};
use crate::scaling::Scaling;

/// The scale of a block as its values are encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockScale {
    /// What is stored.
    pub record: Scale,
    /// What values are multiplied by before they are encoded, before any position's own factor; NaN if the block held a NaN or an infinity.
    pub inv: f32,
}

impl BlockScale {
    /// Whether this marks a block that held a NaN or an infinity.
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.inv.is_nan()
    }

    /// A power of two: values are multiplied by 2^(127 − byte).
    #[inline]
    const fn power(byte: u8) -> BlockScale {
        BlockScale { record: Scale::byte(byte), inv: e8m0::inv(byte) }
    }

    /// A single: values are multiplied by f32(1 / scale).
    #[inline]
    const fn single(scale: f32) -> BlockScale {
        BlockScale { record: Scale::single(scale), inv: 1.0 / scale }
    }
}

/// What a block's arithmetic is told of the tensor: the facts of its format, and what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockParams {
    /// What codes stand for.
    pub element: Element,
    /// The scale rule.
    pub rule: ScaleRule,
    /// The rounding of the elements.
    pub rounding: Rounding,
    /// What a block's record holds.
    pub kind: ScaleKind,
    /// How scales are chosen within the rule.
    pub scaling: Scaling,
    /// Values of a block.
    pub block: usize,
    /// Bits of the tensor's multipliers, of encoding and of decoding.
    pub(crate) tensor: [u32; 2],
}

impl BlockParams {
    /// What values are multiplied by for the tensor's sake when they are encoded.
    #[inline]
    pub const fn tensor_inv(&self) -> f32 {
        f32::from_bits(self.tensor[0])
    }

    /// The scale that all blocks of the tensor share; 1 where the format has none.
    #[inline]
    pub const fn tensor_scale(&self) -> f32 {
        f32::from_bits(self.tensor[1])
    }

    /// The scale, one power of two or one single, of a block whose largest magnitude is `amax`; NaN if that is NaN or infinite.
    /// For formats whose block has one such number only.
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

/// The arithmetic of a format on one block. Where the defaults serve, a value's code depends on its block's scale alone; a format whose
/// values have factors of their own by position, or rules of their own, overrides them.
///
/// [`scaled`](Self::scaled) and [`multiplier`](Self::multiplier) define what happens to one value. The methods of several values do the
/// same to the first values of a block at once; they are overridden for speed alone.
pub trait BlockCodec: std::fmt::Debug + Sync {
    /// The scale of a block of finite values, the largest magnitude of which is to be taken for `amax`: with [`Headroom`](crate::Headroom) a larger one.
    fn scale(&self, params: &BlockParams, x: &[f32], amax: f32) -> BlockScale;

    /// Value `i` of a block, in the units of its element: what is rounded to a code.
    fn scaled(&self, _params: &BlockParams, x: f32, _i: usize, scale: BlockScale) -> f32 {
        x * scale.inv
    }

    /// What the element of value `i` of a block is multiplied by when it is decoded, the tensor's scale aside.
    fn multiplier(&self, params: &BlockParams, i: usize, record: Scale) -> f32 {
        params.kind.multiplier(record, i, params.block)
    }

    /// Whether [`multiplier`](Self::multiplier) is the product of the numbers of its levels: so where it is not overridden.
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

    /// The same scale with the record under which a finite block's codes are decoded, where that is corrected ([`Correction`](crate::Correction)).
    /// `r`: sixteen random bits of the block.
    fn corrected(&self, _params: &BlockParams, _x: &[f32], scale: BlockScale, _r: u16) -> BlockScale {
        scale
    }

    /// For what is to be taken for the largest magnitude of a tensor: what its values are multiplied by when they are encoded, and when they are decoded.
    fn tensor_scale(&self, _params: &BlockParams, _amax: f32) -> [f32; 2] {
        [1.0, 1.0]
    }

    /// What that magnitude becomes: the largest code times the largest scale that a block takes.
    fn tensor_most(&self, params: &BlockParams) -> f32 {
        params.element.max()
    }
}

/// One number a block, which follows from its largest magnitude: a power of two or a single ([`BlockParams::scale_of`]).
#[derive(Debug)]
pub(crate) struct OneNumber;

impl BlockCodec for OneNumber {
    fn scale(&self, params: &BlockParams, _x: &[f32], amax: f32) -> BlockScale {
        params.scale_of(amax)
    }
}

/// Largest magnitude of a block, 0 for an empty one; `None` where a value is NaN or infinite.
#[inline]
pub fn amax(x: &[f32]) -> Option<f32> {
    // As integers, magnitudes order as their bits do, with infinity and the NaNs above all others.
    let bits = x.iter().map(|v| v.to_bits() & 0x7FFF_FFFF).fold(0, u32::max);
    (bits < 0x7F80_0000).then_some(f32::from_bits(bits))
}
