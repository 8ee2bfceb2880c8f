//! Randomness as a function: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3", 2011) keyed by the run's seed and indexed by purpose, site, step and element.
//!
//! Nothing is drawn in sequence, so the bits do not depend on threads, ranks, recomputation or resumes.

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

/// FNV-1a, 32 bits, of a tensor's canonical name: its `site`.
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

/// What random numbers are for; different purposes never share bits.
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
}

impl Purpose {
    /// Every purpose.
    pub const ALL: [Purpose; 5] =
        [Purpose::Rounding, Purpose::Sign, Purpose::Init, Purpose::Data, Purpose::Sample];
}

/// Random bits for one (seed, purpose, site, step), addressed by element.
///
/// Element `e` of a tensor is `row_id · cols + col`, logical and global over ranks and micro-batches.
/// The widths (`u16_at`, `u32_at`, …) read the same blocks; use one width for one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    /// Seed of the run: the Philox key, low word first.
    pub seed: u64,
    /// What for.
    pub purpose: Purpose,
    /// [`fnv1a32`] of the tensor's canonical name.
    pub site: u32,
    /// Training step; 0 where the bits do not change with it.
    pub step: u32,
}

impl Stream {
    /// A stream.
    pub const fn new(seed: u64, purpose: Purpose, site: u32, step: u32) -> Stream {
        Stream { seed, purpose, site, step }
    }

    /// The `q`-th block of 128 bits (`q` modulo 2⁴⁸): counter (q low, q high16 | purpose « 16, site,
    /// step).
    #[inline]
    pub const fn block(&self, q: u64) -> [u32; 4] {
        let high = ((q >> 32) as u32 & 0xFFFF) | (self.purpose as u32) << 16;
        philox4x32_10([q as u32, high, self.site, self.step], [self.seed as u32, (self.seed >> 32) as u32])
    }

    /// Sixteen bits of element `e`: block e / 8, low half of each word first.
    #[inline]
    pub const fn u16_at(&self, e: u64) -> u16 {
        half_word(&self.block(e / 8), (e % 8) as usize)
    }

    /// Fills `out` with the sixteen bits of elements `start..`, one block of Philox for eight of them.
    pub fn fill_u16(&self, start: u64, out: &mut [u16]) {
        let mut q = u64::MAX; // no element lies in this block: e / 8 < 2⁶¹
        let mut words = [0; 4];
        for (e, out) in (start..).zip(out) {
            if e / 8 != q {
                q = e / 8;
                words = self.block(q);
            }
            *out = half_word(&words, (e % 8) as usize);
        }
    }

    /// Thirty-two bits of element `e`: word e % 4 of block e / 4.
    #[inline]
    pub const fn u32_at(&self, e: u64) -> u32 {
        self.block(e / 4)[(e % 4) as usize]
    }

    /// Uniform in [0, 1), a multiple of 2⁻²⁴.
    #[inline]
    pub const fn f32_at(&self, e: u64) -> f32 {
        (self.u32_at(e) >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// Standard normal, see [`normal_from_bits`].
    #[inline]
    pub fn normal_at(&self, e: u64) -> f32 {
        normal_from_bits(self.u32_at(e))
    }
}

#[inline]
const fn half_word(words: &[u32; 4], i: usize) -> u16 {
    (words[i / 2] >> (16 * (i % 2))) as u16
}

/// A standard normal from 32 uniform bits by the inverse of its distribution function: the top bit is
/// the sign, the others a probability p = (bits + ½)/2³² in (0, ½), and the magnitude is −Φ⁻¹(p) by
/// Acklam's rational approximations (relative error 1.2e-9 in exact arithmetic). With single precision
/// |Φ(result) − p| ≤ 3e-7 and |result| ≤ 6.34; only IEEE +, ·, /, √ and [`math::log`], so the bits are
/// the same everywhere.
pub fn normal_from_bits(bits: u32) -> f32 {
    const A: [f32; 6] = [-39.696_83, 220.946_1, -275.928_5, 138.357_75, -30.664_799, 2.506_628_3];
    const B: [f32; 6] = [-54.476_1, 161.585_84, -155.698_98, 66.801_31, -13.280_681, 1.0];
    const C: [f32; 6] =
        [-7.784_894e-3, -0.322_396_46, -2.400_758_3, -2.549_732_4, 4.374_664, 2.938_164];
    const D: [f32; 5] = [7.784_695_7e-3, 0.322_467_13, 2.445_134_2, 3.754_408_6, 1.0];
    const TAIL: f32 = 0.02425;
    let p = ((bits & 0x7FFF_FFFF) as f32 + 0.5) * (1.0 / 4_294_967_296.0);
    let lower = if p < TAIL {
        let q = (-2.0 * math::log(p)).sqrt();
        horner(&C, q) / horner(&D, q)
    } else {
        let q = p - 0.5;
        let r = q * q;
        horner(&A, r) * q / horner(&B, r)
    };
    if bits >> 31 == 1 { -lower } else { lower }
}

/// Polynomial with the highest coefficient first, one multiplication and one addition a step, unfused.
#[inline]
fn horner(coefficients: &[f32], x: f32) -> f32 {
    coefficients.iter().skip(1).fold(coefficients[0], |sum, c| sum * x + c)
}
