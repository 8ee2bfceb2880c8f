// The backward pass of causal attention on the tensor cores: BF16, any sequence length, heads of 64 or 128 elements, or of
// 192 with values of 128.
//
// Both kernels: q, k and their gradients as tensor maps of [sequences][seq_len][heads · kDim], v, dout and dv of kValueDim, in boxes of 64
//   columns, swizzle 128; lse and delta as `attention_rows` writes them, with factor log2(e). Each kernel computes P = 2^(q·k ·
//   log2(e) · scale - lse) and dS = P · (dout·v - delta) itself, and rounds them to BF16. Sums are F32. No CTA adds to sums of another.
// kWindowed: query i of a sequence sees the keys from first_key[i] on, and key j is seen by the queries before end_query[j]. Neither decreases, so
//   that tiles before the first key of a CTA's first query, and those after the last query of its last key, are neither loaded nor
//   multiplied.
// attention_wgmma_backward_kv<kDim, kValueDim, kWindowed>: dv = Pᵀ · dout, dk = scale · dSᵀ · q. A CTA has 128 keys of a head of k, 64 a
//   warpgroup, and goes over the group's heads in order, and over each one's queries from the first that sees them on, `query_rows` at a time.
//   Boxes of `query_rows` rows of q and dout, 64 of k and v, 16 where it writes. 384 threads; grid ceil(seq_len / 128) · kv_heads ·
//   sequences, most queries first.
// attention_wgmma_backward_q<kDim, kValueDim, kWindowed>: dq = scale · dS · k. A CTA has 128 queries of a head, 64 a warpgroup, and goes over
//   their keys from the last to the first, `grad_keys` at a time. Boxes of 64 rows of q and dout, `grad_keys` of k and v, 16 of dq. 384
//   threads; any number of CTAs up to one a multiprocessor.
// Dynamic shared memory: sizeof of their struct + 1008. One warp loads. S of the next tile is on the tensor cores before the sums of this
// one are done.
//
// Measured on an H200, sustained: dk and dv 626 to 648 TFLOP/s at heads of 128 (four products counted), 544 at 64; dq 582 to 637 and
// 510 (three). A dense BF16 product of cuBLASLt sustains 651 there.
#pragma once
#include "pieces/attention/attention_ring.cuh"
#include "ptx/shared.cuh"

namespace nib {

constexpr int kGradGroups = 2;
constexpr int kGradRows = kGradGroups * kGroupRows;  // of a CTA: keys, or queries
constexpr int kGradThreads = 128 * (kGradGroups + 1);

/// Queries of a tile in the kernel of dk and dv, where keys stay: heads of 64 leave registers for more.
template <int kDim>
__host__ __device__ constexpr int query_rows() {
    return kDim > 64 ? 64 : 128;
}

/// P of scores, in place. The accumulators' rows are keys and their columns queries, so `lse` is read by column.
template <int kCount>
__device__ __forceinline__ void probabilities_down(float (&s)[kCount], float factor, const float* lse) {
    const float* const own = lse + 2 * (ptx::lane_idx() % 4);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 l = *reinterpret_cast<const float2*>(own + 2 * i);
        s[i] = ptx::exp2_approx(__fmaf_rn(s[i], factor, -l.x));
        s[i + 1] = ptx::exp2_approx(__fmaf_rn(s[i + 1], factor, -l.y));
        s[i + 2] = ptx::exp2_approx(__fmaf_rn(s[i + 2], factor, -l.x));
        s[i + 3] = ptx::exp2_approx(__fmaf_rn(s[i + 3], factor, -l.y));
    }
}

