// The mbarrier: the transaction barrier in shared memory that signals when TMA copies are complete.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// One mbarrier object in shared memory. The parameter `parity` is the low bit of a phase. A new barrier is in
/// phase 0, so a wait for parity 1 returns at once. Thus a producer's first pass through the ring does not block.
struct alignas(8) Barrier {
    u64 state;
};

__device__ __forceinline__ void barrier_init(Barrier& barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

/// Makes this thread's initialisations visible to TMA and to the cluster; a barrier of all threads must follow.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives once, and adds `bytes` to the bytes that TMA must deliver before the phase ends.
__device__ __forceinline__ void barrier_arrive_expect(Barrier& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

/// Arrives once at a barrier of this CTA.
__device__ __forceinline__ void barrier_arrive(Barrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/// Arrives once at the same barrier of another CTA of the cluster (or of this CTA). The instruction
/// deliberately lacks `.release.cluster`, which would add a GPU-wide fence to each arrival. The arrival
/// means "I have read what TMA delivered", and a completed read of shared memory needs no release.
__device__ __forceinline__ void barrier_arrive_at(Barrier& barrier, u32 cta_rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(shared_address(&barrier)),
        "r"(cta_rank)
        : "memory");
}

/// Returns whether the phase with this parity has ended; does not wait.
__device__ __forceinline__ bool barrier_passed(Barrier& barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(passed)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
    return passed != 0;
}

/// Waits until the phase with this parity has ended. try_wait suspends the thread in hardware, so the loop
/// rarely repeats.
__device__ __forceinline__ void barrier_wait(Barrier& barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}\n" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}

}  // namespace nib::ptx
