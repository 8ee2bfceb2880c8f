// HiFloat4: signed multiples of 1/4 in blocks of 64 with an E6M2 scale. Each eighth of the block
// (8 values) may double the scale, and each sixteenth (4 values, called a part) may double it once
// more. The CPU implementation is crates/formats/src/hif4.rs. kCann selects Ascend's convention.
#pragma once
#include "formats/block_format.cuh"
#include "ptx/types.cuh"

namespace nib {

template <bool kCann>
struct Hif4 {
    using Element = S1p2;
    static constexpr int kBlock = 64, kPart = 4, kScaleBytes = 4;
    static constexpr bool kLine = false, kTensor = false, kTiles = false, kSquares = false, kLimits = false;
    static constexpr bool kChosen = false, kThresholds = true, kCandidates = false, kCorrection = false;
    static constexpr u32 kNan = 0xFF;

    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg, TensorInverse) {
        if (amax >= kInfinityBits) return Scaled::nan(kNan);
        constexpr float kSeventh = 73.0f / 512.0f;  // 1/7 rounded to BF16
        constexpr u32 kLeast = 0x27800000, kMost = 0x47400000, kAboveMost = 0x47500000;  // 2^-48, 1.5 · 2^15 and 1.625 · 2^15
        const float largest = kCann ? bf16_rounded(__uint_as_float(amax)) : __uint_as_float(amax);
        // The product is rounded to odd, which means truncated, with the last bit set if the product
        // is inexact. Rounding such a result further gives the same as rounding the exact product.
        const float cut = __fmul_rz(largest, kSeventh);
        const u32 to_odd = __float_as_uint(cut) | u32(__fmaf_rz(largest, kSeventh, -cut) != 0.0f);
        u32 wanted = __float_as_uint(bf16_rounded(__uint_as_float(to_odd)));
        // If the value is at least half a step above the largest scale, the scale becomes NaN.
        if (kCann && !(wanted >= kLeast && wanted < kAboveMost)) return Scaled::nan(kNan);
        if (!kCann) wanted = min(max(wanted, kLeast), kMost);
        // Rounds `wanted` to two mantissa bits.
        const u32 record = (wanted + 0x000FFFFF + (wanted >> 21 & 1) >> 21) - ((127 - 48) << 2);
        return {record, bf16_rounded(ptx::reciprocal_approx(e6m2(record)))};
    }

