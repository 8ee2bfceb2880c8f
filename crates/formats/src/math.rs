//! Elementary functions whose bits are the same on every machine.
//!
//! Only IEEE additions, multiplications, divisions, square roots, explicit fused multiply-adds and
//! integer operations, in a fixed order. They are branch-free (range ends are selected afterwards), so
//! that a loop over them vectorises lane by lane with the same bits. Errors are measured in the tests
//! against double precision: `exp` and `log` within 1 ulp, `rsqrt` within 1.5, `sigmoid`
//! within 2.1, `silu` within 3.

use std::f32::consts::LOG2_E;

/// 1.5 · 2²³: adding it to a small float rounds that to the nearest integer, which then sits in the
/// low mantissa bits.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;
/// ln 2 truncated to few bits, so that its product with an exponent is exact; and the remainder.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x. Overflows to infinity above 88.72, is 0 below −104; subnormal results are rounded once.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-104.0, 89.0); // a NaN passes
    // x = n·ln 2 + r, |r| ≤ ln 2 / 2
    let shifted = clamped.mul_add(LOG2_E, ROUND_TO_INTEGER);
    let n = shifted.to_bits() as i32 - ROUND_TO_INTEGER.to_bits() as i32;
    let n_float = shifted - ROUND_TO_INTEGER;
    let r = n_float.mul_add(-LN2_LOW, n_float.mul_add(-LN2_HIGH, clamped));
    // Taylor to the seventh power: the rest is below 5.3e-9 relative.
    let p = r.mul_add(1.0 / 5040.0, 1.0 / 720.0);
    let p = p.mul_add(r, 1.0 / 120.0);
    let p = p.mul_add(r, 1.0 / 24.0);
    let p = p.mul_add(r, 1.0 / 6.0);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    // 2^n in two factors: n reaches −150 and 128, beyond the exponents of a normal float.
    let n = n.clamp(-252, 252); // out of range only for a NaN, where any finite factor will do
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n - half)
}

/// 2^n for −126 ≤ n ≤ 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// Natural logarithm. −infinity at ±0, NaN below 0; subnormals are as exact as other numbers.
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
    // ln(1 + f) = f − f²/2 + s·(f²/2 + R), s = f/(2 + f), R = 2s²/3 + 2s⁴/5 + …: 2·artanh(s), arranged so
    // that the large term f stays exact. The series is cut at 4e-9.
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

/// 1 / (1 + e^−x), without overflow on either side.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let z = exp(-x.abs());
    let numerator = if x < 0.0 { z } else { 1.0 };
    numerator / (1.0 + z)
}

/// x · sigmoid(x). NaN at −infinity, as the product of its parts is.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// 1/√x, two IEEE roundings.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}
