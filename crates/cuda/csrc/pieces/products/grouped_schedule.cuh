// Grouped GEMMs whose group sizes only the device knows: the layout of groups and scales, and the order of output tiles.
//
// Every warp that needs the order of tiles computes it itself, for 32 groups at a time: by a prefix sum over the
// warp's lanes, and a vote that finds a tile's group. A cluster processes every gridDim.x / kCluster-th tile.
#pragma once
#include "formats/e8m0.cuh"
#include "math/reduce.cuh"
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

/// The meaning of the rows of a group: they are rows of A and D (fprop and dgrad), or the contraction (wgrad).
enum class Ragged { kRows, kContraction };

/// Scales in memory: the scale of block `block` of row `row` is at row * row_stride + block * block_stride.
struct Scales {
    const void* values;
    u32 row_stride, block_stride;  // 32 bits are enough: there are fewer than 2^32 scales
    int is_f32;                    // true if the scales are F32, false if they are E8M0 bytes

    __device__ __forceinline__ u32 load(u32 row, u32 block) const {
        const u32 at = row * row_stride + block * block_stride;
        return is_f32 ? __ldg(static_cast<const u32*>(values) + at) : __ldg(static_cast<const u8*>(values) + at);
    }
    __device__ __forceinline__ float decode(u32 loaded) const {
        return is_f32 ? __uint_as_float(loaded) : e8m0_decode(loaded);
    }
};

/// An output tile, as all warps that process it need it. Rows and columns are counted in elements.
struct alignas(16) Tile {
    int row_a;   // first row of A, and first row of the matrix of D
    int row_b;   // first row of B
    int k;       // first index of the contraction
    int len_k;   // length of the contraction; 0: nothing to add; -1: there are no more tiles
    int matrix;  // index of the matrix of D
    int col_d;   // first column of D
    int kept;    // number of rows that are computed
    int stored;  // number of rows that are written; rows past `kept` are written as zeros
};

