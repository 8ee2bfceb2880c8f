// SwiGLU from a plain matrix to a plain matrix of any width; flags say whether each matrix is F32 or BF16.
// For a format without a fused kernel, this kernel writes F32 values, which another kernel then quantizes.
//
// Reads h [rows][2f] = [g | u] and weight[rows] (null: 1), and writes a [rows][f] = silu(g)·u·w. Rows with a negative row_id are
// padding, and give zeros. Matrices are 16-byte aligned. A thread computes eight columns at a time; chunks = ceil(f / 8), and
// `by_chunks` divides by it. 256 threads per CTA; any grid size gives correct results, and ceil(rows · chunks / 256) CTAs are fastest.
#pragma once
#include "formats/f32_or_bf16.cuh"
#include "math/exp.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kPlainThreads = 256;

__global__ void __launch_bounds__(kPlainThreads)
    swiglu_plain(const u8* __restrict__ h, int h_bf16, const float* __restrict__ weight, u8* __restrict__ a, int a_bf16,
                 const int* __restrict__ row_id, int rows, int f, Divider by_chunks, u32 chunks) {
    const u32 tasks = u32(rows) * chunks;
    for (u32 task = blockIdx.x * kPlainThreads + threadIdx.x; task < tasks; task += gridDim.x * kPlainThreads) {
        const u32 row = by_chunks.divide(task);
        const int col = (task - row * chunks) * 8;
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const int left = f - col, present = counted ? left : 0;
        const F32::Eight gate = load_f32_or_bf16(h, h_bf16, u64(row) * 2 * f + col, present);
        const F32::Eight up = load_f32_or_bf16(h, h_bf16, u64(row) * 2 * f + f + col, present);
        const float w = counted && weight != nullptr ? __ldg(weight + row) : 1.0f;
        F32::Eight out;
#pragma unroll
        for (int i = 0; i < 8; ++i) out.number[i] = __fmul_rn(__fmul_rn(silu(gate.number[i]), up.number[i]), w);
        store_f32_or_bf16(a, a_bf16, u64(row) * f + col, left, out);
    }
}

}  // namespace nib
