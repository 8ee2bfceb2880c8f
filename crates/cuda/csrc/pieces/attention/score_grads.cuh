// dS of attention in memory, and dq = scale · dS · k, which is computed from dS. The kernel for the gradients of keys and values writes dS.
//
// dS of a head is stored in BF16 in tiles of 64 keys by 64 queries. The 64 queries of a key are contiguous, in the swizzle
// that TMA uses for rows of 128 bytes, so that a tile in shared memory is an MN-major operand. Four tiles of the same 64 keys
// form a block of 256 queries. Blocks are ordered by queries, then by keys, up to the last key that the block's last query
// sees. Elements outside the causal mask, the windows or the sequence are not written; kernels read them but do not use them.
#pragma once
#include "pieces/attention/attention_ring.cuh"

namespace nib {

constexpr int kBlockTiles = 4;
constexpr int kBlockRows = kBlockTiles * kGroupRows;
constexpr int kScoreTileBytes = kGroupRows * kBoxRowBytes;

/// The size of a head's dS in bytes.
__host__ __device__ __forceinline__ u64 score_grad_bytes(int seq_len) {
    const u64 blocks = ceil_div(seq_len, kBlockRows);
    return blocks * (blocks + 1) / 2 * (kBlockTiles * kBlockTiles * kScoreTileBytes);
}

/// Returns the position at which a tile starts. The keys must
/// not be later than the last query of the tile's block.
__device__ __forceinline__ u64 score_tile(int key_tile, int query_tile) {
    const u32 block = query_tile / kBlockTiles;
    return u64((block * (block + 1) / 2 * kBlockTiles + key_tile) * kBlockTiles + query_tile % kBlockTiles) * kScoreTileBytes;
}

/// Stores a warp's 16 rows of a tile of dS. When this function returns, TMA may still be reading
/// the staged data.
__device__ __forceinline__ void store_score_grads(u8* staged, const u32 (&ds)[kGroupRows / 4], u8* tile) {
    constexpr int kBytes = 16 * kBoxRowBytes;
    const u32 lane = ptx::lane_idx_anew();
    const u32 to = shared_address(staged) + lane % 16 * kBoxRowBytes + ((lane / 16) ^ (lane % 8)) * 16;
    staged_rows_read();
#pragma unroll
    for (int j = 0; j < 8; j += 2) ptx::store_matrix_x4(to ^ (j * 16), ds[2 * j], ds[2 * j + 1], ds[2 * j + 2], ds[2 * j + 3]);
    ptx::fence_shared_to_async();
    __syncwarp();
    if (lane == 0) {
        ptx::bulk_store(tile + threadIdx.x / 32 % 4 * kBytes, staged, kBytes);
        ptx::tma_store_commit();
    }
}

/// The queries of a CTA: two blocks of a head, which are
/// chosen so that all CTAs process the same number of keys.
struct QueryWork {
    int sequence, head;
    int blocks[2];          // the second is negative if the CTA has only one block
    const u8* score_grads;  // dS of the CTA's head
};

/// The number of warpgroups that run `query_grads_of`. Each warpgroup has two tiles of a block.
constexpr int kBlockGroups = kBlockTiles / 2;

template <int kDim>
struct QueryGradsShared {
    static constexpr int kStages = kDim > 128 ? 3 : 4;
    u8 k[kStages][kGroupRows * kDim * 2];
    u8 ds[kStages][kBlockTiles][kScoreTileBytes];
    u8 out[kBlockGroups * 4][kDim / kBoxCols * 16 * kBoxRowBytes];
    QueryWork work;
    RingBarriers<kStages> ring;
};

/// A range of key tiles, from the first to the last.
struct KeyRange {
    int first, last;

