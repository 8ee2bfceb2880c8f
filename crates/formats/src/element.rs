//! Element formats: small numbers without a scale of their own (E2M1, E2M3, E3M2, E4M3FN, E5M2, INT8, S1P2).
//!
//! All are floats with subnormals, so one description (mantissa bits, bias, largest code) drives one encoder. INT8 and S1P2 have
//! equal steps throughout: they are floats with one exponent bit. INT8 alone is stored in two's complement, the others as sign and magnitude. A magnitude is first written as `floor_code + fraction` of a code step;
//! each rounding only decides whether to step up. [`Element::encode`] is the same for nearest-even,
//! done on the bits without that split because it is the hot one.

use crate::rounding::Rounding;

/// A small number that a code of 4, 6 or 8 bits stands for.
///
/// | element | bits S/E/M, bias | largest | smallest | specials |
/// |---|---|---|---|---|
/// | `E2m1` | 1/2/1, 1 | 6 | 0.5 | none |
/// | `E2m3` | 1/2/3, 1 | 7.5 | 0.125 | none |
/// | `E3m2` | 1/3/2, 3 | 28 | 0.0625 | none |
/// | `E4m3` | 1/4/3, 7 | 448 (0x7E) | 2⁻⁹ | NaN 0x7F, 0xFF; no infinity |
/// | `E5m2` | 1/5/2, 15 | 57344 (0x7B) | 2⁻¹⁶ | infinity 0x7C, 0xFC; NaN 0x7D..=0x7F, 0xFD..=0xFF |
/// | `Int8` | two's complement / 64 | 127/64 | 1/64 | no −0; 0x80 (−2) is read and never written |
/// | `S1p2` | 1/1/2, 1: quarters | 1.75 | 0.25 | none |
///
/// ```
/// use nibble_formats::Element;
/// assert_eq!(Element::E2m1.encode(-2.5), 0b1100); // the tie goes to the even code: -2
/// assert_eq!(Element::E2m1.decode(0b1100), -2.0);
/// assert_eq!(Element::E4m3.encode(1e9), 0x7E); // saturates at 448
/// assert_eq!(Element::Int8.encode(-0.5), 0xE0); // -32 / 64
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; codes 0..=15.
    E2m1,
    /// FP6 with three mantissa bits; codes 0..=63.
    E2m3,
    /// FP6 with three exponent bits; codes 0..=63.
    E3m2,
    /// FP8 E4M3FN: largest 448, NaN, no infinity.
    E4m3,
    /// FP8 E5M2: largest 57344, NaN and infinity.
    E5m2,
    /// Sixty-fourths from −127/64 to 127/64, in two's complement.
    Int8,
    /// Sign and quarters, to 1.75 (E1M2).
    S1p2,
}

/// What tells one element from another.
struct Facts {
    name: &'static str,
    mantissa_bits: u32,
    code_bits: u32,
    bias: i32,
    max: f32,
    max_code: u8,
    nan_code: u8,
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
    pub const ALL: [Element; 7] = [
        Element::E2m1,
        Element::E2m3,
        Element::E3m2,
        Element::E4m3,
        Element::E5m2,
        Element::Int8,
        Element::S1p2,
    ];

    const fn facts(self) -> &'static Facts {
        macro_rules! facts {
            ($name:literal, $mantissa_bits:literal, $code_bits:literal, $bias:literal, $max:expr, $max_code:literal, $nan_code:literal) => {
                &Facts {
                    name: $name,
                    mantissa_bits: $mantissa_bits,
                    code_bits: $code_bits,
                    bias: $bias,
                    max: $max,
                    max_code: $max_code,
                    nan_code: $nan_code,
                }
            };
        }
        match self {
            Element::E2m1 => facts!("e2m1", 1, 4, 1, 6.0, 0x07, 0),
            Element::E2m3 => facts!("e2m3", 3, 6, 1, 7.5, 0x1F, 0),
            Element::E3m2 => facts!("e3m2", 2, 6, 3, 28.0, 0x1F, 0),
            Element::E4m3 => facts!("e4m3", 3, 8, 7, 448.0, 0x7E, 0x7F),
            Element::E5m2 => facts!("e5m2", 2, 8, 15, 57344.0, 0x7B, 0x7F),
            Element::Int8 => facts!("int8", 6, 8, 1, 127.0 / 64.0, 0x7F, 0),
            Element::S1p2 => facts!("s1p2", 2, 4, 1, 1.75, 0x07, 0),
        }
    }

    /// Short lower-case name: `e2m1`, `e4m3`, ...
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Explicit mantissa bits.
    pub const fn mantissa_bits(self) -> u32 {
        self.facts().mantissa_bits
    }

    /// Bits of a code, sign included.
    pub const fn code_bits(self) -> u32 {
        self.facts().code_bits
    }

    /// Exponent bias.
    pub const fn bias(self) -> i32 {
        self.facts().bias
    }

    /// Largest finite value.
    pub const fn max(self) -> f32 {
        self.facts().max
    }

    /// Exponent of the largest finite value, ⌊log2 max⌋.
    pub const fn emax(self) -> i32 {
        (self.max().to_bits() >> 23) as i32 - 127
    }

    /// Code of the largest finite positive value.
    pub const fn max_code(self) -> u8 {
        self.facts().max_code
    }

    /// What a NaN is cast to: E4M3 and E5M2 have a NaN (0x7F is used, whatever the sign); the others have
    /// none and give 0, because a block with a NaN carries it in its scale.
    pub const fn nan_code(self) -> u8 {
        self.facts().nan_code
    }

    /// Whether a code stands for zero, of either sign; bits above the code's are not looked at.
    #[inline]
    pub const fn is_zero(self, code: u8) -> bool {
        let magnitude = match self {
            Element::Int8 => 0xFF,
            _ => (1u8 << (self.code_bits() - 1)) - 1,
        };
        code & magnitude == 0
    }

    /// The code of a magnitude's code with the sign of `x`.
    #[inline]
    const fn signed(self, magnitude: u8, x: f32) -> u8 {
        let negative = x.to_bits() >> 31;
        match self {
            Element::Int8 if negative == 1 => magnitude.wrapping_neg(),
            Element::Int8 => magnitude,
            _ => magnitude | (negative << (self.code_bits() - 1)) as u8,
        }
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
        self.signed(code, x)
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
        self.signed(code, x)
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

    /// The value of a code; bits above the code's are not looked at.
    #[inline]
    pub const fn decode(self, code: u8) -> f32 {
        match self {
            Element::E2m1 => E2M1_VALUES[(code & 15) as usize],
            Element::E2m3 => E2M3_VALUES[(code & 63) as usize],
            Element::E3m2 => E3M2_VALUES[(code & 63) as usize],
            Element::E4m3 => E4M3_VALUES[code as usize],
            Element::E5m2 => E5M2_VALUES[code as usize],
            Element::Int8 => code as i8 as f32 / 64.0,
            Element::S1p2 => S1P2_VALUES[(code & 15) as usize],
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
static E2M3_VALUES: [f32; 64] = values(Element::E2m3);
static E3M2_VALUES: [f32; 64] = values(Element::E3m2);
static E4M3_VALUES: [f32; 256] = values(Element::E4m3);
static E5M2_VALUES: [f32; 256] = values(Element::E5m2);
static S1P2_VALUES: [f32; 16] = values(Element::S1p2);

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
