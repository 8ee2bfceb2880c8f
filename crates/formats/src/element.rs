//! Element formats: small floats without a scale of their own (E2M1, E4M3FN, E5M2).
//!
//! All three are sign-magnitude with subnormals, so one description (mantissa bits, bias, largest
//! code) drives one encoder. A magnitude is first written as `floor_code + fraction` of a code step;
//! each rounding only decides whether to step up. [`Element::encode`] is the same for nearest-even,
//! done on the bits without that split because it is the hot one.

use crate::rounding::Rounding;

/// A small float that a code of 4 or 8 bits stands for.
///
/// | element | bits S/E/M, bias | largest | smallest | specials |
/// |---|---|---|---|---|
/// | `E2m1` | 1/2/1, 1 | 6 | 0.5 | none |
/// | `E4m3` | 1/4/3, 7 | 448 (0x7E) | 2⁻⁹ | NaN 0x7F, 0xFF; no infinity |
/// | `E5m2` | 1/5/2, 15 | 57344 (0x7B) | 2⁻¹⁶ | infinity 0x7C, 0xFC; NaN 0x7D..=0x7F, 0xFD..=0xFF |
///
/// ```
/// use nibble_formats::Element;
/// assert_eq!(Element::E2m1.encode(-2.5), 0b1100); // the tie goes to the even code: -2
/// assert_eq!(Element::E2m1.decode(0b1100), -2.0);
/// assert_eq!(Element::E4m3.encode(1e9), 0x7E); // saturates at 448
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; codes 0..=15.
    E2m1,
    /// FP8 E4M3FN: largest 448, NaN, no infinity.
    E4m3,
    /// FP8 E5M2: largest 57344, NaN and infinity.
    E5m2,
}

/// A magnitude as code + fraction of the step to the next code.
struct Split {
    /// The largest code whose value does not exceed the magnitude.
    floor_code: u32,
    /// Fraction of the step to the next code, in units of 2⁻³², cut off.
    fraction_q32: u32,
    /// Something non-zero was cut off.
    sticky: bool,
}

impl Element {
    /// Every element format.
    pub const ALL: [Element; 3] = [Element::E2m1, Element::E4m3, Element::E5m2];

