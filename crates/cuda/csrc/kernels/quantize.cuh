// BF16 or F32 -> blocks with scales: along the rows, down the columns (stored transposed), or both from one read.
//
// x [rows][cols]. row_id[rows] (null: every row counts): negative marks padding, which reads as zero and is not counted.
// counts[3] (null: not wanted) += blocks with a non-zero code, 0, blocks with a NaN or infinity; of the row blocks where
// those are written. kAligned: cols % 8 == 0, and x and the planes start on 16 bytes.
//
// quantize_rows<In, E, kRule, kAligned>: codes [rows][cols], scales [rows][ceil(cols / E::kBlock)].
//   256 threads; a warp takes a segment of 1024 columns at a time; segments = ceil(cols / 1024), and `by_segments` divides by it.
//   Any grid, best ceil(rows · segments / 8) but at most 32 ctas a multiprocessor; no dynamic shared memory. Where every row counts and cols is a multiple of the
//   block, the launch may pass all of x, if that is less than 2^30 numbers, as one row.
// quantize_cols<In, E, kRule, kRows, kAligned>, FP8 only: codes [cols][capacity], scales [cols][capacity / 128], zeros from `rows` to
//   `capacity`, which is a multiple of 128; kRows also writes what quantize_rows does.
//   256 threads; grid ceil(cols / 128) · capacity / 128; `band` as in TilePlace: the number of strips for columns alone, 4 for
//   both; sizeof(ColumnShared<In>) dynamic shared memory: 51728 for BF16, 86544 for F32.
//
// Measured on an H200 (share of the larger of (read + written) / 4288 GB/s and written / fill rate; 32768 x 7168, and 4096 x 7168):
//   BF16 -> MXFP4 rows 94 % (76 %), E4M3 rows 93 % (86 %), E4M3 columns 94 % (82 %), both 81 % (76 %), with F32 scales 79 % (73 %).
//   In 32 uneven groups 92, 90, 92 and 80 %.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/column_tile.cuh"
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

