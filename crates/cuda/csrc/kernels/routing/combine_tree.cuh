// Sums the rows that belong to the slots of a token in a binary tree over leaves, and rounds at each node.
//
// combine_tree<T, kCount>: out[t] is the sum at the tree's root of rows[index[t · top_k + s]]; each of these rows
//   is at leaf[t · top_k + s]. A node for leaves lo..hi is split at lo + (hi - lo) / 2. If both children have rows,
//   the node's sum is left + right in F32, rounded to T. If only one child has rows, its sum moves up unchanged.
//   Rows of one leaf are added in slot order, and each sum is rounded. A slot is valid if its row is below num_rows and its leaf below
//   `leaves`, which is below 2^31; out[t] is zero if no slot is valid. With `plus`, plus[t] is added to the root's sum, and the result
//   is rounded again. T is Bf16 or F32. A unit has kCount columns: 16 bytes if a row is a multiple of 16 bytes, else one column.
//   256 threads per CTA; a warp has kTreeChunk units of a token. The grid has ceil(items / 8) CTAs; items = tokens · chunks is
//   below 2^31, chunks = ceil(units_per_row / kTreeChunk). top_k is at most 32. Dynamic shared memory: combine_tree_shared_bytes.
//
// A warp sorts its token's slots by leaf, one slot per lane, and finds for each sum the row after which the sum is complete.
// Then each lane sums its own units over the rows in that order. A lane issues all its loads first, and has as many bytes in
// flight for few rows as for many. Partial sums that wait for the right child of their node are in shared memory, one column
// per thread, because indices there may be dynamic. Partial sums are rounded to T, so they are as small as rows.
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kTreeThreads = 256;
constexpr int kTreeWarps = kTreeThreads / 32;
/// Number of units per lane, and number of units per warp.
constexpr int kTreeUnits = 4;
constexpr int kTreeChunk = 32 * kTreeUnits;

/// The most partial sums that wait in a thread at a time. Waiting sums belong to nodes of strictly
/// increasing depth, or to a leaf. With four rows or fewer, a thread sums two units at a time.
__device__ constexpr int tree_entries(int top_k, u32 leaves) {
    int height = 0;
    while (height < 31 && (1u << height) < leaves) ++height;
    const int waiting = top_k - 1 < height + 1 ? top_k - 1 : height + 1;
    const int of_four = waiting < 3 ? waiting : 3;
    return top_k <= 2 ? 0 : waiting > 2 * of_four ? waiting : 2 * of_four;
}

/// Dynamic shared memory of combine_tree.
template <typename T, int kCount>
__device__ constexpr u64 combine_tree_shared_bytes(int top_k, u32 leaves) {
    return u64(tree_entries(top_k, leaves)) * kTreeThreads * Few<T, kCount>::kBytes;
}

/// A row, and the leaf at which it is.
struct TreeSlot {
    u32 row;
    u32 leaf;
};

/// The rows of a token, sorted by leaf and spread over the lanes of a warp.
struct TreeOrder {
    int count;   // number of rows in all lanes together
    u32 row;     // lane i: the i-th row
    int closes;  // lane i: the row after which the sum that ends with row i and the sum that starts with row i + 1 are added; -1 for none
};

/// Returns the depth of the tree node that has leaf a on its left side and leaf b on its right side.
__device__ __forceinline__ int split_depth(u32 a, u32 b, u32 leaves) {
    u32 lo = 0;
    int depth = 0;
    for (;; ++depth) {
        const u32 half = leaves / 2;
        if (b < lo + half) {
            leaves = half;
        } else if (a >= lo + half) {
            lo += half;
            leaves -= half;
        } else {
            return depth;
        }
    }
}

/// Every lane of the warp calls this function; `sorted` is shared memory that belongs to the warp.
__device__ __forceinline__ TreeOrder order_slots(const int* index, const int* leaf_of, int top_k, u32 num_rows, u32 leaves,
                                                 TreeSlot (&sorted)[32]) {
    const int lane = ptx::lane_idx();
    u32 row = ~0u, leaf = ~0u;
    if (lane < top_k) {
        row = u32(__ldg(index + lane));
        leaf = u32(__ldg(leaf_of + lane));
    }
    const bool counts = row < num_rows && leaf < leaves;
    leaf = counts ? leaf : ~0u;  // invalid slots sort last
    TreeOrder order;
    order.count = __popc(__ballot_sync(kAllLanes, counts));
    int place = 0;
    for (int slot = 0; slot < top_k; ++slot) {
        const u32 other = __shfl_sync(kAllLanes, leaf, slot);
        place += other < leaf || (other == leaf && slot < lane);
    }
    if (counts) sorted[place] = {row, leaf};
    __syncwarp();
    const TreeSlot mine = lane < order.count ? sorted[lane] : TreeSlot{0, 0};
    order.row = mine.row;
    const u32 next = __shfl_down_sync(kAllLanes, mine.leaf, 1);
    // Depth of the node at which a row meets the next row. If both rows
    // are at the same leaf, this depth is larger than that of any node.
    const bool has_next = lane + 1 < order.count;
    int depth = -1;
    if (has_next) depth = mine.leaf == next ? 32 : split_depth(mine.leaf, next, leaves);
    // The right side of the node ends before the next node of the same or a smaller depth.
    order.closes = -1;
    for (int i = 1; i < order.count; ++i) {
        const int other = __shfl_sync(kAllLanes, depth, i);
        if (has_next && i > lane && order.closes < 0 && other <= depth) order.closes = i;
    }
    return order;
}

