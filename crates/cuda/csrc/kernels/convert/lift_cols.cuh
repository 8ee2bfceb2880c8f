// Converts MXFP4 codes with row blocks to E4M3 codes with column blocks, by operations on the
// codes alone. All scales are E8M0 bytes. The CPU implementation is crates/formats/src/lift.rs.
//
// row_id[rows] (null: all rows are valid): negative ids mark padding rows, whose output codes are zeros. The kernel increases counts[3] (if
// not null) by the numbers of source blocks with a non-zero code, of source blocks in which a value changed, and of source blocks with a NaN.
//
// lift_cols<kWhole, kPanels>: reads codes [rows][cols / 2] and scales [rows][cols / 32], and writes codes [cols][capacity]
//   and scales [capacity / 128][scale_stride]. capacity % 128 == 0 and cols % 32 == 0; kWhole: also cols % 128 == 0.
//   128 · kPanels threads per CTA. A CTA converts kPanels · 128 columns of `depth` strips of 128 rows; depth is at most kMostDepth. Dynamic shared memory:
//   sizeof(TurnShared<64, 4, kPanels>) bytes. Buffers are 16-byte aligned; scale_stride is at least cols, and a multiple of 2.
//
// Speed on an H200, in % of the bandwidth limit (read + written) / 4249 GB/s: 85 % at 32768 x 7168; 83 % at 24576 x 5120; 79 % at 32768 x 2048;
//   75 % at 24576 x 2048; 64 % at 4096 x 7168. If no memory is allocated in the timed window, each percentage is one to four points higher.
//   At the same shapes, in the same order, a kernel that only copies codes reaches 91, 90, 87, 84 and 70 %. ncu reports the L2 as 88 % busy.
#pragma once
#include "pieces/convert/rows_to_cols.cuh"

namespace nib {

template <bool kWhole, int kPanels>
__global__ void __launch_bounds__(kTile * kPanels, 8 / kPanels)
    lift_cols(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
              u64* counts, const int* __restrict__ row_id, int rows, int cols, int capacity, int scale_stride, int depth) {
    using Fetch = Fetcher<true, kTile / 2, 4, kPanels>;
    extern __shared__ uint4 raw[];
    auto& shared = *reinterpret_cast<typename Fetch::Shared*>(raw);
    const int sources = cols / E2m1::kBlock;
    const Strips strips(capacity / kTile, depth);
    const int first_col = strips.panel * (kPanels * kTile);
    const int scale_row = threadIdx.x / kPanels, scale_panel = threadIdx.x % kPanels;
    const int first_source = (first_col + scale_panel * kTile) / E2m1::kBlock;
    const Fetch fetcher{shared, strips, codes, row_id, rows, cols, first_col};
    fetcher.publish();
    u32 four[kMostDepth];
#pragma unroll
    for (int i = 0; i < kMostDepth; ++i) {
        const int row = strips.at(i) * kTile + scale_row;
        four[i] = 0;
        if (strips.has(i) && row < rows && first_source < sources)
            four[i] = load_scales<kWhole>(scales + u64(row) * sources + first_source, sources - first_source);
    }
    __syncthreads();
    fetcher.fetch();
#pragma unroll
    for (int i = 0; i < kMostDepth; ++i) {
        // A padding row gets scale 0, so padding cannot raise the largest scale.
        if (!fetcher.is_valid(i, scale_row)) four[i] = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) shared.scale[i][scale_panel * 4 + b][scale_row] = u8(four[i] >> (8 * b));
    }
    fetcher.wait();

    const TurnLane me;
    const int warp = threadIdx.x / 32, col = first_col + me.col();
    const bool present = strips.has(me.strip) && col < cols;
    const u8* const scale = shared.scale[me.strip][warp];
    const uint2 bytes = me.scales(scale);
    const int target = lift_target(me.largest_above_nan(bytes));
    me.store_scale(out_scales, target, strips, first_col, cols, scale_stride);
    u32 rises[2] = {0, 0}, rise[4];  // one byte per row: 8 times the number of powers of two above the lowest scale that gives normal numbers
    bool rare = false;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const u32 above = lift_index((r < 4 ? bytes.x : bytes.y) >> (r % 4 * 8) & 0xFF, target) - kLiftNormal;
        const bool normal = above < kLiftNan - kLiftNormal;
        rare |= !normal;
        rises[r / 4] |= (normal ? above * 8 : 0) << (r % 4 * 8);
    }
    me.exchange(rises, rise);

    Tally tally;
    const u8* const in = shared.codes + me.group * Fetch::Shared::kGroupBytes + me.col() / 2;
    u8* const to = out + u64(col) * capacity + strips.first * kTile + me.group * kGroupRows;
    u32 seen[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        u32 by_col[8][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 first[4], last[4], turned[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const u8* const place = in + (4 * k + r) * Fetch::Shared::kRowBytes + half * (TurnLane::kSecond / 2);
                const u32 word = *reinterpret_cast<const u32*>(place);
                const u32 up = rise[k] >> (8 * r) & 0xFF, low = up * (kEachByte & ~0xFFu) + kLiftLow, high = up * kEachByte + kLiftHigh;
                first[r] = lift_word<false>(word, low, high);
                last[r] = lift_word<true>(word, low, high);
            }
            turn_4x4(first, turned);
#pragma unroll
            for (int c = 0; c < 4; ++c) by_col[c][k] = turned[c], seen[k] |= turned[c];
            turn_4x4(last, turned);
#pragma unroll
            for (int c = 0; c < 4; ++c) by_col[4 + c][k] = turned[c], seen[k] |= turned[c];
        }
        u8* line = to + u64(half * TurnLane::kSecond) * capacity;
        if (present) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                ptx::store_16(line, {by_col[c][0], by_col[c][1], by_col[c][2], by_col[c][3]});
                line += capacity;
            }
        }
    }
    u32 any = 0;  // one bit per row
#pragma unroll
    for (int k = 0; k < 4; ++k) any |= (((seen[k] & 0x7F7F7F7F) + 0x7F7F7F7F) & 0x80808080) >> (7 - k);
    // Two lanes share each block.
    any |= __shfl_xor_sync(kAllLanes, any, 1);
    if (!me.odd && present) tally.non_zero += __popc(any);
    if (__any_sync(kAllLanes, rare)) {
        // Rows with a NaN, or with a scale far below the largest scale, are
        // recomputed through the lookup table. Blocks of zeros are already correct.
        u32 inexact = 0;
#pragma unroll 1
        for (int j = 0; j < kGroupRows; ++j) {
            const u32 source = scale[me.row() + j], entry = lift_index(source, target);
            if (lifts_to_normal(entry)) continue;
            const Lift& by = kLiftTable.entry[entry];
            tally.non_finite += source == kScaleNan && !me.odd && present;
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                const u32 word = *reinterpret_cast<const u32*>(in + j * Fetch::Shared::kRowBytes + half * (TurnLane::kSecond / 2));
                if ((word & 0x77777777) == 0 && source != kScaleNan) continue;
                const uint2 v = {lift_four<false>(word, by.magnitudes, by.signs), lift_four<true>(word, by.magnitudes, by.signs)};
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    if (present) to[u64(half * TurnLane::kSecond + c) * capacity + j] = u8((c < 4 ? v.x : v.y) >> (c % 4 * 8));
                if (any_changed(word, by.changed)) inexact |= 1u << j;
            }
        }
        inexact |= __shfl_xor_sync(kAllLanes, inexact, 1);
        if (!me.odd) tally.inexact += __popc(inexact);
    }
    tally.flush(counts, shared.total);
}

}  // namespace nib
