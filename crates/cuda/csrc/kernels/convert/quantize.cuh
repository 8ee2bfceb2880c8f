// BF16 or F32 -> blocks with scales along the rows; and what the other quantizing kernels have in common with that.
//
// quantize_rows<In, E, kF32Scales, Round>: x, codes [rows][cols], scales [rows][ceil(cols / E::kBlock)]; cols is a multiple of 8.
//   row_id[rows] (null: every row counts): negative marks padding, which reads as zero and is not counted; else the number of the row
//   for random bits. counts[3] (null: not wanted) += blocks with a non-zero code, 0, blocks with a NaN or infinity.
//   128 threads; a warp takes a segment of 256 · row_chunks columns at a time; the grid is that of row_tasks.cuh, best with 16 chunks a
//   warp; no dynamic shared memory. Where every row counts and cols is a multiple of the block, the launch may pass all of x, if that is
//   less than 2^30 numbers, as one row.
//
// Measured on an H200 (share of the larger of (read + written) / 4252 GB/s and written / fill rate; 32768 x 7168, 24576 x 2048 and
// 4096 x 7168): BF16 -> MXFP4 101, 86 and 78 %, E4M3 102, 93 and 84 %; rounded stochastically, MXFP4 78, 67 and 60 %. A kernel that only
// reads and writes as much as E4M3 reaches 92 % of the last one: launch, first loads and last stores take the rest. Without the counts
// a point more. Ctas of 256 threads, 4 chunks a warp, segments fetched ahead: less, where there is padding by 20 points.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "pieces/convert/row_tasks.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kRowThreads = 128;
constexpr int kChunkCols = 256;

/// Eights of columns that a lane takes at a time: as many as registers hold.
template <class In, class Round>
constexpr int row_chunks = In::kBytes == 2 && !Round::kDraws ? 8 : 4;

/// The codes of eight columns, none from the `left`-th on.
template <class E, bool kAligned>
__device__ __forceinline__ void store_codes(u8* to, int left, typename E::Eight codes) {
    if constexpr (E::kCodeBits == 4) {
        if (left > 0) ptx::store_4(to, codes);
    } else if constexpr (kAligned) {
        if (left > 0) ptx::store_8(to, codes);
    } else {
        const u64 bytes = codes.x | u64(codes.y) << 32;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left) to[i] = u8(bytes >> (8 * i));
    }
}

/// The codes of neighbouring eights of a lane, none from the `left`-th column on; they lie within one block. is_aligned: rows start on 16
/// bytes.
__device__ __forceinline__ void store_together(u8* to, int left, bool is_aligned, const uint2 (&codes)[2]) {
    if (is_aligned) {
        if (left > 0) ptx::store_16(to, {codes[0].x, codes[0].y, codes[1].x, codes[1].y});
        return;
    }
    if (left > 0) ptx::store_8(to, codes[0]);
    if (left > 8) ptx::store_8(to + 8, codes[1]);
}
__device__ __forceinline__ void store_together(u8* to, int left, bool, const u32 (&codes)[4]) {
    if (left > 0) ptx::store_16(to, {codes[0], codes[1], codes[2], codes[3]});
}

/// The F32 bits of the largest magnitude of 32 numbers; with fewer instructions than In::block_maxima, where these count.
__device__ __forceinline__ u32 largest_bits(const Bf16::Eight (&x)[4]) {
    u32 two = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 a = ptx::max_magnitude_bf16x2(x[i].word[0], x[i].word[1]), b = ptx::max_magnitude_bf16x2(x[i].word[2], x[i].word[3]);
        two = ptx::max_magnitude_bf16x2(two, ptx::max_magnitude_bf16x2(a, b));
    }
    return max(two << 16 & 0x7FFFFFFF, two & 0x7FFF0000);
}

/// One of these, by an index that is not known before.
template <class Stored, int kCount>
__device__ __forceinline__ Stored pick(const Stored (&of)[kCount], int i) {
    Stored picked = of[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) picked = i == j ? of[j] : picked;
    return picked;
}

/// How a warp divides a segment of a row: `kTogether` eights of a lane are neighbours, whose codes are 16 bytes. In MXFP4 that is a whole
/// block, so that no lanes need to agree.
template <class E, int kChunks>
struct RowLayout {
    static constexpr int kTogether = 16 / E::kCodeBits;
    static constexpr int kHeld = kChunks / kTogether;             // blocks a lane has a part of
    static constexpr int kLanes = E::kBlock / (8 * kTogether);    // of one block
    static constexpr int kStride = kChunkCols * kTogether;        // columns from one of them to the next
    static constexpr int kSegmentCols = kChunks * kChunkCols;

    /// Columns from the lane's first one to its chunk i.
    __device__ __forceinline__ static constexpr int col_of(int i) { return i / kTogether * kStride + i % kTogether * 8; }

    /// Stores the scales of a segment of a row of `blocks`: lanes of a block those of their blocks, one each, so that neighbours are stored
    /// together.
    template <class Stored>
    __device__ __forceinline__ static void store_scales(Stored* row, u32 segment, int blocks, const Stored (&of)[kHeld]) {
        const int lane = threadIdx.x % 32, mine = lane % kLanes;
#pragma unroll
        for (int first = 0; first < kHeld; first += kLanes) {
            const int held = first + mine;
            const int block = segment * (kSegmentCols / E::kBlock) + held * (kStride / E::kBlock) + lane / kLanes;
            if (held < kHeld && block < blocks) row[block] = kLanes == 1 ? of[first] : pick(of, held);
        }
    }
};

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
