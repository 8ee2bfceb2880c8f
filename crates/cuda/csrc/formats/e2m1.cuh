// E2M1 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Blocks have 32 values. A byte holds two
// codes, with the even element in the low nibble. The CPU implementation is crates/formats/src/element.rs.
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
    static constexpr int kBias = 1;
    static constexpr float kToCode = 0x1p-126f;  // maps the smallest normal E2M1 number to the smallest normal F32 number
    static constexpr u32 kMaxMantissa = 0x400000;  // the F32 mantissa of 6
    static constexpr float kMax = 6.0f;
    static constexpr float kLargestToZero = 0.25f;  // a tie, which rounds to even
    static constexpr u32 kMagnitudes = 0x77777777;
    /// Eight codes.
    using Eight = u32;

    __device__ __forceinline__ static Eight zeros() { return 0; }

    /// Returns whether any of the codes is non-zero.
    __device__ __forceinline__ static bool any(Eight codes) { return codes & kMagnitudes; }

    /// Returns the codes of x * inverse for BF16 values, rounded to nearest even. `inverse` is a power of two, either one
    /// for all values or one per value, and |x * inverse| is below 8. kExceeds: products above 6 may occur, and saturate.
    ///
    /// F16 can represent every E2M1 value: after a multiplication by 2^-14, the smallest normal numbers of
    /// both formats coincide. Then bits 9 and up of an F16 number are the code, and the bits below are the
    /// fraction to be rounded. F16's ten mantissa bits represent a BF16 product exactly down to 0.125; smaller
    /// products get the code 0 in any case. So one integer addition on the F16 bits rounds two numbers.
    template <bool kExceeds, class Inverse>
    __device__ __forceinline__ static Eight encode(const Bf16::Eight& x, const Inverse& inverse) {
        // The two halves of a register hold elements (0, 2), (4, 6), (1, 3) or (5, 7), so the code below interleaves
        // bytes, not nibbles.
        u32 half[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = i % 2 * 4 + i / 2;
            // 2^-14; the product is exact because inverse is at least 2^-126.
            const float scale_a = __fmul_rn(inverse_of(inverse, first), 6.103515625e-05f);
            const float scale_b = __fmul_rn(inverse_of(inverse, first + 2), 6.103515625e-05f);
            half[i] = ptx::f16x2_from_f32(__fmul_rn(Bf16::value(x, first), scale_a), __fmul_rn(Bf16::value(x, first + 2), scale_b));
            // The addend is half a step minus 1, plus 1 if the lower code is odd.
            half[i] += 0x00FF00FF + (half[i] >> 9 & 0x00010001);
        }
        return pack_halves<kExceeds>(half);
    }

    /// Returns the codes of x · factor for finite BF16 numbers with |x · factor| <= 6, rounded to nearest even. `factor` is a
    /// power of two, as BF16 in both halves of a word. This function takes fewer instructions of the integer pipe than `encode`.
    ///
    /// With v = |x · factor|, the code rises by 1 every 0.5 up to v = 2, every 1 up to 4, and every 2 up to 6. So the
    /// code is the smallest of 2v, v + 2 and v / 2 + 4. Each of the three is a fused multiply-add onto a constant whose
    /// last place is worth 0.5, 1 or 2. The addition rounds v to that step, and the last bits of the sum are the code.
    __device__ __forceinline__ static Eight encode_within(const Bf16::Eight& x, u32 factor) {
        u32 code[4];  // each half is the code plus 0x42C0
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 magnitude = x.word[i] & 0x7FFF7FFF;
            const u32 halves = ptx::fma_bf16x2(magnitude, factor, 0x42C042C0);  // 96 (0x42C0)
            const u32 ones = ptx::fma_bf16x2(magnitude, factor, 0x43424342);    // 194 (0x4342) = 192 + 2
            const u32 twos = ptx::fma_bf16x2(magnitude, factor, 0x43C443C4);    // 392 (0x43C4) = 384 + 8
            code[i] = ptx::add_min_s16x2(twos, 0xFF00FF00, ptx::add_min_s16x2(ones, 0xFF80FF80, halves));
        }
        // The words hold the codes of elements 0, 2, 1, 3 and 4, 6, 5, 7, one per byte. Non-overlapping fields are
        // combined by addition; their constants are subtracted at the end.
        const u32 a = code[1] * 256 + code[0], b = code[3] * 256 + code[2];
        const u32 even = __byte_perm(a, b, 0x5410), odd = __byte_perm(a, b, 0x7632);
        const u32 signs_a = __byte_perm(x.word[0], x.word[1], 0x7351), signs_b = __byte_perm(x.word[2], x.word[3], 0x7351);
        const u32 signs_even = __byte_perm(signs_a, signs_b, 0x5410), signs_odd = __byte_perm(signs_a, signs_b, 0x7632);
        return odd * 16 + even + ((signs_even >> 4 & 0x08080808) | (signs_odd & 0x80808080)) - 0x32F032F0;
    }

    /// Returns the codes of x · inverse for F32 values, rounded to
    /// nearest even. kExceeds: products above 6 may occur, and saturate.
    template <bool kExceeds, class Inverse>
    __device__ __forceinline__ static Eight encode(const F32::Eight& x, const Inverse& inverse) {
        float v[8];
        u32 top[4];  // bytes of elements i and i + 4
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(fabsf(x.number[i]), inverse_of(inverse, i));
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i] = __byte_perm(__float_as_uint(x.number[i]), __float_as_uint(x.number[i + 4]), 0x0073);
        const u32 signs = choose(0x80808080, __byte_perm(top[1], top[3], 0x5140), __byte_perm(top[0], top[2], 0x5140) >> 4);
        return choose(kMagnitudes, magnitudes<kExceeds>(v), signs);
    }

    /// Returns the codes of magnitudes by the method of `encode_within`. Each of the method's
    /// three bounds is halved and added to 1.5 · 2^22, whose last mantissa bit is worth 0.5.
    template <bool kExceeds>
    __device__ __forceinline__ static Eight magnitudes(const float (&v)[8]) {
        constexpr float kFar = 0x1.8p22f;
        constexpr u32 kFarBits = 0x4AC00000;
        u32 code[8];  // each word is the code plus kFarBits
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 halves = __float_as_uint(__fadd_rn(v[i], kFar));
            const u32 ones = __float_as_uint(__fmaf_rn(v[i], 0.5f, kFar + 1)), twos = __float_as_uint(__fmaf_rn(v[i], 0.25f, kFar + 2));
            code[i] = min(min(halves, ones), twos);
            if constexpr (kExceeds) code[i] = min(code[i], kFarBits + 7);
        }
        // The words hold the codes of elements 0, 2, 4, 6 and 1, 3, 5, 7, one per byte. Non-overlapping fields are
        // combined by addition; their constants are subtracted at the end.
        const u32 even = (code[6] * 256 + code[4]) * 65536 + (code[2] * 256 + code[0]);
        const u32 odd = (code[7] * 256 + code[5]) * 65536 + (code[3] * 256 + code[1]);
        return odd * 16 + even - kFarBits * 0x11111111u;
    }

    /// Packs eight codes from words that hold the sign in bit 31 and the code from bit 22 up; lower bits are
    /// ignored.
    __device__ __forceinline__ static Eight pack(const u32 (&of)[8]) {
        u32 two[4];  // elements i and i + 4: bit 15 and bits 6 to 8 of each half-word
#pragma unroll
        for (int i = 0; i < 4; ++i) two[i] = __byte_perm(of[i], of[i + 4], 0x7632);
        const u32 even = choose(0x81C081C0, two[1], two[0] >> 4);  // codes 0 and 1 of each half-word
        const u32 odd = choose(0x81C081C0, two[3], two[2] >> 4);   // codes 2 and 3 of each half-word
        const u32 magnitudes = choose(0xFF00FF00, odd << 6, even >> 2), signs = choose(0xFF00FF00, odd, even >> 8);
        return choose(kMagnitudes, magnitudes, signs);
    }

    /// Returns the value of the code in the low four bits.
    __device__ __forceinline__ static float decode(u32 code) {
        const float magnitude = __fmul_rn(__uint_as_float((code & 7) << 22), 8.507059173e37f);  // 2^126
        return __uint_as_float(__float_as_uint(magnitude) | (code & 8) << 28);
    }

    /// Returns eight codes times their block's scale, which is
    /// BF16 in both halves of a word. The products are exact.
    __device__ __forceinline__ static Bf16::Eight widen(Eight codes, u32 scale) {
        constexpr u32 kToNumber = 0x7E807E80, kMinusZero = 0x80008000;  // 2^126; and -0, which keeps the sign of a zero
        Bf16::Eight numbers;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 two = codes >> 8 * i, apart = (two & 0x0F) | (two & 0xF0) << 12;  // a code in the low bits of either half
            const u32 tiny = (apart & 0x00070007) << 6 | (apart & 0x00080008) << 12;
            numbers.word[i] = ptx::fma_bf16x2(ptx::fma_bf16x2(tiny, kToNumber, kMinusZero), scale, kMinusZero);
        }
        return numbers;
    }

    /// Packs each half-word to a nibble: the sign comes from bit 15 and the code from
    /// bits 9 to 11; the bits between are 0. With kExceeds the code has bits 9 to 12,
    /// and the code 8 becomes 7. The words hold elements (0, 2), (4, 6), (1, 3), (5, 7).
    template <bool kExceeds>
    __device__ __forceinline__ static u32 pack_halves(const u32 (&half)[4]) {
        u32 even = __byte_perm(half[0], half[1], 0x7531);  // each half-word is S000mmm?; elements 0, 2, 4, 6
        u32 odd = __byte_perm(half[2], half[3], 0x7531);
        if constexpr (kExceeds) {
            even -= even >> 3 & 0x02020202;
            odd -= odd >> 3 & 0x02020202;
        }
        const u32 high = (odd << 3 & 0x7F7F7F7F) | (odd & 0x80808080);
        const u32 low = (even >> 1 | even >> 4) & 0x0F0F0F0F;
        return (high & 0xF0F0F0F0) | low;
    }

private:
    /// Combines two words: the bits of `a` where the mask is 1, and the bits of `b` elsewhere.
    __device__ __forceinline__ static u32 choose(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
};

}  // namespace nib
