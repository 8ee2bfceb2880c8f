// D[m,n] = A·Bᵀ, E4M3 operands with F32 block scales, BF16 out: the dense product of the FP8 recipe.
//
// A  codes [m][k], k contiguous, k % 16 == 0; scales 1x128, MN-major: [ceil(k/128)][m padded to 4].
// B  codes [n][k], k contiguous;              scales 128x128:        [ceil(n/128)][ceil(k/128)].
// D  BF16 [m][n], n % 8 == 0.
// Arithmetic: 128 of K are multiplied by the tensor cores, then total = fma(scale_a * scale_b, partial, total) in F32 on
// the ordinary cores: Hopper's FP8 accumulators keep too few bits for a longer sum. The order is fixed: same bits
// every run, whatever the tile shape.
//
// Grid: persistent, one cta an SM; the kCluster ctas of a cluster take neighbouring columns and share the rows of A.
// Cta: three warpgroups. One thread of the first moves tiles with TMA into a ring of kStages; the other two multiply,
// each kBlockM / 2 rows, in waves of 64. Shared memory: SharedLayout, below; 1024-byte aligned tiles.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace nib {

constexpr int kBlockN = 128;  // one column of B's scale blocks a tile
constexpr int kBlockK = 128;  // one promotion a stage, and one 128-byte swizzled row
constexpr int kMathWarpgroups = 2;
constexpr int kMathWarps = kMathWarpgroups * 4;
constexpr int kOutCols = 32;  // columns a warp stages and stores at once: 64 bytes, the store map's swizzle
constexpr int kOutRows = 16;

template <int kBlockM, int kStages, int kOutBuffers>
struct SharedLayout {
    u8 a[kStages][kBlockM * kBlockK];
    u8 b[kStages][kBlockN * kBlockK];
    u16 out[kMathWarps][kOutBuffers][kOutRows * kOutCols];
    float scale_a[kStages][kBlockM];
    ptx::Barrier full[kStages];   // the copy engine delivered the stage
    ptx::Barrier empty[kStages];  // the math warps of the whole cluster are done with it
};

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

/// Which output tile comes when. A cluster takes kCluster neighbouring columns. Bands of `kBandM` tile rows are swept column
/// by column, so that the clusters at work at one time cover a squarish patch of D and share its operands in the L2.
template <int kBlockM, int kCluster, int kBandM>
struct Raster {
    int tiles_m, groups_n, next, step;

    __device__ __forceinline__ Raster(int m, int n)
        : tiles_m(ceil_div(m, kBlockM)),
          groups_n(ceil_div(ceil_div(n, kBlockN), kCluster)),
          next(blockIdx.x / kCluster),
          step(gridDim.x / kCluster) {}

    __device__ __forceinline__ bool take(int cta_rank, int& tile_m, int& tile_n) {
        if (next >= tiles_m * groups_n) return false;
        const int band = next / (kBandM * groups_n);
        const int within = next - band * kBandM * groups_n;
        const int band_rows = min(kBandM, tiles_m - band * kBandM);
        tile_m = band * kBandM + within % band_rows;
        tile_n = within / band_rows * kCluster + cta_rank;
        next += step;
        return true;
    }
};

/// One tile to every cta of the cluster.
template <int kCluster>
__device__ __forceinline__ void load_for_all(void* tile, const TensorMap& map, ptx::Barrier& full, int x, int y) {
    if constexpr (kCluster == 1)
        ptx::tma_load(tile, map, full, x, y);
    else
        ptx::tma_load_multicast(tile, map, full, x, y, (1 << kCluster) - 1);
}

/// Fills the ring. Each cta of the cluster loads a slice of A's rows for all of them, and its own columns of B.
template <int kBlockM, int kStages, int kCluster, int kBandM, int kOutBuffers>
__device__ __forceinline__ void produce(SharedLayout<kBlockM, kStages, kOutBuffers>& shared, const TensorMap& map_a,
                                        const TensorMap& map_scale_a, const TensorMap& map_b, int m, int n, int k) {
    constexpr int kRows = kBlockM / kCluster;
    constexpr u32 kBytes = kBlockM * kBlockK + kBlockN * kBlockK + kBlockM * sizeof(float);
    const int rank = kCluster == 1 ? 0 : int(ptx::cluster_cta_rank());
    const int blocks_k = ceil_div(k, kBlockK);
    Raster<kBlockM, kCluster, kBandM> raster(m, n);
    Ring<kStages> ring;
    int tile_m, tile_n;
    while (raster.take(rank, tile_m, tile_n)) {
        const int row = tile_m * kBlockM + rank * kRows;
        for (int block = 0; block < blocks_k; ++block, ring.advance()) {
            const u32 stage = ring.stage;
            ptx::Barrier& full = shared.full[stage];
            ptx::barrier_wait(shared.empty[stage], ring.parity ^ 1);
            ptx::barrier_arrive_expect(full, kBytes);
            load_for_all<kCluster>(shared.scale_a[stage] + rank * kRows, map_scale_a, full, row, block);
            load_for_all<kCluster>(shared.a[stage] + rank * kRows * kBlockK, map_a, full, block * kBlockK, row);
            ptx::tma_load(shared.b[stage], map_b, full, block * kBlockK, tile_n * kBlockN);
        }
    }
}

