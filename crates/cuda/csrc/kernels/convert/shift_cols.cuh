// Converts E4M3 row blocks to E4M3 column blocks by operations on the codes. All scales are E8M0 bytes. CPU implementation: crates/formats/src/lift.rs.
//
// row_id[rows] (null: all rows are valid): negative ids mark padding rows, whose output codes are zeros. The kernel increases counts[3] (if
// not null) by the numbers of source blocks with a non-zero code, of source blocks in which a value changed, and of source blocks with a NaN.
//
// shift_cols<kWhole, kPanels>: reads codes [rows][cols] and scales [rows][ceil(cols / 128)], and writes codes
//   [cols][capacity] and scales [capacity / 128][scale_stride]. capacity % 128 == 0; kWhole: cols % 16 == 0.
//   128 · kPanels threads per CTA. A CTA converts kPanels · 128 columns of `depth` strips of 128 rows; depth is at most
//   kMostDepth. Dynamic shared memory: sizeof(ShiftShared<kPanels>) bytes. Buffers are 16-byte aligned; scale_stride is at least cols, and a multiple of 2.
//
// The product of a code and a power of two from 2^-15 to 1 is exact in F16, because E4M3's smallest step is 2^-9 and F16's is 2^-24.
// So the product is rounded only once, when it becomes E4M3 again, even if the E4M3 result is subnormal. Rows that are shifted by
// more than kShiftFarthest are recomputed one by one. Rows with NaNs are recomputed too, because a NaN would lose its sign.
//
// Speed on an H200, in % of the bandwidth limit (read + written) / 4249 GB/s, with or without subnormal results: 89 % at
//   32768 x 7168; 86 % at 24576 x 5120; 80 to 83 % at 32768 x 2048; 79 to 81 % at 24576 x 2048; 64 to 70 % at 4096 x 7168.
//   At these five shapes, a kernel that only copies the codes, with the same access pattern, reaches 95, 93, 91, 88 and 78 %.
#pragma once
#include "formats/e4m3.cuh"
#include "pieces/convert/rows_to_cols.cuh"

namespace nib {

constexpr u32 kShiftFarthest = 14;  // the largest shift, in powers of two, that leaves the largest magnitude normal
constexpr u32 kShiftFar = 32;       // a shift, in powers of two, under which every value becomes zero
constexpr u32 kF16Bias = 15;
constexpr u32 kEachTop = 0x80808080;

/// Three flags per row, for each of a thread's 16 rows. Row 4k + b has bit k of byte b. In `flags`, bit k of the
/// byte says whether the row has a non-zero code, and bit k + 4 says whether one of the row's codes changed.
struct ShiftFlags {
    u32 flags = 0;
    u32 nan = 0;
};

template <int kPanels>
struct ShiftShared {
    TurnShared<kTile, 1, kPanels> turn;
    ShiftFlags flags[kMostDepth * kGroups][kPanels][kTile / 32];
};

/// Converts a code to a scale that is 2^octaves times larger (kScaleNan: the code's
/// old scale is NaN). Sets the row's `bit` in `flags` if the code is NaN or changes.
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

/// Converts the codes of a column in four rows to their new scale. Each of the two words of `pair`
/// has two rows of two columns; kHigh selects the second column. The product of a code and its factor
/// is exact in F16. The function adds to a row's `moved` the change that rounding to E4M3 causes.
template <bool kHigh>
__device__ __forceinline__ u32 shift_four(const u32* pair, const u32* factor, u32* moved) {
    const u32 first = ptx::mul_f16x2(ptx::f16x2_from_e4m3x4<kHigh>(pair[0]), factor[0]);
    const u32 second = ptx::mul_f16x2(ptx::f16x2_from_e4m3x4<kHigh>(pair[1]), factor[1]);
    const u32 shifted = ptx::e4m3x4_from_f16x2(first, second);
    moved[0] = ptx::add_distance_f16x2(moved[0], ptx::f16x2_from_e4m3x4<false>(shifted), first);
    moved[1] = ptx::add_distance_f16x2(moved[1], ptx::f16x2_from_e4m3x4<true>(shifted), second);
    return shifted;
}

template <bool kWhole, int kPanels>
__global__ void __launch_bounds__(kTile * kPanels, 6 / kPanels)
    shift_cols(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
               u64* counts, const int* __restrict__ row_id, int rows, int cols, int capacity, int scale_stride, int depth) {
    using Fetch = Fetcher<kWhole, kTile, 1, kPanels>;
    extern __shared__ uint4 raw[];
    auto& whole = *reinterpret_cast<ShiftShared<kPanels>*>(raw);
    auto& shared = whole.turn;
    const int across = ceil_div(cols, kTile);
    const Strips strips(capacity / kTile, depth);
    const int first_col = strips.panel * (kPanels * kTile);
    const int scale_row = threadIdx.x / kPanels, scale_panel = threadIdx.x % kPanels, source = strips.panel * kPanels + scale_panel;
    const Fetch fetcher{shared, strips, codes, row_id, rows, cols, first_col};
    fetcher.publish();
    u32 byte[kMostDepth];
#pragma unroll
    for (int i = 0; i < kMostDepth; ++i) {
        const int row = strips.at(i) * kTile + scale_row;
        byte[i] = strips.has(i) && row < rows && source < across ? __ldg(scales + u64(row) * across + source) : 0;
    }
    __syncthreads();
    fetcher.fetch();
    // A padding row gets scale 0, so padding cannot raise the largest scale.
#pragma unroll
    for (int i = 0; i < kMostDepth; ++i) shared.scale[i][scale_panel][scale_row] = fetcher.is_valid(i, scale_row) ? u8(byte[i]) : 0;
    fetcher.wait();

    const TurnLane me;
    const int warp = threadIdx.x / 32 % 4, panel = threadIdx.x / kTile, in_panel = threadIdx.x % kTile, col = first_col + me.col();
    const bool is_there = strips.has(me.strip);
    const u8* const scale = shared.scale[me.strip][panel];
    const uint2 bytes = me.scales(scale);
    const u32 above = me.largest_above_nan(bytes), target = above == 0 ? 0 : above - 1;
    me.store_scale(out_scales, target, strips, first_col, cols, scale_stride);
    u32 factors[4], factor[kGroupRows / 2];  // each word has the F16 factors of two rows
    bool far = false;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        factors[k] = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 octaves = target - ((k < 2 ? bytes.x : bytes.y) >> (k % 2 * 16 + r * 8) & 0xFF);  // a NaN gives a large shift
            const bool is_far = octaves > kShiftFarthest;
            far |= is_far;
            factors[k] |= ((kF16Bias - (is_far ? 0 : octaves)) << 10) << (16 * r);
        }
    }
    me.exchange(factors, factor);
    const bool some_far = __any_sync(kAllLanes, far);

    const u8* const in = shared.codes + me.group * Fetch::Shared::kGroupBytes + me.col();
    u8* const to = out + u64(col) * capacity + strips.first * kTile + me.group * kGroupRows;
    u32 seen[kGroupRows / 2] = {};
    u32 moved[kGroupRows / 2] = {};  // total change of the values of these rows, as F16 pairs; NaN if any code is NaN
