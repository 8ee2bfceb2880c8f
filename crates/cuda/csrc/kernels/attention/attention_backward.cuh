// The backward pass of attention on the CUDA cores, causal or not. The code supports any sequence length, heads of up to kDim elements, F32 and BF16.
//
// Both kernels read q [t, heads · head_dim], dout [t, heads · value_dim], k [t, kv_heads · head_dim] and v [t, kv_heads · value_dim],
//   of type T; head_dim and value_dim are at most kDim. Both kernels also read lse and delta, which `attention_rows` writes with factor 1.
//   Each kernel computes P = exp(q·k - lse) and dS = P · (dout·v - delta) itself, so that neither kernel adds to sums of the other.
//   256 threads per CTA, tiles of kRows queries by kRows keys. Dynamic shared memory: (4 · kDim + 2 · kRows) · (kRows + 4) · 4 bytes.
// kCausal: query i sees no key after key i. Without kCausal, query i sees all keys of its sequence, and kWindowed is false.
// kWindowed: query i of a sequence sees the keys from first_key[i] on, and key j is seen by the queries before end_query[j]. Neither array
//   decreases. So a CTA skips tiles of keys before the first key of its first query, and tiles of queries after the last query of its last key.
// attention_backward_q<T, kDim, kRows, kCausal, kWindowed>: dq = scale · dS · k. The grid has
//   ceil(seq_len / kRows) · heads · sequences CTAs, and CTAs with the most keys start first.
// attention_backward_kv<T, kDim, kRows, kCausal, kWindowed>: dv = Pᵀ · dout and dk = scale · dSᵀ · q, summed in order over the group's query heads
//   and, within a head, over queries. The grid has ceil(seq_len / kRows) · kv_heads · sequences CTAs, and CTAs with the most queries start first.
#pragma once
#include "pieces/attention/attention_tile.cuh"

namespace nib {

template <int kDim, int kRows>
struct AttentionGradShared {
    float q[kDim * stride_of<kRows>()];
    float dout[kDim * stride_of<kRows>()];
    float k[kDim * stride_of<kRows>()];
    float v[kDim * stride_of<kRows>()];
    float p[kRows * stride_of<kRows>()];
    float ds[kRows * stride_of<kRows>()];
};

template <int kOwn, int kCols>
__device__ __forceinline__ void clear(float (&sum)[kOwn][kCols]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int c = 0; c < kCols; ++c) sum[i][c] = 0.0f;
}

/// Replaces the score of a query and a key by P, and replaces `dp`, which holds dout·v, by dS.
__device__ __forceinline__ void score_grad(float& score, float& dp, bool seen, float lse, float delta) {
    score = seen ? exp_or_nan(score - lse) : 0.0f;
    dp = seen ? score * (dp - delta) : 0.0f;
}

template <class T, int kDim, int kRows, bool kCausal, bool kWindowed>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_backward_q(const u8* __restrict__ q, const u8* __restrict__ k, const u8* __restrict__ v, const u8* __restrict__ dout,
                         const float* __restrict__ lse, const float* __restrict__ delta, u8* __restrict__ dq, AttentionSizes sizes,
                         const int* __restrict__ first_key) {
    static_assert(kCausal || !kWindowed);
    constexpr int kOwn = kRows / 16;
    extern __shared__ uint4 raw[];
    auto& shared = *reinterpret_cast<AttentionGradShared<kDim, kRows>*>(raw);
    const int units = sizes.heads * sizes.sequences;
    const int first = (ceil_div(sizes.seq_len, kRows) - 1 - int(blockIdx.x) / units) * kRows;
    const int unit = int(blockIdx.x) % units;
    const int sequence = unit / sizes.heads, head = unit % sizes.heads;
    const int kv_head = head / (sizes.heads / sizes.kv_heads);
    const int own = first + threadIdx.x / 16 * kOwn, other = threadIdx.x % 16 * kOwn;
    load_rows<T, kDim, kRows>(shared.q, q, sizes, sizes.heads, sizes.head_dim, sequence, head, first, sizes.scale);
    load_rows<T, kDim, kRows>(shared.dout, dout, sizes, sizes.heads, sizes.value_dim, sequence, head, first, 1.0f);
    float own_lse[kOwn], own_delta[kOwn], factor[kOwn];
    int own_first[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        own_lse[i] = lse[u64(u32(unit)) * sizes.padded + own + i];
        own_delta[i] = delta[u64(u32(unit)) * sizes.padded + own + i];
        factor[i] = sizes.scale;
        if constexpr (kWindowed) own_first[i] = first_key_of<true>(first_key, sizes, sequence, own + i);
    }
    float sum[kOwn][kDim / 16];
    clear(sum);
    int begin = 0;
    if constexpr (kWindowed) begin = first_key_of<true>(first_key, sizes, sequence, first) / kRows * kRows;
    const int end = kCausal ? first + 1 : sizes.seq_len;
    for (int key = begin; key < end; key += kRows) {
        __syncthreads();
        load_rows<T, kDim, kRows>(shared.k, k, sizes, sizes.kv_heads, sizes.head_dim, sequence, kv_head, key, 1.0f);
        load_rows<T, kDim, kRows>(shared.v, v, sizes, sizes.kv_heads, sizes.value_dim, sequence, kv_head, key, 1.0f);
        __syncthreads();
        float score[kOwn][kOwn], ds[kOwn][kOwn];
        multiply_rows<kDim, kRows>(score, shared.q, shared.k);
        multiply_rows<kDim, kRows>(ds, shared.dout, shared.v);
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
#pragma unroll
            for (int j = 0; j < kOwn; ++j)
                score_grad(score[i][j], ds[i][j],
                           key + other + j < (kCausal ? own + i + 1 : sizes.seq_len) &&
                               (!kWindowed || key + other + j >= own_first[i]),
                           own_lse[i], own_delta[i]);
        write_weights<kRows>(shared.ds, ds);
        __syncthreads();
        add_weighted<kDim, kRows>(sum, shared.ds, shared.k);
    }
    store_rows<T, kDim, kRows>(dq, sum, factor, sizes, sizes.heads, sizes.head_dim, sequence, head, first);
}

