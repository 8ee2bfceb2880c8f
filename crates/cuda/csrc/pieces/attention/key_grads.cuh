// The gradients of keys and values on the tensor cores: the work of a CTA for 128 keys of a head. With kStores
// (for tiles of 64 queries), the CTA also stores dS, so that the computation of dq need not recompute it.
//
// P = 2^(q·k · log2(e) · scale - lse) and dS = P · (dout·v - delta) are rounded to BF16; dv = Pᵀ · dout, dk = scale
// · dSᵀ · q. Sums are F32. A CTA has 128 keys of a head of k, 64 per warpgroup. The CTA loops over the query heads of
// the group in order. For each head the CTA loops over queries, `query_rows` at a time, from the first query that sees
// the keys on. Boxes have `query_rows` rows for q and dout, 64 rows for k and v, and 16 rows for outputs.
#pragma once
#include "pieces/attention/attention_ring.cuh"
#include "pieces/attention/score_grads.cuh"

namespace nib {

constexpr int kGradGroups = 2;
constexpr int kGradRows = kGradGroups * kGroupRows;  // number of keys, or of queries, per CTA
constexpr int kGradThreads = 128 * (kGradGroups + 1);

/// The number of queries per tile in the kernel of dk and dv, where keys
/// stay in shared memory. Heads of 64 leave registers for more queries.
template <int kDim>
__host__ __device__ constexpr int query_rows() {
    return kDim > 64 ? 64 : 128;
}

/// Replaces scores by P. The rows of the accumulators are keys
/// and their columns are queries, so `lse` is indexed by column.
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

/// Replaces scores by P, rounded to BF16 in `w`. The next 8 bits of each value are stored in
/// `rest`, four values per register. `w` and `rest` together give P to 2^-16. The exception is a
/// P exactly between two BF16 numbers (one value in 2^17), where the error may be that of BF16.
template <int kCount>
__device__ __forceinline__ void probabilities_down(u32 (&w)[kCount / 2], u32 (&rest)[kCount / 4], const float (&s)[kCount], float factor,
                                                   const float* lse) {
    const float* const own = lse + 2 * (ptx::lane_idx() % 4);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 l = *reinterpret_cast<const float2*>(own + 2 * i);
        const float p0 = ptx::exp2_approx(__fmaf_rn(s[i], factor, -l.x)), p1 = ptx::exp2_approx(__fmaf_rn(s[i + 1], factor, -l.y));
        const float p2 = ptx::exp2_approx(__fmaf_rn(s[i + 2], factor, -l.x)), p3 = ptx::exp2_approx(__fmaf_rn(s[i + 3], factor, -l.y));
        w[i / 2] = ptx::pack_bf16(p0, p1), w[i / 2 + 1] = ptx::pack_bf16(p2, p3);
        rest[i / 4] = __byte_perm(__byte_perm(__float_as_uint(p0), __float_as_uint(p1), 0x0051),
                                  __byte_perm(__float_as_uint(p2), __float_as_uint(p3), 0x0051), 0x5410);
    }
}

/// Computes dS = P · (dP - delta), rounded to BF16. Rows are keys and
/// columns are queries; `probabilities_down` has the same layout.
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

/// Computes dS from P in two parts: `p`, and the `rest` that `probabilities_down` stored.
template <int kCount>
__device__ __forceinline__ void score_grads_down(u32 (&w)[kCount / 2], const u32 (&p)[kCount / 2], const u32 (&rest)[kCount / 4],
                                                 const float (&dp)[kCount], const float* delta) {
    const float* const own = delta + 2 * (ptx::lane_idx() % 4);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 d = *reinterpret_cast<const float2*>(own + 2 * i);
        const float p0 = __uint_as_float((p[i / 2] << 16) + ptx::byte_perm_signs(rest[i / 4], 0, 0x8804));
        const float p1 = __uint_as_float((p[i / 2] & 0xFFFF0000) + ptx::byte_perm_signs(rest[i / 4], 0, 0x9914));
        const float p2 = __uint_as_float((p[i / 2 + 1] << 16) + ptx::byte_perm_signs(rest[i / 4], 0, 0xAA24));
        const float p3 = __uint_as_float((p[i / 2 + 1] & 0xFFFF0000) + ptx::byte_perm_signs(rest[i / 4], 0, 0xBB34));
        w[i / 2] = ptx::pack_bf16(p0 * (dp[i] - d.x), p1 * (dp[i + 1] - d.y));
        w[i / 2 + 1] = ptx::pack_bf16(p2 * (dp[i + 2] - d.x), p3 * (dp[i + 3] - d.y));
    }
}

