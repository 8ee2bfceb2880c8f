// Shared code of the kernels that quantize along the rows: the assignment of codes to lanes, and their
// stores.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "math/reduce.cuh"
#include "pieces/convert/row_tasks.cuh"

namespace nib {

constexpr int kRowThreads = 128;
constexpr int kChunkCols = 256;

/// The number of groups of eight columns that a lane processes at a time. It is limited by registers.
template <class In, class Round>
constexpr int row_chunks = In::kBytes == 2 && !Round::kDraws ? 8 : 4;

/// Stores the codes of the first `left` of eight columns.
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

/// Stores 16 bytes of codes of one block, which are a lane's adjacent groups of eight
/// columns, up to the `left`-th column. is_aligned: rows start at multiples of 16 bytes.
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

/// Returns the F32 bits of the largest magnitude of 32 values. The function takes fewer
/// instructions than In::block_maxima, for kernels that are limited by instructions.
__device__ __forceinline__ u32 largest_bits(const Bf16::Eight (&x)[4]) {
    u32 two = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 a = ptx::max_magnitude_bf16x2(x[i].word[0], x[i].word[1]), b = ptx::max_magnitude_bf16x2(x[i].word[2], x[i].word[3]);
        two = ptx::max_magnitude_bf16x2(two, ptx::max_magnitude_bf16x2(a, b));
    }
    return max(two << 16 & 0x7FFFFFFF, two & 0x7FFF0000);
}

/// Returns of[i] for an index that is known only at run time, without indexing registers.
template <class Stored, int kCount>
__device__ __forceinline__ Stored pick(const Stored (&of)[kCount], int i) {
    Stored picked = of[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) picked = i == j ? of[j] : picked;
    return picked;
}

/// How the lanes of a warp divide a segment of a row. A lane processes `kTogether` adjacent groups of eight columns at a
/// time, whose codes are 16 bytes. In MXFP4, 16 bytes of codes are a whole block, so lanes need not exchange their maxima.
template <class E, int kChunks>
struct RowLayout {
    static constexpr int kTogether = 16 / E::kCodeBits;
    static constexpr int kHeld = kChunks / kTogether;             // number of blocks of which a lane has a part
    static constexpr int kLanes = E::kBlock / (8 * kTogether);    // number of lanes that share a block
    static constexpr int kStride = kChunkCols * kTogether;        // number of columns from one of a lane's blocks to its next block
    static constexpr int kSegmentCols = kChunks * kChunkCols;

    /// Returns the number of columns from the lane's first column to its chunk i.
    __device__ __forceinline__ static constexpr int col_of(int i) { return i / kTogether * kStride + i % kTogether * 8; }

    /// Stores the scales of a segment of a row that has `blocks` blocks. Each lane of the lanes that
    /// share blocks stores the scale of one block, so that adjacent scales are stored together.
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

}  // namespace nib
