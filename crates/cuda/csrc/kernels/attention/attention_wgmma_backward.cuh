// The backward pass of causal attention on the tensor cores, as two kernels, in BF16. The code supports any sequence
// length, heads of 64 or 128 elements, and heads of 192 with values of 128. Each kernel computes P and dS
// itself, so no intermediate buffer is needed; `attention_wgmma_backward_once` computes P and dS only once.
//
// Both kernels: q, k and their gradients are tensor maps of [sequences][seq_len][heads · kDim]; v, dout and
//   dv are tensor maps of [sequences][seq_len][heads · kValueDim]. Boxes have 64 columns, in the 128-byte
//   swizzle. `attention_rows` writes lse and delta, with factor log2(e). P = 2^(q·k · log2(e) · scale - lse)
//   and dS = P · (dout·v - delta) are rounded to BF16. Sums are F32. No CTA adds to the sums of another CTA.
// kWindowed: query i of a sequence sees the keys from first_key[i] on, and key j is seen by the queries
//   before end_query[j]. Neither array decreases. So a CTA neither loads nor multiplies tiles of keys
//   before the first key of its first query, and tiles of queries after the last query of its last key.
// attention_wgmma_backward_kv<kDim, kValueDim, kWindowed>: `key_grads` computes dv and dk. 384 threads per CTA;
//   the grid has ceil(seq_len / 128) · kv_heads · sequences CTAs, and CTAs with the most queries start first.
// attention_wgmma_backward_q<kDim, kValueDim, kWindowed>: dq = scale · dS · k. A CTA has 128 queries of a head, 64 per
//   warpgroup, and loops over their keys from the last to the first, `grad_keys` keys at a time. Boxes have 64 rows for q and
//   dout, `grad_keys` rows for k and v, and 16 rows for dq. 384 threads per CTA, and any number of CTAs up to one per SM.
// Dynamic shared memory: the size of the kernel's shared struct + 1008 bytes. One warp loads tiles. The
// tensor cores start the scores S of the next tile before the sums of the current tile are complete.
//
// Sustained speed on an H200 with heads of 128 (heads of 64): dk and dv reach 626 to 648 TFLOP/s (544), counting four
// GEMMs; dq reaches 582 to 637 TFLOP/s (510), counting three GEMMs. A dense BF16 GEMM of cuBLASLt sustains 651 TFLOP/s on
// the same GPU. On an H100 with heads of 192 and values of 128, dk and dv reach 603 TFLOP/s, and dq reaches 640 TFLOP/s.
#pragma once
#include "pieces/attention/key_grads.cuh"

namespace nib {

template <int kDim, int kValueDim, bool kWindowed>
__global__ void __launch_bounds__(kGradThreads, 1)
    attention_wgmma_backward_kv(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                                const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
                                const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv,
                                const float* lse, const float* delta, const __grid_constant__ AttentionSizes sizes, int section,
                                const int* __restrict__ end_query) {
    using Shared = KeyGradsShared<kDim, kValueDim, false>;
    extern __shared__ u8 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int warp = __shfl_sync(0xFFFFFFFF, int(threadIdx.x / 32), 0);
    if (threadIdx.x == 0) {
        shared.init();
        ptx::barrier_init_fence();
        const int tiles = ceil_div(sizes.seq_len, kGradRows);
        const AttentionWork work = work_at<false>(blockIdx.x, tiles, section, sizes.kv_heads, sizes.sequences);
        begin_keys<kWindowed>(shared, map_k, map_v, sizes, end_query, work);
    }
    __syncthreads();
    if (warp < 4) {
        ptx::registers_shrink_to<24>();
        if (threadIdx.x == 0) feed_queries(shared, map_q, map_dout, lse, delta, sizes);
    } else {
        ptx::registers_grow_to<240>();
        key_grads<kWindowed>(shared, map_dk, map_dv, sizes, end_query, warp - 4);
    }
}

/// The number of keys per tile in the kernel of dq, where queries stay in shared
/// memory. Heads of 192 leave registers and shared memory for fewer keys.
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
    QueryTile<kGradGroups> tile;
    ptx::Barrier q_full, q_empty;
    RingBarriers<kStages> k_ring, v_ring;

    /// Returns the last tile of keys that a tile of queries sees under the causal mask.
    static __device__ __forceinline__ int last(int tile) { return ((tile + 1) * kGradRows - 1) / kKeys; }
};

/// Fills the rings of keys and values. One thread runs this function.
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
        QueryTile<kGradGroups> query_tile;
        query_tile.template set<kWindowed>(number, tiles, section, sizes, first_key, Shared::kKeys);
        const AttentionWork& work = query_tile.work;
        const int kv_head = work.head / group;
        ptx::barrier_wait(shared.q_empty, q_at.parity ^ 1);
        shared.tile = query_tile;
        ptx::barrier_arrive_expect(shared.q_full, sizeof(shared.q) + sizeof(shared.dout));
        for (int i = 0; i < kGradGroups; ++i) {
            const int row = work.tile * kGradRows + i * kGroupRows;
            load_tile<kDim, kGroupRows>(shared.q[i], map_q, shared.q_full, work.head, row, work.sequence);
            load_tile<kValueDim, kGroupRows>(shared.dout[i], map_dout, shared.q_full, work.head, row, work.sequence);
        }
        q_at.advance();
        for (int n = Shared::last(work.tile); n >= query_tile.first; --n) {
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

/// Computes dq for the queries of one warpgroup.
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
        ptx::barrier_wait(shared.q_full, q_at.parity);
        q_at.advance();
        const AttentionWork work = shared.tile.work;
        const int first = work.tile * kGradRows + group * kGroupRows, row = first + warp % 4 * 16 + lane / 4;
        const u64 rows = u64(u32(work.sequence * sizes.heads + work.head)) * sizes.padded + row;
        const float row_lse[2] = {lse[rows], lse[rows + 8]}, row_delta[2] = {delta[rows], delta[rows + 8]};
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) dq[i] = 0.0f;
        const auto begin_scores = [&] {
            ptx::barrier_wait(shared.k_ring.full[at.stage], at.parity);
            ptx::wgmma_fence();
            multiply_along<kDim, kGroupRows, kKeys>(s, q, k + at.stage * kKeyStage);
            ptx::wgmma_commit();
        };
        const int edge = kWindowed ? shared.tile.edge[group] : 0, end = shared.tile.first;
        int n = Shared::last(work.tile);
        if constexpr (kKeys < kGradRows) {
            for (; n * kKeys >= first + kGroupRows; --n) {
                // A skipped tile too is released only after its data has arrived,
                // because a warp must not arrive twice in one phase of `empty`.
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
            if (n == end) {
                __syncwarp();
                release(shared.q_empty);
            }
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