/// The three points in time at which the WGMMA for dv of a tile may be issued.
enum class GradOrder {
    /// The WGMMA for dv is issued together with the WGMMA for dk. Tiles of 128 queries leave no registers
    /// for another order. For heads of 64, another order with tiles of 64 queries is not faster.
    ValuesLast,
    /// The WGMMA for dv is issued after the WGMMA for dP, so that it runs while dS is computed.
    ValuesBetween,
    /// The WGMMA for dv is issued before the WGMMA for dP. The accumulators of heads of 192 leave no registers
    /// for S and dP at once, so a warpgroup computes P and dS while none of its own WGMMAs runs. The two
    /// warpgroups take turns in issuing WGMMAs, so that the WGMMAs of one warpgroup run while the other computes.
    ValuesBeforeScoreGrads,
};

/// The keys of a CTA, and the queries that see them.
struct KeyWork {
    int sequence, kv_head;
    int first_head, heads;  // query heads
    int row;                // index of the first key
    int first_tile, tiles;  // tiles of queries: the first tile, and one past the last tile
    u8* score_grads;        // address at which dS of the head is stored

    template <bool kWindowed>
    __device__ __forceinline__ void set(const AttentionSizes& sizes, const int* end_query, const AttentionWork& work, int query_rows) {
        sequence = work.sequence, kv_head = work.head;
        row = work.tile * kGradRows;
        const int end = end_query_of<kWindowed>(end_query, sizes, sequence, min(row + kGradRows, sizes.seq_len) - 1);
        heads = sizes.heads / sizes.kv_heads, first_head = kv_head * heads;
        first_tile = row / query_rows, tiles = ceil_div(end, query_rows);
    }
};

template <int kDim, int kValueDim, bool kStores>
struct KeyGradsShared {
    static constexpr int kStages = 3;
    static constexpr int kRows = query_rows<kDim>();  // number of queries per tile
    static constexpr GradOrder kOrder = kDim > 128  ? GradOrder::ValuesBeforeScoreGrads
                                        : kDim > 64 ? GradOrder::ValuesBetween
                                                    : GradOrder::ValuesLast;
    // The keys and values of each warpgroup. At the end, their
    // gradients are staged in this memory for the store.
    u8 k[kGradGroups][kGroupRows * kDim * 2];
    u8 v[kGradGroups][kGroupRows * kValueDim * 2];
    u8 q[kStages][kRows * kDim * 2];
    u8 dout[kStages][kRows * kValueDim * 2];
    // The dS of each warp, staged for the store.
    u8 score_grads[kStores ? kGradGroups * 4 : 1][kStores ? 16 * kBoxRowBytes : 16];
    float lse[kStages][kRows];
    float delta[kStages][kRows];
    KeyWork work;
    ptx::Barrier kv_full;
    ptx::Barrier q_full[kStages], dout_full[kStages], empty[kStages];

    /// Initialises the barriers; one thread calls this function.
    __device__ __forceinline__ void init() {
        ptx::barrier_init(kv_full, 1);
        for (int i = 0; i < kStages; ++i) {
            ptx::barrier_init(q_full[i], 1);
            ptx::barrier_init(dout_full[i], 1);
            ptx::barrier_init(empty[i], kGradGroups * 4);
        }
    }
};

/// Loads keys and values, and meanwhile finds the queries that see them; one thread calls this
/// function.
template <bool kWindowed, int kDim, int kValueDim, bool kStores>
__device__ __forceinline__ void begin_keys(KeyGradsShared<kDim, kValueDim, kStores>& shared, const TensorMap& map_k, const TensorMap& map_v,
                                           const AttentionSizes& sizes, const int* end_query, const AttentionWork& work) {
    ptx::barrier_arrive_expect(shared.kv_full, sizeof(shared.k) + sizeof(shared.v));
    for (int i = 0; i < kGradGroups; ++i) {
        const int row = work.tile * kGradRows + i * kGroupRows;
        load_tile<kDim, kGroupRows>(shared.k[i], map_k, shared.kv_full, work.head, row, work.sequence);
        load_tile<kValueDim, kGroupRows>(shared.v[i], map_v, shared.kv_full, work.head, row, work.sequence);
    }
    shared.work.template set<kWindowed>(sizes, end_query, work, shared.kRows);
}

