// The order of tiles if many groups are short (at most 128 rows). A short group reads its whole
// matrix of B for few rows, so its tiles are limited by memory; the tiles of long groups are limited
// by the tensor cores. A cluster processes every n-th tile of either kind and interleaves the two
// kinds evenly. A phase offset between clusters keeps memory and tensor cores busy at all times.
//
// One warp finds the tiles and passes them to the other warps through a small ring. The warp that finds the tiles
// runs ahead, so that no other warp waits for the lists of groups in global memory.
#pragma once
#include "pieces/products/grouped_store.cuh"

namespace nib {

/// An output tile. The flag says whether its group has only one
/// row of tiles, so that no other tile reads the same rows of B.
struct MixedTile : Tile {
    int alone;
};

/// The queue of tiles, for the warps that fill the ring.
template <int kReaders>
struct TileQueue {
    static constexpr int kAhead = 4;
    MixedTile tile[kAhead];
    ptx::Barrier told[kAhead], read[kAhead];

    /// Initialises the barriers; one thread calls this function before all other code.
    __device__ __forceinline__ void begin() {
        for (int i = 0; i < kAhead; ++i) {
            ptx::barrier_init(told[i], 1);
            ptx::barrier_init(read[i], kReaders);
        }
    }

    /// The position of a warp in the queue.
    class Reader {
      public:
        __device__ __forceinline__ explicit Reader(TileQueue& queue) : queue_(queue) {}

        __device__ __forceinline__ MixedTile next() {
            ptx::barrier_wait(queue_.told[ring_.stage], ring_.parity);
            const MixedTile& from = queue_.tile[ring_.stage];
            const MixedTile tile = {uniform(from), same_in_all(from.alone)};
            __syncwarp();
            if (ptx::lane_idx() == 0) ptx::barrier_arrive(queue_.read[ring_.stage]);
            ring_.advance();
            return tile;
        }

      private:
        TileQueue& queue_;
        Ring<kAhead> ring_;
    };

    /// Puts every tile of a schedule into the queue, and then an end mark. One warp calls this
    /// function.
    template <class Schedule>
    __device__ __forceinline__ void tell(Schedule&& schedule) {
        Ring<kAhead> ring;
        bool more;
        do {
            MixedTile next = {};
            more = schedule.take(next);
            if (!more) next.len_k = -1;
            ptx::barrier_wait(read[ring.stage], ring.parity ^ 1);
            if (ptx::lane_idx() == 0) {
                tile[ring.stage] = next;
                ptx::barrier_arrive(told[ring.stage]);
            }
            ring.advance();
        } while (more);
    }
};

/// Iterates over the tiles of all groups of a kind, 32 groups at a time.
template <bool kLong>
class Walk {
  public:
    struct Place {
        int group, within, tiles_m;  // the tile's group, the tile's index within the group, and the number of rows of tiles in the group
        Groups::Span rows;
    };

    /// Returns the number of rows of tiles in a group with
    /// `padded` rows, or 0 if the group is of the other kind.
    static __device__ __forceinline__ int tiles_m(int padded) {
        const bool is_long = padded > kBlockM / 2;
        return is_long != kLong ? 0 : kLong ? ceil_div(padded, kBlockM) : int(padded > 0);
    }

    /// Returns the position of tile number `tile` of a kind. Tile numbers must increase from call to call.
    __device__ __forceinline__ Place find(const Groups& groups, int columns, int tile) {
        for (int end = __shfl_sync(kAll, end_, 31); tile >= end && base_ < groups.count; end = __shfl_sync(kAll, end_, 31))
            load(groups, columns, base_ + 32, end);
        const u32 lane = __ffs(__ballot_sync(kAll, end_ > tile)) - 1;
        Place place;
        place.group = base_ + lane;
        place.rows = {__shfl_sync(kAll, rows_.first, lane), __shfl_sync(kAll, rows_.padded, lane), __shfl_sync(kAll, rows_.len, lane)};
        place.tiles_m = tiles_m(place.rows.padded);
        place.within = tile - (__shfl_sync(kAll, end_, lane) - place.tiles_m * columns);
        return place;
    }

