// Adds a bias to every row, and computes the gradient of the bias.
//
// x and dy are [rows, d] of type T (Bf16 or F32); bias is F32 [d].
// add_bias<T, kCount>: adds bias to x in place, in F32, rounded once. A thread has kCount adjacent columns of kBiasRows rows. If kCount > 1, d
//   is a multiple of kCount, and x is 16-byte aligned. 256 threads per CTA; the grid has ceil(d / kCount · ceil(rows / kBiasRows) / 256) CTAs.
// bias_sums<T, kCount>: sums over chunks of 64 rows of a shard, in order from 0; `close_level` (row_tree.cuh) adds these sums.
//   partial is F32 [shards * chunks, d], chunks = ceil(rows_per_shard / 64). A thread has kCount adjacent columns of a chunk.
//   128 threads per CTA; the grid has ceil(d / kCount · shards · chunks / 128) CTAs.
#pragma once
#include "formats/plain.cuh"
#include "pieces/norm/gradient_rows.cuh"

namespace nib {

constexpr int kBiasThreads = 256;
constexpr int kBiasRows = 4;  // number of rows per thread, whose loads are all in flight

template <typename T, int kCount>
__global__ void __launch_bounds__(kBiasThreads) add_bias(u8* __restrict__ x, const float* __restrict__ bias, u32 rows, u32 d) {
    const u32 units = d / kCount, task = blockIdx.x * kBiasThreads + threadIdx.x;
    const u32 first = task / units * kBiasRows, column = (task - task / units * units) * kCount;
    if (first >= rows) return;
    float plus[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) plus[i] = __ldg(bias + column + i);
    u8* const at = x + (u64(first) * d + column) * T::kBytes;
    const u64 row_bytes = u64(d) * T::kBytes;
    Few<T, kCount> few[kBiasRows];
#pragma unroll
    for (int r = 0; r < kBiasRows; ++r)
        if (first + r < rows) few[r] = Few<T, kCount>::load_written(at + r * row_bytes);
#pragma unroll
    for (int r = 0; r < kBiasRows; ++r) {
        if (first + r >= rows) break;
        float sum[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = __fadd_rn(few[r].value(i), plus[i]);
        Few<T, kCount>::from_f32(sum).store(at + r * row_bytes);
    }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kWideThreads)
    bias_sums(const u8* __restrict__ dy, float* __restrict__ partial, u32 rows_per_shard, u32 chunks, u32 all_chunks, u32 d) {
    const u32 units = d / kCount, task = blockIdx.x * kWideThreads + threadIdx.x;
    const u32 number = task / units, column = (task - number * units) * kCount;
    if (number >= all_chunks) return;
    const NormChunk chunk(number, chunks, rows_per_shard);
    const u8* const from = dy + (chunk.first * d + column) * T::kBytes;
    const u64 row_bytes = u64(d) * T::kBytes;
    float sum[kCount] = {};
#pragma unroll 8
    for (u32 r = 0; r < chunk.rows; ++r) {
        const Few<T, kCount> few = Few<T, kCount>::load(from + r * row_bytes);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = __fadd_rn(sum[i], few.value(i));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) partial[u64(number) * d + column + i] = sum[i];
}

}  // namespace nib