/// Fills the ring of queries; one thread calls this function.
template <int kDim, int kValueDim, bool kStores>
__device__ __forceinline__ void feed_queries(KeyGradsShared<kDim, kValueDim, kStores>& shared, const TensorMap& map_q, const TensorMap& map_dout,
                                             const float* lse, const float* delta, const AttentionSizes& sizes) {
    using Shared = KeyGradsShared<kDim, kValueDim, kStores>;
    const KeyWork work = shared.work;
    constexpr u32 kRowsBytes = Shared::kRows * sizeof(float);
    Place<Shared::kStages> at;
    for (int head = work.first_head; head < work.first_head + work.heads; ++head) {
        const u64 rows = u64(u32(work.sequence * sizes.heads + head)) * sizes.padded;
        // The loop for long heads is not unrolled, because the unrolled
        // loop would need more registers than the loading warp has.
#pragma unroll(kDim > 128 ? 1 : 4)
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

/// Sets the scores of queries earlier than the key to -infinity. `ahead`
/// is the index of this thread's first column minus that of its first row.
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

/// Sets the scores of queries past a key's window to -infinity. `low` and `high` are one past the
/// last queries that see this thread's first and second key, relative to this thread's first column.
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

/// Computes the gradients of the keys and values of one warpgroup.
/// `warp` is the index of the warp among the math warps.
template <bool kWindowed, int kDim, int kValueDim, bool kStores>
__device__ __forceinline__ void key_grads(KeyGradsShared<kDim, kValueDim, kStores>& shared, const TensorMap& map_dk, const TensorMap& map_dv,
                                          const AttentionSizes& sizes, const int* end_query, int warp) {
    using Shared = KeyGradsShared<kDim, kValueDim, kStores>;
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
    u32 p[kRows / 4], ds[kRows / 4], rest[kRows / 8];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) dv[i] = 0.0f;
    Place<Shared::kStages> at;
    // `work` stays in shared memory and is read where it is needed, because few registers are left. A warpgroup
    // skips the tiles of queries that are earlier than all of its keys.
    const KeyWork& work = shared.work;
    const int key = work.row + group * kGroupRows, tiles = work.tiles;
    const int first = min(key / kRows, tiles);
    // A warpgroup has one turn for the first scores of a head, and two turns per
    // tile, also for skipped tiles. So both warpgroups have equally many turns.
    constexpr bool kTurns = kOrder == GradOrder::ValuesBeforeScoreGrads;
    const auto begin_turn = [&] {
        if constexpr (kTurns) ptx::named_barrier_wait<256>(3 + group);
    };
    const auto end_turn = [&] {
        if constexpr (kTurns) ptx::named_barrier_arrive<256>(4 - group);
    };
    // `here` and `anew` make the compiler recompute addresses, because long heads
    // leave no registers for the descriptors of all steps and the limits of masks.
    const auto begin_scores = [&] {
        ptx::barrier_wait(shared.q_full[at.stage], at.parity);
        ptx::wgmma_fence();
        multiply_along<kDim, kGroupRows, kRows>(s, kTurns ? ptx::here(k) : k, q + at.stage * kQueryStage);
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
    const auto store = [&](int tile) {
        if constexpr (kStores)
            store_score_grads(shared.score_grads[warp], ds, work.score_grads + score_tile(work.row / kGroupRows + group, tile));
    };
    // Tiles of queries that end after this query need a window mask for some key of the warpgroup.
    const int edge = end_query_of<kWindowed>(end_query, sizes, work.sequence, key);
    const auto mask = [&](int tile) {
        if (tile == first) {
            const int now = kTurns ? ptx::lane_idx_anew() : lane;
            mask_earlier(s, tile * kRows - key + 2 * (now % 4) - (warp % 4 * 16 + now / 4));
        }
        if (kWindowed && (tile + 1) * kRows > edge) {
            const int now = kTurns ? ptx::lane_idx_anew() : lane;
            const int row = key + warp % 4 * 16 + now / 4, col = tile * kRows + 2 * (now % 4);
            mask_from(s, end_query_of<kWindowed>(end_query, sizes, work.sequence, row) - col,
                      end_query_of<kWindowed>(end_query, sizes, work.sequence, row + 8) - col);
        }
    };
    if (group == 1) end_turn();
    ptx::barrier_wait(shared.kv_full, 0);
    for (int head = 0; head < work.heads; ++head) {
#pragma unroll 1
        for (int tile = work.first_tile; tile < first; ++tile) {
            // A skipped tile is released only after its data has arrived, because a warp must not arrive twice in one
            // phase of `empty`.
            ptx::barrier_wait(shared.q_full[at.stage], at.parity);
            release(at.stage);
            at.advance();
            begin_turn(), end_turn();
            begin_turn(), end_turn();
        }
        if (first == tiles) {
            begin_turn(), end_turn();
            continue;
        }
        begin_turn();
        begin_scores();
        end_turn();
        for (int tile = first;; ++tile) {
            ptx::barrier_wait(shared.dout_full[at.stage], at.parity);
            if constexpr (kOrder != GradOrder::ValuesBeforeScoreGrads) {
                begin_score_grads();
                ptx::wgmma_wait_until<1>();
            } else {
                ptx::wgmma_wait();
            }
            ptx::wgmma_pin(s);
            mask(tile);
            if constexpr (kOrder == GradOrder::ValuesBeforeScoreGrads) {
                probabilities_down(p, rest, s, factor, shared.lse[at.stage]);
            } else {
                probabilities_down(s, factor, shared.lse[at.stage]);
                to_weights(p, s);
            }
            begin_turn();
            if constexpr (kOrder != GradOrder::ValuesLast) {
                add_values();
                ptx::wgmma_commit();
            }
            if constexpr (kOrder == GradOrder::ValuesBetween) {
                ptx::wgmma_wait_until<1>();
            } else {
                if constexpr (kOrder == GradOrder::ValuesBeforeScoreGrads) begin_score_grads();
                end_turn();
                ptx::wgmma_wait();
            }
            ptx::wgmma_pin(dp);
            if constexpr (kOrder == GradOrder::ValuesBeforeScoreGrads) {
                score_grads_down(ds, p, rest, dp, shared.delta[at.stage]);
            } else {
                score_grads_down(ds, s, dp, shared.delta[at.stage]);
            }
            if constexpr (kOrder == GradOrder::ValuesLast) ptx::wgmma_pin(dv);
            ptx::wgmma_pin(dk);
            begin_turn();
            ptx::wgmma_fence();
            if constexpr (kOrder == GradOrder::ValuesLast) multiply_down<kRows>(dv, p, dout_down + at.stage * kDoutStage);
            multiply_down<kRows>(dk, ds, q_down + at.stage * kQueryStage);
            ptx::wgmma_commit();
            const u32 stage = at.stage;
            at.advance();
            if (tile + 1 == tiles) {
                end_turn();
                store(tile);
                ptx::wgmma_wait();
                release(stage);
                break;
            }
            begin_scores();
            end_turn();
            store(tile);
            ptx::wgmma_wait_until<1>();
            release(stage);
        }
    }
    if (group == 0) begin_turn();
    ptx::wgmma_pin(dv);
    ptx::wgmma_pin(dk);
    // From here on no warp of the warpgroup reads the warpgroup's keys and values
    // any more, so the results are staged in the memory of the keys and values.
    ptx::named_barrier_wait<128>(1 + group);
    const int row = work.row + warp * 16;
    store_warp_rows<kValueDim>(shared.v[group] + warp % 4 * 16 * kValueDim * 2, map_dv, dv, 1.0f, 1.0f, work.kv_head, row, work.sequence);
    store_warp_rows<kDim>(shared.k[group] + warp % 4 * 16 * kDim * 2, map_dk, dk, sizes.scale, sizes.scale, work.kv_head, row,
                          work.sequence);
    ptx::tma_store_wait_all();
}

}  // namespace nib
