// Elementary functions with the bits of crates/formats/src/math.rs: the same constants and order, with every rounding
// explicit, so that no compiler option affects fused multiply-adds.
#pragma once
#include "ptx/packed.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Returns e^x for x <= 0; any x below -104 gives 0. For a NaN, the result is an arbitrary number.
///
/// The Rust function scales by 2^n in two exact steps and rounds once at the end. Here n + 64 is added directly to
/// the exponent, and only the multiplication by 2^-64 rounds. The result has the same bits as that of the Rust
/// function, in fewer instructions.
__device__ __forceinline__ float exp_of_negative(float x) {
    constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23; the left shift by 23 below drops its bits
    const float clamped = fmaxf(x, -104.0f);
    const float shifted = __fmaf_rn(clamped, 1.44269504f, kRoundToInteger + 64.0f);
    const float n = __fsub_rn(shifted, kRoundToInteger + 64.0f);
    const float r = __fmaf_rn(n, 2.121944400e-4f, __fmaf_rn(n, -0.693359375f, clamped));
    float p = __fmaf_rn(r, 1.0f / 5040.0f, 1.0f / 720.0f);
    p = __fmaf_rn(p, r, 1.0f / 120.0f);
    p = __fmaf_rn(p, r, 1.0f / 24.0f);
    p = __fmaf_rn(p, r, 1.0f / 6.0f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
    const u32 scaled = __float_as_uint(p) + (__float_as_uint(shifted) << 23);
    return __fmul_rn(__uint_as_float(scaled), 5.4210108624e-20f);  // 2^-64
}

/// Returns a / b with IEEE rounding, for 1 <= b <= 2 and 0 <= a <= 1, where a is 1, or b is 1 +
/// a rounded. One Newton step gives the nearest reciprocal, so one correction of the quotient
/// is enough (Markstein). No step can underflow or overflow, because b is 1 if a is small.
__device__ __forceinline__ float divide_by_one_to_two(float a, float b) {
    const float approx = ptx::reciprocal_approx(b);
    const float reciprocal = __fmaf_rn(__fmaf_rn(-b, approx, 1.0f), approx, approx);
    const float quotient = __fmul_rn(a, reciprocal);
    return __fmaf_rn(__fmaf_rn(-b, quotient, a), reciprocal, quotient);
}

/// Returns the sigmoid 1 / (1 + e^-x). For a NaN, the result is an arbitrary number.
__device__ __forceinline__ float sigmoid(float x) {
    const float z = exp_of_negative(-fabsf(x));
    return divide_by_one_to_two(x < 0.0f ? z : 1.0f, __fadd_rn(1.0f, z));
}

/// Returns x · sigmoid(x).
__device__ __forceinline__ float silu(float x) { return __fmul_rn(x, sigmoid(x)); }

}  // namespace nib
