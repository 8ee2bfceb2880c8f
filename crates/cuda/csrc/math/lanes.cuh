// Sums over a row's 256 lanes, closed by the halving tree 128, 64, ..., 1 (lane l with lane l + 128, and so on).
#pragma once
#include "ptx/types.cuh"

namespace nib {

/// The tree over 8 * kThreads lanes, of which thread `index` of kThreads neighbouring ones has lanes 8 * index to 8 * index + 7; lanes past
/// them are zeros. Every thread gets the sum; the whole warp comes here.
template <int kThreads>
__device__ __forceinline__ float close_lanes(const float (&lane)[8], u32 index) {
    static_assert(kThreads == 8 || kThreads == 16 || kThreads == 32);
    constexpr u32 kAll = 0xFFFFFFFF;
    // Each of the first three exchanges halves the lanes a thread still looks after.
    float four[4], two[2];
    bool upper = index & kThreads / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        four[i] = (upper ? lane[i + 4] : lane[i]) + __shfl_xor_sync(kAll, upper ? lane[i] : lane[i + 4], kThreads / 2);
    upper = index & kThreads / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        two[i] = (upper ? four[i + 2] : four[i]) + __shfl_xor_sync(kAll, upper ? four[i] : four[i + 2], kThreads / 4);
    upper = index & kThreads / 8;
    float sum = (upper ? two[1] : two[0]) + __shfl_xor_sync(kAll, upper ? two[0] : two[1], kThreads / 8);
#pragma unroll
    for (int distance = kThreads / 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAll, sum, distance);
    // What is left are eight lanes, l of them with the threads whose bits above are those of l.
    sum += __shfl_xor_sync(kAll, sum, kThreads / 2);
    sum += __shfl_xor_sync(kAll, sum, kThreads / 4);
    sum += __shfl_xor_sync(kAll, sum, kThreads / 8);
    // The lanes past these are zeros, which a sum of -0 tells.
    return kThreads == 32 ? sum : __fadd_rn(sum, 0.0f);
}

}  // namespace nib
