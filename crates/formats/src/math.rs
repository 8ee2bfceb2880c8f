//! Elementary functions whose bits are the same on every machine.
//!
//! The functions use only IEEE additions, multiplications, divisions, square roots, explicit fused multiply-adds and integer operations, in
//! a fixed order. The functions have no branches (special cases are selected at the end), so that a vectorised loop over them gives the
//! same bits in each lane. The tests measure errors against double precision: `exp` and `log` are within 1 ulp, `rsqrt` within 1.5 ulp,
//! `sigmoid` within 2.1 ulp, and `silu` within 3 ulp; from −1 on, Φ is within 7 ulp, and `gelu` within 8 ulp.

use std::f32::consts::LOG2_E;

/// 1.5 · 2²³. Adding this constant to a small float rounds the float to the nearest integer, which is then in the low mantissa bits of the
/// sum.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;
/// ln 2 is split into a part with few bits, whose product with an exponent is exact, and the remainder.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x. The result is infinity for x above 88.72 and 0 for x below −104. A subnormal result is rounded once.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-104.0, 89.0); // a NaN stays NaN
    // x = n·ln 2 + r, |r| ≤ ln 2 / 2
    let shifted = clamped.mul_add(LOG2_E, ROUND_TO_INTEGER);
    let n = shifted.to_bits() as i32 - ROUND_TO_INTEGER.to_bits() as i32;
    let n_float = shifted - ROUND_TO_INTEGER;
    let r = n_float.mul_add(-LN2_LOW, n_float.mul_add(-LN2_HIGH, clamped));
    // This Taylor polynomial has degree seven; its relative error is below 5.3e-9.
    let p = r.mul_add(1.0 / 5040.0, 1.0 / 720.0);
    let p = p.mul_add(r, 1.0 / 120.0);
    let p = p.mul_add(r, 1.0 / 24.0);
    let p = p.mul_add(r, 1.0 / 6.0);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    // 2^n is applied as two factors, because n can be −150 or 128, beyond the exponents of a normal float.
    let n = n.clamp(-252, 252); // out of range only for a NaN, for which any finite factor is correct
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n - half)
}

/// 2^n for −126 ≤ n ≤ 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// Natural logarithm. The result is −infinity for ±0 and NaN for negative x. The result is as accurate for subnormal x as for normal x.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    const SQRT_HALF_BITS: i32 = 0x3F35_04F3;
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8_388_608.0 } else { x };
    // x = m · 2^k with m in [√½, √2)
    let bits = scaled.to_bits() as i32;
    let k = (bits.wrapping_sub(SQRT_HALF_BITS)) >> 23;
    let m = f32::from_bits(bits.wrapping_sub(k << 23) as u32);
    let k = (k - if subnormal { 23 } else { 0 }) as f32;
    // ln(1 + f) = f − f²/2 + s·(f²/2 + R), with s = f/(2 + f) and R = 2s²/3 + 2s⁴/5 + …: this is 2·artanh(s), arranged so that the large
    // term f stays exact. The series is truncated with an error of 4e-9.
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let series = z.mul_add(2.0 / 9.0, 2.0 / 7.0);
    let series = series.mul_add(z, 2.0 / 5.0);
    let series = series.mul_add(z, 2.0 / 3.0) * z;
    let half_square = 0.5 * f * f;
    let small = s.mul_add(half_square + series, k * LN2_LOW);
    let value = k.mul_add(LN2_HIGH, f - (half_square - small));
    let value = if x == f32::INFINITY { x } else { value };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    if x < 0.0 || x.is_nan() { f32::NAN } else { value }
}

/// The sigmoid 1 / (1 + e^−x), which is computed without overflow for positive and negative x.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let z = exp(-x.abs());
    let numerator = if x < 0.0 { z } else { 1.0 };
    numerator / (1.0 + z)
}

/// x · sigmoid(x). The result is NaN at −infinity, because −infinity · 0 is NaN.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// The standard normal distribution Φ(x) and its density φ(x) = e^(−x²/2)/√(2π).
///
/// Φ(−|x|) = e^(−x²/2) · t · P(t) with t = 1/(1 + 0.27·|x|), where P is a polynomial of degree 8 that interpolates the quotient at
/// Chebyshev points; its relative error is below 3e-8. Φ(|x|) = 1 − Φ(−|x|). Below −1, the error of Φ grows with the rounding of x² in
/// the exponential; both results are 0 from |x| = 14.5 on.
#[inline(always)]
pub fn normal_cdf(x: f32) -> (f32, f32) {
    let power = exp(-0.5 * (x * x));
    let t = 1.0 / x.abs().mul_add(0.27, 1.0);
    let p = t.mul_add(0.029_205_834, -0.127_722_56);
    let p = p.mul_add(t, 0.172_436_1);
    let p = p.mul_add(t, -0.072_344_56);
    let p = p.mul_add(t, 0.110_054_22);
    let p = p.mul_add(t, 0.071_077_58);
    let p = p.mul_add(t, 0.102_063_55);
    let p = p.mul_add(t, 0.107_507_09);
    let p = p.mul_add(t, 0.107_722_76);
    let tail = power * (t * p);
    (if x < 0.0 { tail } else { 1.0 - tail }, power * 0.398_942_3)
}

/// GELU with the error function, x · Φ(x) = x/2 · (1 + erf(x/√2)), as `torch.nn.GELU()`. The result is NaN at −infinity.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * normal_cdf(x).0
}

/// The derivative of [`gelu`]: Φ(x) + x · φ(x), with one fused multiply-add.
#[inline(always)]
pub fn gelu_derivative(x: f32) -> f32 {
    let (cdf, density) = normal_cdf(x);
    x.mul_add(density, cdf)
}

/// 1/√x, computed by an IEEE square root and an IEEE division, each of which rounds.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}
