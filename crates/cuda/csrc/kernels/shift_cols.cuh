// E4M3 rows -> E4M3 columns on the codes alone; all scales are E8M0 bytes. The twin of crates/formats/src/lift.rs.
//
// row_id[rows] (null: every row counts): negative marks padding, whose output is zero. counts[3] (null: not wanted) +=
// blocks of the source with a non-zero code, of those with a code that changed its value, blocks with a NaN.
//
// shift_cols<kWhole>: codes [rows][cols], scales [rows][ceil(cols / 128)] -> codes [cols][capacity], scales [cols][capacity / 128];
//   capacity % 128 == 0; kWhole: cols % 16 == 0. 256 threads; grid ceil(cols / 128) · capacity / 128; `band` as in TilePlace.
//   Planes start on 16 bytes.
#pragma once
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/lift.cuh"
#include "kernels/turn.cuh"
#include "math/reduce.cuh"
#include "ptx/packed.cuh"

namespace nib {

/// Codes of four columns of a row under a scale 2^d as large; what is lost shows in `changed`. kFar: d may be above 15, where F16
/// no longer holds every product.
template <bool kFar>
__device__ __forceinline__ u32 shift_four(u32 codes, u32 factor, u32& changed) {
    const u32 a = ptx::mul_f16x2(ptx::f16x2_from_e4m3x2(ptx::low_u16(codes)), factor);
    const u32 b = ptx::mul_f16x2(ptx::f16x2_from_e4m3x2(ptx::high_u16(codes)), factor);
    const u16 low = ptx::e4m3x2_from_f16x2(a), high = ptx::e4m3x2_from_f16x2(b);
    const u32 out = ptx::pack_u16(low, high);
    changed |= a ^ ptx::f16x2_from_e4m3x2(low);
    changed |= b ^ ptx::f16x2_from_e4m3x2(high);
    if constexpr (kFar) {
        // What F16 could not hold is far too small for E4M3: a code that was not 0 became 0.
        const u32 was = codes & 0x7F7F7F7F, is = out & 0x7F7F7F7F;
        changed |= (was + 0x7F7F7F7F) & ~(is + 0x7F7F7F7F) & 0x80808080;
    }
    return out;
}

/// 0x80 in each byte that is an E4M3 NaN.
__device__ __forceinline__ u32 nan_bytes(u32 codes) { return ((codes & 0x7F7F7F7F) + 0x01010101) & 0x80808080; }

/// The exact power of two 2^-octaves as a pair of F16. From 19 octaves on all codes vanish.
__device__ __forceinline__ u32 shift_factor(u32 octaves) {
    const u32 d = min(octaves, 19u);
    const u32 half = d <= 14 ? (15 - d) << 10 : 1u << (24 - d);
    return half | half << 16;
}

constexpr u32 kFarthestExact = 0x02000200;  // the factor of 15 octaves: F16's 2^-15 times 2^-9 is its smallest number
constexpr u32 kNanRow = 0xFFFFFFFF;     // in place of a factor: all codes become NaN
constexpr u32 kAbsentRow = 0xFFFFFFFE;  // all codes become 0

/// A bit for each of a thread's eight rows.
struct ShiftFlags {
    u32 non_zero = 0;
    u32 inexact = 0;
    u32 non_finite = 0;
};

/// Shifts and turns eight rows of eight columns. kRare: there may be NaN among them, or rows that move by more than 15 octaves.
template <bool kRare>
__device__ __forceinline__ void shift_rows(u8* place, const uint2 (&in)[8], const u32 (&factors)[8], ShiftFlags& flags) {
    u32 four_cols[2][8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        u32 changed = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 word = half == 0 ? in[j].x : in[j].y;
            u32& shifted = four_cols[half][j];
            if constexpr (kRare) {
                // A NaN keeps its code; a NaN row has no other than 0x7F.
                const u32 nan = nan_bytes(word);
                const u32 mask = (nan >> 7) * 0xFF;
                shifted = (shift_four<true>(word & ~mask, factors[j], changed) & ~mask) | (word & mask);
                if (factors[j] == kNanRow) {
                    shifted = 0x7F7F7F7F;
                    changed = 0;
                }
                if (nan != 0 || factors[j] == kNanRow) flags.non_finite |= 1u << j;
            } else {
                shifted = shift_four<false>(word, factors[j], changed);
            }
        }
        if (changed != 0) flags.inexact |= 1u << j;
    }
    turn_8x8(four_cols, place);
}

