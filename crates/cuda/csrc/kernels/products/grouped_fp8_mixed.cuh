// The grouped FP8 GEMM for fprop with many short groups. Operands, arithmetic and results are those of
// grouped_fp8_block.cuh (E4M3, kRagged::kRows, 128x128 scales of B), but the order of tiles and the use of the ring differ.
//
// A tile of a short group is limited by reading B from memory; a tile of a long group is limited by the tensor
// cores. grouped_mixed_schedule.cuh interleaves both kinds of tiles, so that memory and tensor cores are always
// busy. If a tile has rows for only one wave, a stage holds two blocks of the contraction, so that twice as
// many bytes are in flight. B of a short group is read only once, so its loads use the L2 policy evict-first.
//
// The grid, the warp roles and shared memory are those of grouped_fp8_block.cuh, except
// that one warp finds the tiles for the other warps, and A is loaded in waves of 64 rows.
#pragma once
#include "pieces/products/fp8_block.cuh"
#include "pieces/products/grouped_mixed_schedule.cuh"

namespace nib {

/// The warps that read the tile queue: one warp fills the ring with codes, and two warps load scales.
constexpr int kMixedReaders = 1 + scale_warps(ScalesOfB::kTile);

template <int kStages, int kOutBuffers, int kBoxes, class Out>
struct MixedLayout : SharedLayout<kStages, kOutBuffers, kBoxes, ScalesOfB::kTile, Out> {
    static constexpr bool kPairs = true;
    static __device__ __forceinline__ bool is_paired(const Tile& tile) { return tile.kept <= kWaveRows; }
    TileQueue<kMixedReaders> queue;
};

/// Fills the ring with codes. The CTAs of the cluster take turns in loading the waves
/// of A's rows, or the two blocks of a paired stage. One warp calls this function.
template <int kStages, int kCluster, class Shared>
__device__ __forceinline__ void produce_mixed(Shared& shared, const TensorMap& map_a, const TensorMap& map_b) {
    constexpr u32 kWaveBytes = kWaveRows * kBlockK, kBytesB = kBlockN * kBlockK;
    const int rank = kCluster == 1 ? 0 : int(ptx::cluster_cta_rank());
    const bool leader = ptx::lane_idx() == 0;
    typename decltype(shared.queue)::Reader tiles(shared.queue);
    Ring<kStages> ring;
    MixedTile tile;
    do {
        tile = tiles.next();
        const int blocks = ceil_div(tile.len_k, kBlockK), waves = ceil_div(tile.kept, kWaveRows);
        const int a_stage = Shared::is_paired(tile) ? 2 : 1;
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
                    const int here = min(a_stage, blocks - block);
                    ptx::barrier_arrive_expect(full, here * (waves * kWaveBytes + kBytesB));
                    u8* const a = shared.a[stage];
                    for (int part = rank; part < here * waves; part += kCluster) {
                        const int second = Shared::is_paired(tile) ? part : 0, wave = part - second;
                        load_shared_by_cluster<kCluster>(a + part * kWaveBytes, map_a, full, (block + second) * kBlockK,
                                                         tile.row_a + wave * kWaveRows);
                    }
                    for (int i = 0; i < here; ++i) {
                        u8* const b = i == 0 ? shared.b[stage] : a + Shared::kSecondB;
                        const int k = (block + i) * kBlockK;
                        if (tile.alone)
                            ptx::tma_load_once(b, map_b, full, k, tile.row_b);
                        else
                            ptx::tma_load(b, map_b, full, k, tile.row_b);
                    }
                }
            }
            ring.advance();
            block += a_stage;
        } while (block < blocks);
    } while (tile.len_k >= 0);
}

