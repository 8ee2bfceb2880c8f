// Standard normal numbers, bit-identical to `normal_from_bits` in crates/formats/src/philox.rs. The numbers are computed by
// Acklam's approximation of the inverse distribution function in F64, with every rounding explicit and no fused
// multiply-adds. Of 32 uniform bits, the top bit is the sign, and the other bits are a probability below 1/2. One number in
// twenty lies in the tail and needs a logarithm and a square root, so a warp collects the tail numbers and processes them
// together.
#pragma once
#include "math/log.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Coefficients, the highest power first. The coefficients are in constant memory, which arithmetic
/// instructions read directly.
__constant__ double kMiddleNumerator[6] = {-39.69683028665376, 220.9460984245205, -275.9285104469687,
                                           138.357751867269,   -30.66479806614716, 2.506628277459239};
__constant__ double kMiddleDenominator[6] = {-54.47609879822406, 161.5858368580409,  -155.6989798598866,
                                             66.80131188771972,  -13.28068155288572, 1.0};
__constant__ double kTailNumerator[6] = {-0.007784894002430293, -0.3223964580411365, -2.400758277161838,
                                         -2.549732539343734,    4.374664141464968,   2.938163982698783};
__constant__ double kTailDenominator[5] = {0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0};

/// Evaluates a polynomial with one multiplication and one addition per step.
template <int kCount>
__device__ __forceinline__ double polynomial(const double (&coefficients)[kCount], double x) {
    double sum = coefficients[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) sum = __dadd_rn(__dmul_rn(sum, x), coefficients[i]);
    return sum;
}

/// Returns (bits + 1/2) / 2^32 for the lower 31 bits.
__device__ __forceinline__ double probability(u32 bits) {
    return __dmul_rn(__dadd_rn(__uint2double_rn(bits & 0x7FFFFFFF), 0.5), 0x1p-32);
}

__device__ __forceinline__ bool is_tail(double p) { return p < 0.02425; }

__device__ __forceinline__ float signed_normal(double lower, u32 bits) {
    return __uint_as_float(__float_as_uint(__double2float_rn(lower)) ^ (bits & 0x80000000));
}

/// Returns the normal number for these bits if the probability is not in the tail.
__device__ __forceinline__ float normal_of_middle(double p, u32 bits) {
    const double q = __dsub_rn(p, 0.5), r = __dmul_rn(q, q);
    return signed_normal(__ddiv_rn(__dmul_rn(polynomial(kMiddleNumerator, r), q), polynomial(kMiddleDenominator, r)), bits);
}

/// Returns the normal number for these bits if the probability is in the tail.
__device__ __forceinline__ float normal_of_tail(u32 bits) {
    const double q = __dsqrt_rn(__dmul_rn(-2.0, double(log_of_normal(__double2float_rn(probability(bits))))));
    return signed_normal(__ddiv_rn(polynomial(kTailNumerator, q), polynomial(kTailDenominator, q)), bits);
}

/// The shared memory in which a warp collects its numbers in the tail, so that all lanes process them together.
template <int kCount>
struct Tails {
    u32 bits[32 * kCount];
    float number[32 * kCount];
};

/// Computes kCount standard normal numbers per lane. All lanes of the warp call this function; `tails` belongs
/// to this warp alone.
template <int kCount>
__device__ __forceinline__ void normals(const u32 (&bits)[kCount], Tails<kCount>& tails, float (&x)[kCount]) {
    const u32 lane = threadIdx.x % 32;
    u32 place[kCount], collected = 0;
    bool tail[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const double p = probability(bits[i]);
        tail[i] = is_tail(p);
        const u32 lanes = __ballot_sync(0xFFFFFFFF, tail[i]);
        place[i] = collected + __popc(lanes & ((1u << lane) - 1));
        collected += __popc(lanes);
        if (tail[i]) tails.bits[place[i]] = bits[i];
        x[i] = normal_of_middle(p, bits[i]);
    }
    __syncwarp();
    for (u32 i = lane; i < collected; i += 32) tails.number[i] = normal_of_tail(tails.bits[i]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (tail[i]) x[i] = tails.number[place[i]];
    __syncwarp();
}

}  // namespace nib
