// The backward pass of kernels/swiglu/swiglu_plain.cuh, and of kernels/swiglu/swiglu.cuh in BF16.
//
// Reads h [rows][2f] = [g | u], da [rows][f] and weight[rows] (null: 1). Writes dh [rows][2f] = [dg |
// du], the forward pass's a [rows][f] (null: not written) and dweight[rows]. Rows with a negative row_id
// are padding, and give zeros. Matrices are 16-byte aligned. 256 threads per CTA, one warp per row.
// swiglu_backward_plain<AnyChunk>: flags say which matrices are BF16; the others are F32. Any grid size gives correct results.
// <Bf16Chunk>: h and da are BF16 and f % 8 == 0. <SavedChunk>: h is MXFP4 with codes [rows][f] bytes and h_scales [rows][2f / 32], da is BF16,
//   and f % 32 == 0. Any grid size gives correct results, and four CTAs per SM are fastest. Dynamic shared memory: sizeof(SigmoidTable).
#pragma once
#include "formats/e2m1.cuh"
#include "formats/e8m0.cuh"
#include "formats/f32_or_bf16.cuh"
#include "math/reduce.cuh"
#include "math/sigmoid_table.cuh"
#include "pieces/swiglu/swiglu_grad.cuh"

namespace nib {

constexpr int kPlainRowThreads = 256;

/// The inputs, and flags that say whether they are BF16.
struct PlainSource {
    const u8 *h, *h_scales, *da;
    int h_bf16, da_bf16;
    int f;
};

/// The next 256 columns of a warp.
struct AnyChunk {
    static constexpr bool kTable = false;  // whether sigmoids are looked up in a table
    using Eight = F32::Eight;
    Eight gate, up, da;

    __device__ __forceinline__ void load(const PlainSource& of, u32 row, int col, bool counted) {
        const int left = counted ? of.f - col : 0;
        gate = load_f32_or_bf16(of.h, of.h_bf16, u64(row) * 2 * of.f + col, left);
        up = load_f32_or_bf16(of.h, of.h_bf16, u64(row) * 2 * of.f + of.f + col, left);
        da = load_f32_or_bf16(of.da, of.da_bf16, u64(row) * of.f + col, left);
    }
    __device__ __forceinline__ static float value(const Eight& x, int i) { return x.number[i]; }
    __device__ __forceinline__ const Eight& gates() const { return gate; }
    __device__ __forceinline__ const Eight& ups() const { return up; }
    __device__ __forceinline__ static void sigmoids(u32, const Eight& gates, float (&s)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = sigmoid(gates.number[i]);
    }
    __device__ __forceinline__ static void store(u8* to, bool is_bf16, u64 at, int left, const F32::Eight& x) {
        store_f32_or_bf16(to, is_bf16, at, left, x);
    }
};

/// Common base for BF16 inputs.
struct TableChunk {
    static constexpr bool kTable = true;
    using Eight = Bf16::Eight;

    __device__ __forceinline__ static float value(const Eight& x, int i) { return Bf16::value(x, i); }
    __device__ __forceinline__ static void sigmoids(u32 table, const Eight& gates, float (&s)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float two[2];
            SigmoidTable::two(table, gates.word[i], two);
            s[2 * i] = two[0];
            s[2 * i + 1] = two[1];
        }
    }
    __device__ __forceinline__ static void store(u8* to, bool is_bf16, u64 at, int left, const F32::Eight& x) {
        if (left <= 0) return;
        if (is_bf16) ptx::store_16(to + at * Bf16::kBytes, to_bf16(x));
        else store_eight(to + at * F32::kBytes, x);
    }
};

struct Bf16Chunk : TableChunk {
    Eight gate, up, da;

    __device__ __forceinline__ void load(const PlainSource& of, u32 row, int col, bool counted) {
        const int left = counted ? of.f - col : 0;
        const u8* const from = of.h + (u64(row) * u32(2 * of.f) + u32(col)) * Bf16::kBytes;
        gate = Bf16::load<true>(from, left);
        up = Bf16::load<true>(from + u32(of.f) * Bf16::kBytes, left);
        da = Bf16::load<true>(of.da + (u64(row) * u32(of.f) + u32(col)) * Bf16::kBytes, left);
    }
    __device__ __forceinline__ const Eight& gates() const { return gate; }
    __device__ __forceinline__ const Eight& ups() const { return up; }
};

/// h in MXFP4, as the forward pass saved it. Codes are decoded
/// only where their values are used, because this saves registers.
struct SavedChunk : TableChunk {
    u32 gate, up;  // codes of the gate and of up
    u32 gate_scale, up_scale;
    Eight da;