template <class In, class E, bool kF32Scales, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    quantize_rows(const u8* __restrict__ x, u8* __restrict__ codes, ScaleOf<kF32Scales>* __restrict__ scales,
                  u64* counts, const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments,
                  PowerRule rule) {
    using Stored = ScaleOf<kF32Scales>;
    constexpr int kLanes = E::kBlock / 8;  // of one block
    static_assert(kLanes >= kRowChunks, "a lane of each block stores the scale of a chunk");
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32;
    const int blocks = ceil_div(cols, E::kBlock);  // of a row
    const u64 row_bytes = u64(cols) * E::kCodeBits / 8;
    const u32 tasks = u32(rows) * segments;
    Tally tally;
    for (u32 task = blockIdx.x * (kRowThreads / 32) + threadIdx.x / 32; task < tasks; task += gridDim.x * (kRowThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int col = segment * kSegmentCols + lane * 8;
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const u8* from = x + (u64(row) * cols + col) * In::kBytes;
        typename In::Eight in[kRowChunks];
#pragma unroll
        for (int i = 0; i < kRowChunks; ++i)
            in[i] = In::template load<kAligned>(from + i * kChunkCols * In::kBytes, counted ? cols - col - i * kChunkCols : 0);
        u32 amax[kRowChunks];
        In::template row_maxima<kLanes>(in, amax);
        Stored stored[kRowChunks];
        u8* to = codes + row * row_bytes + col * E::kCodeBits / 8;
#pragma unroll
        for (int i = 0; i < kRowChunks; ++i) {
            const auto scale = scale_of<E, kF32Scales>(amax[i], rule);
            stored[i] = scale.stored;
            auto out = E::template encode<true>(in[i], scale.inverse);
            if (scale.is_nan()) out = E::zeros();
            store_codes<E, kAligned>(to + i * kChunkCols * E::kCodeBits / 8, cols - col - i * kChunkCols, out);
            tally.non_zero += __fmul_rn(__uint_as_float(amax[i]), scale.inverse) > E::kLargestToZero;
            tally.non_finite += scale.is_nan();
        }
        // The lanes of a block store the scales of its chunks, one each: neighbours together, not one byte at a time.
        const int mine = lane % kLanes;
        const int block = segment * (kSegmentCols / E::kBlock) + mine * (kChunkCols / E::kBlock) + lane / kLanes;
        if (mine < kRowChunks && block < blocks) scales[u64(row) * blocks + block] = pick(stored, mine);
    }
    tally.flush(counts, total, kLanes);
}

template <class In>
struct alignas(16) ColumnShared {
    u8 input[kTile][kTile * In::kBytes];
    ColumnTile tile;
    u32 maxima[8][In::kWords * 16];  // of each warp's rows
    float inverse[kTile];
    u32 total[3];
};

template <class In, class E, bool kF32Scales, bool kRows, bool kAligned>
__global__ void __launch_bounds__(256, In::kBytes == 4 ? 2 : kRows ? 3 : 4)
    quantize_cols(const u8* __restrict__ x, u8* __restrict__ row_codes, ScaleOf<kF32Scales>* __restrict__ row_scales,
                  u8* __restrict__ col_codes, ScaleOf<kF32Scales>* __restrict__ col_scales, u64* counts,
                  const int* __restrict__ row_id, int rows, int cols, int capacity, int band, PowerRule rule) {
    static_assert(E::kBlock == kTile && E::kCodeBits == 8, "column blocks are 128 bytes");
    extern __shared__ uint4 raw[];
    ColumnShared<In>& shared = *reinterpret_cast<ColumnShared<In>*>(raw);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int octet = warp * 2 + lane / 16, chunk = lane % 16;
    const TilePlace at(cols, capacity, band);
    const int my_row = at.strip * kTile + octet * 8, first_col = at.panel * kTile, my_col = first_col + chunk * 8;
    const u64 row_bytes = u64(cols) * In::kBytes;
    Tally tally;

    // Through shared memory, though every thread reads back what it fetched: loads that need no register are all in flight.
    const u32 counted = rows_that_count(row_id, my_row, rows);
    const u8* const from = x + my_row * row_bytes + my_col * In::kBytes;
    u8* const mine = shared.input[octet * 8] + chunk * 8 * In::kBytes;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const bool present = (counted >> j & 1) && my_col < cols;
        if constexpr (kAligned) {
#pragma unroll
            for (int part = 0; part < In::kBytes / 2; ++part)
                ptx::copy_16_async(mine + j * kTile * In::kBytes + part * 16, present ? from + j * row_bytes + part * 16 : x, present);
        } else {
            *reinterpret_cast<typename In::Eight*>(mine + j * kTile * In::kBytes) =
                In::template load<false>(from + j * row_bytes, present ? cols - my_col : 0);
        }
    }
    ptx::copies_wait();
    typename In::Eight in[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) in[j] = In::load_shared(mine + j * kTile * In::kBytes);
    typename In::Magnitudes largest = In::magnitudes(in[0]);
#pragma unroll
    for (int j = 1; j < 8; ++j) {
        const auto m = In::magnitudes(in[j]);
#pragma unroll
        for (int i = 0; i < In::kWords; ++i) largest.word[i] = In::larger(largest.word[i], m.word[i]);
    }
#pragma unroll
    for (int i = 0; i < In::kWords; ++i) {
        largest.word[i] = In::larger(largest.word[i], __shfl_xor_sync(kAllLanes, largest.word[i], 16));
        if (lane < 16) shared.maxima[warp][chunk * In::kWords + i] = largest.word[i];
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
        const u32 amax = In::template column_max<8>(shared.maxima, threadIdx.x);
        const auto scale = scale_of<E, kF32Scales>(amax, rule);
        // Eight columns of a thread lie together, and neighbouring threads read neighbouring words.
        shared.inverse[threadIdx.x % 8 * 16 + threadIdx.x / 8] = scale.inverse;
        const int col = first_col + threadIdx.x;
        if (col < cols) col_scales[u64(col) * at.down + at.strip] = scale.stored;
        if (!kRows) {
            tally.non_zero += __fmul_rn(__uint_as_float(amax), scale.inverse) > E::kLargestToZero;
            tally.non_finite += scale.is_nan();
        }
    }
    if constexpr (kRows) {
        const u32 amax = In::row_max_of_eight(in, lane);
        const auto scale = scale_of<E, kF32Scales>(amax, rule);
        const int row = my_row + lane / 2 % 8;
        if (lane % 2 == 0) {
            if (row < rows) row_scales[u64(row) * at.across + at.panel] = scale.stored;
            tally.non_zero += __fmul_rn(__uint_as_float(amax), scale.inverse) > E::kLargestToZero;
            tally.non_finite += scale.is_nan();
        }
        u8* const to = row_codes + u64(my_row) * cols + my_col;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float inverse = __shfl_sync(kAllLanes, scale.inverse, (lane & 16) | j * 2);
            auto out = E::template encode<true>(in[j], inverse);
            if (__float_as_uint(inverse) == kNanBits) out = E::zeros();
            if (my_row + j < rows) store_codes<E, kAligned>(to + u64(j) * cols, cols - my_col, out);
        }
    }
    __syncthreads();
    u8* const place = shared.tile.place(chunk * 8, octet);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float inverse = shared.inverse[i * 16 + chunk];
        u16 two[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            two[j] = E::pair(__fmul_rn(In::value(in[2 * j], i), inverse), __fmul_rn(In::value(in[2 * j + 1], i), inverse));
        uint2 out = {ptx::pack_u16(two[0], two[1]), ptx::pack_u16(two[2], two[3])};
        if (__float_as_uint(inverse) == kNanBits) out = {0, 0};
        ptx::store_8(place + i * kTile, out);
    }
    __syncthreads();
    shared.tile.template store<256>(col_codes, first_col, cols, capacity, at.strip * kTile);
    tally.flush(counts, shared.total);
}

}  // namespace nib
