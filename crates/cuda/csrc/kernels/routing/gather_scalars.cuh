// gather_scalars: out[i] = values[index[i]], or 0 if index[i] is negative or past the end.
//   256 threads per CTA; the grid has ceil(len / 256) CTAs.
#pragma once
#include "ptx/types.cuh"

namespace nib {

constexpr int kGatherThreads = 256;

__global__ void __launch_bounds__(kGatherThreads)
    gather_scalars(const float* __restrict__ values, const int* __restrict__ index, float* __restrict__ out, u32 len, u32 num_values) {
    const u32 i = blockIdx.x * kGatherThreads + threadIdx.x;
    if (i >= len) return;
    const u32 from = u32(__ldg(index + i));
    out[i] = from < num_values ? __ldg(values + from) : 0.0f;
}

}  // namespace nib
