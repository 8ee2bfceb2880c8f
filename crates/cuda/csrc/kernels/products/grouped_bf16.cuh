// Grouped GEMM D = A·Bᵀ with BF16 operands, for the BF16 recipe and for formats whose decoded values are BF16 numbers.
//
// grouped_bf16_scaled: the same GEMM, but the F32 sums are multiplied by a_scale · b_scale before they are rounded or added to
//   D. a_scale and b_scale are the operands' F32 tensor scales (null: 1). scale_sums.cuh defines the arithmetic. With kRows, the
//   scales are a_scale[row of A] and b_scale[row of B]; with kContraction, both scales are entries of the group's first row.
// kRagged::kRows (fprop, dgrad): A is [rows][k] and B is [groups · n][k], with k % 8 == 0. The len[g] rows of A and D from
//   row start[g] on belong to group g, whose matrix is the n rows of B from row g·n on. A group may start at any row.
// kRagged::kContraction (wgrad): D is a stack of matrices [m][n], one per group. The contraction of A [rows][m] and B [rows][n] runs over
//   the len[g] rows from row start[g] on, whatever the following rows contain. m and n are multiples of 8. An empty group gives zeros.
// D is BF16 (n % 8 == 0) or F32 (n % 4 == 0). With kAdds, the product is added to the old D.
// The tensor cores' F32 accumulators add the products in order of k.
//
// The grid, the warp roles, the ring of stages and the waves are those of grouped_fp8_block.cuh, but no warp fetches scales. A stage has 64 elements of k.
#pragma once
#include "pieces/products/grouped_store.cuh"

namespace nib {

constexpr int kDepth = 64;                        // elements of k per stage: a stage has 128 bytes of each row, or 64 rows
constexpr int kBoxBytes = kDepth * kStageBytes;   // a box has 64 rows of 128 bytes each

template <int kStages, int kOutBuffers, int kBoxes, class Out>
struct SharedLayout {
    u8 a[kStages][kBlockM * kStageBytes];
    u8 b[kStages][kBlockN * kStageBytes];
    Out out[kMathWarps][kOutBuffers][kBoxes][kBoxStaged / sizeof(Out)];  // sums that are being stored to D
    ptx::Barrier loaded[kMathWarps][kOutBuffers];                        // the old values of D have arrived in `out`
    Tile tile[kStages];           // written with the first stage of each tile
    ptx::Barrier full[kStages];   // TMA delivered the stage
    ptx::Barrier empty[kStages];  // the math warps of the whole cluster have finished reading the stage
};

/// Fills the ring of stages with tiles of A and B. One warp calls this function.
template <Ragged kRagged, int kStages, int kCluster, class Shared>
__device__ __forceinline__ void produce(Shared& shared, const TensorMap& map_a, const TensorMap& map_b, const Groups& groups) {
    constexpr int kSlice = kBlockM / kCluster;
    const int rank = kCluster == 1 ? 0 : int(ptx::cluster_cta_rank());
    produce<kRagged, kStages, kCluster, kDepth>(
        shared, groups, [&](u32 stage, ptx::Barrier& full, const Tile& tile, int k, int slices) {
            u8* const slice = shared.a[stage] + rank * kSlice * kStageBytes;
            const int row_a = tile.row_a + rank * kSlice;
            if constexpr (kRagged == Ragged::kRows) {
                if (rank < slices) load_shared_by_cluster<kCluster>(slice, map_a, full, k, row_a);
                ptx::tma_load(shared.b[stage], map_b, full, k, tile.row_b);
            } else {
                if (rank < slices)
                    for (int box = 0; box < kSlice / 64; ++box)
                        load_shared_by_cluster<kCluster>(slice + box * kBoxBytes, map_a, full, row_a + box * 64, k);
                for (int box = 0; box < kBlockN / 64; ++box)
                    ptx::tma_load(shared.b[stage] + box * kBoxBytes, map_b, full, tile.row_b + box * 64, k);
            }
        });
}

/// Starts the WGMMAs that add the product of a stage to the sums of one wave of 64 rows.
template <bool kTransposed>
__device__ __forceinline__ void multiply(float (&total)[64], u32 a, u32 b) {
    // Each step multiplies 16 elements of k, which are 32 bytes of a row, or 16 rows.
    constexpr u32 kStep = (kTransposed ? 16 * kStageBytes : 32) / 16;
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step)
        ptx::wgmma_m64n128k16_bf16<kTransposed>(total, ptx::wgmma_descriptor(a + kStep * step),
                                                ptx::wgmma_descriptor(b + kStep * step), true);
}

