//! Element formats: small numbers without a scale of their own (E2M1, E2M3, E3M2, E4M3FN, E5M2, INT8, S1P2).
//!
//! All are floats with subnormals, so one description (mantissa bits, bias, largest code) drives one encoder. INT8 and S1P2 have a constant
//! step size: they are floats with one exponent bit. Only INT8 is stored in two's complement; the others are stored as sign and magnitude.
//! A magnitude is first written as `floor_code + fraction` of a code step; each rounding only decides whether to step up.
//! [`Element::encode`] computes nearest-even rounding directly on the bits, with the same result, because `encode` is on the hot path.

use crate::rounding::Rounding;

/// A small number format with codes of 4, 6 or 8 bits.
///
/// | element | bits S/E/M, bias | largest | smallest | specials |
/// |---|---|---|---|---|
/// | `E2M1` | 1/2/1, 1 | 6 | 0.5 | none |
/// | `E2M3` | 1/2/3, 1 | 7.5 | 0.125 | none |
/// | `E3M2` | 1/3/2, 3 | 28 | 0.0625 | none |
/// | `E4M3` | 1/4/3, 7 | 448 (0x7E) | 2⁻⁹ | NaN 0x7F, 0xFF; no infinity |
/// | `E5M2` | 1/5/2, 15 | 57344 (0x7B) | 2⁻¹⁶ | infinity 0x7C, 0xFC; NaN 0x7D..=0x7F, 0xFD..=0xFF |
/// | `INT8` | two's complement / 64 | 127/64 | 1/64 | no −0; 0x80 (−2) is read and never written |
/// | `S1P2` | 1/1/2, 1: quarters | 1.75 | 0.25 | none |
///
/// ```
/// use nibble_formats::Element;
/// assert_eq!(Element::E2M1.encode(-2.5), 0b1100); // the tie goes to the even code: -2
/// assert_eq!(Element::E2M1.decode(0b1100), -2.0);
/// assert_eq!(Element::E4M3.encode(1e9), 0x7E); // saturates at 448
/// assert_eq!(Element::INT8.encode(-0.5), 0xE0); // -32 / 64
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Element(&'static ElementFacts);

/// The facts of an element.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct ElementFacts {
    name: &'static str,
    code_bits: u32,
    mantissa_bits: u32,
    bias: i32,
    max_code: u8,
    nan_code: u8,
    /// Whether the first code above `max_code` is infinity; otherwise it is NaN like the codes above it.
    has_infinity: bool,
    /// Whether negative codes are two's complement, instead of sign and magnitude.
    twos_complement: bool,
}

impl ElementFacts {
    /// A format with sign, exponent, mantissa and subnormals, in which all codes are finite numbers.
    pub(crate) const fn float(name: &'static str, code_bits: u32, mantissa_bits: u32, bias: i32) -> Self {
        let max_code = (1u8 << (code_bits - 1)) - 1;
        let (nan_code, has_infinity, twos_complement) = (0, false, false);
        Self { name, code_bits, mantissa_bits, bias, max_code, nan_code, has_infinity, twos_complement }
    }

    /// The same format with a smaller largest number, and NaNs above it.
    const fn ending_at(self, max_code: u8, nan_code: u8) -> Self {
        Self { max_code, nan_code, ..self }
    }

    /// The same format with an infinity in the code after its largest number.
    const fn with_infinity(self) -> Self {
        Self { has_infinity: true, ..self }
    }

    /// The same format in two's complement.
    const fn in_twos_complement(self) -> Self {
        Self { twos_complement: true, ..self }
    }
}

/// A magnitude, as a code plus a fraction of the step to the next code.
struct Split {
    /// The largest code whose value does not exceed the magnitude.
    floor_code: u32,
    /// Fraction of the step to the next code, in units of 2⁻³², truncated.
    fraction_q32: u32,
    /// Whether truncation of `fraction_q32` dropped non-zero bits.
    sticky: bool,
}