    __device__ __forceinline__ void load(const PlainSource& of, u32 row, int col, bool counted) {
        const int left = counted ? of.f - col : 0;
        const u32 half = u32(of.f) / 2, blocks = u32(of.f) / E2m1::kBlock;
        const u8* const codes = of.h + (u64(row) * u32(of.f) + u32(col) / 2);
        const u8* const scales = of.h_scales + (u64(row) * 2 * blocks + u32(col) / E2m1::kBlock);
        gate = ptx::load_4_if(left > 0, codes), up = ptx::load_4_if(left > 0, codes + half);
        gate_scale = left > 0 ? __ldg(scales) : 0, up_scale = left > 0 ? __ldg(scales + blocks) : 0;
        da = Bf16::load<true>(of.da + (u64(row) * u32(of.f) + u32(col)) * Bf16::kBytes, left);
    }
    __device__ __forceinline__ Eight gates() const { return E2m1::widen(gate, e8m0_bf16x2(gate_scale)); }
    __device__ __forceinline__ Eight ups() const { return E2m1::widen(up, e8m0_bf16x2(up_scale)); }
};

template <class Chunk>
__global__ void __launch_bounds__(kPlainRowThreads, Chunk::kTable ? 4 : 2)
    swiglu_backward_plain(const u8* __restrict__ h, const u8* __restrict__ h_scales, int h_bf16, const u8* __restrict__ da, int da_bf16,
                          const float* __restrict__ weight, u8* __restrict__ dh, int dh_bf16, u8* __restrict__ a, int a_bf16,
                          float* __restrict__ dweight, const int* __restrict__ row_id, int rows, int f) {
    constexpr int kCols = 2 * kPart;
    extern __shared__ __align__(128) u8 raw[];
    SigmoidTable& sigmoids = *reinterpret_cast<SigmoidTable*>(raw);  // not used if kTable is false
    u32 table = 0;
    if constexpr (Chunk::kTable) {
        sigmoids.fill();
        __syncthreads();
        table = sigmoids.base();
    }
    const PlainSource source = {h, h_scales, da, h_bf16, da_bf16, f};
    const int lane = threadIdx.x % 32;
    constexpr int kWarps = kPlainRowThreads / 32;
    const u32 stride = gridDim.x * kWarps;
    const auto counts = [&](u32 row) { return row < u32(rows) && (row_id == nullptr || __ldg(row_id + row) >= 0); };
    u32 row = blockIdx.x * kWarps + threadIdx.x / 32;
    bool counted = counts(row), next_counted = counts(row + stride);
    // The next chunk is loaded while this chunk is processed.
    Chunk now;
    if (row < u32(rows)) now.load(source, row, lane * 8, counted);
    for (; row < u32(rows); row += stride) {
        const float w = counted && weight != nullptr ? __ldg(weight + row) : 1.0f;
        const bool after_next = counts(row + 2 * stride);
        float sum = 0.0f;
        for (int first = 0; first < f; first += kCols) {
            const int col = first + lane * 8, left = f - col;
            Chunk next;
            if (first + kCols < f) next.load(source, row, col + kCols, counted);
            else next.load(source, row + stride, lane * 8, next_counted);
            F32::Eight dg, du, again;
            float s[8], terms[8], das[8];
            const typename Chunk::Eight gates = now.gates(), ups = now.ups();
            Chunk::sigmoids(table, gates, s);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                das[i] = Chunk::value(now.da, i);
                const SwigluGrad grad = swiglu_grad(gate_terms(Chunk::value(gates, i), s[i]), Chunk::value(ups, i), das[i], w);
                dg.number[i] = grad.gate;
                du.number[i] = grad.up;
                again.number[i] = grad.a;
                terms[i] = grad.silu_up;
            }
            Chunk::store(dh, dh_bf16, u64(row) * u32(2 * f) + u32(col), left, dg);
            Chunk::store(dh, dh_bf16, u64(row) * u32(2 * f) + u32(f + col), left, du);
            if (a != nullptr) Chunk::store(a, a_bf16, u64(row) * u32(f) + u32(col), left, again);
            // Lanes 0 to 15 sum one partial sum, and lanes 16 to 31 sum the next.
            float part = dot_of_neighbours(terms, das);
#pragma unroll
            for (int far = 1; far < 16; far *= 2) part = __fadd_rn(part, __shfl_xor_sync(kAllLanes, part, far));
            sum = __fadd_rn(sum, part);
            const float second = __shfl_down_sync(kAllLanes, part, 16);
            if (first + kPart < f) sum = __fadd_rn(sum, second);
            now = next;
        }
        if (lane == 0) dweight[row] = sum;
        counted = next_counted;
        next_counted = after_next;
    }
}

}  // namespace nib