template <class T, int kDim, int kRows, bool kCausal, bool kWindowed>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_backward_kv(const u8* __restrict__ q, const u8* __restrict__ k, const u8* __restrict__ v, const u8* __restrict__ dout,
                          const float* __restrict__ lse, const float* __restrict__ delta, u8* __restrict__ dk, u8* __restrict__ dv,
                          AttentionSizes sizes, const int* __restrict__ end_query) {
    static_assert(kCausal || !kWindowed);
    constexpr int kOwn = kRows / 16;
    extern __shared__ uint4 raw[];
    auto& shared = *reinterpret_cast<AttentionGradShared<kDim, kRows>*>(raw);
    const int units = sizes.kv_heads * sizes.sequences, group = sizes.heads / sizes.kv_heads;
    const int first = int(blockIdx.x) / units * kRows;
    const int unit = int(blockIdx.x) % units;
    const int sequence = unit / sizes.kv_heads, kv_head = unit % sizes.kv_heads;
    const int own = first + threadIdx.x / 16 * kOwn, other = threadIdx.x % 16 * kOwn;
    load_rows<T, kDim, kRows>(shared.k, k, sizes, sizes.kv_heads, sizes.head_dim, sequence, kv_head, first, 1.0f);
    load_rows<T, kDim, kRows>(shared.v, v, sizes, sizes.kv_heads, sizes.value_dim, sequence, kv_head, first, 1.0f);
    float sum_k[kOwn][kDim / 16], sum_v[kOwn][kDim / 16];
    clear(sum_k);
    clear(sum_v);
    int own_end[kOwn], end = sizes.seq_len;
    if constexpr (kWindowed) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own_end[i] = end_query_of<true>(end_query, sizes, sequence, own + i);
        end = end_query_of<true>(end_query, sizes, sequence, min(first + kRows, sizes.seq_len) - 1);
    }
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const u64 rows = (u64(u32(sequence)) * sizes.heads + head) * sizes.padded;
        for (int query = kCausal ? first : 0; query < end; query += kRows) {
            __syncthreads();
            load_rows<T, kDim, kRows>(shared.q, q, sizes, sizes.heads, sizes.head_dim, sequence, head, query, sizes.scale);
            load_rows<T, kDim, kRows>(shared.dout, dout, sizes, sizes.heads, sizes.value_dim, sequence, head, query, 1.0f);
            __syncthreads();
            float score[kOwn][kOwn], ds[kOwn][kOwn];
            multiply_rows<kDim, kRows>(score, shared.k, shared.q);
            multiply_rows<kDim, kRows>(ds, shared.v, shared.dout);
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                const int row = query + other + j;
                const float row_lse = lse[rows + row], row_delta = delta[rows + row];
#pragma unroll
                for (int i = 0; i < kOwn; ++i)
                    score_grad(score[i][j], ds[i][j], row < (kWindowed ? own_end[i] : sizes.seq_len) && (!kCausal || own + i <= row), row_lse,
                               row_delta);
            }
            write_weights<kRows>(shared.p, score);
            write_weights<kRows>(shared.ds, ds);
            __syncthreads();
            add_weighted<kDim, kRows>(sum_v, shared.p, shared.dout);
            add_weighted<kDim, kRows>(sum_k, shared.ds, shared.q);
        }
    }
    float one[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) one[i] = 1.0f;
    store_rows<T, kDim, kRows>(dv, sum_v, one, sizes, sizes.kv_heads, sizes.value_dim, sequence, kv_head, first);
    store_rows<T, kDim, kRows>(dk, sum_k, one, sizes, sizes.kv_heads, sizes.head_dim, sequence, kv_head, first);
}

}  // namespace nib
