// Converts MXFP4 rows to E4M3 rows by operations on the codes alone. All scales are E8M0 bytes. The CPU implementation is crates/formats/src/lift.rs.
//
// row_id[rows] (null: all rows are valid): negative ids mark padding rows, which the kernel neither
// reads nor writes. If counts[3] is not null, the kernel adds three numbers to it: source blocks
// with a non-zero code, source blocks in which a value changed, and source blocks with a NaN.
//
// lift_rows<kWhole, kChunks>: reads codes [rows][cols / 2] and scales [rows][cols / 32], and writes codes [rows][cols] and
//   scales [rows][ceil(cols / 128)]. cols % 32 == 0; kWhole: also cols % 128 == 0. 128 threads per CTA. A warp converts a
//   segment of kChunks · 512 columns at a time, and prefetches its next segment. row_tasks.cuh defines the grid. If all rows
//   are valid and cols % 128 == 0, the launch may pass x as one row of less than 2^30 values. Buffers are 16-byte aligned.
//
// Speed on an H200, in % of the bandwidth limit max((read + written) / 4252 GB/s, written / fill rate): 92 % at 32768 x 7168, 80 %
// at 24576 x 2048, 71 % at 4096 x 7168. A kernel that only writes twice as many bytes as it reads reaches 94 % at 32768 x 7168, and
// 80 % at 4096 x 7168. If there are padding rows, prefetching the next segment is faster; otherwise one segment per warp is fastest.
#pragma once
#include "math/reduce.cuh"
#include "pieces/convert/lift.cuh"
#include "pieces/convert/row_tasks.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kLiftThreads = 128;
constexpr int kLiftChunkCols = 512;

template <bool kWhole, int kChunks>
__global__ void __launch_bounds__(kLiftThreads, kChunks == 8 ? 6 : 8)
    lift_rows(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
              u64* counts, const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments, u32 rounds) {
    static_assert(kChunks <= 8, "a lane for each target block of a segment");
    using Tasks = RowTasks<kLiftThreads / 32>;
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32;
    const int sources = cols / E2m1::kBlock, targets = ceil_div(cols, E4m3::kBlock);
    const Tasks tasks(row_id, rows, by_segments, segments, rounds);
    Tally tally;

    struct Segment {
        uint2 codes[kChunks];
        u32 scales;  // in the first lanes of the warp: the four source scales of 128 columns
    };
    struct Place {
        u64 at;      // index of the element in the first column of this lane
        int left;    // number of columns from the first column of this lane to the row's end
        int block;   // index of the block of 128 columns
        u32 row;
        bool mine;   // true if the block lies inside the row and this lane has the block's scales
    };
    const auto place = [&](u32 rounds_left) {
        const auto task = tasks.place(Tasks::next(rounds_left));
        const int first_col = task.segment * (kChunks * kLiftChunkCols), col = first_col + lane * 16;
        const int block = first_col / E4m3::kBlock + lane;
        return Place{u64(task.row) * cols + col, cols - col, block, task.row, lane < 4 * kChunks && block < targets};
    };
    const auto fetch = [&](u32 rounds_left) {
        Segment segment;
        const Place to = place(rounds_left);
        const bool exists = rounds_left != 0;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            segment.codes[i] = {0, 0};
            if (exists && to.left > i * kLiftChunkCols)
                segment.codes[i] = ptx::load_8(codes + to.at / 2 + i * kLiftChunkCols / 2);
        }
        segment.scales = 0xFFFFFFFF;
        if (exists && to.mine)
            segment.scales = load_scales<kWhole>(scales + u64(to.row) * sources + 4 * to.block, sources - 4 * to.block);
        return segment;
    };
    const auto store = [&](const Place& to, int chunk, uint2 in, uint2 magnitudes, u32 signs) {
        if (to.left > chunk * kLiftChunkCols)
            ptx::store_16(out + to.at + chunk * kLiftChunkCols,
                          {lift_four<false>(in.x, magnitudes, signs), lift_four<true>(in.x, magnitudes, signs),
                           lift_four<false>(in.y, magnitudes, signs), lift_four<true>(in.y, magnitudes, signs)});
        // Two lanes share each block, so only the lower bit of each pair of bits is counted.
        const u32 non_zero = __ballot_sync(kAllLanes, ((in.x | in.y) & E2m1::kMagnitudes) != 0);
        tally.non_zero += __popc((non_zero | non_zero >> 1) & 0x55555555);
    };

    u32 left = tasks.counted;
    Segment now = fetch(left);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
        const Segment next = fetch(left & (left - 1));
        const Place to = place(left);
        const int here = to.mine ? sources - 4 * to.block : 0;  // number of source blocks, at most four
        const u32 even = above_nan_x2(now.scales), odd = above_nan_x2(now.scales >> 8);
        const u32 two = ptx::max_u16x2(even, odd);
        const int target = lift_target(max(two & 0xFFFF, two >> 16));
        if (to.mine) out_scales[u64(to.row) * targets + to.block] = u8(target);
        u32 entries = 0;
        bool rare = false;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 source = now.scales >> (8 * k) & 0xFF, entry = lift_index(source, target);
            rare |= k < here && !lifts_to_normal(entry);
            tally.non_finite += k < here && source == kScaleNan ? 32 : 0;
            entries |= entry << (8 * k);
        }
        const auto entry_of = [&](int chunk) {
            return __shfl_sync(kAllLanes, entries, chunk * 4 + lane / 8) >> (lane / 2 % 4 * 8) & 0xFF;
        };
        if (!__any_sync(kAllLanes, rare)) {
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const u32 rise = (entry_of(i) - kLiftNormal) * kLiftOctave;
                store(to, i, now.codes[i], {kLiftLow + (rise & 0xFFFFFF00), kLiftHigh + rise}, 0x80808080);
            }
        } else {
            // Blocks with a NaN or a rare scale go through the lookup table. This
            // path reads the codes again, because rereading needs less code.
#pragma unroll 1
            for (int i = 0; i < kChunks; ++i) {
                uint2 in = {0, 0};
                if (to.left > i * kLiftChunkCols) in = ptx::load_8(codes + to.at / 2 + i * kLiftChunkCols / 2);
                const Lift by = kLiftTable.entry[entry_of(i)];
                store(to, i, in, by.magnitudes, by.signs);
                const bool changed = by.changed != 0 && (any_changed(in.x, by.changed) || any_changed(in.y, by.changed));
                const u32 inexact = __ballot_sync(kAllLanes, changed);
                tally.inexact += __popc((inexact | inexact >> 1) & 0x55555555);
            }
        }
        now = next;
    }
    // Ballots have given all 32 lanes the same counts, which include every block of the warp.
    tally.flush(counts, total, 32);
}

}  // namespace nib
