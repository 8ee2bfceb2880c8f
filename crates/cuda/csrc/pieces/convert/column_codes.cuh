// Shared code of the kernels that quantize down the columns: they fetch 128 x 128 values, compute the scales,
// transpose the codes and store them.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "math/reduce.cuh"
#include "pieces/convert/column_tile.cuh"
#include "pieces/convert/row_codes.cuh"
#include "ptx/thread.cuh"

namespace nib {

template <class In, class E, bool kF32Scales>
struct alignas(16) ColumnShared {
    static constexpr int kBlocks = kTile / E::kBlock;  // number of blocks along a side of the tile
    u8 input[kTile][kTile * In::kBytes];
    ColumnTile tile;
    ScaleOf<kF32Scales> row_scales[kBlocks][kTile];
    float inverse[kBlocks][kTile];   // factors of columns, in the order of inverse_place
    u32 maxima[8][In::kWords * 16];  // the maximum of each column over the rows of each warp
    u32 total[3];
};

/// Returns the index at which the inverse of column `col` is stored. The inverses of the first four of a thread's eight
/// columns are contiguous with those of the adjacent threads' first four; the same holds for the last four columns.
__device__ __forceinline__ int inverse_place(int col) { return col % 8 / 4 * 64 + col / 8 * 4 + col % 4; }

/// Returns one bit for each of this lane's kRows rows, which says whether the row is valid.
/// A warp has 2 · kRows rows from `first` on; lanes 0 to 15 have the first kRows rows.
template <int kRows>
__device__ __forceinline__ u32 rows_of_lane(const int* __restrict__ row_id, int first, int rows) {
    const int lane = threadIdx.x % 32, row = first + lane % (2 * kRows);
    const bool counts = row < rows && (row_id == nullptr || __ldg(row_id + row) >= 0);
    return __ballot_sync(kAllLanes, counts) >> (lane & 16 ? kRows : 0);
}

/// Starts asynchronous copies of kRows rows of eight columns to the part of shared
/// memory that belongs to this thread. The copies need no registers, so all of them are
/// in flight at once. Rows whose bit in `counted` is 0 become zeros and are not read.
template <class In, int kRows>
__device__ __forceinline__ void fetch_rows(u8* mine, const u8* from, u64 row_bytes, u32 counted) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
        for (int part = 0; part < In::kBytes / 2; ++part)
            ptx::copy_16_async(mine + j * kTile * In::kBytes + part * 16, from + part * 16, counted >> j & 1);
        from += row_bytes;
    }
}

/// Computes the largest magnitude of each of eight columns over the sixteen rows of a warp.
template <class In>
__device__ __forceinline__ typename In::Magnitudes columns_of_warp(const typename In::Eight (&in)[8]) {
    typename In::Magnitudes largest = In::magnitudes(in[0]);
#pragma unroll
    for (int j = 1; j < 8; ++j) {
        const auto m = In::magnitudes(in[j]);
#pragma unroll
        for (int i = 0; i < In::kWords; ++i) largest.word[i] = In::larger(largest.word[i], m.word[i]);
    }
#pragma unroll
    for (int i = 0; i < In::kWords; ++i)
        largest.word[i] = In::larger(largest.word[i], __shfl_xor_sync(kAllLanes, largest.word[i], 16));
    return largest;
}

/// The scales of eight rows, each over a panel of 128 columns (kHeld = 1) or over each 32
/// columns of the panel (kHeld = 2). kHeld = 1: among sixteen lanes, lanes 2r and 2r + 1 have
/// the scale of row r. kHeld = 2: among four lanes, lane r has the scales of rows 2r and 2r + 1.
template <class In, class E, bool kF32Scales>
struct RowScales {
    static constexpr int kHeld = E::kBlock == kTile ? 1 : 2;
    BlockScale<ScaleOf<kF32Scales>> scale[kHeld];
    u32 amax[kHeld];

