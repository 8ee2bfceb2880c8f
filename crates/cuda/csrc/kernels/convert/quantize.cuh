// Quantizes BF16 or F32 values to blocks along the rows, with one scale per block.
//
// quantize_rows<In, E, kF32Scales, Round>: x and codes are [rows][cols], scales are [rows][ceil(cols / E::kBlock)]; cols is a
//   multiple of 8. row_id[rows] (null: all rows are valid): negative ids mark padding rows, which read as zero and are not
//   counted; other ids number the rows for random bits. If counts[3] is not null, the kernel adds three numbers to it: blocks with
//   a non-zero code, 0, and blocks with a NaN or infinity. 128 threads per CTA, without dynamic shared memory. A warp quantizes a
//   segment of 256 · row_chunks columns at a time. row_tasks.cuh defines the grid; 16 chunks per warp are fastest. If cols is a
//   multiple of the block size, the launch may pass x as one row of less than 2^30 values without a row_id; `folded` then holds
//   the ids, unless all rows are valid. Passing x as one row is faster if the real rows would fill their segments only partly.
//
// quantize_rows_lifted<In, Round>: quantizes to MXFP4, but writes the E4M3 codes [rows][cols] and scales [rows][ceil(cols / 128)] that
//   lift_lines would compute from the MXFP4 codes. If x is passed as one row, cols must be a multiple of 128. `counts` counts the MXFP4 blocks.
//
// Speed on an H200, in % of the bandwidth limit max((read + written) / 4252 GB/s, written / fill rate), at 32768 x 7168, 24576 x 2048 and 4096 x 7168:
// BF16 -> MXFP4 reaches 101, 86 and 78 %; BF16 -> E4M3 102, 93 and 84 %; BF16 -> MXFP4 with stochastic rounding 78, 67 and 60 %. A kernel that only reads
// and writes as many bytes as BF16 -> E4M3 at 4096 x 7168 reaches 92 %, because the launch, the first loads and the last stores take the rest. Without
// counts, each figure is one point higher. CTAs of 256 threads, 4 chunks per warp, and prefetched segments are slower, by 20 points if there is padding.
#pragma once
#include "pieces/convert/lift.cuh"
#include "pieces/convert/row_quantizer.cuh"

namespace nib {

/// The output buffers of codes and scales.
template <class E, class Stored, int kChunks>
struct RowPlanes {
    using Layout = RowLayout<E, kChunks>;

    u8* const codes;
    Stored* const scales;
    const int cols;
    const int blocks;  // number of blocks per row
    const bool is_aligned;
    u8* to;
    Stored* scales_to;
    int left;
    u32 segment;

    __device__ __forceinline__ RowPlanes(u8* codes, Stored* scales, int cols)
        : codes(codes), scales(scales), cols(cols), blocks(ceil_div(cols, E::kBlock)), is_aligned(cols * E::kCodeBits % 128 == 0) {}

    __device__ __forceinline__ void begin(u32 row, u32 of_row, int col) {
        left = cols - col;
        segment = of_row;
        to = codes + (u64(row) * cols + col) * E::kCodeBits / 8;
        scales_to = scales + u64(row) * blocks;
    }
    __device__ __forceinline__ void put(int h, const typename E::Eight (&of_block)[Layout::kTogether], Stored) {
        const int c = Layout::col_of(h * Layout::kTogether);
        store_together(to + c * E::kCodeBits / 8, left - c, is_aligned, of_block);
    }
    __device__ __forceinline__ void end(const Stored (&of)[Layout::kHeld]) { Layout::store_scales(scales_to, segment, blocks, of); }
};

/// The outputs of MXFP4 blocks that are lifted to E4M3. Four adjacent lanes have the four MXFP4 blocks that share a lifted scale.
template <int kChunks>
struct LiftedRowPlanes {
    using Layout = RowLayout<E2m1, kChunks>;
    static constexpr int kLanes = E4m3::kBlock / E2m1::kBlock;
    static_assert(Layout::kLanes == 1 && Layout::kTogether == 4, "a lane has whole blocks");

