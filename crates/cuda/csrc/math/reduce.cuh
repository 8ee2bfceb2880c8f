// Integer sums and maxima over a warp and over a launch. Integer sums and maxima do not depend on
// the order of operations.
#pragma once
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Inclusive prefix sum: returns the sum of the warp's values from lane 0 up to this lane.
__device__ __forceinline__ int sum_up_to_lane(int value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(0xFFFFFFFF, value, distance);
        if (ptx::lane_idx() >= distance) value += below;
    }
    return value;
}

/// Raises `*to` to at least `bits`. In most calls `bits` is already smaller than `*to`,
/// so the function first compares with a plain load, which costs less than an atomic.
__device__ __forceinline__ void raise(u32* to, u32 bits) {
    if (bits > *const_cast<volatile u32*>(to)) atomicMax(to, bits);
}

/// The numbers of blocks that one thread has counted: blocks with a non-zero
/// code, inexact blocks among them, and blocks with a NaN or infinity.
struct Tally {
    u32 non_zero = 0;
    u32 inexact = 0;
    u32 non_finite = 0;

    /// Adds the counts of all threads of the CTA to `counts[3]`; if that is null, nothing is
    /// added. If `replicas` threads counted the same blocks, the sums are divided by `replicas`.
    /// Every thread calls this function; `total` is shared memory that no other code uses.
    __device__ __forceinline__ void flush(u64* counts, u32 (&total)[3], u32 replicas = 1) const {
        if (counts == nullptr) return;
        if (threadIdx.x < 3) total[threadIdx.x] = 0;
        __syncthreads();
        const u32 mine[3] = {non_zero, inexact, non_finite};
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const u32 sum = __reduce_add_sync(0xFFFFFFFF, mine[i]);
            if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&total[i], sum);
        }
        __syncthreads();
        if (threadIdx.x < 3 && total[threadIdx.x] != 0) atomicAdd(&counts[threadIdx.x], u64(total[threadIdx.x] / replicas));
    }
};

/// Computes n / d for n below 2^31. The launch passes magic
/// = ceil(2^(31 + shift) / d) and shift = ceil(log2 d).
struct Divider {
    u32 magic;
    u32 shift;

    __device__ __forceinline__ u32 divide(u32 n) const { return u32(u64(n) * magic >> (31 + shift)); }
};

}  // namespace nib
