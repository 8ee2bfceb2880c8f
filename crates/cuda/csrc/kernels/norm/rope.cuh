// Rotary position embedding of the last elements of each head (halves convention); all other elements are copied.
//
// rope<T, kCount>: x and y are [rows, heads * 2 * units * kCount] of type T (Bf16 or F32). In each head the first 2 * kept_units
//   * kCount elements are copied, and the following 2 * half elements are rotated, half = (units - kept_units) * kCount. table
//   [positions, 2 * half] is F32: cosines, then sines, from the first position on. A thread rotates kCount pairs of a row in up
//   to kRopeHeads heads, or copies as many elements; it reads the pairs' angles once. A thread's heads are g, g + head_groups,
//   ..., head_groups = ceil(heads / kRopeHeads). A unit of kCount elements has 16 bytes if half of the copied and half of the
//   rotated elements are multiples of 16 bytes; otherwise kCount is 1. sign is 1 to rotate, or -1 to rotate back.
//   256 threads per CTA; the grid has ceil(tasks / 256) CTAs, where tasks = rows * head_groups * units is below 2^31.
#pragma once
#include "pieces/norm/turn.cuh"

namespace nib {

constexpr int kRopeThreads = 256;
constexpr int kRopeHeads = 4;

template <typename T, int kCount>
__global__ void __launch_bounds__(kRopeThreads)
    rope(const u8* __restrict__ x, const float* __restrict__ table, u8* __restrict__ y, u32 tasks, u32 units, u32 kept_units, u32 head_groups,
         u32 heads, Positions positions, Divider by_units, Divider by_groups, float sign) {
    using X = Few<T, kCount>;
    const u32 task = blockIdx.x * kRopeThreads + threadIdx.x;
    if (task >= tasks) return;
    const u32 above = by_units.divide(task), unit = task - above * units;
    const u32 row = by_groups.divide(above), group = above - row * head_groups;
    const bool turns = unit >= kept_units;
    // A thread has two runs of elements of a head. The next lines compute, in
    // units, where the first run begins and how far away the second run is.
    const u32 pair = unit - kept_units, distance = turns ? units - kept_units : kept_units;
    const u64 begin = u64(row) * heads * 2 * units + (turns ? kept_units + unit : unit);
    X low[kRopeHeads], high[kRopeHeads];
#pragma unroll
    for (int i = 0; i < kRopeHeads; ++i) {
        const u32 head = group + i * head_groups;
        if (head >= heads) continue;
        const u64 at = begin + u64(head) * 2 * units;
        low[i] = X::load(x + at * X::kBytes);
        high[i] = X::load(x + (at + distance) * X::kBytes);
    }
    Angles<kCount> angles;
    if (turns) {
        const u32 half = distance * kCount;
        angles.load(table + u64(positions.of(row)) * 2 * half + pair * kCount, half, sign);
    }
#pragma unroll
    for (int i = 0; i < kRopeHeads; ++i) {
        const u32 head = group + i * head_groups;
        if (head >= heads) continue;
        if (turns) {
            float a[kCount], b[kCount];
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
                a[k] = low[i].value(k), b[k] = high[i].value(k);
                angles.turn(k, a[k], b[k]);
            }
            low[i] = X::from_f32(a), high[i] = X::from_f32(b);
        }
        const u64 at = begin + u64(head) * 2 * units;
        low[i].store(y + at * X::kBytes);
        high[i].store(y + (at + distance) * X::kBytes);
    }
}

}  // namespace nib
