// Sums F32 rows by a binary tree over neighbours within a CTA.
#pragma once
#include "formats/plain.cuh"
#include "ptx/thread.cuh"

namespace nib {

constexpr int kTreeThreads = 256;
constexpr int kTreeQuads = 32;                         // number of threads across adjacent columns
constexpr int kTreeSlots = kTreeThreads / kTreeQuads;  // number of threads down the rows
constexpr int kTreeEach = 8;                           // number of rows that a thread sums with all loads in flight
constexpr int kTreeRows = kTreeSlots * kTreeEach;      // number of rows that the CTA sums at a time
constexpr int kTreeLevels = 20;                        // number of tree levels, enough for 2^26 rows
constexpr int kGroupRows = 256;

/// The shared memory that `close_rows` needs.
template <int kCount>
struct TreeRoom {
    float part[kTreeSlots][kTreeQuads * kCount];
    float stack[kTreeLevels][kTreeQuads * kCount];
};

/// Adds up to eight neighbours by a binary tree; the result is in x[0]. x[i] is the sum of `each`
/// rows from row first + i · each on. A sum that begins at row `rows` or later does not exist.
template <int kCount>
__device__ __forceinline__ void close_eight(float (&x)[8][kCount], u32 first, u32 each, u32 rows) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i + step < 8; i += 2 * step)
            if (first + (i + step) * each < rows)
#pragma unroll
                for (int k = 0; k < kCount; ++k) x[i][k] += x[i + step][k];
}

/// Computes the sum of `rows` rows (at least one) from `x` on. A thread has kCount columns. The 32 threads of
/// a slot have adjacent columns, and the eight slots have different rows. Every thread of the CTA calls this
/// function; the threads of the first warp get the sums. `present` says whether the thread's columns exist.
template <int kCount>
__device__ __forceinline__ void close_rows(const float* x, u32 rows, u64 cols, bool present, TreeRoom<kCount>& room, float (&sum)[kCount]) {
    using Row = Few<F32, kCount>;
    static_assert(kTreeSlots == 8 && kTreeEach == 8);
    const u32 slot = threadIdx.x / kTreeQuads, at = threadIdx.x % kTreeQuads * kCount;
    const u32 groups = (rows + kTreeRows - 1) / kTreeRows;
#pragma unroll 1
    for (u32 group = 0; group < groups; ++group) {
        const u32 first = group * kTreeRows + slot * kTreeEach;
        float own[8][kCount] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (present && first + i < rows) {
                const Row row = Row::load_written(x + (first + i) * cols);
#pragma unroll
                for (int k = 0; k < kCount; ++k) own[i][k] = row.value(k);
            }
        close_eight(own, first, 1, rows);
#pragma unroll
        for (int k = 0; k < kCount; ++k) room.part[slot][at + k] = own[0][k];
        __syncthreads();
        if (slot == 0) {
            float node[8][kCount];
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int k = 0; k < kCount; ++k) node[i][k] = room.part[i][at + k];
            close_eight(node, group * kTreeRows, kTreeEach, rows);
            // The sums are combined like the carries of a binary counter: a sum
            // waits at its level of the tree until its right neighbour is complete.
            int level = 0;
            for (u32 carry = group; carry & 1; carry >>= 1, ++level)
#pragma unroll
                for (int k = 0; k < kCount; ++k) node[0][k] = room.stack[level][at + k] + node[0][k];
#pragma unroll
            for (int k = 0; k < kCount; ++k) room.stack[level][at + k] = node[0][k];
        }
        __syncthreads();
    }
    if (slot != 0) return;
    int level = __ffs(int(groups)) - 1;
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum[k] = room.stack[level][at + k];
    for (u32 rest = groups >> (level + 1); rest != 0; rest >>= 1) {
        ++level;
        if (rest & 1)
#pragma unroll
            for (int k = 0; k < kCount; ++k) sum[k] = room.stack[level][at + k] + sum[k];
    }
}

/// Adds `sum` to kCount values in memory.
template <int kCount>
__device__ __forceinline__ void add_to(float* to, const float (&sum)[kCount]) {
    const Few<F32, kCount> old = Few<F32, kCount>::load_written(to);
    float value[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = old.value(k) + sum[k];
    Few<F32, kCount>::from_f32(value).store(to);
}

}  // namespace nib
