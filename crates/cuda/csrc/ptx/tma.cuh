// TMA, the Tensor Memory Accelerator, for two-dimensional tiles. Coordinates are (fastest dimension, slowest dimension)
// in elements. Loads fill positions outside the tensor with zeros (and count their bytes); stores skip such positions.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace nib::ptx {

__device__ __forceinline__ void tensor_map_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Loads one tile to this CTA's shared memory; `barrier` signals completion.
__device__ __forceinline__ void tma_load(void* tile, const TensorMap& map, Barrier& barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(tile)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y)
        : "memory");
}

/// Loads one tile that will not be read again, so the L2 is told to evict it first.
__device__ __forceinline__ void tma_load_once(void* tile, const TensorMap& map, Barrier& barrier, int x, int y) {
    asm volatile(
        "{\n"
        ".reg .b64 first;\n"
        "createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], "
        "first;\n"
        "}\n" ::"r"(shared_address(tile)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y)
        : "memory");
}

/// Loads one tile of matrix `matrix` of a stack of matrices (a three-dimensional map).
__device__ __forceinline__ void tma_load(void* tile, const TensorMap& map, Barrier& barrier, int x, int y, int matrix) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            shared_address(tile)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(matrix)
        : "memory");
}

/// Copies `bytes` contiguous bytes, a multiple of 16, without a tensor map; both addresses are 16-byte aligned.
/// `barrier` signals completion.
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, Barrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

/// Loads one tile to the same address in every CTA of `cta_mask`; the barrier at the same address in each CTA
/// signals completion.
__device__ __forceinline__ void tma_load_multicast(void* tile, const TensorMap& map, Barrier& barrier, int x, int y,
                                                   u16 cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
        "%4}], [%2], %5;" ::"r"(shared_address(tile)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "h"(cta_mask)
        : "memory");
}

/// Stores one tile from shared memory to a matrix of a stack. Ordinary stores to the tile must have been fenced with
/// `fence_shared_to_async`.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* tile, int x, int y, int matrix) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(shared_address(tile)), "r"(x), "r"(y), "r"(matrix)
                 : "memory");
}

/// Adds the tile to global memory; the L2 performs one addition per element, rounded to nearest
/// even. Ordinary stores to the tile must have been fenced with `fence_shared_to_async`.
__device__ __forceinline__ void tma_add(const TensorMap& map, const void* tile, int x, int y, int matrix) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(shared_address(tile)), "r"(x), "r"(y), "r"(matrix)
                 : "memory");
}

/// Stores `bytes` contiguous bytes from shared memory, without a tensor map. Ordinary stores to
/// these bytes must have been fenced with `fence_shared_to_async`.
__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's committed stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Waits until all of this thread's committed stores are complete.
__device__ __forceinline__ void tma_store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Orders this thread's ordinary writes to shared memory before later reads by TMA or the tensor cores.
__device__ __forceinline__ void fence_shared_to_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace nib::ptx
