//! Counter-based randomness: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//!
//! The key is the run's seed. The counter holds a purpose (rounding, signs, initialization, data, sampling, scales), a site (FNV-1a of the
//! tensor's name), the step, and the index of the element in the *logical* tensor. Kernels may read the step from device memory, so that a
//! replayed graph gets new bits in each step.
//!
//! There is no generator state to save. The bits do not depend on threads, ranks, recomputation or resumes. For example, an expert's
//! initial weights and random bits are the same on every rank that may hold the expert. The order of training windows is also such a
//! function (`data/cursor.rs` of the crate `train`).

use crate::math;

/// The ten rounds of Philox4x32.
#[inline]
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    let mut round = 0;
    while round < 10 {
        let p0 = c0 as u64 * 0xD251_1F53;
        let p1 = c2 as u64 * 0xCD9E_8D57;
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
        round += 1;
    }
    [c0, c1, c2, c3]
}

/// The 32-bit FNV-1a hash of a tensor's canonical name. This hash is the `site` of the tensor in a [`Stream`].
pub const fn fnv1a32(name: &str) -> u32 {
    let bytes = name.as_bytes();
    let mut hash = 0x811C_9DC5u32;
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u32).wrapping_mul(0x0100_0193);
        i += 1;
    }
    hash
}

/// What random bits are used for. Streams with different purposes never have the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Purpose {
    /// Stochastic rounding and dither.
    Rounding = 0,
    /// Signs of the random Hadamard transform.
    Sign = 1,
    /// Initial weights.
    Init = 2,
    /// Built-in data, shuffles and the order of samples.
    Data = 3,
    /// Sampling of tokens in generation.
    Sample = 4,
    /// Rounding of the scales of stochastically rounded blocks, indexed by the first element of the block.
    Scale = 5,
}

impl Purpose {
    /// All purposes.
    pub const ALL: [Purpose; 6] =
        [Purpose::Rounding, Purpose::Sign, Purpose::Init, Purpose::Data, Purpose::Sample, Purpose::Scale];
}

/// Random bits for one combination of seed, purpose, site and step, indexed by element.
///
/// Element `e` of a tensor is `row_id · cols + col`, a logical index that is global over ranks and micro-batches. The methods for different
/// widths, such as `u16_at` and `u32_at`, read the same Philox blocks, so a stream should be read with one width only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    /// The seed of the run, which is the Philox key, with the low word first.
    pub seed: u64,
    /// Purpose of the random bits.
    pub purpose: Purpose,
    /// [`fnv1a32`] of the tensor's canonical name.
    pub site: u32,
    /// The training step, or 0 if the random bits do not change from step to step.
    pub step: u32,
}

impl Stream {
    /// A stream with this seed, purpose, site and step.
    pub const fn new(seed: u64, purpose: Purpose, site: u32, step: u32) -> Stream {
        Stream { seed, purpose, site, step }
    }

    /// The `q`-th block of 128 bits (`q` modulo 2⁴⁸). The four words of the Philox counter are the low 32 bits of q, the high 16 bits of q
    /// with the purpose in the upper half, the site, and the step.
    #[inline]
    pub const fn block(&self, q: u64) -> [u32; 4] {
        let high = ((q >> 32) as u32 & 0xFFFF) | (self.purpose as u32) << 16;
        philox4x32_10([q as u32, high, self.site, self.step], [self.seed as u32, (self.seed >> 32) as u32])
    }

    /// The sixteen random bits for element `e`. These bits are one half of a word of Philox block e / 8, where the low half of each word
    /// comes first.
    #[inline]
    pub const fn u16_at(&self, e: u64) -> u16 {
        half_word(&self.block(e / 8), (e % 8) as usize)
    }

    /// Fills `out` with the sixteen bits of elements `start..`, and computes one Philox block per eight elements.
    pub fn fill_u16(&self, start: u64, out: &mut [u16]) {
        let mut q = u64::MAX; // no element is in this block, because e / 8 < 2⁶¹
        let mut words = [0; 4];
        for (e, out) in (start..).zip(out) {
            if e / 8 != q {
                q = e / 8;
                words = self.block(q);
            }
            *out = half_word(&words, (e % 8) as usize);
        }
    }

