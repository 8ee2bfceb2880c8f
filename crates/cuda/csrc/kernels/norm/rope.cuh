// Rotary position embedding, halves convention: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin, every product rounded.
//
// rope<T, kCount>: x, y [rows, heads * 2 * half] of type T (Bf16 or F32); table [positions, 2 * half] F32, cosines, then sines, from number `first` on; row r is at
//   position r mod seq_len of it. A thread turns kCount pairs of a row in up to kRopeHeads heads, with one read of their angles: heads
//   g, g + head_groups, ..., head_groups = ceil(heads / kRopeHeads). units = half / kCount: kCount is 16 bytes of T where half is a multiple
//   of that, else 1. sign: 1, or -1 to turn back.
//   256 threads; grid ceil(tasks / 256), tasks = rows * head_groups * units below 2^31.
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kRopeThreads = 256;
constexpr int kRopeHeads = 4;

/// kCount numbers of a table.
template <int kCount>
__device__ __forceinline__ void load_angles(const float* from, float (&to)[kCount]) {
    constexpr int kEach = kCount < 4 ? kCount : 4;
#pragma unroll
    for (int i = 0; i < kCount; i += kEach) {
        const Few<F32, kEach> few = Few<F32, kEach>::load(from + i);
#pragma unroll
        for (int k = 0; k < kEach; ++k) to[i + k] = few.value(k);
    }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kRopeThreads)
    rope(const u8* __restrict__ x, const float* __restrict__ table, u8* __restrict__ y, u32 tasks, u32 units, u32 head_groups, u32 heads,
         u32 seq_len, u64 first, Divider by_units, Divider by_groups, Divider by_seq_len, float sign) {
    using X = Few<T, kCount>;
    const u32 task = blockIdx.x * kRopeThreads + threadIdx.x;
    if (task >= tasks) return;
    const u32 above = by_units.divide(task), unit = task - above * units;
    const u32 row = by_groups.divide(above), group = above - row * head_groups;
    const u32 position = row - by_seq_len.divide(row) * seq_len;
    const u32 half = units * kCount;
    const u64 begin = (u64(row) * heads * 2 * half + unit * kCount) * T::kBytes;
    X low[kRopeHeads], high[kRopeHeads];
#pragma unroll
    for (int i = 0; i < kRopeHeads; ++i) {
        const u32 head = group + i * head_groups;
        if (head >= heads) continue;
        const u64 at = begin + u64(head) * 2 * half * T::kBytes;
        low[i] = X::load(x + at);
        high[i] = X::load(x + at + half * T::kBytes);
    }
    float cos[kCount], sin[kCount];
    const float* const angles = table + first + u64(position) * 2 * half + unit * kCount;
    load_angles<kCount>(angles, cos);
    load_angles<kCount>(angles + half, sin);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sin[k] = __fmul_rn(sign, sin[k]);
#pragma unroll
    for (int i = 0; i < kRopeHeads; ++i) {
        const u32 head = group + i * head_groups;
        if (head >= heads) continue;
        const u64 at = begin + u64(head) * 2 * half * T::kBytes;
        float a[kCount], b[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const float x0 = low[i].value(k), x1 = high[i].value(k);
            a[k] = __fsub_rn(__fmul_rn(x0, cos[k]), __fmul_rn(x1, sin[k]));
            b[k] = __fadd_rn(__fmul_rn(x1, cos[k]), __fmul_rn(x0, sin[k]));
        }
        X::from_f32(a).store(y + at);
        X::from_f32(b).store(y + at + half * T::kBytes);
    }
}

}  // namespace nib
