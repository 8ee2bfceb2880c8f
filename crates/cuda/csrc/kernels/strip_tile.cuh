// A tile of 128 x 128 numbers in the registers of 512 threads, from its values to its E4M3 codes along the rows and down the
// columns. Half a warp holds a row's 128 columns, a thread four rows of eight columns; a warp the rows of one octet of a ColumnTile.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/column_tile.cuh"
#include "math/reduce.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kStripThreads = 512;
constexpr int kThreadRows = 4;
using StripValues = float[kThreadRows][8];

/// Where a tile lies: strips of 128 rows one after the other, so that the scales of a row are written at one time.
struct StripTile {
    u32 strip, panel;

    __device__ __forceinline__ StripTile(u32 index, Divider by_across, u32 across)
        : strip(by_across.divide(index)), panel(index - strip * across) {}

    __device__ __forceinline__ u64 row() const { return u64(strip) * kTile; }
    __device__ __forceinline__ int col() const { return int(panel) * kTile; }
};

/// Where a thread is within a tile.
struct StripThread {
    int lane, warp, chunk, row;  // eight columns; its first row

    __device__ __forceinline__ StripThread()
        : lane(threadIdx.x % 32), warp(threadIdx.x / 32), chunk(lane % 16), row(warp * 8 + lane / 16 * kThreadRows) {}
};

/// The largest |x|; NaN if one is.
template <int kCount>
__device__ __forceinline__ float largest_magnitude(const float (&x)[kCount]) {
    float largest = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = ptx::max_magnitude(largest, x[i]);
    return largest;
}

/// Of a power of two of values a lane, the largest over 16 neighbouring lanes; lane l gets that of value l % kCount. Each exchange
/// halves the values a lane still looks after.
template <int kCount>
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
    for (int far = kCount; far < 16; far *= 2) v[0] = ptx::max_magnitude(v[0], __shfl_xor_sync(kAllLanes, v[0], far));
    return v[0];
}

/// Of a thread's rows, the largest in each column. Of eight columns the first four lie in the first half of a line, so that
/// neighbours write neighbours.
struct ColumnMaxima {
    float line[kTile / kThreadRows][kTile];

    __device__ __forceinline__ static int column_at(int place) { return place / 4 % 16 * 8 + place / (kTile / 2) * 4 + place % 4; }
    __device__ __forceinline__ static int place_of(int col) { return col / 4 % 2 * (kTile / 2) + col / 8 * 4 + col % 4; }

    __device__ __forceinline__ void write(const StripThread& me, const StripValues& value) {
        float largest[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) largest[c] = largest_magnitude<4>({value[0][c], value[1][c], value[2][c], value[3][c]});
        float4* const to = reinterpret_cast<float4*>(line[me.row / kThreadRows]) + me.chunk;
        to[0] = {largest[0], largest[1], largest[2], largest[3]};
        to[kTile / 8] = {largest[4], largest[5], largest[6], largest[7]};
    }

    /// Of all rows.
    __device__ __forceinline__ float at(int place) const {
        float largest = line[0][place];
#pragma unroll
        for (int i = 1; i < kTile / kThreadRows; ++i) largest = ptx::max_magnitude(largest, line[i][place]);
        return largest;
    }
};

/// Codes of a row's eight columns; those of a block that has become NaN are not zero yet.
__device__ __forceinline__ uint2 row_codes_of(const float (&v)[8], float inverse) {
    return E4m3::encode<false>(F32::Eight{{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]}}, inverse);
}

/// Writes the codes down the columns; `inverses` are in the order of ColumnMaxima.
__device__ __forceinline__ void turn_values(ColumnTile& tile, const StripThread& me, const StripValues& value, const float* inverses) {
    u8* const place = tile.place(me.chunk * 8, me.warp) + me.lane / 16 * kThreadRows;
    const float4* const four = reinterpret_cast<const float4*>(inverses) + me.chunk;
    const float4 low = four[0], high = four[kTile / 8];
    const float inverse[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const auto scaled = [&](int r) { return __fmul_rn(value[r][c], inverse[c]); };
        ptx::store_4(place + c * kTile, ptx::pack_u16(E4m3::pair(scaled(0), scaled(1)), E4m3::pair(scaled(2), scaled(3))));
    }
}

/// Makes zeros of the columns of blocks that have become NaN: rare. A barrier before and after.
__device__ __forceinline__ void clear_nan_columns(ColumnTile& tile, const float* inverses) {
    for (int i = threadIdx.x; i < kTile * (kTile / 4); i += kStripThreads)
        if (__float_as_uint(inverses[ColumnMaxima::place_of(i / (kTile / 4))]) == kNanBits) ptx::store_4(tile.bytes + i * 4, 0);
}

}  // namespace nib
