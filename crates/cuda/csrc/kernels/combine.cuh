// The rows of a token's slots to one row.
//
// combine_slots<T, kCount>: out[t] = the sum over slots s of rows[t · top_k + s], in F32, in the order of the slots, rounded once. T is Bf16
// or F32; kCount columns a thread: as many as lie in 16 bytes, where a row is a multiple of that, else 1.
//   256 threads; grid ceil(units / 256), units = tokens · cols / kCount below 2^31; units_per_row = cols / kCount.
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kCombineThreads = 256;

/// Adds kSlots rows: all loads first, then the sums in order.
template <int kSlots, typename T, int kCount>
__device__ __forceinline__ void add_slots(const u8*& from, u64 row_bytes, float (&sum)[kCount]) {
    Few<T, kCount> x[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) x[slot] = Few<T, kCount>::load(from + slot * row_bytes);
    from += kSlots * row_bytes;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] += x[slot].value(i);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kCombineThreads)
    combine_slots(const u8* __restrict__ rows, u8* __restrict__ out, u32 units, u32 units_per_row, Divider by_units_per_row,
                  int top_k) {
    const u32 unit = blockIdx.x * kCombineThreads + threadIdx.x;
    if (unit >= units) return;
    const u32 token = by_units_per_row.divide(unit);
    const u64 row_bytes = u64(units_per_row) * Few<T, kCount>::kBytes;
    const u8* from = rows + u64(token) * top_k * row_bytes + (unit - token * units_per_row) * Few<T, kCount>::kBytes;
    float sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = -0.0f;  // -0 + x is x, whatever x is
    for (; top_k >= 8; top_k -= 8) add_slots<8, T>(from, row_bytes, sum);
    if (top_k & 4) add_slots<4, T>(from, row_bytes, sum);
    if (top_k & 2) add_slots<2, T>(from, row_bytes, sum);
    if (top_k & 1) add_slots<1, T>(from, row_bytes, sum);
    Few<T, kCount>::from_f32(sum).store(out + u64(unit) * Few<T, kCount>::kBytes);
}

}  // namespace nib
