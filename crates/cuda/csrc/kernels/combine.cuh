// The rows of a token's slots to one row.
//
// combine_slots<T, kCount, kAtOnce>: out[t] = the sum over slots s of rows[index[t · top_k + s]], in F32, in the order of the slots, rounded once;
// zeros for a row that is none of the num_rows, of which there is one at least. Without an index: row t · top_k + s. Where there is a `plus`,
// the sum of that and plus[t], rounded again. T is Bf16 or F32;
// kCount columns a thread: as many as lie in 16 bytes, where a row is a multiple of that, else 1; kAtOnce slots are loaded at once, 8, or, of fewer
// than 4, 2: registers for 8 leave room for too few warps to keep the memory busy with one slot each.
//   256 threads; grid ceil(units / 256), units = tokens · cols / kCount below 2^31; units_per_row = cols / kCount.
//
// Measured on an H200: 4096 tokens of 7168, top 8 and 6, BF16 and F32, 100 to 102 % of the floor; 512 tokens 82 %.
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kCombineThreads = 256;

/// Where the rows of slots lie: `column` is the first row, at the thread's columns.
struct SlotRows {
    const u8* column;
    const int* index;
    u32 num_rows;
    u64 row_bytes;
};

/// Adds the rows of kSlots slots from `slot` on: all loads first, then the sums in order.
template <int kSlots, typename T, int kCount>
__device__ __forceinline__ void add_slots(const SlotRows& rows, u64& slot, float (&sum)[kCount]) {
    Few<T, kCount> x[kSlots];
    u32 row[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) row[i] = rows.index == nullptr ? u32(slot + i) : u32(__ldg(rows.index + slot + i));
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
        x[i] = Few<T, kCount>::load(rows.column + (row[i] < rows.num_rows ? row[i] : 0) * rows.row_bytes);
    slot += kSlots;
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] += row[i] < rows.num_rows ? x[i].value(j) : 0.0f;
}

template <typename T, int kCount, int kAtOnce>
__global__ void __launch_bounds__(kCombineThreads, kAtOnce == 2 ? 8 : 1)
    combine_slots(const u8* __restrict__ rows, const int* __restrict__ index, u32 num_rows,
                  const u8* __restrict__ plus, u8* __restrict__ out, u32 units,
                  u32 units_per_row, Divider by_units_per_row, int top_k) {
    const u32 unit = blockIdx.x * kCombineThreads + threadIdx.x;
    if (unit >= units) return;
    const u32 token = by_units_per_row.divide(unit);
    const u64 row_bytes = u64(units_per_row) * Few<T, kCount>::kBytes;
    const SlotRows from = {rows + (unit - token * units_per_row) * Few<T, kCount>::kBytes, index, num_rows, row_bytes};
    u64 slot = u64(token) * top_k;
    float sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = -0.0f;  // -0 + x is x, whatever x is
    for (; top_k >= kAtOnce; top_k -= kAtOnce) add_slots<kAtOnce, T>(from, slot, sum);
    if constexpr (kAtOnce == 8) {
        if (top_k & 4) add_slots<4, T>(from, slot, sum);
        if (top_k & 2) add_slots<2, T>(from, slot, sum);
    }
    if (top_k & 1) add_slots<1, T>(from, slot, sum);
    const u64 at = u64(unit) * Few<T, kCount>::kBytes;
    auto result = Few<T, kCount>::from_f32(sum);
    if (plus != nullptr) {
        const auto more = Few<T, kCount>::load(plus + at);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = result.value(i) + more.value(i);
        result = Few<T, kCount>::from_f32(sum);
    }
    result.store(out + at);
}

}  // namespace nib
