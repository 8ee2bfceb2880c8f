// The standard normal distribution, bit-identical to `normal_cdf` in crates/formats/src/math.rs.
#pragma once
#include "math/exp.cuh"

namespace nib {

/// Computes Φ(x) and φ(x). For a NaN, the results are arbitrary numbers.
__device__ __forceinline__ float2 normal_cdf(float x) {
    const float power = exp_of_negative(__fmul_rn(-0.5f, __fmul_rn(x, x)));
    const float t = __fdiv_rn(1.0f, __fmaf_rn(fabsf(x), 0.27f, 1.0f));
    float p = __fmaf_rn(t, 0.029205834f, -0.12772256f);
    p = __fmaf_rn(p, t, 0.1724361f);
    p = __fmaf_rn(p, t, -0.07234456f);
    p = __fmaf_rn(p, t, 0.11005422f);
    p = __fmaf_rn(p, t, 0.07107758f);
    p = __fmaf_rn(p, t, 0.10206355f);
    p = __fmaf_rn(p, t, 0.10750709f);
    p = __fmaf_rn(p, t, 0.10772276f);
    const float tail = __fmul_rn(power, __fmul_rn(t, p));
    return {x < 0.0f ? tail : __fsub_rn(1.0f, tail), __fmul_rn(power, 0.39894228f)};
}

}  // namespace nib