/// Zeros the rows of a stage from `rows` on, because those rows belong to
/// another group or hold garbage. All math threads call this function.
template <class Shared>
__device__ __forceinline__ void clear_rows(Shared& shared, u32 stage, int rows, int thread) {
    constexpr int kChunks = kStageBytes / 16, kBoxes = (kBlockM + kBlockN) / 64;
    const int count = (kDepth - rows) * kChunks;
    for (int at = thread; at < count * kBoxes; at += kMathWarps * 32) {
        const int box = at / count, chunk = at % count;
        u8* const tile = box < kBlockM / 64 ? shared.a[stage] + box * kBoxBytes : shared.b[stage] + (box - kBlockM / 64) * kBoxBytes;
        reinterpret_cast<uint4*>(tile + rows * kStageBytes)[chunk] = uint4{0, 0, 0, 0};
    }
    ptx::fence_shared_to_async();
    ptx::named_barrier<1, kMathWarps * 32>();
}

/// Policy without scales: sums are not multiplied.
struct NoScales {
    __device__ __forceinline__ void multiply(float (&)[64], const Tile&, int) const {}
};

/// Policy with tensor scales: sums are multiplied by the scales of both operands.
template <Ragged kRagged>
struct TensorScales {
    const float* a;  // null: all scales are 1
    const float* b;
    int n;

    __device__ __forceinline__ static float at(const float* scales, int row) { return scales == nullptr ? 1.0f : __ldg(scales + row); }

    /// Multiplies the sums of a wave by the scales. `row` is the index in the tile of the first of the warp's 16 rows.
    __device__ __forceinline__ void multiply(float (&total)[64], const Tile& tile, int row) const {
        if constexpr (kRagged == Ragged::kContraction) {
            const float by = __fmul_rn(at(a, tile.k), at(b, tile.k));
#pragma unroll
            for (float& sum : total) sum = __fmul_rn(sum, by);
        } else {
            const int lane = int(ptx::lane_idx()), right = lane % 4 * 2;
            float of_rows[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int here = row + lane / 4 + half * 8;
                of_rows[half] = here < tile.kept ? at(a, tile.row_a + here) : 0.0f;
            }
            // total[4i + 2j + c] is the sum for row lane / 4 + 8j and column 8i + 2 (lane % 4) + c.
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float2 of_cols{1.0f, 1.0f};
                // n is even, and the index of a group's first row of B is even.
                if (b != nullptr && tile.col_d + i * 8 + right < n)
                    of_cols = __ldg(reinterpret_cast<const float2*>(b + tile.row_b + i * 8 + right));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float* const sums = total + i * 4 + half * 2;
                    sums[0] = __fmul_rn(sums[0], __fmul_rn(of_rows[half], of_cols.x));
                    sums[1] = __fmul_rn(sums[1], __fmul_rn(of_rows[half], of_cols.y));
                }
            }
        }
    }
};

