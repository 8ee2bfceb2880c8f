// NVFP4: E2M1 in blocks of 16 under an E4M3 scale, under an F32 scale of the tensor or by itself. The twin of crates/formats/src/nvfp4.rs.
#pragma once
#include "formats/block_format.cuh"
#include "formats/pair_code.cuh"

namespace nib {

/// What both have in common.
struct Nvfp4Codes : OneFactor<SixteenE2m1> {
    static constexpr int kBlock = 16, kPart = 16, kScaleBytes = 1;
    static constexpr bool kTiles = true;
    static constexpr u32 kNan = 0x7F;

    /// The value of a block's scale byte, NaN included.
    __device__ __forceinline__ static float multiplier(u32 record, int) {
        return (record & 0x7F) == kNan ? __uint_as_float(kNanBits) : E4m3::decode(record);
    }

    /// A scale byte is rounded, so that a quotient may be above the largest code.
    template <int kRound, bool kWithin, int kFactors, class Decide>
    __device__ __forceinline__ static bool encode(const float (&x)[16], const float (&factor)[kFactors], u32 (&words)[2], const Decide& decision) {
        return OneFactor<SixteenE2m1>::encode<kRound, false>(x, factor, words, decision);
    }
};

/// Under a scale of the tensor.
struct Nvfp4 : Nvfp4Codes {
    static constexpr bool kTensor = true;

    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg, TensorInverse tensor) {
        if (amax >= kInfinityBits) return Scaled::nan(kNan);
        const float wanted = __fmul_rn(__uint_as_float(amax), __fmul_rn(tensor.inverse, 1.0f / 6.0f));
        const u32 byte = ptx::e4m3x2_from_f32(wanted, 0.0f) & 0xFF;
        if (byte == kNan) return Scaled::nan(byte);
        // A scale of zero takes what is not zero to the largest code, which decodes as zero.
        const float value = __fmul_rn(E4m3::decode(byte), tensor.unit);
        if (value >= 0x1p-126f && value <= 0x1p125f) return {byte, reciprocal(value)};
        return {byte, fminf(__frcp_rn(value), 0x1.fffffep127f)};
    }
};

/// By itself.
struct Nvfp4Block : Nvfp4Codes {
    /// amax / 6 to the nearest: a product with the nearest single to 1/6 is the quotient or its neighbour, and the exact remainder says which
    /// (Markstein, 1990). Of magnitudes so small that the remainder is rounded the scale byte is zero either way.
    __device__ __forceinline__ static float sixth(float amax) {
        constexpr float kSixth = 1.0f / 6.0f;
        const float near = __fmul_rn(amax, kSixth);
        return __fmaf_rn(__fmaf_rn(-6.0f, near, amax), kSixth, near);
    }

    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg, TensorInverse) {
        const u32 byte = ptx::e4m3x2_from_f32(sixth(__uint_as_float(amax)), 0.0f) & 0xFF;
        const float value = E4m3::decode(byte), approx = ptx::reciprocal_approx(value);
        // The nearest one, of so few bits.
        const float inverse = byte == 0 ? 0x1.fffffep127f : __fmaf_rn(__fmaf_rn(-value, approx, 1.0f), approx, approx);
        return {amax >= kInfinityBits ? kNan : byte, amax >= kInfinityBits ? __uint_as_float(kNanBits) : inverse};
    }

    template <int kRound>
    __host__ __device__ static constexpr bool has_table() {
        return kRound == kNearestEven;
    }

    /// The scale bytes of two blocks, from BF16 magnitudes in the halves of a word. Of infinity it is the largest scale. A sixth of a BF16 number is a
    /// tie between scales or far from one, and the product with the nearest single to 1/6 has the ties exactly: it has the bytes of the quotient.
    __device__ __forceinline__ static u32 bytes_of(u32 amax) {
        constexpr float kSixth = 1.0f / 6.0f;
        return ptx::e4m3x2_from_f32(__fmul_rn(__uint_as_float(amax << 16), kSixth), __fmul_rn(__uint_as_float(amax & 0xFFFF0000), kSixth));
    }

    /// How magnitudes under a scale byte become codes.
    ///
    /// F16 has too few bits for x / scale, and yet enough. A BF16 number and a threshold times the scale, whose mantissas have three bits each,
    /// are equal or differ by 2^-8 of themselves at least; F16 keeps that. Where they are equal, x · inverse in F32 is the threshold itself, or,
    /// under a scale of 15/8 times a power of two, the next number above 0.75, 1.25 and so on, all but 0.25. So is it in F16, where 0.25 is a
    /// subnormal number, by factors that are larger by 2^-11 under that scale, and under 11/8 too.
    ///
    /// Under a scale of zero the inverse is the largest F32 number, a little less than 2^128: all but subnormal numbers get the largest code, and of those
    /// 2^-128, whose bits are 32, counts as one, with ties going down.
    __device__ __forceinline__ static PairCode pair_code(u32 byte) {
        if (byte == 0) return {0x47FF, 192};
        const float value = E4m3::decode(byte), mantissa = __uint_as_float((__float_as_uint(value) & 0x7FFFFF) | 0x3F800000);
        const u32 factor = ptx::f16x2_from_f32(__frcp_rn(mantissa), 0.0f) + (mantissa == 1.375f || mantissa == 1.875f) - 7 * 1024;
        const u32 exponent = __float_as_uint(value) >> 23;
        return {factor | (9 - exponent) * 128 << 16, ptx::f16x2_from_f32(__fmul_rn(mantissa, 0x6p-6f), 0.0f) >> 3};
    }
};

}  // namespace nib
