// A tile of 128 x 128 numbers in registers, from its values to its E4M3 codes along the rows and down the columns. A thread holds
// four rows of kCols columns, eight or four: with eight, half a warp holds a row and 512 threads the tile; with four, a warp and
// 1024 threads.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/column_tile.cuh"
#include "math/reduce.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kThreadRows = 4;
template <int kCols>
using StripValues = float[kThreadRows][kCols];

/// Where a tile lies: strips of 128 rows one after the other, so that the scales of a row are written at one time.
struct StripTile {
    u32 strip, panel;

    __device__ __forceinline__ StripTile(u32 index, Divider by_across, u32 across)
        : strip(by_across.divide(index)), panel(index - strip * across) {}

    __device__ __forceinline__ u64 row() const { return u64(strip) * kTile; }
    __device__ __forceinline__ int col() const { return int(panel) * kTile; }
};

/// Where a thread is within a tile.
template <int kCols>
struct StripThread {
    static constexpr int kLanes = kTile / kCols;  // of a row
    static constexpr int kThreads = kTile / kThreadRows * kLanes;

    int lane, of_row;  // in the warp, in the row
    int row, col;      // its first ones

    __device__ __forceinline__ StripThread()
        : lane(threadIdx.x % 32), of_row(lane % kLanes), row(threadIdx.x / kLanes * kThreadRows), col(of_row * kCols) {}
};

/// The largest |x|; NaN if one is.
template <int kCount>
__device__ __forceinline__ float largest_magnitude(const float (&x)[kCount]) {
    float largest = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = ptx::max_magnitude(largest, x[i]);
    return largest;
}

/// Of a power of two of values a lane, the largest over kLanes neighbouring lanes; lane l gets that of value l % kCount. Each
/// exchange halves the values a lane still looks after.
template <int kLanes, int kCount>
__device__ __forceinline__ float largest_of_lanes(float (&v)[kCount], int lane) {
#pragma unroll
    for (int half = kCount / 2; half >= 1; half /= 2) {
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float sent = upper ? v[i] : v[i + half];
            v[i] = ptx::max_magnitude(upper ? v[i + half] : v[i], __shfl_xor_sync(kAllLanes, sent, half));
        }
    }
#pragma unroll
    for (int far = kCount; far < kLanes; far *= 2) v[0] = ptx::max_magnitude(v[0], __shfl_xor_sync(kAllLanes, v[0], far));
    return v[0];
}

/// Of a thread's rows, the largest in each column. Where a thread has eight columns, the first four lie in the first half of a line, so
/// that neighbours write neighbours.
template <int kCols>
struct ColumnMaxima {
    float line[kTile / kThreadRows][kTile];

    __device__ __forceinline__ static int column_at(int place) {
        if constexpr (kCols == 4) return place;
        return place / 4 % 16 * 8 + place / (kTile / 2) * 4 + place % 4;
    }
    __device__ __forceinline__ static int place_of(int col) {
        if constexpr (kCols == 4) return col;
        return col / 4 % 2 * (kTile / 2) + col / 8 * 4 + col % 4;
    }

    __device__ __forceinline__ void write(const StripThread<kCols>& me, const float (&largest)[kCols]) {
        float4* const to = reinterpret_cast<float4*>(line[me.row / kThreadRows]) + me.of_row;
#pragma unroll
        for (int i = 0; i < kCols; i += 4) to[i / 4 * (kTile / 8)] = {largest[i], largest[i + 1], largest[i + 2], largest[i + 3]};
    }

    __device__ __forceinline__ void write(const StripThread<kCols>& me, const StripValues<kCols>& value) {
        float largest[kCols];
#pragma unroll
        for (int c = 0; c < kCols; ++c) largest[c] = largest_magnitude<4>({value[0][c], value[1][c], value[2][c], value[3][c]});
        write(me, largest);
    }

    /// Of all rows. Four chains, which do not wait for each other.
    __device__ __forceinline__ float at(int place) const {
        float largest[4] = {};
#pragma unroll
        for (int i = 0; i < kTile / kThreadRows; ++i) largest[i % 4] = ptx::max_magnitude(largest[i % 4], line[i][place]);
        return largest_magnitude(largest);
    }
};

/// Codes of four neighbours in a row; those of a block that has become NaN are not zero yet.
__device__ __forceinline__ u32 codes_of_four(const float* v, float inverse) {
    return ptx::pack_u16(E4m3::pair(__fmul_rn(v[0], inverse), __fmul_rn(v[1], inverse)),
                         E4m3::pair(__fmul_rn(v[2], inverse), __fmul_rn(v[3], inverse)));
}

/// Codes of kLines lines of eight columns, a line of zeros for a NaN factor; `inverse_of(i)` is asked by whole warps. All are made
/// before any is stored: a store holds its registers for long.
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

/// Writes the codes down the columns; `inverses` are in the order of ColumnMaxima.
template <int kCols>
__device__ __forceinline__ void turn_values(ColumnTile& tile, const StripThread<kCols>& me, const StripValues<kCols>& value,
                                            const float* inverses) {
    u8* const place = tile.place(me.col / 8 * 8, me.row / 8) + me.col % 8 * kTile + me.row % 8;
    const float4* const fours = reinterpret_cast<const float4*>(inverses) + me.of_row;
#pragma unroll
    for (int four = 0; four < kCols; four += 4) {
        const float4 of = fours[four / 4 * (kTile / 8)];
        const float inverse[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const auto scaled = [&](int r) { return __fmul_rn(value[r][four + c], inverse[c]); };
            const u32 codes = ptx::pack_u16(E4m3::pair(scaled(0), scaled(1)), E4m3::pair(scaled(2), scaled(3)));
            ptx::store_4(place + (four + c) * kTile, codes);
        }
    }
}

/// Makes zeros of the columns of blocks that have become NaN: rare. A barrier before and after.
template <int kCols>
__device__ __forceinline__ void clear_nan_columns(ColumnTile& tile, const float* inverses) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kTile * (kTile / 4); i += StripThread<kCols>::kThreads)
        if (__float_as_uint(inverses[ColumnMaxima<kCols>::place_of(i / (kTile / 4))]) == kNanBits) ptx::store_4(tile.bytes + i * 4, 0);
}

}  // namespace nib
