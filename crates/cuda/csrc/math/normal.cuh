// Standard normal numbers with the bits of `normal_from_bits` in crates/formats/src/philox.rs: Acklam's approximation of the inverse of the
// distribution function in F64, every rounding written out, no fused multiply-adds.
#pragma once
#include "math/log.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Coefficients of numerator and denominator, the highest power first: in the middle of the distribution, and in its tail.
__device__ constexpr double kNormalNumerator[2][6] = {
    {-39.69683028665376, 220.9460984245205, -275.9285104469687, 138.357751867269, -30.66479806614716, 2.506628277459239},
    {-0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968, 2.938163982698783},
};
__device__ constexpr double kNormalDenominator[2][6] = {
    {-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572, 1.0},
    {0.0, 0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0},
};

/// A polynomial, one multiplication and one addition a step. A leading 0 changes no bit of what follows.
__device__ __forceinline__ double normal_polynomial(const double (&of)[2][6], bool tail, double x) {
    double sum = tail ? of[1][0] : of[0][0];
#pragma unroll
    for (int i = 1; i < 6; ++i) sum = __dadd_rn(__dmul_rn(sum, x), tail ? of[1][i] : of[0][i]);
    return sum;
}

/// A standard normal from 32 uniform bits: the top one is the sign. Middle and tail share one division; few lanes need the
/// logarithm.
__device__ __forceinline__ float normal_from_bits(u32 bits) {
    const double p = __dmul_rn(__dadd_rn(__uint2double_rn(bits & 0x7FFFFFFF), 0.5), 0x1p-32);
    const bool tail = p < 0.02425;
    const double from_middle = __dsub_rn(p, 0.5);
    double x = __dmul_rn(from_middle, from_middle);
    if (tail) x = __dsqrt_rn(__dmul_rn(-2.0, double(log_of_at_least_one(__double2float_rn(p)))));
    double numerator = normal_polynomial(kNormalNumerator, tail, x);
    if (!tail) numerator = __dmul_rn(numerator, from_middle);
    const float lower = __double2float_rn(__ddiv_rn(numerator, normal_polynomial(kNormalDenominator, tail, x)));
    return bits >> 31 ? -lower : lower;
}

}  // namespace nib
