// Kernels for the loss of the LM head, other than its GEMMs and the cross-entropy.
//
// equal_groups: start[g] = g * apart for g <= groups, and len[g] = each. 256 threads per CTA; the grid has ceil((groups + 1) / 256) CTAs.
// round_gradient: out[i] = sum[i], or out[i] + sum[i], rounded to BF16. 256 threads per CTA; the grid has ceil(len / 1024) CTAs.
#pragma once
#include "formats/plain.cuh"

namespace nib {

constexpr int kHeadThreads = 256;
constexpr int kHeadCount = 4;  // number of values that a thread rounds

__global__ void __launch_bounds__(kHeadThreads)
    equal_groups(int* __restrict__ start, int* __restrict__ len, int groups, int each, int apart) {
    const int g = blockIdx.x * kHeadThreads + threadIdx.x;
    if (g <= groups) start[g] = g * apart;
    if (g < groups) len[g] = each;
}

template <int kCount>
__device__ __forceinline__ void round_few(const float* sum, u16* out, int accumulate) {
    const Few<F32, kCount> few = Few<F32, kCount>::load(sum);
    float total[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = few.value(i);
    if (accumulate) {
        const Few<Bf16, kCount> before = Few<Bf16, kCount>::load(out);
#pragma unroll
        for (int i = 0; i < kCount; ++i) total[i] = before.value(i) + total[i];
    }
    Few<Bf16, kCount>::from_f32(total).store(out);
}

__global__ void __launch_bounds__(kHeadThreads) round_gradient(const float* sum, u16* out, u64 len, int accumulate) {
    const u64 first = (u64(blockIdx.x) * kHeadThreads + threadIdx.x) * kHeadCount;
    // The matrix of a shard may be misaligned for longer loads.
    if (len % kHeadCount == 0) {
        if (first < len) round_few<kHeadCount>(sum + first, out + first, accumulate);
        return;
    }
    for (u64 i = first; i < first + kHeadCount && i < len; ++i) round_few<1>(sum + i, out + i, accumulate);
}

}  // namespace nib