impl Element {
    /// FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; codes 0..=15.
    pub const E2M1: Element = Element::of(&ElementFacts::float("e2m1", 4, 1, 1));
    /// FP6 with three mantissa bits; codes 0..=63.
    pub const E2M3: Element = Element::of(&ElementFacts::float("e2m3", 6, 3, 1));
    /// FP6 with three exponent bits; codes 0..=63.
    pub const E3M2: Element = Element::of(&ElementFacts::float("e3m2", 6, 2, 3));
    /// FP8 E4M3FN, whose largest number is 448, with a NaN and no infinity.
    pub const E4M3: Element = Element::of(&ElementFacts::float("e4m3", 8, 3, 7).ending_at(0x7E, 0x7F));
    /// FP8 E5M2, whose largest number is 57344, with NaNs and infinities.
    pub const E5M2: Element =
        Element::of(&ElementFacts::float("e5m2", 8, 2, 15).ending_at(0x7B, 0x7F).with_infinity());
    /// Multiples of 1/64 from −127/64 to 127/64, in two's complement.
    pub const INT8: Element = Element::of(&ElementFacts::float("int8", 8, 6, 1).in_twos_complement());
    /// Signed multiples of 1/4 up to 1.75 (E1M2).
    pub const S1P2: Element = Element::of(&ElementFacts::float("s1p2", 4, 2, 1));

    /// An element with these facts; the name in them must be unique.
    pub(crate) const fn of(facts: &'static ElementFacts) -> Element {
        Element(facts)
    }

