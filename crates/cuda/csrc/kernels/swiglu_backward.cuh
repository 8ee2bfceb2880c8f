// The backward pass of kernels/swiglu.cuh, with a made again from the saved h: two kernels, so that neither holds both row and
// column blocks of three matrices in registers. Both decode MXFP4 h [rows][2f] (codes, scales [rows][2f / 32]) and read da BF16
// [rows][f] and weight[rows] (null: 1):
//   s = sigmoid(g), dg = da·w·u·s·(1 + g·(1 - s)), du = da·w·silu(g), a = silu(g)·u·w, every product rounded.
// f % 128 == 0; padding (row_id, as in kernels/quantize.cuh) gives zeros; planes start on 16 bytes.
//
// swiglu_backward_rows<E, kRule>: dh = [dg | du] codes [rows][2f], scales [rows][2f / 128]; counts of its blocks; dweight[rows] =
//   Σ silu(g)·u·da over sixteen lanes in order by fma, closed by a tree. 256 threads, a warp a row; any grid.
// swiglu_backward_cols<E, kRule>: dh codes [2f][capacity], scales [2f][capacity / 128]; a codes [f][capacity], scales [f][capacity / 128];
//   counts of a's blocks. 256 threads; grid (f / 64, capacity / 128); no dynamic shared memory.
//
// Measured on an H200, 32768 x 2048: 23 % of the floor for both; the columns alone take 0.31 ms of 0.55.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/column_tile.cuh"
#include "kernels/quantize.cuh"
#include "math/exp.cuh"
#include "math/reduce.cuh"

namespace nib {

/// What one element gives.
struct SwigluGrad {
    float gate, up, a, silu_up;
};

__device__ __forceinline__ SwigluGrad swiglu_grad(float gate, float up, float da, float weight) {
    const float s = sigmoid(gate);
    const float silu = __fmul_rn(gate, s);
    const float silu_up = __fmul_rn(silu, up);
    const float scaled = __fmul_rn(da, weight);
    const float slope = __fadd_rn(1.0f, __fmul_rn(gate, __fsub_rn(1.0f, s)));
    return {__fmul_rn(__fmul_rn(__fmul_rn(scaled, up), s), slope), __fmul_rn(scaled, silu), __fmul_rn(silu_up, weight), silu_up};
}

constexpr int kBackwardWarps = 8;

template <class E, int kRule>
__global__ void __launch_bounds__(kBackwardWarps * 32, 3)
    swiglu_backward_rows(const u8* __restrict__ h_codes, const u8* __restrict__ h_scales, const u8* __restrict__ da,
                         const float* __restrict__ weight, u8* __restrict__ dh_codes,
                         typename ScaleType<kRule>::Stored* __restrict__ dh_scales, float* __restrict__ dweight, u64* counts,
                         const int* __restrict__ row_id, int rows, int f) {
    __shared__ float2 terms[kBackwardWarps][kChunkCols];  // silu(g)·u and da
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int blocks = f / E::kBlock, h_blocks = f / E2m1::kBlock;  // of one half
    Tally tally;
    for (int row = blockIdx.x * kBackwardWarps + warp; row < rows; row += gridDim.x * kBackwardWarps) {
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const float w = counted && weight != nullptr ? __ldg(weight + row) : 1.0f;
        float sum = 0.0f;  // of lane % 16
        for (int first = 0; first < f; first += kChunkCols) {
            const int col = first + lane * 8;
            const bool here = counted && col < f;
            u32 gate_codes = 0, up_codes = 0, gate_scale = 0, up_scale = 0;
            if (here) {
                const u8* codes = h_codes + u64(row) * f + col / 2;
                gate_codes = __ldg(reinterpret_cast<const u32*>(codes));
                up_codes = __ldg(reinterpret_cast<const u32*>(codes + f / 2));
                const u8* scales = h_scales + u64(row) * 2 * h_blocks + col / E2m1::kBlock;
                gate_scale = __ldg(scales);
                up_scale = __ldg(scales + h_blocks);
            }
            const Bf16::Eight d = Bf16::load<true>(da + (u64(row) * f + col) * 2, here ? 8 : 0);
            const float gate_unit = e8m0_decode(gate_scale), up_unit = e8m0_decode(up_scale);
            F32::Eight out[2];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float gate = __fmul_rn(E2m1::decode(gate_codes >> (4 * i)), gate_unit);
                const float up = __fmul_rn(E2m1::decode(up_codes >> (4 * i)), up_unit);
                const float incoming = Bf16::value(d, i);
                const SwigluGrad grad = swiglu_grad(gate, up, incoming, w);
                out[0].number[i] = grad.gate;
                out[1].number[i] = grad.up;
                terms[warp][lane * 8 + i] = {grad.silu_up, incoming};
            }
            u32 amax[2];
            F32::row_maxima<E::kBlock / 8>(out, amax);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto scale = block_scale<E, kRule>(amax[i]);
                auto codes = E::template encode<rule_exceeds(kRule)>(out[i], scale.inverse);
                if (scale.is_nan()) codes = E::zeros();
                store_codes<E, true>(dh_codes + u64(row) * 2 * f + i * f + col, f - col, codes);
                if (lane % 16 == 0 && col < f) dh_scales[(u64(row) * 2 + i) * blocks + col / E::kBlock] = scale.stored;
                tally.non_zero += __fmul_rn(__uint_as_float(amax[i]), scale.inverse) > E::kLargestToZero;
                tally.non_finite += scale.is_nan();
            }
            __syncwarp();
            const int steps = min(kChunkCols, f - first) / 16;
            for (int step = 0; step < steps; ++step) {
                const float2 term = terms[warp][step * 16 + lane % 16];
                sum = __fmaf_rn(term.x, term.y, sum);
            }
            __syncwarp();
        }
#pragma unroll
        for (int far = 8; far >= 1; far /= 2) sum = __fadd_rn(sum, __shfl_down_sync(kAllLanes, sum, far));
        if (lane == 0) dweight[row] = counted ? sum : 0.0f;
    }
    tally.flush(counts, total, E::kBlock / 8);
}