/// Returns lane 0's value in every lane. The compiler then knows that the
/// value is uniform, and keeps values derived from it out of vector registers.
__device__ __forceinline__ int same_in_all(int value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

__device__ __forceinline__ Tile uniform(const Tile& tile) {
    return {same_in_all(tile.row_a), same_in_all(tile.row_b), same_in_all(tile.k),    same_in_all(tile.len_k),
            same_in_all(tile.matrix), same_in_all(tile.col_d), same_in_all(tile.kept), same_in_all(tile.stored)};
}

/// The lists of groups, and the sizes of the GEMM. If `start`
/// is null, there is only one group, which has all rows.
struct Groups {
    const int* start;
    const int* len;
    int count;
    int m, n, k;  // rows of A (of all groups together, or of one gradient), rows of B of one group, length of the contraction
    int band;     // number of tile rows per band

    /// The rows of a group: the first row, the number with padding, and the number of valid rows.
    struct Span {
        int first, padded, len;
    };

    /// Returns the rows of a group, clamped to the `extent` rows that exist, whatever the lists contain.
    __device__ __forceinline__ Span span(int group, int extent) const {
        const int first = min(max(start[group], 0), extent);
        const int padded = min(max(start[group + 1], first), extent) - first;
        return {first, padded, min(max(len[group], 0), padded)};
    }

    /// Returns the rows of a group if groups are rows of A; a group that does not exist has no rows.
    /// The function has no branches, so that the loads of several groups are in flight together.
    __device__ __forceinline__ Span span_or_none(int group) const {
        const Span found = span(min(group, count - 1), m);
        return group < count ? found : Span{};
    }
};

template <Ragged kRagged, int kBlockM, int kCluster>
class Schedule {
  public:
    __device__ __forceinline__ explicit Schedule(const Groups& groups)
        : groups_(groups),
          columns_(ceil_div(ceil_div(groups.n, kBlockN), kCluster)),
          next_(blockIdx.x / kCluster),
          step_(gridDim.x / kCluster),
          rank_(kCluster == 1 ? 0 : int(ptx::cluster_cta_rank())) {
        if constexpr (kRagged == Ragged::kRows) load(0, 0, false);
    }

    /// Finds the next tile of this CTA, or returns false if there are
    /// no more tiles. All lanes of a warp call this function together.
    __device__ __forceinline__ bool take(Tile& tile) {
        int group, within, tiles_m, first, len, padded;
        if constexpr (kRagged == Ragged::kRows) {
            for (int end = __shfl_sync(kAll, end_, 31); next_ >= end; end = __shfl_sync(kAll, end_, 31)) {
                if (base_ + 32 < groups_.count)
                    load(base_ + 32, end, short_);
                else if (!short_)
                    load(0, end, true);
                else
                    return false;
            }
            const u32 lane = __ffs(__ballot_sync(kAll, end_ > next_)) - 1;
            group = base_ + lane;
            first = __shfl_sync(kAll, start_, lane);
            len = __shfl_sync(kAll, len_, lane);
            padded = __shfl_sync(kAll, padded_, lane);
            tiles_m = short_ ? 1 : padded / kBlockM;
            within = next_ - (__shfl_sync(kAll, end_, lane) - tiles_m * columns_);
        } else {
            tiles_m = ceil_div(groups_.m, kBlockM);
            group = next_ / (tiles_m * columns_);
            if (group >= groups_.count) return false;
            within = next_ - group * (tiles_m * columns_);
            const auto rows = groups_.span(group, groups_.k);
            first = rows.first;
            len = rows.len;
            padded = groups_.m;
        }
        // Tiles are ordered in bands of tile rows, and within a band column by column. So the clusters that
        // run concurrently cover a nearly square patch of D, and share the operands of this patch in the L2.
        const int band = within / (groups_.band * columns_);
        within -= band * groups_.band * columns_;
        const int band_rows = min(groups_.band, tiles_m - band * groups_.band);
        const int skipped = short_ ? padded / kBlockM : 0;
        const int row = (skipped + band * groups_.band + within % band_rows) * kBlockM;
        tile.col_d = (within / band_rows * kCluster + rank_) * kBlockN;
        tile.stored = min(padded - row, kBlockM);
        if constexpr (kRagged == Ragged::kRows) {
            tile.row_a = first + row;
            tile.matrix = 0;
            tile.row_b = group * groups_.n + tile.col_d;
            tile.k = 0;
            tile.kept = min(max(len - row, 0), kBlockM);
            tile.len_k = tile.kept > 0 ? groups_.k : 0;
        } else {
            tile.row_a = row;
            tile.matrix = group;
            tile.row_b = tile.col_d;
            tile.k = first;
            tile.len_k = len;
            tile.kept = tile.stored;
        }
        next_ += step_;
        return true;
    }

  private:
    static constexpr int kBlockN = 128;
    static constexpr u32 kAll = 0xFFFFFFFF;

    /// Loads one group per lane, from group `base` on; `before` is the number of tiles before
    /// these groups. `shorter`: counts the partial last tiles of groups instead of the full tiles.
    /// All partial tiles come after all full tiles, so that the launch ends with small tiles.
    __device__ __forceinline__ void load(int base, int before, bool shorter) {
        const int group = base + int(ptx::lane_idx());
        base_ = base;
        short_ = shorter;
        start_ = len_ = padded_ = 0;
        if (groups_.start == nullptr) {
            if (group == 0) len_ = padded_ = groups_.m;
        } else if (group < groups_.count) {
            const auto rows = groups_.span(group, groups_.m);
            start_ = rows.first;
            padded_ = rows.padded;
            len_ = rows.len;
        }
        end_ = (shorter ? int(padded_ % kBlockM != 0) : padded_ / kBlockM) * columns_;
        end_ = sum_up_to_lane(end_) + before;
    }

    const Groups& groups_;
    int columns_;  // number of cluster columns in the D of one group
    int next_, step_, rank_;
    int base_;            // the group of lane 0
    bool short_ = false;  // true if the partial last tiles are being counted
    int start_, len_, padded_;
    int end_;  // the number of tiles in all groups up to and including this lane's group
};

}  // namespace nib