/// The same, with P rounded to BF16 in `w`. The rounding errors, rounded to BF16 themselves, go to `rest`: both
/// together are P to 2^-17.
template <int kCount>
__device__ __forceinline__ void probabilities_down(u32 (&w)[kCount / 2], uint4* rest, const float (&s)[kCount], float factor,
                                                   const float* lse) {
    const float* const own = lse + 2 * (ptx::lane_idx() % 4);
    const u32 to = shared_address(rest + threadIdx.x % 128);
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
        u32 r[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = i + 2 * j;
            const float2 l = *reinterpret_cast<const float2*>(own + 2 * (i + j / 2 * 4));
            const float low = ptx::exp2_approx(__fmaf_rn(s[at], factor, -l.x)), high = ptx::exp2_approx(__fmaf_rn(s[at + 1], factor, -l.y));
            w[at / 2] = ptx::pack_bf16(low, high);
            r[j] = ptx::pack_bf16(low - ptx::low_bf16(w[at / 2]), high - ptx::high_bf16(w[at / 2]));
        }
        ptx::store_shared_in_order(to + 128 * 16 * (i / 8), make_uint4(r[0], r[1], r[2], r[3]));
    }
}

/// dS = P · (dP - delta), rounded to BF16. Rows are keys and columns queries, as in `probabilities_down`.
template <int kCount>
__device__ __forceinline__ void score_grads_down(u32 (&w)[kCount / 2], const float (&p)[kCount], const float (&dp)[kCount],
                                                 const float* delta) {
    const float* const own = delta + 2 * (ptx::lane_idx() % 4);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 d = *reinterpret_cast<const float2*>(own + 2 * i);
        w[i / 2] = ptx::pack_bf16(p[i] * (dp[i] - d.x), p[i + 1] * (dp[i + 1] - d.y));
        w[i / 2 + 1] = ptx::pack_bf16(p[i + 2] * (dp[i + 2] - d.x), p[i + 3] * (dp[i + 3] - d.y));
    }
}

/// The same for P in two parts: `p`, and the `rest` that `probabilities_down` stored.
template <int kCount>
__device__ __forceinline__ void score_grads_down(u32 (&w)[kCount / 2], const u32 (&p)[kCount / 2], const uint4* rest,
                                                 const float (&dp)[kCount], const float* delta) {
    const float* const own = delta + 2 * (ptx::lane_idx() % 4);
    rest += threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
        const uint4 x = rest[128 * (i / 8)];
        const u32 r[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 d = *reinterpret_cast<const float2*>(own + 2 * (i + j / 2 * 4));
            const int at = i / 2 + j;
            const float low = ptx::low_bf16_again(p[at]) + ptx::low_bf16(r[j]);
            const float high = ptx::high_bf16_again(p[at]) + ptx::high_bf16(r[j]);
            w[at] = ptx::pack_bf16(low * (dp[2 * at] - d.x), high * (dp[2 * at + 1] - d.y));
        }
    }
}

/// When dv's product of a tile is issued.
enum class GradOrder {
    /// Together with dk's. Tiles of 128 queries leave no registers for another order; for heads of 64, another order
    /// with tiles of 64 is not faster.
    ValuesLast,
    /// After dP's product, so that it runs while dS is computed.
    ValuesBetween,
    /// Before dP's product. The sums of heads of 192 leave no registers for P and dP at once: P's rounding errors wait
    /// in shared memory.
    ValuesBeforeScoreGrads,
};

/// The work of a CTA of the kernel of dk and dv.
struct KeyWork {
    int sequence, kv_head;
    int first_head, heads;  // of queries
    int row;                // its first key
    int first_tile, tiles;  // of queries: the first, and one past the last

    template <bool kWindowed>
    __device__ __forceinline__ void set(const AttentionSizes& sizes, const int* end_query, int section, int query_rows) {
        const int key_tiles = ceil_div(sizes.seq_len, kGradRows);
        const AttentionWork work = work_at<false>(blockIdx.x, key_tiles, section, sizes.kv_heads, sizes.sequences);
        sequence = work.sequence, kv_head = work.head;
        heads = sizes.heads / sizes.kv_heads, first_head = kv_head * heads;
        row = work.tile * kGradRows;
        const int end = end_query_of<kWindowed>(end_query, sizes, sequence, min(row + kGradRows, sizes.seq_len) - 1);
        first_tile = row / query_rows, tiles = ceil_div(end, query_rows);
    }
};