#pragma unroll 1
    for (int four = 0; four < 4; ++four) {
        const int at = four / 2 * TurnLane::kSecond + four % 2 * 4;
        u32 pair[2][kGroupRows / 2];  // columns (0, 1) and columns (2, 3), each in two rows
#pragma unroll
        for (int k = 0; k < kGroupRows / 2; ++k) {
            const u32 a = *reinterpret_cast<const u32*>(in + 2 * k * Fetch::Shared::kRowBytes + at);
            const u32 b = *reinterpret_cast<const u32*>(in + (2 * k + 1) * Fetch::Shared::kRowBytes + at);
            pair[0][k] = __byte_perm(a, b, 0x5140);
            pair[1][k] = __byte_perm(a, b, 0x7362);
            seen[k] |= pair[0][k] | pair[1][k];
        }
        u8* line = to + u64(at) * capacity;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            u32 v[4];
            const u32(&of)[kGroupRows / 2] = pair[c / 2];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                v[k] = c % 2 ? shift_four<true>(of + 2 * k, factor + 2 * k, moved + 2 * k)
                             : shift_four<false>(of + 2 * k, factor + 2 * k, moved + 2 * k);
            if (is_there && (kWhole ? col + at < cols : col + at + c < cols)) ptx::store_16(line, {v[0], v[1], v[2], v[3]});
            line += capacity;
        }
    }
    ShiftFlags mine;
    u32 slow = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u32 any = __byte_perm(seen[2 * k] | seen[2 * k] >> 16, seen[2 * k + 1] | seen[2 * k + 1] >> 16, 0x5410);
        mine.flags |= (((any & ~kEachTop) + 0x7F7F7F7F) & kEachTop) >> (7 - k);
        mine.flags |= (__byte_perm(moved[2 * k] + 0x7FFF7FFF, moved[2 * k + 1] + 0x7FFF7FFF, 0x7531) & kEachTop) >> (3 - k);
        slow |= (__byte_perm(moved[2 * k] + 0x03FF03FF, moved[2 * k + 1] + 0x03FF03FF, 0x7531) & kEachTop) >> (7 - k);
    }
    if ((some_far || slow != 0) && is_there) {
        for (int j = 0; j < kGroupRows; ++j) {
            const u32 source = scale[me.row() + j], bit = 1u << (j % 4 * 8 + j / 4);
            const bool is_far = target - source > kShiftFarthest && (source == kScaleNan || (mine.flags & bit) != 0);
            if (!is_far && (slow & bit) == 0) continue;
            mine.flags &= ~(bit << 4);
            for (int c = 0; c < 16; ++c) {
                const int at = c / 8 * TurnLane::kSecond + c % 8;
                const u32 octaves = source == kScaleNan ? source : target - source;
                const u32 code = shift_code(in[j * Fetch::Shared::kRowBytes + at], octaves, bit, mine);
                if (col + at < cols) to[u64(at) * capacity + j] = u8(code);
            }
        }
    }
    mine.flags |= __shfl_xor_sync(kAllLanes, mine.flags, 1);
    mine.nan |= __shfl_xor_sync(kAllLanes, mine.nan, 1);
    if (!me.odd) whole.flags[me.group][panel][warp] = is_there ? mine : ShiftFlags();
    __syncthreads();
    // Four warps share each block.
    Tally tally;
    if (in_panel < kMostDepth * kGroups) {
        ShiftFlags any;
#pragma unroll
        for (int w = 0; w < kTile / 32; ++w) {
            any.flags |= whole.flags[in_panel][panel][w].flags;
            any.nan |= whole.flags[in_panel][panel][w].nan;
        }
        tally.non_zero = __popc(any.flags & 0x0F0F0F0F);
        tally.inexact = __popc(any.flags & 0xF0F0F0F0);
        tally.non_finite = __popc(any.nan);
    }
    tally.flush(counts, shared.total);
}

}  // namespace nib
