// Processes many tensors in one launch: the launch arguments
// contain a list of tensors, and each tensor has its own CTAs.
#pragma once
#include "ptx/types.cuh"

namespace nib {

constexpr int kListedTensors = 72;  // limited by the 4 KiB of a launch's arguments

/// Returns the tensor of this CTA, which is the last tensor whose first CTA is
/// not after this CTA. The list has `count` tensors, ordered by their first CTAs.
template <typename List>
__device__ __forceinline__ u32 tensor_of_cta(const List& list) {
    u32 low = 0, high = u32(list.count);
#pragma unroll 1
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (list.tensor[middle].first_cta <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

}  // namespace nib
