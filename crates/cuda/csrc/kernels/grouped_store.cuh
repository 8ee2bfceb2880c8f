// What the grouped products on tensor cores have in common: the shape of a tile and of its pieces, the ring of stages and who fills it,
// and the way of totals from registers to D.
#pragma once
#include "kernels/grouped_schedule.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace nib {

constexpr int kBlockM = 256;
constexpr int kBlockN = 128;
constexpr int kStageBytes = 128;  // of a row in a stage: one swizzled row
constexpr int kWaveRows = 64;
constexpr int kMathWarps = 8;
constexpr int kOutRows = 16;  // a warp stores at once

/// Position in the ring of stages; `parity` flips each time round.
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

/// Fills the ring, and says in the first stage of each tile which it is. Each cta of the cluster loads a slice of A's rows for all of
/// them, and its own columns of B: `load(stage, full, tile, k, slices)` issues the copies of the `kDepth` of the contraction
/// from `k` on, slices below the last row that counts alone. One warp.
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

/// A tile of A to every cta of the cluster.
template <int kCluster>
__device__ __forceinline__ void load_shared_by_cluster(u8* to, const TensorMap& map, ptx::Barrier& full, int x, int y) {
    if constexpr (kCluster == 1)
        ptx::tma_load(to, map, full, x, y);
    else
        ptx::tma_load_multicast(to, map, full, x, y, (1 << kCluster) - 1);
}

/// A warp's 16 rows of a wave, on their way to D: their place in a matrix of D, or, with kTransposed, in its transpose.
struct Rows {
    int row, col, matrix;
    int kept, stored;  // of the 16
};

/// A part: columns whose 16 rows fill a staging buffer of 64-byte rows, the store map's swizzle: address bits 4-5 are XORed with
/// bits 7-8. A lane has kPartTotals of it.
constexpr int kStagedBytes = 1024;
template <class Out>
constexpr int kPartCols = kStagedBytes / kOutRows / int(sizeof(Out));
template <class Out>
constexpr int kParts = kBlockN / kPartCols<Out>;  // of a wave
template <class Out>
constexpr int kPartTotals = kPartCols<Out> / 2;

/// Rounds a part to BF16.
template <bool kTransposed>
__device__ __forceinline__ void stage(u16* staged, const float* total, const Rows& to) {
    static_assert(!kTransposed);
    const u32 lane = ptx::lane_idx();
    const u32 keep[2] = {int(lane / 4) < to.kept ? ~0u : 0u, int(lane / 4 + 8) < to.kept ? ~0u : 0u};
    // stmatrix: lane 8t+i names row i of tile t; tiles go down (rows 0, 8), then right (8 columns).
    const u32 tile_row = lane % 16;
    const u32 tile_right = lane / 16;
    const u32 base = shared_address(staged) + tile_row * 64;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        const float* t = total + pair * 8;
        const u32 chunk = (pair * 2 + tile_right) ^ ((tile_row >> 1) & 3);
        ptx::store_matrix_x4(base + chunk * 16, ptx::pack_bf16(t[0], t[1]) & keep[0], ptx::pack_bf16(t[2], t[3]) & keep[1],
                             ptx::pack_bf16(t[4], t[5]) & keep[0], ptx::pack_bf16(t[6], t[7]) & keep[1]);
    }
}

/// A part as F32.
template <bool kTransposed>
__device__ __forceinline__ void stage(float* staged, const float* total, const Rows& to) {
    const u32 lane = ptx::lane_idx(), row = lane / 4, right = lane % 4;
    char* const bytes = reinterpret_cast<char*>(staged);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Columns 8 (i / 2) + 2 right + {0, 1} of row `row` + 8 (i % 2).
        const bool keep = int(row + i % 2 * 8) < to.kept;
        const float2 pair = keep ? float2{total[2 * i], total[2 * i + 1]} : float2{0.0f, 0.0f};
        if constexpr (kTransposed) {
            const u32 at = (right * 128 + (row / 4 ^ right) * 16 + row % 4 * 4) ^ (i % 2 * 32);
            *reinterpret_cast<float*>(bytes + at + i / 2 * 512) = pair.x;
            *reinterpret_cast<float*>(bytes + at + i / 2 * 512 + 64) = pair.y;
        } else {
            const u32 at = (row * 64 + (right / 2 ^ (row / 2 & 3)) * 16 + right % 2 * 8) ^ (i / 2 * 32);
            *reinterpret_cast<float2*>(bytes + at + i % 2 * 512) = pair;
        }
    }
}

/// Stores a part of a wave through the next of `kOutBuffers` buffers, or adds it to D; clears its totals. All 16 rows are stored
/// or none, but for those past the matrix's end.
template <bool kAccumulate, bool kTransposed, class Out, int kOutBuffers>
__device__ __forceinline__ void store_part(Out (&out)[kOutBuffers][kStagedBytes / sizeof(Out)], u32& buffer,
                                           const TensorMap& map_d, float* totals, const Rows& to, int part) {
    const bool leader = ptx::lane_idx() == 0;
    if (leader) ptx::tma_store_wait_read<kOutBuffers - 1>();
    __syncwarp();
    Out* const staged = out[buffer];
    float* const total = totals + part * kPartTotals<Out>;
    stage<kTransposed>(staged, total, to);
    ptx::fence_shared_to_async();
    __syncwarp();
    if (leader) {
        // Rows that are not stored go past the end of D, where the copy engine leaves them out.
        const int row = to.stored > 0 ? to.row : 0x7FFFFF00, col = to.col + part * kPartCols<Out>;
        const int x = kTransposed ? row : col, y = kTransposed ? col : row;
        if constexpr (kAccumulate)
            ptx::tma_add(map_d, staged, x, y, to.matrix);
        else
            ptx::tma_store(map_d, staged, x, y, to.matrix);
        ptx::tma_store_commit();
    }
    buffer = buffer + 1 == kOutBuffers ? 0 : buffer + 1;
#pragma unroll
    for (int i = 0; i < kPartTotals<Out>; ++i) total[i] = 0.0f;
}

/// The same for a piece of which some rows only are stored, straight from the registers.
template <class Out>
__device__ __forceinline__ void store_few(Out* d, int n, float* totals, const Rows& to, int part) {
    const int lane = int(ptx::lane_idx());
    const int col = to.col + part * kPartCols<Out> + lane % 4 * 2;
    float* const total = totals + part * kPartTotals<Out>;
#pragma unroll
    for (int i = 0; i < kPartTotals<Out> / 2; ++i) {
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

/// Zeros the rows of D after the last group's, 16 bytes at a time.
template <class Out>
__device__ __forceinline__ void clear_tail(Out* d, const Groups& groups, int thread, int threads) {
    if (groups.start == nullptr) return;
    constexpr int kEach = 16 / sizeof(Out);
    const long long end = (long long)groups.m * groups.n / kEach;
    for (long long at = (long long)max(groups.start[groups.count], 0) * groups.n / kEach + thread; at < end; at += threads)
        reinterpret_cast<uint4*>(d)[at] = uint4{0, 0, 0, 0};
}

}  // namespace nib
