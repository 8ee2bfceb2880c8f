// SwiGLU: computes a = silu(g) · u · w from h = [g | u], quantized or in BF16.
// From the same read of h, the kernel can also quantize h for the backward pass.
//
// swiglu_rows<kRule, kSaveH>: h is BF16 [rows][2f]; weight is [rows] (null: 1). a has E4M3 codes [rows][f] and scales [rows][ceil(f / 128)]; with
//   kRulePlain, a is BF16 [rows][f] without scales and counts. kSaveH: h4 has MXFP4 codes [rows][f] and scales [rows][2f / 32] by the rule rceil. row_id
//   and counts (of a's blocks) have the meaning of kernels/convert/quantize.cuh; padding rows give zeros. f % 32 == 0; buffers are 16-byte aligned.
//   640 threads per CTA, no dynamic shared memory. A warp computes a segment of 512 columns of a at a time; segments = ceil(f / 512), and `by_segments`
//   divides by it. Any grid size gives correct results; one CTA per SM, or the number of CTAs that gives all warps equally many segments, is fastest.
//
// Speed on an H200, in % of the bandwidth limit max((read + written) / 4247 GB/s, written / fill rate), at 32768 x 7168 (32768
// x 2048): BF16 99 % (97 %), E4M3 100 % (96 %), E4M3 with h4 96 % (88 %); in 256 uneven groups 98, 97 and 88 %. With h4 the
// integer pipe is the limit, because it computes the codes of a and h4, the table index of each sigmoid, and the maxima.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/f32_or_bf16.cuh"
#include "math/reduce.cuh"
#include "math/sigmoid_table.cuh"
#include "pieces/convert/row_codes.cuh"
#include "pieces/convert/strip_tile.cuh"

namespace nib {

constexpr int kSwigluThreads = 640;
constexpr int kSwigluChunks = 2;
constexpr int kRulePlain = -1;  // a is BF16, without scales

/// A warp's task: up to kSwigluChunks · 256 columns of a row.
struct SwigluTask {
    u32 row, segment;
    bool counted;
    float weight;
    Bf16::Eight in[2 * kSwigluChunks];  // gate values and up values of each chunk

    /// Starts the loads. A row with a negative id is not loaded.
    __device__ __forceinline__ void load(const u8* h, const float* weights, int id, u32 task, int f, Divider by_segments, u32 segments) {
        row = by_segments.divide(task);
        segment = task - row * segments;
        counted = id >= 0;
        const int col = segment * (kSwigluChunks * kChunkCols) + threadIdx.x % 32 * 8;
        const u8* const from = h + u64(row) * (u32(f) * 4) + u32(col) * 2;
        const u8* const up = from + u32(f) * 2;
#pragma unroll
        for (int i = 0; i < kSwigluChunks; ++i) {
            const int left = counted ? f - col - i * kChunkCols : 0;
            in[2 * i] = Bf16::load<true>(from + i * kChunkCols * Bf16::kBytes, left);
            in[2 * i + 1] = Bf16::load<true>(up + i * kChunkCols * Bf16::kBytes, left);
        }
        // The output of a padding row must be +0, so its weight must not be negative.
        weight = counted && weights != nullptr ? __ldg(weights + row) : 1.0f;
    }
};

/// The scales of two MXFP4 blocks by the rule rceil, from the largest
/// magnitudes of their BF16 values. Each half of a word belongs to one block.
struct Mxfp4Scales {
    u32 bytes;    // scales as stored
    u32 factors;  // factors by which values are multiplied, as BF16
    u32 nan;      // bit 15 or 31 is set if the block has a NaN or infinity