template <bool kWhole>
__global__ void __launch_bounds__(kTurnThreads, 4)
    shift_cols(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
               u64* counts, const int* __restrict__ row_id, int rows, int cols, int capacity, int band) {
    __shared__ alignas(16) u8 input[kTile][kTile];
    __shared__ alignas(16) ColumnTile tile;
    __shared__ u32 warp_largest[8];
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const TurnPlace place;
    const TilePlace at(cols, capacity, band);
    const int first_row = at.strip * kTile, first_col = at.panel * kTile;

    // Codes of padding are copied too, but not used.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int in_tile = threadIdx.x / 8 + i * (kTurnThreads / 8), chunk = threadIdx.x % 8;
        const int row = first_row + in_tile, col = first_col + chunk * 16;
        const bool present = row < rows && col < cols;
        u8* const to = input[in_tile] + chunk * 16;
        const u8* const from = codes + (present ? u64(row) * cols + col : 0);
        if constexpr (kWhole) {
            ptx::copy_16_async(to, from, present);
        } else {
            for (int b = 0; b < 16; ++b) to[b] = present && col + b < cols ? from[b] : 0;
        }
    }
    const int row = first_row + place.row;
    bool counted = place.row < kTile && row < rows;
    u32 source = kScaleNan;
    if (counted) {
        source = __ldg(scales + u64(row) * at.across + at.panel);
        if (row_id != nullptr) counted = __ldg(row_id + row) >= 0;
    }
    const u32 of_warp = __reduce_max_sync(kAllLanes, counted ? above_nan(source) : 0);
    if (lane == 0) warp_largest[warp] = of_warp;
    ptx::copies_wait();
    if (!__syncthreads_or(counted)) {
        clear_columns(out, out_scales, at, cols, capacity);
        return;
    }
    u32 largest = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) largest = max(largest, warp_largest[w]);
    const u32 target = largest == 0 ? 0 : largest - 1;
    const u32 factor = !counted ? kAbsentRow : source == kScaleNan ? kNanRow : shift_factor(target - source);
    if (threadIdx.x < kTile && first_col + threadIdx.x < cols)
        out_scales[u64(first_col + threadIdx.x) * at.down + at.strip] = u8(target);

    uint2 in[8];
    u32 factors[8];
    ShiftFlags flags;
    u32 rare = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        in[j] = *reinterpret_cast<const uint2*>(input[place.octet * 8 + j] + place.col);
        factors[j] = __shfl_sync(kAllLanes, factor, lane / 16 * 8 + j);
        if (factors[j] == kAbsentRow) {
            in[j] = {0, 0};
            factors[j] = shift_factor(0);
        }
        if (((in[j].x | in[j].y) & 0x7F7F7F7F) != 0) flags.non_zero |= 1u << j;
        rare |= nan_bytes(in[j].x) | nan_bytes(in[j].y) | u32(factors[j] == kNanRow || factors[j] < kFarthestExact);
    }
    u8* const to = tile.place(place.col, place.octet);
    if (__any_sync(kAllLanes, rare != 0))
        shift_rows<true>(to, in, factors, flags);
    else
        shift_rows<false>(to, in, factors, flags);
    // Sixteen lanes hold a row of the tile, which is one block.
    u32 bits = flags.non_zero | flags.inexact << 8 | flags.non_finite << 16;
#pragma unroll
    for (int far = 1; far < 16; far *= 2) bits |= __shfl_xor_sync(kAllLanes, bits, far);
    Tally tally;
    if (lane % 16 == 0) {
        tally.non_zero = __popc(bits & 0xFF);
        tally.inexact = __popc(bits & 0xFF00);
        tally.non_finite = __popc(bits & 0xFF0000);
    }
    __syncthreads();
    tile.store<kTurnThreads>(out, first_col, cols, capacity, first_row);
    tally.flush(counts, total);
}

}  // namespace nib
