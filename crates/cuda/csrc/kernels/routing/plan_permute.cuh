// Sorts slots by expert with a stable sort, and pads each expert's group to a multiple of `align` rows.
//
// A slot is occupied if its expert is 0 .. groups - 1. Slots are divided into chunks of passes * 2048 slots, one CTA per chunk.
// plan_count<kThreads>: writes counts[chunk][columns], the number of slots of the chunk
//   in each group; columns = groups rounded up to 8. A chunk has at most 32768 slots.
// plan_place<kThreads>: computes from all counts the groups' start [groups + 1] and len [groups]. For each of `capacity` rows,
//   the kernel writes the slot, the slot's token, and its global number token_id * top_k + slot; all are -1 for padding. For each
//   occupied slot below `num_slots`, the kernel writes the slot's row. found = {number of rows needed, number of slots occupied}.
//   If the first number exceeds the capacity, or the second exceeds num_slots, all groups are empty and all rows are padding.
//   kThreads = kPlanThreads threads per CTA; the grid has `chunks` CTAs. plan_place may be launched early, and needs at least one
//   CTA; further CTAs help with the padding. Dynamic shared memory: 4 * columns bytes for plan_count, and 8208 + 16 * columns +
//   max(8 * count_rows * columns, 8192 + 32 * columns) bytes for plan_place. columns is at most 4096, and slots below 2^31 - 2^16.
//
// Time on an H200 for 32768 slots: both launches together take 16 us for 8 to 256 groups, of which an empty launch takes 3.3
// us. The rest of the time is a chain of latencies, and the first instruction fetch (3 us less if the code has recently run).
#pragma once
#include "math/reduce.cuh"
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kPlanRounds = 4;  // number of slots per thread and pass
constexpr int kPassSlots = kPlanThreads * kPlanRounds;
constexpr u32 kFullWarp = 0xFFFFFFFF;

struct PlanSizes {
    int slots;
    int groups;
    int columns;
    int passes;
    int chunks;
    int align;
    int capacity;
    int num_slots;
    int count_rows;  // number of chunks whose counts a CTA reads at once
};

/// Returns the group of the slot, or -1.
__device__ __forceinline__ int group_of(const int* __restrict__ expert, int slot, const PlanSizes& sizes) {
    const int e = slot < sizes.slots ? __ldg(expert + slot) : -1;
    return u32(e) < u32(sizes.groups) ? e : -1;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    plan_count(const int* __restrict__ expert, u16* __restrict__ counts, const __grid_constant__ PlanSizes sizes) {
    static_assert(kThreads == kPlanThreads);
    extern __shared__ int count[];
#pragma unroll 1
    for (int g = threadIdx.x; g < sizes.columns; g += kThreads) count[g] = 0;
    __syncthreads();
    const int first = blockIdx.x * (sizes.passes * kPassSlots) + threadIdx.x;
#pragma unroll 2
    for (int pass = 0; pass < sizes.passes; ++pass) {
        int group[kPlanRounds];
#pragma unroll
        for (int i = 0; i < kPlanRounds; ++i) group[i] = group_of(expert, first + (pass * kPlanRounds + i) * kThreads, sizes);
#pragma unroll
        for (int i = 0; i < kPlanRounds; ++i)
            if (group[i] >= 0) atomicAdd(&count[group[i]], 1);
    }
    __syncthreads();
#pragma unroll 1
    for (int g = threadIdx.x; g < sizes.columns; g += kThreads) counts[u64(blockIdx.x) * sizes.columns + g] = u16(count[g]);
}

/// Exclusive prefix sum: values[i] becomes the sum of the values
/// before index i. Returns the total. One warp calls this function.
__device__ __forceinline__ int exclusive_scan(int* values, int count) {
    const int lane = threadIdx.x % 32, each = ceil_div(count, 32);
    const int begin = min(lane * each, count), end = min(begin + each, count);
    int sum = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) sum += values[i];
    int before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, before, step);
        if (lane >= step) before += other;
    }
    const int all = __shfl_sync(kFullWarp, before, 31);
    before -= sum;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
        const int value = values[i];
        values[i] = before;
        before += value;
    }
    return all;
}

