// Building blocks of the attention kernels on the tensor cores: rings of tiles, the order of work, and the GEMMs of
// a warpgroup.
//
// A tile of rows of a head lies in shared memory as TMA writes it: contiguous boxes of 64 elements
// (128 bytes) by all rows of the tile, in the 128-byte swizzle. Such a tile can be a K-major operand,
// whose contraction is along the head, or an MN-major operand, whose contraction is down the rows.
#pragma once
#include "pieces/attention/attention_sizes.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/packed.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"

namespace nib {

constexpr int kBoxCols = 64;       // number of elements per box row, which are 128 bytes
constexpr int kBoxRowBytes = 128;
constexpr int kGroupRows = 64;     // number of rows that a warpgroup's WGMMA multiplies

/// A position in a ring of tiles: the stage of the next tile, and the parity of its barrier's phase.
template <int kStages>
struct Place {
    u32 stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

/// The barriers of a ring of tiles.
template <int kStages>
struct RingBarriers {
    ptx::Barrier full[kStages];
    ptx::Barrier empty[kStages];

    /// Initialises the barriers; one thread calls this function. `readers` warps arrive at `empty` when they no longer
    /// need a stage.
    __device__ __forceinline__ void init(u32 readers) {
        for (int i = 0; i < kStages; ++i) {
            ptx::barrier_init(full[i], 1);
            ptx::barrier_init(empty[i], readers);
        }
    }
};

/// The next item of work of a CTA.
struct AttentionWork {
    int sequence;
    int head;
    int tile;
};

/// Returns work item number `at`, if each head has `tiles` tiles. Heads are divided into sections
/// of `section` heads, whose keys and values fit into the L2. A section processes one tile of all
/// its heads, then the next tile; with kLastFirst it goes from the last tile to the first.
template <bool kLastFirst>
__device__ __forceinline__ AttentionWork work_at(int at, int tiles, int section, int heads, int sequences) {
    const int of_section = section * tiles;
    const int number = at / of_section, rest = at - number * of_section;
    const int width = min(section, heads * sequences - number * section);
    const int unit = number * section + rest % width, tile = rest / width;
    return {unit / heads, unit % heads, kLastFirst ? tiles - 1 - tile : tile};
}

/// A tile of queries, 64 for each of kGroups warpgroups, as the loading warp passes it to the math warps. The loading
/// warp computes the fields, because that takes divisions and loads, for which the math warps would have to wait.
template <int kGroups>
struct QueryTile {
    AttentionWork work;
    int first;          // first tile of keys that the queries see: the tile with the first key of the first query
    int edge[kGroups];  // tiles of keys that begin before this key need a window mask for some row of the warpgroup

    /// Sets the tile to item `number` of all work, if a head has `tiles` tiles and a tile has `keys` keys.
    template <bool kWindowed>
    __device__ __forceinline__ void set(int number, int tiles, int section, const AttentionSizes& sizes, const int* first_key, int keys) {
        const AttentionWork at = work_at<true>(number, tiles, section, sizes.heads, sizes.sequences);
        const int row = at.tile * kGroups * kGroupRows;
        work = at;
        first = first_key_of<kWindowed>(first_key, sizes, at.sequence, row) / keys;
#pragma unroll
        for (int i = 0; i < kGroups; ++i)
            edge[i] = first_key_of<kWindowed>(first_key, sizes, at.sequence, min(row + (i + 1) * kGroupRows, sizes.seq_len) - 1);
    }

    /// Marks the end of the work, so that the CTA exits.
    __device__ __forceinline__ void set_none() { work.tile = -1; }
    __device__ __forceinline__ bool is_none() const { return work.tile < 0; }
};

/// Returns the index of the CTA's work in round `round`. Every other round assigns work
/// to the CTAs in reverse order, so that no CTA has the longest work of every round.
__device__ __forceinline__ int work_number(int round) {
    const int cta = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * int(gridDim.x) + cta;
}

/// Loads a tile of `kRows` rows of a head in boxes; one thread calls this function.
template <int kDim, int kRows>
__device__ __forceinline__ void load_tile(u8* tile, const TensorMap& map, ptx::Barrier& barrier, int head, int row, int sequence) {
#pragma unroll
    for (int box = 0; box < kDim / kBoxCols; ++box)
        ptx::tma_load(tile + box * kRows * kBoxRowBytes, map, barrier, head * kDim + box * kBoxCols, row, sequence);
}

/// Computes d = A·Bᵀ over the kDim elements of a head: 64 rows of a tile of kRowsA rows times
/// a tile of kRowsB rows, both K-major. `a` and `b` are the low halves of the descriptors.
template <int kDim, int kRowsA, int kRowsB, int kCount>
__device__ __forceinline__ void multiply_along(float (&d)[kCount], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        const u32 box = step / 4, within = step % 4 * 2;
        const u64 of_a = ptx::wgmma_descriptor(a + box * (kRowsA * kBoxRowBytes / 16) + within);
        const u64 of_b = ptx::wgmma_descriptor(b + box * (kRowsB * kBoxRowBytes / 16) + within);
        if (step == 0)
            ptx::wgmma_bf16<false, true>(d, of_a, of_b);
        else
            ptx::wgmma_bf16<false, false>(d, of_a, of_b);
    }
}

/// Computes d += W·B: weights W in registers times a tile B of kRowsB
/// rows. B is MN-major, so the contraction goes down its rows.
template <int kRowsB, int kCount>
__device__ __forceinline__ void multiply_down(float (&d)[kCount], const u32 (&w)[kRowsB / 4], u32 b) {
#pragma unroll
    for (int step = 0; step < kRowsB / 16; ++step)
        ptx::wgmma_bf16<true, false>(d, w[4 * step], w[4 * step + 1], w[4 * step + 2], w[4 * step + 3],
                                    ptx::wgmma_descriptor(b + step * (16 * kBoxRowBytes / 16)));
}

/// Computes d += A·B, where both tiles have kRowsB rows and are MN-major.
template <int kRowsB, int kCount>
__device__ __forceinline__ void multiply_down(float (&d)[kCount], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < kRowsB / 16; ++step) {
        constexpr u32 kStep = 16 * kBoxRowBytes / 16;
        ptx::wgmma_bf16_down(d, ptx::wgmma_descriptor(a + step * kStep), ptx::wgmma_descriptor(b + step * kStep));
    }
}

