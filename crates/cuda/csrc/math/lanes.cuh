// A row is summed in 256 partial sums. These sums are called lanes, like on the CPU, but are not lanes of a
// warp. The 256 partial sums are added by halving: l with l + 128, then l with l + 64, and so on down to l with l + 1.
#pragma once
#include "ptx/types.cuh"

namespace nib {

/// Adds the 256 partial sums of a row, of which only the first 8 * kThreads may be non-zero. Thread `index` of kThreads adjacent
/// threads has the partial sums 8 * index to 8 * index + 7. Every thread gets the sum. The whole warp calls this function.
template <int kThreads>
__device__ __forceinline__ float close_lanes(const float (&lane)[8], u32 index) {
    static_assert(kThreads == 8 || kThreads == 16 || kThreads == 32);
    constexpr u32 kAll = 0xFFFFFFFF;
    // Each of the first three exchanges halves the number of partial sums that a thread holds.
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
    // Eight partial sums are left. The top three bits of `index`
    // say which of the eight partial sums a thread holds.
    sum += __shfl_xor_sync(kAll, sum, kThreads / 2);
    sum += __shfl_xor_sync(kAll, sum, kThreads / 4);
    sum += __shfl_xor_sync(kAll, sum, kThreads / 8);
    // If there are fewer than 32 threads, all other partial
    // sums are +0. Adding them turns a sum of -0 into +0.
    return kThreads == 32 ? sum : __fadd_rn(sum, 0.0f);
}

}  // namespace nib