/// Multiplies the stages of the ring as they arrive, and stores
/// finished tiles. `warp` is the index among the math warps.
template <Ragged kRagged, int kStages, int kCluster, int kOutBuffers, int kBoxes, Adds kAdds, class Out, class Shared, class Scales>
__device__ __forceinline__ void consume(Shared& shared, const TensorMap& map_d, Out* d, int n, const Scales& scales, int warp) {
    constexpr bool kTransposed = kRagged == Ragged::kContraction;
    constexpr int kNextWave = 2 * kWaveRows;
    constexpr u32 kStageA = kBlockM * kStageBytes / 16, kStageB = kBlockN * kStageBytes / 16;
    const u32 lane = ptx::lane_idx();
    const int first_row = warp / 4 * kWaveRows;            // first row, in the tile, of this warpgroup's first wave
    const int warp_row = first_row + warp % 4 * kOutRows;  // first row, in the tile, of this warp
    const auto low = [](const void* tile) {
        return kTransposed ? ptx::wgmma_descriptor_low_transposed(shared_address(tile), kBoxBytes)
                           : ptx::wgmma_descriptor_low(shared_address(tile));
    };
    // A box has 64 rows of 128 bytes, or 64 columns. In both cases a wave's part of A is exactly one box.
    const u32 first_a = low(shared.a[0]) + warp / 4 * (kBoxBytes / 16);
    const u32 first_b = low(shared.b[0]);
    Ring<kStages> ring;
    using Stored = Stores<kAdds, false, Out, kOutBuffers, kBoxes>;
    constexpr int kParts = Stored::kParts;
    Stored stores(shared.out[warp], shared.loaded[warp], map_d);
    const auto release = [&](u32 stage) {
        // A few lanes arrive at the barrier for the whole warp, like in fp8_block.cuh.
        // compute-sanitizer's racecheck does not understand this pattern.
        __syncwarp();
        if (lane < kCluster) {  // lane i arrives at CTA i, which fills part of this stage
            if constexpr (kCluster == 1)
                ptx::barrier_arrive(shared.empty[stage]);
            else
                ptx::barrier_arrive_at(shared.empty[stage], lane);
        }
    };
    for (;;) {
        ptx::barrier_wait(shared.full[ring.stage], ring.parity);
        const Tile tile = uniform(shared.tile[ring.stage]);
        if (tile.len_k < 0) break;
        const int blocks = ceil_div(tile.len_k, kDepth);
        const auto rows_of = [&](int part) -> Rows {
            const int row = warp_row + part / kParts * kNextWave;
            // If nothing is added, `from` is past the end of D, so that no rows are loaded or stored.
            const int from = kAdds != Adds::kNone && blocks == 0 ? Stored::kNowhere : tile.row_a;
            return {from + row, tile.col_d, tile.matrix, tile.kept - row, tile.stored - row};
        };
        const bool both = tile.kept > first_row + kNextWave;
        float total[2][64];
#pragma unroll
        for (int i = 0; i < 64; ++i) total[0][i] = total[1][i] = 0.0f;
        const auto load = [&] {
#pragma unroll
            for (int part = 0; part < kOutBuffers; ++part) stores.template load<0>(rows_of(part), part);
        };
        if (blocks == 0) {
            load();
            release(ring.stage);
            ring.advance();
        }
        // Each of the two branches below commits its own batch of wgmma. With one commit for both branches, the
        // compiler would wait for the products.
        u32 done = 0;
        const auto take = [&](int block, bool second_wave) {
            const u32 stage = ring.stage;
            if (block != 0) ptx::barrier_wait(shared.full[stage], ring.parity);
            if constexpr (kTransposed) {
                const int rows = tile.len_k - block * kDepth;
                if (rows < kDepth) clear_rows(shared, stage, rows, warp * 32 + lane);
            }
            const u32 a = first_a + stage * kStageA, b = first_b + stage * kStageB;
            ptx::wgmma_pin(total[0]);
            ptx::wgmma_pin(total[1]);
            ptx::wgmma_fence();
            multiply<kTransposed>(total[0], a, b);
            if (second_wave) multiply<kTransposed>(total[1], a + 2 * (kBoxBytes / 16), b);
            ptx::wgmma_commit();
            ptx::wgmma_pin(total[0]);
            ptx::wgmma_pin(total[1]);
            if (block == 0) load();
            ptx::wgmma_wait_until<1>();
            if (block != 0) release(done);
            done = stage;
            ring.advance();
        };
        const auto finish = [&] {
            ptx::wgmma_wait();
            ptx::wgmma_pin(total[0]);
            ptx::wgmma_pin(total[1]);
        };
        if (both) {
            for (int block = 0; block < blocks; ++block) take(block, true);
            finish();
        } else {
            for (int block = 0; block < blocks; ++block) take(block, false);
            finish();
        }
        if (blocks != 0) {
            release(done);
            // A sum over no elements is zero. It must not be multiplied
            // by the scale of a row, because that row does not exist.
            scales.multiply(total[0], tile, warp_row);
            if (both) scales.multiply(total[1], tile, warp_row + kNextWave);
        }
        const auto store = [&](float(&sums)[64], int from) {
            const Rows rows = rows_of(from);
            // A group of rows may end at any row, not only at a multiple of the tile.
            if (kTransposed || rows.stored >= kOutRows || rows.stored <= 0) {
#pragma unroll
                for (int part = from; part < from + kParts; ++part) {
                    stores.store(sums, rows, part);
                    const int later = part + Stored::kAhead;
                    if (later >= kOutBuffers && later < Stored::kAll) stores.template load<Stored::kLeaving>(rows_of(later), later);
                }
            } else {
#pragma unroll
                for (int box = 0; box < kParts * kBoxes; ++box) store_few(d, n, sums, rows, box);
            }
        };
        store(total[0], 0);
        store(total[1], kParts);
    }
    ptx::tma_store_wait_all();
}

