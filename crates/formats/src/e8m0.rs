//! Power-of-two scales: one E8M0 byte `b` stands for 2^(b − 127).
//!
//! 0x00 is 2⁻¹²⁷ (a subnormal `f32`, not zero), 0xFE is 2¹²⁷, and 0xFF is NaN. This module works on exponent bits, because a library
//! logarithm is wrong immediately above a power of two.

use crate::element::Element;
use crate::error::{Error, Result, find_by_name};

/// The NaN byte.
pub const NAN: u8 = 0xFF;

/// The value of a scale byte, 2^(b − 127); NaN for 0xFF.
///
/// ```
/// assert_eq!(nibble_formats::e8m0::decode(128), 2.0);
/// assert_eq!(nibble_formats::e8m0::inv(128), 0.5);
/// ```
#[inline]
pub const fn decode(b: u8) -> f32 {
    match b {
        0 => f32::from_bits(0x0040_0000),
        NAN => f32::NAN,
        _ => f32::from_bits((b as u32) << 23),
    }
}

/// The reciprocal of a scale byte's value, 2^(127 − b), exactly; NaN for 0xFF.
#[inline]
pub const fn inv(b: u8) -> f32 {
    if b == NAN { f32::NAN } else { decode(254 - b) }
}

/// The rule by which the scale of a block follows from its largest magnitude `amax`.
///
/// In the rules below, E is the exponent field of `amax`, and M contains its 23 mantissa bits. `max` is the largest number of the element
/// type, and `emax` is its exponent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleRule {
    /// Maps amax to the largest element, as closely as the format's scales allow. F32 scales of FP8 blocks are max(amax / max, 2⁻¹²⁶).
    Amax,
    /// E8M0, b = E − emax (the OCP rule); elements may saturate.
    Floor,
    /// E8M0, the smallest power of two with amax ≤ max · 2^(b − 127): b = E − emax + (M > mantissa of max). No element saturates
    /// ("truncation-free"). This rule is the default for training.
    Rceil,
    /// E8M0, b = E + (M ≠ 0) − emax; codes above 2^emax are never used.
    Ceil,
    /// E8M0: amax is rounded to the element's precision (ties up), then `Floor` applies. An amax in the last half step below 2¹²⁸ rounds up
    /// to 2¹²⁸, which gives NaN.
    Even,
    /// One F32 tensor scale, from the tensor's largest magnitude. Block scales, if the format has them, are relative to the tensor scale.
    TensorAmax,
    /// HiFloat4 as in Ascend's operators: a block that E6M2 scales cannot represent, such as a block of zeros, gets a NaN scale.
    Cann,
}

impl ScaleRule {
    /// All rules.
    pub const ALL: [ScaleRule; 7] = [
        ScaleRule::Amax,
        ScaleRule::Floor,
        ScaleRule::Rceil,
        ScaleRule::Ceil,
        ScaleRule::Even,
        ScaleRule::TensorAmax,
        ScaleRule::Cann,
    ];

    /// Lower-case name, as recipes spell it.
    pub const fn name(self) -> &'static str {
        match self {
            ScaleRule::Amax => "amax",
            ScaleRule::Floor => "floor",
            ScaleRule::Rceil => "rceil",
            ScaleRule::Ceil => "ceil",
            ScaleRule::Even => "even",
            ScaleRule::TensorAmax => "tensor-amax",
            ScaleRule::Cann => "cann",
        }
    }
}

impl std::fmt::Display for ScaleRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for ScaleRule {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        find_by_name("scale rule", &ScaleRule::ALL, s)
    }
}

/// The E8M0 scale byte of a block whose largest magnitude is |`amax`|, clamped to 0..=254. The byte is 0xFF if `amax` is NaN or infinite,
/// and 0 if `amax` is zero.
///
/// For a rule whose scales are not E8M0, the method returns the byte of [`ScaleRule::Rceil`].
#[inline]
pub const fn encode(rule: ScaleRule, element: Element, amax: f32) -> u8 {
    let bits = amax.to_bits() & 0x7FFF_FFFF;
    let bits = match rule {
        ScaleRule::Even => {
            // Rounding adds half a step of the element's mantissa; the carry may reach the exponent.
            let rounded = bits + (1 << (22 - element.mantissa_bits()));
            if bits < 0x7F80_0000 { rounded } else { bits }
        }
        _ => bits,
    };
    let (exponent, mantissa) = ((bits >> 23) as i32, bits & 0x7F_FFFF);
    if exponent == 255 {
        return NAN;
    }
    // Subnormal magnitudes have no leading bit. In their units, byte 0 covers magnitudes up to 2⁻¹²⁷ · max. This limit is below the largest
    // subnormal only for elements with emax 0.
    let (most, one) = match exponent {
        0 => ((0x80_0000 | element.max().to_bits() & 0x7F_FFFF) >> 1, 0x40_0000),
        _ => (element.max().to_bits() & 0x7F_FFFF, 0),
    };
    let up = match rule {
        ScaleRule::Floor | ScaleRule::Even => false,
        ScaleRule::Ceil => mantissa > one,
        ScaleRule::Rceil | ScaleRule::Amax | ScaleRule::TensorAmax | ScaleRule::Cann => mantissa > most,
    };
    // Elements whose max is below 2 saturate in the last binade, because no larger scale exists.
    let b = exponent + up as i32 - element.emax();
    if b < 0 {
        0
    } else if b > 254 {
        254
    } else {
        b as u8
    }
}
