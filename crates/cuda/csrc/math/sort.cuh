// Sorting networks over the registers of a thread; the largest value comes first.
#pragma once
#include "ptx/types.cuh"

namespace nib {

__device__ __forceinline__ u32 larger_of(u32 a, u32 b) { return a < b ? b : a; }

__device__ __forceinline__ void order_descending(u32& a, u32& b) {
    const u32 low = a < b ? a : b;
    a = larger_of(a, b);
    b = low;
}

/// Batcher's odd-even merge sort of eight values.
__device__ __forceinline__ void sort_descending(u32 (&x)[8]) {
    constexpr int kPairs[19][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6}, {5, 7}, {1, 2}, {5, 6},
                                   {0, 4}, {1, 5}, {2, 6}, {3, 7}, {2, 4}, {3, 5}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
    for (int i = 0; i < 19; ++i) order_descending(x[kPairs[i][0]], x[kPairs[i][1]]);
}

/// Returns the eight largest values of two sorted lists, sorted. Pair the first value of one list with the last of the
/// other, and so on. The larger values of the pairs are the eight largest, as a bitonic list, which the network then sorts.
__device__ __forceinline__ void keep_largest(u32 (&x)[8], const u32 (&other)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = larger_of(x[i], other[7 - i]);
    constexpr int kPairs[12][2] = {{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 1}, {2, 3}, {4, 5}, {6, 7}};
#pragma unroll
    for (int i = 0; i < 12; ++i) order_descending(x[kPairs[i][0]], x[kPairs[i][1]]);
}

}  // namespace nib