template <Ragged kRagged, class Out, Adds kAdds, int kStages, int kCluster, int kOutBuffers, int kBoxes, class Scales>
__device__ __forceinline__ void grouped(const TensorMap& map_a, const TensorMap& map_b, const TensorMap& map_d, const Scales& scales,
                                        const Groups& groups, Out* d) {
    using Shared = SharedLayout<kStages, kOutBuffers, kBoxes, Out>;
    extern __shared__ u8 raw[];
    // Dynamic shared memory is only 16-byte aligned.
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int warp = same_in_all(threadIdx.x / 32);
    begin<kStages, kCluster, 1>(shared, map_a, map_b, map_d, [&] {
        for (int i = 0; kAdds == Adds::kInWarp && i < kMathWarps * kOutBuffers; ++i)
            ptx::barrier_init(shared.loaded[i / kOutBuffers][i % kOutBuffers], 1);
    });

    if (warp < 4) {
        ptx::registers_shrink_to<40>();
        if (warp == 0) produce<kRagged, kStages, kCluster>(shared, map_a, map_b, groups);
    } else {
        ptx::registers_grow_to<232>();
        consume<kRagged, kStages, kCluster, kOutBuffers, kBoxes, kAdds>(shared, map_d, d, groups.n, scales, warp - 4);
        if constexpr (kRagged == Ragged::kRows) clear_tail(d, groups);
    }
    // Other CTAs of the cluster may still arrive at this CTA's barriers or multicast
    // into its ring, so no CTA exits before all CTAs of the cluster have finished.
    if constexpr (kCluster != 1) ptx::cluster_sync();
}

template <Ragged kRagged, class Out, Adds kAdds, int kStages, int kCluster, int kOutBuffers, int kBoxes>
__global__ void __launch_bounds__(384, 1)
    grouped_bf16(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                 const __grid_constant__ TensorMap map_d, const __grid_constant__ Groups groups, Out* d) {
    grouped<kRagged, Out, kAdds, kStages, kCluster, kOutBuffers, kBoxes>(map_a, map_b, map_d, NoScales{}, groups, d);
}

template <Ragged kRagged, class Out, Adds kAdds, int kStages, int kCluster, int kOutBuffers, int kBoxes>
__global__ void __launch_bounds__(384, 1)
    grouped_bf16_scaled(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                        const __grid_constant__ TensorMap map_d, const float* a_scale, const float* b_scale,
                        const __grid_constant__ Groups groups, Out* d) {
    const TensorScales<kRagged> scales{a_scale, b_scale, groups.n};
    grouped<kRagged, Out, kAdds, kStages, kCluster, kOutBuffers, kBoxes>(map_a, map_b, map_d, scales, groups, d);
}

}  // namespace nib
