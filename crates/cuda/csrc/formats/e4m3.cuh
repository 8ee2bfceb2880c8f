// FP8 elements E4M3 (largest value 448, NaN, no infinity) and E5M2, in blocks of
// 128, one code per byte. crates/formats/src/element.rs has the CPU implementation.
#pragma once
#include "formats/bf16.cuh"
#include "ptx/packed.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Common base of E4M3 and E5M2; `Element::pair` rounds two values.
template <class Element>
struct Fp8 {
    static constexpr int kBlock = 128;
    static constexpr int kCodeBits = 8;
    static constexpr u32 kMaxMantissa = 0x600000;  // 448 and 57344 are 1.75 times a power of two
    using Eight = uint2;

    __device__ __forceinline__ static Eight zeros() { return {0, 0}; }

    /// Returns whether any of the codes is not zero.
    __device__ __forceinline__ static bool any(Eight codes) { return (codes.x | codes.y) & 0x7F7F7F7F; }

    /// Returns the codes of x * inverse, rounded to nearest even, saturating.
    /// `inverse` is either one factor for all values, or one factor per value.
    template <class In, class Inverse>
    __device__ __forceinline__ static Eight encode_from(const typename In::Eight& x, const Inverse& inverse) {
        u16 two[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            two[i] = Element::pair(__fmul_rn(In::value(x, 2 * i), inverse_of(inverse, 2 * i)),
                                   __fmul_rn(In::value(x, 2 * i + 1), inverse_of(inverse, 2 * i + 1)));
        return {ptx::pack_u16(two[0], two[1]), ptx::pack_u16(two[2], two[3])};
    }
    template <bool kExceeds, class Inverse>
    __device__ __forceinline__ static Eight encode(const Bf16::Eight& x, const Inverse& inverse) {
        return encode_from<Bf16>(x, inverse);
    }
    template <bool kExceeds, class Inverse>
    __device__ __forceinline__ static Eight encode(const F32::Eight& x, const Inverse& inverse) {
        return encode_from<F32>(x, inverse);
    }

    /// Packs eight codes from words that hold the sign in bit 31 and the code from bit 23 - kMantissaBits up; lower bits
    /// are ignored.
    __device__ __forceinline__ static Eight pack(const u32 (&of)[8]) { return {pack_four(of), pack_four(of + 4)}; }

private:
    __device__ __forceinline__ static u32 pack_four(const u32* of) {
        constexpr int kShift = 7 - Element::kMantissaBits;  // the code's lowest bit in a half-word
        const u32 even = __byte_perm(of[0], of[2], 0x7632), odd = __byte_perm(of[1], of[3], 0x7632);
        const u32 magnitudes = (even >> kShift & 0x00FF00FF) | (odd << (8 - kShift) & 0xFF00FF00);
        const u32 signs = (even >> 8 & 0x00FF00FF) | (odd & 0xFF00FF00);
        return (magnitudes & 0x7F7F7F7F) | (signs & 0x80808080);
    }
};

struct E4m3 : Fp8<E4m3> {
    static constexpr int kMantissaBits = 3;
    static constexpr int kEmax = 8;
    static constexpr int kBias = 7;
    static constexpr float kToCode = 0x1p-120f;  // maps the element's smallest normal number to the smallest normal F32 number
    static constexpr float kMax = 448.0f;
    static constexpr float kLargestToZero = 9.765625e-04f;  // 2^-10, a tie, which rounds to even

    __device__ __forceinline__ static u16 pair(float low, float high) { return ptx::e4m3x2_from_f32(low, high); }

    /// Returns the value of a finite code, or 480 for a NaN.
    __device__ __forceinline__ static float decode(u32 code) {
        const float magnitude = __fmul_rn(__uint_as_float((code & 0x7F) << 20), 1.329227996e36f);  // 2^120
        return __uint_as_float(__float_as_uint(magnitude) | (code & 0x80) << 24);
    }
};

struct E5m2 : Fp8<E5m2> {
    static constexpr int kMantissaBits = 2;
    static constexpr int kEmax = 15;
    static constexpr int kBias = 15;
    static constexpr float kToCode = 0x1p-112f;
    static constexpr float kMax = 57344.0f;
    static constexpr float kLargestToZero = 7.62939453125e-06f;  // 2^-17, a tie, which rounds to even

    __device__ __forceinline__ static u16 pair(float low, float high) { return ptx::e5m2x2_from_f32(low, high); }
};

/// E4M3 in blocks of 32; MXFP8 has such blocks.
struct E4m3By32 : E4m3 {
    static constexpr int kBlock = 32;
};
struct E5m2By32 : E5m2 {
    static constexpr int kBlock = 32;
};

}  // namespace nib