template <int kDim, int kValueDim>
struct BackwardKvShared {
    static constexpr int kStages = 3;
    static constexpr int kRows = query_rows<kDim>();  // queries of a tile
    static constexpr GradOrder kOrder = kDim > 128  ? GradOrder::ValuesBeforeScoreGrads
                                        : kDim > 64 ? GradOrder::ValuesBetween
                                                    : GradOrder::ValuesLast;
    // Each warpgroup's own keys and values; at the end their gradients, on their way out.
    u8 k[kGradGroups][kGroupRows * kDim * 2];
    u8 v[kGradGroups][kGroupRows * kValueDim * 2];
    u8 q[kStages][kRows * kDim * 2];
    u8 dout[kStages][kRows * kValueDim * 2];
    // P's rounding errors, where P does not stay in registers: 4 registers of each thread of the warpgroup side by
    // side, then their next 4.
    static constexpr int kRestWords = kOrder == GradOrder::ValuesBeforeScoreGrads ? kGroupRows * kRows / 8 : 1;
    uint4 rest[kGradGroups][kRestWords];
    float lse[kStages][kRows];
    float delta[kStages][kRows];
    KeyWork work;
    ptx::Barrier kv_full;
    ptx::Barrier q_full[kStages], dout_full[kStages], empty[kStages];
};

/// Fills the ring of queries: one thread.
template <int kDim, int kValueDim>
__device__ __forceinline__ void feed_queries(BackwardKvShared<kDim, kValueDim>& shared, const TensorMap& map_q, const TensorMap& map_k,
                                             const TensorMap& map_v, const TensorMap& map_dout, const float* lse, const float* delta,
                                             const AttentionSizes& sizes) {
    using Shared = BackwardKvShared<kDim, kValueDim>;
    const KeyWork work = shared.work;
    constexpr u32 kRowsBytes = Shared::kRows * sizeof(float);
    ptx::barrier_arrive_expect(shared.kv_full, sizeof(shared.k) + sizeof(shared.v));
    for (int i = 0; i < kGradGroups; ++i) {
        const int row = work.row + i * kGroupRows;
        load_tile<kDim, kGroupRows>(shared.k[i], map_k, shared.kv_full, work.kv_head, row, work.sequence);
        load_tile<kValueDim, kGroupRows>(shared.v[i], map_v, shared.kv_full, work.kv_head, row, work.sequence);
    }
    Place<Shared::kStages> at;
    for (int head = work.first_head; head < work.first_head + work.heads; ++head) {
        const u64 rows = u64(u32(work.sequence * sizes.heads + head)) * sizes.padded;
        for (int tile = work.first_tile; tile < work.tiles; ++tile) {
            const int row = tile * Shared::kRows;
            ptx::Barrier &q_full = shared.q_full[at.stage], &dout_full = shared.dout_full[at.stage];
            ptx::barrier_wait(shared.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(q_full, sizeof(shared.q[0]) + kRowsBytes);
            load_tile<kDim, Shared::kRows>(shared.q[at.stage], map_q, q_full, head, row, work.sequence);
            ptx::bulk_load(shared.lse[at.stage], lse + rows + row, kRowsBytes, q_full);
            ptx::barrier_arrive_expect(dout_full, sizeof(shared.dout[0]) + kRowsBytes);
            load_tile<kValueDim, Shared::kRows>(shared.dout[at.stage], map_dout, dout_full, head, row, work.sequence);
            ptx::bulk_load(shared.delta[at.stage], delta + rows + row, kRowsBytes, dout_full);
            at.advance();
        }
    }
}

/// Sets the scores of queries earlier than the key to -infinity. `ahead`: this thread's first column less its first
/// row.
template <int kCount>
__device__ __forceinline__ void mask_earlier(float (&s)[kCount], int ahead) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const int col = 2 * i;
        if (col + ahead < 0) s[i] = -infinity();
        if (col + 1 + ahead < 0) s[i + 1] = -infinity();
        if (col + ahead < 8) s[i + 2] = -infinity();
        if (col + 1 + ahead < 8) s[i + 3] = -infinity();
    }
}

