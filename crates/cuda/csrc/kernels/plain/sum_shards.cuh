// Sums the shards of each matrix of a stack in F32 as a binary tree over neighbours, ((0+1)+(2+3))..., and rounds once.
//
// sum_shards<From, To, kShards>: out[m * len + i] = the tree sum of x[(m * kShards + s) * len + i] over shards s, for matrix m. Types are Bf16 or F32; buffers
//   are 16-byte aligned. 256 threads per CTA; the grid has matrices * ctas_each CTAs, ctas_each = ceil(len / (1024 * kShardGroups<kShards>)), for any len.
#pragma once
#include "formats/plain.cuh"

namespace nib {

constexpr int kShardThreads = 256;
constexpr int kShardCount = 4;  // number of adjacent values that a thread reads at once

/// The number of groups of adjacent values per thread. It is large enough that at least four loads are in flight.
template <int kShards>
constexpr int kShardGroups = kShards < 4 ? 4 / kShards : 1;

/// Computes the tree sum over kShards matrices that are `stride` bytes apart.
template <typename From, int kCount, int kShards>
__device__ __forceinline__ void shard_tree(const u8* x, u64 stride, float (&sum)[kCount]) {
    if constexpr (kShards == 1) {
        const Few<From, kCount> few = Few<From, kCount>::load(x);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = few.value(i);
    } else {
        float right[kCount];
        shard_tree<From, kCount, kShards / 2>(x, stride, sum);
        shard_tree<From, kCount, kShards / 2>(x + kShards / 2 * stride, stride, right);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] += right[i];
    }
}

template <typename From, typename To, int kShards>
__global__ void __launch_bounds__(kShardThreads) sum_shards(const u8* __restrict__ x, u8* __restrict__ out, u64 len, u32 ctas_each) {
    constexpr int kGroups = kShardGroups<kShards>;
    const u32 matrix = blockIdx.x / ctas_each, cta = blockIdx.x - matrix * ctas_each;
    x += u64(matrix) * kShards * len * From::kBytes;
    out += u64(matrix) * len * To::kBytes;
    const u64 first = (u64(cta) * (kShardThreads * kGroups) + threadIdx.x) * kShardCount, stride = len * From::kBytes;
    const auto begin = [&](int group) { return first + group * (kShardThreads * kShardCount); };
    if (len % kShardCount == 0) {
        float sum[kGroups][kShardCount];
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
            if (begin(g) < len) shard_tree<From, kShardCount, kShards>(x + begin(g) * From::kBytes, stride, sum[g]);
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
            if (begin(g) < len) Few<To, kShardCount>::from_f32(sum[g]).store(out + begin(g) * To::kBytes);
        return;
    }
    // Shards after the first may be misaligned for longer loads.
#pragma unroll 1
    for (int g = 0; g < kGroups; ++g)
        for (u64 i = begin(g); i < begin(g) + kShardCount && i < len; ++i) {
            float sum[1];
            shard_tree<From, 1, kShards>(x + i * From::kBytes, stride, sum);
            Few<To, 1>::from_f32(sum).store(out + i * To::kBytes);
        }
}

}  // namespace nib