constexpr int kBackwardCols = 64;

template <class E, int kRule>
__global__ void __launch_bounds__(256, 2)
    swiglu_backward_cols(const u8* __restrict__ h_codes, const u8* __restrict__ h_scales, const u8* __restrict__ da,
                         const float* __restrict__ weight, u8* __restrict__ dh_codes,
                         typename ScaleType<kRule>::Stored* __restrict__ dh_scales, u8* __restrict__ a_codes,
                         typename ScaleType<kRule>::Stored* __restrict__ a_scales, u64* counts, const int* __restrict__ row_id,
                         int rows, int f, int capacity) {
    __shared__ ColumnTile dh_tile;                 // dg in columns 0 to 63, du in the others
    __shared__ ColumnTile a_tile;                  // a in columns 0 to 63
    __shared__ u32 maxima[8][3 * kBackwardCols];   // of each warp's rows: dg, du, a
    __shared__ float inverse[3 * kBackwardCols];
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int octet = warp * 2 + lane / 16;
    const int first_row = blockIdx.y * kTile, first_col = blockIdx.x * kBackwardCols;
    const int my_row = first_row + octet * 8, my_col = first_col + lane % 16 * 4;
    const int h_blocks = f / E2m1::kBlock;
    const u32 counted = rows_that_count(row_id, my_row, rows);
    Tally tally;

    u32 gate_codes[8], up_codes[8], scales[8];
    uint2 incoming[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const bool here = counted >> j & 1;
        const u64 row = my_row + j;
        gate_codes[j] = up_codes[j] = scales[j] = 0;
        incoming[j] = {0, 0};
        if (here) {
            const u8* codes = h_codes + row * f + my_col / 2;
            gate_codes[j] = __ldg(reinterpret_cast<const u16*>(codes));
            up_codes[j] = __ldg(reinterpret_cast<const u16*>(codes + f / 2));
            const u8* scale = h_scales + row * 2 * h_blocks + my_col / E2m1::kBlock;
            scales[j] = __ldg(scale) | u32(__ldg(scale + h_blocks)) << 8;
            incoming[j] = ptx::load_8(da + (row * f + my_col) * 2);
        }
    }
    float out[3][4][8];
    u32 largest[3][4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float w = weight != nullptr && counted >> j & 1 ? __ldg(weight + my_row + j) : 1.0f;
        const float gate_unit = e8m0_decode(scales[j] & 0xFF), up_unit = e8m0_decode(scales[j] >> 8);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float gate = __fmul_rn(E2m1::decode(gate_codes[j] >> (4 * c)), gate_unit);
            const float up = __fmul_rn(E2m1::decode(up_codes[j] >> (4 * c)), up_unit);
            const u32 pair = c < 2 ? incoming[j].x : incoming[j].y;
            const SwigluGrad grad = swiglu_grad(gate, up, __uint_as_float(c % 2 ? pair & 0xFFFF0000 : pair << 16), w);
            out[0][c][j] = grad.gate;
            out[1][c][j] = grad.up;
            out[2][c][j] = grad.a;
#pragma unroll
            for (int m = 0; m < 3; ++m) largest[m][c] = F32::larger(largest[m][c], __float_as_uint(out[m][c][j]) & 0x7FFFFFFF);
        }
    }