/// Sets the scores of queries that are no longer in the window of a key to -infinity. `low`, `high`: one past the last query that sees this
/// thread's first row, and its second, less this thread's first column.
template <int kCount>
__device__ __forceinline__ void mask_from(float (&s)[kCount], int low, int high) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const int col = 2 * i;
        if (col >= low) s[i] = -infinity();
        if (col + 1 >= low) s[i + 1] = -infinity();
        if (col >= high) s[i + 2] = -infinity();
        if (col + 1 >= high) s[i + 3] = -infinity();
    }
}

/// One warpgroup's keys. `warp` counts within the warpgroups that multiply.
template <int kDim, int kValueDim, bool kWindowed>
__device__ __forceinline__ void key_grads(BackwardKvShared<kDim, kValueDim>& shared, const TensorMap& map_dk, const TensorMap& map_dv,
                                          const AttentionSizes& sizes, const int* end_query, int warp) {
    using Shared = BackwardKvShared<kDim, kValueDim>;
    constexpr int kRows = Shared::kRows;
    constexpr GradOrder kOrder = Shared::kOrder;
    constexpr u32 kQueryStage = sizeof(shared.q[0]) / 16, kDoutStage = sizeof(shared.dout[0]) / 16;
    const int lane = ptx::lane_idx(), group = warp / 4;
    const float factor = sizes.scale * kLog2E;
    const u32 k = ptx::wgmma_descriptor_low(shared_address(shared.k[group]));
    const u32 v = ptx::wgmma_descriptor_low(shared_address(shared.v[group]));
    const u32 q = ptx::wgmma_descriptor_low(shared_address(shared.q[0]));
    const u32 dout = ptx::wgmma_descriptor_low(shared_address(shared.dout[0]));
    const u32 q_down = descriptor_down<kRows>(shared.q[0]), dout_down = descriptor_down<kRows>(shared.dout[0]);
    const auto release = [&](u32 stage) {
        if (lane == 0) ptx::barrier_arrive(shared.empty[stage]);
    };
    float dk[kDim / 2], dv[kValueDim / 2], s[kRows / 2], dp[kRows / 2];
    u32 p[kRows / 4], ds[kRows / 4];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) dv[i] = 0.0f;
    Place<Shared::kStages> at;
    // The work stays in shared memory and is read where it is needed: few registers are left. A warpgroup skips the
    // tiles of queries that are earlier than all of its keys.
    const KeyWork& work = shared.work;
    const int key = work.row + group * kGroupRows, tiles = work.tiles;
    const int first = min(key / kRows, tiles);
    const auto begin_scores = [&] {
        ptx::barrier_wait(shared.q_full[at.stage], at.parity);
        ptx::wgmma_fence();
        multiply_along<kDim, kGroupRows, kRows>(s, k, q + at.stage * kQueryStage);
        ptx::wgmma_commit();
    };
    const auto begin_score_grads = [&] {
        ptx::wgmma_fence();
        multiply_along<kValueDim, kGroupRows, kRows>(dp, v, dout + at.stage * kDoutStage);
        ptx::wgmma_commit();
    };
    const auto add_values = [&] {
        ptx::wgmma_pin(dv);
        ptx::wgmma_fence();
        multiply_down<kRows>(dv, p, dout_down + at.stage * kDoutStage);
    };
    // Tiles that end after this query are the edge of some key's window: that of the warpgroup's first key.
    const int edge = end_query_of<kWindowed>(end_query, sizes, work.sequence, key);
    ptx::barrier_wait(shared.kv_full, 0);
    for (int head = 0; head < work.heads; ++head) {
#pragma unroll 1
        for (int tile = work.first_tile; tile < first; ++tile) {
            // A skipped tile is released only once it is there: a warp must not arrive twice in one phase of `empty`.
            ptx::barrier_wait(shared.q_full[at.stage], at.parity);
            release(at.stage);
            at.advance();
        }
        if (first == tiles) continue;
        begin_scores();
        for (int tile = first;; ++tile) {
            ptx::barrier_wait(shared.dout_full[at.stage], at.parity);
            if constexpr (kOrder != GradOrder::ValuesBeforeScoreGrads) {
                begin_score_grads();
                ptx::wgmma_wait_until<1>();
            } else {
                ptx::wgmma_wait();
            }
            ptx::wgmma_pin(s);
            if (tile == first) mask_earlier(s, tile * kRows - key + 2 * (lane % 4) - (warp % 4 * 16 + lane / 4));
            if constexpr (kWindowed) {
                if ((tile + 1) * kRows > edge) {
                    const int row = key + warp % 4 * 16 + lane / 4, col = tile * kRows + 2 * (lane % 4);
                    mask_from(s, end_query_of<true>(end_query, sizes, work.sequence, row) - col,
                              end_query_of<true>(end_query, sizes, work.sequence, row + 8) - col);
                }
            }
            if constexpr (kOrder == GradOrder::ValuesBeforeScoreGrads) {
                probabilities_down(p, shared.rest[group], s, factor, shared.lse[at.stage]);
            } else {
                probabilities_down(s, factor, shared.lse[at.stage]);
                to_weights(p, s);
            }
            if constexpr (kOrder != GradOrder::ValuesLast) {
                add_values();
                ptx::wgmma_commit();
            }
            if constexpr (kOrder == GradOrder::ValuesBetween) {
                ptx::wgmma_wait_until<1>();
            } else {
                if constexpr (kOrder == GradOrder::ValuesBeforeScoreGrads) begin_score_grads();
                ptx::wgmma_wait();
            }
            ptx::wgmma_pin(dp);
            if constexpr (kOrder == GradOrder::ValuesBeforeScoreGrads) {
                score_grads_down(ds, p, shared.rest[group], dp, shared.delta[at.stage]);
            } else {
                score_grads_down(ds, s, dp, shared.delta[at.stage]);
            }
            if constexpr (kOrder == GradOrder::ValuesLast) ptx::wgmma_pin(dv);
            ptx::wgmma_pin(dk);
            ptx::wgmma_fence();
            if constexpr (kOrder == GradOrder::ValuesLast) multiply_down<kRows>(dv, p, dout_down + at.stage * kDoutStage);
            multiply_down<kRows>(dk, ds, q_down + at.stage * kQueryStage);
            ptx::wgmma_commit();
            const u32 stage = at.stage;
            at.advance();
            if (tile + 1 == tiles) {
                ptx::wgmma_wait();
                release(stage);
                break;
            }
            begin_scores();
            ptx::wgmma_wait_until<1>();
            release(stage);
        }
    }
    ptx::wgmma_pin(dv);
    ptx::wgmma_pin(dk);
    // From here on no warp of the warpgroup multiplies by its keys and values: the results are staged in their place.
    ptx::named_barrier_wait<128>(1 + group);
    const int row = work.row + warp * 16;
    store_warp_rows<kValueDim>(shared.v[group] + warp % 4 * 16 * kValueDim * 2, map_dv, dv, 1.0f, 1.0f, work.kv_head, row, work.sequence);
    store_warp_rows<kDim>(shared.k[group] + warp % 4 * 16 * kDim * 2, map_dk, dk, sizes.scale, sizes.scale, work.kv_head, row,
                          work.sequence);
    ptx::tma_store_wait_all();
}

