// Reads a buffer larger than the L2, so that the next kernel finds none of its operands cached and no dirty lines to
// evict. The sum is written so that the compiler keeps the reads. Any grid size works; `words` counts units of 16 bytes.
#pragma once
#include "ptx/types.cuh"

namespace nib {

__global__ void __launch_bounds__(1024) flush_l2(const uint4* __restrict__ data, u64 words, u32* sink) {
    u32 sum = 0;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += u64(gridDim.x) * blockDim.x) {
        const uint4 word = data[i];
        sum += word.x ^ word.y ^ word.z ^ word.w;
    }
    if (sum == 0x9E3779B9u) *sink = sum;
}

}  // namespace nib
