// The backward pass of kernels/swiglu_plain.cuh.
//
// h [rows][2f] = [g | u], da [rows][f], weight[rows] (null: 1) -> dh [rows][2f] = [dg | du], a [rows][f] as the forward pass made it,
// dweight[rows]; row_id as in kernels/quantize.cuh; padding gives zeros. Matrices start on 16 bytes.
// 256 threads, a warp a row; any grid.
#pragma once
#include "formats/either.cuh"
#include "kernels/swiglu_grad.cuh"

namespace nib {

constexpr int kPlainRowThreads = 256;

__global__ void __launch_bounds__(kPlainRowThreads)
    swiglu_backward_plain(const u8* __restrict__ h, int h_bf16, const u8* __restrict__ da, int da_bf16,
                          const float* __restrict__ weight, u8* __restrict__ dh, int dh_bf16, u8* __restrict__ a, int a_bf16,
                          float* __restrict__ dweight, const int* __restrict__ row_id, int rows, int f) {
    const int lane = threadIdx.x % 32;
    constexpr int kWarps = kPlainRowThreads / 32;
    for (u32 row = blockIdx.x * kWarps + threadIdx.x / 32; row < u32(rows); row += gridDim.x * kWarps) {
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const float w = counted && weight != nullptr ? __ldg(weight + row) : 1.0f;
        float sum = 0.0f;
        for (int first = 0; first < f; first += 2 * kPart) {
            const int col = first + lane * 8, left = f - col, present = counted ? left : 0;
            const F32::Eight gate = load_either(h, h_bf16, u64(row) * 2 * f + col, present);
            const F32::Eight up = load_either(h, h_bf16, u64(row) * 2 * f + f + col, present);
            const F32::Eight incoming = load_either(da, da_bf16, u64(row) * f + col, present);
            F32::Eight dg, du, again;
            float terms[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const GateTerms of = gate_terms(gate.number[i], sigmoid(gate.number[i]));
                const SwigluGrad grad = swiglu_grad(of, up.number[i], incoming.number[i], w);
                dg.number[i] = grad.gate;
                du.number[i] = grad.up;
                again.number[i] = grad.a;
                terms[i] = grad.silu_up;
            }
            store_either(dh, dh_bf16, u64(row) * 2 * f + col, left, dg);
            store_either(dh, dh_bf16, u64(row) * 2 * f + f + col, left, du);
            store_either(a, a_bf16, u64(row) * f + col, left, again);
            // Lanes 0 to 15 hold one part, the others the next.
            float part = dot_of_neighbours(terms, incoming.number);
#pragma unroll
            for (int far = 1; far < 16; far *= 2) part = __fadd_rn(part, __shfl_xor_sync(kAllLanes, part, far));
            sum = __fadd_rn(sum, part);
            const float next = __shfl_down_sync(kAllLanes, part, 16);
            if (first + kPart < f) sum = __fadd_rn(sum, next);
        }
        if (lane == 0) dweight[row] = sum;
    }
}

}  // namespace nib
