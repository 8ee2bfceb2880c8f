//! A vector register of F32 lanes, with one type per instruction set. The tile kernels are generic over this type.

use super::spec::{TWO_POW_64, TWO_POW_NEG_62};

/// A vector of `N` F32 lanes. A lane may also hold a pair of BF16 numbers as raw bits: the number with the even index in the low half, the
/// other in the high half.
///
/// # Safety
/// Every method may execute instructions of the vector's instruction set, so the caller must have checked
/// that the machine has them. `load` and `store` access `N` consecutive numbers at a pointer of any alignment.
pub(super) trait Lanes: Copy {
    /// Number of lanes.
    const N: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn mul(self, other: Self) -> Self;
    /// `self · b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// The even-indexed BF16 number of each pair, as F32.
    unsafe fn even(self) -> Self;
    /// The odd-indexed BF16 number of each pair, as F32.
    unsafe fn odd(self) -> Self;
    /// Clears all bits but the sign in the lanes where |`witness`| < `limit`.
    unsafe fn flush_where_below(self, witness: Self, limit: Self) -> Self;

    /// `self · b + c`; a tiny result is flushed to a signed zero (see `spec::dot_bf16`).
    #[inline(always)]
    unsafe fn fma_ftz(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller of this method guarantees the instruction set; there are no other requirements.
        unsafe {
            let by = Self::splat(TWO_POW_64);
            let magnified = self.mul(by).fma(b, c.mul(by));
            self.fma(b, c).flush_where_below(magnified, Self::splat(TWO_POW_NEG_62))
        }
    }
}

/// Eight lanes in plain Rust.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 8]);

impl Portable {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Self(self.0.map(f))
    }
}

impl Lanes for Portable {
    const N: usize = 8;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 8])
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees 8 readable numbers at `from`; an unaligned read of [f32; 8] needs no more.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees 8 writable numbers at `to`.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * other.0[i]))
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    unsafe fn even(self) -> Self {
        self.map(|x| f32::from_bits(x.to_bits() << 16))
    }
    #[inline(always)]
    unsafe fn odd(self) -> Self {
        self.map(|x| f32::from_bits(x.to_bits() & 0xFFFF_0000))
    }
    #[inline(always)]
    unsafe fn flush_where_below(self, witness: Self, limit: Self) -> Self {
        Self(std::array::from_fn(|i| {
            if witness.0[i].abs() < limit.0[i] { 0f32.copysign(self.0[i]) } else { self.0[i] }
        }))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{F256, F512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    /// Eight lanes of AVX2 with FMA.
    #[derive(Clone, Copy)]
    pub(in super::super) struct F256(__m256);

    /// Sixteen lanes of AVX-512.
    #[derive(Clone, Copy)]
    pub(in super::super) struct F512(__m512);

    // SAFETY (of every block below): the caller of a `Lanes` method guarantees the instruction set, and for `load` and `store` the memory.
    // The intrinsics have no other requirements.
    impl Lanes for F256 {
        const N: usize = 8;
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm256_setzero_ps() })
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller guarantees the instruction set and the memory.
            Self(unsafe { _mm256_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller guarantees the instruction set and the memory.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm256_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        unsafe fn even(self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(self.0))) })
        }
        #[inline(always)]
        unsafe fn odd(self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            unsafe {
                let high = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
                Self(_mm256_and_ps(self.0, _mm256_castsi256_ps(high)))
            }
        }
        #[inline(always)]
        unsafe fn flush_where_below(self, witness: Self, limit: Self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            unsafe {
                let magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFF_FFFF));
                let below = _mm256_cmp_ps::<_CMP_LT_OQ>(_mm256_and_ps(witness.0, magnitude), limit.0);
                Self(_mm256_andnot_ps(_mm256_and_ps(below, magnitude), self.0))
            }
        }
    }

    // SAFETY (of every block below): the caller guarantees the instruction set, and for `load` and `store` the memory.
    impl Lanes for F512 {
        const N: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm512_setzero_ps() })
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm512_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller guarantees the instruction set and the memory.
            Self(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller guarantees the instruction set and the memory.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        unsafe fn even(self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            Self(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(self.0))) })
        }
        #[inline(always)]
        unsafe fn odd(self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            unsafe {
                let high = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
                Self(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(self.0), high)))
            }
        }
        #[inline(always)]
        unsafe fn flush_where_below(self, witness: Self, limit: Self) -> Self {
            // SAFETY: the caller guarantees the instruction set.
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(witness.0), limit.0);
                let sign = _mm512_set1_epi32(i32::MIN);
                Self(_mm512_castsi512_ps(_mm512_mask_and_epi32(bits, below, bits, sign)))
            }
        }
    }

    impl F512 {
        /// One `vdpbf16ps`: first `acc + a_odd·b_odd`, then `+ a_even·b_even`, as defined by `spec::dot_bf16`.
        ///
        /// # Safety
        /// The machine has `avx512bf16`.
        #[inline(always)]
        pub(in super::super) unsafe fn dot_bf16(acc: Self, a: Self, b: Self) -> Self {
            // SAFETY: the caller guarantees the instruction. __m512 and __m512bh are the same 64 bytes, and every bit pattern is valid for
            // both.
            unsafe {
                let (a, b) = (
                    std::mem::transmute::<__m512, __m512bh>(a.0),
                    std::mem::transmute::<__m512, __m512bh>(b.0),
                );
                Self(_mm512_dpbf16_ps(acc.0, a, b))
            }
        }
    }
}
