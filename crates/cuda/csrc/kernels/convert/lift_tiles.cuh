// Converts MXFP4 rows to E4M3 with one scale per 2-D block of 128 x 128, and writes both the matrix and its transpose. GEMMs need both forms
// of a weight. The kernel operates on the codes alone. All scales are E8M0 bytes. The CPU implementation is crates/formats/src/lift.rs.
//
// If counts[3] is not null, the kernel adds three numbers to it: source blocks with a
// non-zero code, source blocks in which a value changed, and source blocks with a NaN.
//
// lift_tiles<kWhole>: reads codes [stack][rows][cols / 2] and scales [stack][rows][cols / 32]. The kernel writes `out` [stack][rows][cols]
//   with out_scales [stack][ceil(rows / 128)][ceil(cols / 128)], and the transpose `turned` [stack][cols][rows] with turned_scales
//   [stack][ceil(cols / 128)][ceil(rows / 128)]. cols % 32 == 0; kWhole: also cols % 128 == 0 and rows % 16 == 0.
//   512 threads per CTA. A CTA converts 256 x 256 values: first two adjacent 2-D blocks, then the two 2-D blocks below, which it prefetches. The
//   grid has stack * ceil(cols / 256) * ceil(rows / 256) CTAs. Dynamic shared memory: sizeof(LiftTilesShared) bytes. Buffers are 16-byte aligned.
//
// Speed on an H200, in % of the bandwidth limit of lift_cols.cuh: 87 % at 32768 x 7168, 84 % at 16384 x 7168, 80 % at 24576 x 2048,
// 73 % at 4096 x 7168. Both outputs are written in contiguous runs of 256 bytes. The kernel is 9 % slower if a CTA is one 2-D block
// wide instead of two, and 4 % slower if a CTA is one block high. The kernel is 7 % slower if CTAs are ordered by whole panels instead of
// bands of four strips. With three CTAs per SM, registers spill. ncu reports the L2 as 81 % busy and memory as 70 % busy.
#pragma once
#include "math/reduce.cuh"
#include "pieces/convert/column_tile.cuh"
#include "pieces/convert/lift.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kLiftTilesThreads = 512;
constexpr int kLiftTilesWarps = kLiftTilesThreads / 32;
constexpr int kLiftTilesDepth = 2;  // strips of 128 rows per CTA
constexpr int kLiftTilesBand = 4;   // number of strips of CTAs per band

struct alignas(16) LiftTilesShared {
    ColumnTile tile[kLiftTilesDepth][2];
    u32 largest[2][2][kLiftTilesWarps];  // the largest scale in each warp's rows of either 2-D block, in this strip and the next
    u32 total[3];
};

/// Adds the four bytes of two words, without carries between bytes.
__device__ __forceinline__ u32 add_bytes(u32 a, u32 b) { return ((a & ~kEachSign) + (b & ~kEachSign)) ^ ((a ^ b) & kEachSign); }

/// Returns, in all lanes, the largest word of each of two 2-D blocks. `square`
/// is the index of the 2-D block to which this lane's `word` belongs.
__device__ __forceinline__ uint2 largest_of_squares(u32 word, int square) {
    return {__reduce_max_sync(kAllLanes, square == 0 ? word : 0), __reduce_max_sync(kAllLanes, square == 1 ? word : 0)};
}

