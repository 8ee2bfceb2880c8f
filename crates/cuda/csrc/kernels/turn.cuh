// What the kernels that turn rows of codes into columns have in common: how they divide the work, fetch codes and store scales.
//
// A cta takes a panel of kPanels · 128 columns through `depth` strips of 128 rows, and fetches the codes of one while it turns
// those of the one before. A warp turns 32 columns; a lane 16 rows of eight of them, and so stores 16 bytes of a column at a time.
//
// Column scales are one byte a strip, the same for all columns of a source block. A store of that byte costs as much as one of a
// whole line of codes: large launches store it once a block, and spread_scales.cuh copies it to the columns.
#pragma once
#include "formats/e8m0.cuh"
#include "kernels/column_tile.cuh"
#include "kernels/lift.cuh"
#include "math/reduce.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kGroupRows = 16;
constexpr int kGroups = kTile / kGroupRows;
constexpr int kMostDepth = 4;

/// The strips of a cta.
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

/// Scales of a cta's strips and source blocks: to block_scales [strips][blocks], or if that is null to those of all columns.
/// Every thread comes here.
template <int kBlocks>
__device__ __forceinline__ void store_scales(const u8 (&targets)[kMostDepth][kBlocks], const Strips& strips,
                                             u8* __restrict__ block_scales, u8* __restrict__ out_scales, int block_cols, int cols,
                                             int down) {
    __syncthreads();
    if (block_scales != nullptr) {
        const int blocks = ceil_div(cols, block_cols), i = threadIdx.x / kBlocks, in_panel = threadIdx.x % kBlocks;
        const int block = strips.panel * kBlocks + in_panel;
        if (strips.has(i) && block < blocks) block_scales[u64(strips.at(i)) * blocks + block] = targets[i][in_panel];
    } else {
        const int first_col = strips.panel * kBlocks * block_cols;
        for (u32 k = threadIdx.x; k < u32(kBlocks * block_cols * strips.count); k += blockDim.x) {
            const u32 col = k / u32(strips.count), i = k - col * strips.count;
            if (first_col + int(col) < cols) out_scales[u64(first_col + col) * down + strips.at(i)] = targets[i][col / block_cols];
        }
    }
}

/// kTileRowBytes: codes of 128 columns of a row. kBlocks: their scales.
template <int kTileRowBytes, int kBlocks, int kPanels>
struct TurnShared {
    static constexpr int kRowBytes = kTileRowBytes * kPanels;
    // The gap keeps the groups of a warp in different banks.
    static constexpr int kGroupBytes = kGroupRows * kRowBytes + kTileRowBytes / 4;
    alignas(16) u8 codes[2][kGroups * kGroupBytes];
    alignas(16) u8 scale[2][kBlocks * kPanels][kTile + 4];
    alignas(16) u32 valid[2][kTile / 32];
    u8 targets[kMostDepth][kBlocks * kPanels];
    u32 total[3];
};

/// Brings codes of strips to one of two slots of shared memory. kWhole: rows start on 16 bytes.
template <bool kWhole, int kTileRowBytes, int kBlocks, int kPanels>
struct Fetcher {
    using Shared = TurnShared<kTileRowBytes, kBlocks, kPanels>;
    static constexpr int kChunks = Shared::kRowBytes / 16;  // of a row
    static constexpr int kPasses = kChunks / kPanels;
    static constexpr int kPassRows = kTile / kPasses;
    static constexpr int kChunkCols = 16 * kTile / kTileRowBytes;
    Shared& shared;
    const u8* codes;
    const int* row_id;
    int rows, cols, first_col;

    /// Whether this thread's row of a strip counts; the first threads have one each.
    __device__ __forceinline__ bool counts(int strip) const {
        const int row = strip * kTile + threadIdx.x;
        return threadIdx.x < kTile && row < rows && (row_id == nullptr || __ldg(row_id + row) >= 0);
    }
    /// Tells all threads; a barrier follows.
    __device__ __forceinline__ void publish(int slot, bool counted) {
        const u32 word = __ballot_sync(kAllLanes, counted);
        if (threadIdx.x < kTile && threadIdx.x % 32 == 0) shared.valid[slot][threadIdx.x / 32] = word;
    }
    __device__ __forceinline__ bool is_valid(int slot, int row) const { return shared.valid[slot][row / 32] >> (row % 32) & 1; }

    /// Of rows that do not count come zeros.
    __device__ __forceinline__ void fetch(int strip, int slot) {
        const uint4 v = *reinterpret_cast<const uint4*>(shared.valid[slot]);
        const u32 valid[4] = {v.x, v.y, v.z, v.w};
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
        const int col = first_col + chunk * kChunkCols;
        const u64 row_bytes = u64(cols) * kTileRowBytes / kTile;
        const u8* const from = codes + u64(strip * kTile + row) * row_bytes + u64(col) * kTileRowBytes / kTile;
        u8* const group = shared.codes[slot] + row / kGroupRows * Shared::kGroupBytes;
        u8* const to = group + row % kGroupRows * Shared::kRowBytes + chunk * 16;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int first = i * kPassRows;
            const bool present = (valid[first / 32] >> (first % 32 + row) & 1) && col < cols;
            u8* const place = to + first / kGroupRows * Shared::kGroupBytes;
            const u8* const at = present ? from + first * row_bytes : codes;
            if constexpr (kWhole) {
                ptx::copy_16_async(place, at, present);
            } else {
                for (int b = 0; b < 16; ++b) place[b] = present && col + b < cols ? at[b] : 0;
            }
        }
    }
};

}  // namespace nib
