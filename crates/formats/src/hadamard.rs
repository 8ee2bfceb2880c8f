//! The Hadamard transform along blocks of a contraction dimension, and its random signs.
//!
//! y = x·H/√n with H in Sylvester order, H\[i\]\[j\] = (−1)^popcount(i & j). H/√n is orthogonal and its own inverse. If both operands of a
//! GEMM are transformed along the contraction, the exact product does not change.

use crate::error::{Error, Result};
use crate::philox::Stream;

/// The supported numbers of consecutive values that are transformed together.
pub const LENGTHS: [usize; 4] = [16, 32, 64, 128];

/// The factor 1/√n of a normalised transform, rounded to F32.
///
/// # Errors
/// [`Error::Shape`] if `n` is not one of [`LENGTHS`].
pub fn inv_sqrt_len(n: usize) -> Result<f32> {
    match n {
        16 => Ok(0.25),
        32 => Ok(std::f32::consts::FRAC_1_SQRT_2 * 0.25),
        64 => Ok(0.125),
        128 => Ok(std::f32::consts::FRAC_1_SQRT_2 * 0.125),
        _ => {
            Err(Error::Shape { argument: "hadamard block", got: n, expected: "16, 32, 64 or 128".to_owned() })
        }
    }
}

/// Applies the Hadamard transform to each block of `n` values of `x`, in place. The function computes F32 butterflies with the strides 1,
/// 2, 4 …, and then multiplies each value once by 1/√n, rounded to F32.
///
/// # Errors
/// [`Error::Shape`] if `n` is not one of [`LENGTHS`], or if the length of `x` is not a multiple of `n`.
pub fn hadamard(x: &mut [f32], n: usize) -> Result<()> {
    let factor = inv_sqrt_len(n)?;
    check_whole_blocks(x.len(), n)?;
    for block in x.chunks_exact_mut(n) {
        butterflies(block);
        block.iter_mut().for_each(|v| *v *= factor);
    }
    Ok(())
}

/// The random Hadamard transform: multiplies `x` by `signs` (±1, one per value), then applies [`hadamard`].
///
/// # Errors
/// [`Error::Shape`] in the cases of [`hadamard`], or if `signs` and `x` differ in length.
pub fn rht(x: &mut [f32], signs: &[f32], n: usize) -> Result<()> {
    check_signs(x.len(), signs.len())?;
    inv_sqrt_len(n)?;
    check_whole_blocks(x.len(), n)?;
    x.iter_mut().zip(signs).for_each(|(v, s)| *v *= s);
    hadamard(x, n)
}

/// The inverse of [`rht`], which applies the Hadamard transform first and then multiplies by the signs.
///
/// # Errors
/// [`Error::Shape`] in the cases of [`rht`].
pub fn inverse_rht(x: &mut [f32], signs: &[f32], n: usize) -> Result<()> {
    check_signs(x.len(), signs.len())?;
    hadamard(x, n)?;
    x.iter_mut().zip(signs).for_each(|(v, s)| *v *= s);
    Ok(())
}

/// The sign of position `k` along the contraction, counted from the start of its group. The sign is −1 if the top bit of the stream's
/// sixteen bits for `k` is set. The stream's purpose is `Sign`, its site is the linear layer (so that both operands have the same signs),
/// and its step is 0.
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

/// The unnormalised transform; the length must be a power of two.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::Purpose;

    fn stream() -> Stream {
        Stream::new(7, Purpose::Sign, 42, 0)
    }

    #[test]
    fn equals_the_matrix_of_popcount_signs_on_integers() {
        for n in LENGTHS {
            let x: Vec<f32> = (0..2 * n).map(|i| ((i * 37 + 11) % 31) as f32 - 15.0).collect();
            let mut y = x.clone();
            hadamard(&mut y, n).unwrap();
            for (block, y) in x.chunks(n).zip(y.chunks(n)) {
                for (j, y) in y.iter().enumerate() {
                    let sign = |i: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                    let sum: f32 = block.iter().enumerate().map(|(i, x)| sign(i) * x).sum();
                    assert_eq!(*y, sum * inv_sqrt_len(n).unwrap());
                }
            }
        }
    }

    #[test]
    fn the_factor_is_the_nearest_single() {
        for n in LENGTHS {
            assert_eq!(inv_sqrt_len(n).unwrap(), (1.0 / (n as f64).sqrt()) as f32, "{n}");
        }
    }

    #[test]
    fn signed_transform_is_orthogonal_and_undone_exactly_where_the_factor_is_a_power_of_two() {
        for n in LENGTHS {
            let x: Vec<f32> = (0..n).map(|i| ((i * 13) % 17) as f32 - 8.0).collect();
            let mut signs = vec![0.0; n];
            fill_signs(&stream(), 0, &mut signs);
            let mut y = x.clone();
            rht(&mut y, &signs, n).unwrap();
            assert_ne!(y, x);
            inverse_rht(&mut y, &signs, n).unwrap();
            let tolerance = if matches!(n, 16 | 64) { 0.0 } else { 1e-5 };
            assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() <= tolerance), "{n}");
        }
    }

    #[test]
    fn signs_follow_the_stream_and_are_balanced() {
        let mut signs = vec![0.0; 1000];
        fill_signs(&stream(), 3, &mut signs);
        for (i, &s) in signs.iter().enumerate() {
            assert_eq!(s, sign_at(&stream(), 3 + i as u64));
            assert_eq!(s < 0.0, stream().u16_at(3 + i as u64) & 0x8000 != 0);
        }
        let sum: f32 = signs.iter().sum();
        assert!(sum.abs() < 4.0 * 1000f32.sqrt(), "{sum}");
    }

    #[test]
    fn wrong_lengths_are_errors_and_leave_the_input_alone() {
        let mut x = vec![1.0; 48];
        assert_eq!(
            hadamard(&mut x, 24).unwrap_err().to_string(),
            "`hadamard block`: got 24, expected 16, 32, 64 or 128"
        );
        assert_eq!(hadamard(&mut x, 32).unwrap_err().to_string(), "`x`: got 48, expected a multiple of 32");
        assert!(rht(&mut x, &[1.0; 47], 16).unwrap_err().to_string().contains("`signs`: got 47"));
        assert!(rht(&mut x, &[-1.0; 48], 32).is_err());
        assert_eq!(x, vec![1.0; 48]);
    }
}
