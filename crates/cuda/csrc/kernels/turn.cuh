// What the kernels that turn rows of codes into columns have in common.
#pragma once
#include "kernels/column_tile.cuh"
#include "ptx/global.cuh"

namespace nib {

constexpr int kTurnThreads = 256;

/// Threads of the column kernels: 16 lanes hold 128 columns of a row, 8 each; either half of a warp an octet of rows. The scales of
/// a warp's 16 rows are looked after by its first 16 lanes.
struct TurnPlace {
    int octet, col, row;

    __device__ __forceinline__ TurnPlace() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        octet = warp * 2 + lane / 16;
        col = lane % 16 * 8;
        row = lane < 16 ? warp * 16 + lane : kTile;
    }
};

/// Zeros for a tile without a row that counts.
__device__ __forceinline__ void clear_columns(u8* out, u8* out_scales, const TilePlace& at, int cols, int capacity) {
    const int first_col = at.panel * kTile;
    for (int i = threadIdx.x; i < kTile * 8; i += kTurnThreads)
        if (first_col + i / 8 < cols)
            ptx::store_16(out + u64(first_col + i / 8) * capacity + at.strip * kTile + i % 8 * 16, {0, 0, 0, 0});
    const int col = first_col + threadIdx.x;
    if (threadIdx.x < kTile && col < cols) out_scales[u64(col) * at.down + at.strip] = 0;
}

}  // namespace nib
