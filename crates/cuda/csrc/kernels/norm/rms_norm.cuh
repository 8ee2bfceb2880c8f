// y = x / sqrt(mean(x^2) + eps) * weight along each row, rounded once. The kernels also write 1 / sqrt(mean(x^2)
// + eps) of each row. kPlus: the kernels first replace x by x + plus, rounded, and also write this sum to `sum`.
//
// x, plus, y, sum are [rows, d] of type T (Bf16 or F32), weight is F32 [d], inv_rms F32 [rows]. Without kPlus, plus and sum are null.
// rms_norm<T, kThreads, kBlocks, kRows, kPlus>: holds rows in registers; d is a multiple of 8. kThreads adjacent threads share a row. Each
//   thread has eight columns of every 256 columns, and the row has at most kBlocks * 256 columns. If kThreads < 32, kBlocks is 1 and d <= 8 *
//   kThreads. A thread holds its columns of kRows rows at once. 128 threads per CTA; the grid has ceil(rows / (kRows * 128 / kThreads)) CTAs.
// rms_norm_long<T, kAligned, kPlus>: for any d; reads each row twice. kAligned: d is a multiple of 8.
//   128 threads per CTA, one warp per row; the grid has ceil(rows / 4) CTAs.
#pragma once
#include "pieces/norm/norm_rows.cuh"

namespace nib {

template <typename T, int kThreads, int kBlocks, int kRows, bool kPlus>
__global__ void __launch_bounds__(kNormThreads)
    rms_norm(const u8* __restrict__ x, const u8* __restrict__ plus, const float* __restrict__ weight, u8* __restrict__ y,
             u8* __restrict__ sum, float* __restrict__ inv_rms, u32 rows, u32 d, float eps) {
    static_assert(kThreads == 32 || kBlocks == 1);
    constexpr u32 kTogether = kNormThreads / kThreads;
    const u32 index = threadIdx.x % kThreads, column = 8 * index;
    const u32 first = blockIdx.x * (kTogether * kRows) + threadIdx.x / kThreads;
    typename T::Eight value[kRows][kBlocks];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const u32 row = first + r * kTogether, at = column + 256 * b;
            value[r][b] = T::template load<true>(x + (u64(row) * d + at) * T::kBytes, row < rows && at < d ? 8 : 0);
        }
    if constexpr (kPlus) {
        // Only a few loads are in flight at a time, because x takes most of the registers.
        constexpr int kAll = kRows * kBlocks, kBatch = kAll % 8 == 0 ? 8 : 4;
        static_assert(kAll % kBatch == 0);
#pragma unroll
        for (int done = 0; done < kAll; done += kBatch) {
            typename T::Eight more[kBatch];
            const auto row_of = [&](int i) { return first + (done + i) / kBlocks * kTogether; };
            const auto column_of = [&](int i) { return column + 256 * ((done + i) % kBlocks); };
            const auto left_of = [&](int i) { return row_of(i) < rows && column_of(i) < d ? 8 : 0; };
            const auto place_of = [&](int i) { return (u64(row_of(i)) * d + column_of(i)) * T::kBytes; };
#pragma unroll
            for (int i = 0; i < kBatch; ++i) more[i] = T::template load<true>(plus + place_of(i), left_of(i));
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                typename T::Eight& here = value[(done + i) / kBlocks][(done + i) % kBlocks];
                here = store_sum<T, true>(sum + place_of(i), here, more[i], left_of(i));
            }
        }
    }
    float inv[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float lane[8] = {};
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) add_squares<T>(lane, value[r][b]);
        inv[r] = inverse_rms(close_lanes<kThreads>(lane, index), d, eps);
        const u32 row = first + r * kTogether;
        if (index == 0 && row < rows) inv_rms[row] = inv[r];
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        const u32 at = column + 256 * b;
        if (at >= d) continue;
        const F32::Eight w = F32::load<true>(weight + at, 8);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const u32 row = first + r * kTogether;
            store_normal<T, true>(y + (u64(row) * d + at) * T::kBytes, value[r][b], inv[r], w, row < rows ? 8 : 0);
        }
    }
}

template <typename T, bool kAligned, bool kPlus>
__global__ void __launch_bounds__(kNormThreads)
    rms_norm_long(const u8* __restrict__ x, const u8* __restrict__ plus, const float* __restrict__ weight, u8* __restrict__ y,
                  u8* __restrict__ sum, float* __restrict__ inv_rms, u32 rows, u32 d, float eps) {
    const u32 index = threadIdx.x % 32, row = blockIdx.x * (kNormThreads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const u64 begin = u64(row) * d * T::kBytes;
    const auto value_at = [&](u32 at, bool stores) {
        return row_value<T, kAligned, kPlus>(x, plus, sum, begin + u64(at) * T::kBytes, int(d - at), stores);
    };
    float lane[8] = {};
#pragma unroll 4
    for (u32 at = 8 * index; at < d; at += 256) add_squares<T>(lane, value_at(at, true));
    const float inv = inverse_rms(close_lanes<32>(lane, index), d, eps);
    if (index == 0) inv_rms[row] = inv;
#pragma unroll 4
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const F32::Eight w = F32::load<kAligned>(weight + at, left);
        store_normal<T, kAligned>(y + begin + u64(at) * T::kBytes, value_at(at, false), inv, w, left);
    }
}

}  // namespace nib