    /// The thirty-two random bits for element `e`, which are word e % 4 of Philox block e / 4.
    #[inline]
    pub const fn u32_at(&self, e: u64) -> u32 {
        self.block(e / 4)[(e % 4) as usize]
    }

    /// A uniform number in [0, 1), a multiple of 2⁻²⁴.
    #[inline]
    pub const fn f32_at(&self, e: u64) -> f32 {
        (self.u32_at(e) >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// A standard normal number; see [`normal_from_bits`].
    #[inline]
    pub fn normal_at(&self, e: u64) -> f32 {
        normal_from_bits(self.u32_at(e))
    }
}

#[inline]
const fn half_word(words: &[u32; 4], i: usize) -> u16 {
    (words[i / 2] >> (16 * (i % 2))) as u16
}

/// A standard normal number from 32 uniform bits, by the inverse of the distribution function. The top bit is the sign. The other bits give
/// a probability p = (bits + ½)/2³² in (0, ½). The magnitude is −Φ⁻¹(p), computed with Acklam's rational approximations (relative error
/// 1.2e-9) in double precision and rounded to single. Φ(result) is within a relative error of 2e-6 of p, and |result| ≤ 6.34. The function
/// uses only IEEE +, ·, /, √ and [`math::log`], so the bits are the same on every machine.
pub fn normal_from_bits(bits: u32) -> f32 {
    const A: [f64; 6] = [
        -39.69683028665376,
        220.9460984245205,
        -275.9285104469687,
        138.357751867269,
        -30.66479806614716,
        2.506628277459239,
    ];
    const B: [f64; 6] = [
        -54.47609879822406,
        161.5858368580409,
        -155.6989798598866,
        66.80131188771972,
        -13.28068155288572,
        1.0,
    ];
    const C: [f64; 6] = [
        -0.007784894002430293,
        -0.3223964580411365,
        -2.400758277161838,
        -2.549732539343734,
        4.374664141464968,
        2.938163982698783,
    ];
    const D: [f64; 5] = [0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0];
    const TAIL: f64 = 0.02425;
    let p = (f64::from(bits & 0x7FFF_FFFF) + 0.5) / 4_294_967_296.0;
    let lower = if p < TAIL {
        let q = (-2.0 * f64::from(math::log(p as f32))).sqrt();
        horner(&C, q) / horner(&D, q)
    } else {
        let q = p - 0.5;
        let r = q * q;
        horner(&A, r) * q / horner(&B, r)
    } as f32;
    if bits >> 31 == 1 { -lower } else { lower }
}

/// Evaluates a polynomial, highest coefficient first, with one multiplication and one addition per term, unfused.
#[inline]
fn horner(coefficients: &[f64], x: f64) -> f64 {
    coefficients.iter().skip(1).fold(coefficients[0], |sum, c| sum * x + c)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123 (file `kat_vectors`).
    #[test]
    fn known_answers_of_philox4x32_10() {
        let ones = u32::MAX;
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox4x32_10(counter, key), want);
        }
    }

    #[test]
    fn known_answers_of_fnv1a() {
        assert_eq!(fnv1a32(""), 0x811c_9dc5);
        assert_eq!(fnv1a32("a"), 0xe40c_292c);
        assert_eq!(fnv1a32("foobar"), 0xbf9c_f968);
    }

    const STREAM: Stream = Stream::new(0x0123_4567_89AB_CDEF, Purpose::Data, 0xDEAD_BEEF, 77);

    #[test]
    fn the_counter_is_laid_out_as_documented() {
        let q = 0xABCD_1234_5678_u64;
        let want = philox4x32_10([0x1234_5678, 0x0003_ABCD, 0xDEAD_BEEF, 77], [0x89AB_CDEF, 0x0123_4567]);
        assert_eq!(STREAM.block(q), want);
        assert_eq!(STREAM.block(q | 1 << 48), want, "q is taken modulo 2⁴⁸ and never reaches the purpose");
    }

