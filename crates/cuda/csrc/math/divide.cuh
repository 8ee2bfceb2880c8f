// Computes quotients with a common divisor.
#pragma once
#include "ptx/types.cuh"

namespace nib {

/// Computes the IEEE quotient x / y for many x with the same y, where 0 <= x <= y and y >= 1. The first guess is
/// within a unit in the last place, and the reciprocal is correctly rounded, so one correction is enough
/// (Markstein). The correction needs an exact remainder, which exists for x = 0 and for x >= 2^-80 (see `is_tiny`).
struct Quotient {
    float y, reciprocal, rest;

    __device__ __forceinline__ explicit Quotient(float y) : y(y), reciprocal(__frcp_rn(y)) {
        rest = __fmul_rn(__fmaf_rn(-y, reciprocal, 1.0f), reciprocal);
    }

    /// Running minimum of the bits of x minus one, as unsigned integers. For x =
    /// 0, the bits minus one are the largest unsigned value, so zeros are ignored.
    __device__ __forceinline__ static u32 smallest(u32 smallest, float x) {
        const u32 bits = __float_as_uint(x) - 1;
        return bits < smallest ? bits : smallest;
    }
    /// Returns whether any non-zero value that entered `smallest` was below 2^-80.
    __device__ __forceinline__ static bool is_tiny(u32 smallest) { return smallest < 0x17800000 - 1; }

    __device__ __forceinline__ float of(float x) const {
        const float guess = __fmaf_rn(x, reciprocal, __fmul_rn(x, rest));
        return __fmaf_rn(__fmaf_rn(-y, guess, x), reciprocal, guess);
    }
};

}  // namespace nib
