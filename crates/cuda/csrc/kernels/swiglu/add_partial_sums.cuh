// Adds partial sums: sums[rows] = 0 + parts[0] + parts[1] + ..., in order;
// parts is [num_parts][rows]. 256 threads per CTA, one thread per row.
#pragma once
#include "ptx/types.cuh"

namespace nib {

__global__ void __launch_bounds__(256) add_partial_sums(const float* __restrict__ parts, float* __restrict__ sums, int rows, int num_parts) {
    const int row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < num_parts; ++i) sum = __fadd_rn(sum, __ldg(parts + u64(i) * rows + row));
    sums[row] = sum;
}

}  // namespace nib
