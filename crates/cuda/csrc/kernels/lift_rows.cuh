// MXFP4 rows -> E4M3 rows on the codes alone; all scales are E8M0 bytes. The twin of crates/formats/src/lift.rs.
//
// row_id[rows] (null: every row counts): negative marks padding, whose output is zero. counts[3] (null: not wanted) +=
// blocks of the source with a non-zero code, of those with a code that changed its value, blocks with a NaN.
//
// lift_rows<kWhole, kChunks>: codes [rows][cols / 2] -> [rows][cols], scales [rows][cols / 32] -> [rows][ceil(cols / 128)]; cols % 32 == 0.
//   kWhole: cols % 128 == 0. 256 threads; a warp takes a segment of kChunks · 512 columns at a time; segments = ceil(cols / that),
//   and `by_segments` divides by it. Any grid, best ceil(rows · segments / 8). Where every row counts and cols % 128 == 0, the
//   launch may pass all of x, if that is less than 2^30 numbers, as one row. Planes start on 16 bytes.
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
    __shared__ LiftTable lifts;
    __shared__ u32 total[3];
    copy_lifts(lifts);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const int sources = cols / E2m1::kBlock, targets = ceil_div(cols, E4m3::kBlock);
    const u32 tasks = u32(rows) * segments;
    Tally tally;
    for (u32 task = blockIdx.x * (kLiftThreads / 32) + threadIdx.x / 32; task < tasks; task += gridDim.x * (kLiftThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int col = segment * (kChunks * kLiftChunkCols) + lane * 16;
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const u64 at = u64(row) * cols + col;
        const int left = cols - col;
        const int first_source = col / E4m3::kBlock * 4;
        uint2 in[kChunks];
        u32 four[kChunks];  // scales of the 128 columns this lane's 16 are among
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            in[i] = {0, 0};
            four[i] = 0xFFFFFFFF;
            if (counted && left > i * kLiftChunkCols) {
                in[i] = ptx::load_8(codes + at / 2 + i * kLiftChunkCols / 2);
                four[i] = load_scales<kWhole>(scales + u64(row) * sources + first_source + i * kLiftChunkCols / 32,
                                              sources - first_source - i * kLiftChunkCols / 32);
            }
        }
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const u32 a = four[i] & 0x00FF00FF, b = four[i] >> 8 & 0x00FF00FF;
            const u32 two = ptx::max_u16x2((a + 0x00010001) & 0x00FF00FF, (b + 0x00010001) & 0x00FF00FF);
            const int target = lift_target(max(two & 0xFFFF, two >> 16));
            const u32 source = __byte_perm(four[i], 0, 0x4440 | lane / 2 % 4);
            const Lift by = lifts.entry[lift_index(source, target)];
            const bool here = left > i * kLiftChunkCols;
            // Codes of padding are 0, but its scales read as NaN: it gets zeros, and counts as nothing.
            if (here) {
                uint4 v = {0, 0, 0, 0};
                if (counted)
                    v = {lift_four<false>(in[i].x, by.magnitudes, by.signs), lift_four<true>(in[i].x, by.magnitudes, by.signs),
                         lift_four<false>(in[i].y, by.magnitudes, by.signs), lift_four<true>(in[i].y, by.magnitudes, by.signs)};
                ptx::store_16(out + at + i * kLiftChunkCols, v);
                if (lane % 8 == 0) out_scales[u64(row) * targets + (first_source + i * kLiftChunkCols / 32) / 4] = u8(target);
            }
            // Two lanes hold one block: pairs of bits, of which the lower one is counted.
            const u32 non_zero = __ballot_sync(kAllLanes, ((in[i].x | in[i].y) & 0x77777777) != 0);
            tally.non_zero += __popc((non_zero | non_zero >> 1) & 0x55555555);
            tally.non_finite += counted && here && source == kScaleNan ? 16 : 0;
            if (__any_sync(kAllLanes, by.changed != 0)) {
                const bool changed = any_changed(in[i].x, by.changed) || any_changed(in[i].y, by.changed);
                const u32 inexact = __ballot_sync(kAllLanes, changed);
                tally.inexact += __popc((inexact | inexact >> 1) & 0x55555555);
            }
        }
    }
    // Ballots counted each block in all 32 lanes.
    tally.flush(counts, total, 32);
}

}  // namespace nib
