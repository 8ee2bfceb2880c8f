// Shared code of the grouped GEMMs on tensor cores: the shape of a tile and its parts, the ring of stages and the
// warp that fills it, and the epilogue, which moves sums from registers to D.
#pragma once
#include "pieces/products/grouped_schedule.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace nib {

constexpr int kBlockM = 256;
constexpr int kBlockN = 128;
constexpr int kStageBytes = 128;  // number of bytes of a row in a stage, which is one swizzled row
constexpr int kWaveRows = 64;
constexpr int kMathWarps = 8;
constexpr int kOutRows = 16;  // number of rows that a warp stores at once

/// Position in the ring of stages; `parity` flips each time the ring wraps.
template <int kStages>
struct Ring {
    u32 stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/// All threads of the cluster call this function first. It prefetches the tensor maps, initialises
/// the barriers of the ring, and then calls `init`. A stage is full after kDeliveries arrivals.
template <int kStages, int kCluster, int kDeliveries, class Shared, class Init>
__device__ __forceinline__ void begin(Shared& shared, const TensorMap& map_a, const TensorMap& map_b,
                                      const TensorMap& map_d, const Init& init) {
    if (threadIdx.x == 0) {
        ptx::tensor_map_prefetch(map_a);
        ptx::tensor_map_prefetch(map_b);
        ptx::tensor_map_prefetch(map_d);
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::barrier_init(shared.full[stage], kDeliveries);
            ptx::barrier_init(shared.empty[stage], kMathWarps * kCluster);
        }
        init();
        ptx::barrier_init_fence();
    }
    if constexpr (kCluster == 1)
        __syncthreads();
    else
        ptx::cluster_sync();
}

/// Fills the ring, and writes each tile to the `tile` of the tile's first stage. One warp calls this
/// function. Each CTA of the cluster loads a slice of A's rows for all CTAs, and its own columns of B.
/// `load(stage, full, tile, k, slices)` issues the copies for kDepth elements of the contraction from
/// `k` on. Only the first `slices` slices of A are loaded, because later slices have no valid row.
template <Ragged kRagged, int kStages, int kCluster, int kDepth, class Shared, class Load>
__device__ __forceinline__ void produce(Shared& shared, const Groups& groups, const Load& load) {
    constexpr u32 kBytesA = kBlockM * kStageBytes, kBytesB = kBlockN * kStageBytes;
    const bool leader = ptx::lane_idx() == 0;
    Schedule<kRagged, kBlockM, kCluster> schedule(groups);
    Ring<kStages> ring;
    Tile tile;
    bool more = true;
    do {
        more = schedule.take(tile);
        if (!more) tile.len_k = -1;
        const int slices = ceil_div(tile.kept, kBlockM / kCluster);
        const u32 bytes = min(slices, kCluster) * (kBytesA / kCluster) + kBytesB;
        const int blocks = ceil_div(tile.len_k, kDepth);
        int block = 0;
        do {
            const u32 stage = ring.stage;
            ptx::Barrier& full = shared.full[stage];
            ptx::barrier_wait(shared.empty[stage], ring.parity ^ 1);
            if (leader) {
                if (block == 0) shared.tile[stage] = tile;
                if (tile.len_k <= 0) {
                    ptx::barrier_arrive(full);
                } else {
                    ptx::barrier_arrive_expect(full, bytes);
                    load(stage, full, tile, tile.k + block * kDepth, slices);
                }
            }
            ring.advance();
        } while (++block < blocks);
    } while (more);
}

/// Loads a tile of A into every CTA of the cluster.
template <int kCluster>
__device__ __forceinline__ void load_shared_by_cluster(u8* to, const TensorMap& map, ptx::Barrier& full, int x, int y) {
    if constexpr (kCluster == 1)
        ptx::tma_load(to, map, full, x, y);
    else
        ptx::tma_load_multicast(to, map, full, x, y, (1 << kCluster) - 1);
}

/// The 16 rows of a wave that a warp stores: their place in a matrix
/// of D or, with kTransposed, in the transpose of the matrix.
struct Rows {
    int row, col, matrix;
    int kept, stored;  // numbers of these 16 rows that are computed and that are written
};

/// How sums reach D: they overwrite D, or the L2 adds them to D, or the warp that holds
/// them adds them to D. The L2 adds only F32, at a quarter of the memory bandwidth, but
/// the warp continues meanwhile. A warp that adds must wait for the old values.
enum class Adds { kNone, kInL2, kInWarp };

/// A box has 16 rows of kBoxCols columns. It is staged as rows of 64 bytes in the 64-byte swizzle of
/// the store map, which XORs address bits 4-5 with bits 7-8. A lane has kBoxTotals values of a box.
constexpr int kBoxStaged = 1024;
template <class Out>
constexpr int kBoxCols = kBoxStaged / kOutRows / int(sizeof(Out));
template <class Out>
constexpr int kBoxTotals = kBoxCols<Out> / 2;

