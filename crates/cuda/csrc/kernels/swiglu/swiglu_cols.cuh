// SwiGLU: computes a = silu(g) · u · w from h = [g | u], in E4M3 along its rows and down its columns, from one read of h.
//
// swiglu_rows_cols<kRule>: h is BF16 [rows][2f], read through a tensor map with boxes of 32 rows by 128 columns, not swizzled; weight is
//   [rows] (null: 1). Row codes are [rows][f] with scales [rows][ceil(f / 128)]. Column codes are [f][capacity], written through a tensor map
//   of tiles in the layout of TurnedTile, with scales [capacity / 128][scale_stride], and zeros from `rows` to `capacity`. Counts are those
//   of the row blocks. f % 8 == 0, capacity % 128 == 0. Rows with a negative row_id are padding, and give zeros. Buffers are 16-byte aligned.
//   512 threads per CTA. Any grid size gives correct results, and two CTAs per SM are
//   fastest; `by_across` divides by ceil(f / 128). Dynamic shared memory:
//   sizeof(RowsColsShared) = 115712 bytes. While a tile is encoded, the next tile is loaded.
//
// All threads wait at three barriers per tile. The factors of the columns use a split barrier,
// `inverses_there`: threads arrive at it before they store their rows, and wait for it afterwards.
//
// Speed in % of the bandwidth limit of kernels/swiglu/swiglu.cuh, with power-of-two scales: 89 % (86 %), in 32 uneven groups 85 %, in 256 groups 71 %.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "math/reduce.cuh"
#include "math/sigmoid_table.cuh"
#include "pieces/convert/row_codes.cuh"
#include "pieces/convert/strip_tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace nib {

/// A transposed tile of codes, and the maxima from which its scales are computed. The codes and the maxima are
/// never in use at the same time, so they share memory.
union RowsColsTurn {
    struct {
        ColumnMaxima<1> maxima;
        float row_largest[2][kTile];  // maxima of the two halves of each row
    } before;
    TurnedTile tile;
};

struct alignas(128) RowsColsShared {
    SigmoidTable sigmoids;                              // first, because it needs a low address; its spare memory holds a RowsColsTurn
    alignas(128) u8 h[2][kTile][kTile * Bf16::kBytes];  // gate, up
    ColumnInverses inverses;
    int row_id[kTile];   // row ids of the tile after the one that is being loaded
    ptx::Barrier there;           // TMA delivered the tile
    ptx::Barrier inverses_there;  // every thread arrives, because racecheck misreads one arrival per warp, and this is not slower
    u32 col_nan;                  // whether a column block is NaN
    u32 total[3];
};

/// Starts to fetch the tile at (row, col), except boxes that contain only padding. The first warp
/// calls this function.
__device__ __forceinline__ void fetch_boxes(RowsColsShared& shared, const TensorMap& h, int row, int col, int f) {
    const u32 wanted = boxes_wanted(shared.row_id);
    const int box = threadIdx.x % 4, half = threadIdx.x / 4;
    if (threadIdx.x == 0) ptx::barrier_arrive_expect(shared.there, __popc(wanted) * 2 * kBoxRows * sizeof(shared.h[0][0]));
    __syncwarp();
    if (half < 2 && (wanted >> box & 1)) ptx::tma_load(shared.h[half][box * kBoxRows], h, shared.there, half * f + col, row + box * kBoxRows);
}

