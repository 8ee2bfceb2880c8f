// Assembles the keys and values of multi-head latent attention, and computes the backward pass of this assembly.
//
// All widths count units of kCount numbers. A unit is 16 bytes of T (Bf16 or F32) if all widths are multiples of 16 bytes; otherwise kCount is
// 1. Each head has its own part of the key, `key_units` units wide, and its own value, `value_units` units wide. All heads share the other part
// of the key, which is rotated (RoPE); half of this part has `half_units` units. table [positions, 2 * half] is F32, half = half_units *
// kCount; each row has cosines, then sines, from the first position on. A thread copies one unit in up to kAssembleHeads heads: g, g +
// head_groups, ..., head_groups = ceil(heads / kAssembleHeads). There are fewer than 2^31 tasks and fewer than 2^31 warps. 256 threads per CTA.
//
// assemble_kv<T, kCount>: reads up [rows, heads * (key + value)] and shared [rows, 2 * half], and writes k [rows,
//   heads * (key + 2 * half)] and v [rows, heads * value]. Some threads copy a head's own units. All other
//   threads rotate one unit of each half of the shared key, and write both units to up to kAssembleHeads heads.
//   The grid has ceil(tasks / 256) CTAs; tasks = rows * head_groups * (key_units + value_units + half_units).
// assemble_kv_backward<T, kCount>: reads dk and dv, and writes dup and dshared. The first sum_ctas CTAs sum over heads. In these CTAs a warp
//   has four units of each half of a row, with eight lanes per unit. A lane starts at zero and adds heads j, j + 8, ...; by_chunks divides by
//   chunks = ceil(half_units / 4). The lanes' sums are added across lanes that are 4, 2 and 1 apart, rotated back, and rounded once. All later
//   CTAs copy the heads' own units: tasks = rows * head_groups * (key_units + value_units). The grid has sum_ctas + ceil(tasks / 256) CTAs.
#pragma once
#include "pieces/norm/turn.cuh"

namespace nib {

constexpr int kAssembleThreads = 256;
constexpr int kAssembleHeads = 4;
constexpr u32 kHeadSums = 8;   // number of partial sums over heads; each is computed by one lane
constexpr u32 kSumWarpUnits = 4;   // number of units that a warp sums
constexpr int kSumInFlight = 4;  // number of heads per lane whose loads are in flight

/// The sizes of a call to assemble_kv or assemble_kv_backward.
/// `units` is the number of units per head for which there are tasks.
struct AssembleSizes {
    u32 rows, tasks, units, head_groups, heads;
    u32 key_units, value_units, half_units;
    Divider by_units, by_groups;
};

/// The work of a thread: unit `unit` of row `row` in the heads of group `group`.
struct AssembleTask {
    u32 unit, row, group;

    __device__ __forceinline__ AssembleTask(const AssembleSizes& s, u32 task) {
        const u32 above = s.by_units.divide(task);
        unit = task - above * s.units;
        row = s.by_groups.divide(above);
        group = above - row * s.head_groups;
    }