    __device__ __forceinline__ explicit Mxfp4Scales(u32 amax) {
        // The carry of the mantissa into the exponent implements the rule; block_scale uses the same method.
        bytes = ptx::add_clamp_s16x2((amax + 0x003F003F) >> 7 & 0x01FF01FF, 0xFFFEFFFE, 0x00FF00FF);
        factors = 0x7F007F00 - bytes * 128;
        nan = amax + 0x00800080 & 0x80008000;
        if (nan != 0) bytes |= (nan >> 15) * 0xFF;  // rare
    }
};

template <int kRule, bool kSaveH>
__global__ void __launch_bounds__(kSwigluThreads, 1)
    swiglu_rows(const u8* __restrict__ h, const float* __restrict__ weight, u8* __restrict__ a_codes,
                typename ScaleType<kRule>::Stored* __restrict__ a_scales, u8* __restrict__ h_codes, u8* __restrict__ h_scales,
                u64* counts, const int* __restrict__ row_id, int rows, int f, Divider by_segments, u32 segments) {
    using A = E4m3;
    constexpr int kChunks = kSwigluChunks, kWarps = kSwigluThreads / 32;
    constexpr int kLanes = A::kBlock / 8;
    constexpr int kCols = kChunks * kChunkCols;
    constexpr int kBytes = kRule == kRulePlain ? Bf16::kBytes : 1;  // bytes per element of a
    __shared__ SigmoidTable sigmoids;
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32;
    const u32 a_blocks = ceil_div(f, A::kBlock), h_blocks = u32(f) / E2m1::kBlock;  // blocks in one half of a row of h
    const u32 tasks = u32(rows) * segments, stride = gridDim.x * kWarps;
    u32 task = blockIdx.x * kWarps + threadIdx.x / 32;
    SwigluTask one, other;
    // Loads the row id of a task one task ahead of the row itself,
    // because a row load that waited for the id would stall the warp.
    const auto id_of = [&](u32 at) {
        if (at >= tasks) return -1;
        return row_id == nullptr ? 0 : __ldg(row_id + by_segments.divide(at));
    };
    one.load(h, weight, id_of(task), task, f, by_segments, segments);
    int next_id = id_of(task + stride);
    const auto load_next = [&](SwigluTask& next) {
        next.load(h, weight, next_id, task += stride, f, by_segments, segments);
        next_id = id_of(task + stride);
    };
    sigmoids.fill();
    __syncthreads();
    const u32 sigmoid_base = sigmoids.base();
    Tally tally;
    const auto work = [&](const SwigluTask& now) {
        const int col = now.segment * kCols + lane * 8;
        u8* const a_to = a_codes + (u64(now.row) * u32(f) + u32(col)) * kBytes;
        u8* const h_to = kSaveH ? h_codes + u64(now.row) * u32(f) + u32(col) / 2 : nullptr;
        typename ScaleType<kRule>::Stored a_stored[kChunks];
        u32 h_stored[kChunks];  // codes of gate and up
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const Bf16::Eight &gate = now.in[2 * i], &up = now.in[2 * i + 1];
            const int left = f - col - i * kChunkCols;
            u8* const a_at = a_to + i * kChunkCols * kBytes;
            if (!now.counted) {  // zeros are written without computing; codes of h for padding are not written
                if constexpr (kRule == kRulePlain) {
                    if (left > 0) ptx::store_16(a_at, {0, 0, 0, 0});
                } else {
                    a_stored[i] = block_scale<A, kRule>(0).stored;
                    store_codes<A, true>(a_at, left, A::zeros());
                }
                h_stored[i] = 0;
                continue;
            }
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
            if constexpr (kRule == kRulePlain) {
                if (left > 0) ptx::store_16(a_at, to_bf16(a));
            } else {
                float amax = largest_magnitude(a.number);
#pragma unroll
                for (int far = 1; far < kLanes; far *= 2) amax = ptx::max_magnitude(amax, __shfl_xor_sync(kAllLanes, amax, far));
                const auto scale = block_scale<A, kRule>(__float_as_uint(amax));
                a_stored[i] = scale.stored;
                auto out = A::template encode<rule_exceeds(kRule)>(a, scale.inverse);
                if (scale.is_nan()) out = A::zeros();
                store_codes<A, true>(a_at, left, out);
                tally.non_zero += __fmul_rn(amax, scale.inverse) > A::kLargestToZero;
                tally.non_finite += scale.is_nan();
            }
            if constexpr (kSaveH) {
                u32 amax_of_both = Bf16::fold_two(Bf16::fold(Bf16::magnitudes(gate)), Bf16::fold(Bf16::magnitudes(up)));
#pragma unroll
                for (int far = 1; far < E2m1::kBlock / 8; far *= 2)
                    amax_of_both = Bf16::larger(amax_of_both, __shfl_xor_sync(kAllLanes, amax_of_both, far));
                const Mxfp4Scales scales(amax_of_both);
                h_stored[i] = scales.bytes;
                u32 gate_codes = E2m1::encode_within(gate, __byte_perm(scales.factors, 0, 0x1010));
                u32 up_codes = E2m1::encode_within(up, __byte_perm(scales.factors, 0, 0x3232));
                if (scales.nan != 0) {  // rare
                    if (scales.nan & 0x8000) gate_codes = 0;
                    if (scales.nan >> 31) up_codes = 0;
                }
                store_codes<E2m1, true>(h_to + i * (kChunkCols / 2), left, gate_codes);
                store_codes<E2m1, true>(h_to + u32(f) / 2 + i * (kChunkCols / 2), left, up_codes);
            }
        }
        // The lanes of a block store the scales of its chunks, one scale per lane.
        if constexpr (kRule != kRulePlain) {
            const int mine = lane % kLanes;
            const u32 a_block = now.segment * (kCols / A::kBlock) + mine * (kChunkCols / A::kBlock) + lane / kLanes;
            if (mine < kChunks && a_block < a_blocks) a_scales[u64(now.row) * a_blocks + a_block] = pick(a_stored, mine);
        }
        if constexpr (kSaveH) {
            const int half = lane % 2, chunk = lane % 4 / 2;
            const u32 h_block = now.segment * (kCols / E2m1::kBlock) + chunk * (kChunkCols / E2m1::kBlock) + lane / 4;
            if (now.counted && chunk < kChunks && h_block < h_blocks)
                h_scales[(u64(now.row) * 2 + half) * h_blocks + h_block] = u8(pick(h_stored, chunk) >> half * 16);
        }
    };
    // The next task is loaded while this task is processed. The tasks `one` and `other` alternate, so that no
    // registers are copied.
    while (task < tasks) {
        load_next(other);
        work(one);
        if (task >= tasks) break;
        load_next(one);
        work(other);
    }
    tally.flush(counts, total, kLanes);
}

}  // namespace nib