template <int kRule>
__global__ void __launch_bounds__(kStripThreads, 2)
    swiglu_rows_cols(const __grid_constant__ TensorMap h, const float* __restrict__ weight, u8* __restrict__ row_codes,
                     typename ScaleType<kRule>::Stored* __restrict__ row_scales, const __grid_constant__ TensorMap cols,
                     typename ScaleType<kRule>::Stored* __restrict__ col_scales, u64* counts, const int* __restrict__ row_id, int rows, int f,
                     int capacity, u32 scale_stride, Divider by_across) {
    using E = E4m3;
    extern __shared__ __align__(1024) u8 raw[];
    RowsColsShared& shared = *reinterpret_cast<RowsColsShared*>(raw);
    static_assert(sizeof(RowsColsTurn) <= SigmoidTable::kRoom, "they fit there");
    RowsColsTurn& turn = *reinterpret_cast<RowsColsTurn*>(shared.sigmoids.room);
    const StripThread me;
    const u32 across = ceil_div(f, kTile), down = u32(capacity) / kTile, tiles = across * down;
    Tally tally;
    float weights[kThreadRows];
    u32 counted = 0;  // one bit for each of this thread's rows; 0 if the thread has no columns
    const auto fetch_ids = [&](u32 index) {
        if (row_id == nullptr || index >= tiles || threadIdx.x >= kTile) return;
        const u64 row = StripTile(index, by_across, across).row() + threadIdx.x;
        ptx::copy_4_async(&shared.row_id[threadIdx.x], row_id + row, row < u64(rows));
    };
    // Starts to fetch a tile whose row ids have arrived.
    const auto fetch = [&](u32 index) {
        if (index >= tiles) return;
        const StripTile at(index, by_across, across);
        if (threadIdx.x < 32) fetch_boxes(shared, h, int(at.row()), at.col(), f);
        counted = 0;
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            const int row = int(at.row()) + me.row + r;
            const bool counts_here = row < rows && at.col() + me.col < f && shared.row_id[me.row + r] >= 0;
            counted |= u32(counts_here) << r;
            // The output of a padding row must be +0, so its weight must not be negative.
            weights[r] = counts_here && weight != nullptr ? __ldg(weight + row) : 1.0f;
        }
    };
    if (threadIdx.x == 0) {
        ptx::barrier_init(shared.there, 1);
        ptx::barrier_init(shared.inverses_there, kStripThreads);
        shared.col_nan = 0;
        ptx::barrier_init_fence();
    }
    if (threadIdx.x < kTile) shared.row_id[threadIdx.x] = 0;
    fetch_ids(blockIdx.x);
    ptx::copies_wait();
    __syncthreads();
    fetch(blockIdx.x);
    shared.sigmoids.fill();
    __syncthreads();
    fetch_ids(blockIdx.x + gridDim.x);
    const u32 base = shared.sigmoids.base();

    u32 parity = 0;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const StripTile at(index, by_across, across);
        const int my_row = int(at.strip) * kTile + me.row, first_col = at.col(), my_col = first_col + me.col;
        ptx::barrier_wait(shared.there, parity);
        parity ^= 1;
        if (threadIdx.x == 0) ptx::tma_store_wait_read<0>();
        __syncthreads();  // TMA has read the previous tile's codes

        StripValues value;
        Bf16::Eight gate[kThreadRows], up[kThreadRows];
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            gate[r] = Bf16::load_shared(shared.h[0][me.row + r] + me.col * Bf16::kBytes);
            up[r] = Bf16::load_shared(shared.h[1][me.row + r] + me.col * Bf16::kBytes);
        }
        if (__any_sync(kAllLanes, counted != (1 << kThreadRows) - 1)) {  // boxes that contain only padding were not loaded
#pragma unroll
            for (int r = 0; r < kThreadRows; ++r)
                if (!(counted >> r & 1)) gate[r] = up[r] = Bf16::zeros();
        }
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float s[2];
                SigmoidTable::two(base, gate[r].word[i], s);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int c = 2 * i + k;
                    value[r][c] = __fmul_rn(__fmul_rn(__fmul_rn(Bf16::value(gate[r], c), s[k]), Bf16::value(up[r], c)), weights[r]);
                }
            }
        }
        float row_largest[kThreadRows], largest[kThreadCols];
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) row_largest[r] = largest_magnitude(value[r]);
#pragma unroll
        for (int c = 0; c < kThreadCols; ++c) largest[c] = largest_magnitude<4>({value[0][c], value[1][c], value[2][c], value[3][c]});
        turn.before.maxima.write(me, largest);
        const auto larger = [](float a, float b) { return ptx::max_magnitude(a, b); };
        join_lanes<1, 1>(row_largest, ptx::lane_idx_anew(), larger);  // now the maximum of row lane % 4
        row_largest[0] = larger(row_largest[0], __shfl_xor_sync(kAllLanes, row_largest[0], 4));
        const int in_tile = me.row + me.lane % kThreadRows;
        if (me.lane % 8 < kThreadRows) turn.before.row_largest[me.half][in_tile] = row_largest[0];
        ptx::copies_wait();
        __syncthreads();

        fetch(index + gridDim.x);  // no thread reads the tile any more
        const float row_amax = larger(row_largest[0], turn.before.row_largest[1 - me.half][in_tile]);
        const auto row_scale = block_scale<E, kRule>(__float_as_uint(row_amax));
        if (me.half == 0 && me.lane % 8 < kThreadRows) {
            const int row = my_row + me.lane % kThreadRows;
            if (row < rows) row_scales[u64(u32(row)) * across + at.panel] = row_scale.stored;
            tally.non_zero += __fmul_rn(row_amax, row_scale.inverse) > E::kLargestToZero;
            tally.non_finite += row_scale.is_nan();
        }
        const u32 place = threadIdx.x - (kStripThreads - kTile);  // done by warps other than the warp that fetches
        if (place < kTile) {
            const int in_panel = ColumnMaxima<1>::column_at(place), col = first_col + in_panel;
            const auto col_scale = block_scale<E, kRule>(__float_as_uint(turn.before.maxima.at(0, place)));
            shared.inverses.at(in_panel) = col_scale.inverse;
            if (col_scale.is_nan()) shared.col_nan = 1;
            if (col < f) col_scales[u64(at.strip) * scale_stride + u32(col)] = col_scale.stored;
        }
        __syncwarp();
        ptx::barrier_arrive(shared.inverses_there);
        // The rows are encoded and stored while other threads arrive at the barrier.
        store_lines<kThreadRows>(
            row_codes + u64(u32(my_row)) * f + my_col, f, my_col < f ? rows - my_row : 0, __any_sync(kAllLanes, row_scale.is_nan()),
            [&](int r) { return value[r]; },
            [&](int r) { return __shfl_sync(kAllLanes, row_scale.inverse, (me.lane & 24) | r); });
        // From here on the factors are complete. No thread reads the
        // maxima any more, so the codes may overwrite their memory.
        ptx::barrier_wait(shared.inverses_there, parity ^ 1);
        __syncwarp();
        fetch_ids(index + 2 * gridDim.x);
        turn.tile.write(me, value, shared.inverses);
        if (shared.col_nan != 0) {
            __syncthreads();
            turn.tile.clear_nan(shared.inverses);
        }
        ptx::fence_shared_to_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::tma_store(cols, &turn.tile, int(at.strip) * kTile, first_col / 8, 0);
            ptx::tma_store_commit();
            shared.col_nan = 0;
        }
    }
    if (threadIdx.x == 0) ptx::tma_store_wait_all();
    tally.flush(counts, shared.total);
}

}  // namespace nib
