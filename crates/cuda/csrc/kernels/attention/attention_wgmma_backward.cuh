// The backward pass of causal attention on the tensor cores: BF16, heads of 64 or 128 elements, any sequence length.
//
// Both kernels: q, k, v, dout and their gradients as tensor maps of [sequences][seq_len][heads · kDim] in boxes of 64 columns, swizzle
//   128; lse and delta as `attention_rows` writes them, with factor log2(e). P = 2^(q·k · log2(e)/sqrt(kDim) - lse) and
//   dS = P · (dout·v - delta) are made in each of them and rounded to BF16; sums are F32. Nobody adds to another's sums.
// attention_wgmma_backward_kv<kDim>: dv = Pᵀ · dout, dk = dSᵀ · q / sqrt(kDim). A cta has 128 keys of a head of k, 64 a warpgroup, and
//   goes over the group's heads in order, and over each one's queries from the first that sees them on, `query_rows` at a time. Boxes
//   of `query_rows` rows of q and dout, 64 of k and v, 16 where it writes. 384 threads; grid ceil(seq_len / 128) · kv_heads ·
//   sequences, most queries first.
// attention_wgmma_backward_q<kDim>: dq = dS · k / sqrt(kDim). A cta has 128 queries of a head, 64 a warpgroup, and goes over their
//   keys from the last to the first, 128 at a time. Boxes of 64 rows of q and dout, 128 of k and v, 16 of dq. 384 threads; any number
//   of ctas up to one a multiprocessor.
// Dynamic shared memory: sizeof of their struct + 1008. One warp loads. S of the next tile is on the tensor cores before the sums of this
// one are done.
//
// Measured on an H200, sustained: dk and dv 626 to 648 TFLOP/s at heads of 128 (four products counted), 544 at 64; dq 582 to 637 and
// 510 (three). A dense BF16 product of cuBLASLt sustains 651 there.
#pragma once
#include "pieces/attention/attention_ring.cuh"

