// Sums in F64 in the order of the CPU, so that the result has the same bits. Values are divided into chunks of 4096. A chunk has
// 16 partial sums. Each partial sum adds every 16th value in order; then the partial sums are added 8, 4, 2 and 1 apart. A binary
// tree over neighbours adds the sums of the chunks, ((0+1)+(2+3))...; a node without a right neighbour moves up unchanged.
#pragma once
#include "ptx/types.cuh"

namespace nib {

constexpr int kSumChunk = 4096;
constexpr int kSumLanes = 16;

/// Computes the sum of one chunk: `count` values from value(first) on. Half a warp
/// computes the sum; the other half must call this function too, with its own chunk.
template <class Value>
__device__ __forceinline__ double chunk_sum(u64 first, int count, const Value& value) {
    double sum = 0.0;
#pragma unroll 16
    for (int i = threadIdx.x % kSumLanes; i < count; i += kSumLanes) sum = __dadd_rn(sum, double(value(first + i)));
    __syncwarp();
#pragma unroll
    for (int half = kSumLanes / 2; half > 0; half /= 2) sum = __dadd_rn(sum, __shfl_xor_sync(0xFFFFFFFF, sum, half));
    return sum;
}

/// Returns the sum of value(0) .. value(count - 1) in every thread of the CTA.
/// `sums` is scratch memory for the sums of the chunks, which no other CTA uses.
template <int kThreads, class Value>
__device__ __forceinline__ double sum_in_chunks(u64 count, double* sums, const Value& value) {
    constexpr int kAtOnce = kThreads / kSumLanes;
    const long long chunks = (count + kSumChunk - 1) / kSumChunk;
#pragma unroll 1
    for (long long base = 0; base < chunks; base += kAtOnce) {
        const long long chunk = base + threadIdx.x / kSumLanes;
        const u64 first = u64(chunk) * kSumChunk;
        const int len = chunk < chunks ? int(min(count - first, u64(kSumChunk))) : 0;
        const double sum = chunk_sum(first, len, value);
        if (threadIdx.x % kSumLanes == 0 && chunk < chunks) sums[chunk] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (long long step = 1; step < chunks; step *= 2) {
#pragma unroll 1
        for (long long i = threadIdx.x * 2 * step; i + step < chunks; i += kThreads * 2 * step)
            sums[i] = __dadd_rn(sums[i], sums[i + step]);
        __syncthreads();
    }
    return chunks == 0 ? 0.0 : sums[0];
}

}  // namespace nib
