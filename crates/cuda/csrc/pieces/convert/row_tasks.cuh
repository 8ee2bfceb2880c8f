// Assigns row segments to warps, for kernels that work along the rows.
//
// A task is one segment of a row; a row has `segments` segments, and `by_segments` divides by that number. A CTA has kWarps
// · rounds adjacent tasks, with up to 32 rounds, so the grid has ceil(rows · segments / (kWarps · rounds)) CTAs. With more
// rounds, fewer CTAs start and end; with fewer rounds, the last wave is shorter. Grid-strided tasks were slower if some
// rows have much padding. A warp reads the row ids of all its rounds at once, so that it waits for row ids only once.
#pragma once
#include "math/reduce.cuh"
#include "ptx/types.cuh"

namespace nib {

template <int kWarps>
struct RowTasks {
    struct Place {
        u32 row;
        u32 segment;
    };

    const Divider by_segments;
    const u32 segments;
    const u32 first;
    u32 present;  // bit r: round r has a task
    u32 counted;  // bit r: round r has a task whose row is not padding
    int row_id;   // lane r holds the id of the row of round r; negative for padding

    /// If row_id is null, all rows are valid, and the id of a row is its index.
    __device__ __forceinline__ RowTasks(const int* __restrict__ ids, int rows, Divider by_segments, u32 segments, u32 rounds)
        : by_segments(by_segments), segments(segments), first(blockIdx.x * (kWarps * rounds) + threadIdx.x / 32) {
        constexpr u32 kAll = 0xFFFFFFFF;
        const u32 lane = threadIdx.x % 32, task = first + lane * kWarps, row = by_segments.divide(task);
        const bool exists = lane < rounds && task < u32(rows) * segments;
        row_id = int(row);
        if (exists && ids != nullptr) row_id = __ldg(ids + row);
        present = __ballot_sync(kAll, exists);
        counted = __ballot_sync(kAll, exists && row_id >= 0);
    }

    /// Returns the lowest round whose bit is set in `rounds`.
    __device__ __forceinline__ static int next(u32 rounds) { return __ffs(int(rounds)) - 1; }

    __device__ __forceinline__ Place place(int round) const {
        const u32 task = first + round * kWarps, row = by_segments.divide(task);
        return {row, task - row * segments};
    }
};

}  // namespace nib
