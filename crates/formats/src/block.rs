//! One quantization block: its scale and its codes. Scalar, and the specification that every faster
//! path is held to.

use crate::e8m0::{self, ScaleRule};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::format::Format;
use crate::rounding::Rounding;

/// The scale of one block; it multiplies an element's value to decode it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// A power of two, 2^(byte − 127); 0xFF is NaN.
    E8M0(u8),
    /// A single.
    F32(f32),
}

impl Scale {
    /// The multiplier as a float.
    #[inline]
    pub const fn decode(self) -> f32 {
        match self {
            Scale::E8M0(b) => e8m0::decode(b),
            Scale::F32(s) => s,
        }
    }

    /// What values are multiplied by before they are encoded: 2^(127 − b), or f32(1 / s).
    #[inline]
    pub const fn inv(self) -> f32 {
        match self {
            Scale::E8M0(b) => e8m0::inv(b),
            Scale::F32(s) => 1.0 / s,
        }
    }

    /// Whether this marks a block that held a NaN or an infinity.
    #[inline]
    pub const fn is_nan(self) -> bool {
        match self {
            Scale::E8M0(b) => b == e8m0::NAN,
            Scale::F32(s) => s.is_nan(),
        }
    }
}

/// How blocks of a format are made: format, scale rule and rounding, known to go together.
///
/// ```
/// use nibble_formats::{Codec, Format, Rounding, Scale, ScaleRule};
/// let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven)?;
/// let mut x = [0.0f32; 32];
/// x[..3].copy_from_slice(&[12.0, -2.0, 0.4]);
/// let mut codes = [0u8; 32];
/// let (scale, nonfinite) = codec.quantize_block(&x, |_| 0, &mut codes);
/// assert_eq!((scale, nonfinite), (Scale::E8M0(128), false)); // 12 = 6 · 2
/// assert_eq!(codes[..4], [7, 8 | 2, 0, 0]);
/// assert_eq!(codec.decode_element(codes[1], scale), -2.0);
/// # Ok::<(), nibble_formats::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Codec {
    format: Format,
    element: Element,
    rule: ScaleRule,
    rounding: Rounding,
}

impl Codec {
    /// A codec of a block format.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a plain format or a rule the format does not know;
    /// [`Error::Value`] for a dither above half a step.
    pub fn new(format: Format, rule: ScaleRule, rounding: Rounding) -> Result<Codec> {
        let spec = format.spec();
        let unsupported = |why| {
            Err(Error::Unsupported { format: spec.name, with: format!("scale rule `{rule}`"), why })
        };
        let Some(element) = spec.element else {
            return unsupported("it is a plain format, without block scales".to_owned());
        };
        if !spec.rules.contains(&rule) {
            let names: Vec<_> = spec.rules.iter().map(|r| r.name()).collect();
            return unsupported(format!("expected one of {}", names.join(", ")));
        }
        rounding.check()?;
        Ok(Codec { format, element, rule, rounding })
    }

    /// The format.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// The element format of the codes.
    pub const fn element(&self) -> Element {
        self.element
    }

    /// The scale rule.
    pub const fn rule(&self) -> ScaleRule {
        self.rule
    }

    /// The rounding of the elements.
    pub const fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// The scale of a block whose largest finite magnitude is `amax`; NaN where `nonfinite` says
    /// that the block holds a NaN or an infinity, or `amax` itself is one.
    #[inline]
    pub fn scale(&self, amax: f32, nonfinite: bool) -> Scale {
        let nonfinite = nonfinite || !amax.is_finite();
        match self.rule {
            ScaleRule::Amax if nonfinite => Scale::F32(f32::NAN),
            ScaleRule::Amax => Scale::F32((amax.abs() / self.element.max()).max(f32::MIN_POSITIVE)),
            _ if nonfinite => Scale::E8M0(e8m0::NAN),
            rule => Scale::E8M0(e8m0::encode(rule, self.element, amax)),
        }
    }

