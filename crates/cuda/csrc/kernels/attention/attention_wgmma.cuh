// Causal attention with grouped query heads on the tensor cores, in BF16. It supports
// any sequence length, heads of 64 or 128 elements, and heads of 192 with values of 128.
//
// attention_wgmma<kDim, kValueDim, kGroups, kWindowed, kSinks>: q and k are tensor maps of [sequences][seq_len][heads · kDim]; v and out
//   are tensor maps of [sequences][seq_len][heads · kValueDim]. Boxes have 64 columns by 64 rows (q), kKeys rows (k, v) or 16 rows (out),
//   in the 128-byte swizzle. lse [t, heads] holds natural logarithms of the softmax sums. kWindowed: query i of a sequence sees the keys from first_key[i] on,
//   and first_key never decreases; the kernel neither loads nor multiplies tiles of keys before the first key of a query tile's first
//   query. kSinks: the F32 attention sinks `sinks` [heads] are added to each query's softmax sum. `ticket` is a counter that is initially
//   zero. 128 · (kGroups + 1) threads per CTA, and any number of CTAs up to one per SM. Dynamic shared memory: sizeof(Shared) + 1008 bytes.
// One warp loads tiles; each of kGroups warpgroups has 64 queries. The tensor cores compute the scores of the next tile
// of keys while the softmax of the current tile runs. Warpgroups take turns in issuing WGMMAs, so that the WGMMAs of
// one warpgroup run during the exponentials of another. P is rounded to BF16. Sums are F32, over the keys from the last
// to the first. The exponentials subtract the running maximum, which changes only if P would otherwise exceed 2^8.
//
// Sustained speed on an H200: with heads of 128, 550 to 599 TFLOP/s at 4096 tokens and 627 to 668 at 16384 tokens; with heads of 64, 433 to 454 TFLOP/s.
#pragma once
#include "math/log.cuh"
#include "pieces/attention/attention_ring.cuh"
#include "pieces/attention/attention_sink.cuh"

