// Access to the shared memory of the other CTAs of a cluster.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// A cluster barrier in two halves; every thread of the cluster calls both halves. `cluster_wait` returns
/// once all threads have arrived. A CTA must pass the barrier before its first write to another CTA's shared
/// memory, because this ensures that the other CTA has started. Work between the halves hides the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory"); }

/// Stores a value in the shared memory of CTA `rank` of the cluster, which may be this CTA, at
/// the address that `place` has here. CTA `rank` sees the value after the next `cluster_sync`.
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
