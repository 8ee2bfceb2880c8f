// The backward pass of causal attention on the tensor cores, as one kernel that computes P and dS only once, in BF16. It supports
// any sequence length, heads of 128 elements, and heads of 192 with values of 128. Every query head needs its own keys and values.
//
// attention_wgmma_backward_once<kDim, kValueDim, kWindowed>: `key_grads` computes dk and dv, and stores dS in the layout of
//   score_grads.cuh; dq = scale · dS · k is then a GEMM with the stored dS. q, k and their gradients are tensor maps of
//   [sequences][seq_len][heads · kDim]; v, dout and dv are tensor maps of [sequences][seq_len][heads · kValueDim]. Boxes have 64 columns
//   by 64 rows (16 rows for gradients), in the 128-byte swizzle; `attention_wgmma_backward_kv` takes the same lse, delta and windows.
//   `score_grads` has plan.slots buffers; each holds the dS of one head, and heads use these slots in turn. `counters` are
//   initially zeros. 384 threads per CTA; the grid has (ceil(seq_len / 128) + ceil(ceil(seq_len / 256) / 2)) · heads ·
//   sequences CTAs, of which any number may be resident at once. Dynamic shared memory: sizeof(OnceShared) + 1008 bytes.
// A CTA processes either 128 keys of a head, or two blocks of 256 queries of a head. A CTA with queries multiplies the dS in a
// slot only after all keys of the head have incremented the slot's `kv_done`. A CTA with keys stores dS in a slot only after the
// queries of the slot's previous head have incremented `q_done`. CTAs take their work in the order in which they start (`ticket`);
// the work on a head's queries comes `ahead` heads after the work on its keys. So CTAs wait only for CTAs that have already
// started, and rarely wait at all. Work on keys is limited by the tensor cores, and work on queries by memory bandwidth, so
// running both concurrently is faster than one after the other. Sums are F32; each sum is computed by one CTA in a fixed order.
//
// Measured on an H100 with random numbers, alternating with the two kernels of attention_wgmma_backward.cuh (this kernel against the two
// kernels). Heads of 192 with values of 128: 12.8 ms against 16.2 ms (4 sequences of 4096 tokens, 128 heads), 1.66 ms against 2.09 ms (the same
// with 16 heads), 5.9 ms against 8.8 ms (2 sequences of 8192, 32 heads), 2.38 ms against 2.64 ms (16 of 1024, 64 heads). Heads of 128: 2.74 ms
// against 3.30 ms (4 of 4096, 32 heads), 0.51 ms against 0.60 ms (16 of 1024, 16 heads). With heads of 64 this kernel takes 1.94 ms against 1.97
// ms, and is slower at 1024 tokens. Heads that share keys would need the dS of a whole group in a slot, which is no faster for 2048 tokens.
#pragma once
#include "pieces/attention/key_grads.cuh"
#include "ptx/count.cuh"

namespace nib {

/// dk and dv are computed `ahead` heads before dq, and `score_grads`
/// can hold the dS of `slots` heads; `slots` is at least `ahead`.
struct OncePlan {
    int ahead;
    int slots;
};

/// The work of a CTA: item `item` of the keys or of the queries of
/// head `head`. The index `head` counts heads over all sequences.
struct OnceTask {
    bool keys;
    int head, item;