namespace nib {

constexpr int kKeys = 128;       // number of keys per tile
constexpr int kKeyStages = 2;
constexpr float kSlack = 8.0f;   // P may reach 2^kSlack

template <int kDim, int kValueDim, int kGroups>
struct ForwardShared {
    static constexpr int kRows = kGroups * kGroupRows;
    // If keys are longer than values, shared memory fits only one output box per warp.
    static constexpr int kBoxesOut = kDim > kValueDim ? 1 : kValueDim / kBoxCols;
    // If keys are longer than values, shared memory fits only one tile of queries.
    static constexpr int kQueryStages = kDim > kValueDim ? 1 : 2;
    u8 q[kQueryStages][kRows * kDim * 2];
    u8 k[kKeyStages][kKeys * kDim * 2];
    u8 v[kKeyStages][kKeys * kValueDim * 2];
    u8 out[kGroups * 4][kBoxesOut * 16 * kBoxRowBytes];
    QueryTile<kGroups> tile[kQueryStages];
    RingBarriers<kQueryStages> q_ring;
    RingBarriers<kKeyStages> k_ring, v_ring;
};

/// Returns how many tiles of keys a tile of queries sees under the causal mask.
template <int kRows>
__device__ __forceinline__ int key_tiles(const AttentionSizes& sizes, int tile) {
    return ceil_div(min((tile + 1) * kRows, sizes.seq_len), kKeys);
}

/// Loads queries, and fills the rings of keys and values. One thread runs this function.
template <int kDim, int kValueDim, int kGroups, bool kWindowed>
__device__ __forceinline__ void feed(ForwardShared<kDim, kValueDim, kGroups>& shared, const TensorMap& map_q, const TensorMap& map_k,
                                     const TensorMap& map_v, const AttentionSizes& sizes, const int* first_key, u32* ticket, int section) {
    constexpr int kRows = kGroups * kGroupRows;
    const int tiles = ceil_div(sizes.seq_len, kRows), all = tiles * sizes.heads * sizes.sequences, group = sizes.heads / sizes.kv_heads;
    Place<ForwardShared<kDim, kValueDim, kGroups>::kQueryStages> q_at;
    Place<kKeyStages> at;
    // When a CTA has loaded a tile of queries, it takes its next tile by an atomic ticket. The number
    // of keys that a tile sees depends on windows, so a fixed assignment would not balance the work.
    // (The kernel of dq has a single stage for queries; there a fixed assignment is faster.)
    while (true) {
        const int number = atomicAdd(ticket, 1);
        ptx::Barrier& q_full = shared.q_ring.full[q_at.stage];
        QueryTile<kGroups>& tile = shared.tile[q_at.stage];
        ptx::barrier_wait(shared.q_ring.empty[q_at.stage], q_at.parity ^ 1);
        if (number >= all) {
            tile.set_none();
            ptx::barrier_arrive(q_full);
            break;
        }
        tile.template set<kWindowed>(number, tiles, section, sizes, first_key, kKeys);
        const AttentionWork work = tile.work;
        const int kv_head = work.head / group;
        ptx::barrier_arrive_expect(q_full, sizeof(shared.q[0]));
#pragma unroll
        for (int i = 0; i < kGroups; ++i)
            load_tile<kDim, kGroupRows>(shared.q[q_at.stage] + i * kGroupRows * kDim * 2, map_q, q_full, work.head,
                                        work.tile * kRows + i * kGroupRows, work.sequence);
        q_at.advance();
        const int first = tile.first;
#pragma unroll 1
        for (int n = key_tiles<kRows>(sizes, work.tile) - 1; n >= first; --n) {
            ptx::barrier_wait(shared.k_ring.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(shared.k_ring.full[at.stage], sizeof(shared.k[0]));
            load_tile<kDim, kKeys>(shared.k[at.stage], map_k, shared.k_ring.full[at.stage], kv_head, n * kKeys, work.sequence);
            ptx::barrier_wait(shared.v_ring.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(shared.v_ring.full[at.stage], sizeof(shared.v[0]));
            load_tile<kValueDim, kKeys>(shared.v[at.stage], map_v, shared.v_ring.full[at.stage], kv_head, n * kKeys, work.sequence);
            at.advance();
        }
    }
}

/// The online softmax of a thread's two rows. In lane l,
/// these are rows l/4 and l/4 + 8 of the warp's rows.
struct SoftmaxRows {
    float max[2];    // the score that is subtracted in the exponentials
    float total[2];  // sum of the weights in the columns of this thread

    /// Replaces scores by softmax weights. Returns whether a maximum of the warp has
    /// changed. If so, the caller multiplies its sums by `less`. kFirst: there are no sums
    /// yet, and `less` is not set. `factor` is log2(e) times the scale of the scores.
    template <bool kFirst, int kCount>
    __device__ __forceinline__ bool update(float (&s)[kCount], float factor, float (&less)[2]) {
        float highest[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            highest[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int i = 4; i < kCount; i += 4) highest[r] = fmaxf(highest[r], fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
            highest[r] = fmaxf(highest[r], __shfl_xor_sync(0xFFFFFFFF, highest[r], 1));
            highest[r] = fmaxf(highest[r], __shfl_xor_sync(0xFFFFFFFF, highest[r], 2));
        }
        bool grown = true;
        if constexpr (!kFirst) {
            const bool mine = highest[0] * factor > __fmaf_rn(max[0], factor, kSlack) ||
                              highest[1] * factor > __fmaf_rn(max[1], factor, kSlack);
            grown = __any_sync(0xFFFFFFFF, mine);
        }
        if (grown) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if constexpr (kFirst) {
                    // `highest` is -infinity if all keys of this tile are later than the query.
                    max[r] = highest[r];
                    total[r] = 0.0f;
                } else {
                    const float higher = fmaxf(max[r], highest[r]);
                    less[r] = ptx::exp2_approx((max[r] - higher) * factor);
                    total[r] *= less[r];
                    max[r] = higher;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float shift = max[r] == -infinity() ? 0.0f : max[r] * -factor;
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                s[i + 2 * r] = ptx::exp2_approx(__fmaf_rn(s[i + 2 * r], factor, shift));
                s[i + 2 * r + 1] = ptx::exp2_approx(__fmaf_rn(s[i + 2 * r + 1], factor, shift));
                total[r] += s[i + 2 * r] + s[i + 2 * r + 1];
            }
        }
        return grown;
    }
};

/// Computes attention for the queries of one warpgroup. `warp` is the
/// index of the warp among all warps of the multiplying warpgroups.
template <int kDim, int kValueDim, int kGroups, bool kWindowed, bool kSinks>
__device__ __forceinline__ void attend(ForwardShared<kDim, kValueDim, kGroups>& shared, const TensorMap& map_out, float* lse,
                                       const AttentionSizes& sizes, const int* first_key, const float* sinks, int warp) {
    constexpr int kRows = kGroups * kGroupRows;
    constexpr u32 kQueryStage = kRows * kDim * 2 / 16, kKeyStage = kKeys * kDim * 2 / 16, kValueStage = kKeys * kValueDim * 2 / 16;
    const int lane = ptx::lane_idx(), group = warp / 4;
    const int own_row = group * kGroupRows + warp % 4 * 16 + lane / 4;
    const float factor = sizes.scale * kLog2E;
    const u32 q_ring = ptx::wgmma_descriptor_low(shared_address(shared.q[0] + group * kGroupRows * kDim * 2));
    const u32 k = ptx::wgmma_descriptor_low(shared_address(shared.k[0]));
    const u32 v = descriptor_down<kKeys>(shared.v[0]);
    // Each warpgroup waits at its own named barrier until the previous warpgroup has issued its WGMMAs.
    const u32 turn = 1 + group, next_turn = 1 + (group + 1) % kGroups;
    const auto release = [&](ptx::Barrier& empty) {
        if (lane == 0) ptx::barrier_arrive(empty);
    };
    float s[kKeys / 2], o[kValueDim / 2];
    u32 p[kKeys / 4];
    SoftmaxRows softmax;
    Place<ForwardShared<kDim, kValueDim, kGroups>::kQueryStages> q_at;
    Place<kKeyStages> k_at, v_at;
    if (group == kGroups - 1) ptx::named_barrier_arrive<256>(next_turn);
    while (true) {
        ptx::barrier_wait(shared.q_ring.full[q_at.stage], q_at.parity);
        const QueryTile<kGroups>& tile = shared.tile[q_at.stage];
        if (tile.is_none()) break;
        const AttentionWork work = tile.work;
        const u32 q = q_ring + q_at.stage * kQueryStage;
        const int row = work.tile * kRows + own_row;
        const int blocks = key_tiles<kRows>(sizes, work.tile), last = tile.first;
        const auto mask = [&](int n) {
            const int key = n * kKeys;
            if (key + kKeys > work.tile * kRows + group * kGroupRows) mask_later(s, row - key - 2 * (lane % 4));
        };
        const int edge = kWindowed ? tile.edge[group] : 0;
        // After the last scores of a tile of queries, the loading
        // warp may reuse the tile's stage for later queries.
        const auto release_queries = [&] {
            __syncwarp();
            release(shared.q_ring.empty[q_at.stage]);
        };
        const auto mask_window = [&](int n) {
            if constexpr (kWindowed) {
                const int key = n * kKeys, col = key + 2 * (lane % 4);
                if (key < edge)
                    mask_before(s, first_key_of<true>(first_key, sizes, work.sequence, row) - col,
                                first_key_of<true>(first_key, sizes, work.sequence, row + 8) - col);
            }
        };
        float less[2];
#pragma unroll
        for (int i = 0; i < kValueDim / 2; ++i) o[i] = 0.0f;
        ptx::barrier_wait(shared.k_ring.full[k_at.stage], k_at.parity);
        ptx::named_barrier_wait<256>(turn);
        ptx::wgmma_fence();
        multiply_along<kDim, kGroupRows, kKeys>(s, q, k + k_at.stage * kKeyStage);
        ptx::wgmma_commit();
        ptx::named_barrier_arrive<256>(next_turn);
        ptx::wgmma_wait();
        ptx::wgmma_pin(s);
        release(shared.k_ring.empty[k_at.stage]);
        k_at.advance();
        if (blocks - 1 == last) release_queries();
        mask(blocks - 1);
        mask_window(blocks - 1);
        softmax.template update<true>(s, factor, less);
        to_weights(p, s);
        for (int n = blocks - 2; n >= last; --n) {
            ptx::barrier_wait(shared.k_ring.full[k_at.stage], k_at.parity);
            ptx::named_barrier_wait<256>(turn);
            ptx::wgmma_pin(o);
            ptx::wgmma_fence();
            multiply_along<kDim, kGroupRows, kKeys>(s, q, k + k_at.stage * kKeyStage);
            ptx::wgmma_commit();
            ptx::barrier_wait(shared.v_ring.full[v_at.stage], v_at.parity);
            ptx::wgmma_fence();
            multiply_down<kKeys>(o, p, v + v_at.stage * kValueStage);
            ptx::wgmma_commit();
            ptx::named_barrier_arrive<256>(next_turn);
            ptx::wgmma_wait_until<1>();
            ptx::wgmma_pin(s);
            release(shared.k_ring.empty[k_at.stage]);
            k_at.advance();
            if (n == last) release_queries();
            if constexpr (kRows > kKeys) {
                if (n >= blocks - 2) mask(n);
            }
            mask_window(n);
            const bool grown = softmax.template update<false>(s, factor, less);
            ptx::wgmma_wait();
            ptx::wgmma_pin(o);
            release(shared.v_ring.empty[v_at.stage]);
            v_at.advance();
            to_weights(p, s);
            if (grown) {
#pragma unroll
                for (int i = 0; i < kValueDim / 2; ++i) o[i] *= less[i / 2 % 2];
            }
        }
        q_at.advance();
        ptx::barrier_wait(shared.v_ring.full[v_at.stage], v_at.parity);
        ptx::wgmma_pin(o);
        ptx::wgmma_fence();
        multiply_down<kKeys>(o, p, v + v_at.stage * kValueStage);
        ptx::wgmma_commit();
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = softmax.total[r];
            total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
            total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
            float max = softmax.max[r];
            if constexpr (kSinks) {
                // `max` is the maximum of unscaled scores, but the scores of sinks are already scaled.
                max *= sizes.scale;
                const float less = add_sink(__ldg(sinks + work.head), max, total);
                inverse[r] = less * __frcp_rn(total);
            } else {
                inverse[r] = __frcp_rn(total);
            }
            if (lane % 4 == 0 && row + 8 * r < sizes.seq_len)
                lse[u64(u32(work.sequence * sizes.seq_len + row + 8 * r)) * sizes.heads + work.head] =
                    __fmaf_rn(max, kSinks ? 1.0f : sizes.scale, log_of_normal(total));
        }
        staged_rows_read();
        ptx::wgmma_wait();
        ptx::wgmma_pin(o);
        release(shared.v_ring.empty[v_at.stage]);
        v_at.advance();
        store_warp_rows<kValueDim, ForwardShared<kDim, kValueDim, kGroups>::kBoxesOut>(shared.out[warp], map_out, o, inverse[0], inverse[1],
                                                                                       work.head, row - lane / 4, work.sequence);
    }
    if (group == 0) ptx::named_barrier_wait<256>(turn);
    ptx::tma_store_wait_all();
}

template <int kDim, int kValueDim, int kGroups, bool kWindowed, bool kSinks>
__global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    attention_wgmma(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_out, float* lse,
                    const __grid_constant__ AttentionSizes sizes, int section, const int* __restrict__ first_key, u32* ticket,
                    const float* __restrict__ sinks) {
    using Shared = ForwardShared<kDim, kValueDim, kGroups>;
    extern __shared__ u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int warp = __shfl_sync(0xFFFFFFFF, int(threadIdx.x / 32), 0);
    if (threadIdx.x == 0) {
        shared.q_ring.init(kGroups * 4);
        shared.k_ring.init(kGroups * 4);
        shared.v_ring.init(kGroups * 4);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (warp < 4) {
        ptx::registers_shrink_to<kGroups == 2 ? 24 : 32>();
        if (threadIdx.x == 0) feed<kDim, kValueDim, kGroups, kWindowed>(shared, map_q, map_k, map_v, sizes, first_key, ticket, section);
    } else {
        ptx::registers_grow_to<kGroups == 2 ? 240 : 160>();
        attend<kDim, kValueDim, kGroups, kWindowed, kSinks>(shared, map_out, lse, sizes, first_key, sinks, warp - 4);
    }
}

}  // namespace nib
