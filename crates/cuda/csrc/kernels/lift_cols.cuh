// MXFP4 rows -> E4M3 columns on the codes alone; all scales are E8M0 bytes. The twin of crates/formats/src/lift.rs.
//
// row_id[rows] (null: every row counts): negative marks padding, whose output is zero. counts[3] (null: not wanted) +=
// blocks of the source with a non-zero code, of those with a code that changed its value, blocks with a NaN.
//
// lift_cols<kWhole, kPanels>: codes [rows][cols / 2], scales [rows][cols / 32] -> codes [cols][capacity], scales
//   [cols][capacity / 128], or if `block_scales` is not null there, [capacity / 128][cols / 32]; capacity % 128 == 0,
//   cols % 32 == 0; kWhole: cols % 128 == 0. 128 · kPanels threads; a cta for each kPanels · 128 columns of each `depth` strips
//   of 128 rows, depth at most kMostDepth. sizeof(TurnShared<64, 4, kPanels>) dynamic shared memory. Planes start on 16 bytes.
//
// Measured on an H200 (share of the larger of (read + written) / 4288 GB/s and written / fill rate):
//   32768 x 7168 76 %, in 32 uneven groups 73 %; 24576 x 5120 72 %; 32768 x 2048 71 %; 4096 x 7168 62 %. Without any scales the same
//   loads and stores reach 87 %, with those of the source 83 %.
#pragma once
#include "kernels/turn.cuh"

namespace nib {

/// Eight rows of eight 4-bit codes to eight columns.
__device__ __forceinline__ void turn_nibbles(const u32* row, u32 (&col)[8]) {
    u32 even[4], odd[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const u32 a = row[2 * p], b = row[2 * p + 1];
        even[p] = (a & 0x0F0F0F0F) | (b << 4 & 0xF0F0F0F0);
        odd[p] = (a >> 4 & 0x0F0F0F0F) | (b & 0xF0F0F0F0);
    }
    u32 of_even[4], of_odd[4];
    turn_4x4(even, of_even);
    turn_4x4(odd, of_odd);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        col[2 * i] = of_even[i];
        col[2 * i + 1] = of_odd[i];
    }
}

/// Codes of four rows of a column, each by its own rise above the lowest scale that gives normal numbers.
template <bool kHigh>
__device__ __forceinline__ u32 lift_by(u32 codes, const uint2& lowest, const uint2& not_zero, u32 rise) {
    const u32 selector = (kHigh ? codes >> 16 : codes) & 0x7777;
    const u32 sign = __byte_perm(codes, codes << 4, kHigh ? 0x3726 : 0x1504) & 0x80808080;
    return (__byte_perm(lowest.x, lowest.y, selector) + (rise & __byte_perm(not_zero.x, not_zero.y, selector))) | sign;
}

