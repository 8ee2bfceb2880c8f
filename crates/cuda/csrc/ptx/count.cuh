// Counters in global memory by which CTAs of a kernel wait for other CTAs of the same kernel. A waiting CTA must be sure that those CTAs have started.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// Adds 1 after all earlier reads and writes of this thread are
/// complete, including the TMA copies for which the thread has waited.
__device__ __forceinline__ void count_up(u32* counter) {
    asm volatile(
        "fence.proxy.async;\n"
        "fence.acq_rel.gpu;\n"
        "red.relaxed.gpu.global.add.u32 [%0], 1;\n" ::"l"(counter)
        : "memory");
}

/// Waits until the counter is at least `count`. Earlier work of the threads that incremented the counter is then visible to this
/// thread and its copies.
__device__ __forceinline__ void wait_for_count(const u32* counter, u32 count) {
    u32 now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (now < count);
    asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace nib::ptx