    u8* const codes;
    u8* const scales;
    const int cols;
    u8* to;
    u8* scales_to;
    int left;
    u32 segment;
    int target[Layout::kHeld];

    __device__ __forceinline__ LiftedRowPlanes(u8* codes, u8* scales, int cols) : codes(codes), scales(scales), cols(cols) {}

    __device__ __forceinline__ void begin(u32 row, u32 of_row, int col) {
        left = cols - col;
        segment = of_row;
        to = codes + u64(row) * cols + col;
        scales_to = scales + u64(row) * ceil_div(cols, E4m3::kBlock);
    }
    __device__ __forceinline__ void put(int h, const u32 (&of_block)[4], u8 scale) {
        const int c = Layout::col_of(h * Layout::kTogether);
        u32 largest = left > c ? above_nan(scale) : 0;
        largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        target[h] = lift_target(largest);
        // Each pair of lanes stores the first lane's block, then the second
        // lane's block, so that each store writes whole memory sectors.
        const bool second = threadIdx.x & 1;
        const u32 entry = lift_index(scale, target[h]), other = __shfl_xor_sync(kAllLanes, entry, 1);
        const u32 a = __shfl_xor_sync(kAllLanes, second ? of_block[0] : of_block[2], 1);
        const u32 b = __shfl_xor_sync(kAllLanes, second ? of_block[1] : of_block[3], 1);
        const int first = second ? c - E2m1::kBlock : c;  // first column of the pair's first block
        u8* const at = to + first + (second ? 16 : 0);
        const BlockLift of_first(second ? other : entry), of_second(second ? entry : other);
        if (left > first) ptx::store_16(at, second ? of_first.sixteen(a, b) : of_first.sixteen(of_block[0], of_block[1]));
        if (left > first + E2m1::kBlock)
            ptx::store_16(at + E2m1::kBlock, second ? of_second.sixteen(of_block[2], of_block[3]) : of_second.sixteen(a, b));
    }
    __device__ __forceinline__ void end(const u8 (&)[Layout::kHeld]) {
        const int lane = threadIdx.x % 32;
        if (lane % kLanes != 0) return;
#pragma unroll
        for (int h = 0; h < Layout::kHeld; ++h) {
            if (left > Layout::col_of(h * Layout::kTogether))
                scales_to[segment * (Layout::kSegmentCols / E4m3::kBlock) + h * (Layout::kStride / E4m3::kBlock) + lane / kLanes] = u8(target[h]);
        }
    }
};

template <class In, class Round>
__global__ void __launch_bounds__(kRowThreads, kRowCtas<In, Round>)
    quantize_rows_lifted(const u8* __restrict__ x, u8* __restrict__ codes, u8* __restrict__ scales, u64* counts, const int* __restrict__ row_id, int rows,
                         int cols, Divider by_segments, u32 segments, u32 rounds, FoldedRows folded, PowerRule rule, const RoundingArg rounding) {
    __shared__ u32 total[3];
    LiftedRowPlanes<row_chunks<In, Round>> planes(codes, scales, cols);
    const RowSource of = {x, row_id, rows, cols, by_segments, segments, rounds, folded};
    quantize_segments<In, E2m1, false>(of, counts, total, rule, Round(rounding), planes);
}

template <class In, class E, bool kF32Scales, class Round>
__global__ void __launch_bounds__(kRowThreads, kRowCtas<In, Round>)
    quantize_rows(const u8* __restrict__ x, u8* __restrict__ codes, ScaleOf<kF32Scales>* __restrict__ scales, u64* counts,
                  const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments, u32 rounds, FoldedRows folded, PowerRule rule,
                  const RoundingArg rounding) {
    __shared__ u32 total[3];
    RowPlanes<E, ScaleOf<kF32Scales>, row_chunks<In, Round>> planes(codes, scales, cols);
    const RowSource of = {x, row_id, rows, cols, by_segments, segments, rounds, folded};
    quantize_segments<In, E, kF32Scales>(of, counts, total, rule, Round(rounding), planes);
}

}  // namespace nib