template <bool kWhole>
__global__ void __launch_bounds__(kLiftTilesThreads, 2)
    lift_tiles(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
               u8* __restrict__ turned, u8* __restrict__ turned_scales, u64* counts, int rows, int cols) {
    constexpr int kDepth = kLiftTilesDepth;
    static_assert(kLiftTilesWarps * 8 == kTile, "a lane takes eight rows of eight columns");
    extern __shared__ uint4 raw[];
    auto& shared = *reinterpret_cast<LiftTilesShared*>(raw);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, square = lane / 16;
    const int sources = cols / E2m1::kBlock, across = ceil_div(cols, kTile), down = ceil_div(rows, kTile);
    const int pairs = ceil_div(across, 2), steps = ceil_div(down, kDepth);
    const u64 matrix = blockIdx.x / (pairs * steps);
    const TilePlace place(blockIdx.x - int(matrix) * (pairs * steps), pairs, steps, kLiftTilesBand / kDepth);
    const int first_strip = place.strip * kDepth, strips = min(kDepth, down - first_strip), first_panel = place.panel * 2;
    const int first_row = first_strip * kTile + warp * 8, my_col = (first_panel + square) * kTile + lane % 16 * 8;
    const u64 first = (matrix * rows + first_row) * cols + my_col;  // index of the element within the whole stack of matrices
    int rows_left = my_col < cols ? rows - first_row : 0;
    // Lanes 0 to 15 load the scales: each loads the four scales of one row of one 2-D block.
    const int owned_square = lane / 8, owned_panel = first_panel + owned_square, owned_row = first_row + lane % 8;
    const int owned = owned_square < 2 ? sources - owned_panel * 4 : 0;
    int owned_rows_left = owned > 0 ? rows - owned_row : 0;

    const u8* from = codes + first / 2;
    const u8* from_scales = scales + (matrix * rows + owned_row) * sources + owned_panel * 4;
    u32 next[8], next_four;
    const auto fetch = [&](bool exists) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            next[j] = ptx::load_4_if(exists && rows_left > (kWhole ? 0 : j), from);
            from += cols / 2;
        }
        const bool owns = exists && owned_rows_left > 0;
        if constexpr (kWhole) {
            next_four = ptx::load_4_if(owns, from_scales) | (owns ? 0 : 0xFFFFFFFF);
        } else {
            next_four = owns ? load_scales<false>(from_scales, owned) : 0xFFFFFFFF;
        }
        from += (kTile - 8) * (u64(cols) / 2);
        from_scales += kTile * u64(sources);
    };
    fetch(true);
    u8* to = out + first;
    Tally tally;
