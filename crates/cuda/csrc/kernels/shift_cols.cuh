// E4M3 rows -> E4M3 columns on the codes alone; all scales are E8M0 bytes. The twin of crates/formats/src/lift.rs.
//
// row_id[rows] (null: every row counts): negative marks padding, whose output is zero. counts[3] (null: not wanted) +=
// blocks of the source with a non-zero code, of those with a code that changed its value, blocks with a NaN.
//
// shift_cols<kWhole, kPanels>: codes [rows][cols], scales [rows][ceil(cols / 128)] -> codes [cols][capacity], scales
//   [cols][capacity / 128], or if `block_scales` is not null there, [capacity / 128][ceil(cols / 128)]; capacity % 128 == 0; kWhole:
//   cols % 16 == 0. 128 · kPanels threads; a cta for each kPanels · 128 columns of each `depth` strips of 128 rows, depth at most
//   kMostDepth. sizeof(ShiftShared<kPanels>) dynamic shared memory. Planes start on 16 bytes.
//
// A larger scale lowers the exponent: 8 less a code and octave, four codes at a time, while the result is normal. Columns of a
// lane that hold another code are done again, one by one.
//
// Measured on an H200 (share of the larger of (read + written) / 4288 GB/s and written / fill rate):
//   32768 x 7168 81 %, in 32 uneven groups 79 %; 24576 x 5120 76 %; 32768 x 2048 72 %; 4096 x 7168 56 %. Without any scales the same
//   loads and stores reach 87 %.
#pragma once
#include "formats/e4m3.cuh"
#include "kernels/turn.cuh"

namespace nib {

constexpr u32 kShiftFarthest = 14;  // octaves that leave the largest magnitude normal
constexpr u32 kShiftFar = 32;       // octaves that leave nothing
constexpr u32 kEachTop = 0x80808080;

/// A bit for each of a thread's 16 rows, 4k + b in bit k of byte b; of `flags` from bit 4 of each byte on, whether a code changed.
struct ShiftFlags {
    u32 flags = 0;
    u32 nan = 0;
};

template <int kPanels>
struct ShiftShared {
    TurnShared<kTile, 1, kPanels> turn;
    ShiftFlags flags[2][kPanels][kTile / 32][kGroups];
};

/// A code under a scale `octaves` larger (a NaN's: kScaleNan); what becomes of it shows in the flags of the row whose bit this is.
__device__ __forceinline__ u32 shift_code(u32 code, u32 octaves, u32 bit, ShiftFlags& flags) {
    if (octaves == kScaleNan || (code & 0x7F) == 0x7F) {
        flags.nan |= bit;
        return octaves == kScaleNan ? 0x7F : code;
    }
    const float value = __fmul_rn(E4m3::decode(code), __uint_as_float((127 - min(octaves, kShiftFar)) << 23));
    const u32 shifted = E4m3::pair(value, 0) & 0xFF;
    if (E4m3::decode(shifted) != value) flags.flags |= bit << 4;
    return shifted;
}

template <bool kWhole, int kPanels>
__global__ void __launch_bounds__(kTile * kPanels, 6 / kPanels)
    shift_cols(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
               u8* __restrict__ block_scales, u64* counts, const int* __restrict__ row_id, int rows, int cols, int capacity,
              int depth) {
    using Fetch = Fetcher<kWhole, kTile, 1, kPanels>;
    extern __shared__ uint4 raw[];
    auto& whole = *reinterpret_cast<ShiftShared<kPanels>*>(raw);
    auto& shared = whole.turn;
    const int down = capacity / kTile, across = ceil_div(cols, kTile);
    const Strips strips(down, depth);
    const int first_col = strips.panel * (kPanels * kTile);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, panel = threadIdx.x / kTile, in_panel = threadIdx.x % kTile;
    const int group = lane / 4, in_col = threadIdx.x / 32 * 32 + lane % 4 * 8;
    const int scale_row = threadIdx.x / kPanels, scale_panel = strips.panel * kPanels + threadIdx.x % kPanels;
    auto load_scale = [&](int strip) -> u32 {
        const int row = strip * kTile + scale_row;
        return row < rows && scale_panel < across ? __ldg(scales + u64(row) * across + scale_panel) : 0;
    };
    Fetch fetcher{shared, codes, row_id, rows, cols, first_col};
    Tally tally;
    // Four warps hold a block.
    auto count = [&](int slot) {
        if (in_panel < kGroups) {
            ShiftFlags any;
#pragma unroll
            for (int w = 0; w < kTile / 32; ++w) {
                any.flags |= whole.flags[slot][panel][w][in_panel].flags;
                any.nan |= whole.flags[slot][panel][w][in_panel].nan;
            }
            tally.non_zero += __popc(any.flags & 0x0F0F0F0F);
            tally.inexact += __popc(any.flags & 0xF0F0F0F0);
            tally.non_finite += __popc(any.nan);
        }
    };

    fetcher.publish(0, fetcher.counts(strips.at(0)));
    u32 byte = load_scale(strips.at(0));
    bool ahead = strips.has(1) && fetcher.counts(strips.at(1));
    __syncthreads();
    fetcher.fetch(strips.at(0), 0);
    const int col = first_col + in_col;
    for (int i = 0; strips.has(i); ++i) {
        const int slot = i % 2;
        // A scale of 0 is never the largest.
        shared.scale[slot][threadIdx.x % kPanels][scale_row] = fetcher.is_valid(slot, scale_row) ? u8(byte) : 0;
        fetcher.publish(slot ^ 1, ahead);
        ptx::copies_wait();
        __syncthreads();
        if (strips.has(i + 1)) fetcher.fetch(strips.at(i + 1), slot ^ 1);
        byte = strips.has(i + 1) ? load_scale(strips.at(i + 1)) : 0;
        ahead = strips.has(i + 2) && fetcher.counts(strips.at(i + 2));
        if (i > 0) count(slot ^ 1);

        // Each lane looks after the scales of four rows.
        const u8* const scale = shared.scale[slot][panel];
        const u32 of_rows = *reinterpret_cast<const u32*>(scale + lane * 4);
        u32 largest = 0;
#pragma unroll
        for (int r = 0; r < 4; ++r) largest = max(largest, above_nan(of_rows >> (8 * r) & 0xFF));
        largest = __reduce_max_sync(kAllLanes, largest);
        const u32 target = largest == 0 ? 0 : largest - 1;
        if (in_panel == 0) shared.targets[i][panel] = u8(target);
        u32 falls = 0;
        bool rare = false;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 octaves = target - (of_rows >> (8 * r) & 0xFF);  // of a NaN: far above
            rare |= octaves > kShiftFarthest;
            falls |= (octaves > kShiftFarthest ? 0 : octaves * 8) << (8 * r);
        }
        u32 fall[4], least[4];  // what is normal afterwards, or stays as it is, is at least this
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            fall[k] = __shfl_sync(kAllLanes, falls, group * 4 + k);
            least[k] = fall[k] + (((fall[k] + 0x7F7F7F7F) & kEachTop) >> 4);
        }

