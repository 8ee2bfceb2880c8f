// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; blocks of 32, two codes a byte, the even element in the low
// nibble. The twin of crates/formats/src/element.rs.
#pragma once
#include "formats/bf16.cuh"
#include "ptx/packed.cuh"
#include "ptx/types.cuh"

namespace nib {

struct E2m1 {
    static constexpr int kBlock = 32;
    static constexpr int kCodeBits = 4;
    static constexpr int kMantissaBits = 1;
    static constexpr int kEmax = 2;
    static constexpr u32 kMaxMantissa = 0x400000;  // of 6, as F32
    static constexpr float kMax = 6.0f;
    static constexpr float kLargestToZero = 0.25f;  // a tie, to even
    /// Eight codes.
    using Eight = u32;

    __device__ __forceinline__ static Eight zeros() { return 0; }

    /// Codes of x * inverse, nearest-even, for BF16 numbers that `inverse`, a power of two, brings below 8; above 6 they
    /// saturate if kExceeds says that there may be such.
    ///
    /// F16 has E2M1 in it: scaled by 2^-14 the smallest normal numbers of both coincide, a code is the bits from 9 up,
    /// and those below are what rounds. F16's ten bits hold a BF16 number exactly down to 0.125; what lies below
    /// becomes 0 in any case. So one integer addition on the F16 bits rounds two numbers.
    template <bool kExceeds>
    __device__ __forceinline__ static Eight encode(const Bf16::Eight& x, float inverse) {
        constexpr float kLargest = 6.0f * 6.103515625e-05f;
        const float scale = __fmul_rn(inverse, 6.103515625e-05f);  // 2^-14, exact: inverse is at least 2^-126
        // Neighbours in a register are (0, 2), (4, 6), (1, 3), (5, 7): so bytes, not nibbles, are interleaved below.
        u32 half[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = i % 2 * 4 + i / 2;
            float a = __fmul_rn(Bf16::value(x, first), scale), b = __fmul_rn(Bf16::value(x, first + 2), scale);
            if constexpr (kExceeds) {
                a = fminf(fmaxf(a, -kLargest), kLargest);
                b = fminf(fmaxf(b, -kLargest), kLargest);
            }
            half[i] = ptx::f16x2_from_f32(a, b);
            // Half a step less one, and one more where the code below is odd.
            half[i] += 0x00FF00FF + (half[i] >> 9 & 0x00010001);
        }
        return pack(half);
    }

    /// Codes of x * inverse, nearest-even, saturating, for any F32.
    template <bool kExceeds>
    __device__ __forceinline__ static Eight encode(const F32::Eight& x, float inverse) {
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 bits = __float_as_uint(__fmul_rn(x.number[i], inverse));
            const u32 magnitude = bits & 0x7FFFFFFF;
            // Below 1 the addition rounds to halves; above, the mantissa is rounded in place.
            const u32 small = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 4194304.0f)) - 0x4A800000;
            const u32 large = (magnitude - (126u << 23) + 0x1FFFFF + (magnitude >> 22 & 1)) >> 22;
            const u32 code = magnitude < 0x3F800000 ? small : min(large, 7u);
            codes |= (code | bits >> 31 << 3) << (4 * i);
        }
        return codes;
    }

    /// The value of the low four bits.
    __device__ __forceinline__ static float decode(u32 code) {
        const float magnitude = __fmul_rn(__uint_as_float((code & 7) << 22), 8.507059173e37f);  // 2^126
        return __uint_as_float(__float_as_uint(magnitude) | (code & 8) << 28);
    }

private:
    /// Of each half-word, bit 15 and bits 9 to 11 (those between are 0) to one nibble.
    __device__ __forceinline__ static u32 pack(const u32 (&half)[4]) {
        const u32 even = __byte_perm(half[0], half[1], 0x7531);  // S000mmm?, elements 0, 2, 4, 6
        const u32 odd = __byte_perm(half[2], half[3], 0x7531);
        const u32 high = (odd << 3 & 0x7F7F7F7F) | (odd & 0x80808080);
        const u32 low = (even >> 1 | even >> 4) & 0x0F0F0F0F;
        return (high & 0xF0F0F0F0) | low;
    }
};

}  // namespace nib