/// Stages a box, rounded to BF16. kAdd: first adds the old values of D, which are in the staging buffer.
template <bool kAdd, bool kTransposed>
__device__ __forceinline__ void stage(u16* staged, const float* total, const Rows& to) {
    static_assert(!kTransposed);
    const u32 lane = ptx::lane_idx();
    const u32 keep[2] = {int(lane / 4) < to.kept ? ~0u : 0u, int(lane / 4 + 8) < to.kept ? ~0u : 0u};
    // In stmatrix, lane 8t+i gives the address of row i of tile t. Tiles are ordered down (rows 0 and 8), then right
    // (8 columns).
    const u32 tile_row = lane % 16;
    const u32 tile_right = lane / 16;
    const u32 base = shared_address(staged) + tile_row * 64;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        const u32 at = base + ((pair * 2 + tile_right) ^ ((tile_row >> 1) & 3)) * 16;
        u32 words[4];
        if constexpr (kAdd) ptx::load_matrix_x4(words, at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x = total[pair * 8 + 2 * i], y = total[pair * 8 + 2 * i + 1];
            if constexpr (kAdd) x += __uint_as_float(words[i] << 16), y += __uint_as_float(words[i] & 0xFFFF0000);
            words[i] = ptx::pack_bf16(x, y) & keep[i % 2];
        }
        ptx::store_matrix_x4(at, words[0], words[1], words[2], words[3]);
    }
}

/// Stages a box as F32. kAdd: first adds the old values of D, which are in the staging buffer.
template <bool kAdd, bool kTransposed>
__device__ __forceinline__ void stage(float* staged, const float* total, const Rows& to) {
    const u32 lane = ptx::lane_idx(), row = lane / 4, right = lane % 4;
    char* const bytes = reinterpret_cast<char*>(staged);
    // Returns the address of columns 8 (i / 2) + 2 right + {0, 1} of row `row` + 8 (i % 2).
    const auto at = [&](int i) {
        const u32 at = kTransposed ? (right * 128 + (row / 4 ^ right) * 16 + row % 4 * 4) ^ (i % 2 * 32)
                                   : (row * 64 + (right / 2 ^ (row / 2 & 3)) * 16 + right % 2 * 8) ^ (i / 2 * 32);
        return reinterpret_cast<float*>(bytes + at + (kTransposed ? i / 2 : i % 2) * 512);
    };
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
        float2 pairs[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool keep = int(row + i * 8) < to.kept;
            const float* const t = total + 2 * (half + i);
            pairs[i] = keep ? float2{t[0], t[1]} : float2{0.0f, 0.0f};
            const float* const from = at(half + i);
            if constexpr (kAdd && kTransposed) pairs[i].x += from[0], pairs[i].y += from[16];
            if constexpr (kAdd && !kTransposed) {
                const float2 before = *reinterpret_cast<const float2*>(from);
                pairs[i].x += before.x, pairs[i].y += before.y;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float* const to_d = at(half + i);
            if constexpr (kTransposed)
                to_d[0] = pairs[i].x, to_d[16] = pairs[i].y;
            else
                *reinterpret_cast<float2*>(to_d) = pairs[i];
        }
    }
}

/// The staging buffers of a warp for D. The sums of a wave go through these buffers
/// part by part; a part is kBoxes boxes. If the warp adds to D, TMA loads the old
/// values kAhead parts ahead, into the buffer from which the sum will be stored.
template <Adds kAdds, bool kTransposed, class Out, int kOutBuffers, int kBoxes>
class Stores {
  public:
    static constexpr bool kLoads = kAdds == Adds::kInWarp;
    using Staged = Out[kBoxes][kBoxStaged / sizeof(Out)];
    /// Number of parts per wave, and per tile. The waves of a tile are stored one after the other.
    static constexpr int kParts = kBlockN / kBoxCols<Out> / kBoxes, kAll = 2 * kParts;
    /// The index of a row that is past the end of any matrix.
    static constexpr int kNowhere = 0x7FFFFC00;
    /// Up to kLeaving parts may be stored while old values of kAhead other parts are loaded.
    static constexpr int kLeaving = kOutBuffers / 2, kAhead = kOutBuffers - kLeaving;
    /// Ensures that each part of a tile always uses the same buffer.
    static_assert(!kLoads || kAll % kOutBuffers == 0);
    static_assert(kAdds != Adds::kInL2 || sizeof(Out) == 4);

    __device__ __forceinline__ Stores(Staged (&staged)[kOutBuffers], ptx::Barrier (&loaded)[kOutBuffers], const TensorMap& map_d)
        : staged_(staged), loaded_(loaded), map_d_(map_d), leader_(ptx::lane_idx() == 0) {}

    /// Must be called first. The first `parts` parts that count as
    /// stored belong to no tile, so their old values count as loaded.
    __device__ __forceinline__ void begin(int parts) {
        if constexpr (kLoads) {
#pragma unroll
            for (int part = 0; part < parts; ++part)
                if (leader_) ptx::barrier_arrive(loaded_[part % kOutBuffers]);
        }
    }