        const u8* const in = shared.codes[slot] + group * Fetch::Shared::kGroupBytes + in_col;
        u8* const to = out + u64(col) * capacity + strips.at(i) * kTile + group * kGroupRows;
        u8* line = to;
        u32 seen[4] = {0, 0, 0, 0}, again = 0;  // a bit for each column
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 by_col[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                u32 four[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    four[j] = *reinterpret_cast<const u32*>(in + (4 * k + j) * Fetch::Shared::kRowBytes + half * 4);
                turn_4x4(four, by_col[k]);
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                u32 v[4], odd = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const u32 word = by_col[k][c];
                    seen[k] |= word;
                    odd |= ~((word | kEachTop) - least[k]) | ((word & ~kEachTop) + 0x01010101);
                    v[k] = word - fall[k];
                }
                if ((odd & kEachTop) != 0) again |= 1u << (half * 4 + c);
                if (kWhole ? col < cols : col + half * 4 + c < cols) ptx::store_16(line, {v[0], v[1], v[2], v[3]});
                line += capacity;
            }
        }
        ShiftFlags mine;
#pragma unroll
        for (int k = 0; k < 4; ++k) mine.flags |= (((seen[k] & ~kEachTop) + 0x7F7F7F7F) & kEachTop) >> (7 - k);
        if (__any_sync(kAllLanes, rare)) {
            // Rows of zeros are right already, whatever their scale.
            for (int j = 0; j < kGroupRows; ++j) {
                const u32 source = scale[group * kGroupRows + j];
                const bool all_zero = (mine.flags >> (j % 4 * 8 + j / 4) & 1) == 0;
                if (target - source > kShiftFarthest && (source == kScaleNan || !all_zero)) again = 0xFF;
            }
        }
        while (again != 0) {
            const int c = __ffs(again) - 1;
            again &= again - 1;
            u32 v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                v[k] = 0;
#pragma unroll 1
                for (int b = 0; b < 4; ++b) {
                    const int j = 4 * k + b;
                    const u32 source = scale[group * kGroupRows + j], octaves = source == kScaleNan ? source : target - source;
                    v[k] |= shift_code(in[j * Fetch::Shared::kRowBytes + c], octaves, 1u << (8 * b + k), mine) << (8 * b);
                }
            }
            if (col + c < cols) ptx::store_16(to + u64(c) * capacity, {v[0], v[1], v[2], v[3]});
        }
#pragma unroll
        for (int far = 1; far < 4; far *= 2) {
            mine.flags |= __shfl_xor_sync(kAllLanes, mine.flags, far);
            mine.nan |= __shfl_xor_sync(kAllLanes, mine.nan, far);
        }
        if (lane % 4 == 0) whole.flags[slot][panel][warp][group] = mine;
    }
    store_scales(shared.targets, strips, block_scales, out_scales, kTile, cols, down);  // after a barrier
    count((strips.count - 1) % 2);
    tally.flush(counts, shared.total);
}

}  // namespace nib
