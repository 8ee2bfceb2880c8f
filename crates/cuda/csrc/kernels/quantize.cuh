// BF16 or F32 -> blocks with scales along the rows; and what the other quantizing kernels have in common with that.
//
// quantize_rows<In, E, kF32Scales, Round>: x, codes [rows][cols], scales [rows][ceil(cols / E::kBlock)]; cols is a multiple of 8.
//   row_id[rows] (null: every row counts): negative marks padding, which reads as zero and is not counted; else the number of the row
//   for random bits. counts[3] (null: not wanted) += blocks with a non-zero code, 0, blocks with a NaN or infinity.
//   256 threads; a warp takes a segment of 1024 columns at a time; segments = ceil(cols / 1024), and `by_segments` divides by it.
//   Any grid, best ceil(rows · segments / 8) but at most 32 ctas a multiprocessor; no dynamic shared memory. Where every row counts and
//   cols is a multiple of the block, the launch may pass all of x, if that is less than 2^30 numbers, as one row.
//
// Measured on an H200 (share of the larger of (read + written) / 4288 GB/s and written / fill rate; 32768 x 7168, and 4096 x 7168):
//   BF16 -> MXFP4 98 % (74 %), E4M3 93 % (86 %); rounded stochastically 66 % (50 %) and 64 % (55 %); after a transform of length 64
//   53 % (37 %) and 80 % (54 %). In 32 uneven groups 97 % and 90 %.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kRowChunks = 4;
constexpr int kRowThreads = 256;
constexpr int kChunkCols = 256;
constexpr int kSegmentCols = kRowChunks * kChunkCols;

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

/// The codes of neighbouring eights of a lane, none from the `left`-th column on; several lie within one block.
template <class E>
__device__ __forceinline__ void store_together(u8* to, int left, const typename E::Eight (&codes)[1]) {
    store_codes<E, true>(to, left, codes[0]);
}
template <class E>
__device__ __forceinline__ void store_together(u8* to, int left, const u32 (&codes)[4]) {
    if (left > 0) ptx::store_16(to, {codes[0], codes[1], codes[2], codes[3]});
}

/// Of lanes that share a block, each keeps the scale of the chunk it stores.
template <class Stored, int kCount>
__device__ __forceinline__ Stored pick(const Stored (&of)[kCount], int i) {
    Stored picked = of[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) picked = i == j ? of[j] : picked;
    return picked;
}

/// How a warp divides a segment of a row: `kTogether` eights of a lane are neighbours. A whole block where it is short, for then no lanes
/// need to agree; else loads of a warp leave no gaps.
template <class E>
struct RowLayout {
    static constexpr int kTogether = E::kBlock == 32 ? 4 : 1;
    static constexpr int kHeld = kRowChunks / kTogether;          // blocks a lane has a part of
    static constexpr int kLanes = E::kBlock / (8 * kTogether);    // of one block
    static constexpr int kStride = kChunkCols * kTogether;        // columns from one of them to the next
    static_assert(kLanes == 1 ? kHeld == 1 : kLanes >= kHeld, "a lane of each block stores the scale of one");
};

template <class In, class E, bool kF32Scales, class Round>
__global__ void __launch_bounds__(kRowThreads, 4)
    quantize_rows(const u8* __restrict__ x, u8* __restrict__ codes, ScaleOf<kF32Scales>* __restrict__ scales, u64* counts,
                  const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments, PowerRule rule,
                  const RoundingArg rounding) {
    using Stored = ScaleOf<kF32Scales>;
    using Layout = RowLayout<E>;
    constexpr int kTogether = Layout::kTogether, kHeld = Layout::kHeld, kLanes = Layout::kLanes;
    __shared__ u32 total[3];
    const Round round(rounding);
    const int lane = threadIdx.x % 32;
    const u32 lanes_of_block = ((1u << kLanes) - 1) << (lane / kLanes * kLanes);
    const int blocks = ceil_div(cols, E::kBlock);  // of a row
    const u64 row_bytes = u64(cols) * E::kCodeBits / 8;
    const u32 tasks = u32(rows) * segments;
    Tally tally;
#pragma unroll 1
    for (u32 task = blockIdx.x * (kRowThreads / 32) + threadIdx.x / 32; task < tasks; task += gridDim.x * (kRowThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int col = segment * kSegmentCols + lane * 8 * kTogether;
        const int id = row_id == nullptr ? row : __ldg(row_id + row);
        const u8* from = x + (u64(row) * cols + col) * In::kBytes;
        const auto col_of = [](int i) { return i / kTogether * Layout::kStride + i % kTogether * 8; };  // of chunk i, from col on
        typename In::Eight in[kRowChunks];
#pragma unroll
        for (int i = 0; i < kRowChunks; ++i) {
            const int left = id >= 0 ? cols - col - col_of(i) : 0;
            const u8* const at = from + col_of(i) * In::kBytes;
            if constexpr (kTogether == 1) in[i] = In::template load<true>(at, left);
            else in[i] = In::load_together(at, left > 0);
        }
        // Drawn while the numbers are on their way.
        typename Round::Bits bits[kRowChunks];
        if constexpr (Round::kDraws) {
            const u64 element = u64(u32(id)) * cols + col;
#pragma unroll
            for (int i = 0; i < kRowChunks; ++i) {
                bits[i] = round.draws(element + i / kTogether * Layout::kStride).bits(i % kTogether);
                bits[i].draw_by_now();
            }
        }
        u8* const to = codes + row * row_bytes + col * E::kCodeBits / 8;
        // The lanes of a block store the scales of their blocks, one each: neighbours together, not one at a time.
        const auto store_scales = [&](const Stored(&stored)[kHeld]) {
            const int mine = lane % kLanes;
            const int block = segment * (kSegmentCols / E::kBlock) + mine * (Layout::kStride / E::kBlock) + lane / kLanes;
            if (mine < kHeld && block < blocks) scales[u64(row) * blocks + block] = pick(stored, mine);
        };
        if (Round::kDraws && id < 0) {
            // Zeros need no bits.
            const typename E::Eight zeros[kTogether] = {};
#pragma unroll
            for (int i = 0; i < kRowChunks; i += kTogether)
                store_together<E>(to + col_of(i) * E::kCodeBits / 8, cols - col - col_of(i), zeros);
            store_scales({});
            continue;
        }
        u32 amax[kHeld];
        In::template block_maxima<kTogether, kLanes>(in, amax);
        Stored stored[kHeld];
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
            store_together<E>(to + col_of(h * kTogether) * E::kCodeBits / 8, cols - col - col_of(h * kTogether), out);
            if constexpr (Round::kDraws) {
                tally.non_zero += (__ballot_sync(kAllLanes, any) & lanes_of_block) != 0;
            } else {
                tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax[h]), scale.inverse));
            }
            tally.non_finite += scale.is_nan();
        }
        store_scales(stored);
    }
    tally.flush(counts, total, kLanes);
}

}  // namespace nib