#pragma unroll 1
    for (int i = 0; i < strips; ++i) {
        u32 in[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) in[j] = next[j];
        const u32 four = next_four, exists = owned_rows_left <= 0 ? 0 : kWhole || owned > 3 ? kEachSign : kEachSign >> (32 - 8 * owned);
        const int rows_here = rows_left;
        rows_left -= kTile;
        owned_rows_left -= kTile;
        fetch(i + 1 < strips);

        const u32 two = ptx::max_u16x2(above_nan_x2(four), above_nan_x2(four >> 8));
        const uint2 of_warp = largest_of_squares(max(two & 0xFFFF, two >> 16), owned_square);
        if (lane < 2) shared.largest[i % 2][lane][warp] = lane == 0 ? of_warp.x : of_warp.y;
        __syncthreads();
        const uint2 largest = largest_of_squares(shared.largest[i % 2][square][lane % kLiftTilesWarps], square);
        const int target = lift_target(owned_square == 0 ? largest.x : largest.y);  // target scale of the 2-D block whose scales this lane loaded
        // The words below hold one byte per scale. `above`: how many powers of two the scale is above the lowest
        // scale that gives normal numbers. `nan`: bit 7 marks a NaN. `rare`: bit 7 marks a NaN, or a scale that
        // does not give normal numbers.
        const u32 above = add_bytes(four, (kLiftFar - kLiftNormal - u32(target) & 0xFF) * kEachByte);
        const u32 nan = (four & ~kEachSign) + kEachByte & four & exists;
        const u32 rare = (((above & ~kEachSign) + (0x80 - (kLiftNan - kLiftNormal)) * kEachByte | above) & exists) | nan;
        const u32 rises = (above & 0x1F1F1F1F) * 8;
        tally.non_finite += __popc(nan);

        u8* const mine = shared.tile[i][square].place(lane % 16 * 8, warp);
        const int block = lane / 4 % 4;
        // Selectors that copy a byte to all four bytes, and to all but the lowest one, since the code of 0 stays 0.
        const u32 to_high = block * 0x1111, to_low = to_high & 0xFFF0 | 4;
        u32 by_four[2][8];
        u32 non_zero = 0;  // one bit per row
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const u32 rise = __shfl_sync(kAllLanes, rises, square * 8 + j);
            const u32 low = kLiftLow + __byte_perm(rise, 0, to_low), high = kLiftHigh + __byte_perm(rise, 0, to_high);
            non_zero |= (in[j] & E2m1::kMagnitudes) != 0 ? 1u << j : 0;
            by_four[0][j] = lift_word<false>(in[j], low, high);
            by_four[1][j] = lift_word<true>(in[j], low, high);
            ptx::store_8_if(rows_here > (kWhole ? 0 : j), to, {by_four[0][j], by_four[1][j]});
            to += cols;
        }
        // Four lanes share each block.
        non_zero |= __shfl_xor_sync(kAllLanes, non_zero, 1);
        non_zero |= __shfl_xor_sync(kAllLanes, non_zero, 2);
        if (lane % 4 == 0) tally.non_zero += __popc(non_zero);
        turn_8x8(by_four, mine);
        if (__any_sync(kAllLanes, rare != 0)) {
            // Rows with a NaN, or with a scale far below the largest
            // scale, are recomputed through the lookup table.
            u64 at = first + u64(i) * kTile * cols;
#pragma unroll 1
            for (int j = 0; j < 8; ++j, at += cols) {
                const auto of_block = [&](u32 owners) { return __shfl_sync(kAllLanes, owners, square * 8 + j) >> (block * 8) & 0xFF; };
                const u32 source = of_block(four);
                const bool again = of_block(rare) != 0 && rows_here > j;
                const Lift& by = kLiftTable.entry[lift_index(source, __shfl_sync(kAllLanes, target, square * 8))];
                const u32 word = ptx::load_4_if(again, codes + at / 2);
                const u32 inexact = __ballot_sync(kAllLanes, again && by.changed != 0 && any_changed(word, by.changed));
                tally.inexact += lane % 4 == 0 && (inexact >> lane & 15) != 0;
                if (!again) continue;
                const uint2 v = {lift_four<false>(word, by.magnitudes, by.signs), lift_four<true>(word, by.magnitudes, by.signs)};
                ptx::store_8(out + at, v);
#pragma unroll
                for (int c = 0; c < 8; ++c) mine[c * kTile + j] = u8((c < 4 ? v.x : v.y) >> (c % 4 * 8));
            }
        }
        if (warp == 0 && lane % 8 == 0 && owned > 0) {
            out_scales[(matrix * down + first_strip + i) * across + owned_panel] = u8(target);
            turned_scales[(matrix * across + owned_panel) * down + first_strip + i] = u8(target);
        }
        to += (kTile - 8) * u64(cols);
    }
    __syncthreads();

    // Stores the transposed codes: for each column one run over all strips, 16 bytes per thread if the runs are
    // 16-byte aligned, otherwise one byte per thread.
    constexpr int kStore = kWhole ? 16 : 1, kChunks = kDepth * kTile / kStore, kLines = kLiftTilesThreads / kChunks;
    const int row = threadIdx.x % kChunks * kStore, first_line = threadIdx.x / kChunks;
    const int lines = first_strip * kTile + row < rows ? cols - first_panel * kTile : 0;
    ColumnTile* const tile = shared.tile[row / kTile];
    u8* line = turned + (matrix * cols + first_panel * kTile + first_line) * rows + first_strip * kTile + row;
#pragma unroll (kWhole ? 2 * kTile / kLines : 1)
    for (int i = 0; i < 2 * kTile; i += kLines) {
        const int l = i % kTile + first_line;  // kLines divides kTile
        ColumnTile& of = tile[i / kTile];
        const bool present = i + first_line < lines;
        if constexpr (kWhole) {
            const uint4 v = of.chunk(l, row % kTile / 16);
            if (present) ptx::store_16(line, v);
        } else {
            if (present) *line = of.place(l, row % kTile / 8)[row % 8];
        }
        line += kLines * u64(rows);
    }
    tally.flush(counts, shared.total);
}

}  // namespace nib