    #[test]
    fn elements_lie_low_half_first() {
        let words = STREAM.block(5);
        for (i, word) in words.into_iter().enumerate() {
            assert_eq!(u32::from(STREAM.u16_at(40 + 2 * i as u64)), word & 0xFFFF);
            assert_eq!(u32::from(STREAM.u16_at(41 + 2 * i as u64)), word >> 16);
            assert_eq!(STREAM.u32_at(20 + i as u64), word);
        }
        let mut many = [0; 37];
        STREAM.fill_u16(5, &mut many);
        for (i, &bits) in many.iter().enumerate() {
            assert_eq!(bits, STREAM.u16_at(5 + i as u64));
        }
    }

    #[test]
    fn every_coordinate_changes_the_bits() {
        let base = STREAM.block(0);
        let others = [
            Stream { seed: STREAM.seed ^ 1, ..STREAM },
            Stream { seed: STREAM.seed ^ 1 << 32, ..STREAM },
            Stream { site: 0, ..STREAM },
            Stream { step: 78, ..STREAM },
        ];
        for other in others {
            assert_ne!(other.block(0), base);
        }
        for purpose in Purpose::ALL.into_iter().filter(|&p| p != STREAM.purpose) {
            assert_ne!(Stream { purpose, ..STREAM }.block(0), base);
        }
        assert_ne!(STREAM.block(1), base);
        assert_ne!(STREAM.block(1 << 32), base);
    }

    /// Φ(−x) for x ≥ 0: one half minus the series of the error function, in which all terms are positive.
    fn lower_tail(x: f64) -> f64 {
        let (mut term, mut sum, mut k) = (x, x, 1.0);
        while term > sum * 1e-17 {
            k += 2.0;
            term *= x * x / k;
            sum += term;
        }
        0.5 - sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
    }

    #[test]
    fn normals_invert_the_distribution_function() {
        let (mut previous, mut worst) = (f32::NEG_INFINITY, (0.0f64, 0.0f64));
        for bits in (0..=0x7FFF_FFFFu32).step_by(104_729).chain([0x7FFF_FFFF]) {
            let p = (f64::from(bits) + 0.5) / 2f64.powi(32);
            let x = normal_from_bits(bits);
            assert_eq!(normal_from_bits(bits | 1 << 31), -x, "symmetric");
            let error = (lower_tail(f64::from(-x)) - p).abs();
            worst = (worst.0.max(error), worst.1.max(error / p));
            assert!(x >= previous - 1e-8 && x <= 0.0, "{bits:#x}: {x} after {previous}");
            previous = x;
        }
        assert!(worst.0 <= 1e-7 && worst.1 <= 2e-6, "absolute and relative error of p: {worst:?}");
        assert!((normal_from_bits(0) + 6.338).abs() < 1e-2, "{}", normal_from_bits(0));
        for bits in [0, 1, 2, 10, 1000, 100_000] {
            let p = (f64::from(bits) + 0.5) / 2f64.powi(32);
            let relative = lower_tail(f64::from(-normal_from_bits(bits))) / p - 1.0;
            assert!(relative.abs() < 2e-6, "tail {bits}: {relative}");
        }
    }

    #[test]
    fn uniforms_and_normals_have_their_moments() {
        let n = 200_000u64;
        let uniform: Vec<f64> = (0..n).map(|e| f64::from(STREAM.f32_at(e))).collect();
        assert!(uniform.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = |v: &[f64], power: i32| v.iter().map(|x| x.powi(power)).sum::<f64>() / n as f64;
        // The tolerances are four standard errors.
        assert!((mean(&uniform, 1) - 0.5).abs() < 4.0 * (1.0 / 12.0 / n as f64).sqrt());
        let normal: Vec<f64> = (0..n).map(|e| f64::from(STREAM.normal_at(e))).collect();
        for (power, want, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
            let error = mean(&normal, power) - want;
            assert!(error.abs() < 4.0 * (variance / n as f64).sqrt(), "moment {power}: {error}");
        }
    }
}
