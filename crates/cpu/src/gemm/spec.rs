//! The three dot products, one output element at a time. Every kernel must give the same bits.
//!
//! Each dot product is a single chain of operations in ascending order of the contraction, so its bits do not depend on the tiling, the
//! instruction set or the number of threads. If a result is NaN, its sign and payload are not specified.

use half::bf16;

/// The F32 dot product: `acc = fma(a[k], b[k], acc)`, k ascending from `acc = 0`. If the slices have different lengths, the sum ends at the
/// end of the shorter slice.
pub fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |acc, (&x, &y)| x.mul_add(y, acc))
}

/// The BF16 dot product, as `vdpbf16ps` computes it. The sum starts at zero; for each pair (2j, 2j + 1), an fma adds the product of the odd
/// elements, then another fma adds the product of the even elements. A subnormal input counts as a zero with the same sign. A result that
/// is tiny after rounding to 24 bits with an unbounded exponent becomes a zero of its sign. If the number of elements is odd, the last
/// element is paired with zero.
pub fn dot_bf16(a: &[bf16], b: &[bf16]) -> f32 {
    let pair = |x: &[bf16]| (daz(x[0]), x.get(1).map_or(0.0, |&odd| daz(odd)));
    a.chunks(2).zip(b.chunks(2)).fold(0.0, |acc, (x, y)| {
        let ((x_even, x_odd), (y_even, y_odd)) = (pair(x), pair(y));
        fma_ftz(x_even, y_even, fma_ftz(x_odd, y_odd, acc))
    })
}

/// The block-scaled dot product: for each block of the contraction, `total = fma(dot_bf16(block), sa·sb, total)`, starting from `total =
/// 0`, with `sa·sb` rounded once to F32. `a` and `b` hold the decoded codes, which are exact in BF16.
pub fn dot_block_scaled(a: &[bf16], b: &[bf16], a_scales: &[f32], b_scales: &[f32], block: usize) -> f32 {
    let blocks = a.chunks(block).zip(b.chunks(block));
    blocks
        .zip(a_scales.iter().zip(b_scales))
        .fold(0.0, |total, ((x, y), (&sa, &sb))| dot_bf16(x, y).mul_add(sa * sb, total))
}

/// A BF16 number as F32; a subnormal number becomes a zero of its sign.
fn daz(x: bf16) -> f32 {
    let bits = u32::from(x.to_bits()) << 16;
    f32::from_bits(if bits & 0x7F80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// `a·b + c` rounded once, and flushed to a signed zero if tiny. As on x86, tiny means below 2⁻¹²⁶ *after* rounding with an unbounded
/// exponent. Slightly below 2⁻¹²⁶, this differs from a test of the sum rounded to a subnormal. The test uses the sum scaled by 2⁶⁴. If the
/// scaled sum overflows, the sum is a multiple of a number far above 2⁻¹²⁶ and cannot be tiny.
fn fma_ftz(a: f32, b: f32, c: f32) -> f32 {
    let rounded = a.mul_add(b, c);
    let magnified = (a * TWO_POW_64).mul_add(b, c * TWO_POW_64);
    if magnified.abs() < TWO_POW_NEG_62 { 0f32.copysign(rounded) } else { rounded }
}

/// 2⁶⁴ as F32.
pub(super) const TWO_POW_64: f32 = f32::from_bits((127 + 64) << 23);
/// 2⁻⁶² = 2⁻¹²⁶ · 2⁶⁴: the smallest normal number scaled by [`TWO_POW_64`].
pub(super) const TWO_POW_NEG_62: f32 = f32::from_bits((127 - 62) << 23);