template <bool kWhole, int kPanels>
__global__ void __launch_bounds__(kTile * kPanels, 8 / kPanels)
    lift_cols(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
              u8* __restrict__ block_scales, u64* counts, const int* __restrict__ row_id, int rows, int cols, int capacity,
              int depth) {
    using Fetch = Fetcher<true, kTile / 2, 4, kPanels>;
    extern __shared__ uint4 raw[];
    auto& shared = *reinterpret_cast<typename Fetch::Shared*>(raw);
    const int down = capacity / kTile, sources = cols / E2m1::kBlock;
    const Strips strips(down, depth);
    const int first_col = strips.panel * (kPanels * kTile);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, in_col = warp * 32 + lane % 4 * 8;
    const int scale_row = threadIdx.x / kPanels, scale_panel = threadIdx.x % kPanels;
    const int first_source = (first_col + scale_panel * kTile) / E2m1::kBlock;
    auto load_scale = [&](int strip) -> u32 {
        const int row = strip * kTile + scale_row;
        if (row >= rows || first_source >= sources) return 0;
        return load_scales<kWhole>(scales + u64(row) * sources + first_source, sources - first_source);
    };
    Fetch fetcher{shared, codes, row_id, rows, cols, first_col};
    // From memory, so that these stay in registers: a PRMT takes one constant at most.
    const uint4 lift = ptx::load_16(&kLiftTable.entry[kLiftNormal]);
    const uint2 lowest = {lift.x, lift.y}, not_zero = {(lift.z | 0x7F7F7F7F) << 8, lift.z | 0x7F7F7F7F};

    fetcher.publish(0, fetcher.counts(strips.at(0)));
    u32 four = load_scale(strips.at(0));
    bool ahead = strips.has(1) && fetcher.counts(strips.at(1));
    __syncthreads();
    fetcher.fetch(strips.at(0), 0);
    Tally tally;
    const int col = first_col + in_col;
    for (int i = 0; strips.has(i); ++i) {
        const int slot = i % 2;
        // A scale of 0 is never the largest.
        if (!fetcher.is_valid(slot, scale_row)) four = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) shared.scale[slot][scale_panel * 4 + b][scale_row] = u8(four >> (8 * b));
        fetcher.publish(slot ^ 1, ahead);
        ptx::copies_wait();
        __syncthreads();
        if (strips.has(i + 1)) fetcher.fetch(strips.at(i + 1), slot ^ 1);
        four = strips.has(i + 1) ? load_scale(strips.at(i + 1)) : 0;
        ahead = strips.has(i + 2) && fetcher.counts(strips.at(i + 2));

        // Each lane looks after the scales of four rows.
        const u8* const scale = shared.scale[slot][warp];
        const u32 of_rows = *reinterpret_cast<const u32*>(scale + lane * 4);
        u32 largest = 0;
#pragma unroll
        for (int r = 0; r < 4; ++r) largest = max(largest, above_nan(of_rows >> (8 * r) & 0xFF));
        const int target = lift_target(__reduce_max_sync(kAllLanes, largest));
        if (lane == 0) shared.targets[i][warp] = u8(target);
        u32 rises = 0;
        bool rare = false;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 above = lift_index(of_rows >> (8 * r) & 0xFF, target) - kLiftNormal;
            const bool normal = above < kLiftNan - kLiftNormal;
            rare |= !normal;
            rises |= (normal ? above * 8 : 0) << (8 * r);
        }
        u32 rise[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) rise[k] = __shfl_sync(kAllLanes, rises, group * 4 + k);

        const u8* const in = shared.codes[slot] + group * Fetch::Shared::kGroupBytes + in_col / 2;
        u32 by_row[kGroupRows], by_col[2][8], seen[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < kGroupRows; ++j) by_row[j] = *reinterpret_cast<const u32*>(in + j * Fetch::Shared::kRowBytes);
        turn_nibbles(by_row, by_col[0]);
        turn_nibbles(by_row + 8, by_col[1]);
        u8* const to = out + u64(col) * capacity + strips.at(i) * kTile + group * kGroupRows;
        u8* line = to;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const u32 a = by_col[0][c], b = by_col[1][c];
            seen[0] |= a;
            seen[1] |= b;
            if (col < cols)
                ptx::store_16(line, {lift_by<false>(a, lowest, not_zero, rise[0]), lift_by<true>(a, lowest, not_zero, rise[1]),
                                     lift_by<false>(b, lowest, not_zero, rise[2]), lift_by<true>(b, lowest, not_zero, rise[3])});
            line += capacity;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Four lanes hold a block.
            seen[half] |= __shfl_xor_sync(kAllLanes, seen[half], 1);
            seen[half] |= __shfl_xor_sync(kAllLanes, seen[half], 2);
            if (lane % 4 == 0) tally.non_zero += __popc(((seen[half] & 0x77777777) + 0x77777777) & 0x88888888);
        }
        if (__any_sync(kAllLanes, rare)) {
            // Rows with a NaN, or that move far: again, through the table. Zeros are right already.
            u32 inexact = 0;
#pragma unroll 1
            for (int j = 0; j < kGroupRows; ++j) {
                const u32 source = scale[group * kGroupRows + j], entry = lift_index(source, target);
                const u32 word = *reinterpret_cast<const u32*>(in + j * Fetch::Shared::kRowBytes);
                if (lifts_to_normal(entry) || ((word & 0x77777777) == 0 && source != kScaleNan)) continue;
                const Lift& by = kLiftTable.entry[entry];
                const uint2 v = {lift_four<false>(word, by.magnitudes, by.signs), lift_four<true>(word, by.magnitudes, by.signs)};
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    if (col < cols) to[u64(c) * capacity + j] = u8((c < 4 ? v.x : v.y) >> (c % 4 * 8));
                if (any_changed(word, by.changed)) inexact |= 1u << j;
                tally.non_finite += source == kScaleNan && lane % 4 == 0 && col < cols;
            }
            inexact |= __shfl_xor_sync(kAllLanes, inexact, 1);
            inexact |= __shfl_xor_sync(kAllLanes, inexact, 2);
            if (lane % 4 == 0) tally.inexact += __popc(inexact);
        }
    }
    store_scales(shared.targets, strips, block_scales, out_scales, E2m1::kBlock, cols, down);
    tally.flush(counts, shared.total);
}

}  // namespace nib
