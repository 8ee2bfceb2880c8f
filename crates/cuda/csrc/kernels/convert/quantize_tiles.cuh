// Quantizes BF16 or F32 to FP8 with one scale per 2-D block of 128 x 128; writes the matrix and its transpose. GEMMs need both forms of a weight.
//
// quantize_tiles<In, E, kF32Scales, Round>: x and row_codes are [stack][rows][cols]; row_scales is [stack][ceil(rows / 128)][ceil(cols / 128)].
//   The transpose col_codes is [stack][cols][rows], with col_scales [stack][ceil(cols / 128)][ceil(rows / 128)]. cols is a multiple of 8, and
//   rows of 16. counts has the meaning of quantize.cuh. Random bits of a value depend on its index e = (row in the whole stack) * cols + col.
//   256 threads and sizeof(SquareShared<In>) bytes of dynamic shared memory per CTA; the grid has stack * ceil(cols / 128) * ceil(rows / 128) CTAs.
//
// Speed at 16384 x 7168, in % of the bandwidth limit of quantize.cuh: BF16 reaches 89 %, F32 95 %.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "math/reduce.cuh"
#include "pieces/convert/column_codes.cuh"
#include "pieces/convert/column_tile.cuh"

namespace nib {

template <class In>
struct alignas(16) SquareShared {
    u8 input[kTile][kTile * In::kBytes];
    ColumnTile tile;
    u32 largest[8];  // the largest magnitude in the rows of each warp
    u32 total[3];
};

template <class In, class E, bool kF32Scales, class Round>
__global__ void __launch_bounds__(256, In::kBytes == 4 ? 2 : 4)
    quantize_tiles(const u8* __restrict__ x, u8* __restrict__ row_codes, ScaleOf<kF32Scales>* __restrict__ row_scales,
                   u8* __restrict__ col_codes, ScaleOf<kF32Scales>* __restrict__ col_scales, u64* counts, int rows, int cols,
                   PowerRule rule, const RoundingArg rounding) {
    static_assert(E::kBlock == kTile && E::kCodeBits == 8, "the block is the tile");
    extern __shared__ uint4 raw[];
    SquareShared<In>& shared = *reinterpret_cast<SquareShared<In>*>(raw);
    const Round round(rounding);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int octet = warp * 2 + lane / 16, chunk = lane % 16;
    const int across = ceil_div(cols, kTile), down = ceil_div(rows, kTile);
    // The order of the tiles is down a panel first, then to the next
    // panel, because the rows of the transposed output are the short ones.
    const int strip = blockIdx.x % down, panel = blockIdx.x / down % across;
    const u64 matrix = blockIdx.x / down / across;
    const int first_row = strip * kTile, my_row = first_row + octet * 8, first_col = panel * kTile, my_col = first_col + chunk * 8;
    const u64 first = matrix * rows * cols;  // index of the matrix's first element, in x and in either output
    u8* const mine = shared.input[octet * 8] + chunk * 8 * In::kBytes;
    Tally tally;

    const u32 in_rows = rows_of_lane<8>(nullptr, first_row + warp * 16, rows), present = my_col < cols ? in_rows : 0;
    fetch_rows<In, 8>(mine, x + (first + u64(my_row) * cols + my_col) * In::kBytes, u64(cols) * In::kBytes, present);
    ptx::copies_wait();
    typename In::Eight in[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) in[j] = In::load_shared(mine + j * kTile * In::kBytes);
    const u32 of_warp = __reduce_max_sync(kAllLanes, In::largest_bits(in));
    if (lane == 0) shared.largest[warp] = of_warp;
    __syncthreads();
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = max(amax, shared.largest[i]);
    const auto scale = scale_of<E, kF32Scales>(amax, rule);
    if (threadIdx.x == 0) {
        row_scales[(matrix * down + strip) * across + panel] = scale.stored;
        col_scales[(matrix * across + panel) * down + strip] = scale.stored;
        if constexpr (!Round::kDraws)
            tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax), scale.inverse));
        tally.non_finite += scale.is_nan();
    }
    u32 codes[2][8];
    bool any = false;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const u64 row = first + u64(my_row + j) * cols;
        const auto bits = round.template bits<true>(row + my_col);
        auto out = round.template encode<E, kRuleFloor, In>(in[j], scale.inverse, bits);
        if (scale.is_nan()) out = E::zeros();
        if (present >> j & 1) store_codes<E, true>(row_codes + row + my_col, cols - my_col, out);
        any |= E::any(out);
        codes[0][j] = out.x;
        codes[1][j] = out.y;
    }
    turn_8x8(codes, shared.tile.place(chunk * 8, octet));
    if constexpr (Round::kDraws) {
        any = __syncthreads_or(any);
        tally.non_zero += threadIdx.x == 0 && any;
    } else {
        __syncthreads();
    }
    store_turned<E, false, 256>(shared.tile, col_codes + first + u64(first_col) * rows + first_row, rows, cols - first_col, rows - first_row,
                                tally);
    tally.flush(counts, shared.total);
}

}  // namespace nib
