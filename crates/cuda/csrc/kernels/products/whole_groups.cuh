// Rounds the length of each group up to whole blocks: out[g] = len[g] rounded up to `align`, but
// not past the start of the next group. 256 threads per CTA; the grid has ceil(groups / 256) CTAs.
#pragma once
#include "ptx/types.cuh"

namespace nib {

__global__ void __launch_bounds__(256) whole_groups(const int* __restrict__ start, const int* __restrict__ len, int* out, int groups, int align) {
    const int g = blockIdx.x * 256 + threadIdx.x;
    if (g >= groups) return;
    const int n = __ldg(len + g), whole = ceil_div(n, align) * align, room = __ldg(start + g + 1) - __ldg(start + g);
    out[g] = max(min(whole, room), n);
}

}  // namespace nib
