// BF16 or F32 -> blocks with scales along the rows; and what the other quantizing kernels have in common with that.
//
// quantize_rows<In, E, kF32Scales, Round>: x, codes [rows][cols], scales [rows][ceil(cols / E::kBlock)]; cols is a multiple of 8.
//   row_id[rows] (null: every row counts): negative marks padding, which reads as zero and is not counted; else the number of the row
//   for random bits. counts[3] (null: not wanted) += blocks with a non-zero code, 0, blocks with a NaN or infinity.
//   256 threads; a warp takes a segment of 1024 columns at a time; segments = ceil(cols / 1024), and `by_segments` divides by it.
//   Any grid, best ceil(rows · segments / 8) but at most 32 ctas a multiprocessor; no dynamic shared memory. Where every row counts and
//   cols is a multiple of the block, the launch may pass all of x, if that is less than 2^30 numbers, as one row.
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

/// Which of eight rows from `first` on count, one a bit.
__device__ __forceinline__ u32 rows_that_count(const int* __restrict__ row_id, int first, int rows) {
    u32 counted = 0;
    if (row_id == nullptr) {
        counted = first + 8 <= rows ? 0xFF : (1u << max(rows - first, 0)) - 1;
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (first + j < rows) counted |= u32(__ldg(row_id + first + j) >= 0) << j;
    }
    return counted;
}

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

/// Of lanes that share a block, each keeps the scale of the chunk it stores.
template <class Stored, int kCount>
__device__ __forceinline__ Stored pick(const Stored (&of)[kCount], int i) {
    Stored picked = of[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) picked = i == j ? of[j] : picked;
    return picked;
}

template <class In, class E, bool kF32Scales, class Round>
__global__ void __launch_bounds__(kRowThreads)
    quantize_rows(const u8* __restrict__ x, u8* __restrict__ codes, ScaleOf<kF32Scales>* __restrict__ scales, u64* counts,
                  const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments, PowerRule rule,
                  const RoundingArg rounding) {
    using Stored = ScaleOf<kF32Scales>;
    constexpr int kLanes = E::kBlock / 8;  // of one block
    static_assert(kLanes >= kRowChunks, "a lane of each block stores the scale of a chunk");
    __shared__ u32 total[3];
    const Round round(rounding);
    const int lane = threadIdx.x % 32;
    const u32 lanes_of_block = ((1u << kLanes) - 1) << (lane / kLanes * kLanes);
    const int blocks = ceil_div(cols, E::kBlock);  // of a row
    const u64 row_bytes = u64(cols) * E::kCodeBits / 8;
    const u32 tasks = u32(rows) * segments;
    Tally tally;
    for (u32 task = blockIdx.x * (kRowThreads / 32) + threadIdx.x / 32; task < tasks; task += gridDim.x * (kRowThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int col = segment * kSegmentCols + lane * 8;
        const int id = row_id == nullptr ? row : __ldg(row_id + row);
        const u8* from = x + (u64(row) * cols + col) * In::kBytes;
        typename In::Eight in[kRowChunks];
#pragma unroll
        for (int i = 0; i < kRowChunks; ++i)
            in[i] = In::template load<true>(from + i * kChunkCols * In::kBytes, id >= 0 ? cols - col - i * kChunkCols : 0);
        u32 amax[kRowChunks];
        In::template row_maxima<kLanes>(in, amax);
        Stored stored[kRowChunks];
        u8* to = codes + row * row_bytes + col * E::kCodeBits / 8;
        const u64 element = u64(u32(id)) * cols + col;
#pragma unroll
        for (int i = 0; i < kRowChunks; ++i) {
            const auto scale = scale_of<E, kF32Scales>(amax[i], rule);
            stored[i] = scale.stored;
            const auto bits = round.template bits<true>(element, i * (kChunkCols / 8));
            auto out = round.template encode<E, kRuleFloor, In>(in[i], scale.inverse, bits);
            if (scale.is_nan()) out = E::zeros();
            store_codes<E, true>(to + i * kChunkCols * E::kCodeBits / 8, cols - col - i * kChunkCols, out);
            if constexpr (Round::kDraws) {
                tally.non_zero += (__ballot_sync(kAllLanes, E::any(out)) & lanes_of_block) != 0;
            } else {
                tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax[i]), scale.inverse));
            }
            tally.non_finite += scale.is_nan();
        }
        // The lanes of a block store the scales of its chunks, one each: neighbours together, not one byte at a time.
        const int mine = lane % kLanes;
        const int block = segment * (kSegmentCols / E::kBlock) + mine * (kChunkCols / E::kBlock) + lane / kLanes;
        if (mine < kRowChunks && block < blocks) scales[u64(row) * blocks + block] = pick(stored, mine);
    }
    tally.flush(counts, total, kLanes);
}

}  // namespace nib
