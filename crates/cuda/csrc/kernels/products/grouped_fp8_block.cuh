// Grouped GEMM D = A·Bᵀ with FP8 operands and block scales: the expert layer's GEMMs in fprop, dgrad and wgrad.
//
// kRagged::kRows (fprop, dgrad): the len[g] rows of A and D from row start[g] on belong to group g, whose matrix is the
//   n rows of B from row g·n on. Group starts are multiples of 128. Rows of D outside all groups are written as zeros.
// kRagged::kContraction (wgrad): D is a stack of matrices [m][n], one per group. The contraction of A [m][k] and B [n][k] runs over
//   len[g] columns from column start[g] on, rounded up to 128 columns; codes past len[g] are zeros. An empty group gives zeros.
//
// A: codes [rows][k], k contiguous, k % 16 == 0, with 1x128 scales. kA and kB are the elements of A and B: E4M3 or E5M2.
// B: codes [rows][k], with 128x128, 32x128 or 1x128 scales (kScalesB).
//    A scale is F32 or an E8M0 byte. The scale of block `block` (along the contraction) of row `row` is at row * row_stride + block * block_stride.
// D: BF16 or F32. The product overwrites D or, with kAdds, is added to D. kTransposed: D is [n][m]. The rows of D are multiples of 16 bytes.
//
// Arithmetic: the tensor cores multiply 128 elements of k. Then the CUDA cores compute total =
// fma(scale_a * scale_b, partial, total) in F32, because Hopper's FP8 accumulators have too
// few bits for a longer sum. The order of the sums is fixed, so every run gives the same bits.
//
// Grid: persistent CTAs, one per SM. The kCluster CTAs of a cluster compute adjacent column tiles and share the rows of A.
// CTA: three warpgroups. In the first warpgroup, one warp loads tiles with TMA into a ring of stages, and two or three warps fetch
// the scales. The other two warpgroups multiply in waves of 64 rows: one computes the waves that start at rows 0 and 128, the other
// those that start at rows 64 and 192. So both warpgroups share the work of a tile with few rows, and rows past a group's end cost
// no time. Finished sums are stored in parts, while the tensor cores compute the next product, which accumulates in other registers.
// SharedLayout of fp8_block.cuh defines the layout of shared memory; the launch requests 1024 bytes more, for alignment.
#pragma once
#include "pieces/products/fp8_block.cuh"

namespace nib {

template <ptx::Fp8 kA, ptx::Fp8 kB, Ragged kRagged, ScalesOfB kScalesB, class Out, Adds kAdds, bool kTransposed, int kStages,
          int kCluster, int kOutBuffers, int kBoxes>
__global__ void __launch_bounds__(384, 1)
    grouped_fp8_block(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                      const __grid_constant__ TensorMap map_d, const __grid_constant__ Scales scales_a,
                      const __grid_constant__ Scales scales_b, const __grid_constant__ Groups groups, Out* d) {
    using Shared = SharedLayout<kStages, kOutBuffers, kBoxes, kScalesB, Out>;
    extern __shared__ u8 raw[];
    // Dynamic shared memory is only 16-byte aligned.
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int warp = same_in_all(threadIdx.x / 32);
    begin<kStages, kCluster, 1 + scale_warps(kScalesB)>(shared, map_a, map_b, map_d, [&] {
        for (int i = 0; kAdds == Adds::kInWarp && i < kMathWarps * kOutBuffers; ++i)
            ptx::barrier_init(shared.loaded[i / kOutBuffers][i % kOutBuffers], 1);
    });

    if (warp < 4) {
        ptx::registers_shrink_to<56>();
        if (warp == 0)
            produce<kRagged, kStages, kCluster>(shared, map_a, map_b, groups);
        else if (warp <= scale_warps(kScalesB))
            fetch_scales<kRagged, kStages, kCluster, kScalesB>(shared, scales_a, scales_b, groups, threadIdx.x - 32);
    } else {
        ptx::registers_grow_to<224>();
        consume<kA, kB, kRagged, kStages, kCluster, kOutBuffers, kBoxes, kScalesB, kAdds, kTransposed, Out>(shared, map_d, warp - 4);
        if constexpr (kRagged == Ragged::kRows) clear_tail(d, groups);
    }
    // Other CTAs of the cluster may still arrive at this CTA's barriers or multicast
    // into its ring, so no CTA exits before all CTAs of the cluster have finished.
    if constexpr (kCluster != 1) ptx::cluster_sync();
}

}  // namespace nib
