//! Branch-free encoding of a value, so that loops over values vectorise. The codes are those of `Element::encode_rounded`.
//!
//! A magnitude becomes a code by arithmetic on its bits. The exponent of a normal element is re-biased; a subnormal element is computed
//! with an addition or a multiplication by a power of two; a select replaces every branch. The element's [`Facts`] are constants in
//! specialised code. In the code for every format, they are variables that are read once before the loop.

use nibble_formats::{Element, Rounding};

/// The parameters of an element format that encoding and decoding need.
#[derive(Clone, Copy)]
pub(crate) struct Facts {
    pub element: Element,
    /// Number of mantissa bits that F32 has in addition to those of a code.
    pub shift: u32,
    /// Difference between the exponent biases of F32 and of the code.
    rebias: u32,
    /// Bits of the smallest normal magnitude.
    min_normal: u32,
    /// A power of two whose unit in the last place is the element's subnormal step.
    shifter: f32,
    /// Factor from subnormal steps to units of 2⁻¹⁶.
    to_q16: f32,
    pub max_code: u32,
    /// The code of a NaN.
    pub nan_code: u8,
    /// The sign bit; 0 in two's complement.
    sign: u32,
    /// All bits set for two's complement, otherwise 0.
    twos: u32,
    /// Mask of the bits that are 0 in every code of zero.
    pub magnitude: u8,
}

/// 2^exponent, for exponents of normal numbers.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

impl Facts {
    pub const fn of(element: Element) -> Self {
        let step_log2 = 1 - element.bias() - element.mantissa_bits() as i32;
        let sign = 1u32 << (element.code_bits() - 1);
        let twos = element.is_twos_complement();
        Self {
            element,
            shift: 23 - element.mantissa_bits(),
            rebias: ((127 - element.bias()) as u32) << 23,
            min_normal: ((128 - element.bias()) as u32) << 23,
            shifter: power(step_log2 + 23),
            to_q16: power(16 - step_log2),
            max_code: element.max_code() as u32,
            nan_code: element.nan_code(),
            sign: if twos { 0 } else { sign },
            twos: if twos { u32::MAX } else { 0 },
            magnitude: if twos { 0xFF } else { (sign - 1) as u8 },
        }
    }

    /// Saturates a magnitude's code and adds the sign of x.
    #[inline(always)]
    fn signed(&self, code: u32, x: f32) -> u8 {
        let (code, negative) = (code.min(self.max_code), (x.to_bits() as i32 >> 31) as u32);
        let flip = negative & self.twos;
        ((code ^ flip).wrapping_sub(flip) | (negative & self.sign)) as u8
    }

    /// The value of a code. The code's magnitude bits become exponent and mantissa of an F32; an exact multiplication re-biases the
    /// exponent and normalises subnormal elements.
    #[inline(always)]
    pub fn decode(&self, code: u8) -> f32 {
        let magnitude = u32::from(code & self.magnitude);
        let rebias = power(127 - self.element.bias());
        let finite = f32::from_bits(magnitude << self.shift) * rebias;
        let infinite = self.element.has_infinity() && magnitude == self.max_code + 1;
        let special = if infinite { f32::INFINITY } else { f32::NAN };
        let value = if magnitude > self.max_code { special } else { finite };
        let signed = f32::from_bits(
            value.to_bits() | (u32::from(code) & self.sign) << (32 - self.element.code_bits()),
        );
        let step = self.shifter * power(-23);
        if self.twos != 0 { f32::from(code as i8) * step } else { signed }
    }
}

/// An element format with specialised block code.
pub(crate) trait Small {
    const ELEMENT: Element;
    /// Number of values per block.
    const BLOCK: usize;
    const FACTS: Facts = Facts::of(Self::ELEMENT);
}

/// The FP4 element E2M1.
pub(crate) struct E2m1;
/// The FP8 element with three mantissa bits.
pub(crate) struct E4m3;
/// The FP8 element with two mantissa bits.
pub(crate) struct E5m2;

impl Small for E2m1 {
    const ELEMENT: Element = Element::E2M1;
    const BLOCK: usize = 32;
}
impl Small for E4m3 {
    const ELEMENT: Element = Element::E4M3;
    const BLOCK: usize = 128;
}
impl Small for E5m2 {
    const ELEMENT: Element = Element::E5M2;
    const BLOCK: usize = 128;
}

/// A rounding mode. The implementing type encodes finite values, and values that overflowed to infinity.
pub(crate) trait Round: Copy {
    /// Whether the rounding reads sixteen bits per element from `bits`.
    const READS_BITS: bool;
    fn encode(self, facts: &Facts, x: f32, bits: u16) -> u8;
}

/// Rounding to nearest, ties to even.
#[derive(Clone, Copy)]
pub(super) struct Nearest;

impl Round for Nearest {
    const READS_BITS: bool = false;

    #[inline(always)]
    fn encode(self, e: &Facts, x: f32, _: u16) -> u8 {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        let rebased = magnitude.wrapping_sub(e.rebias);
        let odd = rebased >> e.shift & 1;
        let normal = rebased.wrapping_add((1 << (e.shift - 1)) - 1 + odd) >> e.shift;
        let subnormal = (f32::from_bits(magnitude) + e.shifter).to_bits().wrapping_sub(e.shifter.to_bits());
        e.signed(if magnitude < e.min_normal { subnormal } else { normal }, x)
    }
}