    /// Sets `head` to the group's i-th head, and returns whether that head exists.
    __device__ __forceinline__ bool head(const AssembleSizes& s, int i, u32& head) const {
        head = group + i * s.head_groups;
        return head < s.heads;
    }
};

/// Copies one of a head's own units between `up` and k or
/// v. In `up` a head's key lies before its value.
template <typename X, bool kBack>
__device__ __forceinline__ void copy_own(const AssembleTask& task, const AssembleSizes& s, const u8* from_up, const u8* from_k, const u8* from_v,
                                         u8* to_up, u8* to_k, u8* to_v) {
    const bool is_key = task.unit < s.key_units;
    const u32 each = is_key ? s.key_units + 2 * s.half_units : s.value_units;
    const u32 at = is_key ? task.unit : task.unit - s.key_units;
    const u8* const from = kBack ? (is_key ? from_k : from_v) : from_up;
    u8* const to = kBack ? to_up : (is_key ? to_k : to_v);
    const u64 first = u64(task.row) * s.heads;
    const auto apart = [&](u32 head) { return ((first + head) * each + at) * X::kBytes; };
    const auto joined = [&](u32 head) { return ((first + head) * (s.key_units + s.value_units) + task.unit) * X::kBytes; };
    X x[kAssembleHeads];
    u32 head;
#pragma unroll
    for (int i = 0; i < kAssembleHeads; ++i)
        if (task.head(s, i, head)) x[i] = X::load(from + (kBack ? apart(head) : joined(head)));
#pragma unroll
    for (int i = 0; i < kAssembleHeads; ++i)
        if (task.head(s, i, head)) x[i].store(to + (kBack ? joined(head) : apart(head)));
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kAssembleThreads)
    assemble_kv(const u8* __restrict__ up, const u8* __restrict__ shared, const float* __restrict__ table, u8* __restrict__ k, u8* __restrict__ v,
                AssembleSizes s, Positions positions) {
    using X = Few<T, kCount>;
    const u32 number = blockIdx.x * kAssembleThreads + threadIdx.x;
    if (number >= s.tasks) return;
    const AssembleTask task(s, number);
    const u32 own = s.key_units + s.value_units;
    if (task.unit < own) {
        copy_own<X, false>(task, s, up, nullptr, nullptr, nullptr, k, v);
        return;
    }
    const u32 pair = task.unit - own;
    const u8* const from = shared + (u64(task.row) * 2 * s.half_units + pair) * X::kBytes;
    X low = X::load(from), high = X::load(from + u64(s.half_units) * X::kBytes);
    const u32 half = s.half_units * kCount;
    Angles<kCount> angles;
    angles.load(table + u64(positions.of(task.row)) * 2 * half + pair * kCount, half, 1.f);
    float a[kCount], b[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        a[i] = low.value(i), b[i] = high.value(i);
        angles.turn(i, a[i], b[i]);
    }
    low = X::from_f32(a), high = X::from_f32(b);
    u32 head;
#pragma unroll
    for (int i = 0; i < kAssembleHeads; ++i) {
        if (!task.head(s, i, head)) continue;
        const u64 each = s.key_units + 2 * s.half_units;
        u8* const to = k + ((u64(task.row) * s.heads + head) * each + s.key_units + pair) * X::kBytes;
        low.store(to);
        high.store(to + u64(s.half_units) * X::kBytes);
    }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kAssembleThreads)
    assemble_kv_backward(const u8* __restrict__ dk, const u8* __restrict__ dv, const float* __restrict__ table, u8* __restrict__ dup,
                         u8* __restrict__ dshared, AssembleSizes s, Positions positions, u32 sum_ctas, u32 chunks, Divider by_chunks) {
    using X = Few<T, kCount>;
    if (blockIdx.x >= sum_ctas) {
        const u32 number = (blockIdx.x - sum_ctas) * kAssembleThreads + threadIdx.x;
        if (number < s.tasks) copy_own<X, true>(AssembleTask(s, number), s, nullptr, dk, dv, dup, nullptr, nullptr);
        return;
    }
    const u32 warp = blockIdx.x * (kAssembleThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row = by_chunks.divide(warp), pair = (warp - row * chunks) * kSumWarpUnits + lane / kHeadSums;
    // All lanes of a warp have the same row.
    if (row >= s.rows) return;
    const bool present = pair < s.half_units;
    const u64 each = s.key_units + 2 * s.half_units;
    const u8* const from = dk + (u64(row) * s.heads * each + s.key_units + pair) * X::kBytes;
    float a[kCount] = {}, b[kCount] = {};
    for (u32 head = lane % kHeadSums; present && head < s.heads; head += kHeadSums * kSumInFlight) {
        X low[kSumInFlight], high[kSumInFlight];
#pragma unroll
        for (int i = 0; i < kSumInFlight; ++i) {
            const u32 this_head = head + i * kHeadSums;
            if (this_head >= s.heads) continue;
            const u8* const at = from + this_head * each * X::kBytes;
            low[i] = X::load(at);
            high[i] = X::load(at + u64(s.half_units) * X::kBytes);
        }
#pragma unroll
        for (int i = 0; i < kSumInFlight; ++i) {
            if (head + i * kHeadSums >= s.heads) continue;
#pragma unroll
            for (int n = 0; n < kCount; ++n) {
                a[n] = __fadd_rn(a[n], low[i].value(n));
                b[n] = __fadd_rn(b[n], high[i].value(n));
            }
        }
    }
#pragma unroll
    for (u32 distance = kHeadSums / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
            a[n] = __fadd_rn(a[n], __shfl_xor_sync(0xFFFFFFFF, a[n], distance));
            b[n] = __fadd_rn(b[n], __shfl_xor_sync(0xFFFFFFFF, b[n], distance));
        }
    }
    if (!present || lane % kHeadSums != 0) return;
    const u32 half = s.half_units * kCount;
    Angles<kCount> angles;
    angles.load(table + u64(positions.of(row)) * 2 * half + pair * kCount, half, -1.f);
#pragma unroll
    for (int n = 0; n < kCount; ++n) angles.turn(n, a[n], b[n]);
    u8* const to = dshared + (u64(row) * 2 * s.half_units + pair) * X::kBytes;
    X::from_f32(a).store(to);
    X::from_f32(b).store(to + u64(s.half_units) * X::kBytes);
}

}  // namespace nib
