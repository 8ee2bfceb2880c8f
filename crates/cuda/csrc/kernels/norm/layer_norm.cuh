// LayerNorm along each row, rounded once, and its gradient. A row is summed in 256 partial sums, like in RMSNorm (math/lanes.cuh).
//
// x, plus, y, sum, dy, dx are [rows, d] of type T (Bf16 or F32); weight, bias are F32 [d]; mean, inv_std are F32 [rows]. kAligned: d is a multiple of 8.
// layer_norm<T, kAligned, kPlus>: writes y = (x - mean) · inv_std · weight + bias, and also mean and inv_std. kPlus:
//   the kernel first replaces x by x + plus, rounded, and also writes this sum; without kPlus, plus and sum are null.
// layer_dx<T, kAligned, kPlus>: dx = inv_std · ((g - mean(g)) - n · mean(g · n)), with g = dy · weight
//   and n = (x - mean) · inv_std. kPlus: plus is added to the rounded dx; without kPlus, plus is null.
//   layer_norm and layer_dx: 128 threads, one warp per row, grid ceil(rows / 4), any d. A row is read several times, after the first time from the cache.
// layer_dweight<T>: sums dy · n over chunks of 64 rows of a shard, in order from 0; `close_level` (row_tree.cuh) adds these
//   sums. partial is F32 [shards * chunks, d], chunks = ceil(rows_per_shard / 64). Each thread has one column of a chunk.
//   128 threads per CTA; the grid has shards · chunks · ceil(d / 128) CTAs; blocks = ceil(d / 128).
#pragma once
#include "pieces/norm/gradient_rows.cuh"
#include "pieces/norm/norm_rows.cuh"

namespace nib {

template <typename T, bool kAligned, bool kPlus>
__global__ void __launch_bounds__(kNormThreads)
    layer_norm(const u8* __restrict__ x, const u8* __restrict__ plus, const float* __restrict__ weight, const float* __restrict__ bias,
               u8* __restrict__ y, u8* __restrict__ sum, float* __restrict__ means, float* __restrict__ inv_stds, u32 rows, u32 d, float eps) {
    const u32 index = threadIdx.x % 32, row = blockIdx.x * (kNormThreads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const u64 begin = u64(row) * d * T::kBytes;
    const auto value_at = [&](u32 at, bool stores) {
        return row_value<T, kAligned, kPlus>(x, plus, sum, begin + u64(at) * T::kBytes, int(d - at), stores);
    };
    float lane[8] = {}, square[8] = {};
#pragma unroll 2
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const typename T::Eight v = value_at(at, true);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left) lane[i] = __fadd_rn(lane[i], T::value(v, i));
    }
    const float mean = __fdiv_rn(close_lanes<32>(lane, index), float(d));
#pragma unroll 2
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const typename T::Eight v = value_at(at, false);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float off = __fsub_rn(T::value(v, i), mean);
            if (i < left) square[i] = __fmaf_rn(off, off, square[i]);
        }
    }
    const float inv = inverse_rms(close_lanes<32>(square, index), d, eps);
    if (index == 0) means[row] = mean, inv_stds[row] = inv;
#pragma unroll 2
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const typename T::Eight v = value_at(at, false);
        const F32::Eight w = F32::load<kAligned>(weight + at, left), b = F32::load<kAligned>(bias + at, left);
        float out[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            out[i] = __fadd_rn(__fmul_rn(__fmul_rn(__fsub_rn(T::value(v, i), mean), inv), w.number[i]), b.number[i]);
        store_eight<T, kAligned>(y + begin + u64(at) * T::kBytes, out, left);
    }
}

template <typename T, bool kAligned, bool kPlus>
__global__ void __launch_bounds__(kNormThreads)
    layer_dx(const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ means, const float* __restrict__ inv_stds,
             const u8* __restrict__ dy, const u8* __restrict__ plus, u8* __restrict__ dx, u32 rows, u32 d) {
    const u32 index = threadIdx.x % 32, row = blockIdx.x * (kNormThreads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const u64 begin = u64(row) * d * T::kBytes;
    const float mean = __ldg(means + row), inv = __ldg(inv_stds + row);
    float lane[8] = {}, product[8] = {};
#pragma unroll 2
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const u64 from = begin + u64(at) * T::kBytes;
        const typename T::Eight v = T::template load<kAligned>(x + from, left), g = T::template load<kAligned>(dy + from, left);
        const F32::Eight w = F32::load<kAligned>(weight + at, left);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= left) continue;
            const float weighted = __fmul_rn(T::value(g, i), w.number[i]);
            lane[i] = __fadd_rn(lane[i], weighted);
            product[i] = __fmaf_rn(weighted, __fmul_rn(__fsub_rn(T::value(v, i), mean), inv), product[i]);
        }
    }
    const float mean_g = __fdiv_rn(close_lanes<32>(lane, index), float(d));
    const float mean_gx = __fdiv_rn(close_lanes<32>(product, index), float(d));
#pragma unroll 2
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const u64 from = begin + u64(at) * T::kBytes;
        const typename T::Eight v = T::template load<kAligned>(x + from, left), g = T::template load<kAligned>(dy + from, left);
        const F32::Eight w = F32::load<kAligned>(weight + at, left);
        float out[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float normal = __fmul_rn(__fsub_rn(T::value(v, i), mean), inv);
            out[i] = norm_gradient(__fsub_rn(__fmul_rn(T::value(g, i), w.number[i]), mean_g), normal, inv, mean_gx);
        }
        if constexpr (kPlus) add_plus<T>(out, T::template load<kAligned>(plus + from, left));
        store_eight<T, kAligned>(dx + from, out, left);
    }
}

template <typename T>
__global__ void __launch_bounds__(kWideThreads)
    layer_dweight(const u8* __restrict__ x, const float* __restrict__ means, const float* __restrict__ inv_stds, const u8* __restrict__ dy,
                  float* __restrict__ partial, u32 rows_per_shard, u32 chunks, u32 d, u32 blocks) {
    const u32 number = blockIdx.x / blocks, column = (blockIdx.x - number * blocks) * kWideThreads + threadIdx.x;
    if (column >= d) return;
    const NormChunk chunk(number, chunks, rows_per_shard);
    float sum = 0.0f;
#pragma unroll 8
    for (u32 r = 0; r < chunk.rows; ++r) {
        const u64 row = chunk.first + r, at = (row * d + column) * T::kBytes;
        const float normal = __fmul_rn(__fsub_rn(T::number(x + at), __ldg(means + row)), __ldg(inv_stds + row));
        sum = __fmaf_rn(T::number(dy + at), normal, sum);
    }
    partial[u64(number) * d + column] = sum;
}

}  // namespace nib