    /// Stores a part, or adds it to D, and sets its sums to zero. Either all 16 rows are stored or none; TMA skips
    /// rows past the matrix's end.
    __device__ __forceinline__ void store(float* totals, const Rows& to, int part) {
        const int at = kLoads ? part % kOutBuffers : buffer_;
        if constexpr (kLoads) {
            ptx::barrier_wait(loaded_here(at), part / kOutBuffers % 2 ^ turn_);
            if constexpr (kAll / kOutBuffers % 2 == 1) turn_ ^= part == kAll - 1;
        } else {
            if (leader_) ptx::tma_store_wait_read<kOutBuffers - 1>();
            __syncwarp();
        }
        float* const total = totals + part % kParts * kBoxes * kBoxTotals<Out>;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) stage<kLoads, kTransposed>(staged_[at][box], total + box * kBoxTotals<Out>, to);
        ptx::fence_shared_to_async();
        __syncwarp();
        if (leader_) {
            each_box(to, part, [&](int box, int x, int y) {
                if constexpr (kAdds == Adds::kInL2)
                    ptx::tma_add(map_d_, staged_here(at)[box], x, y, to.matrix);
                else
                    ptx::tma_store(map_d_, staged_here(at)[box], x, y, to.matrix);
            });
            ptx::tma_store_commit();
        }
        if constexpr (!kLoads) buffer_ = buffer_ + 1 == kOutBuffers ? 0 : buffer_ + 1;
#pragma unroll
        for (int i = 0; i < kBoxes * kBoxTotals<Out>; ++i) total[i] = 0.0f;
    }

    /// Starts to load the old values of a part, once at most kPending earlier stores still read their buffers.
    template <int kPending>
    __device__ __forceinline__ void load(const Rows& to, int part) {
        if constexpr (kLoads) {
            if (leader_) {
                ptx::tma_store_wait_read<kPending>();
                const int at = part % kOutBuffers;
                ptx::Barrier& loaded = loaded_here(at);
                ptx::barrier_arrive_expect(loaded, kBoxes * kBoxStaged);
                each_box(to, part, [&](int box, int x, int y) { ptx::tma_load(staged_here(at)[box], map_d_, loaded, x, y, to.matrix); });
            }
        }
    }

  private:
    /// The buffer and the barrier of a part. `here` prevents
    /// the compiler from computing the addresses earlier.
    __device__ __forceinline__ Staged& staged_here(int at) const { return (staged_ + (kLoads ? ptx::here(0) : 0))[at]; }
    __device__ __forceinline__ ptx::Barrier& loaded_here(int at) const { return (loaded_ + ptx::here(0))[at]; }

    template <class Copy>
    static __device__ __forceinline__ void each_box(const Rows& to, int part, const Copy& copy) {
        // Rows that are not to be stored get a position past the end of D, where TMA skips them.
        const int row = to.stored > 0 ? to.row : kNowhere;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
            const int col = to.col + (part % kParts * kBoxes + box) * kBoxCols<Out>;
            copy(box, kTransposed ? row : col, kTransposed ? col : row);
        }
    }

    Staged* const staged_;
    ptx::Barrier* const loaded_;
    const TensorMap& map_d_;
    const bool leader_;
    u32 buffer_ = 0;
    u32 turn_ = 0;
};

/// Stores a box directly from registers if only some of its
/// rows are stored, and sets its sums to zero.
template <class Out>
__device__ __forceinline__ void store_few(Out* d, int n, float* totals, const Rows& to, int box) {
    const int lane = int(ptx::lane_idx());
    const int col = to.col + box * kBoxCols<Out> + lane % 4 * 2;
    float* const total = totals + box * kBoxTotals<Out>;
#pragma unroll
    for (int i = 0; i < kBoxTotals<Out> / 2; ++i) {
        const int row = lane / 4 + i % 2 * 8;
        const bool keep = row < to.kept;
        const float x = keep ? total[2 * i] : 0.0f, y = keep ? total[2 * i + 1] : 0.0f;
        if (row < to.stored && col + i / 2 * 8 < n) {
            Out* const at = d + (long long)(to.row + row) * n + col + i / 2 * 8;
            if constexpr (sizeof(Out) == 2)
                *reinterpret_cast<u32*>(at) = ptx::pack_bf16(x, y);
            else
                *reinterpret_cast<float2*>(at) = float2{x, y};
        }
        total[2 * i] = total[2 * i + 1] = 0.0f;
    }
}

/// Zeros the rows of D after the last group's rows, 16 bytes at a time. All math warps of the launch call
/// this function.
template <class Out>
__device__ __forceinline__ void clear_tail(Out* d, const Groups& groups) {
    const int thread = blockIdx.x * (kMathWarps * 32) + threadIdx.x - 128, threads = gridDim.x * (kMathWarps * 32);
    if (groups.start == nullptr) return;
    constexpr int kEach = 16 / sizeof(Out);
    const long long end = (long long)groups.m * groups.n / kEach;
    for (long long at = (long long)max(groups.start[groups.count], 0) * groups.n / kEach + thread; at < end; at += threads)
        reinterpret_cast<uint4*>(d)[at] = uint4{0, 0, 0, 0};
}

}  // namespace nib
