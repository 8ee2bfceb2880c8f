// Loads and stores of data that is streamed from and to global memory.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// Loads 16 bytes, 16-byte aligned, through the read-only path. Bypassing the L1 cache
/// (`L1::no_allocate`, `__ldcs`) made a kernel 7 % slower that reads 470 MB and writes half as much.
__device__ __forceinline__ uint4 load_16(const void* from) { return __ldg(static_cast<const uint4*>(from)); }

/// Loads 8 bytes, 8-byte aligned, through the read-only path.
__device__ __forceinline__ uint2 load_8(const void* from) { return __ldg(static_cast<const uint2*>(from)); }

/// Loads 16 bytes into `v` if `present` is true; otherwise `v` is unchanged and `from`
/// is not read. The load is volatile and does not use the read-only path, so that the
/// compiler does not reorder a loop that loads a whole batch before it stores the batch.
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

/// Loads 4 bytes if `present` is true, else returns 0. The load is volatile, so that it does not
/// move past a barrier. The L2 fetches the surrounding 256 bytes, which other CTAs will need.
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

/// Starts an asynchronous copy of 16 bytes to shared memory, 16-byte aligned.
/// If `present` is false, the copy writes zeros and does not read `from`.
__device__ __forceinline__ void copy_16_async(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}

/// Copies like `copy_16_async`; in addition the L2 fetches the surrounding 256 bytes, which other CTAs
/// will need. This prefetch saves 2 to 4 % of the time of a conversion that reads rows of 128 bytes.
__device__ __forceinline__ void copy_16_async_ahead(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}

/// Copies 4 bytes asynchronously, 4-byte aligned.
__device__ __forceinline__ void copy_4_async(void* to, const void* from, bool present) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 4 : 0)
                 : "memory");
}

/// Closes (commits) a group of this thread's asynchronous copies.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's groups of copies are in
/// flight. A barrier then makes the copies of the other threads visible.
template <int kPending>
__device__ __forceinline__ void copies_wait_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Waits for all copies of this thread. A barrier then makes the copies of the other threads visible.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_16(void* to, uint4 v) { *static_cast<uint4*>(to) = v; }
__device__ __forceinline__ void store_8(void* to, uint2 v) { *static_cast<uint2*>(to) = v; }
/// Stores 8 bytes if `present` is true, by a predicated instruction. With a branch, the compiler computes
/// each address from the beginning; with a predicate, a loop advances its address by one addition.
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
