// Quotients by one divisor.
#pragma once
#include "ptx/types.cuh"

namespace nib {

/// x / y for many x with 0 <= x <= y, y >= 1: IEEE's quotient. The guess is within a unit in the last place and the reciprocal is
/// the nearest one, so one correction is enough (Markstein), while the remainder is exact: for x = 0, or x not `is_tiny`.
struct Quotient {
    float y, reciprocal, rest;

    __device__ __forceinline__ explicit Quotient(float y) : y(y), reciprocal(__frcp_rn(y)) {
        rest = __fmul_rn(__fmaf_rn(-y, reciprocal, 1.0f), reciprocal);
    }

    /// The least of `smallest` and x's bits minus one; 0 is above all.
    __device__ __forceinline__ static u32 smallest(u32 smallest, float x) {
        const u32 bits = __float_as_uint(x) - 1;
        return bits < smallest ? bits : smallest;
    }
    /// Whether a number other than 0 below 2^-80 was among those.
    __device__ __forceinline__ static bool is_tiny(u32 smallest) { return smallest < 0x17800000 - 1; }

    __device__ __forceinline__ float of(float x) const {
        const float guess = __fmaf_rn(x, reciprocal, __fmul_rn(x, rest));
        return __fmaf_rn(__fmaf_rn(-y, guess, x), reciprocal, guess);
    }
};

}  // namespace nib
