// FP8 elements: E4M3 (largest 448, NaN, no infinity) and E5M2; blocks of 128, one code a byte. The twins of
// crates/formats/src/element.rs.
#pragma once
#include "formats/bf16.cuh"
#include "ptx/packed.cuh"
#include "ptx/types.cuh"

namespace nib {

/// What both have in common; `Element::pair` rounds two numbers.
template <class Element>
struct Fp8 {
    static constexpr int kBlock = 128;
    static constexpr int kCodeBits = 8;
    static constexpr u32 kMaxMantissa = 0x600000;  // 448 and 57344 are 1.75 times a power of two
    using Eight = uint2;

    __device__ __forceinline__ static Eight zeros() { return {0, 0}; }

    /// Codes of x * inverse, nearest-even, saturating.
    template <class In>
    __device__ __forceinline__ static Eight encode_from(const typename In::Eight& x, float inverse) {
        u32 four[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u16 low = Element::pair(__fmul_rn(In::value(x, 4 * i), inverse), __fmul_rn(In::value(x, 4 * i + 1), inverse));
            const u16 high = Element::pair(__fmul_rn(In::value(x, 4 * i + 2), inverse), __fmul_rn(In::value(x, 4 * i + 3), inverse));
            four[i] = ptx::pack_u16(low, high);
        }
        return {four[0], four[1]};
    }
    template <bool kExceeds>
    __device__ __forceinline__ static Eight encode(const Bf16::Eight& x, float inverse) {
        return encode_from<Bf16>(x, inverse);
    }
    template <bool kExceeds>
    __device__ __forceinline__ static Eight encode(const F32::Eight& x, float inverse) {
        return encode_from<F32>(x, inverse);
    }
};

struct E4m3 : Fp8<E4m3> {
    static constexpr int kMantissaBits = 3;
    static constexpr int kEmax = 8;
    static constexpr float kMax = 448.0f;
    static constexpr float kLargestToZero = 9.765625e-04f;  // 2^-10, a tie, to even

    __device__ __forceinline__ static u16 pair(float low, float high) { return ptx::e4m3x2_from_f32(low, high); }

    /// The value of a finite code; 480 for a NaN.
    __device__ __forceinline__ static float decode(u32 code) {
        const float magnitude = __fmul_rn(__uint_as_float((code & 0x7F) << 20), 1.329227996e36f);  // 2^120
        return __uint_as_float(__float_as_uint(magnitude) | (code & 0x80) << 24);
    }
};

struct E5m2 : Fp8<E5m2> {
    static constexpr int kMantissaBits = 2;
    static constexpr int kEmax = 15;
    static constexpr float kMax = 57344.0f;
    static constexpr float kLargestToZero = 7.62939453125e-06f;  // 2^-17, a tie, to even

    __device__ __forceinline__ static u16 pair(float low, float high) { return ptx::e5m2x2_from_f32(low, high); }
};

}  // namespace nib
