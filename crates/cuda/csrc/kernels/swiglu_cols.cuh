// a = silu(g) · u · w from h = [g | u] in E4M3 along its rows and down its columns, from one read of h.
//
// swiglu_rows_cols<kRule>: h BF16 [rows][2f], as a map of tiles of 128 x 128, not swizzled; weight [rows] (null: 1); codes [rows][f],
// scales [rows][ceil(f / 128)]; column codes [f][capacity], scales [f][capacity / 128], zeros from `rows` to `capacity`; counts of the row
// blocks. f % 8 == 0, capacity % 128 == 0; row_id as in kernels/quantize.cuh; padding gives zeros; planes start on 16 bytes.
//   512 threads, any grid, best two ctas a multiprocessor; `by_across` divides by ceil(f / 128); sizeof(RowsColsShared) dynamic shared
//   memory: 115200. The next tile arrives while one is encoded.
//
// Measured on an H200, as in kernels/swiglu.cuh: power-of-two scales 84 % (83 %), F32 scales 82 % (81 %).
#pragma once
#include "formats/bf16.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/quantize.cuh"
#include "kernels/strip_tile.cuh"
#include "math/reduce.cuh"
#include "math/sigmoid_table.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace nib {

constexpr int kRowsColsCols = 8;  // of a thread
using RowsColsThread = StripThread<kRowsColsCols>;
using RowsColsMaxima = ColumnMaxima<kRowsColsCols>;

/// Maxima and codes take turns in the table's room.
struct alignas(128) RowsColsShared {
    SigmoidTable sigmoids;                               // first, as it wants
    alignas(128) u8 h[2][kTile][kTile * Bf16::kBytes];  // gate, up
    float inverses[kTile];
    ptx::Barrier there;  // the copy engine delivered the tile
    u32 total[3];
};

template <int kRule>
__global__ void __launch_bounds__(RowsColsThread::kThreads, 2)
    swiglu_rows_cols(const __grid_constant__ TensorMap h, const float* __restrict__ weight, u8* __restrict__ row_codes,
                     typename ScaleType<kRule>::Stored* __restrict__ row_scales, u8* __restrict__ col_codes,
                     typename ScaleType<kRule>::Stored* __restrict__ col_scales, u64* counts, const int* __restrict__ row_id, int rows, int f,
                     int capacity, Divider by_across) {
    using E = E4m3;
    extern __shared__ __align__(1024) u8 raw[];
    RowsColsShared& shared = *reinterpret_cast<RowsColsShared*>(raw);
    static_assert(sizeof(RowsColsMaxima) <= SigmoidTable::kRoom && sizeof(ColumnTile) <= SigmoidTable::kRoom, "they take turns there");
    RowsColsMaxima& maxima = *reinterpret_cast<RowsColsMaxima*>(shared.sigmoids.room);
    ColumnTile& tile = *reinterpret_cast<ColumnTile*>(shared.sigmoids.room);
    const RowsColsThread me;
    const u32 across = ceil_div(f, kTile), down = u32(capacity) / kTile, tiles = across * down;
    Tally tally;
    float weights[kThreadRows];
    u32 counted = 0;  // a bit for each of this thread's rows, if it has columns
    const auto fetch = [&](u32 index) {
        if (index >= tiles) return;
        const StripTile at(index, by_across, across);
        if (threadIdx.x == 0) {
            ptx::barrier_arrive_expect(shared.there, sizeof(shared.h));
            for (int half = 0; half < 2; ++half) ptx::tma_load(shared.h[half], h, shared.there, half * f + at.col(), int(at.row()));
        }
        counted = 0;
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            const int row = int(at.row()) + me.row + r;
            const bool counts_here = row < rows && at.col() + me.col < f && (row_id == nullptr || __ldg(row_id + row) >= 0);
            counted |= u32(counts_here) << r;
            // Padding is +0, so its weight must not be negative.
            weights[r] = counts_here && weight != nullptr ? __ldg(weight + row) : 1.0f;
        }
    };
    if (threadIdx.x == 0) {
        ptx::barrier_init(shared.there, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    fetch(blockIdx.x);
    shared.sigmoids.fill();
    const u32 base = shared.sigmoids.base();

    u32 parity = 0;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const StripTile at(index, by_across, across);
        const int my_row = int(at.strip) * kTile + me.row, first_col = at.col(), my_col = first_col + me.col;
        ptx::barrier_wait(shared.there, parity);
        parity ^= 1;
        __syncthreads();  // the table is filled, the codes of the last tile are stored

        StripValues<kRowsColsCols> value;
        float row_largest[kThreadRows];
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            const bool here = counted >> r & 1;
            const Bf16::Eight gate = here ? Bf16::load_shared(shared.h[0][me.row + r] + me.col * Bf16::kBytes) : Bf16::zeros();
            const Bf16::Eight up = here ? Bf16::load_shared(shared.h[1][me.row + r] + me.col * Bf16::kBytes) : Bf16::zeros();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float s[2];
                SigmoidTable::two(base, gate.word[i], s);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int c = 2 * i + k;
                    value[r][c] = __fmul_rn(__fmul_rn(__fmul_rn(Bf16::value(gate, c), s[k]), Bf16::value(up, c)), weights[r]);
                }
            }
            row_largest[r] = largest_magnitude(value[r]);
        }
        maxima.write(me, value);
        const float row_amax = largest_of_lanes<RowsColsThread::kLanes>(row_largest, me.lane);
        const auto row_scale = block_scale<E, kRule>(__float_as_uint(row_amax));
        if (me.of_row < kThreadRows) {
            if (my_row + me.of_row < rows) row_scales[u64(u32(my_row + me.of_row)) * across + at.panel] = row_scale.stored;
            tally.non_zero += __fmul_rn(row_amax, row_scale.inverse) > E::kLargestToZero;
            tally.non_finite += row_scale.is_nan();
        }
        __syncthreads();

        fetch(index + gridDim.x);  // nobody reads the tile any more
        BlockScale<typename ScaleType<kRule>::Stored> col_scale = {};
        if (threadIdx.x < kTile) {
            col_scale = block_scale<E, kRule>(__float_as_uint(maxima.at(threadIdx.x)));
            shared.inverses[threadIdx.x] = col_scale.inverse;
        }
        store_lines<kThreadRows>(
            row_codes + u64(u32(my_row)) * f + my_col, f, my_col < f ? rows - my_row : 0, __any_sync(kAllLanes, row_scale.is_nan()),
            [&](int r) { return value[r]; },
            [&](int r) { return __shfl_sync(kAllLanes, row_scale.inverse, (me.lane & 16) | r); });
        const bool col_nan = __syncthreads_or(col_scale.is_nan());
        turn_values<kRowsColsCols>(tile, me, value, shared.inverses);
        if (threadIdx.x < kTile) {
            const int col = first_col + RowsColsMaxima::column_at(threadIdx.x);
            if (col < f) col_scales[u64(u32(col)) * down + at.strip] = col_scale.stored;
        }
        __syncthreads();
        if (col_nan) {
            clear_nan_columns<kRowsColsCols>(tile, shared.inverses);
            __syncthreads();
        }
        tile.store<RowsColsThread::kThreads>(col_codes, first_col, f, capacity, int(at.strip) * kTile);
    }
    __syncthreads();
    tally.flush(counts, shared.total);
}

}  // namespace nib
