// Shared code of the kernels that transpose rows of codes into columns: how they divide the work, fetch codes and
// store scales.
//
// A CTA processes kPanels · 128 columns of two strips of 128 rows, and fetches all of their codes at once. A warp
// transposes 32 columns, with 16 lanes per strip. A lane transposes 16 rows of eight columns, and then of eight other
// columns. So a warp stores 256 bytes of each of two columns at a time; storing 128 bytes of each of four columns was
// 1 to 2 % slower.
//
// A column has one scale byte per strip, which is the same for all columns of a source block.
// Scales are stored strip by strip, [capacity / 128][stride]. If scales were stored column by
// column, storing this one byte would cost as much as storing 128 codes of a column.
#pragma once
#include "formats/e8m0.cuh"
#include "math/reduce.cuh"
#include "pieces/convert/column_tile.cuh"
#include "pieces/convert/lift.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kGroupRows = 16;
constexpr int kGroups = kTile / kGroupRows;
constexpr int kMostDepth = 2;

/// The strips that a CTA processes.
struct Strips {
    int panel, first, count;

    __device__ __forceinline__ Strips(int down, int depth) {
        const int bands = ceil_div(down, depth);
        panel = blockIdx.x / bands;
        first = (blockIdx.x - panel * bands) * depth;
        count = min(depth, down - first);
    }
    __device__ __forceinline__ bool has(int i) const { return i < count; }
    __device__ __forceinline__ int at(int i) const { return first + i; }
};

/// The part of a warp's rows and columns that a lane has.
struct TurnLane {
    int lane = threadIdx.x % 32;
    int strip = lane / 16, group = lane / 2;  // index among the groups of 16 rows of both strips
    bool odd = lane % 2 == 1;

    /// Returns the first column of the lane. A lane has eight columns from its
    /// first column on, and eight more columns that start kSecond columns further.
    static constexpr int kSecond = 16;
    __device__ __forceinline__ int col() const { return threadIdx.x / 32 * 32 + lane % 2 * 8; }

    /// The first of the lane's 16 rows, within its strip.
    __device__ __forceinline__ int row() const { return group % kGroups * kGroupRows; }

    /// Loads the scales of eight rows of a strip. A lane and its neighbour transpose
    /// the same 16 rows, and each of them processes the scales of eight rows.
    __device__ __forceinline__ uint2 scales(const u8* of_strip) const { return *reinterpret_cast<const uint2*>(of_strip + lane % 16 * 8); }

    /// Returns the largest `above_nan` of a strip's scales.
    /// Each lane of the strip contributes eight scales.
    __device__ __forceinline__ u32 largest_above_nan(uint2 bytes) const {
        u32 largest = 0;
#pragma unroll
        for (int r = 0; r < 4; ++r)
            largest = max(largest, max(above_nan(bytes.x >> (8 * r) & 0xFF), above_nan(bytes.y >> (8 * r) & 0xFF)));
        const u32 first = __reduce_max_sync(kAllLanes, strip == 0 ? largest : 0);
        const u32 second = __reduce_max_sync(kAllLanes, strip == 0 ? 0 : largest);
        return strip == 0 ? first : second;
    }

    /// Stores the scale bytes of two of the warp's columns, in this lane's strip.
    __device__ __forceinline__ void store_scale(u8* __restrict__ out_scales, u32 scale, const Strips& strips, int first_col, int cols,
                                                int stride) const {
        const int col = first_col + threadIdx.x / 32 * 32 + lane % 16 * 2;
        u8* const to = out_scales + u64(strips.at(strip)) * stride + col;
        if (!strips.has(strip)) return;
        if (col + 1 < cols) {
            *reinterpret_cast<u16*>(to) = u16(scale * 0x0101);
        } else if (col < cols) {
            *to = u8(scale);
        }
    }

    /// Combines this lane's results for the scales of eight rows with the neighbour's
    /// results for the other eight rows. `all` has the results of all 16 rows in order.
    template <int kCount>
    __device__ __forceinline__ void exchange(const u32 (&mine)[kCount], u32 (&all)[2 * kCount]) const {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const u32 other = __shfl_xor_sync(kAllLanes, mine[k], 1);
            all[k] = odd ? other : mine[k];
            all[kCount + k] = odd ? mine[k] : other;
        }
    }
};