    /// Returns the doublings of kCount parts from `first` on, as bits at their
    /// positions in a record; also computes the factors for the values of these parts.
    template <int kCount>
    __device__ __forceinline__ static u32 refine(float inverse, const u32 (&amax)[kCount], int first, float (&factor)[kCount], float high = 4.0f,
                                                 float low = 2.0f) {
        u32 octaves = 0;
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            // A truncated product reaches a threshold if and only if the exact product does.
            const float a = __fmul_rz(__uint_as_float(amax[i]), inverse), b = __fmul_rz(__uint_as_float(amax[i + 1]), inverse);
            const bool doubled = fmaxf(a, b) >= high;
            const float bound = doubled ? high : low, all = doubled ? __fmul_rn(inverse, 0.5f) : inverse;
            factor[i] = a >= bound ? __fmul_rn(all, 0.5f) : all;
            factor[i + 1] = b >= bound ? __fmul_rn(all, 0.5f) : all;
            octaves |= u32(doubled) << (8 + (first + i) / 2) | u32(a >= bound) << (16 + first + i) | u32(b >= bound) << (17 + first + i);
        }
        return octaves;
    }

    /// `refine` for four parts of a row or column of a 2-D block. `amax` has the largest
    /// magnitudes of the four 4 x 4 blocks, and `eighth` those of the two 8 x 8 blocks.
    __device__ __forceinline__ static u32 refine_in_square(float inverse, const u32 (&amax)[4], const u32 (&eighth)[2], int first, float (&factor)[4],
                                                           float high = 4.0f, float low = 2.0f) {
        u32 octaves = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // The products are truncated, because a truncated product reaches a threshold if and only if the exact product does.
            const bool doubled = __fmul_rz(__uint_as_float(eighth[i / 2]), inverse) >= high;
            const bool again = __fmul_rz(__uint_as_float(amax[i]), inverse) >= (doubled ? high : low);
            const float all = doubled ? __fmul_rn(inverse, 0.5f) : inverse;
            factor[i] = again ? __fmul_rn(all, 0.5f) : all;
            octaves |= u32(doubled) << (8 + (first + i) / 2) | u32(again) << (16 + first + i);
        }
        return octaves;
    }

    template <int kRound>
    __host__ __device__ static constexpr bool has_table() {
        return false;
    }
    template <int kRound>
    __host__ __device__ static constexpr bool has_pairs() {
        return !kCann && (kRound == kNearestEven || kRound == kNearestAway);
    }

    /// `refine` for eight parts of each of two blocks, or of each half of one block. The low
    /// halves of the words belong to one block or half, the high halves to the other. Takes BF16
    /// magnitudes and returns four times the factors; `octaves_of_half` extracts the doublings.
    __device__ __forceinline__ static u32 refine_pairs(u32 inverse, const u32 (&amax)[8], u32 (&factor)[8]) {
        constexpr u32 kOnes = 0x00010001, kMinusExponent = 0xFFFFFF80, kMinusFour = 0xC080C080, kMinusTwo = 0xC000C000;
        const u32 four_times = inverse + 0x01000100;
        u32 of_eighths = 0, of_parts = 0;
#pragma unroll
        for (int i = 6; i >= 0; i -= 2) {
            // Only the signs of the differences are used, and rounding preserves
            // signs. A sign is set if the product is below four, or below two.
            const u32 a4 = ptx::fma_bf16x2(amax[i], inverse, kMinusFour), b4 = ptx::fma_bf16x2(amax[i + 1], inverse, kMinusFour);
            const u32 a2 = ptx::fma_bf16x2(amax[i], inverse, kMinusTwo), b2 = ptx::fma_bf16x2(amax[i + 1], inverse, kMinusTwo);
            const u32 below = a4 & b4;
            const u32 doubled = ~below >> 15 & kOnes;
            const u32 a = ~choose_bits(below, a2, a4) >> 15 & kOnes, b = ~choose_bits(below, b2, b4) >> 15 & kOnes;
            const u32 all = ptx::mul_add(doubled, kMinusExponent, four_times);
            factor[i] = ptx::mul_add(a, kMinusExponent, all);
            factor[i + 1] = ptx::mul_add(b, kMinusExponent, all);
            // Non-overlapping fields are combined by addition.
            of_eighths = ptx::mul_add(of_eighths, 2, doubled);
            of_parts = ptx::mul_add(of_parts, 4, ptx::mul_add(b, 2, a));
        }
        return ptx::mul_add(of_parts, 256, of_eighths * 16);
    }

    /// Returns the doublings of half a block as record bits,
    /// from the low half of a word that `refine_pairs` returned.
    __device__ __forceinline__ static u32 octaves_of_half(u32 octaves, int half) {
        return (octaves & 0xF0) << (4 + 4 * half) | (octaves & 0xFF00) << (8 + 8 * half);
    }

    /// Returns how often a part doubles the block's scale: 0 to 2 times.
    __device__ __forceinline__ static u32 octaves(u32 record, int part) { return (record >> (8 + part / 2) & 1) + (record >> (16 + part) & 1); }

    __device__ __forceinline__ static float multiplier(u32 record, int part) {
        if ((record & 0xFF) == kNan) return __uint_as_float(kNanBits);
        return __fmul_rn(e6m2(record), __uint_as_float((127 + octaves(record, part)) << 23));
    }

    template <int kRound, bool kWithin, int kFactors, class Decide>
    __device__ __forceinline__ static bool encode(const float (&x)[16], const float (&factor)[kFactors], u32 (&words)[2],
                                                  const Decide& decision) {
        static_assert(kFactors == 4, "four values have a factor");
        // kCann rounds products to BF16. Without kCann, products must stay exact until they are rounded to codes.
        // Products of BF16 numbers are exact in F32; products of F32 numbers are rounded to odd, or computed by fused
        // multiply-adds (`nearest`).
        if constexpr (kCann || kRound == kAnyRounding || (kRound == kStochastic && !kWithin)) {
            float y[16];
#pragma unroll
            for (int i = 0; i < 16; ++i)
                y[i] = kCann ? bf16_rounded(__fmul_rn(x[i], factor[i / 4])) : to_odd(double(x[i]) * double(factor[i / 4]));
            const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
            if constexpr (kRound == kAnyRounding) return encode_by<S1p2>(y, words, decision);
            else if constexpr (kRound == kStochastic) return stochastic_codes<S1p2>(y, ones, words, decision);
            else return S1p2::nearest<kRound == kNearestAway>(y, ones, words);
        } else if constexpr (kRound == kStochastic) {
            return stochastic_codes<S1p2>(x, factor, words, decision);
        } else {
            return S1p2::nearest<kRound == kNearestAway>(x, factor, words);
        }
    }

private:
    /// Returns the value of an E6M2 byte, the lowest byte of a record.
    __device__ __forceinline__ static float e6m2(u32 record) {
        return __uint_as_float(((record >> 2 & 0x3F) + 127 - 48) << 23 | (record & 3) << 21);
    }

    /// Rounds x to BF16, ties to even; x is not NaN.
    __device__ __forceinline__ static float bf16_rounded(float x) {
        const u32 bits = __float_as_uint(x);
        return __uint_as_float((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
    }

    /// Rounds x to odd: truncates x to F32, and sets the last bit if x was
    /// inexact. Rounding the result further gives the same as rounding x itself.
    __device__ __forceinline__ static float to_odd(double x) {
        const float cut = __double2float_rz(x);
        return double(cut) == x ? cut : __uint_as_float(__float_as_uint(cut) | 1);
    }
};

using Hif4Amax = Hif4<false>;
using Hif4Cann = Hif4<true>;

NIB_UNIT_FORMAT(Hif4, Cann, Hif4Cann, NearestEven, NearestAway)
NIB_UNIT_FORMAT(Hif4, AnyOther, Hif4Amax, NearestEven, NearestAway, Stochastic)

}  // namespace nib