    /// Each head has `key_items` items for its keys and `query_items` items for its queries. The order of items is: the keys of the first
    /// `ahead` heads; then, for each head, its queries and the keys of the head that is `ahead` heads later; finally the remaining queries.
    __device__ __forceinline__ void set(int ticket, int key_items, int query_items, int heads, int ahead) {
        const int first = ahead * key_items, each = key_items + query_items;
        keys = ticket < first;
        if (keys) {
            head = ticket / key_items, item = ticket % key_items;
            return;
        }
        ticket -= first;
        const int middle = (heads - ahead) * each;
        if (ticket >= middle) {
            ticket -= middle;
            head = heads - ahead + ticket / query_items, item = ticket % query_items;
            return;
        }
        head = ticket / each, item = ticket % each;
        keys = item >= query_items;
        if (keys) head += ahead, item -= query_items;
    }
};

/// `ticket` counts the CTAs that have started. Each slot counts how often warps have
/// finished the keys of a head in that slot, and how often they have finished its queries.
struct OnceCounters {
    struct Slot {
        u32 kv_done, q_done;
    };
    u32 ticket, unused;
    Slot slots[1];
};

template <int kDim, int kValueDim>
struct OnceShared {
    union {
        KeyGradsShared<kDim, kValueDim, true> keys;
        QueryGradsShared<kDim> queries;
    };
    OnceTask task;
    OnceCounters::Slot* done;  // counters of the slot that the task's head uses
};

template <int kDim, int kValueDim, bool kWindowed>
__global__ void __launch_bounds__(kGradThreads, 1)
    attention_wgmma_backward_once(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                                  const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
                                  const __grid_constant__ TensorMap map_dq, const __grid_constant__ TensorMap map_dk,
                                  const __grid_constant__ TensorMap map_dv, const float* lse, const float* delta,
                                  const __grid_constant__ AttentionSizes sizes, const int* __restrict__ first_key,
                                  const int* __restrict__ end_query, u8* score_grads, OnceCounters* counters,
                                  const __grid_constant__ OncePlan plan) {
    using Shared = OnceShared<kDim, kValueDim>;
    static_assert(kBlockGroups == kGradGroups && query_rows<kDim>() == kGroupRows);
    constexpr u32 kWarps = kGradGroups * 4;
    extern __shared__ u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int warp = __shfl_sync(0xFFFFFFFF, int(threadIdx.x / 32), 0);
    const int key_items = ceil_div(sizes.seq_len, kGradRows), blocks = ceil_div(sizes.seq_len, kBlockRows), query_items = ceil_div(blocks, 2);
    if (threadIdx.x == 0) {
        OnceTask& task = shared.task;
        task.set(atomicAdd(&counters->ticket, 1), key_items, query_items, sizes.heads * sizes.sequences, plan.ahead);
        const int sequence = task.head / sizes.heads, head = task.head % sizes.heads;
        shared.done = &counters->slots[task.head % plan.slots];
        u8* const slot = score_grads + task.head % plan.slots * score_grad_bytes(sizes.seq_len);
        if (task.keys) {
            shared.keys.init();
            ptx::barrier_init_fence();
            begin_keys<kWindowed>(shared.keys, map_k, map_v, sizes, end_query, {sequence, head, task.item});
            shared.keys.work.score_grads = slot;
            const int earlier = task.head / plan.slots;  // number of heads that used the slot before
            ptx::wait_for_count(&shared.done->q_done, earlier * query_items * kWarps);
        } else {
            shared.queries.ring.init(kWarps);
            const int last = blocks - 1 - task.item;
            shared.queries.work = {sequence, head, {last, last > task.item ? task.item : -1}, slot};
            ptx::barrier_init_fence();
        }
    }
    __syncthreads();
    const bool keys = shared.task.keys;
    if (warp < 4) {
        ptx::registers_shrink_to<24>();
        if (threadIdx.x == 0) {
            if (keys) {
                feed_queries(shared.keys, map_q, map_dout, lse, delta, sizes);
            } else {
                ptx::wait_for_count(&shared.done->kv_done, (shared.task.head / plan.slots + 1) * key_items * kWarps);
                feed_score_grads<kWindowed>(shared.queries, map_k, sizes, first_key);
            }
        }
    } else {
        ptx::registers_grow_to<240>();
        if (keys)
            key_grads<kWindowed>(shared.keys, map_dk, map_dv, sizes, end_query, warp - 4);
        else
            query_grads_of<kWindowed>(shared.queries, map_dq, sizes, first_key, warp - 4);
        if (ptx::lane_idx() == 0) ptx::count_up(shared.task.keys ? &shared.done->kv_done : &shared.done->q_done);
    }
}

}  // namespace nib
