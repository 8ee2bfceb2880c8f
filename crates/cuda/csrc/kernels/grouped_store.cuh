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
constexpr int kOutCols = 32;  // columns a warp stages and stores at once: 64 bytes, the store map's swizzle
constexpr int kOutRows = 16;

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

/// A warp's 16 rows of a wave, on their way to D.
struct Rows {
    int row;           // in D
    int col;           // in D
    int kept, stored;  // of the 16
};

/// Rounds 32 columns of a wave to BF16 and stores them through the next of `kOutBuffers` buffers; clears the totals. All 16 rows
/// are stored or none.
template <int kOutBuffers>
__device__ __forceinline__ void store_part(u16 (&out)[kOutBuffers][kOutRows * kOutCols], u32& buffer,
                                           const TensorMap& map_d, float* total, const Rows& to, int part) {
    const u32 lane = ptx::lane_idx();
    const u32 keep[2] = {int(lane / 4) < to.kept ? ~0u : 0u, int(lane / 4 + 8) < to.kept ? ~0u : 0u};
    // Rows that are not stored go past the end of D, where the copy engine leaves them out.
    const int row = to.stored > 0 ? to.row : 0x7FFFFF00;
    // stmatrix: lane 8t+i names row i of tile t; tiles go down (rows 0, 8), then right (8 columns).
    const u32 tile_row = lane % 16;
    const u32 tile_right = lane / 16;
    if (lane == 0) ptx::tma_store_wait_read<kOutBuffers - 1>();
    __syncwarp();
    u16* const staged = out[buffer];
    const u32 base = shared_address(staged) + tile_row * (kOutCols * 2);
#pragma unroll
    for (int pair = 0; pair < kOutCols / 16; ++pair) {
        const float* t = total + part * (kOutCols / 2) + pair * 8;
        // The 64-byte swizzle: address bits 4-5 are XORed with bits 7-8, which are bits 1-2 of the row.
        const u32 chunk = (pair * 2 + tile_right) ^ ((tile_row >> 1) & 3);
        ptx::store_matrix_x4(base + chunk * 16, ptx::pack_bf16(t[0], t[1]) & keep[0], ptx::pack_bf16(t[2], t[3]) & keep[1],
                             ptx::pack_bf16(t[4], t[5]) & keep[0], ptx::pack_bf16(t[6], t[7]) & keep[1]);
    }
    ptx::fence_shared_to_async();
    __syncwarp();
    if (lane == 0) {
        ptx::tma_store(map_d, staged, to.col + part * kOutCols, row);
        ptx::tma_store_commit();
    }
    buffer = buffer + 1 == kOutBuffers ? 0 : buffer + 1;
#pragma unroll
    for (int i = 0; i < kOutCols / 2; ++i) total[part * (kOutCols / 2) + i] = 0.0f;
}

/// The same for a piece of which some rows only are stored, straight from the registers.
__device__ __forceinline__ void store_few(u16* d, int n, float* total, const Rows& to, int part) {
    const int lane = int(ptx::lane_idx());
    const int col = to.col + part * kOutCols + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kOutCols / 4; ++i) {
        const int row = lane / 4 + i % 2 * 8;
        float* const t = total + part * (kOutCols / 2) + i * 2;
        if (row < to.stored && col + i / 2 * 8 < n) {
            const u32 pair = row < to.kept ? ptx::pack_bf16(t[0], t[1]) : 0;
            *reinterpret_cast<u32*>(d + (long long)(to.row + row) * n + col + i / 2 * 8) = pair;
        }
        t[0] = t[1] = 0.0f;
    }
}

/// Writes 32 columns of a wave as F32 straight from the registers, four lanes a sector, or adds them to what is there. Clears the
/// totals.
template <bool kAccumulate>
__device__ __forceinline__ void store_part(float* d, int n, float* total, const Rows& to, int part) {
    const int lane = int(ptx::lane_idx_anew());
    const int col = to.col + part * kOutCols + lane % 4 * 2;
    float* const sums = total + part * (kOutCols / 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8;
        const int left = row < to.stored ? n - col : 0;
        float* const at = d + (long long)(to.row + row) * n + col;
#pragma unroll
        for (int j = 0; j < kOutCols / 8; ++j) {
            float* const pair = sums + 4 * j + 2 * half;
            const float x = row < to.kept ? pair[0] : 0.0f, y = row < to.kept ? pair[1] : 0.0f;
            if (8 * j < left) {
                if constexpr (kAccumulate)
                    ptx::add_f32x2(at + 8 * j, x, y);
                else
                    *reinterpret_cast<float2*>(at + 8 * j) = float2{x, y};
            }
            pair[0] = pair[1] = 0.0f;
        }
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
