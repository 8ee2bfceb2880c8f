// The sizes of an attention call, shared by all attention kernels.
#pragma once
#include "ptx/types.cuh"

namespace nib {

constexpr float kLog2E = 1.44269504f;
__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

/// The sizes of an attention call. A row of q has `heads · head_dim` elements, of k
/// `kv_heads · head_dim`, of v `kv_heads · value_dim`, and of out `heads · value_dim`.
struct AttentionSizes {
    int sequences;
    int seq_len;
    int heads;
    int kv_heads;
    int head_dim;
    int value_dim;
    /// seq_len rounded up to whole tiles. In the backward pass,
    /// this is the length of `lse` and of `delta` of a head.
    int padded;
    /// The factor by which scores are multiplied.
    float scale;
};

/// Returns the first element of a head's row in a tensor of `heads` heads of `dim` elements.
__device__ __forceinline__ u64 element_of(const AttentionSizes& sizes, int heads, int dim, int sequence, int row, int head) {
    return (u64(u32(sequence * sizes.seq_len + row)) * heads + head) * dim;
}

/// Returns the first key to which a query attends, which is at most the query's own
/// position. The result is 0 without windows, and for a query past the end of the sequence.
template <bool kWindowed>
__device__ __forceinline__ int first_key_of(const int* first_key, const AttentionSizes& sizes, int sequence, int query) {
    if constexpr (kWindowed) {
        if (query < sizes.seq_len) return min(max(__ldg(first_key + (sequence * sizes.seq_len + query)), 0), query);
    }
    return 0;
}

/// Returns one past the last query that attends to a key; the result is above the key's own
/// position. The result is seq_len without windows, and for a key past the end of the sequence.
template <bool kWindowed>
__device__ __forceinline__ int end_query_of(const int* end_query, const AttentionSizes& sizes, int sequence, int key) {
    if constexpr (kWindowed) {
        if (key < sizes.seq_len) return min(max(__ldg(end_query + (sequence * sizes.seq_len + key)), key + 1), sizes.seq_len);
    }
    return sizes.seq_len;
}

}  // namespace nib