    /// Returns the key tiles that a block of queries sees. Loading and math warps both use this range, so they agree whatever first_key contains.
    template <bool kWindowed>
    static __device__ __forceinline__ KeyRange of_block(const AttentionSizes& sizes, const int* first_key, int sequence, int block) {
        const int first = first_key_of<kWindowed>(first_key, sizes, sequence, block * kBlockRows) / kGroupRows;
        return {first, min((block + 1) * kBlockTiles, ceil_div(sizes.seq_len, kGroupRows)) - 1};
    }
};

/// Fills the ring with keys and dS, from the last keys to the first; one thread calls this function.
template <bool kWindowed, int kDim>
__device__ __forceinline__ void feed_score_grads(QueryGradsShared<kDim>& shared, const TensorMap& map_k, const AttentionSizes& sizes,
                                                 const int* first_key) {
    const QueryWork& work = shared.work;
    Place<QueryGradsShared<kDim>::kStages> at;
#pragma unroll 1
    for (const int block : work.blocks) {
        if (block < 0) break;
        const KeyRange keys = KeyRange::of_block<kWindowed>(sizes, first_key, work.sequence, block);
#pragma unroll 1
        for (int n = keys.last; n >= keys.first; --n) {
            ptx::Barrier& full = shared.ring.full[at.stage];
            ptx::barrier_wait(shared.ring.empty[at.stage], at.parity ^ 1);
            ptx::barrier_arrive_expect(full, sizeof(shared.k[0]) + sizeof(shared.ds[0]));
            load_tile<kDim, kGroupRows>(shared.k[at.stage], map_k, full, work.head, n * kGroupRows, work.sequence);
            ptx::bulk_load(shared.ds[at.stage], work.score_grads + score_tile(n, block * kBlockTiles), sizeof(shared.ds[0]), full);
            at.advance();
        }
    }
}

/// Computes dq for the queries of a warpgroup, which are tiles 2 · group and 2 ·
/// group + 1 of each block. `warp` is the index of the warp among the math warps.
template <bool kWindowed, int kDim>
__device__ __forceinline__ void query_grads_of(QueryGradsShared<kDim>& shared, const TensorMap& map_dq, const AttentionSizes& sizes,
                                               const int* first_key, int warp) {
    constexpr u32 kKeyStage = sizeof(shared.k[0]) / 16, kScoreStage = sizeof(shared.ds[0]) / 16, kScoreTile = kScoreTileBytes / 16;
    const int group = warp / 4;
    const u32 k = descriptor_down<kGroupRows>(shared.k[0]), ds = descriptor_down<kGroupRows>(shared.ds[0][2 * group]);
    const QueryWork& work = shared.work;
    const auto release = [&](u32 stage) {
        if (ptx::lane_idx() == 0) ptx::barrier_arrive(shared.ring.empty[stage]);
    };
    float low[kDim / 2], high[kDim / 2];
    Place<QueryGradsShared<kDim>::kStages> at;
    const auto skip = [&] {
        // A skipped tile is released only after its data has arrived, because a warp must not arrive twice in one
        // phase of `empty`.
        ptx::barrier_wait(shared.ring.full[at.stage], at.parity);
        release(at.stage);
        at.advance();
    };
#pragma unroll 1
    for (const int block : work.blocks) {
        if (block < 0) break;
        const KeyRange keys = KeyRange::of_block<kWindowed>(sizes, first_key, work.sequence, block);
        const int tile = block * kBlockTiles + 2 * group;
        const auto first_of = [&](int tile) {
            if (tile * kGroupRows >= sizes.seq_len) return keys.last + 1;
            return max(keys.first, first_key_of<kWindowed>(first_key, sizes, work.sequence, tile * kGroupRows) / kGroupRows);
        };
        const int first_low = first_of(tile), first_high = first_of(tile + 1);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) low[i] = high[i] = 0.0f;
        int n = keys.last;
        for (; n > tile + 1; --n) skip();
        ptx::wgmma_pin(low), ptx::wgmma_pin(high);
        u32 before = 0;
        bool pending = false;
        const auto multiply = [&](bool is_low, bool is_high) {
            ptx::barrier_wait(shared.ring.full[at.stage], at.parity);
            ptx::wgmma_fence();
            const u32 of_k = k + at.stage * kKeyStage, of_ds = ds + at.stage * kScoreStage;
            if (is_low) multiply_down<kGroupRows>(low, of_ds, of_k);
            if (is_high) multiply_down<kGroupRows>(high, of_ds + kScoreTile, of_k);
            ptx::wgmma_commit();
            ptx::wgmma_wait_until<1>();
            if (pending) release(before);
            before = at.stage, pending = true;
            at.advance();
        };
        for (; n > tile && n >= first_high; --n) multiply(false, true);
#pragma unroll 1
        for (; n >= first_low && n >= first_high; --n) multiply(true, true);
#pragma unroll 1
        for (; n >= first_low; --n) multiply(true, false);
        staged_rows_read();
        ptx::wgmma_wait();
        ptx::wgmma_pin(low), ptx::wgmma_pin(high);
        if (pending) release(before);
        for (; n >= keys.first; --n) skip();
        const int row = tile * kGroupRows + warp % 4 * 16;
        store_warp_rows<kDim>(shared.out[warp], map_dq, low, sizes.scale, sizes.scale, work.head, row, work.sequence);
        staged_rows_read();
        store_warp_rows<kDim>(shared.out[warp], map_dq, high, sizes.scale, sizes.scale, work.head, row + kGroupRows, work.sequence);
    }
    ptx::tma_store_wait_all();
}

}  // namespace nib