/// One 64-row wave of a stage: four wgmma over its 128 of K, waited for. `a` and `b` are the low halves of the tiles'
/// descriptors; one step of 32 along K is 32 bytes, 2 in a descriptor.
__device__ __forceinline__ void multiply(float (&partial)[64], u32 a, u32 b) {
    ptx::wgmma_pin(partial);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 32; ++step)
        ptx::wgmma_m64n128k32_e4m3(partial, ptx::wgmma_descriptor(a + 2 * step), ptx::wgmma_descriptor(b + 2 * step),
                                   step != 0);
    ptx::wgmma_commit();
    ptx::wgmma_pin(partial);
    ptx::wgmma_wait();
    ptx::wgmma_pin(partial);
}

/// Rounds a warp's 16 x 128 of totals to BF16 and stores them, 32 columns at a time through `kOutBuffers` buffers.
template <int kOutBuffers>
__device__ __forceinline__ void store_rows(u16 (&out)[kOutBuffers][kOutRows * kOutCols], u32& buffer,
                                           const TensorMap& map_d, const float (&total)[64], int row, int col) {
    const u32 lane = ptx::lane_idx();
    // stmatrix: lane 8t+i names row i of tile t; tiles go down (rows 0, 8), then right (8 columns).
    const u32 tile_row = lane % 16;
    const u32 tile_right = lane / 16;
#pragma unroll
    for (int part = 0; part < kBlockN / kOutCols; ++part) {
        if (lane == 0) ptx::tma_store_wait_read<kOutBuffers - 1>();
        __syncwarp();
        u16* const staged = out[buffer];
        const u32 base = shared_address(staged) + tile_row * (kOutCols * 2);
#pragma unroll
        for (int pair = 0; pair < kOutCols / 16; ++pair) {
            const float* t = total + part * (kOutCols / 2) + pair * 8;
            // The 64-byte swizzle: address bits 4-5 are XORed with bits 7-8, which are bits 1-2 of the row.
            const u32 chunk = (pair * 2 + tile_right) ^ ((tile_row >> 1) & 3);
            ptx::store_matrix_x4(base + chunk * 16, ptx::pack_bf16(t[0], t[1]), ptx::pack_bf16(t[2], t[3]),
                                 ptx::pack_bf16(t[4], t[5]), ptx::pack_bf16(t[6], t[7]));
        }
        ptx::fence_shared_to_async();
        __syncwarp();
        if (lane == 0) {
            ptx::tma_store(map_d, staged, col + part * kOutCols, row);
            ptx::tma_store_commit();
        }
        buffer = buffer + 1 == kOutBuffers ? 0 : buffer + 1;
    }
}