  private:
    static constexpr u32 kAll = 0xFFFFFFFF;

    __device__ __forceinline__ void load(const Groups& groups, int columns, int base, int before) {
        base_ = base;
        rows_ = groups.span_or_none(base + int(ptx::lane_idx()));
        end_ = sum_up_to_lane(tiles_m(rows_.padded) * columns) + before;
    }

    int base_ = -32;  // the group of lane 0
    int end_ = 0;     // the number of tiles in all groups up to and including this lane's group
    Groups::Span rows_ = {};
};

template <int kCluster>
class MixedSchedule {
  public:
    __device__ __forceinline__ explicit MixedSchedule(const Groups& groups)
        : groups_(groups),
          columns_(ceil_div(ceil_div(groups.n, kBlockN), kCluster)),
          clusters_(gridDim.x / kCluster),
          rank_(kCluster == 1 ? 0 : int(ptx::cluster_cta_rank())) {
        int tiles_long = 0, tiles_short = 0;
        for (int base = 0; base < groups.count; base += 32 * kAtOnce) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int padded = groups.span_or_none(base + 32 * i + int(ptx::lane_idx())).padded;
                tiles_long += Walk<true>::tiles_m(padded);
                tiles_short += Walk<false>::tiles_m(padded);
            }
        }
        const int cluster = blockIdx.x / kCluster;
        next_long_ = cluster;
        // Short tiles are assigned to clusters from the last cluster on, so
        // that a cluster with one more long tile gets one fewer short tile.
        next_short_ = clusters_ - 1 - cluster;
        longs_ = share(tiles_long, next_long_);
        left_ = tiles_ = longs_ + share(tiles_short, next_short_);
        phase_ = int((long long)tiles_ * cluster / clusters_);
    }

    /// Finds the next tile of this CTA, or returns false if there are no
    /// more tiles. All lanes of the warp call this function together.
    __device__ __forceinline__ bool take(MixedTile& tile) {
        if (left_ == 0) return false;
        --left_;
        phase_ += longs_;
        const bool is_long = phase_ >= tiles_;
        if (is_long) {
            phase_ -= tiles_;
            place(tile, long_.find(groups_, columns_, next_long_));
            next_long_ += clusters_;
        } else {
            place(tile, short_.find(groups_, columns_, next_short_));
            next_short_ += clusters_;
        }
        return true;
    }

  private:
    static constexpr int kAtOnce = 4;

    /// Returns how many tiles of a kind this cluster has; `first` is the first of these tiles.
    __device__ __forceinline__ int share(int tiles_m_of_lane, int first) const {
        const int tiles = int(__reduce_add_sync(0xFFFFFFFF, u32(tiles_m_of_lane))) * columns_;
        return ceil_div(max(tiles - first, 0), clusters_);
    }

    template <class Place>
    __device__ __forceinline__ void place(MixedTile& tile, const Place& at) const {
        // The bands of tiles are those of grouped_schedule.cuh.
        const int band = at.within / (groups_.band * columns_), within = at.within - band * groups_.band * columns_;
        const int band_rows = min(groups_.band, at.tiles_m - band * groups_.band);
        const int row = (band * groups_.band + within % band_rows) * kBlockM;
        tile.col_d = (within / band_rows * kCluster + rank_) * kBlockN;
        tile.row_a = at.rows.first + row;
        tile.row_b = at.group * groups_.n + tile.col_d;
        tile.k = tile.matrix = 0;
        tile.kept = min(max(at.rows.len - row, 0), kBlockM);
        tile.stored = min(at.rows.padded - row, kBlockM);
        tile.len_k = tile.kept > 0 ? groups_.k : 0;
        tile.alone = at.tiles_m == 1;
    }

    const Groups& groups_;
    int columns_;  // number of cluster columns in the D of one group
    int clusters_, rank_;
    int next_long_, next_short_;  // this cluster's next tile of either kind
    int tiles_, longs_, left_;    // number of this cluster's tiles: all tiles, long tiles, and tiles still to come
    int phase_;                   // increases by longs_ modulo tiles_; whenever the sum wraps around, a long tile follows
    Walk<true> long_;
    Walk<false> short_;
};

}  // namespace nib