template <int kDim, int kValueDim, bool kWindowed>
__global__ void __launch_bounds__(kGradThreads, 1)
    attention_wgmma_backward_kv(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                                const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
                                const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv,
                                const float* lse, const float* delta, const __grid_constant__ AttentionSizes sizes, int section,
                                const int* __restrict__ end_query) {
    using Shared = BackwardKvShared<kDim, kValueDim>;
    extern __shared__ u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int warp = __shfl_sync(0xFFFFFFFF, int(threadIdx.x / 32), 0);
    if (threadIdx.x == 0) {
        ptx::barrier_init(shared.kv_full, 1);
        for (int i = 0; i < Shared::kStages; ++i) {
            ptx::barrier_init(shared.q_full[i], 1);
            ptx::barrier_init(shared.dout_full[i], 1);
            ptx::barrier_init(shared.empty[i], kGradGroups * 4);
        }
        ptx::barrier_init_fence();
        shared.work.template set<kWindowed>(sizes, end_query, section, Shared::kRows);
    }
    __syncthreads();
    if (warp < 4) {
        ptx::registers_shrink_to<24>();
        if (threadIdx.x == 0) feed_queries<kDim, kValueDim>(shared, map_q, map_k, map_v, map_dout, lse, delta, sizes);
    } else {
        ptx::registers_grow_to<240>();
        key_grads<kDim, kValueDim, kWindowed>(shared, map_dk, map_dv, sizes, end_query, warp - 4);
    }
}