/// Rounds up iff the sixteen bits are below the fraction of the step. With random bits, the rounding is stochastic; it is nearest rounding
/// with ties away from zero with [`HALF_AWAY`].
#[derive(Clone, Copy)]
pub(super) struct Threshold;

/// The constant bits with which [`Threshold`] rounds up from half a step on.
const HALF_AWAY: u16 = 0x7FFF;

impl Round for Threshold {
    const READS_BITS: bool = true;

    #[inline(always)]
    fn encode(self, e: &Facts, x: f32, bits: u16) -> u8 {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        // The result is the code and the fraction of a step in units of 2⁻¹⁶, truncated; the multiplication is exact.
        let normal = magnitude.wrapping_sub(e.rebias) >> (e.shift - 16);
        let below_normal = magnitude.min(e.min_normal);
        let subnormal = (f32::from_bits(below_normal) * e.to_q16) as i32 as u32;
        let q16 = if magnitude < e.min_normal { subnormal } else { normal };
        e.signed((q16 + (0xFFFF - u32::from(bits))) >> 16, x)
    }
}

/// Any rounding, element by element. This type is used for dithering, which no recipe uses where speed matters.
#[derive(Clone, Copy)]
pub(super) struct OneByOne(pub Rounding);

impl Round for OneByOne {
    const READS_BITS: bool = true;

    #[inline(always)]
    fn encode(self, e: &Facts, x: f32, bits: u16) -> u8 {
        e.element.encode_rounded(x, self.0, bits)
    }
}

/// Calls `$body(rounding, args)` with the rounding as a [`Round`].
macro_rules! with_rounding {
    ($rounding:expr, $body:ident $(::<$element:ty, _>)? ($($arg:expr),*)) => {
        match $rounding {
            Rounding::NearestEven => $body $(::<$element, _>)? (Nearest, $($arg),*),
            Rounding::NearestAway | Rounding::Stochastic => $body $(::<$element, _>)? (Threshold, $($arg),*),
            rounding @ Rounding::Dither { .. } => $body $(::<$element, _>)? (OneByOne(rounding), $($arg),*),
        }
    };
}
pub(super) use with_rounding;

/// The sixteen bits that a rounding uses for every element, if they are constant.
pub(crate) fn fixed_bits(rounding: Rounding) -> Option<u16> {
    (rounding == Rounding::NearestAway).then_some(HALF_AWAY)
}

/// Whether the code in this module reads sixteen bits per element for a rounding.
pub(crate) fn reads_bits(rounding: Rounding) -> bool {
    rounding != Rounding::NearestEven
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_formats::Format;

    /// All element formats, each once.
    fn elements() -> Vec<Element> {
        let mut all: Vec<Element> = Vec::new();
        for element in Format::ALL.into_iter().filter_map(|format| format.spec().element) {
            if !all.contains(&element) {
                all.push(element);
            }
        }
        all
    }

    #[test]
    fn every_code_of_every_element_has_its_value() {
        for element in elements() {
            for code in 0..=0xFF >> (8 - element.code_bits()) {
                let (got, want) = (Facts::of(element).decode(code), element.decode(code));
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(same, "{element} {code:#x}: {got:e}, not {want:e}");
            }
        }
    }

    /// The values of all codes, all ties, their neighbours, the midpoints between these, and the ends of the range.
    fn values(element: Element) -> Vec<f32> {
        let mut points: Vec<f32> = (0..=element.max_code()).map(|code| element.decode(code)).collect();
        points.extend(points.clone().windows(2).flat_map(|w| {
            let step = w[1] - w[0];
            [0.5, 0.25, 0.75, 1.0 / 65536.0, 65535.0 / 65536.0].map(|part| w[0] + part * step)
        }));
        points.extend([
            1.5 * element.max(),
            1e30,
            f32::MAX,
            f32::INFINITY,
            f32::MIN_POSITIVE,
            f32::from_bits(1),
        ]);
        let near = |x: f32| [x, x.next_up(), if x > 0.0 { x.next_down() } else { x }];
        let all: Vec<f32> = points.into_iter().flat_map(near).filter(|x| !x.is_nan()).collect();
        all.iter().flat_map(|x| [*x, -x]).collect()
    }

    fn check(element: Element, rounding: Rounding, of: impl Fn(&Facts, f32, u16) -> u8, bits: &[u16]) {
        let facts = Facts::of(element);
        for x in values(element) {
            for &random in bits {
                let (got, want) = (of(&facts, x, random), element.encode_rounded(x, rounding, random));
                assert_eq!(got, want, "{element} {rounding} {x:e}, random bits {random:#x}");
            }
        }
    }

    #[test]
    fn every_rounding_of_every_element_is_that_of_the_formats() {
        let random = [0, 1, 0x3FFF, 0x4000, 0x7FFF, 0x8000, 0xBFFF, 0xC000, 0xFFFE, 0xFFFF];
        for element in elements() {
            check(element, Rounding::NearestEven, |e, x, bits| Nearest.encode(e, x, bits), &[0]);
            check(element, Rounding::NearestAway, |e, x, _| Threshold.encode(e, x, HALF_AWAY), &[0]);
            check(element, Rounding::Stochastic, |e, x, bits| Threshold.encode(e, x, bits), &random);
        }
    }
}
