// Shared code of the kernels that normalise rows.
#pragma once
#include "formats/plain.cuh"
#include "math/lanes.cuh"

namespace nib {

constexpr int kNormThreads = 128;

/// Returns 1 / sqrt(sum / d + eps).
__device__ __forceinline__ float inverse_rms(float sum, u32 d, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(d)), eps)));
}

template <typename T>
__device__ __forceinline__ void add_squares(float (&lane)[8], const typename T::Eight& x) {
#pragma unroll
    for (int i = 0; i < 8; ++i) lane[i] = __fmaf_rn(T::value(x, i), T::value(x, i), lane[i]);
}

/// Stores x + plus, and returns the values as they were stored.
template <typename T, bool kAligned>
__device__ __forceinline__ typename T::Eight store_sum(u8* to, const typename T::Eight& x, const typename T::Eight& plus, int left) {
    float sum[8];
    add_eight<T>(sum, x, plus);
    store_eight<T, kAligned>(to, sum, left);
    return rounded_eight<T>(sum);
}

/// Returns up to `left` values of a row, at the byte `from`; kPlus: the rounded sums x + plus, which `stores` also writes. Later passes over the
/// row recompute the sums, because loads use the read-only path, which must not read memory that the kernel writes.
template <typename T, bool kAligned, bool kPlus>
__device__ __forceinline__ typename T::Eight row_value(const u8* x, const u8* plus, u8* sum, u64 from, int left, bool stores) {
    const typename T::Eight own = T::template load<kAligned>(x + from, left);
    if constexpr (!kPlus) return own;
    const typename T::Eight more = T::template load<kAligned>(plus + from, left);
    if (stores) return store_sum<T, kAligned>(sum + from, own, more, left);
    float both[8];
    add_eight<T>(both, own, more);
    return rounded_eight<T>(both);
}

template <typename T, bool kAligned>
__device__ __forceinline__ void store_normal(u8* to, const typename T::Eight& x, float inv, const F32::Eight& weight, int left) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(__fmul_rn(T::value(x, i), inv), weight.number[i]);
    store_eight<T, kAligned>(to, y, left);
}

}  // namespace nib
