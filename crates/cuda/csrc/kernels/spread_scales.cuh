// Scales of blocks of columns, [strips][blocks], to each of their columns, [cols][strips].
//
// spread_scales: 256 threads; a cta for each 32 columns; at most kMostSpread strips; block_cols a multiple of 32.
#pragma once
#include "ptx/types.cuh"

namespace nib {

constexpr int kSpreadCols = 32;
constexpr int kMostSpread = 8192;

__global__ void __launch_bounds__(256) spread_scales(const u8* __restrict__ block_scales, u8* __restrict__ out_scales, int block_cols,
                                                     int cols, int strips) {
    __shared__ alignas(4) u8 column[kMostSpread];
    const int first_col = blockIdx.x * kSpreadCols, blocks = ceil_div(cols, block_cols), block = first_col / block_cols;
    for (int strip = threadIdx.x; strip < strips; strip += 256) column[strip] = block_scales[u64(strip) * blocks + block];
    __syncthreads();
    // The columns lie one after the other: the same bytes again and again.
    const u32 bytes = min(kSpreadCols, cols - first_col) * strips;
    u8* const to = out_scales + u64(first_col) * strips;
    for (u32 at = threadIdx.x * 4; at < bytes; at += 256 * 4) {
        u32 from = at % strips;
        u32 four = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            four |= u32(column[from]) << (8 * b);
            from = from + 1 == strips ? 0 : from + 1;
        }
        if (at + 4 <= bytes) {
            *reinterpret_cast<u32*>(to + at) = four;
        } else {
            for (u32 b = 0; at + b < bytes; ++b) to[at + b] = u8(four >> (8 * b));
        }
    }
}

}  // namespace nib
