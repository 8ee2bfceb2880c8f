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
        let unsupported =
            |why| Err(Error::Unsupported { format: spec.name, with: format!("scale rule `{rule}`"), why });
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

#[cfg(test)]
mod tests {
    use super::*;

    fn codec(format: Format, rule: ScaleRule) -> Codec {
        Codec::new(format, rule, Rounding::NearestEven).unwrap()
    }

    #[test]
    fn impossible_combinations_are_named() {
        let new = |format, rule| Codec::new(format, rule, Rounding::NearestEven);
        let e = new(Format::Mxfp4, ScaleRule::Amax).unwrap_err().to_string();
        let want =
            "format `mxfp4` does not go with scale rule `amax`: expected one of rceil, floor, ceil, even";
        assert_eq!(e, want);
        let e = new(Format::Bf16, ScaleRule::Rceil).unwrap_err().to_string();
        assert!(e.starts_with("format `bf16` does not go with scale rule `rceil`: it is a plain"), "{e}");
        assert!(Codec::new(Format::E4m3, ScaleRule::Amax, Rounding::Dither { delta_q16: 0x9000 }).is_err());
        for format in Format::ALL {
            for rule in ScaleRule::ALL {
                assert_eq!(new(format, rule).is_ok(), format.spec().rules.contains(&rule));
            }
        }
    }

    /// Written out by hand: −4, −3.75 … 3.75 under scale 1 (amax 4 gives it under every rule).
    #[test]
    fn a_block_of_quarters_by_hand() {
        let x: [f32; 32] = std::array::from_fn(|i| i as f32 * 0.25 - 4.0);
        let want =
            [0xEE, 0xDE, 0xDD, 0xCC, 0xCC, 0xAB, 0xAA, 0x89, 0x00, 0x21, 0x22, 0x43, 0x44, 0x54, 0x55, 0x66];
        for rule in [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Even] {
            let (mut codes, mut packed) = ([9; 32], [9; 16]);
            let made = codec(Format::Mxfp4, rule).quantize_block(&x, |_| unreachable!(), &mut codes);
            assert_eq!(made, (Scale::E8M0(127), false), "{rule}");
            pack_nibbles(&codes, &mut packed).unwrap();
            assert_eq!(packed, want, "{rule}");
        }
    }

    /// By hand: amax 7 saturates under `floor` (scale 1), not under `rceil` (scale 2).
    #[test]
    fn floor_saturates_where_rceil_doubles() {
        let x = [7.0, -7.0, 1.0, 0.5, -0.0];
        let mut codes = [0; 5];
        let (scale, _) = codec(Format::Mxfp4, ScaleRule::Floor).quantize_block(&x, |_| 0, &mut codes);
        assert_eq!((scale, codes), (Scale::E8M0(127), [7, 15, 2, 1, 8]));
        let (scale, _) = codec(Format::Mxfp4, ScaleRule::Rceil).quantize_block(&x, |_| 0, &mut codes);
        // 3.5 ties up to 4 (even code 6), 0.25 ties down to 0
        assert_eq!((scale, codes), (Scale::E8M0(128), [6, 14, 1, 0, 8]));
    }

    /// By hand: amax 3 of an FP8 block. 3/448 as a single; 3 itself becomes the largest code. As a
    /// power of two, 2⁻⁷ (448 · 2⁻⁸ = 1.75 < 3 ≤ 3.5): 3 · 2⁷ = 384.
    #[test]
    fn fp8_blocks_by_hand() {
        let x = [3.0, -1.5, 0.0, 1e-9];
        let mut codes = [0; 4];
        let (scale, _) = codec(Format::E4m3, ScaleRule::Amax).quantize_block(&x, |_| 0, &mut codes);
        assert_eq!((scale, codes), (Scale::F32(3.0 / 448.0), [0x7E, 0xF6, 0, 0]));
        let (scale, _) = codec(Format::E4m3, ScaleRule::Rceil).quantize_block(&x, |_| 0, &mut codes);
        assert_eq!((scale, codes), (Scale::E8M0(120), [0x7C, 0xF4, 0, 0]));
    }