/// The parameters that are the same for all units.
struct TreeRows {
    const u8* rows;
    const u8* plus;  // the token's row of `plus`, or null
    u8* out;         // the token's output row
    u64 row_bytes;
    u32 units_per_row;
};

/// Stores a unit to shared memory in one access.
template <typename T, int kCount>
__device__ __forceinline__ void keep(u8* to, const Few<T, kCount>& x) {
    if constexpr (Few<T, kCount>::kBytes == 16)
        *reinterpret_cast<uint4*>(to) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
    else if constexpr (Few<T, kCount>::kBytes == 4)
        *reinterpret_cast<u32*>(to) = x.word[0];
    else
        *reinterpret_cast<u16*>(to) = u16(x.word[0]);
}

/// Sums kUnits units per lane, from the warp's unit `first_unit` on, for a
/// token that has at most kRows rows; kRows = 8 stands for any number of rows.
template <int kUnits, int kRows, typename T, int kCount>
__device__ __forceinline__ void sum_units(const TreeRows& from, const TreeOrder& order, u32 first_unit, u8* stack) {
    using Unit = Few<T, kCount>;
    constexpr int kEntry = kTreeThreads * Unit::kBytes;
    const u32 unit = first_unit + ptx::lane_idx();
    Unit x[kUnits][kRows], sum[kUnits] = {};
    u32 at[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) at[u] = min(unit + 32 * u, from.units_per_row - 1) * Unit::kBytes;  // units past the end are not stored
    u8* top = stack;
    for (int base = 0; base < order.count; base += kRows) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const u64 row = u64(__shfl_sync(kAllLanes, order.row, (base + i) % 32)) * from.row_bytes;
            if (base + i < order.count) {
#pragma unroll
                for (int u = 0; u < kUnits; ++u) x[u][i] = Unit::load(from.rows + row + at[u]);
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (base + i >= order.count) break;
            if constexpr (kRows <= 2) {
#pragma unroll
                for (int u = 0; u < kUnits; ++u) sum[u] = i == 0 ? x[u][i] : add_few(sum[u], x[u][i]);
            } else {
#pragma unroll
                for (int u = 0; u < kUnits; ++u) sum[u] = x[u][i];
                for (int due = __popc(__ballot_sync(kAllLanes, order.closes == base + i)); due > 0; --due) {
#pragma unroll
                    for (int u = 0; u < kUnits; ++u) {
                        top -= kEntry;
                        const int left = kUnits - 1 - u;
                        sum[left] = add_few(Unit::load_written(top), sum[left]);
                    }
                }
                if (base + i + 1 < order.count) {
#pragma unroll
                    for (int u = 0; u < kUnits; ++u) {
                        keep(top, sum[u]);
                        top += kEntry;
                    }
                }
            }
        }
        if constexpr (kRows < 8) break;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        if (unit + 32 * u >= from.units_per_row) break;
        if (from.plus != nullptr) sum[u] = add_few(sum[u], Unit::load(from.plus + at[u]));
        sum[u].store(from.out + at[u]);
    }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kTreeThreads, 4)
    combine_tree(const u8* __restrict__ rows, const int* __restrict__ index, const int* __restrict__ leaf, u32 num_rows, u32 leaves,
                 const u8* __restrict__ plus, u8* __restrict__ out, u32 items, u32 units_per_row, u32 chunks, Divider by_chunks, int top_k) {
    extern __shared__ __align__(16) u8 stack[];
    __shared__ TreeSlot sorted[kTreeWarps][32];
    const u32 warp = threadIdx.x / 32, item = blockIdx.x * kTreeWarps + warp;
    if (item >= items) return;  // whole warps return, and warps share nothing
    const u32 token = by_chunks.divide(item);
    const u64 slot = u64(token) * top_k, row_bytes = u64(units_per_row) * Few<T, kCount>::kBytes;
    const TreeOrder order = order_slots(index + slot, leaf + slot, top_k, num_rows, leaves, sorted[warp]);
    const u64 at = token * row_bytes;
    const TreeRows from = {rows, plus == nullptr ? nullptr : plus + at, out + at, row_bytes, units_per_row};
    u8* mine = stack + threadIdx.x * Few<T, kCount>::kBytes;
    u32 unit = (item - token * chunks) * kTreeChunk;
    if (order.count <= 1) return sum_units<4, 1, T, kCount>(from, order, unit, mine);
    if (order.count <= 2) return sum_units<4, 2, T, kCount>(from, order, unit, mine);
    const u32 end = min(unit + kTreeChunk, units_per_row);
    if (order.count <= 4) {
        for (; unit < end; unit += 64) sum_units<2, 4, T, kCount>(from, order, unit, mine);
    } else {
        for (; unit < end; unit += 32) sum_units<1, 8, T, kCount>(from, order, unit, mine);
    }
}

/// find_slots: found[row_slot[r]] = r if row_slot[r] is below `slots`; other entries
/// of `found` are unchanged. 256 threads per CTA; the grid has ceil(rows / 256) CTAs.
__global__ void __launch_bounds__(kTreeThreads)
    find_slots(const int* __restrict__ row_slot, int* __restrict__ found, u32 rows, u32 slots) {
    const u32 row = blockIdx.x * kTreeThreads + threadIdx.x;
    if (row >= rows) return;
    const u32 slot = u32(row_slot[row]);
    if (slot < slots) found[slot] = int(row);
}

}  // namespace nib
