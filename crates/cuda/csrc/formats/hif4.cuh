// HiFloat4: quarters in blocks of 64 under an E6M2 scale, one more octave for each eighth of the block and another for each sixteenth. The
// twin of crates/formats/src/hif4.rs. kCann: Ascend's convention.
#pragma once
#include "formats/block_format.cuh"
#include "ptx/types.cuh"

namespace nib {

template <bool kCann>
struct Hif4 {
    using Element = S1p2;
    static constexpr int kBlock = 64, kPart = 4, kParts = 16, kScaleBytes = 4;
    static constexpr bool kLine = false, kTensor = false, kTiles = false;
    static constexpr u32 kNan = 0xFF;

    __device__ __forceinline__ static Scaled scale(const u32 (&amax)[kParts], ScaleArg, TensorInverse) {
        u32 largest = amax[0];
#pragma unroll
        for (int i = 1; i < kParts; ++i) largest = max(largest, amax[i]);
        if (largest >= kInfinityBits) return Scaled::nan(kNan);
        constexpr double kSeventh = 73.0 / 512.0;  // BF16 of one seventh
        double wanted;
        if constexpr (kCann) {
            wanted = to_bits(double(bf16_rounded(__uint_as_float(largest))) * kSeventh, 8);
            // Half a step above the largest number is NaN's.
            if (!(wanted >= 0x1p-48 && wanted < 1.625 * 32768.0)) return Scaled::nan(kNan);
        } else {
            wanted = fmin(fmax(to_bits(double(__uint_as_float(largest)) * kSeventh, 8), 0x1p-48), 49152.0);
        }
        const u32 high = u32(u64(__double_as_longlong(to_bits(wanted, 3))) >> 50);
        u32 record = ((high >> 2) + 48 - 1023) << 2 | (high & 3);
        const float inverse = bf16_rounded(__frcp_rn(e6m2(record)));
        // Cut off, a product is at least four where the exact one is.
#pragma unroll
        for (int eighth = 0; eighth < 8; ++eighth) {
            const float first = __fmul_rz(__uint_as_float(amax[2 * eighth]), inverse), second = __fmul_rz(__uint_as_float(amax[2 * eighth + 1]), inverse);
            const bool doubled = fmaxf(first, second) >= 4.0f;
            const float bound = doubled ? 4.0f : 2.0f;
            record |= u32(doubled) << (8 + eighth) | u32(first >= bound) << (16 + 2 * eighth) | u32(second >= bound) << (17 + 2 * eighth);
        }
        return {record, inverse};
    }

    /// Octaves of a part beyond the first level's.
    __device__ __forceinline__ static u32 octaves(u32 record, int part) { return (record >> (8 + part / 2) & 1) + (record >> (16 + part) & 1); }

    __device__ __forceinline__ static float factor(const Scaled& scale, int part) {
        return __fmul_rn(scale.inverse, __uint_as_float((127 - octaves(scale.record, part)) << 23));
    }
    __device__ __forceinline__ static float multiplier(u32 record, int part) {
        if ((record & 0xFF) == kNan) return __uint_as_float(kNanBits);
        return __fmul_rn(e6m2(record), __uint_as_float((127 + octaves(record, part)) << 23));
    }

    template <int kRound, int kFactors, class Decide>
    __device__ __forceinline__ static bool encode(const float (&x)[16], const float (&factor)[kFactors], u32 (&words)[2],
                                                  const Decide& decision) {
        static_assert(kFactors == 4, "four values have a factor");
        float y[16];
        if constexpr (kCann) {
#pragma unroll
            for (int i = 0; i < 16; ++i) y[i] = bf16_rounded(__fmul_rn(x[i], factor[i / 4]));
            const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
            if constexpr (kRound != kAnyRounding) return S1p2::nearest<kRound == kNearestAway>(y, ones, words);
        } else if constexpr (kRound != kAnyRounding) {
            return S1p2::nearest<kRound == kNearestAway>(x, factor, words);
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) y[i] = to_odd(double(x[i]) * double(factor[i / 4]));
        }
        return encode_by<S1p2>(y, words, decision);
    }

private:
    /// The value of an E6M2 byte, the lowest of a record.
    __device__ __forceinline__ static float e6m2(u32 record) {
        return __uint_as_float(((record >> 2 & 0x3F) + 127 - 48) << 23 | (record & 3) << 21);
    }

    /// A positive number rounded to so many significant bits, ties to even.
    __device__ __forceinline__ static double to_bits(double x, int significant) {
        const u64 bits = u64(__double_as_longlong(x));
        if (bits == 0 || bits >= 0x7FF0000000000000ull) return x;
        const int cut = 53 - significant;
        return __longlong_as_double((long long)((bits + (1ull << (cut - 1)) - 1 + (bits >> cut & 1)) >> cut << cut));
    }

    /// A finite or infinite number rounded to BF16, ties to even.
    __device__ __forceinline__ static float bf16_rounded(float x) {
        const u32 bits = __float_as_uint(x);
        return __uint_as_float((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
    }

    /// A number cut to a single whose last bit is set where something was cut off, so that rounding it again rounds the number itself.
    __device__ __forceinline__ static float to_odd(double x) {
        const float cut = __double2float_rz(x);
        return double(cut) == x ? cut : __uint_as_float(__float_as_uint(cut) | 1);
    }
};

using Hif4Amax = Hif4<false>;
using Hif4Cann = Hif4<true>;

}  // namespace nib
