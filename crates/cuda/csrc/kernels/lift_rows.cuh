// MXFP4 rows -> E4M3 rows on the codes alone; all scales are E8M0 bytes. The twin of crates/formats/src/lift.rs.
//
// row_id[rows] (null: every row counts): negative marks padding, whose output is zero. counts[3] (null: not wanted) +=
// blocks of the source with a non-zero code, of those with a code that changed its value, blocks with a NaN.
//
// lift_rows<kWhole, kChunks>: codes [rows][cols / 2] -> [rows][cols], scales [rows][cols / 32] -> [rows][ceil(cols / 128)];
//   cols % 32 == 0; kWhole: cols % 128 == 0. 256 threads; a warp takes a segment of kChunks · 512 columns at a time; segments = ceil(cols / that),
//   and `by_segments` divides by it. Any grid, best ceil(rows · segments / 8). Where every row counts and cols % 128 == 0, the
//   launch may pass all of x, if that is less than 2^30 numbers, as one row. Planes start on 16 bytes.
//
// Measured on an H200 (share of the larger of (read + written) / 4288 GB/s and written / fill rate):
//   32768 x 7168 92 %, in 32 uneven groups 91 %; 24576 x 5120 89 %; 32768 x 2048 83 %; 4096 x 7168 72 %. A kernel that only copies
//   eight bytes to sixteen: 94, -, 91, - and 80 %.
#pragma once
#include "kernels/lift.cuh"
#include "math/reduce.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kLiftThreads = 256;
constexpr int kLiftChunkCols = 512;

template <bool kWhole, int kChunks>
__global__ void __launch_bounds__(kLiftThreads)
    lift_rows(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
              u64* counts, const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments) {
    static_assert(kChunks <= 8, "a lane for each target block of a segment");
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32;
    const int sources = cols / E2m1::kBlock, targets = ceil_div(cols, E4m3::kBlock);
    const u32 tasks = u32(rows) * segments;
    Tally tally;
    for (u32 task = blockIdx.x * (kLiftThreads / 32) + threadIdx.x / 32; task < tasks; task += gridDim.x * (kLiftThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int first_col = segment * (kChunks * kLiftChunkCols), col = first_col + lane * 16;
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const u64 at = u64(row) * cols + col;
        const int left = cols - col;
        uint2 in[kChunks];
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            in[i] = {0, 0};
            if (counted && left > i * kLiftChunkCols) in[i] = ptx::load_8(codes + at / 2 + i * kLiftChunkCols / 2);
        }

        // The first lanes look after the scales of 128 columns each.
        const int block = first_col / E4m3::kBlock + lane;
        const bool mine = lane < 4 * kChunks && block < targets;
        const int here = mine && counted ? sources - 4 * block : 0;  // source blocks, four at most
        u32 four = 0xFFFFFFFF;
        if (here > 0) four = load_scales<kWhole>(scales + u64(row) * sources + 4 * block, here);
        const u32 even = above_nan_x2(four), odd = above_nan_x2(four >> 8);
        const u32 two = ptx::max_u16x2(even, odd);
        const int target = lift_target(max(two & 0xFFFF, two >> 16));
        if (mine) out_scales[u64(row) * targets + block] = u8(target);
        u32 entries = 0;
        bool rare = false;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 source = four >> (8 * k) & 0xFF, entry = lift_index(source, target);
            rare |= k < here && !lifts_to_normal(entry);
            tally.non_finite += k < here && source == kScaleNan ? 32 : 0;
            entries |= entry << (8 * k);
        }
        const bool any_rare = __any_sync(kAllLanes, rare);

#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const u32 entry = __shfl_sync(kAllLanes, entries, i * 4 + lane / 8) >> (lane / 2 % 4 * 8) & 0xFF;
            Lift by;
            if (any_rare) {
                by = kLiftTable.entry[entry];
            } else {
                const u32 rise = (entry - kLiftNormal) * kLiftOctave;
                by = {{kLiftLow + (rise & 0xFFFFFF00), kLiftHigh + rise}, 0x80808080, 0};
            }
            if (left > i * kLiftChunkCols) {
                uint4 v = {0, 0, 0, 0};
                if (counted)
                    v = {lift_four<false>(in[i].x, by.magnitudes, by.signs), lift_four<true>(in[i].x, by.magnitudes, by.signs),
                         lift_four<false>(in[i].y, by.magnitudes, by.signs), lift_four<true>(in[i].y, by.magnitudes, by.signs)};
                ptx::store_16(out + at + i * kLiftChunkCols, v);
            }
            // Two lanes hold one block: pairs of bits, of which the lower one is counted.
            const u32 non_zero = __ballot_sync(kAllLanes, ((in[i].x | in[i].y) & 0x77777777) != 0);
            tally.non_zero += __popc((non_zero | non_zero >> 1) & 0x55555555);
            if (any_rare) {
                const bool changed = by.changed != 0 && (any_changed(in[i].x, by.changed) || any_changed(in[i].y, by.changed));
                const u32 inexact = __ballot_sync(kAllLanes, changed);
                tally.inexact += __popc((inexact | inexact >> 1) & 0x55555555);
            }
        }
    }
    // Ballots counted each block in all 32 lanes.
    tally.flush(counts, total, 32);
}

}  // namespace nib