/// kTileRowBytes is the number of code bytes of a row of 128 columns. kBlocks is the number of
/// scales of these columns.
template <int kTileRowBytes, int kBlocks, int kPanels>
struct TurnShared {
    static constexpr int kRowBytes = kTileRowBytes * kPanels;
    // The 16 bytes of padding keep the groups of half a warp in different banks.
    static constexpr int kGroupBytes = kGroupRows * kRowBytes + 16;
    static constexpr int kCodeBytes = kMostDepth * kGroups * kGroupBytes;
    alignas(16) u8 codes[kCodeBytes];
    alignas(16) u8 scale[kMostDepth][kBlocks * kPanels][kTile + 8];
    alignas(16) u32 valid[kMostDepth][kTile / 32];
    u32 total[3];
};

/// Copies the codes of a CTA's strips to shared memory. kWhole: rows start at multiples of 16 bytes.
template <bool kWhole, int kTileRowBytes, int kBlocks, int kPanels>
struct Fetcher {
    using Shared = TurnShared<kTileRowBytes, kBlocks, kPanels>;
    static constexpr int kChunks = Shared::kRowBytes / 16;  // 16-byte chunks per row
    static constexpr int kPasses = kChunks / kPanels;
    static constexpr int kPassRows = kTile / kPasses;
    static constexpr int kChunkCols = 16 * kTile / kTileRowBytes;
    Shared& shared;
    const Strips& strips;
    const u8* codes;
    const int* row_id;
    int rows, cols, first_col;

    /// Tells all threads which rows are valid; a barrier must follow.
    __device__ __forceinline__ void publish() const {
        if (threadIdx.x >= kTile) return;
#pragma unroll
        for (int i = 0; i < kMostDepth; ++i) {
            const int row = strips.at(i) * kTile + threadIdx.x;
            const bool counts = strips.has(i) && row < rows && (row_id == nullptr || __ldg(row_id + row) >= 0);
            const u32 word = __ballot_sync(kAllLanes, counts);
            if (threadIdx.x % 32 == 0) shared.valid[i][threadIdx.x / 32] = word;
        }
    }
    __device__ __forceinline__ bool is_valid(int i, int row) const { return shared.valid[i][row / 32] >> (row % 32) & 1; }

    /// Starts the asynchronous copies. Invalid rows become
    /// zeros. A strip that does not exist is skipped.
    __device__ __forceinline__ void fetch() const {
#pragma unroll
        for (int i = 0; i < kMostDepth; ++i)
            if (strips.has(i)) fetch_strip(i);
    }

    /// Waits for the copies of all threads.
    __device__ __forceinline__ void wait() const {
        ptx::copies_wait();
        __syncthreads();
    }

private:
    __device__ __forceinline__ void fetch_strip(int i) const {
        const uint4 v = *reinterpret_cast<const uint4*>(shared.valid[i]);
        const u32 valid[4] = {v.x, v.y, v.z, v.w};
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
        const int col = first_col + chunk * kChunkCols;
        const u64 row_bytes = u64(cols) * kTileRowBytes / kTile;
        const u8* const from = codes + u64(strips.at(i) * kTile + row) * row_bytes + u64(col) * kTileRowBytes / kTile;
        u8* const group = shared.codes + (i * kGroups + row / kGroupRows) * Shared::kGroupBytes;
        u8* const to = group + row % kGroupRows * Shared::kRowBytes + chunk * 16;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int first = pass * kPassRows;
            const bool present = (valid[first / 32] >> (first % 32 + row) & 1) && col < cols;
            u8* const place = to + first / kGroupRows * Shared::kGroupBytes;
            const u8* const at = present ? from + first * row_bytes : codes;
            if constexpr (kWhole) {
                ptx::copy_16_async_ahead(place, at, present);
            } else {
                for (int b = 0; b < 16; ++b) place[b] = present && col + b < cols ? at[b] : 0;
            }
        }
    }
};

}  // namespace nib
