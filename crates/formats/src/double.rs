//! Logarithm, exponential, powers, sine and cosine in F64, from only IEEE +, ·, / and shifts of exponents. The host uses these functions to
//! compute tables whose bits must not depend on the system's library. The relative error is about 1e-15: after rounding to F32, about one
//! value in a hundred million differs from the correctly rounded one.

use std::f64::consts::{LN_2, LOG2_E, PI};

/// ln x for a positive, finite, normal x, by 2·atanh((m − 1)/(m + 1)) with m in [1/√2, √2).
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    let t = (m - 1.0) / (m + 1.0);
    // |t| < 0.172, so the term in t⁴¹ is below 1e-32.
    let series = (0..20).rev().fold(0.0, |sum, i| sum * t * t + 1.0 / f64::from(2 * i + 1));
    exponent as f64 * LN_2 + 2.0 * t * series
}

/// eˣ for |x| < 700, by 2ᵏ·eʳ with |r| ≤ ln 2 / 2.
pub fn exp(x: f64) -> f64 {
    let k = (x * LOG2_E).round();
    // ln 2 is split into two parts. The first part has so few bits that its multiples are exact.
    let r = (x - k * 0.693_147_180_369_123_8) - k * 1.908_214_929_270_587_7e-10;
    let series = (1..=20).rev().fold(1.0, |sum, i| 1.0 + sum * r / f64::from(i));
    series * f64::from_bits(((k as i64 + 1023) as u64) << 52)
}

/// xⁿ by repeated squaring.
pub fn power(mut x: f64, mut n: u64) -> f64 {
    let mut product = 1.0;
    while n > 0 {
        if n & 1 == 1 {
            product *= x;
        }
        x *= x;
        n >>= 1;
    }
    product
}

/// Sine and cosine of x radians, for |x| below a few million.
pub fn sin_cos(x: f64) -> (f64, f64) {
    // 2π is split into two parts. The first part has so few bits that its multiples are exact.
    const HIGH: f64 = 6.283_185_243_606_567;
    const LOW: f64 = 6.357_301_909_411_278e-8;
    let turns = (x / (2.0 * PI)).round();
    let quarter = (((x - turns * HIGH) - turns * LOW) / (PI / 2.0)).round();
    let z = ((x - turns * HIGH) - turns * LOW) - quarter * (PI / 2.0);
    let square = -z * z;
    let sin = z * (1..=10).rev().fold(1.0, |sum, i| 1.0 + sum * square / f64::from(2 * i * (2 * i + 1)));
    let cos = (1..=10).rev().fold(1.0, |sum, i| 1.0 + sum * square / f64::from(2 * i * (2 * i - 1)));
    match quarter as i64 {
        0 => (sin, cos),
        1 => (cos, -sin),
        -1 => (-cos, sin),
        _ => (-sin, -cos),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_a_few_units_of_the_systems_library() {
        for i in 1..20_000 {
            let x = f64::from(i) * 0.37;
            assert!((ln(x) - x.ln()).abs() <= 4e-16 * x.ln().abs().max(1.0), "ln {x}");
            let e = (f64::from(i) - 10_000.0) * 0.06;
            assert!((exp(e) / e.exp() - 1.0).abs() < 4e-15, "exp {e}");
            let (sin, cos) = sin_cos(x);
            assert!((sin - x.sin()).abs() < 2e-12 && (cos - x.cos()).abs() < 2e-12, "sin_cos {x}");
            let (sin, cos) = sin_cos(-x * 0.01);
            assert!((sin + (x * 0.01).sin()).abs() < 1e-14 && (cos - (x * 0.01).cos()).abs() < 1e-14, "{x}");
        }
        assert!((power(0.95, 1000) / 0.95f64.powi(1000) - 1.0).abs() < 1e-13);
        assert_eq!((power(0.0, 0), power(3.0, 4)), (1.0, 81.0));
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
        assert_eq!((ln(1.0), exp(0.0)), (0.0, 1.0));
    }
}
