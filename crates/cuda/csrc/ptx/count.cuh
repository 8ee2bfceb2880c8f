// Counters in global memory by which CTAs of one kernel wait for others. A CTA that waits must be sure that those that it waits for have begun.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// Adds 1, once all that this thread has written or read before is done: also by copies of the copy engine that it has waited for.
__device__ __forceinline__ void count_up(u32* counter) {
    asm volatile(
        "fence.proxy.async;\n"
        "fence.acq_rel.gpu;\n"
        "red.relaxed.gpu.global.add.u32 [%0], 1;\n" ::"l"(counter)
        : "memory");
}

/// Waits until the counter is `count`, or more. What others did before they counted is then seen by this thread and by copies that it starts.
__device__ __forceinline__ void wait_for_count(const u32* counter, u32 count) {
    u32 now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (now < count);
    asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace nib::ptx
