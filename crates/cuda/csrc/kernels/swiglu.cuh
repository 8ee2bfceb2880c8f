// a = silu(g) · u · w from h = [g | u], quantized, and h quantized for the backward pass, from one read of h.
//
// swiglu_rows<A, kRule, kSaveH, kChunks>: h BF16 [rows][2f]; weight [rows] (null: 1); a codes [rows][f], scales [rows][ceil(f / 128)]; kSaveH:
// h4 codes [rows][f], scales [rows][2f / 32], MXFP4 by the rule rceil. row_id and counts (of a's blocks) as in
// kernels/quantize.cuh; padding gives zeros. f % 32 == 0; planes start on 16 bytes.
//   256 threads; a warp takes a segment of kChunks · 256 columns of a at a time; segments = ceil(f / that), and `by_segments` divides by it.
//   Any grid, best ceil(rows · segments / 8); no dynamic shared memory.
//
// Measured on an H200, 32768 x 2048: a alone with kChunks 2 65 % of the floor, a and h4 56 % (kChunks 2, at most 6 ctas a
// multiprocessor). Instructions bound it: 41 and 58 an element of a, of which silu takes 26.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/quantize.cuh"
#include "math/exp.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kSwigluThreads = 256;

template <class A, int kRule, bool kSaveH, int kChunks>
__global__ void __launch_bounds__(kSwigluThreads, kChunks == 1 ? 5 : kSaveH ? 3 : 6)
    swiglu_rows(const u8* __restrict__ h, const float* __restrict__ weight, u8* __restrict__ a_codes,
                typename ScaleType<kRule>::Stored* __restrict__ a_scales, u8* __restrict__ h_codes, u8* __restrict__ h_scales,
                u64* counts, const int* __restrict__ row_id, int rows, int f, Divider by_segments, u32 segments) {
    constexpr int kLanes = A::kBlock / 8;
    constexpr int kCols = kChunks * kChunkCols;
    constexpr int kHalves = 2 * kChunks;  // gate and up of each chunk
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32;
    const int a_blocks = ceil_div(f, A::kBlock), h_blocks = f / E2m1::kBlock;  // of h's: those of one half
    const u32 tasks = u32(rows) * segments;
    Tally tally;
    for (u32 task = blockIdx.x * (kSwigluThreads / 32) + threadIdx.x / 32; task < tasks; task += gridDim.x * (kSwigluThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int col = segment * kCols + lane * 8;
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const u8* from = h + (u64(row) * 2 * f + col) * Bf16::kBytes;
        Bf16::Eight in[kHalves];
#pragma unroll
        for (int i = 0; i < kHalves; ++i)
            in[i] = Bf16::load<true>(from + (i % 2 * f + i / 2 * kChunkCols) * Bf16::kBytes, counted ? f - col - i / 2 * kChunkCols : 0);
        // Padding is +0, so its weight must not be negative.
        const float w = counted && weight != nullptr ? __ldg(weight + row) : 1.0f;
        F32::Eight a[kChunks];
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float up = __fmul_rn(silu(Bf16::value(in[2 * i], j)), Bf16::value(in[2 * i + 1], j));
                a[i].number[j] = __fmul_rn(up, w);
            }
        u32 amax[kChunks];
        F32::row_maxima<kLanes>(a, amax);
        typename ScaleType<kRule>::Stored a_stored[kChunks];
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const auto scale = block_scale<A, kRule>(amax[i]);
            a_stored[i] = scale.stored;
            auto out = A::template encode<rule_exceeds(kRule)>(a[i], scale.inverse);
            if (scale.is_nan()) out = A::zeros();
            store_codes<A, true>(a_codes + u64(row) * f + col + i * kChunkCols, f - col - i * kChunkCols, out);
            tally.non_zero += __fmul_rn(__uint_as_float(amax[i]), scale.inverse) > A::kLargestToZero;
            tally.non_finite += scale.is_nan();
        }
        const int mine = lane % kLanes;
        const int a_block = segment * (kCols / A::kBlock) + mine * (kChunkCols / A::kBlock) + lane / kLanes;
        if (mine < kChunks && a_block < a_blocks) a_scales[u64(row) * a_blocks + a_block] = pick(a_stored, mine);
        if constexpr (kSaveH) {
            u32 h_amax[kHalves];
            Bf16::row_maxima<E2m1::kBlock / 8>(in, h_amax);
            u8 h_stored[kHalves];
#pragma unroll
            for (int i = 0; i < kHalves; ++i) {
                const auto scale = block_scale<E2m1, kRuleRceil>(h_amax[i]);
                h_stored[i] = scale.stored;
                u32 out = E2m1::encode<false>(in[i], scale.inverse);
                if (scale.is_nan()) out = 0;
                store_codes<E2m1, true>(h_codes + u64(row) * f + (i % 2 * f + col + i / 2 * kChunkCols) / 2, f - col - i / 2 * kChunkCols, out);
            }
            const int half = lane % 4;
            const int h_block = segment * (kCols / E2m1::kBlock) + half / 2 * (kChunkCols / E2m1::kBlock) + lane / 4;
            if (half < kHalves && h_block < h_blocks) h_scales[(u64(row) * 2 + half % 2) * h_blocks + h_block] = pick(h_stored, half);
        }
    }
    tally.flush(counts, total, kLanes);
}

}  // namespace nib
