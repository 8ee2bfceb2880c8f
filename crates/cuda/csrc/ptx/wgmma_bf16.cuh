// wgmma on BF16 with F32 accumulators, for attention: A comes from shared memory or from registers, and B is K-major or MN-major.
//
// ptx/wgmma.cuh describes the layout of the accumulators. A may come from registers, 16 values of k at a time.
// Then in lane l, a[0] is row l/4, k = 2(l%4) + {0, 1}; a[1] is row l/4 + 8 at the same k; a[2] and a[3] are the
// same rows at k + 8. So two adjacent accumulators of an earlier WGMMA, packed to BF16, are one register of A.
#pragma once
#include "ptx/types.cuh"
#include "ptx/wgmma_lists.cuh"

namespace nib::ptx {

/// Computes d = A·B (kFresh) or d += A·B, with shape 64 x 64 x 16. A is K-major; B is K-major (MN-major with kDown).
template <bool kDown, bool kFresh>
__device__ __forceinline__ void wgmma_bf16(float (&d)[32], u64 a, u64 b) {
    if constexpr (kFresh) {
        asm volatile(
            "{\n"
            ".reg .pred keep;\n"
            "setp.ne.b32 keep, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NIB_NAMES_32 "}, %32, %33, keep, 1, 1, 0, %34;\n"
            "}\n"
            : NIB_FRESH_32
            : "l"(a), "l"(b), "n"(kDown ? 1 : 0));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NIB_NAMES_32 "}, %32, %33, 1, 1, 1, 0, %34;\n"
                     : NIB_REGISTERS_32
                     : "l"(a), "l"(b), "n"(kDown ? 1 : 0));
    }
}

/// Computes d = A·B (kFresh) or d += A·B, with shape 64 x 64 x 16 and A in registers.
template <bool kDown, bool kFresh>
__device__ __forceinline__ void wgmma_bf16(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    if constexpr (kFresh) {
        asm volatile(
            "{\n"
            ".reg .pred keep;\n"
            "setp.ne.b32 keep, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NIB_NAMES_32 "}, {%32, %33, %34, %35}, %36, keep, 1, 1, %37;\n"
            "}\n"
            : NIB_FRESH_32
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kDown ? 1 : 0));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NIB_NAMES_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;\n"
                     : NIB_REGISTERS_32
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kDown ? 1 : 0));
    }
}

/// Computes d = A·B (kFresh) or d += A·B, with shape 64 x 128 x 16. A is K-major; B is K-major (MN-major with kDown).
template <bool kDown, bool kFresh>
__device__ __forceinline__ void wgmma_bf16(float (&d)[64], u64 a, u64 b) {
    if constexpr (kFresh) {
        asm volatile(
            "{\n"
            ".reg .pred keep;\n"
            "setp.ne.b32 keep, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NIB_NAMES_64 "}, %64, %65, keep, 1, 1, 0, %66;\n"
            "}\n"
            : NIB_FRESH_64
            : "l"(a), "l"(b), "n"(kDown ? 1 : 0));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NIB_NAMES_64 "}, %64, %65, 1, 1, 1, 0, %66;\n"
                     : NIB_REGISTERS_64
                     : "l"(a), "l"(b), "n"(kDown ? 1 : 0));
    }
}

/// Computes d = A·B (kFresh) or d += A·B, with shape 64 x 128 x 16 and A in registers.
template <bool kDown, bool kFresh>
__device__ __forceinline__ void wgmma_bf16(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    if constexpr (kFresh) {
        asm volatile(
            "{\n"
            ".reg .pred keep;\n"
            "setp.ne.b32 keep, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NIB_NAMES_64 "}, {%64, %65, %66, %67}, %68, keep, 1, 1, %69;\n"
            "}\n"
            : NIB_FRESH_64
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kDown ? 1 : 0));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NIB_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;\n"
                     : NIB_REGISTERS_64
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kDown ? 1 : 0));
    }
}

/// Computes d += A·B, with shape 64 x 192 x 16 and A in registers. B is K-major (MN-major with kDown).
template <bool kDown, bool kFresh>
__device__ __forceinline__ void wgmma_bf16(float (&d)[96], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    static_assert(!kFresh);
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NIB_NAMES_96 "}, {%96, %97, %98, %99}, %100, 1, 1, 1, %101;\n"
                 : NIB_REGISTERS_96
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kDown ? 1 : 0));
}

/// Computes d += A·B, with shape 64 x 2·kCount x 16; both operands are MN-major and in shared memory.
template <int kCount>
__device__ __forceinline__ void wgmma_bf16_down(float (&d)[kCount], u64 a, u64 b) {
    if constexpr (kCount == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NIB_NAMES_64 "}, %64, %65, 1, 1, 1, 1, 1;\n"
                     : NIB_REGISTERS_64
                     : "l"(a), "l"(b));
    } else {
        static_assert(kCount == 96);
        asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NIB_NAMES_96 "}, %96, %97, 1, 1, 1, 1, 1;\n"
                     : NIB_REGISTERS_96
                     : "l"(a), "l"(b));
    }
}

}  // namespace nib::ptx
