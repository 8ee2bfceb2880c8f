// Building blocks of the attention kernels on the CUDA cores: tiles of rows in shared memory, and the two GEMMs on
// them.
//
// A tile holds kRows rows of up to kDim elements as F32, transposed: element d of row r is at [d ·
// stride_of<kRows>() + r]. 256 threads form a grid of 16 × 16. A thread has kRows/16 `own` rows,
// from kRows/16 · (thread / 16) on; kRows/16 `other` rows, from kRows/16 · (thread % 16) on; and
// the columns thread % 16 + 16c. Every sum is one chain of fused multiply-adds in a fixed order.
#pragma once
#include "formats/plain.cuh"
#include "pieces/attention/attention_sink.cuh"
#include "pieces/attention/attention_sizes.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kAttentionThreads = 256;

/// The distance in floats from one element of a row to the next. With 4
/// floats of padding, 16-byte reads along rows have no bank conflicts.
template <int kRows>
__host__ __device__ constexpr int stride_of() {
    return kRows + 4;
}

/// Fills a tile with rows of `dim` elements from row `first` on, multiplied by
/// `factor`. Elements past the end of the sequence or of the head are zeros.
template <class T, int kDim, int kRows>
__device__ __forceinline__ void load_rows(float* tile, const u8* from, const AttentionSizes& sizes, int heads, int dim, int sequence,
                                          int head, int first, float factor) {
    const u64 start = element_of(sizes, heads, dim, sequence, first, head);
    const u64 next = u64(heads) * dim;
#pragma unroll 4
    for (int at = threadIdx.x; at < kRows * kDim; at += kAttentionThreads) {
        const int row = at / kDim, d = at % kDim;
        float x = 0.0f;
        if (first + row < sizes.seq_len && d < dim) x = T::number(from + (start + row * next + d) * T::kBytes);
        tile[d * stride_of<kRows>() + row] = x * factor;
    }
}

/// Reads kCount contiguous values, which are aligned to their total size.
template <int kCount>
__device__ __forceinline__ void read(float (&x)[kCount], const float* from) {
    if constexpr (kCount == 4) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        const float2 v = *reinterpret_cast<const float2*>(from);
        x[0] = v.x, x[1] = v.y;
    }
}

/// Computes dot[i][j], the dot product of own row i of `a` and other row j of `b`.
template <int kDim, int kRows>
__device__ __forceinline__ void multiply_rows(float (&dot)[kRows / 16][kRows / 16], const float* a, const float* b) {
    constexpr int kOwn = kRows / 16;
    a += threadIdx.x / 16 * kOwn;
    b += threadIdx.x % 16 * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn * kOwn; ++i) dot[i / kOwn][i % kOwn] = 0.0f;
#pragma unroll 8
    for (int d = 0; d < kDim; ++d) {
        float x[kOwn], y[kOwn];
        read(x, a + d * stride_of<kRows>());
        read(y, b + d * stride_of<kRows>());
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
#pragma unroll
            for (int j = 0; j < kOwn; ++j) dot[i][j] = __fmaf_rn(x[i], y[j], dot[i][j]);
    }
}

/// Writes the weights of own rows i and other rows j as [other][own], for `add_weighted`.
template <int kRows>
__device__ __forceinline__ void write_weights(float* weights, const float (&w)[kRows / 16][kRows / 16]) {
    constexpr int kOwn = kRows / 16;
    float* const to = weights + threadIdx.x % 16 * kOwn * stride_of<kRows>() + threadIdx.x / 16 * kOwn;
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
#pragma unroll
        for (int i = 0; i < kOwn; ++i) to[j * stride_of<kRows>() + i] = w[i][j];
}

/// Adds to sum[i][c] the sum, over other rows, of the weight times the row's element in column c.
template <int kDim, int kRows>
__device__ __forceinline__ void add_weighted(float (&sum)[kRows / 16][kDim / 16], const float* weights, const float* tile) {
    constexpr int kOwn = kRows / 16;
    weights += threadIdx.x / 16 * kOwn;
    tile += threadIdx.x % 16 * stride_of<kRows>();
#pragma unroll 1
    for (int row = 0; row < kRows; row += 4) {
        float w[4][kOwn];
#pragma unroll
        for (int e = 0; e < 4; ++e) read(w[e], weights + (row + e) * stride_of<kRows>());
#pragma unroll
        for (int c = 0; c < kDim / 16; ++c) {
            float x[4];
            read(x, tile + c * 16 * stride_of<kRows>() + row);
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int i = 0; i < kOwn; ++i) sum[i][c] = __fmaf_rn(w[e][i], x[e], sum[i][c]);
        }
    }
}

/// Multiplies the sums of own rows by `factor[i]`, and writes
/// them, `dim` per row, to a tensor's rows from row `first` on.
template <class T, int kDim, int kRows>
__device__ __forceinline__ void store_rows(u8* to, const float (&sum)[kRows / 16][kDim / 16], const float (&factor)[kRows / 16],
                                           const AttentionSizes& sizes, int heads, int dim, int sequence, int head, int first) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
        const int row = first + threadIdx.x / 16 * (kRows / 16) + i;
        if (row >= sizes.seq_len) break;
        const u64 start = element_of(sizes, heads, dim, sequence, row, head);
#pragma unroll
        for (int c = 0; c < kDim / 16; ++c) {
            const int d = threadIdx.x % 16 + 16 * c;
            if (d < dim) Few<T, 1>::from_f32({sum[i][c] * factor[i]}).store(to + (start + d) * T::kBytes);
        }
    }
}

}  // namespace nib
