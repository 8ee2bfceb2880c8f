// y = x / sqrt(mean(x^2) + eps) * weight along each row, rounded once; and 1 / sqrt(mean(x^2) + eps) of each row.
//
// x, y [rows, d] of type T (Bf16 or F32), weight [d] F32, inv_rms [rows] F32.
// rms_norm<T, kThreads, kBlocks, kRows>: rows in registers; d a multiple of 8. kThreads neighbouring threads a row, of which each has eight
//   columns of every 256 (kBlocks of them hold the row; one where kThreads < 32, and d <= 8 * kThreads); kRows rows a thread.
//   128 threads; grid ceil(rows / (kRows * 128 / kThreads)).
// rms_norm_long<T, kAligned>: any d; a row is read twice. kAligned: d is a multiple of 8. 128 threads, a warp a row; grid ceil(rows / 4).
#pragma once
#include "formats/plain.cuh"
#include "math/lanes.cuh"

namespace nib {

constexpr int kNormThreads = 128;

/// 1 / sqrt(sum / d + eps).
__device__ __forceinline__ float inverse_rms(float sum, u32 d, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(d)), eps)));
}

template <typename T>
__device__ __forceinline__ void add_squares(float (&lane)[8], const typename T::Eight& x) {
#pragma unroll
    for (int i = 0; i < 8; ++i) lane[i] = __fmaf_rn(T::value(x, i), T::value(x, i), lane[i]);
}

template <typename T, bool kAligned>
__device__ __forceinline__ void store_normal(u8* to, const typename T::Eight& x, float inv, const F32::Eight& weight, int left) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(__fmul_rn(T::value(x, i), inv), weight.number[i]);
    store_eight<T, kAligned>(to, y, left);
}

template <typename T, int kThreads, int kBlocks, int kRows>
__global__ void __launch_bounds__(kNormThreads)
    rms_norm(const u8* __restrict__ x, const float* __restrict__ weight, u8* __restrict__ y, float* __restrict__ inv_rms, u32 rows, u32 d,
             float eps) {
    static_assert(kThreads == 32 || kBlocks == 1);
    constexpr u32 kTogether = kNormThreads / kThreads;
    const u32 index = threadIdx.x % kThreads, column = 8 * index;
    const u32 first = blockIdx.x * (kTogether * kRows) + threadIdx.x / kThreads;
    typename T::Eight value[kRows][kBlocks];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const u32 row = first + r * kTogether, at = column + 256 * b;
            value[r][b] = T::template load<true>(x + (u64(row) * d + at) * T::kBytes, row < rows && at < d ? 8 : 0);
        }
    float inv[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float lane[8] = {};
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) add_squares<T>(lane, value[r][b]);
        inv[r] = inverse_rms(close_lanes<kThreads>(lane, index), d, eps);
        const u32 row = first + r * kTogether;
        if (index == 0 && row < rows) inv_rms[row] = inv[r];
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        const u32 at = column + 256 * b;
        if (at >= d) continue;
        const F32::Eight w = F32::load<true>(weight + at, 8);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const u32 row = first + r * kTogether;
            store_normal<T, true>(y + (u64(row) * d + at) * T::kBytes, value[r][b], inv[r], w, row < rows ? 8 : 0);
        }
    }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kNormThreads)
    rms_norm_long(const u8* __restrict__ x, const float* __restrict__ weight, u8* __restrict__ y, float* __restrict__ inv_rms, u32 rows, u32 d,
                  float eps) {
    const u32 index = threadIdx.x % 32, row = blockIdx.x * (kNormThreads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const u8* const from = x + u64(row) * d * T::kBytes;
    float lane[8] = {};
#pragma unroll 4
    for (u32 at = 8 * index; at < d; at += 256)
        add_squares<T>(lane, T::template load<kAligned>(from + u64(at) * T::kBytes, int(d - at)));
    const float inv = inverse_rms(close_lanes<32>(lane, index), d, eps);
    if (index == 0) inv_rms[row] = inv;
#pragma unroll 4
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const typename T::Eight value = T::template load<kAligned>(from + u64(at) * T::kBytes, left);
        store_normal<T, kAligned>(y + (u64(row) * d + at) * T::kBytes, value, inv, F32::load<kAligned>(weight + at, left), left);
    }
}

}  // namespace nib
