// Shared code of the kernels for the gradient of a norm: chunks of rows, and
// the body of the kernel for short rows, in which a few threads share a row.
#pragma once
#include "formats/plain.cuh"
#include "math/lanes.cuh"
#include "ptx/global.cuh"

namespace nib {

constexpr int kNormChunk = 64;
constexpr int kShortThreads = 128;
constexpr int kShortRows = 4;  // number of rows that a thread has in flight
constexpr int kWideThreads = 128;
constexpr int kWideStages = 3;

/// Computes dx from dy * w, x * inv and the mean.
__device__ __forceinline__ float norm_gradient(float weighted, float normal, float inv, float mean) {
    return __fmul_rn(inv, __fsub_rn(weighted, __fmul_rn(normal, mean)));
}

/// Rounds dx and adds plus; the caller rounds the sum.
template <typename T>
__device__ __forceinline__ void add_plus(float (&dx)[8], const typename T::Eight& plus) {
    add_eight<T>(dx, rounded_eight<T>(dx), plus);
}

/// A chunk of up to 64 rows of a shard.
struct NormChunk {
    u64 first;
    u32 rows;

    __device__ __forceinline__ NormChunk(u32 chunk, u32 chunks, u32 rows_per_shard) {
        const u32 shard = chunk / chunks, within = (chunk - shard * chunks) * kNormChunk;
        const u32 left = rows_per_shard - within;
        first = u64(shard) * rows_per_shard + within;
        rows = left < kNormChunk ? left : kNormChunk;
    }
};

/// Gradients that are used unchanged.
template <typename T>
struct ReadGradient {
    __device__ __forceinline__ void begin(u32, bool) {}
    __device__ __forceinline__ typename T::Eight of(const typename T::Eight& dy) const { return dy; }
};

/// The body of `rms_backward_short`. For each row the function calls `gradient.begin(row, present)`, and then
/// `gradient.of(..)` with the row's gradient as it was read. The whole warp makes these calls, even if some of its
/// rows do not exist.
template <typename T, int kThreads, bool kPlus, typename Gradient>
__device__ __forceinline__ void backward_short(const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ inv_rms,
                                               const u8* __restrict__ dy, const u8* __restrict__ plus, u8* __restrict__ dx,
                                               float* __restrict__ partial, u32 rows_per_shard, u32 chunks, u32 all_chunks, u32 d,
                                               Gradient gradient) {
    const u32 index = threadIdx.x % kThreads, column = 8 * index;
    const u32 number = blockIdx.x * (kShortThreads / kThreads) + threadIdx.x / kThreads;
    const NormChunk chunk(number, chunks, rows_per_shard);
    // Threads without a chunk continue, because their warp exchanges values.
    const u32 rows = number < all_chunks ? chunk.rows : 0;
    const bool here = column < d;
    const F32::Eight w = F32::load<true>(weight + column, here ? 8 : 0);
    float sum[8] = {};
#pragma unroll 1
    for (u32 base = 0; base < kNormChunk; base += kShortRows) {
        if (__all_sync(0xFFFFFFFF, base >= rows)) break;
        typename T::Eight x_of[kShortRows], dy_of[kShortRows], plus_of[kShortRows];
        float inv_of[kShortRows];
#pragma unroll
        for (int r = 0; r < kShortRows; ++r) {
            const bool present = base + r < rows;
            const u64 row = chunk.first + base + r, at = (row * d + column) * T::kBytes;
            x_of[r] = T::template load<true>(x + at, present && here ? 8 : 0);
            dy_of[r] = T::template load<true>(dy + at, present && here ? 8 : 0);
            if constexpr (kPlus) plus_of[r] = T::template load<true>(plus + at, present && here ? 8 : 0);
            inv_of[r] = present ? __ldg(inv_rms + row) : 0.0f;
        }
        gradient.begin(u32(chunk.first) + base, base < rows);
#pragma unroll
        for (int r = 0; r < kShortRows; ++r) {
            const float inv = inv_of[r];
            gradient.begin(u32(chunk.first) + base + r, base + r < rows);
            const typename T::Eight g = gradient.of(dy_of[r]);
            float lane[8], weighted[8], normal[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                weighted[i] = __fmul_rn(T::value(g, i), w.number[i]);
                normal[i] = __fmul_rn(T::value(x_of[r], i), inv);
                lane[i] = here ? __fmaf_rn(weighted[i], normal[i], 0.0f) : 0.0f;
            }
            const float mean = __fdiv_rn(close_lanes<kThreads>(lane, index), float(d));
            if (base + r >= rows || !here) continue;
            float out[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                out[i] = norm_gradient(weighted[i], normal[i], inv, mean);
                sum[i] = __fmaf_rn(T::value(g, i), normal[i], sum[i]);
            }
            if constexpr (kPlus) add_plus<T>(out, plus_of[r]);
            store_eight<T, true>(dx + ((chunk.first + base + r) * d + column) * T::kBytes, out, 8);
        }
    }
    if (rows > 0 && here) store_eight<F32, true>(reinterpret_cast<u8*>(partial + u64(number) * d + column), sum, 8);
}

}  // namespace nib