    #[test]
    fn a_block_of_zeros_is_finite_and_keeps_signs() {
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            let sign = 1u8 << (format.spec().code_bits - 1);
            for &rule in format.spec().rules {
                let mut codes = [9; 2];
                let (scale, nonfinite) = codec(format, rule).quantize_block(&[0.0, -0.0], |_| 0, &mut codes);
                assert!(!nonfinite);
                assert_eq!(codes, [0, sign], "{format} {rule}");
                assert!(matches!(scale, Scale::E8M0(0) | Scale::F32(f32::MIN_POSITIVE)), "{scale:?}");
            }
        }
    }

    #[test]
    fn a_nan_or_infinity_anywhere_marks_the_whole_block() {
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            for &rule in format.spec().rules {
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    for at in [0, 17, 31] {
                        let mut x = [1.0; 32];
                        x[at] = bad;
                        let mut codes = [9; 32];
                        let codec = codec(format, rule);
                        let (scale, nonfinite) = codec.quantize_block(&x, |_| 0, &mut codes);
                        assert!(nonfinite && scale.is_nan(), "{format} {rule} {bad}");
                        assert_eq!(codes, [0; 32]);
                        assert!(codec.decode_element(0, scale).is_nan());
                        assert_eq!(codec.encode_element(1.0, scale, 0), 0);
                    }
                }
            }
        }
    }

    #[test]
    fn even_reports_the_finite_block_it_cannot_hold() {
        let mut codes = [9; 1];
        let (scale, nonfinite) =
            codec(Format::Mxfp4, ScaleRule::Even).quantize_block(&[f32::MAX], |_| 0, &mut codes);
        assert_eq!((scale, nonfinite, codes), (Scale::E8M0(0xFF), true, [0]));
    }

    #[test]
    fn error_is_at_most_half_a_step_at_every_magnitude() {
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            for &rule in
                format.spec().rules.iter().filter(|r| matches!(r, ScaleRule::Rceil | ScaleRule::Amax))
            {
                let codec = codec(format, rule);
                for exponent in -100..100 {
                    let unit = 2f64.powi(exponent) as f32;
                    let x: [f32; 32] = std::array::from_fn(|i| (i as f32 - 15.5) * 0.37 * unit);
                    let mut codes = [0; 32];
                    let (scale, _) = codec.quantize_block(&x, |_| 0, &mut codes);
                    // Half the step of the top binade relative to amax, with room for a scale up to 2× coarse.
                    let bound = 16.0 * 0.37 * unit * 0.5f32.powi(codec.element().mantissa_bits() as i32);
                    for (x, &code) in x.iter().zip(&codes) {
                        let error = (codec.decode_element(code, scale) - x).abs();
                        assert!(error <= bound, "{format} {rule} 2^{exponent}: {x} off by {error}");
                    }
                }
            }
        }
    }

    #[test]
    fn stochastic_blocks_ask_for_bits_by_position() {
        let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic).unwrap();
        let x = [6.0, 2.25, 2.25, -2.25]; // a quarter of the way from 2 to 3
        let mut codes = [0; 4];
        let bits = [0, 0x3FFF, 0x4000, 0x3FFF];
        codec.quantize_block(&x, |i| bits[i], &mut codes);
        assert_eq!(codes, [7, 5, 4, 13]);
        for i in 0..4 {
            assert_eq!(codec.encode_element(x[i], Scale::E8M0(127), bits[i]), codes[i]);
        }
    }

    #[test]
    fn short_blocks_are_extended_by_zero() {
        let mut codes = [9; 4];
        let made = codec(Format::E4m3, ScaleRule::Rceil).quantize_block(&[448.0], |_| 0, &mut codes);
        assert_eq!((made, codes), ((Scale::E8M0(127), false), [0x7E, 0, 0, 0]));
        let made = codec(Format::E4m3, ScaleRule::Rceil).quantize_block(&[], |_| 0, &mut codes);
        assert_eq!((made, codes), ((Scale::E8M0(0), false), [0; 4]));
    }

    #[test]
    fn nibbles_pack_even_elements_low() {
        let mut packed = [0; 2];
        pack_nibbles(&[0x1, 0xF2, 0x3], &mut packed).unwrap();
        assert_eq!(packed, [0x21, 0x03]);
        let mut codes = [0; 3];
        unpack_nibbles(&packed, &mut codes).unwrap();
        assert_eq!(codes, [1, 2, 3]);
        let e = pack_nibbles(&[0; 3], &mut [0; 1]).unwrap_err().to_string();
        assert_eq!(e, "`packed`: got 1, expected 2 bytes for 3 codes");
        assert!(unpack_nibbles(&[0; 3], &mut [0; 3]).is_err());
    }
}
