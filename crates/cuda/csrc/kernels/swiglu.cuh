// a = silu(g) · u · w from h = [g | u], quantized, and h quantized for the backward pass, from one read of h.
//
// swiglu_rows<kRule, kSaveH>: h BF16 [rows][2f]; weight [rows] (null: 1); a E4M3 codes [rows][f], scales [rows][ceil(f / 128)]; kSaveH:
// h4 codes [rows][f], scales [rows][2f / 32], MXFP4 by the rule rceil. row_id and counts (of a's blocks) as in
// kernels/quantize.cuh; padding gives zeros. f % 32 == 0; planes start on 16 bytes.
//   1024 threads; a warp takes a segment of 512 columns of a at a time; segments = ceil(f / 512), and `by_segments` divides by it.
//   Any grid, best a cta a multiprocessor, as many as share the segments evenly; no dynamic shared memory.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/quantize.cuh"
#include "kernels/strip_tile.cuh"
#include "math/reduce.cuh"
#include "math/sigmoid_table.cuh"

namespace nib {

constexpr int kSwigluThreads = 1024;
constexpr int kSwigluChunks = 2;

/// What a warp works on: up to kSwigluChunks · 256 columns of a row.
struct SwigluTask {
    u32 row, segment;
    bool counted;
    float weight;
    Bf16::Eight in[2 * kSwigluChunks];  // gate and up of each chunk

    /// Reads; nothing past the last task.
    __device__ __forceinline__ void load(const u8* h, const float* weights, const int* row_id, u32 task, u32 tasks, int f,
                                         Divider by_segments, u32 segments) {
        row = by_segments.divide(task);
        segment = task - row * segments;
        const bool exists = task < tasks;
        counted = exists && (row_id == nullptr || __ldg(row_id + row) >= 0);
        const int col = segment * (kSwigluChunks * kChunkCols) + threadIdx.x % 32 * 8;
        const u8* const from = h + u64(row) * (u32(f) * 4) + u32(col) * 2;
        const u8* const up = from + u32(f) * 2;
#pragma unroll
        for (int i = 0; i < kSwigluChunks; ++i) {
            const int left = counted ? f - col - i * kChunkCols : 0;
            in[2 * i] = Bf16::load<true>(from + i * kChunkCols * Bf16::kBytes, left);
            in[2 * i + 1] = Bf16::load<true>(up + i * kChunkCols * Bf16::kBytes, left);
        }
        // Padding is +0, so its weight must not be negative.
        weight = counted && weights != nullptr ? __ldg(weights + row) : 1.0f;
    }
};

template <int kRule, bool kSaveH>
__global__ void __launch_bounds__(kSwigluThreads, 1)
    swiglu_rows(const u8* __restrict__ h, const float* __restrict__ weight, u8* __restrict__ a_codes,
                typename ScaleType<kRule>::Stored* __restrict__ a_scales, u8* __restrict__ h_codes, u8* __restrict__ h_scales,
                u64* counts, const int* __restrict__ row_id, int rows, int f, Divider by_segments, u32 segments) {
    using A = E4m3;
    constexpr int kChunks = kSwigluChunks;
    constexpr int kLanes = A::kBlock / 8;
    constexpr int kCols = kChunks * kChunkCols;
    constexpr int kHalves = 2 * kChunks;
    __shared__ SigmoidTable sigmoids;
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32;
    const u32 a_blocks = ceil_div(f, A::kBlock), h_blocks = u32(f) / E2m1::kBlock;  // of h's: those of one half
    const u32 tasks = u32(rows) * segments, stride = gridDim.x * (kSwigluThreads / 32);
    u32 task = blockIdx.x * (kSwigluThreads / 32) + threadIdx.x / 32;
    sigmoids.fill();
    __syncthreads();
    const u32 sigmoid_base = sigmoids.base();
    Tally tally;
    while (task < tasks) {
        SwigluTask now;
        now.load(h, weight, row_id, task, tasks, f, by_segments, segments);
        task += stride;
        const int col = now.segment * kCols + lane * 8;
        u8* const a_to = a_codes + u64(now.row) * u32(f) + u32(col);
        u8* const h_to = kSaveH ? h_codes + u64(now.row) * u32(f) + u32(col) / 2 : nullptr;
        typename ScaleType<kRule>::Stored a_stored[kChunks];
        u8 h_stored[kHalves];
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const Bf16::Eight &gate = now.in[2 * i], &up = now.in[2 * i + 1];
            const int left = f - col - i * kChunkCols;
            F32::Eight a;
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                float s[2];
                SigmoidTable::two(sigmoid_base, gate.word[j / 2], s);
#pragma unroll
                for (int k = j; k < j + 2; ++k) {
                    const float silu = __fmul_rn(Bf16::value(gate, k), s[k - j]);
                    a.number[k] = __fmul_rn(__fmul_rn(silu, Bf16::value(up, k)), now.weight);
                }
            }
            float amax = largest_magnitude(a.number);
#pragma unroll
            for (int far = 1; far < kLanes; far *= 2) amax = ptx::max_magnitude(amax, __shfl_xor_sync(kAllLanes, amax, far));
            const auto scale = block_scale<A, kRule>(__float_as_uint(amax));
            a_stored[i] = scale.stored;
            auto out = A::template encode<rule_exceeds(kRule)>(a, scale.inverse);
            if (scale.is_nan()) out = A::zeros();
            store_codes<A, true>(a_to + i * kChunkCols, left, out);
            tally.non_zero += __fmul_rn(amax, scale.inverse) > A::kLargestToZero;
            tally.non_finite += scale.is_nan();
            if constexpr (kSaveH) {
                u32 h_amax[2];
                Bf16::row_maxima<E2m1::kBlock / 8>({gate, up}, h_amax);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const auto scale = block_scale<E2m1, kRuleRceil>(h_amax[half]);
                    h_stored[2 * i + half] = scale.stored;
                    u32 out = E2m1::encode_within(now.in[2 * i + half], scale.stored);
                    if (scale.is_nan()) out = 0;
                    store_codes<E2m1, true>(h_to + half * (u32(f) / 2) + i * (kChunkCols / 2), left, out);
                }
            }
        }
        // The lanes of a block store the scales of its chunks, one each.
        const int mine = lane % kLanes;
        const u32 a_block = now.segment * (kCols / A::kBlock) + mine * (kChunkCols / A::kBlock) + lane / kLanes;
        if (mine < kChunks && a_block < a_blocks) a_scales[u64(now.row) * a_blocks + a_block] = pick(a_stored, mine);
        if constexpr (kSaveH) {
            const int half = lane % 4;
            const u32 h_block = now.segment * (kCols / E2m1::kBlock) + half / 2 * (kChunkCols / E2m1::kBlock) + lane / 4;
            if (half < kHalves && h_block < h_blocks) h_scales[(u64(now.row) * 2 + half % 2) * h_blocks + h_block] = pick(h_stored, half);
        }
    }
    tally.flush(counts, total, kLanes);
}

}  // namespace nib