/// The low half of the descriptor of a tile, for `multiply_down`.
template <int kRows>
__device__ __forceinline__ u32 descriptor_down(const void* tile) {
    return ptx::wgmma_descriptor_low_transposed(shared_address(tile), kRows * kBoxRowBytes);
}

/// Converts accumulators to BF16, as the A operand of the next WGMMA.
template <int kCount>
__device__ __forceinline__ void to_weights(u32 (&w)[kCount / 2], const float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) w[i] = ptx::pack_bf16(x[2 * i], x[2 * i + 1]);
}

/// Sets the scores of keys later than the query to -infinity. `ahead` is
/// the index of this thread's first row minus that of its first column.
template <int kCount>
__device__ __forceinline__ void mask_later(float (&s)[kCount], int ahead) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const int col = 2 * i;
        if (col > ahead) s[i] = -infinity();
        if (col + 1 > ahead) s[i + 1] = -infinity();
        if (col > ahead + 8) s[i + 2] = -infinity();
        if (col + 1 > ahead + 8) s[i + 3] = -infinity();
    }
}

/// Sets the scores of keys before a row's window to -infinity. `low` and `high` are the first
/// keys that this thread's first and second row see, relative to this thread's first column.
template <int kCount>
__device__ __forceinline__ void mask_before(float (&s)[kCount], int low, int high) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const int col = 2 * i;
        if (col < low) s[i] = -infinity();
        if (col + 1 < low) s[i + 1] = -infinity();
        if (col < high) s[i + 2] = -infinity();
        if (col + 1 < high) s[i + 3] = -infinity();
    }
}

/// Waits until TMA has read this warp's staged rows.
__device__ __forceinline__ void staged_rows_read() {
    if (ptx::lane_idx() == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
}

/// Stores a warp's 16 rows of sums to rows `row` and on. Row l/4 is multiplied by `low`,
/// and row l/4 + 8 by `high`. The rows are staged as boxes of 16 rows, kBoxes boxes at a
/// time. When this function returns, TMA may still be reading the last boxes.
template <int kDim, int kBoxes = kDim / kBoxCols>
__device__ __forceinline__ void store_warp_rows(u8* staged, const TensorMap& map, const float (&sum)[kDim / 2], float low, float high,
                                                int head, int row, int sequence) {
    constexpr int kBoxBytes = 16 * kBoxRowBytes;
    const u32 lane = ptx::lane_idx();
    const u32 tile = lane / 8, in_box = lane % 8 + 8 * (tile & 1);
    const u32 to = shared_address(staged) + in_box * kBoxRowBytes;
#pragma unroll
    for (int first = 0; first < kDim / kBoxCols; first += kBoxes) {
        if (first > 0) staged_rows_read();
#pragma unroll
        for (int j = 0; j < kBoxes * 8; j += 2) {
            const u32 chunk = (j % 8 + (tile >> 1)) ^ (lane % 8);
            const float* const x = sum + 4 * (8 * first + j);
            ptx::store_matrix_x4(to + j / 8 * kBoxBytes + chunk * 16, ptx::pack_bf16(x[0] * low, x[1] * low),
                                 ptx::pack_bf16(x[2] * high, x[3] * high), ptx::pack_bf16(x[4] * low, x[5] * low),
                                 ptx::pack_bf16(x[6] * high, x[7] * high));
        }
        ptx::fence_shared_to_async();
        __syncwarp();
        if (lane == 0) {
#pragma unroll
            for (int box = 0; box < kBoxes; ++box)
                ptx::tma_store(map, staged + box * kBoxBytes, head * kDim + (first + box) * kBoxCols, row, sequence);
            ptx::tma_store_commit();
        }
    }
}

}  // namespace nib