/// The scale warps call this function. It fetches scales for four stages at a time and puts them into the
/// ring. `thread` is the index within the scale warps. A thread loads the scales of four rows and four
/// blocks of a tile. A paired tile has eight blocks in four stages, and few enough rows for 16 threads:
/// the first 16 threads load the first four blocks, and the next 16 threads load the last four blocks.
template <typename FourRows<4>::Layout kLayout, int kStages, class Shared>
__device__ __forceinline__ void fetch_mixed(Shared& shared, const Scales& scales_a, const Scales& scales_b, const Groups& groups,
                                            int thread) {
    constexpr int kAhead = FourRows<4>::kAhead;
    const int lane = int(ptx::lane_idx());
    const int rows_b = ceil_div(groups.n, kBlockN);
    typename decltype(shared.queue)::Reader tiles(shared.queue);
    FourRows<4> mine(scales_a, groups.m, kLayout);
    Ring<kStages> ring;
    const auto await = [&] { ptx::barrier_wait(shared.empty[ring.stage], ring.parity ^ 1); };
    const auto deliver = [&] {
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared.full[ring.stage]);
        ring.advance();
    };
    for (;;) {
        const MixedTile tile = tiles.next();
        const int blocks = ceil_div(tile.len_k, kBlockK), last = blocks - 1;
        if (blocks <= 0) {
            await();
            deliver();
            if (tile.len_k < 0) break;
            continue;
        }
        const int row_b = (tile.row_b - tile.col_d) / groups.n * rows_b + min(tile.col_d / kBlockN, rows_b - 1);
        const bool paired = Shared::is_paired(tile);
        const int row = paired ? thread * 4 % kWaveRows : thread * 4;
        // Position of this thread's four blocks within the eight blocks.
        const int later = paired ? thread / 16 % 2 * kAhead : 0;
        const bool busy = !paired || thread < 32;
        u32 of_b = 0;  // the scales of B for 32 blocks, one scale per lane
        for (int from = 0; from < blocks; from += paired ? 2 * kAhead : kAhead) {
            if (from % 32 == 0) of_b = scales_b.load(row_b, min(from + lane, last));
            if (busy) mine.load(tile.row_a + row, min(from + later, last / kAhead * kAhead), from, last);
            const auto scaled = [&](int ahead, int block) {
                const float4 four = mine.scales(ahead);
                const float b = scales_b.decode(__shfl_sync(0xFFFFFFFF, of_b, block % 32));
                return float4{four.x * b, four.y * b, four.z * b, four.w * b};
            };
#pragma unroll
            for (int ahead = 0; ahead < kAhead; ++ahead) {
                if (paired) {
                    // The two blocks of this stage are either two of this
                    // thread's four blocks, or two blocks of another thread.
                    if (from + 2 * ahead >= blocks) break;
                    const int first = ahead % 2 * 2;
                    const float4 one = scaled(first, from + later + first), two = scaled(first + 1, from + later + first + 1);
                    await();
                    if (busy && later / kAhead == ahead / 2) {
                        *reinterpret_cast<float4*>(shared.scale_a[ring.stage] + row) = one;
                        *reinterpret_cast<float4*>(shared.scale_a[ring.stage] + kWaveRows + row) = two;
                    }
                } else {
                    if (from + ahead >= blocks) break;
                    const float4 four = scaled(ahead, from + ahead);
                    await();
                    *reinterpret_cast<float4*>(shared.scale_a[ring.stage] + row) = four;
                }
                deliver();
            }
        }
    }
}

/// Determines the layout of A's scales at run time, and calls the template instance for that layout.
template <int kStages, class Shared>
__device__ __forceinline__ void fetch_mixed(Shared& shared, const Scales& scales_a, const Scales& scales_b, const Groups& groups,
                                            int thread) {
    using Rows = FourRows<4>;
    switch (Rows(scales_a, groups.m, 0).layout()) {
        case Rows::kBytesByRow: return fetch_mixed<Rows::kBytesByRow, kStages>(shared, scales_a, scales_b, groups, thread);
        case Rows::kBytesByOddRow: return fetch_mixed<Rows::kBytesByOddRow, kStages>(shared, scales_a, scales_b, groups, thread);
        case Rows::kBytesByBlock: return fetch_mixed<Rows::kBytesByBlock, kStages>(shared, scales_a, scales_b, groups, thread);
        case Rows::kF32ByRow: return fetch_mixed<Rows::kF32ByRow, kStages>(shared, scales_a, scales_b, groups, thread);
        case Rows::kF32ByBlock: return fetch_mixed<Rows::kF32ByBlock, kStages>(shared, scales_a, scales_b, groups, thread);
        case Rows::kScattered: return fetch_mixed<Rows::kScattered, kStages>(shared, scales_a, scales_b, groups, thread);
    }
}

template <class Out, int kStages, int kCluster, int kOutBuffers, int kBoxes>
__global__ void __launch_bounds__(384, 1)
    grouped_fp8_mixed(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                      const __grid_constant__ TensorMap map_d, const __grid_constant__ Scales scales_a,
                      const __grid_constant__ Scales scales_b, const __grid_constant__ Groups groups, Out* d) {
    using Shared = MixedLayout<kStages, kOutBuffers, kBoxes, Out>;
    extern __shared__ u8 raw[];
    // Dynamic shared memory is only 16-byte aligned.
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int warp = same_in_all(threadIdx.x / 32);
    begin<kStages, kCluster, kMixedReaders>(shared, map_a, map_b, map_d, [&] { shared.queue.begin(); });

    if (warp < 4) {
        ptx::registers_shrink_to<56>();
        if (warp == 0)
            produce_mixed<kStages, kCluster>(shared, map_a, map_b);
        else if (warp < kMixedReaders)
            fetch_mixed<kStages>(shared, scales_a, scales_b, groups, threadIdx.x - 32);
        else
            shared.queue.tell(MixedSchedule<kCluster>(groups));
    } else {
        ptx::registers_grow_to<224>();
        constexpr ptx::Fp8 kE4m3 = ptx::Fp8::kE4m3;
        consume<kE4m3, kE4m3, Ragged::kRows, kStages, kCluster, kOutBuffers, kBoxes, ScalesOfB::kTile, Adds::kNone, false, Out>(shared, map_d, warp - 4);
        clear_tail(d, groups);
    }
    // Other CTAs of the cluster may still arrive at this CTA's barriers or multicast
    // into its ring, so no CTA exits before all CTAs of the cluster have finished.
    if constexpr (kCluster != 1) ptx::cluster_sync();
}

}  // namespace nib