/// Keys of a tile in the kernel of dq, where queries stay: heads of 192 leave registers and shared memory for fewer.
template <int kDim>
__host__ __device__ constexpr int grad_keys() {
    return kDim > 128 ? 64 : 128;
}

template <int kDim, int kValueDim>
struct BackwardQShared {
    static constexpr int kKeys = grad_keys<kDim>();
    static constexpr int kStages = kDim > 128 ? 3 : 2;
    static constexpr int kBoxesOut = kDim > 128 ? 1 : kDim / kBoxCols;
    u8 q[kGradGroups][kGroupRows * kDim * 2];
    u8 dout[kGradGroups][kGroupRows * kValueDim * 2];
    u8 k[kStages][kKeys * kDim * 2];
    u8 v[kStages][kKeys * kValueDim * 2];
    u8 out[kGradGroups * 4][kBoxesOut * 16 * kBoxRowBytes];
    ptx::Barrier q_full, q_empty;
    RingBarriers<kStages> k_ring, v_ring;

    /// The last tile of keys that a tile of queries sees.
    static __device__ __forceinline__ int last(int tile) { return ((tile + 1) * kGradRows - 1) / kKeys; }

    /// The first: that of its first query. The warp that loads and those that multiply go by it alike, whatever first_key holds.
    template <bool kWindowed>
    static __device__ __forceinline__ int first(const int* first_key, const AttentionSizes& sizes, const AttentionWork& work) {
        return first_key_of<kWindowed>(first_key, sizes, work.sequence, work.tile * kGradRows) / kKeys;
    }
};

