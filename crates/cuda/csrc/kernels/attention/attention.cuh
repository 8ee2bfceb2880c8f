// Attention with grouped query heads on the CUDA cores, causal or not. The code supports any sequence length, heads of up to kDim elements, F32 and BF16.
//
// attention<T, kDim, kCausal, kWindowed, kSinks>: q is [t, heads · head_dim], k [t, kv_heads · head_dim], v [t, kv_heads · value_dim],
//   and out [t, heads · value_dim], all of type T. lse [t, heads] holds natural logarithms of the softmax sums. kDim is at least head_dim and value_dim.
//   kCausal: query i sees no key after key i. Without kCausal, query i sees all keys of its sequence, and kWindowed is false.
//   kWindowed: query i of a sequence sees the keys from first_key[i] on, and first_key never decreases. The CTA skips tiles of keys
//   before the first key of its first query. kSinks: the F32 attention sinks `sinks` [heads] are added to each query's softmax sum.
//   256 threads per CTA; the grid has ceil(seq_len / 64) · heads · sequences CTAs, and CTAs with the most keys start first.
//   Dynamic shared memory: (2 · kDim + 64) · 68 · 4 bytes. A CTA has 64 queries of a head. The CTA loops over the keys of these queries, 64 at a time,
//   in order, with an online softmax (Milakov and Gimelshein). All arithmetic is F32; the softmax weights P are not rounded.
#pragma once
#include "math/log.cuh"
#include "pieces/attention/attention_tile.cuh"

namespace nib {

constexpr int kQueries = 64;  // number of queries per CTA, and of keys per tile

template <int kDim>
struct AttentionShared {
    float q[kDim * stride_of<kQueries>()];
    float kv[kDim * stride_of<kQueries>()];  // first a tile of keys, then the values of the same tile
    float weights[kQueries * stride_of<kQueries>()];
};

/// Returns whether the query sees the key. Windows are not considered.
template <bool kCausal>
__device__ __forceinline__ bool sees(int query, int key, int seq_len) {
    return kCausal ? key <= query : key < seq_len;
}

template <class T, int kDim, bool kCausal, bool kWindowed, bool kSinks>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention(const u8* __restrict__ q, const u8* __restrict__ k, const u8* __restrict__ v, u8* __restrict__ out,
              float* __restrict__ lse, AttentionSizes sizes, const int* __restrict__ first_key, const float* __restrict__ sinks) {
    static_assert(kCausal || !kWindowed);
    constexpr int kOwn = kQueries / 16;
    extern __shared__ uint4 raw[];
    auto& shared = *reinterpret_cast<AttentionShared<kDim>*>(raw);
    const int units = sizes.heads * sizes.sequences;
    const int tile = ceil_div(sizes.seq_len, kQueries) - 1 - int(blockIdx.x) / units;
    const int unit = int(blockIdx.x) % units;
    const int sequence = unit / sizes.heads, head = unit % sizes.heads;
    const int kv_head = head / (sizes.heads / sizes.kv_heads);
    const int first = tile * kQueries;
    const int own = threadIdx.x / 16 * kOwn, other = threadIdx.x % 16 * kOwn;
    load_rows<T, kDim, kQueries>(shared.q, q, sizes, sizes.heads, sizes.head_dim, sequence, head, first, sizes.scale);

    float sum[kOwn][kDim / 16];
    float max[kOwn], total[kOwn];
    int own_first[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        if constexpr (kWindowed) own_first[i] = first_key_of<true>(first_key, sizes, sequence, first + own + i);
        max[i] = -infinity(), total[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < kDim / 16; ++c) sum[i][c] = 0.0f;
    }
    int begin = 0;
    if constexpr (kWindowed) begin = first_key_of<true>(first_key, sizes, sequence, first) / kQueries * kQueries;
    const int end = kCausal ? first + 1 : sizes.seq_len;
    for (int key = begin; key < end; key += kQueries) {
        __syncthreads();
        load_rows<T, kDim, kQueries>(shared.kv, k, sizes, sizes.kv_heads, sizes.head_dim, sequence, kv_head, key, 1.0f);
        __syncthreads();
        float score[kOwn][kOwn];
        multiply_rows<kDim, kQueries>(score, shared.q, shared.kv);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            float highest = max[i];
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                if (!sees<kCausal>(first + own + i, key + other + j, sizes.seq_len)) score[i][j] = -infinity();
                if (kWindowed && key + other + j < own_first[i]) score[i][j] = -infinity();
                highest = ptx::max_or_nan(highest, score[i][j]);
            }
#pragma unroll
            for (int lanes = 1; lanes < 16; lanes *= 2)
                highest = ptx::max_or_nan(highest, __shfl_xor_sync(kAllLanes, highest, lanes));
            // `highest` is -infinity if the window begins after this tile.
            // Then no key has been seen so far, and all weights are 0.
            const float base = kWindowed && highest == -infinity() ? 0.0f : highest;
            float seen = 0.0f;
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                score[i][j] = exp_or_nan(score[i][j] - base);
                seen += score[i][j];
            }
#pragma unroll
            for (int lanes = 1; lanes < 16; lanes *= 2) seen += __shfl_xor_sync(kAllLanes, seen, lanes);
            const float less = exp_or_nan(max[i] - base);
            max[i] = highest;
            total[i] = __fmaf_rn(total[i], less, seen);
#pragma unroll
            for (int c = 0; c < kDim / 16; ++c) sum[i][c] *= less;
        }
        write_weights<kQueries>(shared.weights, score);
        __syncthreads();
        load_rows<T, kDim, kQueries>(shared.kv, v, sizes, sizes.kv_heads, sizes.value_dim, sequence, kv_head, key, 1.0f);
        __syncthreads();
        add_weighted<kDim, kQueries>(sum, shared.weights, shared.kv);
    }
    float inverse[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        if constexpr (kSinks) {
            const float less = add_sink(__ldg(sinks + head), max[i], total[i]);
            inverse[i] = less * __frcp_rn(total[i]);
        } else {
            inverse[i] = __frcp_rn(total[i]);
        }
        const int row = first + own + i;
        if (other == 0 && row < sizes.seq_len)
            lse[u64(u32(sequence * sizes.seq_len + row)) * sizes.heads + head] = max[i] + log_of_normal(total[i]);
    }
    store_rows<T, kDim, kQueries>(out, sum, inverse, sizes, sizes.heads, sizes.value_dim, sequence, head, first);
}

}  // namespace nib