/// Sums the counts of each group over the chunks before this CTA's chunk (`before`) and over all chunks (`all`).
/// `partial` is scratch memory for count_rows rows of both.
__device__ __forceinline__ void sum_counts(const u16* __restrict__ counts, const PlanSizes& sizes, int* partial, int* before, int* all) {
    const int units = sizes.columns / 8;
#pragma unroll 1
    for (int task = threadIdx.x; task < sizes.count_rows * units; task += kPlanThreads) {
        const int row = task / units, unit = task - row * units;
        int earlier[8] = {}, total[8] = {};
#pragma unroll 4
        for (int chunk = row; chunk < sizes.chunks; chunk += sizes.count_rows) {
            const uint4 v = __ldg(reinterpret_cast<const uint4*>(counts + u64(chunk) * sizes.columns) + unit);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int n = int(words[i / 2] >> (i % 2 * 16) & 0xFFFF);
                total[i] += n;
                if (chunk < blockIdx.x) earlier[i] += n;
            }
        }
        int4* const to = reinterpret_cast<int4*>(partial + 2 * row * sizes.columns) + 2 * unit;
        to[0] = {earlier[0], earlier[1], earlier[2], earlier[3]};
        to[1] = {earlier[4], earlier[5], earlier[6], earlier[7]};
        to[2 * units] = {total[0], total[1], total[2], total[3]};
        to[2 * units + 1] = {total[4], total[5], total[6], total[7]};
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * sizes.columns; i += kPlanThreads) {
        int sum = 0;
#pragma unroll 8
        for (int row = 0; row < sizes.count_rows; ++row) sum += partial[2 * row * sizes.columns + i];
        if (i < sizes.columns)
            before[i] = sum;
        else
            all[i - sizes.columns] = sum;
    }
    __syncthreads();
}

/// Returns the sum of values[0 .. count - 1]. One warp calls this function.
__device__ __forceinline__ int warp_sum(const int* values, int count) {
    int sum = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) sum += values[i];
    return __reduce_add_sync(kFullWarp, sum);
}

/// The output arrays of rows.
struct PlanRows {
    int* row_id;
    int* source_row;
    int* row_slot;

    __device__ __forceinline__ void set(int row, int id, int token, int slot) const {
        row_id[row] = id;
        source_row[row] = token;
        row_slot[row] = slot;
    }
};

/// This CTA's share of the padding: the padding of every
/// gridDim.x-th group, and of the rows after the last group.
__device__ __forceinline__ void fill_padding(const PlanRows& rows, const int* start, const int* len, int end, const PlanSizes& sizes) {
#pragma unroll 1
    for (int g = blockIdx.x; g < sizes.groups; g += gridDim.x) {
        const int next = g + 1 < sizes.groups ? start[g + 1] : end;
#pragma unroll 1
        for (int row = start[g] + len[g] + threadIdx.x; row < next; row += kPlanThreads) rows.set(row, -1, -1, -1);
    }
#pragma unroll 1
    for (int row = end + blockIdx.x * kPlanThreads + threadIdx.x; row < sizes.capacity; row += gridDim.x * kPlanThreads)
        rows.set(row, -1, -1, -1);
}

