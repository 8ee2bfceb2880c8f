// Loads and stores of data that passes through once.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// 16 bytes, through the read-only path. 16-byte aligned. Around the first-level cache (`L1::no_allocate`, `__ldcs`), a kernel that reads
/// 470 MB and writes half as much takes 7 % longer.
__device__ __forceinline__ uint4 load_16(const void* from) { return __ldg(static_cast<const uint4*>(from)); }

/// 8 bytes, likewise.
__device__ __forceinline__ uint2 load_8(const void* from) { return __ldg(static_cast<const uint2*>(from)); }

/// 16 bytes over `v` if `present`; else `from` is not read. Volatile, and not by the read-only path: a loop that loads a batch before it stores
/// the batch stays so.
__device__ __forceinline__ void load_16_over(uint4& v, bool present, const void* from) {
    asm volatile(
        "{\n"
        ".reg .pred present;\n"
        "setp.ne.b32 present, %5, 0;\n"
        "@present ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(int(present)));
}

/// 4 bytes, or zeros if not `present`; otherwise likewise, so that the load does not move behind a barrier. The L2 reads the 256 bytes around
/// them, which other ctas will ask for.
__device__ __forceinline__ u32 load_4_if(bool present, const void* from) {
    u32 v = 0;
    asm volatile(
        "{\n"
        ".reg .pred present;\n"
        "setp.ne.b32 present, %2, 0;\n"
        "@present ld.global.L2::256B.u32 %0, [%1];\n"
        "}\n"
        : "+r"(v)
        : "l"(from), "r"(int(present)));
    return v;
}

/// 16 bytes to shared memory, in the background; zeros if not `present`, and then `from` is not read. 16-byte aligned.
__device__ __forceinline__ void copy_16_async(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}

/// The same, and the L2 reads the 256 bytes around them, which other ctas will ask for: 2 to 4 % of the time of a conversion that reads
/// lines of 128 bytes.
__device__ __forceinline__ void copy_16_async_ahead(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}

/// 4 bytes; zeros if not `present`, and then `from` is not read. 4-byte aligned.
__device__ __forceinline__ void copy_4_async(void* to, const void* from, bool present) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 4 : 0)
                 : "memory");
}

/// Ends a group of this thread's copies.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's groups are under way; a barrier makes the copies of the others visible.
template <int kPending>
__device__ __forceinline__ void copies_wait_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Waits for this thread's copies; a barrier makes those of the others visible.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_16(void* to, uint4 v) { *static_cast<uint4*>(to) = v; }
__device__ __forceinline__ void store_8(void* to, uint2 v) { *static_cast<uint2*>(to) = v; }
/// If `present`. The address is computed anyway: from the one before by one addition, where the compiler would make each anew.
__device__ __forceinline__ void store_8_if(bool present, void* to, uint2 v) {
    asm volatile(
        "{\n"
        ".reg .pred present;\n"
        "setp.ne.b32 present, %3, 0;\n"
        "@present st.global.v2.u32 [%0], {%1, %2};\n"
        "}\n" ::"l"(to),
        "r"(v.x), "r"(v.y), "r"(int(present))
        : "memory");
}
__device__ __forceinline__ void store_4(void* to, u32 v) { *static_cast<u32*>(to) = v; }

}  // namespace nib::ptx
