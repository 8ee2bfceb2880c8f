// BF16 or F32 -> blocks with scales along the rows.
//
// quantize_rows<In, E, kF32Scales, Round>: x, codes [rows][cols], scales [rows][ceil(cols / E::kBlock)]; cols is a multiple of 8.
//   row_id[rows] (null: every row counts): negative marks padding, which reads as zero and is not counted; else the number of the row
//   for random bits. counts[3] (null: not wanted) += blocks with a non-zero code, 0, blocks with a NaN or infinity.
//   128 threads; a warp takes a segment of 256 · row_chunks columns at a time; the grid is that of row_tasks.cuh, best with 16 chunks a
//   warp; no dynamic shared memory. Where every row counts and cols is a multiple of the block, the launch may pass all of x, if that is
//   less than 2^30 numbers, as one row.
//
// Measured on an H200 (share of the larger of (read + written) / 4252 GB/s and written / fill rate; 32768 x 7168, 24576
// x 2048 and 4096 x 7168): BF16 -> MXFP4 101, 86 and 78 %, E4M3 102, 93 and 84 %; rounded stochastically, MXFP4 78, 67
// and 60 %. A kernel that only reads and writes as much as E4M3 reaches 92 % of the last one: launch, first loads and
// last stores take the rest. Without the counts a point more. CTAs of 256 threads, 4 chunks a warp, or segments fetched
// ahead are slower, where there is padding by 20 points.
#pragma once
#include "pieces/convert/row_codes.cuh"

namespace nib {

template <class In, class E, bool kF32Scales, class Round>
__global__ void __launch_bounds__(kRowThreads, row_chunks<In, Round> == 8 ? 6 : 8)
    quantize_rows(const u8* __restrict__ x, u8* __restrict__ codes, ScaleOf<kF32Scales>* __restrict__ scales, u64* counts,
                  const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments, u32 rounds, PowerRule rule,
                  const RoundingArg rounding) {
    constexpr int kChunks = row_chunks<In, Round>;
    using Stored = ScaleOf<kF32Scales>;
    using Layout = RowLayout<E, kChunks>;
    using Tasks = RowTasks<kRowThreads / 32>;
    constexpr int kTogether = Layout::kTogether, kHeld = Layout::kHeld, kLanes = Layout::kLanes;
    __shared__ u32 total[3];
    const Round round(rounding);
    const int lane = threadIdx.x % 32;
    const u32 lanes_of_block = ((1u << kLanes) - 1) << (lane / kLanes * kLanes);
    const int blocks = ceil_div(cols, E::kBlock);  // of a row
    const bool is_aligned = cols * E::kCodeBits % 128 == 0;
    const Tasks tasks(row_id, rows, by_segments, segments, rounds);
    Tally tally;
#pragma unroll 1
    for (u32 to_do = tasks.present; to_do != 0; to_do &= to_do - 1) {
        const auto at = tasks.place(Tasks::next(to_do));
        const int id = __shfl_sync(kAllLanes, tasks.row_id, Tasks::next(to_do));
        const int col = at.segment * Layout::kSegmentCols + lane * 8 * kTogether, left = cols - col;
        const u64 first = u64(at.row) * cols + col;
        u8* const to = codes + first * E::kCodeBits / 8;
        Stored* const scales_to = scales + u64(at.row) * blocks;
        Stored stored[kHeld];
        if (id < 0) {
            const typename E::Eight zeros[kTogether] = {};
#pragma unroll
            for (int h = 0; h < kHeld; ++h) {
                const int c = Layout::col_of(h * kTogether);
                store_together(to + c * E::kCodeBits / 8, left - c, is_aligned, zeros);
                stored[h] = scale_of<E, kF32Scales>(0, rule).stored;
            }
            Layout::store_scales(scales_to, at.segment, blocks, stored);
            continue;
        }
        typename In::Eight in[kChunks];
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            in[i] = In::template load<true>(x + (first + Layout::col_of(i)) * In::kBytes, left - Layout::col_of(i));
        // Drawn while the numbers are on their way.
        typename Round::Bits bits[kChunks];
        if constexpr (Round::kDraws) {
            const u64 element = u64(u32(id)) * cols + col;
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                bits[i] = round.draws(element + i / kTogether * Layout::kStride).bits(i % kTogether);
                bits[i].draw_by_now();
            }
        }
        u32 amax[kHeld];
        if constexpr (Round::kDraws && kLanes == 1) amax[0] = largest_bits(in);
        else In::template block_maxima<kTogether, kLanes>(in, amax);
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            const auto scale = scale_of<E, kF32Scales>(amax[h], rule);
            stored[h] = scale.stored;
            typename E::Eight out[kTogether];
            bool any = false;
            float factor;
            auto& of_block = *reinterpret_cast<typename In::Eight(*)[kTogether]>(in + h * kTogether);
            if constexpr (Round::kDraws) factor = Round::template prepare<E>(of_block, __uint_as_float(amax[h]), scale.inverse);
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int chunk = h * kTogether + i;
                if constexpr (Round::kDraws) out[i] = round.template encode_prepared<E, In>(in[chunk], factor, bits[chunk]);
                else out[i] = round.template encode<E, kRuleFloor, In>(in[chunk], scale.inverse, bits[chunk]);
                if (scale.is_nan()) out[i] = E::zeros();
                any |= E::any(out[i]);
            }
            const int c = Layout::col_of(h * kTogether);
            store_together(to + c * E::kCodeBits / 8, left - c, is_aligned, out);
            if constexpr (Round::kDraws) {
                tally.non_zero += (__ballot_sync(kAllLanes, any) & lanes_of_block) != 0;
            } else {
                tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax[h]), scale.inverse));
            }
            tally.non_finite += scale.is_nan();
        }
        Layout::store_scales(scales_to, at.segment, blocks, stored);
    }
    tally.flush(counts, total, kLanes);
}

}  // namespace nib
