// A thread's position within its warp and its cluster; barriers, register allocation and warp-wide operations.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

__device__ __forceinline__ u32 lane_idx() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/// Returns the lane index, which is read again at each call. So the
/// compiler does not keep values derived from it in registers between uses.
__device__ __forceinline__ u32 lane_idx_anew() {
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/// Makes the compiler compute `x` before this point, not at its first use.
__device__ __forceinline__ void compute_by_now(u32& x) { asm volatile("" : "+r"(x)); }

/// Returns the rank of this CTA in its cluster, or 0 if the kernel was launched without clusters.
__device__ __forceinline__ u32 cluster_cta_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// A barrier of all threads of all CTAs of the cluster. It also makes shared-memory writes, such as mbarrier.init, visible
/// to the other CTAs. The instruction is not `.aligned`, because the lanes of the loading warp arrive at different times.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;\n" ::: "memory");
}

/// Waits until the preceding kernels have finished and their writes are visible. In a kernel that is launched early
/// (`Kernel::launch_early`), every thread calls this function before it accesses memory that those kernels read or
/// write.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Waits at barrier number `kBarrier` for `kThreads` threads of the CTA. Barrier number 0 is the barrier of
/// `__syncthreads`.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

/// Arrives at a barrier without waiting. `kThreads` counts all
/// participants: the threads that arrive and the threads that wait.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(u32 barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

/// Waits at a barrier whose number is known at run time.
template <int kThreads>
__device__ __forceinline__ void named_barrier_wait(u32 barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

/// Releases registers. Every warp of the warpgroup must execute the instruction, in a
/// branch of one if/else per warp role, and the kernel must have __launch_bounds__(threads,
/// 1). In other code, ptxas ignores the instruction (warning C7508).
template <u32 kRegisters>
__device__ __forceinline__ void registers_shrink_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Acquires registers; waits until other warps have released enough registers.
template <u32 kRegisters>
__device__ __forceinline__ void registers_grow_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Returns `value`. The compiler cannot compute anything derived from
/// the result before this point, where it would occupy registers.
__device__ __forceinline__ u32 here(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

/// Converts two F32 values to packed BF16, rounded to nearest even; `low` goes to the lower
/// address.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// Returns the lower of two packed BF16 values, as F32.
__device__ __forceinline__ float low_bf16(u32 packed) { return __uint_as_float(packed << 16); }

/// Returns the higher of two packed BF16 values, as F32.
__device__ __forceinline__ float high_bf16(u32 packed) { return __uint_as_float(packed & 0xFFFF0000); }

/// Computes `low_bf16` by a different instruction. If the same instruction appears twice, the compiler keeps the
/// first result, one register per value.
__device__ __forceinline__ float low_bf16_again(u32 packed) {
    float x;
    asm("prmt.b32 %0, %1, 0, 0x1044;" : "=f"(x) : "r"(packed));
    return x;
}

/// Computes `high_bf16` by a different instruction.
__device__ __forceinline__ float high_bf16_again(u32 packed) {
    float x;
    asm("prmt.b32 %0, %1, 0, 0x3244;" : "=f"(x) : "r"(packed));
    return x;
}

/// Stores four 8x8 tiles of 16-bit elements from a warp's registers: lane 8t+i gives the address of row i of tile t.
__device__ __forceinline__ void store_matrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

/// Loads four 8x8 tiles that `store_matrix_x4` stored.
__device__ __forceinline__ void load_matrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/// Loads four 8x8 tiles of 16-bit elements, transposed: lane 8t+i gives the address of row i of tile t. A lane
/// gets two elements of each tile, which are in column lane / 4 and rows 2·(lane % 4) and 2·(lane % 4) + 1.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace nib::ptx
