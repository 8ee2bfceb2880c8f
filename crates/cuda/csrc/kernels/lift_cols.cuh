// MXFP4 rows -> E4M3 columns on the codes alone; all scales are E8M0 bytes. The twin of crates/formats/src/lift.rs.
//
// row_id[rows] (null: every row counts): negative marks padding, whose output is zero. counts[3] (null: not wanted) +=
// blocks of the source with a non-zero code, of those with a code that changed its value, blocks with a NaN.
//
// lift_cols<kWhole>: codes [rows][cols / 2], scales [rows][cols / 32] -> codes [cols][capacity], scales [cols][capacity / 128];
//   capacity % 128 == 0, cols % 32 == 0; kWhole: cols % 128 == 0. 256 threads; grid ceil(cols / 128) · capacity / 128; `band` as
//   in TilePlace. Planes start on 16 bytes.
#pragma once
#include "kernels/lift.cuh"
#include "kernels/turn.cuh"
#include "math/reduce.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kLiftOctetBytes = 8 * kTile / 2 + 64;  // the gap keeps a warp's two octets in different banks

template <bool kWhole>
__global__ void __launch_bounds__(kTurnThreads, 5)
    lift_cols(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
              u64* counts, const int* __restrict__ row_id, int rows, int cols, int capacity, int band) {
    __shared__ alignas(16) u8 input[kTile / 8][kLiftOctetBytes];
    __shared__ alignas(16) ColumnTile tile;
    __shared__ LiftTable lifts;
    __shared__ u32 warp_largest[8][2];
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int sources = cols / E2m1::kBlock;
    const TurnPlace place;
    const TilePlace at(cols, capacity, band);
    const int first_row = at.strip * kTile, first_col = at.panel * kTile, first_source = first_col / E2m1::kBlock;

    // Codes of padding are copied too, but not used.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int in_tile = threadIdx.x / 4 + i * (kTurnThreads / 4), chunk = threadIdx.x % 4;
        const int row = first_row + in_tile, col = first_col + chunk * 32;
        const bool present = row < rows && col < cols;
        ptx::copy_16_async(input[in_tile / 8] + in_tile % 8 * (kTile / 2) + chunk * 16,
                           codes + (present ? (u64(row) * cols + col) / 2 : 0), present);
    }
    const int row = first_row + place.row;
    bool counted = place.row < kTile && row < rows;
    u32 four = 0xFFFFFFFF;
    if (counted) {
        four = load_scales<kWhole>(scales + u64(row) * sources + first_source, sources - first_source);
        if (row_id != nullptr) counted = __ldg(row_id + row) >= 0;
    }
    copy_lifts(lifts);
    u32 even = counted ? ((four & 0x00FF00FF) + 0x00010001) & 0x00FF00FF : 0;
    u32 odd = counted ? ((four >> 8 & 0x00FF00FF) + 0x00010001) & 0x00FF00FF : 0;
#pragma unroll
    for (int far = 8; far >= 1; far /= 2) {
        even = ptx::max_u16x2(even, __shfl_xor_sync(kAllLanes, even, far));
        odd = ptx::max_u16x2(odd, __shfl_xor_sync(kAllLanes, odd, far));
    }
    if (lane == 0) {
        warp_largest[warp][0] = even;
        warp_largest[warp][1] = odd;
    }
    ptx::copies_wait();
    if (!__syncthreads_or(counted)) {
        clear_columns(out, out_scales, at, cols, capacity);
        return;
    }
    even = odd = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        even = ptx::max_u16x2(even, warp_largest[w][0]);
        odd = ptx::max_u16x2(odd, warp_largest[w][1]);
    }
    const int target[4] = {lift_target(even & 0xFFFF), lift_target(odd & 0xFFFF), lift_target(even >> 16), lift_target(odd >> 16)};
    Tally tally;
    u32 entries = 0;  // of each row: a byte for each of four blocks
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const u32 source = four >> (8 * b) & 0xFF;
        entries |= (counted ? lift_index(source, target[b]) : kLiftNothing) << (8 * b);
        tally.non_finite += counted && source == kScaleNan && first_source + b < sources;
    }
    if (threadIdx.x < kTile && first_col + threadIdx.x < cols)
        out_scales[u64(first_col + threadIdx.x) * at.down + at.strip] =
            u8(warp == 0 ? target[0] : warp == 1 ? target[1] : warp == 2 ? target[2] : target[3]);

    const u32 counted_rows = __ballot_sync(kAllLanes, counted) >> (lane & 16 ? 8 : 0) & 0xFF;
    u32 flags = 0;  // a bit for each row: some code is not zero; from bit 8 on: some code changed
    u32 four_cols[2][8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const u32 in = *reinterpret_cast<const u32*>(input[place.octet] + j * (kTile / 2) + place.col / 2);
        const u32 entry = __byte_perm(__shfl_sync(kAllLanes, entries, lane / 16 * 8 + j), 0, 0x4440 | lane % 16 / 4);
        const Lift by = lifts.entry[entry];
        four_cols[0][j] = lift_four<false>(in, by.magnitudes, by.signs);
        four_cols[1][j] = lift_four<true>(in, by.magnitudes, by.signs);
        if ((in & 0x77777777) != 0) flags |= 1u << j;
        if (by.changed != 0 && any_changed(in, by.changed)) flags |= 256u << j;
    }
    // Four lanes hold a block.
    flags |= __shfl_xor_sync(kAllLanes, flags, 1);
    flags |= __shfl_xor_sync(kAllLanes, flags, 2);
    if (lane % 4 == 0) {
        tally.non_zero = __popc(flags & counted_rows);
        tally.inexact = __popc(flags >> 8);
    }
    turn_8x8(four_cols, tile.place(place.col, place.octet));
    __syncthreads();
    tile.store<kTurnThreads>(out, first_col, cols, capacity, first_row);
    tally.flush(counts, total);
}

}  // namespace nib