/// Fills the rings of keys and values: one thread.
template <int kDim, int kValueDim, bool kWindowed>
__device__ __forceinline__ void feed_keys(BackwardQShared<kDim, kValueDim>& shared, const TensorMap& map_q, const TensorMap& map_k,
                                          const TensorMap& map_v, const TensorMap& map_dout, const AttentionSizes& sizes,
                                          const int* first_key, int section) {
    using Shared = BackwardQShared<kDim, kValueDim>;
    const int tiles = ceil_div(sizes.seq_len, kGradRows), all = tiles * sizes.heads * sizes.sequences;
    const int group = sizes.heads / sizes.kv_heads;
    Place<1> q_at;
    Place<Shared::kStages> at;
    for (int round = 0;; ++round) {
        const int number = work_number(round);
        if (number >= all) break;
        const AttentionWork work = work_at<true>(number, tiles, section, sizes.heads, sizes.sequences);
        const int kv_head = work.head / group;
        ptx::barrier_wait(shared.q_empty, q_at.parity ^ 1);
        ptx::barrier_arrive_expect(shared.q_full, sizeof(shared.q) + sizeof(shared.dout));
        for (int i = 0; i < kGradGroups; ++i) {
            const int row = work.tile * kGradRows + i * kGroupRows;
            load_tile<kDim, kGroupRows>(shared.q[i], map_q, shared.q_full, work.head, row, work.sequence);
            load_tile<kValueDim, kGroupRows>(shared.dout[i], map_dout, shared.q_full, work.head, row, work.sequence);
        }
        q_at.advance();
        const int end = Shared::template first<kWindowed>(first_key, sizes, work);
        for (int n = Shared::last(work.tile); n >= end; --n) {
            ptx::barrier_wait(shared.k_ring.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(shared.k_ring.full[at.stage], sizeof(shared.k[0]));
            load_tile<kDim, Shared::kKeys>(shared.k[at.stage], map_k, shared.k_ring.full[at.stage], kv_head, n * Shared::kKeys, work.sequence);
            ptx::barrier_wait(shared.v_ring.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(shared.v_ring.full[at.stage], sizeof(shared.v[0]));
            load_tile<kValueDim, Shared::kKeys>(shared.v[at.stage], map_v, shared.v_ring.full[at.stage], kv_head, n * Shared::kKeys, work.sequence);
            at.advance();
        }
    }
}

/// One warpgroup's queries.
template <int kDim, int kValueDim, bool kWindowed>
__device__ __forceinline__ void query_grads(BackwardQShared<kDim, kValueDim>& shared, const TensorMap& map_dq, const float* lse,
                                            const float* delta, const AttentionSizes& sizes, const int* first_key, int section, int warp) {
    using Shared = BackwardQShared<kDim, kValueDim>;
    constexpr int kKeys = Shared::kKeys;
    constexpr u32 kKeyStage = sizeof(shared.k[0]) / 16, kValueStage = sizeof(shared.v[0]) / 16;
    const int lane = ptx::lane_idx(), group = warp / 4;
    const int tiles = ceil_div(sizes.seq_len, kGradRows), all = tiles * sizes.heads * sizes.sequences;
    const float factor = sizes.scale * kLog2E;
    const u32 q = ptx::wgmma_descriptor_low(shared_address(shared.q[group]));
    const u32 dout = ptx::wgmma_descriptor_low(shared_address(shared.dout[group]));
    const u32 k = ptx::wgmma_descriptor_low(shared_address(shared.k[0])), k_down = descriptor_down<kKeys>(shared.k[0]);
    const u32 v = ptx::wgmma_descriptor_low(shared_address(shared.v[0]));
    const auto release = [&](ptx::Barrier& empty) {
        if (lane == 0) ptx::barrier_arrive(empty);
    };
    float dq[kDim / 2], s[kKeys / 2], dp[kKeys / 2];
    u32 ds[kKeys / 4];
    Place<1> q_at;
    Place<Shared::kStages> at;
    for (int round = 0;; ++round) {
        const int number = work_number(round);
        if (number >= all) break;
        const AttentionWork work = work_at<true>(number, tiles, section, sizes.heads, sizes.sequences);
        const int first = work.tile * kGradRows + group * kGroupRows, row = first + warp % 4 * 16 + lane / 4;
        const u64 rows = u64(u32(work.sequence * sizes.heads + work.head)) * sizes.padded + row;
        const float row_lse[2] = {lse[rows], lse[rows + 8]}, row_delta[2] = {delta[rows], delta[rows + 8]};
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) dq[i] = 0.0f;
        ptx::barrier_wait(shared.q_full, q_at.parity);
        q_at.advance();
        const auto begin_scores = [&] {
            ptx::barrier_wait(shared.k_ring.full[at.stage], at.parity);
            ptx::wgmma_fence();
            multiply_along<kDim, kGroupRows, kKeys>(s, q, k + at.stage * kKeyStage);
            ptx::wgmma_commit();
        };
        // Tiles that begin before this key are the edge of some row's window: that of the warpgroup's last row.
        const int edge = first_key_of<kWindowed>(first_key, sizes, work.sequence, min(first + kGroupRows, sizes.seq_len) - 1);
        const int end = Shared::template first<kWindowed>(first_key, sizes, work);
        int n = Shared::last(work.tile);
        if constexpr (kKeys < kGradRows) {
            for (; n * kKeys >= first + kGroupRows; --n) {
                // Skipped tiles are released only once they are there: a warp must not arrive twice in one phase of
                // `empty`.
                ptx::barrier_wait(shared.k_ring.full[at.stage], at.parity);
                ptx::barrier_wait(shared.v_ring.full[at.stage], at.parity);
                release(shared.k_ring.empty[at.stage]);
                release(shared.v_ring.empty[at.stage]);
                at.advance();
            }
        }
        ptx::wgmma_pin(dq);
        begin_scores();
        for (;; --n) {
            const u32 stage = at.stage;
            ptx::barrier_wait(shared.v_ring.full[stage], at.parity);
            ptx::wgmma_fence();
            multiply_along<kValueDim, kGroupRows, kKeys>(dp, dout, v + stage * kValueStage);
            ptx::wgmma_commit();
            ptx::wgmma_wait_until<1>();
            ptx::wgmma_pin(s);
            if (n * kKeys + kKeys > first) mask_later(s, row - n * kKeys - 2 * (lane % 4));
            if constexpr (kWindowed) {
                if (n * kKeys < edge) {
                    const int col = n * kKeys + 2 * (lane % 4);
                    mask_before(s, first_key_of<true>(first_key, sizes, work.sequence, row) - col,
                                first_key_of<true>(first_key, sizes, work.sequence, row + 8) - col);
                }
            }
#pragma unroll
            for (int i = 0; i < kKeys / 2; ++i)
                s[i] = ptx::exp2_approx(__fmaf_rn(s[i], factor, -row_lse[i / 2 % 2]));
            ptx::wgmma_wait();
            ptx::wgmma_pin(dp);
            release(shared.v_ring.empty[stage]);
#pragma unroll
            for (int i = 0; i < kKeys / 2; i += 2) {
                const float d = row_delta[i / 2 % 2];
                ds[i / 2] = ptx::pack_bf16(s[i] * (dp[i] - d), s[i + 1] * (dp[i + 1] - d));
            }
            ptx::wgmma_pin(dq);
            ptx::wgmma_fence();
            multiply_down<kKeys>(dq, ds, k_down + stage * kKeyStage);
            ptx::wgmma_commit();
            at.advance();
            if (n == end) {
                release(shared.q_empty);
                staged_rows_read();
                ptx::wgmma_wait();
                release(shared.k_ring.empty[stage]);
                break;
            }
            begin_scores();
            ptx::wgmma_wait_until<1>();
            release(shared.k_ring.empty[stage]);
        }
        ptx::wgmma_pin(dq);
        store_warp_rows<kDim, Shared::kBoxesOut>(shared.out[warp], map_dq, dq, sizes.scale, sizes.scale, work.head, row - lane / 4,
                                                 work.sequence);
    }
    ptx::tma_store_wait_all();
}

template <int kDim, int kValueDim, bool kWindowed>
__global__ void __launch_bounds__(kGradThreads, 1)
    attention_wgmma_backward_q(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                               const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
                               const __grid_constant__ TensorMap map_dq, const float* lse, const float* delta,
                               const __grid_constant__ AttentionSizes sizes, int section, const int* __restrict__ first_key) {
    using Shared = BackwardQShared<kDim, kValueDim>;
    extern __shared__ u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int warp = __shfl_sync(0xFFFFFFFF, int(threadIdx.x / 32), 0);
    if (threadIdx.x == 0) {
        ptx::barrier_init(shared.q_full, 1);
        ptx::barrier_init(shared.q_empty, kGradGroups * 4);
        shared.k_ring.init(kGradGroups * 4);
        shared.v_ring.init(kGradGroups * 4);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (warp < 4) {
        ptx::registers_shrink_to<24>();
        if (threadIdx.x == 0) feed_keys<kDim, kValueDim, kWindowed>(shared, map_q, map_k, map_v, map_dout, sizes, first_key, section);
    } else {
        ptx::registers_grow_to<240>();
        query_grads<kDim, kValueDim, kWindowed>(shared, map_dq, lse, delta, sizes, first_key, section, warp - 4);
    }
}

}  // namespace nib
