//! The Hadamard transform along blocks of a contraction, and its random signs.
//!
//! y = x·H/√n with H in Sylvester order, H\[i\]\[j\] = (−1)^popcount(i & j). H/√n is its own inverse
//! and orthogonal: applied to both operands of a product along the contraction, it leaves the product.

use crate::error::{Error, Result};
use crate::philox::Stream;

/// Lengths of a transform block.
pub const LENGTHS: [usize; 4] = [16, 32, 64, 128];

/// f32(1/√n), the one factor of a normalised transform.
///
/// # Errors
/// [`Error::Shape`] for an `n` that is not one of [`LENGTHS`].
pub fn inv_sqrt_len(n: usize) -> Result<f32> {
    match n {
        16 => Ok(0.25),
        32 => Ok(std::f32::consts::FRAC_1_SQRT_2 * 0.25),
        64 => Ok(0.125),
        128 => Ok(std::f32::consts::FRAC_1_SQRT_2 * 0.125),
        _ => Err(Error::Shape {
            argument: "hadamard block",
            got: n,
            expected: "16, 32, 64 or 128".to_owned(),
        }),
    }
}

/// Transforms `x` in place, block by block of `n`: F32 butterflies with strides 1, 2, 4 …, then one
/// multiplication by f32(1/√n).
///
/// # Errors
/// [`Error::Shape`] for an `n` that is not one of [`LENGTHS`], or an `x` that is not whole blocks.
pub fn hadamard(x: &mut [f32], n: usize) -> Result<()> {
    let factor = inv_sqrt_len(n)?;
    check_whole_blocks(x.len(), n)?;
    for block in x.chunks_exact_mut(n) {
        butterflies(block);
        block.iter_mut().for_each(|v| *v *= factor);
    }
    Ok(())
}

/// The random Hadamard transform: multiplies `x` by `signs` (±1, as many as `x`), then [`hadamard`].
///
/// # Errors
/// [`Error::Shape`] as [`hadamard`], or for `signs` of another length than `x`.
pub fn rht(x: &mut [f32], signs: &[f32], n: usize) -> Result<()> {
    check_signs(x.len(), signs.len())?;
    inv_sqrt_len(n)?;
    check_whole_blocks(x.len(), n)?;
    x.iter_mut().zip(signs).for_each(|(v, s)| *v *= s);
    hadamard(x, n)
}

/// Undoes [`rht`]: the transform, then the signs.
///
/// # Errors
/// As [`rht`].
pub fn inverse_rht(x: &mut [f32], signs: &[f32], n: usize) -> Result<()> {
    check_signs(x.len(), signs.len())?;
    hadamard(x, n)?;
    x.iter_mut().zip(signs).for_each(|(v, s)| *v *= s);
    Ok(())
}

/// The sign of position `k` along the contraction, counted from the start of its group: −1 where the
/// top bit of the stream's sixteen is set. The stream's purpose is `Sign`, its site the linear layer
/// (so that both operands agree) and its step 0.
#[inline]
pub fn sign_at(stream: &Stream, k: u64) -> f32 {
    sign_of(stream.u16_at(k))
}

/// Fills `signs` with [`sign_at`] of positions `start..`.
pub fn fill_signs(stream: &Stream, start: u64, signs: &mut [f32]) {
    let mut bits = [0u16; 64];
    for (first, chunk) in (start..).step_by(bits.len()).zip(signs.chunks_mut(bits.len())) {
        stream.fill_u16(first, &mut bits[..chunk.len()]);
        chunk.iter_mut().zip(bits).for_each(|(s, b)| *s = sign_of(b));
    }
}

#[inline]
fn sign_of(bits: u16) -> f32 {
    if bits >> 15 == 1 { -1.0 } else { 1.0 }
}

/// The unnormalised transform of a power-of-two length.
fn butterflies(x: &mut [f32]) {
    let mut stride = 1;
    while stride < x.len() {
        for pair in x.chunks_exact_mut(2 * stride) {
            let (low, high) = pair.split_at_mut(stride);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
}

fn check_whole_blocks(len: usize, n: usize) -> Result<()> {
    if len.is_multiple_of(n) {
        return Ok(());
    }
    Err(Error::Shape { argument: "x", got: len, expected: format!("a multiple of {n}") })
}

fn check_signs(len: usize, signs: usize) -> Result<()> {
    if len == signs {
        return Ok(());
    }
    Err(Error::Shape { argument: "signs", got: signs, expected: format!("{len}, one for each value") })
}
