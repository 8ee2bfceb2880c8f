// MXFP4 rows -> E4M3 in squares of 128 x 128 under one scale, as they stand and transposed: the two planes of a weight, on the codes
// alone; all scales are E8M0 bytes. The twin of crates/formats/src/lift.rs.
//
// counts[3] (null: not wanted) += blocks of the source with a non-zero code, of those with a code that changed its value, blocks with a
// NaN.
//
// lift_tiles<kWhole>: codes [stack][rows][cols / 2], scales [stack][rows][cols / 32] -> out [stack][rows][cols], out_scales
//   [stack][ceil(rows / 128)][ceil(cols / 128)], turned [stack][cols][rows], turned_scales [stack][ceil(cols / 128)][ceil(rows / 128)];
//   cols % 32 == 0; kWhole: cols % 128 == 0, rows % 16 == 0. 512 threads; a cta takes 128 rows of 256 columns: lines of 128 bytes of the
//   source. Grid stack * ceil(cols / 256) * ceil(rows / 128). Planes start on 16 bytes.
#pragma once
#include "kernels/column_tile.cuh"
#include "kernels/lift.cuh"
#include "kernels/quantize_cols.cuh"
#include "math/reduce.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kLiftTilesThreads = 512;
constexpr int kLiftTilesPanels = 2;  // of a cta, side by side: one for each half of a warp

struct alignas(16) LiftTilesShared {
    ColumnTile tile[kLiftTilesPanels];
    u32 largest[kLiftTilesPanels][kLiftTilesThreads / 32];  // of each warp's rows
    u32 total[3];
};

/// Stores `left` bytes of as many lines of a turned tile as exist, whatever places those start at.
template <int kThreads>
__device__ __forceinline__ void store_turned_bytes(ColumnTile& tile, u8* to, u64 line_bytes, int lines, int left) {
    for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
        const int line = i / kTile, at = i % kTile;
        if (line < lines && at < left) to[line * line_bytes + at] = tile.place(line, at / 8)[at % 8];
    }
}

template <bool kWhole>
__global__ void __launch_bounds__(kLiftTilesThreads, 2)
    lift_tiles(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
               u8* __restrict__ turned, u8* __restrict__ turned_scales, u64* counts, int rows, int cols) {
    constexpr int kPanels = kLiftTilesPanels, kWarps = kLiftTilesThreads / 32;
    static_assert(kWarps * 8 == kTile && kPanels * kTile == 32 * 8, "a thread takes eight rows of eight columns");
    __shared__ LiftTilesShared shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, panel = lane / 16;
    const int sources = cols / E2m1::kBlock, across = ceil_div(cols, kTile), down = ceil_div(rows, kTile);
    // Down the panels first: the transposed lines are the ones that are short.
    const int strip = blockIdx.x % down, pair = blockIdx.x / down % ceil_div(across, kPanels);
    const u64 matrix = blockIdx.x / down / ceil_div(across, kPanels);
    const int first_panel = pair * kPanels, my_row = strip * kTile + warp * 8, my_col = first_panel * kTile + lane * 8;
    const u64 first = matrix * rows + my_row;  // row of the stack
    const int rows_here = my_col < cols ? rows - my_row : 0;

    u32 in[8];
    const u8* const from = codes + (first * cols + my_col) / 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) in[j] = j < rows_here ? __ldg(reinterpret_cast<const u32*>(from + j * (u64(cols) / 2))) : 0;
    // The first lanes look after the scales, each after those of a row of a panel.
    u32 four = 0xFFFFFFFF;
    const int owner_panel = lane / 8, owner_row = lane % 8, left = sources - (first_panel + owner_panel) * 4;
    const bool is_owner = owner_panel < kPanels && my_row + owner_row < rows && left > 0;
    if (is_owner) four = load_scales<kWhole>(scales + (first + owner_row) * sources + (sources - left), left);
    const u32 two = ptx::max_u16x2(above_nan_x2(four), above_nan_x2(four >> 8)), one = max(two & 0xFFFF, two >> 16);
    const auto by_panel = [&](u32 value, int of) {
        uint2 largest;
        largest.x = __reduce_max_sync(kAllLanes, of == 0 ? value : 0);
        largest.y = __reduce_max_sync(kAllLanes, of == 1 ? value : 0);
        return largest;
    };
    const uint2 of_warp = by_panel(one, owner_panel);
    if (lane < kPanels) shared.largest[lane][warp] = lane == 0 ? of_warp.x : of_warp.y;
    __syncthreads();
    const uint2 largest = by_panel(shared.largest[panel][lane % kWarps], panel);
    const int target = lift_target(owner_panel == 0 ? largest.x : largest.y);

    Tally tally;
    u32 entries = 0;
    bool rare = false;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const u32 source = four >> (8 * b) & 0xFF, entry = lift_index(source, target);
        const bool exists = is_owner && b < left;
        rare |= exists && !lifts_to_normal(entry);
        tally.non_finite += exists && source == kScaleNan;
        entries |= entry << (8 * b);
    }
    const auto entry_of = [&](int j) { return __shfl_sync(kAllLanes, entries, panel * 8 + j) >> (lane / 4 % 4 * 8) & 0xFF; };
    u32 by_four[2][8];
    u32 non_zero = 0;  // a bit for each row