    #[inline]
    const fn facts(self) -> &'static ElementFacts {
        self.0
    }

    /// Short lower-case name: `e2m1`, `e4m3`, ...
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Number of explicit mantissa bits.
    #[inline]
    pub const fn mantissa_bits(self) -> u32 {
        self.facts().mantissa_bits
    }

    /// Bits of a code, sign included.
    #[inline]
    pub const fn code_bits(self) -> u32 {
        self.facts().code_bits
    }

    /// Exponent bias.
    #[inline]
    pub const fn bias(self) -> i32 {
        self.facts().bias
    }

    /// Largest finite value.
    #[inline]
    pub const fn max(self) -> f32 {
        self.decode(self.max_code())
    }

    /// Exponent of the largest finite value, ⌊log2 max⌋.
    #[inline]
    pub const fn emax(self) -> i32 {
        (self.max().to_bits() >> 23) as i32 - 127
    }

    /// Code of the largest finite positive value.
    #[inline]
    pub const fn max_code(self) -> u8 {
        self.facts().max_code
    }

    /// The code of a NaN. E4M3 and E5M2 have a NaN (0x7F, whatever the sign). For other elements, which have no NaN, the method returns 0,
    /// because the scale of a block marks a NaN.
    #[inline]
    pub const fn nan_code(self) -> u8 {
        self.facts().nan_code
    }

    /// Whether negative codes are two's complement, instead of sign and magnitude.
    #[inline]
    pub const fn is_twos_complement(self) -> bool {
        self.facts().twos_complement
    }

    /// Whether the code after [`max_code`](Self::max_code) is infinity. All other codes above `max_code` are NaN.
    #[inline]
    pub const fn has_infinity(self) -> bool {
        self.facts().has_infinity
    }

    /// Whether a code represents +0 or −0. Bits above the width of the code are ignored.
    #[inline]
    pub const fn is_zero(self, code: u8) -> bool {
        let magnitude = if self.facts().twos_complement { 0xFF } else { (1u8 << (self.code_bits() - 1)) - 1 };
        code & magnitude == 0
    }

    /// A magnitude's code, with the sign of `x`.
    #[inline]
    const fn signed(self, magnitude: u8, x: f32) -> u8 {
        let negative = x.to_bits() >> 31;
        match (self.facts().twos_complement, negative) {
            (true, 1) => magnitude.wrapping_neg(),
            (true, _) => magnitude,
            (false, _) => magnitude | (negative << (self.code_bits() - 1)) as u8,
        }
    }

    /// Encodes `x` as the nearest code. If two codes are equally near, the result is the even code. If the magnitude exceeds
    /// [`max`](Self::max) or is infinite, the result is the code of the largest magnitude. Zero keeps its sign. A NaN gives
    /// [`nan_code`](Self::nan_code).
    #[inline]
    pub const fn encode(self, x: f32) -> u8 {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        if magnitude > 0x7F80_0000 {
            return self.nan_code();
        }
        let code = if magnitude >= self.max().to_bits() {
            self.max_code()
        } else if magnitude < self.min_normal_bits() {
            // The unit in the last place of `shifter` is the element's subnormal step. So the addition itself rounds to nearest-even and
            // leaves the code in the low bits.
            let shifter = self.subnormal_shifter();
            ((f32::from_bits(magnitude) + shifter).to_bits() - shifter.to_bits()) as u8
        } else {
            // Re-bias the exponent, then round the mantissa to nearest-even.
            let shift = 23 - self.mantissa_bits();
            let rebased = magnitude - (((127 - self.bias()) as u32) << 23);
            let odd = (rebased >> shift) & 1;
            ((rebased + (1 << (shift - 1)) - 1 + odd) >> shift) as u8
        };
        self.signed(code, x)
    }

    /// Bits of the smallest normal magnitude, 2^(1 − bias).
    #[inline]
    const fn min_normal_bits(self) -> u32 {
        ((128 - self.bias()) as u32) << 23
    }

    /// 2^(23 + exponent of the smallest subnormal).
    #[inline]
    const fn subnormal_shifter(self) -> f32 {
        let exponent = 1 - self.bias() - self.mantissa_bits() as i32 + 23;
        f32::from_bits(((127 + exponent) as u32) << 23)
    }

    /// Encodes by stochastic rounding with the sixteen random bits `r`: the magnitude is rounded up if and only if `r < ⌊fraction · 2¹⁶⌋`.
    /// The fraction is the distance of the magnitude from the next lower code, divided by the distance between neighbouring codes.
    /// Representable values never change. For numbers that saturate, NaN and zero, the result is the same as that of
    /// [`encode`](Self::encode).
    #[inline]
    pub fn encode_sr(self, x: f32, r: u16) -> u8 {
        self.encode_by(x, |s| u32::from(r) < s.fraction_q32 >> 16)
    }

    /// Encodes with the given rounding. Only stochastic roundings use the random bits `r`.
    #[inline]
    pub fn encode_rounded(self, x: f32, rounding: Rounding, r: u16) -> u8 {
        const HALF: i64 = 1 << 31;
        match rounding {
            Rounding::NearestEven => self.encode(x),
            Rounding::NearestAway => self.encode_by(x, |s| i64::from(s.fraction_q32) >= HALF),
            Rounding::Stochastic => self.encode_sr(x, r),
            Rounding::Dither { delta_q16 } => self.encode_by(x, |s| {
                // d = δ·(2r + 1 − 2¹⁶)/2¹⁶ lies symmetrically in (−δ, δ). The unit of `d_q32` is 2⁻³² code steps.
                let d_q32 = i64::from(delta_q16) * (2 * i64::from(r) + 1 - 65536);
                let t = i64::from(s.fraction_q32) + d_q32;
                t > HALF || (t == HALF && (s.sticky || s.floor_code & 1 == 1))
            }),
        }
    }

    /// Encodes `x`; `up` decides from the split magnitude whether to round up.
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

    /// Splits the bits of a magnitude that is below the element's largest number.
    #[inline]
    fn split(self, magnitude: u32) -> Split {
        // magnitude = significand · 2^(exponent − 150); subnormal floats have exponent 1.
        let field = magnitude >> 23;
        let significand = u64::from(if field == 0 { magnitude } else { (magnitude & 0x7F_FFFF) | 0x80_0000 });
        let exponent = field.max(1) as i32;
        let min_exponent = 128 - self.bias(); // exponent field of the smallest normal element
        let base = (exponent - min_exponent).max(0);
        // Normal elements have steps of 2^(exponent − 127 − m). Below the smallest normal, the step is that of the smallest normal.
        let below = (min_exponent - exponent).max(0) as u32;
        let shift = (23 - self.mantissa_bits() + below).min(60); // after a shift by 60, only `sticky` can be set
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

    /// The number that a code represents. Bits above the width of the code are ignored.
    #[inline]
    pub const fn decode(self, code: u8) -> f32 {
        let facts = self.facts();
        let m = facts.mantissa_bits;
        // `step` is the distance between subnormals, and between INT8 codes, which are all subnormal.
        let step = f32::from_bits(((128 - facts.bias - m as i32) as u32) << 23);
        if facts.twos_complement {
            return code as i8 as f32 * step;
        }
        let sign = 1u8 << (facts.code_bits - 1);
        let magnitude = code & (sign - 1);
        let (field, mantissa) = ((magnitude >> m) as u32, (magnitude & ((1 << m) - 1)) as u32);
        let value = if magnitude > facts.max_code {
            let infinite = facts.has_infinity && magnitude == facts.max_code + 1;
            if infinite { f32::INFINITY } else { f32::NAN }
        } else if field == 0 {
            mantissa as f32 * step
        } else {
            f32::from_bits((field + (127 - facts.bias) as u32) << 23 | mantissa << (23 - m))
        };
        if code & sign != 0 { -value } else { value }
    }
}

impl std::fmt::Debug for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
