// Quantizes a tile of 128 x 128 values to E4M3 along the rows and down the
// columns. 512 threads hold the values in registers: a thread holds four rows of eight columns, and a warp 16 rows of 64 columns.
// So two warps share a row, and exchange the results of their half rows through shared memory.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "math/reduce.cuh"
#include "pieces/convert/column_tile.cuh"
#include "ptx/packed.cuh"
#include "ptx/thread.cuh"

namespace nib {

constexpr int kThreadRows = 4, kThreadCols = 8;
constexpr int kStripThreads = kTile * kTile / (kThreadRows * kThreadCols);
constexpr int kWarpRows = 16, kWarpCols = kTile / 2;
using StripValues = float[kThreadRows][kThreadCols];

/// The position of tile `index`. Tiles are ordered strip by strip (a strip has 128 rows), so that the scales of
/// a row are written at about the same time.
struct StripTile {
    u32 strip, panel;

    __device__ __forceinline__ StripTile(u32 index, Divider by_across, u32 across)
        : strip(by_across.divide(index)), panel(index - strip * across) {}

    __device__ __forceinline__ u64 row() const { return u64(strip) * kTile; }
    __device__ __forceinline__ int col() const { return int(panel) * kTile; }
};

/// The number of rows of a TMA box. A box that contains only padding is not loaded.
constexpr int kBoxRows = 32;

/// Returns a mask; bit i says whether any row of box i of the tile is valid. The whole warp calls this function.
__device__ __forceinline__ u32 boxes_wanted(const int (&row_id)[kTile]) {
    const int lane = threadIdx.x % 32, in_box = lane % 8 * 4;  // each lane tests four rows
    const int4 id = *reinterpret_cast<const int4*>(row_id + lane / 8 * kBoxRows + in_box);
    const u32 counted = __ballot_sync(kAllLanes, (id.x & id.y & id.z & id.w) >= 0);
    const u32 some = counted | counted >> 1, more = some | some >> 2, any = more | more >> 4;
    return (any & 1) | (any >> 7 & 2) | (any >> 14 & 4) | (any >> 21 & 8);
}

/// A thread's position within a tile.
struct StripThread {
    int lane, half;  // lane within the warp, and the half of the tile's columns
    int row, col;    // the thread's first row and first column

    __device__ __forceinline__ StripThread()
        : lane(threadIdx.x % 32),
          half(threadIdx.x / 32 % 2),
          row(threadIdx.x / 64 * kWarpRows + lane / 8 * kThreadRows),
          col(half * kWarpCols + lane % 8 * kThreadCols) {}

    /// This lane's entry in an array with eight entries for every four rows: one for each of the eight lanes that share
    /// these rows.
    __device__ __forceinline__ int in_rows() const { return threadIdx.x / 64 * 32 + lane; }
};

/// Returns the largest |x|, or a NaN if any value is NaN.
template <int kCount>
__device__ __forceinline__ float largest_magnitude(const float (&x)[kCount]) {
    float largest = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = ptx::max_magnitude(largest, x[i]);
    return largest;
}

/// Reduces kCount values per lane over the lanes that are kFirst, 2 · kFirst, ... apart. Each exchange halves the
/// number of values that a lane holds, until kLeft values are left. Of n = kCount / kLeft such lanes, the j-th gets the
/// values j, j + n, ...
template <int kFirst, int kLeft, int kCount, int kNow = kCount, class Join>
__device__ __forceinline__ void join_lanes(float (&v)[kCount], int lane, Join join) {
    if constexpr (kNow > kLeft) {
        const bool upper = lane & kFirst;
#pragma unroll
        for (int i = 0; i < kNow / 2; ++i) {
            const float sent = upper ? v[2 * i] : v[2 * i + 1];
            v[i] = join(upper ? v[2 * i + 1] : v[2 * i], __shfl_xor_sync(kAllLanes, sent, kFirst));
        }
        join_lanes<2 * kFirst, kLeft, kCount, kNow / 2>(v, lane, join);
    }
}

/// The largest magnitude of each column of kMatrices tiles, over every 16 rows (the rows of a warp).
template <int kMatrices>
struct ColumnMaxima {
    static constexpr int kCount = kMatrices * kThreadCols;
    float line[kTile / kWarpRows][2][kCount][8];

    /// Takes the largest magnitudes of this thread's four rows, for the eight columns of each matrix; reduces them over
    /// the rows of the warp and writes the results.
    __device__ __forceinline__ void write(const StripThread& me, float (&largest)[kCount]) {
        join_lanes<8, kCount / 4>(largest, ptx::lane_idx_anew(), [](float a, float b) { return ptx::max_magnitude(a, b); });
        float* const to = &line[me.row / kWarpRows][me.half][me.lane / 8][me.lane % 8];
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) to[i * 32] = largest[i];
    }

