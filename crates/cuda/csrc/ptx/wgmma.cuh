// wgmma: the matrix product of a warpgroup, with operands in shared memory and F32 accumulators in registers.
//
// For the accumulators of m64nN, warp w of the warpgroup holds rows 16w..16w+15. For each group j of 8
// columns, lane l holds d[4j] and d[4j+1] at row l/4, columns 8j + 2(l%4) + {0, 1}, and d[4j+2] and d[4j+3]
// at row l/4 + 8.
#pragma once
#include "ptx/types.cuh"
#include "ptx/wgmma_lists.cuh"

namespace nib::ptx {

/// The mask that reduces an address to the part within its CTA. In a cluster, higher
/// address bits hold the CTA's rank, but a descriptor has other fields there.
constexpr u32 kWithinCta = (1 << 18) - 1;

/// The low half of the descriptor of a K-major operand whose rows are 128 bytes, in the 128-byte swizzle
/// of TMA. Eight rows form an atom, and atoms are 1024 bytes apart (the stride field). The hardware does
/// not read the leading-dimension field for this layout. The tile starts at a multiple of 1024 bytes.
/// Shared memory ends below 2^18, so adding bytes / 16 never carries out of the address field.
__device__ __forceinline__ u32 wgmma_descriptor_low(u32 tile_address) {
    constexpr u32 kLeading = 1 << 16;
    return kLeading | (tile_address & kWithinCta) >> 4;
}

/// Returns the whole descriptor; its high half is the same for every tile.
__device__ __forceinline__ u64 wgmma_descriptor(u32 low) {
    constexpr u64 kSwizzle128 = u64(1) << 62;
    constexpr u64 kAtomStride = u64(1024 >> 4) << 32;
    return kSwizzle128 | kAtomStride | u64(low);
}

/// The low half of the descriptor of an MN-major BF16 operand, whose contraction goes down
/// the rows. TMA writes this operand in boxes of 64 elements (128 bytes) by as many rows
/// as a stage has. Eight rows form an atom; the next 64 elements are `box_bytes` further.
__device__ __forceinline__ u32 wgmma_descriptor_low_transposed(u32 tile_address, u32 box_bytes) {
    return (box_bytes >> 4) << 16 | (tile_address & kWithinCta) >> 4;
}

/// Orders register and shared-memory accesses before the first wgmma of a batch.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Keeps the compiler from moving uses of the accumulators across this point. Without this function the compiler
/// assumes that a wgmma has finished once it is issued.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Waits for all committed batches of this warp.
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

/// Waits until at most `kPending` committed batches of this warp are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_until() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// The type of an FP8 element.
enum class Fp8 { kE4m3, kE5m2 };

#define NIB_WGMMA_FP8(elements)                                    \
    asm volatile(                                                  \
        "{\n"                                                      \
        ".reg .pred keep;\n"                                       \
        "setp.ne.b32 keep, %66, 0;\n"                              \
        "wgmma.mma_async.sync.aligned.m64n128k32.f32." elements " {" \
        NIB_NAMES_64                                               \
        "}, %64, %65, keep, 1, 1;\n"                               \
        "}\n"                                                      \
        : NIB_REGISTERS_64                                         \
        : "l"(a), "l"(b), "r"(int(accumulate)))

/// Computes d = A·Bᵀ (+ d if `accumulate`) for FP8 elements of these types; the shape is 64 x 128 x 32.
template <Fp8 kA, Fp8 kB>
__device__ __forceinline__ void wgmma_m64n128k32_fp8(float (&d)[64], u64 a, u64 b, bool accumulate) {
    if constexpr (kA == Fp8::kE4m3 && kB == Fp8::kE4m3)
        NIB_WGMMA_FP8("e4m3.e4m3");
    else if constexpr (kA == Fp8::kE4m3)
        NIB_WGMMA_FP8("e4m3.e5m2");
    else if constexpr (kB == Fp8::kE4m3)
        NIB_WGMMA_FP8("e5m2.e4m3");
    else
        NIB_WGMMA_FP8("e5m2.e5m2");
}
#undef NIB_WGMMA_FP8

/// Computes d = A·Bᵀ (+ d if `accumulate`) in BF16; the shape is 64 x 128 x 16. kTransposed: both operands are MN-major.
template <bool kTransposed>
__device__ __forceinline__ void wgmma_m64n128k16_bf16(float (&d)[64], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred keep;\n"
        "setp.ne.b32 keep, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        NIB_NAMES_64
        "}, %64, %65, keep, 1, 1, %67, %67;\n"
        "}\n"
        : NIB_REGISTERS_64
        : "l"(a), "l"(b), "r"(int(accumulate)), "n"(kTransposed ? 1 : 0));
}

}  // namespace nib::ptx
