// Scales of blocks: one E8M0 byte (2^(byte - 127), 0xFF is NaN) or one F32. The twin of crates/formats/src/e8m0.rs.
#pragma once
#include "ptx/packed.cuh"
#include "ptx/types.cuh"

namespace nib {

/// How a scale follows from the largest magnitude; the numbers are those of the launch code.
constexpr int kRuleAmax = 0;   // F32, max(amax / max, 2^-126)
constexpr int kRuleFloor = 1;  // E8M0 from here on
constexpr int kRuleRceil = 2;
constexpr int kRuleCeil = 3;
constexpr int kRuleEven = 4;

constexpr u32 kInfinityBits = 0x7F800000;
constexpr u32 kNanBits = 0x7FC00000;
constexpr u8 kScaleNan = 0xFF;

/// 2^(byte - 127); NaN for 0xFF.
__device__ __forceinline__ float e8m0_decode(u32 byte) {
    const u32 bits = byte == 0 ? 0x00400000 : byte << 23;
    return __uint_as_float(byte == kScaleNan ? kNanBits : bits);
}

/// A block's scale as stored, and what its values are multiplied by before they are encoded (NaN for a NaN scale).
template <class Stored>
struct BlockScale {
    Stored stored;
    float inverse;

    __device__ __forceinline__ bool is_nan() const { return __float_as_uint(inverse) == kNanBits; }
};

template <int kRule>
struct ScaleType {
    using Stored = u8;
};
template <>
struct ScaleType<kRuleAmax> {
    using Stored = float;
};

/// Whether a rule may leave values above the element's largest, which then saturate.
__host__ __device__ constexpr bool rule_exceeds(int rule) { return rule == kRuleFloor || rule == kRuleEven; }

/// amax / kMax with IEEE's rounding where the quotient is normal: the remainder of a first guess is exact, and corrects it.
template <class E>
__device__ __forceinline__ float over_max(float amax) {
    constexpr float kReciprocal = 1.0f / E::kMax;
    const float guess = __fmul_rn(amax, kReciprocal);
    return __fmaf_rn(__fmaf_rn(-E::kMax, guess, amax), kReciprocal, guess);
}

/// 1 / x with IEEE's rounding for x from 2^-126 to 2^125. One Newton step is exact but where 1 / x lies just above the middle of two
/// floats, which is where the mantissa is all ones.
__device__ __forceinline__ float reciprocal(float x) {
    const float approx = ptx::reciprocal_approx(x);
    const float nearest = __fmaf_rn(__fmaf_rn(-x, approx, 1.0f), approx, approx);
    const u32 bits = __float_as_uint(x);
    return (bits & 0x7FFFFF) == 0x7FFFFF ? __uint_as_float((253u << 23) - (bits & 0x7F800000) + 1) : nearest;
}

/// The scale of a block of E whose largest magnitude has these F32 bits.
template <class E, int kRule>
__device__ __forceinline__ BlockScale<typename ScaleType<kRule>::Stored> block_scale(u32 amax_bits) {
    bool nan = amax_bits >= kInfinityBits;
    if constexpr (kRule == kRuleAmax) {
        const float scale = fmaxf(over_max<E>(__uint_as_float(amax_bits)), 1.17549435e-38f);
        const float stored = nan ? __uint_as_float(kNanBits) : scale;
        return {stored, nan ? __uint_as_float(kNanBits) : reciprocal(scale)};
    } else {
        // The carry of the mantissa into the exponent is the rule.
        constexpr u32 kUp = kRule == kRuleFloor   ? 0
                            : kRule == kRuleRceil ? 0x7FFFFF - E::kMaxMantissa
                            : kRule == kRuleCeil  ? 0x7FFFFF
                                                  : 1u << (22 - E::kMantissaBits);
        const int exponent = int((amax_bits + kUp) >> 23);
        if (kRule == kRuleEven) nan |= exponent >= 255;
        // At most 254 + 1 - kEmax, so only the lower end needs a clamp, and 254 - byte is a normal exponent.
        const u32 byte = max(exponent - E::kEmax, 0);
        return {u8(nan ? kScaleNan : byte), __uint_as_float(nan ? kNanBits : (254 - byte) << 23)};
    }
}

}  // namespace nib
