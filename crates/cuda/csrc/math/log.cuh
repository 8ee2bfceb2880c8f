// The natural logarithm, bit-identical to crates/formats/src/math.rs: the same constants and the
// same order of operations.
#pragma once
#include "ptx/types.cuh"

namespace nib {

/// Returns ln x for a positive normal x; returns infinity and NaN unchanged.
__device__ __forceinline__ float log_of_normal(float x) {
    constexpr int kSqrtHalfBits = 0x3F3504F3;
    // x = m * 2^k with m in [sqrt(1/2), sqrt(2))
    const int bits = __float_as_int(x);
    const int exponent = (bits - kSqrtHalfBits) >> 23;
    const float m = __int_as_float(bits - (exponent << 23));
    const float k = float(exponent);
    // ln(1 + f) = f - f^2/2 + s (f^2/2 + R), s = f / (2 + f)
    const float f = __fsub_rn(m, 1.0f);
    const float s = __fdiv_rn(f, __fadd_rn(2.0f, f));
    const float z = __fmul_rn(s, s);
    float series = __fmaf_rn(z, 2.0f / 9.0f, 2.0f / 7.0f);
    series = __fmaf_rn(series, z, 2.0f / 5.0f);
    series = __fmul_rn(__fmaf_rn(series, z, 2.0f / 3.0f), z);
    const float half_square = __fmul_rn(__fmul_rn(0.5f, f), f);
    const float small = __fmaf_rn(s, __fadd_rn(half_square, series), __fmul_rn(k, -2.121944400e-4f));
    const float value = __fmaf_rn(k, 0.693359375f, __fsub_rn(f, __fsub_rn(half_square, small)));
    return x < __int_as_float(0x7F800000) ? value : x;  // infinity and NaN are returned unchanged
}

}  // namespace nib
