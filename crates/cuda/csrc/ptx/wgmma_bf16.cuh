// wgmma on BF16 with F32 accumulators, as attention uses it: A from shared memory or from registers, B either way round.
//
// Accumulators lie as ptx/wgmma.cuh says. A from registers: of 16 of k, lane l holds a[0] at row l/4, k 2(l%4) + {0, 1}, a[1] at row
// l/4 + 8, and a[2], a[3] the same 8 of k later: two accumulators' neighbours packed are one register of it.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

#define NIB_NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NIB_FRESH_32 \
    "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), \
    "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), \
    "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), \
    "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
#define NIB_REGISTERS_32 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define NIB_NAMES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define NIB_FRESH_64 \
    "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), \
    "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), \
    "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), \
    "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]), \
    "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]), \
    "=f"(d[40]), "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]), \
    "=f"(d[48]), "=f"(d[49]), "=f"(d[50]), "=f"(d[51]), "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]), \
    "=f"(d[56]), "=f"(d[57]), "=f"(d[58]), "=f"(d[59]), "=f"(d[60]), "=f"(d[61]), "=f"(d[62]), "=f"(d[63])
#define NIB_REGISTERS_64 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

/// d = A·B (kFresh) or d += A·B, 64 x 64 x 16. A's rows and B's columns lie along k, or (kDown) B's lie across.
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

/// The same with A in registers.
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

/// d = A·B (kFresh) or d += A·B, 64 x 128 x 16. A's rows and B's columns lie along k, or (kDown) B's lie across.
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

/// The same with A in registers.
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

#undef NIB_NAMES_32
#undef NIB_REGISTERS_32
#undef NIB_FRESH_32
#undef NIB_NAMES_64
#undef NIB_REGISTERS_64
#undef NIB_FRESH_64

}  // namespace nib::ptx
