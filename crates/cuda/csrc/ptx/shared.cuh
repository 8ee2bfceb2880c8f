// Accesses to shared memory by address. The order in which the
// compiler places them differs from that of accesses through pointers.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// Reads two F32 values, 8-byte aligned, of a table that no thread writes any more. The compiler
/// may move this read across stores and barriers, unlike a read through a pointer. So `address`
/// must be computed from something that was read after the barrier that ended the writing.
__device__ __forceinline__ float2 table_f32x2(u32 address) {
    float2 v;
    asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}

/// Stores 16 aligned bytes at this point of the program. The compiler may delay
/// an ordinary store, whose operands would then occupy registers for longer.
__device__ __forceinline__ void store_shared_in_order(u32 address, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

}  // namespace nib::ptx
