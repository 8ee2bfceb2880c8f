// Encodes BF16 values to four-bit codes, two values at a time. Codes are packed
// with their signs, and E2M1 codes may have a scale that is not a power of two.
#pragma once
#include "formats/e2m1.cuh"

namespace nib {

/// Returns the sign bytes of two pairs of values, each 0 or 255: first
/// the bytes of the two lower values, then those of the two upper values.
__device__ __forceinline__ u32 signs_of_pairs(u32 a, u32 b) { return ptx::byte_perm_signs(a, b, 0xFBD9); }

/// Packs the codes of eight adjacent values of a row. Signs come from
/// the values `x`; `magnitude` holds codes without sign, two per word.
__device__ __forceinline__ u32 pack_row(const u32* x, const u32 (&magnitude)[4]) {
    // The words hold elements 0, 2, 1, 3 and 4, 6, 5, 7, one per byte.
    const u32 a = (magnitude[1] * 256 + magnitude[0]) | (signs_of_pairs(x[0], x[1]) & 0x08080808);
    const u32 b = (magnitude[3] * 256 + magnitude[2]) | (signs_of_pairs(x[2], x[3]) & 0x08080808);
    // The upper half-words hold the odd elements, whose codes belong in
    // the high nibbles, so the upper half-words are multiplied by sixteen.
    return ptx::halves_mul_add(a, 0x1001, ptx::halves_mul_add(b, 0x1001, 0) * 65536);
}

/// Packs the codes of four rows of two columns; each half of a word holds one column.
__device__ __forceinline__ u32 pack_columns(const u32* row, const u32 (&magnitude)[4]) {
    const u32 even = signs_of_pairs(row[0], row[2]), odd = signs_of_pairs(row[1], row[3]);
    const u32 signs = (even & 0x0F0F0F0F) | (odd & 0xF0F0F0F0);
    return ((magnitude[3] * 16 + magnitude[2]) * 256 + (magnitude[1] * 16 + magnitude[0])) | (signs & 0x88888888);
}

/// The parameters that convert a BF16 magnitude to an E2M1 code under a scale m · 2^e, 1 <= m < 2.
///
/// First the magnitude becomes F16: its BF16 bits plus `below` (the upper half of `factor_below`, negative), shifted
/// left by three, are the F16 number x · 2^-e · 2^-6. F16 has three more mantissa bits than BF16, and fewer exponent
/// bits. Then this F16 number is multiplied by `factor` (the lower half, F16, about 2^-7 / m), which gives 2^-13 times
/// the quotient x / scale.
struct PairCode {
    u32 factor_below;
    u32 limit;  // upper bound of a magnitude's bits plus `below`; the largest code reaches it

    /// Returns the parameters for values of two blocks, one block in each half
    /// of a word. For adjacent values of a row, both halves hold the same block.
    struct Two {
        u32 factor, below, limit;

        __device__ __forceinline__ static Two of(const PairCode& a, const PairCode& b) {
            return {__byte_perm(a.factor_below, b.factor_below, 0x5410), __byte_perm(a.factor_below, b.factor_below, 0x7632),
                    __byte_perm(a.limit, b.limit, 0x5410)};
        }

        /// Returns the codes of two values without their signs, by the method of `E2m1::encode_within`. The
        /// method's three bounds are subnormal F16 numbers here, so F16 arithmetic rounds them to whole codes.
        __device__ __forceinline__ u32 magnitude(u32 x) const {
            const u32 scaled = ptx::add_clamp_s16x2(ptx::magnitudes_bf16x2(x), below, limit) * 8, quotient = ptx::mul_f16x2(scaled, factor);
            const u32 halves = ptx::mul_f16x2(quotient, 0x14001400), ones = ptx::fma_f16x2(quotient, 0x10001000, 0x00020002);
            const u32 twos = ptx::fma_f16x2(quotient, 0x0C000C00, 0x00040004);
            return ptx::min_u16x2(ptx::min_u16x2(halves, ones), twos);
        }
        __device__ __forceinline__ void magnitudes(const u32* x, u32 (&of)[4]) const {
#pragma unroll
            for (int i = 0; i < 4; ++i) of[i] = magnitude(x[i]);
        }
    };
};

}  // namespace nib
