// Shared memory of the other ctas of a cluster.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// Says that this cta runs, and waits until all of its cluster do: before the first write to another's shared memory. Every thread comes
/// to both; what lies between them costs no waiting.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory"); }

/// Stores a number at this place of another cta's shared memory (or of this one's); seen there behind `cluster_sync`.
__device__ __forceinline__ void store_at(float* place, u32 rank, float value) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.f32 [remote], %2;\n"
        "}\n" ::"r"(shared_address(place)),
        "r"(rank), "f"(value)
        : "memory");
}

}  // namespace nib::ptx
