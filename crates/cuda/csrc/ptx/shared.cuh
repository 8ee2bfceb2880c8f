// Reads of tables in shared memory that nobody writes any more: unlike those through a pointer, the compiler may move them across
// stores. What such an address follows from must have been read behind the barrier that ended the writing.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// Two F32, 8-byte aligned.
__device__ __forceinline__ float2 table_f32x2(u32 address) {
    float2 v;
    asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}

/// 16 bytes, aligned, written where the program says: an ordinary store the compiler may put off, and what it stores then takes registers.
__device__ __forceinline__ void store_shared_in_order(u32 address, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

}  // namespace nib::ptx