    /// Returns the largest magnitude of a column over all rows. `place` counts the
    /// columns of a half in the order 0, 8, 16, ..., 1, 9, ...; see `column_at`.
    __device__ __forceinline__ float at(int matrix, int place) const {
        const float* const from = &line[0][place / kWarpCols][matrix * kThreadCols][0] + place % kWarpCols;
        float largest[kTile / kWarpRows];
#pragma unroll
        for (int i = 0; i < kTile / kWarpRows; ++i) largest[i] = from[i * (2 * kCount * 8)];
        return largest_magnitude(largest);
    }

    /// Returns the column at position `place` of the order 0, 8, 16, ..., 1, 9, ...
    __device__ __forceinline__ static int column_at(int place) { return place / kWarpCols * kWarpCols + place % 8 * 8 + place / 8 % 8; }
};

/// The factors by which the values of each column are multiplied. A thread reads the
/// factors of its first four columns, and then the factors of its last four columns.
struct ColumnInverses {
    float4 four[2][2][8];  // indexed by half of the tile, half of a thread's columns, and thread

    __device__ __forceinline__ float& at(int col) {
        return reinterpret_cast<float*>(&four[col / kWarpCols][col / 4 % 2][col / 8 % 8])[col % 4];
    }
};

/// The codes of four adjacent values of a row. The codes of a NaN block are not zeroed here.
__device__ __forceinline__ u32 codes_of_four(const float* v, float inverse) {
    return ptx::pack_u16(E4m3::pair(__fmul_rn(v[0], inverse), __fmul_rn(v[1], inverse)),
                         E4m3::pair(__fmul_rn(v[2], inverse), __fmul_rn(v[3], inverse)));
}

/// Encodes and stores eight columns of each of kLines rows; a row with a NaN factor becomes zeros. Whole warps call
/// `inverse_of(i)`. All codes are computed before the first is stored, because a store occupies its registers for a
/// long time.
template <int kLines, class LineOf, class InverseOf>
__device__ __forceinline__ void store_lines(u8* to, u32 stride, int lines, bool some_nan, LineOf line_of, InverseOf inverse_of) {
    uint2 codes[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        const float* const v = line_of(i);
        const float inverse = inverse_of(i);
        codes[i] = {codes_of_four(v, inverse), codes_of_four(v + 4, inverse)};
    }
    if (some_nan) {  // rare
#pragma unroll
        for (int i = 0; i < kLines; ++i)
            if (__float_as_uint(inverse_of(i)) == kNanBits) codes[i] = {0, 0};
    }
    if (lines >= kLines) {
#pragma unroll
        for (int i = 0; i < kLines; ++i) ptx::store_8(to + u64(u32(i)) * stride, codes[i]);
    } else {
#pragma unroll
        for (int i = 0; i < kLines; ++i)
            if (i < lines) ptx::store_8(to + u64(u32(i)) * stride, codes[i]);
    }
}

/// A transposed tile of codes in the layout that TMA stores with the 128-byte swizzle. Each column of values is a row
/// of 128 bytes of this tile. The tile's rows are in the order of columns 0, 8, 16, ..., 1, 9, ... So when a warp
/// writes, the eight lanes that share rows differ in the 16-byte chunk, and the warp's four groups of rows differ in
/// the word of a chunk. There are no bank conflicts.
struct alignas(1024) TurnedTile {
    static constexpr int kNext = kTile / 8 * kTile;  // distance in bytes from a column to the next column
    u8 bytes[kTile * kTile];

    /// Returns the place of four rows of eight columns; adjacent columns are kNext bytes apart.
    __device__ __forceinline__ u8* place(int col, int row) {
        return bytes + col / 8 * kTile + (row / 16 ^ col / 8 % 8) * 16 + row % 16;
    }

    __device__ __forceinline__ void write(const StripThread& me, const StripValues& value, const ColumnInverses& inverses) {
        u8* const to = place(me.col, me.row);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const float4 of = inverses.four[me.half][part][me.lane % 8];
            const float inverse[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int c = part * 4 + i;
                const auto scaled = [&](int r) { return __fmul_rn(value[r][c], inverse[i]); };
                const u32 codes = ptx::pack_u16(E4m3::pair(scaled(0), scaled(1)), E4m3::pair(scaled(2), scaled(3)));
                ptx::store_4(to + c * kNext, codes);
            }
        }
    }

    /// Zeros the columns of NaN blocks, which are rare. A barrier must come before this call.
    __device__ __forceinline__ void clear_nan(ColumnInverses& inverses) {
#pragma unroll 1
        for (int i = threadIdx.x; i < kTile * (kTile / 4); i += kStripThreads) {
            const int col = i / (kTile / 4);
            if (__float_as_uint(inverses.at(col)) == kNanBits) ptx::store_4(place(col / 8 * 8, i % (kTile / 4) * 4) + col % 8 * kNext, 0);
        }
    }
};

}  // namespace nib
