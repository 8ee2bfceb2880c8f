// Sums the rows that belong to the slots of a token to one row per token.
//
// combine_slots<T, kCount, kUnits>: out[t] = the sum over slots s of rows[index[t · top_k + s]], in F32, in slot order,
//   rounded once. An index outside the num_rows rows (at least one) adds zeros. If `index` is null, slot s of token t
//   has row t · top_k + s. With `plus`, plus[t] is added to the rounded sum, and the result is rounded again. T is Bf16
//   or F32. A unit has kCount columns: 16 bytes if a row is a multiple of 16 bytes, else one column. A thread has kUnits units:
//   1, or 4 if a token has fewer than 4 slots, because a thread with a single load is too short-lived.
//   256 threads per CTA; the grid has ceil(units / (256 · kUnits)) CTAs; units = tokens · cols / kCount is below 2^31; units_per_row = cols / kCount.
//
// Speed on an H200 in BF16, in % of the bandwidth limit, for top 1 of 8, top 4 of 32 and top 8 of 256 experts: 99, 102 and 100
// % at 32768 x 7168 (top 1 with one unit per thread: 73 %); 98, 95 and 90 % at 32768 x 2048; 91, 84 and 76 % at 4096 x 7168.
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kCombineThreads = 256;

/// The rows of a unit's slots, and their sum.
template <typename T, int kCount>
struct Slots {
    const u8* column;  // address of the unit's columns in row 0
    u64 slot;          // index of the next slot
    float sum[kCount];
};

/// The parameters that are the same for all slots.
struct SlotRows {
    const int* index;
    u32 num_rows;
    u64 row_bytes;
};

/// Adds the rows of each unit's next kSlots slots: it first issues all loads, then adds in order.
template <int kSlots, typename T, int kCount, int kUnits>
__device__ __forceinline__ void add_slots(const SlotRows& rows, Slots<T, kCount> (&to)[kUnits]) {
    Few<T, kCount> x[kUnits][kSlots];
    u32 row[kUnits][kSlots];
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int i = 0; i < kSlots; ++i)
            row[u][i] = rows.index == nullptr ? u32(to[u].slot + i) : u32(__ldg(rows.index + to[u].slot + i));
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i)
            x[u][i] = Few<T, kCount>::load(to[u].column + (row[u][i] < rows.num_rows ? row[u][i] : 0) * rows.row_bytes);
        to[u].slot += kSlots;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int i = 0; i < kSlots; ++i)
#pragma unroll
            for (int j = 0; j < kCount; ++j) to[u].sum[j] += row[u][i] < rows.num_rows ? x[u][i].value(j) : 0.0f;
}

template <typename T, int kCount, int kUnits>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_slots(const u8* __restrict__ rows, const int* __restrict__ index, u32 num_rows,
                  const u8* __restrict__ plus, u8* __restrict__ out, u32 units,
                  u32 units_per_row, Divider by_units_per_row, int top_k) {
    const u32 first = blockIdx.x * (kCombineThreads * kUnits) + threadIdx.x;
    const auto unit = [&](int u) { return first + u * kCombineThreads; };
    const SlotRows from = {index, num_rows, u64(units_per_row) * Few<T, kCount>::kBytes};
    Slots<T, kCount> slots[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const u32 at = min(unit(u), units - 1);  // units past the end are computed but not stored
        const u32 token = by_units_per_row.divide(at);
        slots[u].column = rows + (at - token * units_per_row) * Few<T, kCount>::kBytes;
        slots[u].slot = u64(token) * top_k;
#pragma unroll
        for (int i = 0; i < kCount; ++i) slots[u].sum[i] = -0.0f;  // -0 + x is x for every x
    }
    if constexpr (kUnits == 1) {
        for (; top_k >= 8; top_k -= 8) add_slots<8>(from, slots);
        if (top_k & 4) add_slots<4>(from, slots);
        if (top_k & 2) add_slots<2>(from, slots);
        if (top_k & 1) add_slots<1>(from, slots);
    } else {
        for (; top_k > 0; --top_k) add_slots<1>(from, slots);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        if (unit(u) >= units) break;
        const u64 at = u64(unit(u)) * Few<T, kCount>::kBytes;
        float(&sum)[kCount] = slots[u].sum;
        auto result = Few<T, kCount>::from_f32(sum);
        if (plus != nullptr) {
            const auto more = Few<T, kCount>::load(plus + at);
#pragma unroll
            for (int i = 0; i < kCount; ++i) sum[i] = result.value(i) + more.value(i);
            result = Few<T, kCount>::from_f32(sum);
        }
        result.store(out + at);
    }
}

}  // namespace nib