namespace nib {

constexpr int kGradGroups = 2;
constexpr int kGradRows = kGradGroups * kGroupRows;  // of a cta: keys, or queries
constexpr int kGradThreads = 128 * (kGradGroups + 1);

/// Queries of a tile where keys stay: short heads leave registers for more.
template <int kDim>
__host__ __device__ constexpr int query_rows() {
    return kDim > 64 ? 64 : 128;
}

/// P of scores, by rows of queries down the accumulators' columns (kDown) or along their rows.
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

template <int kDim>
struct BackwardKvShared {
    static constexpr int kStages = 3;
    static constexpr int kRows = query_rows<kDim>();  // queries of a tile
    static constexpr int kTileBytes = kRows * kDim * 2;
    static constexpr int kKeyBytes = kGroupRows * kDim * 2;
    u8 k[kGradGroups][kKeyBytes];
    u8 v[kGradGroups][kKeyBytes];
    u8 q[kStages][kTileBytes];
    u8 dout[kStages][kTileBytes];
    u8 out[kGradGroups * 4][kKeyBytes / 4];
    float lse[kStages][kRows];
    float delta[kStages][kRows];
    ptx::Barrier kv_full;
    ptx::Barrier q_full[kStages], dout_full[kStages], empty[kStages];
};

/// What a cta of the kernel of dk and dv has.
struct KeyWork {
    int sequence, kv_head, first_head, last_head;
    int row;               // its first key
    int first_tile, tiles;  // of queries
    __device__ __forceinline__ KeyWork(const AttentionSizes& sizes, int section, int query_rows) {
        const int key_tiles = ceil_div(sizes.seq_len, kGradRows);
        const AttentionWork work = work_at<false>(blockIdx.x, key_tiles, section, sizes.kv_heads, sizes.sequences);
        const int group = sizes.heads / sizes.kv_heads;
        sequence = work.sequence, kv_head = work.head;
        first_head = kv_head * group, last_head = first_head + group;
        row = work.tile * kGradRows;
        first_tile = row / query_rows, tiles = ceil_div(sizes.seq_len, query_rows);
    }
};

/// Fills the ring of queries: one thread.
template <int kDim>
__device__ __forceinline__ void feed_queries(BackwardKvShared<kDim>& shared, const TensorMap& map_q, const TensorMap& map_k,
                                             const TensorMap& map_v, const TensorMap& map_dout, const float* lse, const float* delta,
                                             const AttentionSizes& sizes, const KeyWork& work) {
    using Shared = BackwardKvShared<kDim>;
    constexpr u32 kRowsBytes = Shared::kRows * sizeof(float);
    ptx::barrier_arrive_expect(shared.kv_full, sizeof(shared.k) + sizeof(shared.v));
    for (int i = 0; i < kGradGroups; ++i) {
        const int row = work.row + i * kGroupRows;
        load_tile<kDim, kGroupRows>(shared.k[i], map_k, shared.kv_full, work.kv_head, row, work.sequence);
        load_tile<kDim, kGroupRows>(shared.v[i], map_v, shared.kv_full, work.kv_head, row, work.sequence);
    }
    Place<Shared::kStages> at;
    for (int head = work.first_head; head < work.last_head; ++head) {
        const u64 rows = u64(u32(work.sequence * sizes.heads + head)) * sizes.padded;
        for (int tile = work.first_tile; tile < work.tiles; ++tile) {
            const int row = tile * Shared::kRows;
            ptx::Barrier &q_full = shared.q_full[at.stage], &dout_full = shared.dout_full[at.stage];
            ptx::barrier_wait(shared.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(q_full, Shared::kTileBytes + kRowsBytes);
            load_tile<kDim, Shared::kRows>(shared.q[at.stage], map_q, q_full, head, row, work.sequence);
            ptx::bulk_load(shared.lse[at.stage], lse + rows + row, kRowsBytes, q_full);
            ptx::barrier_arrive_expect(dout_full, Shared::kTileBytes + kRowsBytes);
            load_tile<kDim, Shared::kRows>(shared.dout[at.stage], map_dout, dout_full, head, row, work.sequence);
            ptx::bulk_load(shared.delta[at.stage], delta + rows + row, kRowsBytes, dout_full);
            at.advance();
        }
    }
}

/// Scores of queries that are earlier than the key become -infinity. `ahead`: this thread's first column less its first row.
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

/// One warpgroup's keys. `warp` counts within the warpgroups that multiply.
template <int kDim>
__device__ __forceinline__ void key_grads(BackwardKvShared<kDim>& shared, const TensorMap& map_dk, const TensorMap& map_dv,
                                          const AttentionSizes& sizes, const KeyWork& work, int warp) {
    using Shared = BackwardKvShared<kDim>;
    constexpr int kRows = Shared::kRows;
    // dv's product runs while dS is made. With 128 queries there are no registers for both, and it is not faster with 64 of short heads.
    constexpr bool kEarly = kDim > 64;
    constexpr u32 kStage = Shared::kTileBytes / 16;
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
    float dk[kDim / 2], dv[kDim / 2], s[kRows / 2], dp[kRows / 2];
    u32 p[kRows / 4], ds[kRows / 4];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    Place<Shared::kStages> at;
    // No query before a warpgroup's keys sees them.
    const int key = work.row + group * kGroupRows;
    const int first = min(key / kRows, work.tiles);
    const auto begin_scores = [&] {
        ptx::barrier_wait(shared.q_full[at.stage], at.parity);
        ptx::wgmma_fence();
        multiply_along<kDim, kGroupRows, kRows>(s, k, q + at.stage * kStage);
        ptx::wgmma_commit();
    };
    ptx::barrier_wait(shared.kv_full, 0);
    for (int head = work.first_head; head < work.last_head; ++head) {
        for (int tile = work.first_tile; tile < first; ++tile) {
            // Not before it is there: nobody tells twice in one phase.
            ptx::barrier_wait(shared.q_full[at.stage], at.parity);
            release(at.stage);
            at.advance();
        }
        if (first == work.tiles) continue;
        begin_scores();
        for (int tile = first;; ++tile) {
            ptx::barrier_wait(shared.dout_full[at.stage], at.parity);
            ptx::wgmma_fence();
            multiply_along<kDim, kGroupRows, kRows>(dp, v, dout + at.stage * kStage);
            ptx::wgmma_commit();
            ptx::wgmma_wait_until<1>();
            ptx::wgmma_pin(s);
            if (tile == first) mask_earlier(s, tile * kRows - key + 2 * (lane % 4) - (warp % 4 * 16 + lane / 4));
            probabilities_down(s, factor, shared.lse[at.stage]);
            to_weights(p, s);
            if constexpr (kEarly) {
                ptx::wgmma_pin(dv);
                ptx::wgmma_fence();
                multiply_down<kRows>(dv, p, dout_down + at.stage * kStage);
                ptx::wgmma_commit();
                ptx::wgmma_wait_until<1>();
            } else {
                ptx::wgmma_wait();
            }
            ptx::wgmma_pin(dp);
            score_grads_down(ds, s, dp, shared.delta[at.stage]);
            if constexpr (!kEarly) ptx::wgmma_pin(dv);
            ptx::wgmma_pin(dk);
            ptx::wgmma_fence();
            if constexpr (!kEarly) multiply_down<kRows>(dv, p, dout_down + at.stage * kStage);
            multiply_down<kRows>(dk, ds, q_down + at.stage * kStage);
            ptx::wgmma_commit();
            const u32 stage = at.stage;
            at.advance();
            if (tile + 1 == work.tiles) {
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
    const int row = key + warp % 4 * 16;
    store_warp_rows<kDim>(shared.out[warp], map_dv, dv, 1.0f, 1.0f, work.kv_head, row, work.sequence);
    staged_rows_read();
    store_warp_rows<kDim>(shared.out[warp], map_dk, dk, sizes.scale, sizes.scale, work.kv_head, row, work.sequence);
    ptx::tma_store_wait_all();
}

template <int kDim>
__global__ void __launch_bounds__(kGradThreads, 1)
    attention_wgmma_backward_kv(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                                const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
                                const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv,
                                const float* lse, const float* delta, const __grid_constant__ AttentionSizes sizes, int section) {
    using Shared = BackwardKvShared<kDim>;
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
    }
    __syncthreads();
    const KeyWork work(sizes, section, Shared::kRows);
    if (warp < 4) {
        ptx::registers_shrink_to<24>();
        if (threadIdx.x == 0) feed_queries<kDim>(shared, map_q, map_k, map_v, map_dout, lse, delta, sizes, work);
    } else {
        ptx::registers_grow_to<240>();
        key_grads<kDim>(shared, map_dk, map_dv, sizes, work, warp - 4);
    }
}

constexpr int kGradKeys = 128;

template <int kDim>
struct BackwardQShared {
    static constexpr int kStages = 2;
    static constexpr int kRowBytes = kDim * 2;
    u8 q[kGradGroups][kGroupRows * kRowBytes];
    u8 dout[kGradGroups][kGroupRows * kRowBytes];
    u8 k[kStages][kGradKeys * kRowBytes];
    u8 v[kStages][kGradKeys * kRowBytes];
    u8 out[kGradGroups * 4][16 * kRowBytes];
    ptx::Barrier q_full, q_empty;
    RingBarriers<kStages> k_ring, v_ring;
};

/// Fills the rings of keys and values: one thread.
template <int kDim>
__device__ __forceinline__ void feed_keys(BackwardQShared<kDim>& shared, const TensorMap& map_q, const TensorMap& map_k,
                                          const TensorMap& map_v, const TensorMap& map_dout, const AttentionSizes& sizes, int section) {
    using Shared = BackwardQShared<kDim>;
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
            load_tile<kDim, kGroupRows>(shared.dout[i], map_dout, shared.q_full, work.head, row, work.sequence);
        }
        q_at.advance();
        for (int n = work.tile; n >= 0; --n) {
            ptx::barrier_wait(shared.k_ring.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(shared.k_ring.full[at.stage], sizeof(shared.k[0]));
            load_tile<kDim, kGradKeys>(shared.k[at.stage], map_k, shared.k_ring.full[at.stage], kv_head, n * kGradKeys, work.sequence);
            ptx::barrier_wait(shared.v_ring.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(shared.v_ring.full[at.stage], sizeof(shared.v[0]));
            load_tile<kDim, kGradKeys>(shared.v[at.stage], map_v, shared.v_ring.full[at.stage], kv_head, n * kGradKeys, work.sequence);
            at.advance();
        }
    }
}

/// One warpgroup's queries.
template <int kDim>
__device__ __forceinline__ void query_grads(BackwardQShared<kDim>& shared, const TensorMap& map_dq, const float* lse,
                                            const float* delta, const AttentionSizes& sizes, int section, int warp) {
    using Shared = BackwardQShared<kDim>;
    constexpr u32 kStage = kGradKeys * Shared::kRowBytes / 16;
    const int lane = ptx::lane_idx(), group = warp / 4;
    const int tiles = ceil_div(sizes.seq_len, kGradRows), all = tiles * sizes.heads * sizes.sequences;
    const float factor = sizes.scale * kLog2E;
    const u32 q = ptx::wgmma_descriptor_low(shared_address(shared.q[group]));
    const u32 dout = ptx::wgmma_descriptor_low(shared_address(shared.dout[group]));
    const u32 k = ptx::wgmma_descriptor_low(shared_address(shared.k[0])), k_down = descriptor_down<kGradKeys>(shared.k[0]);
    const u32 v = ptx::wgmma_descriptor_low(shared_address(shared.v[0]));
    const auto release = [&](ptx::Barrier& empty) {
        if (lane == 0) ptx::barrier_arrive(empty);
    };
    float dq[kDim / 2], s[kGradKeys / 2], dp[kGradKeys / 2];
    u32 ds[kGradKeys / 4];
    Place<1> q_at;
    Place<Shared::kStages> at;
    for (int round = 0;; ++round) {
        const int number = work_number(round);
        if (number >= all) break;
        const AttentionWork work = work_at<true>(number, tiles, section, sizes.heads, sizes.sequences);
        const int in_tile = group * kGroupRows + warp % 4 * 16 + lane / 4, row = work.tile * kGradRows + in_tile;
        const u64 rows = u64(u32(work.sequence * sizes.heads + work.head)) * sizes.padded + row;
        const float row_lse[2] = {lse[rows], lse[rows + 8]}, row_delta[2] = {delta[rows], delta[rows + 8]};
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) dq[i] = 0.0f;
        ptx::barrier_wait(shared.q_full, q_at.parity);
        q_at.advance();
        const auto begin_scores = [&] {
            ptx::barrier_wait(shared.k_ring.full[at.stage], at.parity);
            ptx::wgmma_fence();
            multiply_along<kDim, kGroupRows, kGradKeys>(s, q, k + at.stage * kStage);
            ptx::wgmma_commit();
        };
        ptx::wgmma_pin(dq);
        begin_scores();
        for (int n = work.tile;; --n) {
            const u32 stage = at.stage;
            ptx::barrier_wait(shared.v_ring.full[stage], at.parity);
            ptx::wgmma_fence();
            multiply_along<kDim, kGroupRows, kGradKeys>(dp, dout, v + stage * kStage);
            ptx::wgmma_commit();
            ptx::wgmma_wait_until<1>();
            ptx::wgmma_pin(s);
            if (n == work.tile) mask_later(s, in_tile - 2 * (lane % 4));
#pragma unroll
            for (int i = 0; i < kGradKeys / 2; ++i)
                s[i] = ptx::exp2_approx(__fmaf_rn(s[i], factor, -row_lse[i / 2 % 2]));
            ptx::wgmma_wait();
            ptx::wgmma_pin(dp);
            release(shared.v_ring.empty[stage]);
#pragma unroll
            for (int i = 0; i < kGradKeys / 2; i += 2) {
                const float d = row_delta[i / 2 % 2];
                ds[i / 2] = ptx::pack_bf16(s[i] * (dp[i] - d), s[i + 1] * (dp[i + 1] - d));
            }
            ptx::wgmma_pin(dq);
            ptx::wgmma_fence();
            multiply_down<kGradKeys>(dq, ds, k_down + stage * kStage);
            ptx::wgmma_commit();
            at.advance();
            if (n == 0) {
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
        store_warp_rows<kDim>(shared.out[warp], map_dq, dq, sizes.scale, sizes.scale, work.head, row - lane / 4, work.sequence);
    }
    ptx::tma_store_wait_all();
}

template <int kDim>
__global__ void __launch_bounds__(kGradThreads, 1)
    attention_wgmma_backward_q(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                               const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
                               const __grid_constant__ TensorMap map_dq, const float* lse, const float* delta,
                               const __grid_constant__ AttentionSizes sizes, int section) {
    using Shared = BackwardQShared<kDim>;
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
        if (threadIdx.x == 0) feed_keys<kDim>(shared, map_q, map_k, map_v, map_dout, sizes, section);
    } else {
        ptx::registers_grow_to<240>();
        query_grads<kDim>(shared, map_dq, lse, delta, sizes, section, warp - 4);
    }
}

}  // namespace nib
