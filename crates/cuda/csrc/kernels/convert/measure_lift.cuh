// Counts the blocks of an operand in which the lift inside a GEMM changes a value. Adds three numbers to `counts`: how many blocks have a non-zero
// code, in how many blocks a value changes, and how many blocks are NaN. lift_lines converts in the same way, and counts nothing.
//
// measure_lift<F, kSquares>: reads codes [matrices * n][code_bytes(len)] and the scale records of their blocks, which are contiguous along a line,
//   or across lines. kSquares: 128 lines of a matrix share a scale after the lift. `row_id` has the id of each line, negative for padding, which is
//   not counted; null: all lines are counted. 256 threads per CTA; the grid has matrices * ceil(n / 128) * ceil(len / 128) CTAs. A CTA has 128 values
//   of 128 lines, and a thread two blocks of a line.
// The kernel loads codes in words, or byte by byte, because a training run calls it in only a few steps.
#pragma once
#include "math/reduce.cuh"
#include "pieces/convert/lift.cuh"
#include "pieces/convert/lifted_scale.cuh"
#include "pieces/convert/units.cuh"

namespace nib {

/// Loads the codes of a block, with zeros past the end of a line.
template <int kWords>
__device__ __forceinline__ void load_block(const u8* at, int bytes, bool in_words, u32 (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        words[i] = 0;
        if (in_words && 4 * i + 4 <= bytes) {
            words[i] = __ldg(reinterpret_cast<const u32*>(at) + i);
        } else {
#pragma unroll 1
            for (int b = 4 * i; b < min(bytes, 4 * i + 4); ++b) words[i] |= u32(__ldg(at + b)) << (b % 4 * 8);
        }
    }
}

template <class F, bool kSquares>
__global__ void __launch_bounds__(256) measure_lift(const u8* __restrict__ codes, const RecordPlane from, u64* __restrict__ counts,
                                                    const int* __restrict__ row_id, int n, int len, u32 in_words) {
    using E = typename F::Element;
    constexpr int kBits = E::kBits, kBlock = F::kBlock, kHalf = kBits / 2;
    static_assert(kBlock == 32 && F::kScaleBytes == 1, "a thread has two of the four blocks that share a scale");
    __shared__ u32 above;
    const int across = ceil_div(len, kLifted), down = ceil_div(n, kLifted), blocks = ceil_div(len, kBlock);
    const int matrix = int(blockIdx.x / across) / down, in_matrix = int(blockIdx.x / across) % down * kLifted + int(threadIdx.x / 2);
    const int line = matrix * n + in_matrix, block = int(blockIdx.x % across) * (kLifted / kBlock) + int(threadIdx.x % 2) * 2;
    const bool exists = in_matrix < n;
    u32 source[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) source[i] = exists && block + i < blocks ? from.template load<1>(line, block + i) : kScaleNan;
    u32 largest = max(above_nan(source[0]), above_nan(source[1]));
    if constexpr (kSquares) {
        if (threadIdx.x == 0) above = 0;
        __syncthreads();
        largest = __reduce_max_sync(~0u, largest);
        if (threadIdx.x % 32 == 0) atomicMax(&above, largest);
        __syncthreads();
        largest = above;
    } else {
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    }
    const int target = lifted_scale<E>(largest);
    const u32 line_bytes = code_bytes(kBits, len);
    const bool counted = exists && (row_id == nullptr || __ldg(row_id + line) >= 0);
    u32 found[3] = {0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        if (!counted || block + i >= blocks) continue;
        const u32 scale = i == 0 ? source[0] : source[1];
        const int left = min(len - (block + i) * kBlock, kBlock);
        u32 words[kBits];
        load_block(codes + u64(line) * line_bytes + (block + i) * (kBlock / 8 * kBits), code_bytes(kBits, left), in_words != 0, words);
        // Counted from the smallest step of E4M3, 2^-9, a value is exact if it is whole. If the scales differ by kLiftFar powers of two, every
        // value has already underflowed to zero, so a larger difference gives the same result.
        const bool is_nan = scale == kScaleNan;
        const float steps = __uint_as_float(u32(127 + 9 + (is_nan ? 0 : max(int(scale) - target, -kLiftFar))) << 23);
        bool non_zero = false, changed = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 sixteen[kHalf];
            float value[16];
#pragma unroll
            for (int w = 0; w < kHalf; ++w) sixteen[w] = words[half * kHalf + w];
            E::decode(sixteen, value);
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float x = half * 16 + j < left ? __fmul_rn(value[j], steps) : 0.0f;
                non_zero |= x != 0.0f;
                changed |= x != truncf(x);
            }
        }
        found[0] += non_zero;
        found[1] += changed && !is_nan;
        found[2] += is_nan;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const u32 sum = __reduce_add_sync(~0u, found[i]);
        if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&counts[i], u64(sum));
    }
}

}  // namespace nib
