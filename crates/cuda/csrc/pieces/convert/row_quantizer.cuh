// Quantizes along the rows for any destination of the codes. quantize_rows and quantize_pack share this code.
#pragma once
#include "pieces/convert/row_codes.cuh"

namespace nib {

/// The number of CTAs per SM, for a kernel that quantizes along the rows.
template <class In, class Round>
constexpr int kRowCtas = row_chunks<In, Round> == 8 ? 6 : 8;

/// Several rows that are passed as one row, some of which may be padding. `row_id` has the
/// id of each row; it is null if rows are passed separately, or if all rows are valid.
struct FoldedRows {
    const int* row_id;
    Divider by_cols;
    u32 cols;  // number of columns of each row
};

/// The source matrix, and the segments that a warp processes.
struct RowSource {
    const u8* __restrict__ x;
    const int* __restrict__ row_id;
    int rows;
    int cols;
    Divider by_segments;
    u32 segments;
    u32 rounds;
    FoldedRows folded;
};

/// Quantizes the segments of a warp in sequence. `sink` receives each segment through three calls: `begin(row, segment,
/// col)` passes the segment's start and this lane's first column; `put(h, codes, scale)` passes the codes of the lane's
/// h-th block; `end(scales)` passes the scales of all the lane's blocks. `total` is shared memory that no other code uses.
template <class In, class E, bool kF32Scales, class Round, class Sink>
__device__ __forceinline__ void quantize_segments(const RowSource& of, u64* counts, u32 (&total)[3], PowerRule rule, const Round& round, Sink& sink) {
    constexpr int kChunks = row_chunks<In, Round>;
    using Stored = ScaleOf<kF32Scales>;
    using Layout = RowLayout<E, kChunks>;
    using Tasks = RowTasks<kRowThreads / 32>;
    constexpr int kTogether = Layout::kTogether, kHeld = Layout::kHeld, kLanes = Layout::kLanes;
    const int lane = threadIdx.x % 32;
    const u32 lanes_of_block = ((1u << kLanes) - 1) << (lane / kLanes * kLanes);
    const Tasks tasks(of.row_id, of.rows, of.by_segments, of.segments, of.rounds);
    Tally tally;
#pragma unroll 1
    for (u32 to_do = tasks.present; to_do != 0; to_do &= to_do - 1) {
        const auto at = tasks.place(Tasks::next(to_do));
        const int id = __shfl_sync(kAllLanes, tasks.row_id, Tasks::next(to_do));
        const int col = at.segment * Layout::kSegmentCols + lane * 8 * kTogether, left = of.cols - col;
        const u64 first = u64(at.row) * of.cols + col;
        sink.begin(at.row, at.segment, col);
        Stored stored[kHeld];
        if (id < 0) {
            const typename E::Eight zeros[kTogether] = {};
#pragma unroll
            for (int h = 0; h < kHeld; ++h) {
                stored[h] = scale_of<E, kF32Scales>(0, rule).stored;
                sink.put(h, zeros, stored[h]);
            }
            sink.end(stored);
            continue;
        }
        typename In::Eight in[kChunks];
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            in[i] = In::template load<true>(of.x + (first + Layout::col_of(i)) * In::kBytes, left - Layout::col_of(i));
        u64 element[kHeld];  // index of the lane's first value of each block, for random bits
#pragma unroll
        for (int h = 0; h < kHeld; ++h) element[h] = u64(u32(id)) * of.cols + col + h * Layout::kStride;
        if (of.folded.row_id != nullptr) {
#pragma unroll
            for (int h = 0; h < kHeld; ++h) {
                const u32 place = col + h * Layout::kStride, row = of.folded.by_cols.divide(place);
                const int folded_id = place < u32(of.cols) ? __ldg(of.folded.row_id + row) : 0;
                element[h] = u64(u32(folded_id)) * of.folded.cols + (place - row * of.folded.cols);
                if (folded_id >= 0) continue;
#pragma unroll
                for (int i = 0; i < kTogether; ++i) in[h * kTogether + i] = {};
            }
        }
        // Random bits are generated while the loads are in flight.
        typename Round::Bits bits[kChunks];
        if constexpr (Round::kDraws) {
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                bits[i] = round.draws(element[i / kTogether]).bits(i % kTogether);
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
            sink.put(h, out, stored[h]);
            if constexpr (Round::kDraws) {
                tally.non_zero += (__ballot_sync(kAllLanes, any) & lanes_of_block) != 0;
            } else {
                tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax[h]), scale.inverse));
            }
            tally.non_finite += scale.is_nan();
        }
        sink.end(stored);
    }
    tally.flush(counts, total, kLanes);
}

}  // namespace nib