#pragma unroll
    for (int m = 0; m < 3; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const u32 both = F32::larger(largest[m][c], __shfl_xor_sync(kAllLanes, largest[m][c], 16));
            if (lane < 16) maxima[warp][m * kBackwardCols + lane * 4 + c] = both;
        }
    __syncthreads();
    if (threadIdx.x < 3 * kBackwardCols) {
        u32 amax = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) amax = F32::larger(amax, maxima[i][threadIdx.x]);
        const auto scale = block_scale<E, kRule>(amax);
        inverse[threadIdx.x] = scale.inverse;
        const int m = threadIdx.x / kBackwardCols;
        const u64 line = first_col + threadIdx.x % kBackwardCols + (m == 1 ? f : 0);
        (m == 2 ? a_scales : dh_scales)[line * (capacity / kTile) + blockIdx.y] = scale.stored;
        if (m == 2) {
            tally.non_zero += __fmul_rn(__uint_as_float(amax), scale.inverse) > E::kLargestToZero;
            tally.non_finite += scale.is_nan();
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 3; ++m) {
        const int in_tile = lane % 16 * 4 + (m == 1 ? kBackwardCols : 0);
        u8* const place = (m == 2 ? a_tile : dh_tile).place(in_tile / 8 * 8, octet) + in_tile % 8 * kTile;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float by = inverse[m * kBackwardCols + lane % 16 * 4 + c];
            u16 two[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) two[j] = E::pair(__fmul_rn(out[m][c][2 * j], by), __fmul_rn(out[m][c][2 * j + 1], by));
            uint2 codes = {ptx::pack_u16(two[0], two[1]), ptx::pack_u16(two[2], two[3])};
            if (__float_as_uint(by) == kNanBits) codes = {0, 0};
            ptx::store_8(place + c * kTile, codes);
        }
    }
    __syncthreads();
    u8* const gate_line = dh_codes + u64(first_col) * capacity + first_row;
    dh_tile.store<256>(gate_line, kBackwardCols, gate_line + u64(f) * capacity, kBackwardCols, capacity);
    u8* const a_line = a_codes + u64(first_col) * capacity + first_row;
    a_tile.store<256>(a_line, kBackwardCols, a_line, 0, capacity);
    tally.flush(counts, total);
}

}  // namespace nib