    RowScales() = default;
    __device__ __forceinline__ RowScales(const typename In::Eight (&in)[8], int lane, PowerRule rule) {
        In::row_maxima_of_eight(in, lane, amax);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) scale[i] = scale_of<E, kF32Scales>(amax[i], rule);
    }

    /// Returns the inverse of row j of the eight rows.
    __device__ __forceinline__ float inverse_of(int j, int lane) const {
        if constexpr (kHeld == 1) return __shfl_sync(kAllLanes, scale[0].inverse, (lane & 16) | j * 2);
        return __shfl_sync(kAllLanes, scale[j % kHeld].inverse, (lane & 28) | j / 2);
    }

    /// Writes the scales to the scales of the 128 x 128 tile, from row `first_row`
    /// on, and counts the blocks. `present` says whether this thread's columns exist.
    template <class Round>
    __device__ __forceinline__ void put(ScaleOf<kF32Scales> (*of_square)[kTile], int first_row, bool present, int lane, Tally& tally) const {
        if (kHeld == 1 && lane % 2 != 0) return;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            of_square[kHeld == 1 ? 0 : lane / 4 % 4][first_row + (kHeld == 1 ? lane / 2 % 8 : lane % 4 * 2 + i)] = scale[i].stored;
            if (kHeld == 2 && !present) continue;
            if constexpr (!Round::kDraws)
                tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax[i]), scale[i].inverse));
            tally.non_finite += scale[i].is_nan();
        }
    }
};

/// Transposes codes of eight rows of eight columns, and stores them at `place` in a tile.
/// If two codes share a byte, the four bytes of a column fill half of an 8-byte slot.
__device__ __forceinline__ void turn_codes(u32 (&codes)[8], u8* place) {
    // Swaps half-words across the diagonal, then bytes, then nibbles.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 a = codes[i], b = codes[i + 4];
        codes[i] = __byte_perm(a, b, 0x5410);
        codes[i + 4] = __byte_perm(a, b, 0x7632);
    }
#pragma unroll
    for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) {
        const u32 a = codes[i], b = codes[i + 2];
        codes[i] = __byte_perm(a, b, 0x6240);
        codes[i + 2] = __byte_perm(a, b, 0x7351);
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const u32 a = codes[i], b = codes[i + 1];
        codes[i] = (a & 0x0F0F0F0F) | (b << 4 & 0xF0F0F0F0);
        codes[i + 1] = (a >> 4 & 0x0F0F0F0F) | (b & 0xF0F0F0F0);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) ptx::store_4(place + i * kTile, codes[i]);
}

__device__ __forceinline__ void turn_codes(const uint2 (&codes)[8], u8* place) {
    u32 of[2][8];
#pragma unroll
    for (int j = 0; j < 8; ++j) of[0][j] = codes[j].x, of[1][j] = codes[j].y;
    turn_8x8(of, place);
}

/// Zeros the codes of column i of the eight columns.
__device__ __forceinline__ void clear_column(u32 (&codes)[8], int i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) codes[j] &= ~(0xFu << (4 * i));
}
__device__ __forceinline__ void clear_column(uint2 (&codes)[8], int i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        u32& four = i < 4 ? codes[j].x : codes[j].y;
        four &= ~(0xFFu << (i % 4 * 8));
    }
}

/// Stores the first `left` bytes (a multiple of 16) of each of the `lines` existing columns of a transposed tile.
/// The first column is stored at `to`. With kTally, the function counts the blocks of E that have a non-zero code.
template <class E, bool kTally, int kThreads, class Tile>
__device__ __forceinline__ void store_turned(const Tile& tile, u8* to, u64 line_bytes, int lines, int left, Tally& tally) {
    constexpr int kLines = kThreads / 8;  // number of columns that are stored at a time
    const int chunk = threadIdx.x % 8, lane = threadIdx.x % 32, first_line = threadIdx.x / 8;
    if (chunk * 16 >= left) lines = 0;
    to += first_line * line_bytes + chunk * 16;
#pragma unroll
    for (int line = 0; line < kTile; line += kLines) {
        const uint4 v = tile.chunk(first_line + line, chunk);
        const bool present = first_line + line < lines;
        if (present) ptx::store_16(to, v);
        to += kLines * line_bytes;
        if constexpr (kTally) {
            const bool any = present && ((v.x | v.y | v.z | v.w) & (E::kCodeBits == 4 ? 0x77777777 : 0x7F7F7F7F)) != 0;
            const u32 lanes = __ballot_sync(kAllLanes, any);
            // With four-bit codes, a 16-byte chunk is a block of 32; with eight-bit codes, 128 bytes are a
            // block of 128.
            if constexpr (E::kCodeBits == 4) {
                tally.non_zero += any;
            } else {
                tally.non_zero += chunk == 0 && (lanes >> (lane & 24) & 0xFF) != 0;
            }
        }
    }
}

}  // namespace nib
