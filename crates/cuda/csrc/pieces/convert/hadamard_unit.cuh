// Shared code of the kernels with a Hadamard transform. A unit is the 64 values
// that a lane holds in registers. A unit is one transform block, several shorter
// blocks, or half of a block of 128; the neighbouring lane has the other half.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "math/hadamard.cuh"
#include "pieces/convert/unit.cuh"

namespace nib {

/// Returns the F32 bits of the largest magnitude.
template <int kCount>
__device__ __forceinline__ u32 largest_magnitude(const F32::Eight (&x)[kCount]) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < kCount * 2; ++i) {
        const float* const four = x[i / 2].number + i % 2 * 4;
        const u32 a = __float_as_uint(ptx::max_magnitude(four[0], four[1])), b = __float_as_uint(ptx::max_magnitude(four[2], four[3]));
        largest = max(max(largest, a), b);
    }
    return largest;
}

/// Writes the codes of the unit's values 8i to 8i + 7 to `words`.
template <int kCount>
__device__ __forceinline__ void put_words(u32 (&words)[kCount], int i, u32 codes) {
    words[i] = codes;
}
template <int kCount>
__device__ __forceinline__ void put_words(u32 (&words)[kCount], int i, uint2 codes) {
    words[2 * i] = codes.x;
    words[2 * i + 1] = codes.y;
}

/// The codes and scales of a unit, which is two blocks of 32 values, or
/// half of a block of 128 values. The neighbouring lane has the other half.
template <class E, class Round>
struct UnitCodes {
    static constexpr int kBlocks = E::kBlock < kUnit ? kUnit / E::kBlock : 1, kLanes = E::kBlock * kBlocks / kUnit;
    static constexpr int kEights = kUnit / kBlocks / 8, kWords = kUnit * E::kCodeBits / 32;
    u32 words[kWords];
    u8 scales[kBlocks];
    u32 non_zero, non_finite;  // numbers of blocks; if two lanes share a block, both lanes count it

    __device__ __forceinline__ static UnitCodes zeros() { return {{}, {}, 0, 0}; }

    /// Transforms x, whose signs the caller has flipped, and encodes the result. bits_of(i) returns the random bits of
    /// values 8i to 8i + 7.
    template <int kLen, class Bits>
    __device__ __forceinline__ void encode(float (&x)[kUnit], float factor, PowerRule rule, const Round& round, const Bits& bits_of) {
        butterflies(x, kLen);
        if constexpr (kLen > kUnit) {
            // The upper lane's result is the value of its partner minus its own value.
            const float own = threadIdx.x & 1 ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) x[i] = __fmaf_rn(x[i], own, __shfl_xor_sync(kAllLanes, x[i], 1));
        }
        factor = scale_exactly<kLen>(x, factor);
        non_zero = non_finite = 0;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            auto& of = reinterpret_cast<F32::Eight(*)[kEights]>(x)[b];
            u32 largest = largest_magnitude(of);
            if constexpr (kLanes == 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
            const float amax = __fmul_rn(__uint_as_float(largest), factor);
            const auto scale = power_scale<E>(__float_as_uint(amax), rule);
            const float prepared = Round::template prepare<E>(of, __uint_as_float(largest), __fmul_rn(scale.inverse, factor));
            bool any = false;
#pragma unroll
            for (int i = b * kEights; i < (b + 1) * kEights; ++i) {
                auto codes = round.template encode_prepared<E, F32>(of[i - b * kEights], prepared, bits_of(i));
                if (scale.is_nan()) codes = E::zeros();
                put_words(words, i, codes);
                any |= E::any(codes);
            }
            if constexpr (!Round::kDraws) any = Round::template reaches<E>(__fmul_rn(amax, scale.inverse));
            else if constexpr (kLanes == 2) any |= bool(__shfl_xor_sync(kAllLanes, any, 1));
            scales[b] = scale.stored;
            non_zero += any;
            non_finite += scale.is_nan();
        }
    }
};

}  // namespace nib