    /// Short lower-case name: `e2m1`, `e4m3`, `e5m2`.
    pub const fn name(self) -> &'static str {
        match self {
            Element::E2m1 => "e2m1",
            Element::E4m3 => "e4m3",
            Element::E5m2 => "e5m2",
        }
    }

    /// Explicit mantissa bits.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Element::E2m1 => 1,
            Element::E4m3 => 3,
            Element::E5m2 => 2,
        }
    }

    /// Bits of a code, sign included.
    pub const fn code_bits(self) -> u32 {
        match self {
            Element::E2m1 => 4,
            Element::E4m3 | Element::E5m2 => 8,
        }
    }

    /// Exponent bias.
    pub const fn bias(self) -> i32 {
        match self {
            Element::E2m1 => 1,
            Element::E4m3 => 7,
            Element::E5m2 => 15,
        }
    }

    /// Largest finite value: 6, 448, 57344.
    pub const fn max(self) -> f32 {
        match self {
            Element::E2m1 => 6.0,
            Element::E4m3 => 448.0,
            Element::E5m2 => 57344.0,
        }
    }

    /// Exponent of the largest finite value, ⌊log2 max⌋: 2, 8, 15.
    pub const fn emax(self) -> i32 {
        match self {
            Element::E2m1 => 2,
            Element::E4m3 => 8,
            Element::E5m2 => 15,
        }
    }

    /// Code of the largest finite positive value.
    pub const fn max_code(self) -> u8 {
        match self {
            Element::E2m1 => 0x7,
            Element::E4m3 => 0x7E,
            Element::E5m2 => 0x7B,
        }
    }

    /// What a NaN is cast to: E4M3 and E5M2 have a NaN (0x7F is used, whatever the sign); E2M1 has
    /// none and gives 0, because a block with a NaN carries it in its scale.
    pub const fn nan_code(self) -> u8 {
        match self {
            Element::E2m1 => 0,
            Element::E4m3 | Element::E5m2 => 0x7F,
        }
    }

    /// The sign of `x` at its place in a code.
    const fn sign_code(self, x: f32) -> u8 {
        ((x.to_bits() >> 31) << (self.code_bits() - 1)) as u8
    }

    /// The nearest code, ties to the even code; magnitudes beyond [`max`](Self::max), infinities
    /// too, saturate; the sign of zero is kept; a NaN gives [`nan_code`](Self::nan_code).
    #[inline]
    pub const fn encode(self, x: f32) -> u8 {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        if magnitude > 0x7F80_0000 {
            return self.nan_code();
        }
        let code = if magnitude >= self.max().to_bits() {
            self.max_code()
        } else if magnitude < self.min_normal_bits() {
            // The unit in the last place of `shifter` is the element's subnormal step, so the
            // addition itself rounds to nearest-even and leaves the code in the low bits.
            let shifter = self.subnormal_shifter();
            ((f32::from_bits(magnitude) + shifter).to_bits() - shifter.to_bits()) as u8
        } else {
            // Re-bias, then round the mantissa away from below half, to even at half.
            let shift = 23 - self.mantissa_bits();
            let rebased = magnitude - (((127 - self.bias()) as u32) << 23);
            let odd = (rebased >> shift) & 1;
            ((rebased + (1 << (shift - 1)) - 1 + odd) >> shift) as u8
        };
        code | self.sign_code(x)
    }

    /// Bits of the smallest normal magnitude, 2^(1 − bias).
    const fn min_normal_bits(self) -> u32 {
        ((128 - self.bias()) as u32) << 23
    }

    /// 2^(23 + exponent of the smallest subnormal).
    const fn subnormal_shifter(self) -> f32 {
        let exponent = 1 - self.bias() - self.mantissa_bits() as i32 + 23;
        f32::from_bits(((127 + exponent) as u32) << 23)
    }

    /// Stochastic rounding with sixteen random bits: the magnitude goes up iff
    /// `r < ⌊fraction · 2¹⁶⌋`, `fraction` being how far it lies from the code below towards the next.
    /// Representable values never move; saturation, NaN and zero as [`encode`](Self::encode).
    #[inline]
    pub fn encode_sr(self, x: f32, r: u16) -> u8 {
        self.encode_by(x, |s| u32::from(r) < s.fraction_q32 >> 16)
    }

    /// Encodes with any rounding; `r` is used by the random ones only.
    #[inline]
    pub fn encode_rounded(self, x: f32, rounding: Rounding, r: u16) -> u8 {
        const HALF: i64 = 1 << 31;
        match rounding {
            Rounding::NearestEven => self.encode(x),
            Rounding::NearestAway => self.encode_by(x, |s| i64::from(s.fraction_q32) >= HALF),
            Rounding::Stochastic => self.encode_sr(x, r),
            Rounding::Dither { delta_q16 } => self.encode_by(x, |s| {
                // d = δ·(2r + 1 − 2¹⁶)/2¹⁶ lies symmetrically in (−δ, δ); in units of 2⁻³².
                let d_q32 = i64::from(delta_q16) * (2 * i64::from(r) + 1 - 65536);
                let t = i64::from(s.fraction_q32) + d_q32;
                t > HALF || (t == HALF && (s.sticky || s.floor_code & 1 == 1))
            }),
        }
    }

    /// Encodes by the decision `up` on the split magnitude.
    #[inline]
    fn encode_by(self, x: f32, up: impl FnOnce(&Split) -> bool) -> u8 {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        if magnitude > 0x7F80_0000 {
            return self.nan_code();
        }
        let code = if magnitude >= self.max().to_bits() {
            self.max_code()
        } else {
            let split = self.split(magnitude);
            (split.floor_code + u32::from(up(&split))) as u8
        };
        code | self.sign_code(x)
    }

    /// Splits the bits of a magnitude below the largest one.
    #[inline]
    fn split(self, magnitude: u32) -> Split {
        // magnitude = significand · 2^(exponent − 150), subnormal floats at exponent 1.
        let field = magnitude >> 23;
        let significand = u64::from(if field == 0 { magnitude } else { (magnitude & 0x7F_FFFF) | 0x80_0000 });
        let exponent = field.max(1) as i32;
        let min_exponent = 128 - self.bias(); // exponent field of the smallest normal element
        let base = (exponent - min_exponent).max(0);
        // Steps are 2^(exponent − 127 − m) for normal elements and those of the smallest normal below.
        let below = (min_exponent - exponent).max(0) as u32;
        let shift = (23 - self.mantissa_bits() + below).min(60); // at 60 nothing but sticky is left
        let steps = (significand >> shift) as u32;
        let rest = significand & ((1 << shift) - 1);
        let (fraction_q32, sticky) = if shift <= 32 {
            ((rest << (32 - shift)) as u32, false)
        } else {
            ((rest >> (shift - 32)) as u32, rest & ((1 << (shift - 32)) - 1) != 0)
        };
        let floor_code = ((base as u32) << self.mantissa_bits()) + steps;
        Split { floor_code, fraction_q32, sticky }
    }

    /// The value of a code; E2M1 looks at the low four bits only.
    #[inline]
    pub const fn decode(self, code: u8) -> f32 {
        match self {
            Element::E2m1 => E2M1_VALUES[(code & 15) as usize],
            Element::E4m3 => E4M3_VALUES[code as usize],
            Element::E5m2 => E5M2_VALUES[code as usize],
        }
    }

    /// The value of a code from its fields: the definition behind the tables of `decode`.
    const fn decode_fields(self, code: u8) -> f32 {
        let m = self.mantissa_bits();
        let negative = (code >> (self.code_bits() - 1)) & 1 == 1;
        let magnitude = code & ((1u8 << (self.code_bits() - 1)) - 1);
        let field = (magnitude >> m) as u32;
        let mantissa = (magnitude & ((1 << m) - 1)) as u32;
        let value = if magnitude > self.max_code() {
            match self {
                Element::E5m2 if mantissa == 0 => f32::INFINITY,
                _ => f32::NAN,
            }
        } else if field == 0 {
            let step = 1 - self.bias() - m as i32;
            mantissa as f32 * f32::from_bits(((127 + step) as u32) << 23)
        } else {
            f32::from_bits(((field as i32 + 127 - self.bias()) as u32) << 23 | mantissa << (23 - m))
        };
        if negative { -value } else { value }
    }
}

/// Values of all codes of an element.
const fn values<const N: usize>(element: Element) -> [f32; N] {
    let mut table = [0.0; N];
    let mut code = 0;
    while code < N {
        table[code] = element.decode_fields(code as u8);
        code += 1;
    }
    table
}

static E2M1_VALUES: [f32; 16] = values(Element::E2m1);
static E4M3_VALUES: [f32; 256] = values(Element::E4m3);
static E5M2_VALUES: [f32; 256] = values(Element::E5m2);

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