/// Dynamic shared memory of plan_place: four numbers per column, and one number per token of a pass. One region
/// holds first the counts of several chunks, then the sorted slots of a pass and the counts of each warp.
__device__ constexpr u64 plan_place_shared_bytes(u64 columns, u64 count_rows) {
    const u64 sorted = sizeof(u32) * kPassSlots + sizeof(u16) * kPlanWarps * columns, counted = 2 * count_rows * columns * sizeof(int);
    return sizeof(int) * (4 * columns + kPassSlots + 4) + (sorted > counted ? sorted : counted);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    plan_place(const int* __restrict__ expert, const int* __restrict__ token_id, const u16* __restrict__ counts, int* __restrict__ start_out,
               int* __restrict__ len_out, int* __restrict__ row_id, int* __restrict__ source_row, int* __restrict__ row_slot,
               int* __restrict__ slot_row, int* __restrict__ found, const __grid_constant__ PlanSizes sizes, int top_k, Divider by_top_k) {
    static_assert(kThreads == kPlanThreads);
    extern __shared__ int4 shared[];
    const int columns = sizes.columns;
    int* const next = reinterpret_cast<int*>(shared);  // [columns]: the next row of the chunk in each group
    int* const len = next + columns;                   // [columns]: length of each group
    int* const start = len + columns;                  // [columns]: first row of each group
    int* const local = start + columns;                // [columns]: position in `sorted` at which the group begins
    int* const ids = local + columns;                  // [kPassSlots + 1]: global numbers of the pass's tokens
    int* const partial = ids + kPassSlots + 4;         // [2 * count_rows][columns]; shares memory with `sorted` and `warp_count`
    u32* const sorted = reinterpret_cast<u32*>(partial);                  // [kPassSlots]: group << 16 | slot in the pass
    u16* const warp_count = reinterpret_cast<u16*>(sorted + kPassSlots);  // [kPlanWarps][columns]: slots of each warp in each group
    __shared__ int warp_occupied[kPlanWarps + 1];
    __shared__ int totals[4];  // rows needed, slots occupied, slots of earlier chunks, slots of this pass
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    int group[kPlanRounds];
    const auto load = [&](int pass) {
        const int first = (blockIdx.x * sizes.passes + pass) * kPassSlots;
#pragma unroll
        for (int round = 0; round < kPlanRounds; ++round)
            group[round] = group_of(expert, first + (warp * kPlanRounds + round) * 32 + lane, sizes);
        if (first >= sizes.slots) return;
        const int token = by_top_k.divide(u32(first)), last = by_top_k.divide(u32(min(first + kPassSlots, sizes.slots) - 1));
#pragma unroll 1
        for (int i = threadIdx.x; i <= last - token; i += kThreads) ids[i] = __ldg(token_id + token + i);
    };
    load(0);
    ptx::grid_wait();
    sum_counts(counts, sizes, partial, next, len);
#pragma unroll 1
    for (int g = threadIdx.x; g < columns; g += kThreads)
        start[g] = g < sizes.groups ? ceil_div(len[g], sizes.align) * sizes.align : 0;
    __syncthreads();
    if (warp < 3) {
        const int total = warp == 0 ? exclusive_scan(start, columns) : warp_sum(warp == 1 ? len : next, columns);
        if (lane == 0) totals[warp] = total;
    }
    __syncthreads();
    const bool fits = totals[0] <= sizes.capacity && totals[1] <= sizes.num_slots;
    const int end = fits ? totals[0] : 0, occupied = fits ? totals[1] : 0;
#pragma unroll 1
    for (int g = threadIdx.x; g < columns; g += kThreads) {
        if (!fits) start[g] = len[g] = 0;
        next[g] += start[g];
    }
    if (blockIdx.x == 0) {
        if (threadIdx.x < 2) found[threadIdx.x] = totals[threadIdx.x];
        if (threadIdx.x == 0) start_out[sizes.groups] = end;
    }
    __syncthreads();
    if (blockIdx.x == 0)
#pragma unroll 1
        for (int g = threadIdx.x; g < sizes.groups; g += kThreads) start_out[g] = start[g], len_out[g] = len[g];
    const PlanRows rows = {row_id, source_row, row_slot};
    fill_padding(rows, start, len, end, sizes);
#pragma unroll 1
    for (int i = occupied + blockIdx.x * kThreads + threadIdx.x; i < sizes.num_slots; i += gridDim.x * kThreads) slot_row[i] = -1;
    if (!fits || blockIdx.x >= sizes.chunks) return;

    int earlier = totals[2];
#pragma unroll 1
    for (int pass = 0; pass < sizes.passes; ++pass) {
        const int first = (blockIdx.x * sizes.passes + pass) * kPassSlots;
#pragma unroll 1
        for (int i = threadIdx.x; i < kPlanWarps * columns / 2; i += kThreads) reinterpret_cast<u32*>(warp_count)[i] = 0;
        __syncthreads();
        // A warp has 128 adjacent slots, 32 per round. `rank` is, for each
        // slot, the number of earlier slots of the same group in the warp.
        u16* const mine = warp_count + warp * columns;
        int rank[kPlanRounds], place[kPlanRounds], before = 0;
        u32 same[kPlanRounds];
#pragma unroll
        for (int round = 0; round < kPlanRounds; ++round) same[round] = __match_any_sync(kFullWarp, group[round]);
#pragma unroll
        for (int round = 0; round < kPlanRounds; ++round) {
            const u32 taken = __ballot_sync(kFullWarp, group[round] >= 0);
            const u32 below = (1u << lane) - 1;
            place[round] = before + __popc(taken & below);
            before += __popc(taken);
            if (group[round] >= 0) {
                const int seen = mine[group[round]];
                rank[round] = seen + __popc(same[round] & below);
                __syncwarp(taken);
                if ((same[round] & below) == 0) mine[group[round]] = u16(seen + __popc(same[round]));
            }
            __syncwarp();
        }
        if (lane == 0) warp_occupied[warp] = before;
        __syncthreads();
#pragma unroll 1
        for (int g = threadIdx.x; g < columns; g += kThreads) {
            int sum = 0;
#pragma unroll
            for (int w = 0; w < kPlanWarps; ++w) {
                const int n = warp_count[w * columns + g];
                warp_count[w * columns + g] = u16(sum);
                sum += n;
            }
            local[g] = sum;
        }
        if (threadIdx.x == 0) {
            int sum = earlier;
#pragma unroll
            for (int w = 0; w < kPlanWarps; ++w) {
                const int n = warp_occupied[w];
                warp_occupied[w] = sum;
                sum += n;
            }
            warp_occupied[kPlanWarps] = sum;
        }
        __syncthreads();
        if (warp == 0) {
            const int all = exclusive_scan(local, columns);
            if (lane == 0) totals[3] = all;
        }
        __syncthreads();
#pragma unroll
        for (int round = 0; round < kPlanRounds; ++round) {
            if (group[round] < 0) continue;
            const int g = group[round], within = mine[g] + rank[round];
            sorted[local[g] + within] = u32(g) << 16 | u32((warp * kPlanRounds + round) * 32 + lane);
            slot_row[warp_occupied[warp] + place[round]] = next[g] + within;
        }
        __syncthreads();
        // Threads store slots in sorted order, so that adjacent threads write adjacent rows.
        const int all = totals[3], first_token = by_top_k.divide(u32(min(first, sizes.slots)));
        for (int i = threadIdx.x; i < all; i += kThreads) {
            const int g = int(sorted[i] >> 16), slot = first + int(sorted[i] & 0xFFFF);
            const int token = int(by_top_k.divide(u32(slot)));
            rows.set(next[g] + i - local[g], int(u32(ids[token - first_token]) * top_k + slot - token * top_k), token, slot);
        }
        earlier = warp_occupied[kPlanWarps];
        __syncthreads();
#pragma unroll 1
        for (int g = threadIdx.x; g < columns; g += kThreads) next[g] += (g + 1 < columns ? local[g + 1] : all) - local[g];
        if (pass + 1 < sizes.passes) load(pass + 1);
        __syncthreads();
    }
}

}  // namespace nib
