// A thread's position within its warp and its cluster; barriers, register allocation and warp-wide operations.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

__device__ __forceinline__ u32 lane_idx() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/// The same, but read anew at each call: the compiler does not keep values derived from it in registers between uses.
__device__ __forceinline__ u32 lane_idx_anew() {
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/// Makes the compiler compute `x` before this point, not at its first use.
__device__ __forceinline__ void compute_by_now(u32& x) { asm volatile("" : "+r"(x)); }

/// Rank of this CTA in its cluster; 0 when launched without one.
__device__ __forceinline__ u32 cluster_cta_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// Arrive and wait of every thread of every CTA of the cluster; also makes shared-memory writes (mbarrier.init) visible
/// to the peers. Not `.aligned`: the producer's lanes arrive at different times.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;\n" ::: "memory");
}

/// Waits until the preceding kernels have finished and their writes are visible. In a kernel that is launched early
/// (`Kernel::launch_early`) every thread calls this before it touches memory that those kernels read or write.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Waits at barrier number `kBarrier` for `kThreads` threads of the CTA. Number 0 is the barrier of `__syncthreads`.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

/// Arrives at a barrier without waiting. `kThreads` counts all participants: those that arrive and those that wait.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(u32 barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

/// Waits at a barrier whose number is known at run time.
template <int kThreads>
__device__ __forceinline__ void named_barrier_wait(u32 barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

/// Releases registers. Every warp of the warpgroup must execute it, in a branch of one if/else per role, and the kernel
/// must carry __launch_bounds__(threads, 1): otherwise ptxas ignores it (warning C7508).
template <u32 kRegisters>
__device__ __forceinline__ void registers_shrink_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Acquires registers; waits until enough were released.
template <u32 kRegisters>
__device__ __forceinline__ void registers_grow_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Returns `value`, but the compiler computes nothing derived from the result before this point, where it would occupy
/// registers.
__device__ __forceinline__ u32 here(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

/// Two F32 to packed BF16, nearest-even; `low` goes to the lower address.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// The lower of two packed BF16.
__device__ __forceinline__ float low_bf16(u32 packed) { return __uint_as_float(packed << 16); }

/// The higher of two packed BF16.
__device__ __forceinline__ float high_bf16(u32 packed) { return __uint_as_float(packed & 0xFFFF0000); }

/// `low_bf16` by another instruction. If the same instruction appears twice, the compiler keeps the first result, one
/// register per value.
__device__ __forceinline__ float low_bf16_again(u32 packed) {
    float x;
    asm("prmt.b32 %0, %1, 0, 0x1044;" : "=f"(x) : "r"(packed));
    return x;
}

/// `high_bf16` likewise.
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

/// Loads what `store_matrix_x4` stored.
__device__ __forceinline__ void load_matrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/// Loads four 8x8 tiles of 16-bit elements, transposed: lane 8t+i gives the address of row i of tile t. A lane gets two elements of each
/// tile: column lane / 4, rows 2·(lane % 4) and 2·(lane % 4) + 1.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace nib::ptx