/// Empties the ring: products, promotion, and the stores of a finished tile.
template <int kBlockM, int kStages, int kCluster, int kBandM, int kOutBuffers>
__device__ __forceinline__ void consume(SharedLayout<kBlockM, kStages, kOutBuffers>& shared, const TensorMap& map_d,
                                        const float* __restrict__ scale_b, int warp, int m, int n, int k) {
    constexpr int kWaves = kBlockM / (64 * kMathWarpgroups);
    const u32 lane = ptx::lane_idx();
    const int rank = kCluster == 1 ? 0 : int(ptx::cluster_cta_rank());
    const int blocks_k = ceil_div(k, kBlockK);
    const int last_block_n = ceil_div(n, kBlockN) - 1;
    const int first_row = warp / 4 * (64 * kWaves);             // of this warpgroup, in the tile
    const int scale_row = first_row + warp % 4 * 16 + lane / 4;  // of this lane's even accumulators, first wave
    Raster<kBlockM, kCluster, kBandM> raster(m, n);
    const u32 first_a = ptx::wgmma_descriptor_low(shared_address(shared.a[0]) + first_row * kBlockK);
    const u32 first_b = ptx::wgmma_descriptor_low(shared_address(shared.b[0]));
    Ring<kStages> ring;
    u32 buffer = 0;
    int tile_m, tile_n;
    while (raster.take(rank, tile_m, tile_n)) {
        float total[kWaves][64];
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave)
#pragma unroll
            for (int i = 0; i < 64; ++i) total[wave][i] = 0.0f;
        // A tile past the last column (an odd number of them in a cluster) multiplies zeros and stores nothing.
        const float* scale_b_row = scale_b + (long long)min(tile_n, last_block_n) * blocks_k;
        float scale_b_next = __ldg(scale_b_row);
        const auto take_stage = [&](u32 stage, u32 parity, int block) {
            const float sb = scale_b_next;
            scale_b_next = __ldg(scale_b_row + min(block + 1, blocks_k - 1));
            ptx::barrier_wait(shared.full[stage], parity);
            float scale[kWaves][2];
#pragma unroll
            for (int wave = 0; wave < kWaves; ++wave)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    scale[wave][half] = shared.scale_a[stage][scale_row + wave * 64 + half * 8] * sb;
            const u32 b = first_b + stage * (kBlockN * kBlockK / 16);
#pragma unroll
            for (int wave = 0; wave < kWaves; ++wave) {
                const u32 a = first_a + stage * (kBlockM * kBlockK / 16) + wave * (64 * kBlockK / 16);
                float partial[64];
                multiply(partial, a, b);
                if (wave == kWaves - 1 && lane < kCluster) {  // lane i tells cta i, which fills part of this stage
                    if constexpr (kCluster == 1)
                        ptx::barrier_arrive(shared.empty[stage]);
                    else
                        ptx::barrier_arrive_at(shared.empty[stage], lane);
                }
#pragma unroll
                for (int i = 0; i < 64; ++i)
                    total[wave][i] = __fmaf_rn(scale[wave][i / 2 % 2], partial[i], total[wave][i]);
            }
        };
        // Where every tile starts at stage 0, unrolled: addresses are constants, and the next stage is asked for before this
        // one's promotion. 2 to 3 % faster.
        if (blocks_k % kStages == 0) {
            for (int block = 0; block < blocks_k; block += kStages) {
#pragma unroll
                for (int stage = 0; stage < kStages; ++stage) take_stage(stage, ring.parity, block + stage);
                ring.parity ^= 1;
            }
        } else {
            for (int block = 0; block < blocks_k; ++block, ring.advance()) take_stage(ring.stage, ring.parity, block);
        }
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave)
            store_rows<kOutBuffers>(shared.out[warp], buffer, map_d, total[wave],
                                    tile_m * kBlockM + first_row + wave * 64 + warp % 4 * 16, tile_n * kBlockN);
    }
    if (lane == 0) ptx::tma_store_wait_all();
}

template <int kBlockM, int kStages, int kCluster, int kBandM, int kOutBuffers>
__global__ void __launch_bounds__((kMathWarpgroups + 1) * 128, 1)
    gemm_fp8_block(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_scale_a,
                   const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_d,
                   const float* __restrict__ scale_b, int m, int n, int k) {
    static_assert(kBlockM == 128 || kBlockM == 256, "a warpgroup takes one or two waves of 64 rows");
    static_assert(kCluster == 1 || kCluster == 2, "A is split over at most two ctas");
    using Shared = SharedLayout<kBlockM, kStages, kOutBuffers>;
    extern __shared__ u8 raw[];
    // Dynamic shared memory starts 16-byte aligned only; the launch asks for 1024 bytes more than the layout.
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);

    // The same in every lane, and known to be: what follows from it stays in uniform registers.
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        ptx::tensor_map_prefetch(map_a);
        ptx::tensor_map_prefetch(map_scale_a);
        ptx::tensor_map_prefetch(map_b);
        ptx::tensor_map_prefetch(map_d);
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::barrier_init(shared.full[stage], 1);
            ptx::barrier_init(shared.empty[stage], kMathWarps * kCluster);
        }
        ptx::barrier_init_fence();
    }
    if constexpr (kCluster == 1)
        __syncthreads();
    else
        ptx::cluster_sync();

    if (warp < 4) {
        ptx::registers_shrink_to<40>();
        if (threadIdx.x == 0)
            produce<kBlockM, kStages, kCluster, kBandM, kOutBuffers>(shared, map_a, map_scale_a, map_b, m, n, k);
    } else {
        ptx::registers_grow_to<232>();
        consume<kBlockM, kStages, kCluster, kBandM, kOutBuffers>(shared, map_d, scale_b, warp - 4, m, n, k);
    }
    // The peer may still arrive at our barriers or multicast into our ring: nobody leaves before everybody is done.
    if constexpr (kCluster != 1) ptx::cluster_sync();
}

}  // namespace nib
