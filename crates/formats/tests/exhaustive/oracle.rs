//! The oracle: an element format is the list of its values, rounding is a search among their midpoints.

use nibble_formats::{Element, Format};

/// The elements of all formats.
pub fn elements() -> Vec<Element> {
    let mut all: Vec<Element> = Vec::new();
    for element in Format::ALL.into_iter().filter_map(|format| format.spec().element) {
        if !all.contains(&element) {
            all.push(element);
        }
    }
    all
}

/// Non-negative values of an element, from the definition of its fields; the index is the code.
pub fn magnitudes(element: Element) -> Vec<f64> {
    let (exponent_bits, mantissa_bits, bias) = match element.name() {
        "e2m1" => (2, 1, 1),
        "e2m3" => (2, 3, 1),
        "e3m2" => (3, 2, 3),
        "e4m3" => (4, 3, 7),
        "e5m2" => (5, 2, 15),
        "int8" => return (0..128).map(|code| f64::from(code) / 64.0).collect(),
        "s1p2" => return (0..8).map(|code| f64::from(code) / 4.0).collect(),
        // By what it says of itself.
        _ => {
            let mantissa_bits = element.mantissa_bits();
            (element.code_bits() - 1 - mantissa_bits, mantissa_bits, element.bias())
        }
    };
    let codes = match element.name() {
        "e4m3" => 127, // 0x7F is NaN
        "e5m2" => 124, // 0x7C.. are infinity and NaN
        _ => 1 << (exponent_bits + mantissa_bits),
    };
    assert!(codes <= 1 << (exponent_bits + mantissa_bits));
    let steps = f64::from(1 << mantissa_bits);
    (0..codes)
        .map(|code| {
            let (field, mantissa) = (code >> mantissa_bits, f64::from(code % (1 << mantissa_bits)));
            match field {
                0 => mantissa / steps * 2f64.powi(1 - bias),
                _ => (1.0 + mantissa / steps) * 2f64.powi(field - bias),
            }
        })
        .collect()
}

/// Rounds by search: `(floor code, position of x relative to the midpoint)`.
pub struct Oracle {
    pub magnitudes: Vec<f64>,
    element: Element,
}

/// A magnitude's code with a sign: two's complement for integers, a bit for the others.
pub fn with_sign(element: Element, code: usize, negative: bool) -> u8 {
    match (element == Element::INT8, negative) {
        (_, false) => code as u8,
        (true, true) => (256 - code) as u8,
        (false, true) => code as u8 | 1 << (element.code_bits() - 1),
    }
}

impl Oracle {
    pub fn new(element: Element) -> Oracle {
        Oracle { magnitudes: magnitudes(element), element }
    }

    fn with_sign(&self, code: usize, x: f64) -> u8 {
        with_sign(self.element, code, x.is_sign_negative())
    }

    /// Code of the largest value not above |x|.
    pub fn floor(&self, x: f64) -> usize {
        self.magnitudes.partition_point(|&v| v <= x.abs()) - 1
    }

    fn nearest(&self, x: f64, tie_up: impl Fn(usize) -> bool) -> u8 {
        let low = self.floor(x);
        let Some(next) = self.magnitudes.get(low + 1) else { return self.with_sign(low, x) };
        let middle = (self.magnitudes[low] + next) / 2.0;
        let up = x.abs() > middle || (x.abs() == middle && tie_up(low));
        self.with_sign(low + usize::from(up), x)
    }

    pub fn nearest_even(&self, x: f64) -> u8 {
        self.nearest(x, |low| low % 2 == 1)
    }

    pub fn nearest_away(&self, x: f64) -> u8 {
        self.nearest(x, |_| true)
    }

    /// Number of the 2¹⁶ random values for which stochastic rounding goes up.
    pub fn ups_of_65536(&self, x: f64) -> u32 {
        let low = self.floor(x);
        let Some(next) = self.magnitudes.get(low + 1) else { return 0 };
        let fraction = (x.abs() - self.magnitudes[low]) / (next - self.magnitudes[low]);
        (fraction * 65536.0).floor() as u32
    }
}

/// All finite BF16 numbers, every midpoint between two element values with both its neighbours, the
/// values themselves, and a sweep over all exponents and odd mantissas of singles.
pub fn inputs(element: Element) -> Vec<f32> {
    let mut inputs: Vec<f32> =
        (0..=u16::MAX).map(|b| f32::from_bits(u32::from(b) << 16)).filter(|x| x.is_finite()).collect();
    let values = magnitudes(element);
    let middles = values.windows(2).map(|w| (w[0] + w[1]) / 2.0);
    for v in values.iter().copied().chain(middles) {
        let bits = (v as f32).to_bits();
        for b in [bits.saturating_sub(1), bits, bits + 1] {
            inputs.extend([f32::from_bits(b), -f32::from_bits(b)]);
        }
    }
    inputs.extend((0..0x7F80_0000u32).step_by(7919).map(f32::from_bits));
    inputs
}
