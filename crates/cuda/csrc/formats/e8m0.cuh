// The scale of a block is either an E8M0 byte (2^(byte - 127), 0xFF is
// NaN) or an F32. The CPU implementation is crates/formats/src/e8m0.rs.
#pragma once
#include "ptx/packed.cuh"
#include "ptx/types.cuh"

namespace nib {

/// The rules that derive a scale from the largest magnitude, numbered as in the launch code.
constexpr int kRuleAmax = 0;   // F32, max(amax / max, 2^-126)
constexpr int kRuleFloor = 1;  // kRuleFloor and the rules below have E8M0 scales
constexpr int kRuleRceil = 2;
constexpr int kRuleCeil = 3;
constexpr int kRuleEven = 4;

constexpr u32 kInfinityBits = 0x7F800000;
constexpr u32 kNanBits = 0x7FC00000;
constexpr u8 kScaleNan = 0xFF;

/// Returns the value of an E8M0 byte: 2^(byte - 127), or NaN for 0xFF.
__device__ __forceinline__ float e8m0_decode(u32 byte) {
    const u32 bits = byte == 0 ? 0x00400000 : byte << 23;
    return __uint_as_float(byte == kScaleNan ? kNanBits : bits);
}

/// Returns the value of an E8M0 byte as BF16, in both halves of a word.
__device__ __forceinline__ u32 e8m0_bf16x2(u32 byte) {
    const u32 bits = byte == 0 ? 0x0040 : byte << 7;
    return (byte == kScaleNan ? kNanBits >> 16 : bits) * 0x10001;
}

/// The stored scale of a block, and the factor for the block's values before they are encoded (NaN if the scale is NaN).
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

/// Returns whether scaled values may exceed the largest element
/// under a scale rule. Values above the largest element saturate.
__host__ __device__ constexpr bool rule_exceeds(int rule) { return rule == kRuleFloor || rule == kRuleEven; }

/// Returns amax / kMax with IEEE rounding if the quotient is normal. A first guess leaves an exact remainder, which corrects the guess.
template <class E>
__device__ __forceinline__ float over_max(float amax) {
    constexpr float kReciprocal = 1.0f / E::kMax;
    const float guess = __fmul_rn(amax, kReciprocal);
    return __fmaf_rn(__fmaf_rn(-E::kMax, guess, amax), kReciprocal, guess);
}

/// Returns 1 / x with IEEE rounding, for x from 2^-126 to 2^125. One Newton
/// step rounds 1 / x correctly, except where 1 / x is slightly above the
/// midpoint of two floats. This happens only if the mantissa of x is all ones.
__device__ __forceinline__ float reciprocal(float x) {
    const float approx = ptx::reciprocal_approx(x);
    const float nearest = __fmaf_rn(__fmaf_rn(-x, approx, 1.0f), approx, approx);
    const u32 bits = __float_as_uint(x);
    return (bits & 0x7FFFFF) == 0x7FFFFF ? __uint_as_float((253u << 23) - (bits & 0x7F800000) + 1) : nearest;
}

/// A rule for power-of-two scales: `up` is added to the bits of the largest magnitude, and the carry
/// into the exponent rounds the scale by the rule. If the bits are `nan_from` or more, the scale is NaN.
struct PowerRule {
    u32 up;
    u32 nan_from;

    template <class E>
    __host__ __device__ static constexpr PowerRule of(int rule) {
        const u32 up = rule == kRuleFloor   ? 0
                       : rule == kRuleRceil ? 0x7FFFFF - E::kMaxMantissa
                       : rule == kRuleCeil  ? 0x7FFFFF
                                            : 1u << (22 - E::kMantissaBits);
        return {up, rule == kRuleEven ? kInfinityBits - up : kInfinityBits};
    }
};

/// Returns the power-of-two scale of a block of elements E,
/// from the F32 bits of the block's largest magnitude.
template <class E>
__device__ __forceinline__ BlockScale<u8> power_scale(u32 amax_bits, PowerRule rule) {
    const bool nan = amax_bits >= rule.nan_from;
    // The exponent is at most 255, so only a lower clamp is
    // needed, and 254 - byte is the exponent of a normal number.
    const u32 byte = max(int((amax_bits + rule.up) >> 23) - E::kEmax, 0);
    return {u8(nan ? kScaleNan : byte), __uint_as_float(nan ? kNanBits : (254 - byte) << 23)};
}

/// Returns the F32 scale of a block, from the F32 bits of the block's largest magnitude.
template <class E>
__device__ __forceinline__ BlockScale<float> amax_scale(u32 amax_bits) {
    const bool nan = amax_bits >= kInfinityBits;
    const float scale = fmaxf(over_max<E>(__uint_as_float(amax_bits)), 1.17549435e-38f);
    const float stored = nan ? __uint_as_float(kNanBits) : scale;
    return {stored, nan ? __uint_as_float(kNanBits) : reciprocal(scale)};
}

/// The type in which a scale is stored.
template <bool kF32>
using ScaleOf = typename ScaleType<kF32 ? kRuleAmax : kRuleRceil>::Stored;

/// The scale is F32, or follows a power-of-two rule that is known only at run time.
template <class E, bool kF32>
__device__ __forceinline__ BlockScale<ScaleOf<kF32>> scale_of(u32 amax_bits, PowerRule rule) {
    if constexpr (kF32) {
        return amax_scale<E>(amax_bits);
    } else {
        return power_scale<E>(amax_bits, rule);
    }
}

/// The scale follows a rule that is known at compile time.
template <class E, int kRule>
__device__ __forceinline__ BlockScale<typename ScaleType<kRule>::Stored> block_scale(u32 amax_bits) {
    if constexpr (kRule == kRuleAmax) {
        return amax_scale<E>(amax_bits);
    } else {
        return power_scale<E>(amax_bits, PowerRule::of<E>(kRule));
    }
}

}  // namespace nib
