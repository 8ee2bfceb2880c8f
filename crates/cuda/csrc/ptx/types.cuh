// Names of integer types, and the type of a tensor map, so that no kernel needs a CUDA toolkit header.
#pragma once

namespace nib {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

/// The 128 opaque bytes that cuTensorMapEncodeTiled fills. The map must be passed by value as a __grid_constant__
/// parameter, because TMA reads the descriptor where the driver put it.
struct alignas(128) TensorMap {
    u64 opaque[16];
};

/// Returns the 32-bit address of an object within the shared window. TMA, mbarriers and descriptors need such addresses.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

/// Returns the pointer that belongs to a 32-bit shared-memory address.
__device__ __forceinline__ const void* at_shared_address(u32 address) { return __cvta_shared_to_generic(address); }

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace nib