    /// The code of `x` under `scale`: the product f32(x · [`Scale::inv`]) rounded by the codec's
    /// rounding, saturating. `r`: sixteen random bits, used by the random roundings only.
    /// Under a NaN scale every code is 0.
    #[inline]
    pub fn encode_element(&self, x: f32, scale: Scale, r: u16) -> u8 {
        if scale.is_nan() {
            return 0;
        }
        self.element.encode_rounded(x * scale.inv(), self.rounding, r)
    }

    /// The value f32(element · scale) of a code.
    #[inline]
    pub fn decode_element(&self, code: u8, scale: Scale) -> f32 {
        self.element.decode(code) * scale.decode()
    }

    /// Quantizes one block (of any length: short blocks are zero-extended, tiles are passed whole).
    ///
    /// Writes one code a byte: `codes[i]` for `x[i]`; codes past the end of `x` become 0, and values
    /// past the end of `codes` count for the scale only. `rand(i)` gives sixteen random bits for
    /// element `i` and is called by the random roundings only. A NaN or infinity anywhere makes the
    /// scale NaN and all codes 0. Returns the scale and whether it is NaN (which the rule `even` also
    /// yields for a finite block within half a step of 2¹²⁸).
    pub fn quantize_block(
        &self,
        x: &[f32],
        mut rand: impl FnMut(usize) -> u16,
        codes: &mut [u8],
    ) -> (Scale, bool) {
        let scale = match amax(x) {
            Some(amax) => self.scale(amax, false),
            None => self.scale(0.0, true),
        };
        codes.fill(0);
        if scale.is_nan() {
            return (scale, true);
        }
        let inv = scale.inv();
        let random = self.rounding.is_random();
        for (i, (code, &x)) in codes.iter_mut().zip(x).enumerate() {
            let r = if random { rand(i) } else { 0 };
            *code = self.element.encode_rounded(x * inv, self.rounding, r);
        }
        (scale, false)
    }
}

/// Largest magnitude of a block, 0 for an empty one; `None` where a value is NaN or infinite.
#[inline]
pub fn amax(x: &[f32]) -> Option<f32> {
    // As integers, magnitudes order as their bits do, with infinity and the NaNs above all others.
    let bits = x.iter().map(|v| v.to_bits() & 0x7FFF_FFFF).fold(0, u32::max);
    (bits < 0x7F80_0000).then_some(f32::from_bits(bits))
}

/// Packs 4-bit codes (one a byte, high bits ignored) two a byte, the even element in the low nibble;
/// with an odd count the last high nibble is 0.
///
/// # Errors
/// [`Error::Shape`] unless `packed` holds ⌈codes / 2⌉ bytes.
pub fn pack_nibbles(codes: &[u8], packed: &mut [u8]) -> Result<()> {
    check_packed(codes.len(), packed.len())?;
    for (byte, pair) in packed.iter_mut().zip(codes.chunks(2)) {
        *byte = (pair[0] & 15) | pair.get(1).map_or(0, |high| high << 4);
    }
    Ok(())
}

/// Undoes [`pack_nibbles`].
///
/// # Errors
/// [`Error::Shape`] unless `packed` holds ⌈codes / 2⌉ bytes.
pub fn unpack_nibbles(packed: &[u8], codes: &mut [u8]) -> Result<()> {
    check_packed(codes.len(), packed.len())?;
    for (byte, pair) in packed.iter().zip(codes.chunks_mut(2)) {
        pair[0] = byte & 15;
        if let Some(high) = pair.get_mut(1) {
            *high = byte >> 4;
        }
    }
    Ok(())
}

fn check_packed(codes: usize, packed: usize) -> Result<()> {
    if packed == codes.div_ceil(2) {
        return Ok(());
    }
    let expected = format!("{} bytes for {codes} codes", codes.div_ceil(2));
    Err(Error::Shape { argument: "packed", got: packed, expected })
}