#pragma unroll
    for (int j = 0; j < 8; ++j) non_zero |= u32((in[j] & E2m1::kMagnitudes) != 0) << j;
    if (!__any_sync(kAllLanes, rare)) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const u32 rise = (entry_of(j) - kLiftNormal) * kLiftOctave;
            const uint2 magnitudes = {kLiftLow + (rise & 0xFFFFFF00), kLiftHigh + rise};
            by_four[0][j] = lift_four<false>(in[j], magnitudes, 0x80808080);
            by_four[1][j] = lift_four<true>(in[j], magnitudes, 0x80808080);
        }
    } else {
        u32 inexact = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const Lift by = kLiftTable.entry[entry_of(j)];
            by_four[0][j] = lift_four<false>(in[j], by.magnitudes, by.signs);
            by_four[1][j] = lift_four<true>(in[j], by.magnitudes, by.signs);
            inexact |= u32(by.changed != 0 && any_changed(in[j], by.changed)) << j;
        }
        inexact |= __shfl_xor_sync(kAllLanes, inexact, 1);
        inexact |= __shfl_xor_sync(kAllLanes, inexact, 2);
        if (lane % 4 == 0) tally.inexact += __popc(inexact);
    }
    // Four lanes hold a block.
    non_zero |= __shfl_xor_sync(kAllLanes, non_zero, 1);
    non_zero |= __shfl_xor_sync(kAllLanes, non_zero, 2);
    if (lane % 4 == 0) tally.non_zero += __popc(non_zero);

    u8* to = out + first * cols + my_col;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j < rows_here) ptx::store_8(to, {by_four[0][j], by_four[1][j]});
        to += cols;
    }
    if (warp == 0 && lane % 8 == 0 && owner_panel < kPanels && first_panel + owner_panel < across) {
        const u64 of = first_panel + owner_panel;
        out_scales[(matrix * down + strip) * across + of] = u8(target);
        turned_scales[(matrix * across + of) * down + strip] = u8(target);
    }
    turn_8x8(by_four, shared.tile[panel].place(lane % 16 * 8, warp));
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
        const int col = (first_panel + p) * kTile, row = strip * kTile;
        u8* const line = turned + (matrix * cols + col) * rows + row;
        if constexpr (kWhole) {
            store_turned<E4m3, false, kLiftTilesThreads>(shared.tile[p], line, rows, cols - col, rows - row, tally);
        } else {
            store_turned_bytes<kLiftTilesThreads>(shared.tile[p], line, rows, cols - col, rows - row);
        }
    }
    tally.flush(counts, shared.total);
}

}  // namespace nib
