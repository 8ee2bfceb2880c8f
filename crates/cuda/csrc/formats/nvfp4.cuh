// NVFP4: E2M1 in blocks of 16 under an E4M3 scale, under an F32 scale of the tensor or by itself. The twin of crates/formats/src/nvfp4.rs.
#pragma once
#include "formats/block_format.cuh"

namespace nib {

/// The value of a block's scale byte, NaN included.
struct Nvfp4Scale {
    static constexpr u32 kNan = 0x7F;

    __device__ __forceinline__ static float multiplier(u32 record, int) {
        return (record & 0x7F) == kNan ? __uint_as_float(kNanBits) : E4m3::decode(record);
    }
};

/// Under a scale of the tensor.
struct Nvfp4 : OneFactor<SixteenE2m1>, Nvfp4Scale {
    static constexpr int kBlock = 16, kPart = 16, kScaleBytes = 1;
    static constexpr bool kTensor = true, kTiles = true;

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

    template <int kRound, bool kWithin, int kFactors, class Decide>
    __device__ __forceinline__ static bool encode(const float (&x)[16], const float (&factor)[kFactors], u32 (&words)[2], const Decide& decision) {
        return OneFactor<SixteenE2m1>::encode<kRound, false>(x, factor, words, decision);
    }
};

/// By itself.
struct Nvfp4Block : OneFactor<SixteenE2m1>, Nvfp4Scale {
    static constexpr int kBlock = 16, kPart = 16, kScaleBytes = 1;
    static constexpr bool kTiles = true;

    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg, TensorInverse) {
        const u32 byte = ptx::e4m3x2_from_f32(__fmul_rn(__uint_as_float(amax), 1.0f / 6.0f), 0.0f) & 0xFF;
        const float value = E4m3::decode(byte), approx = ptx::reciprocal_approx(value);
        // The nearest one, of so few bits.
        const float inverse = byte == 0 ? 0x1.fffffep127f : __fmaf_rn(__fmaf_rn(-value, approx, 1.0f), approx, approx);
        return {amax >= kInfinityBits ? kNan : byte, amax >= kInfinityBits ? __uint_as_float(kNanBits) : inverse};
    }

    template <int kRound, bool kWithin, int kFactors, class Decide>
    __device__ __forceinline__ static bool encode(const float (&x)[16], const float (&factor)[kFactors], u32 (&words)[2], const Decide& decision) {
        if constexpr (kRound == kNearestEven && kWithin) return encode_bf16(x, factor[0], words);
        else return OneFactor<SixteenE2m1>::encode<kRound, false>(x, factor, words, decision);
    }

private:
    /// The way of `E2m1::encode`: F16 has E2M1 in it, and an integer addition rounds two numbers.
    ///
    /// F16 has too few bits for x · factor, and yet enough. A BF16 number and a threshold times the scale, whose mantissas have three bits each,
    /// are equal or differ by 2^-8 of themselves at least; F16 keeps that. Where they are equal, x · factor in F32 is the threshold
    /// itself, or, under a scale of 15/8 times a power of two, the next number above 0.75, 1.25 and so on, all but 0.25. So under such
    /// a scale the factor is larger by 2^-10, which brings those above the tie, and leaves 0.25, a subnormal F16 number here, on it.
    /// The other scales that pass a tie do so only where it goes up to even anyway. Under a scale of zero the factor is the largest number, a
    /// little less than a power of two, and ties go down: so it is smaller by 2^-10.
    __device__ __forceinline__ static bool encode_bf16(const float (&x)[16], float factor, u32 (&words)[2]) {
        constexpr u32 kMantissa = 0x7FFFFF, kOfFifteen = 0x088889;  // of 8/15
        const bool fifteen = (__float_as_uint(factor) & kMantissa) == kOfFifteen;
        const float scaled = fminf(__fmul_rn(factor, fifteen ? 0x1.004p-14f : 0x1p-14f), 0x1.ff8p113f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 half[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // As `pack_halves` wants them.
                const int first = 8 * i + j % 2 * 4 + j / 2;
                half[j] = ptx::f16x2_from_f32(__fmul_rn(x[first], scaled), __fmul_rn(x[first + 2], scaled));
                half[j] = ptx::clamp_magnitude_f16x2(half[j], 0x0E000E00);
                // Half a step less one, and one more where the code below is odd.
                half[j] += 0x00FF00FF + (half[j] >> 9 & 0x00010001);
            }
            words[i] = E2m1::pack_halves<false>(half);
        }
        return (words[0] | words[1]) & E2m1::kMagnitudes;
    }
};

}  // namespace nib
