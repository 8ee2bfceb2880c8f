// Block formats to each other on the codes alone: MXFP4 rows -> E4M3 rows, MXFP4 rows -> E4M3 columns, E4M3 rows -> E4M3
// columns. The twins of crates/formats/src/lift.rs. All scales are E8M0 bytes.
//
// row_id[rows] (null: every row counts): negative marks padding, whose output is zero. counts[3] (null: not wanted) +=
// blocks of the source with a non-zero code, of those with a code that changed its value, blocks with a NaN.
//
// lift_rows<kWhole, kChunks>: codes [rows][cols / 2] -> [rows][cols], scales [rows][cols / 32] -> [rows][ceil(cols / 128)]; cols % 32 == 0.
//   kWhole: cols % 128 == 0. 256 threads; a warp takes a segment of kChunks · 512 columns at a time; segments = ceil(cols / that),
//   and `by_segments` divides by it. Any grid, best ceil(rows · segments / 8). Where every row counts and cols % 128 == 0, the
//   launch may pass all of x, if that is less than 2^30 numbers, as one row.
// lift_cols<kWhole>: -> codes [cols][capacity], scales [cols][capacity / 128]; capacity % 128 == 0.
// shift_cols<kWhole>: E4M3 codes [rows][cols], scales [rows][ceil(cols / 128)] -> the same; kWhole: cols % 16 == 0.
//   Both: 256 threads; grid ceil(cols / 128) · capacity / 128; `band` as in TilePlace. No dynamic shared memory.
// Planes start on 16 bytes.
//
// Measured on an H200 (share of the larger of (read + written) / 4288 GB/s and written / fill rate; 32768 x 7168, and 4096 x 7168):
//   lift_rows<true, 4> 86 % (66 %), in groups 80 %; lift_cols 62 % (54 %), shift_cols 66 % (55 %): the L2 is busy 82 and 75 % of
//   the time, with the scales' sectors of which a byte or four are used, and the integer units 59 and 69 %.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/column_tile.cuh"
#include "math/reduce.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kLiftThreads = 256;
constexpr int kLiftChunkCols = 512;
constexpr int kTurnThreads = 256;

/// What E2M1 codes become under one pair of scales. PRMT looks up four codes at a time in `magnitudes`.
struct alignas(16) Lift {
    uint2 magnitudes;  // E4M3 codes of the eight magnitudes
    u32 signs;         // 0x80808080, or 0 where signs go too
    u32 changed;       // bit c: magnitude c changed its value
};

/// Lift for source - target = -32 .. 6, for a NaN source, and for a row that does not count.
constexpr int kLiftFar = 32;
constexpr u32 kLiftNan = kLiftFar + 7;
constexpr u32 kLiftNothing = kLiftFar + 8;
constexpr int kLifts = kLiftFar + 9;

struct LiftTable {
    Lift entry[kLifts];
};

/// The E4M3 code of halves / 2 · 2^octaves, nearest-even, and whether the value changed.
struct LiftedCode {
    u32 code;
    bool changed;
};
__host__ __device__ constexpr LiftedCode lifted(u32 halves, int octaves) {
    const int shift = octaves + 8;  // to E4M3's smallest step, 2^-9
    if (shift < 0) {
        if (shift < -8) return {0, halves != 0};
        const u32 floor = halves >> -shift, rest = halves - (floor << -shift), half = 1u << (-shift - 1);
        return {floor + (rest > half || (rest == half && floor % 2 == 1)), rest != 0};
    }
    u32 steps = halves << shift, code = 0;
    while (steps >= 16) {
        steps /= 2;
        code += 8;
    }
    return {code + steps, false};  // of steps from 8 to 15 the 8 is the exponent's
}

__host__ __device__ constexpr LiftTable make_lifts() {
    constexpr u32 kHalves[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    LiftTable table = {};
    for (int i = 0; i < int(kLiftNan); ++i) {
        Lift& lift = table.entry[i];
        lift.signs = 0x80808080;
        for (int c = 0; c < 8; ++c) {
            const LiftedCode to = lifted(kHalves[c], i - kLiftFar);
            (c < 4 ? lift.magnitudes.x : lift.magnitudes.y) |= to.code << (8 * (c % 4));
            lift.changed |= u32(to.changed) << c;
        }
    }
    table.entry[kLiftNan].magnitudes = {0x7F7F7F7F, 0x7F7F7F7F};
    return table;
}

__device__ constexpr LiftTable kLiftTable = make_lifts();

/// Brings the table to shared memory; a barrier follows.
__device__ __forceinline__ void copy_lifts(LiftTable& lifts) {
    if (threadIdx.x < kLifts) {
        const uint4 v = reinterpret_cast<const uint4*>(&kLiftTable)[threadIdx.x];
        reinterpret_cast<uint4*>(&lifts)[threadIdx.x] = v;
    }
}

/// The entry for a source scale under a target at most 6 octaves below it.
__device__ __forceinline__ u32 lift_index(u32 source, int target) {
    return source == kScaleNan ? kLiftNan : u32(max(int(source) - target, -kLiftFar) + kLiftFar);
}

/// Four codes: the first ones of the word, or (kHigh) the last.
template <bool kHigh>
__device__ __forceinline__ u32 lift_four(u32 codes, const uint2& magnitudes, u32 signs) {
    const u32 selector = (kHigh ? codes >> 16 : codes) & 0x7777;
    // A nibble's sign to the top of a byte: those of even codes lie there one nibble further up.
    const u32 sign = __byte_perm(codes, codes << 4, kHigh ? 0x3726 : 0x1504);
    return __byte_perm(magnitudes.x, magnitudes.y, selector) | (sign & signs);
}

/// Whether any of these codes changed its value.
__device__ __forceinline__ bool any_changed(u32 codes, u32 changed) {
    u32 seen = 0;
#pragma unroll 1  // rare: not worth the instructions
    for (int i = 0; i < 8; ++i) seen |= 1u << (codes >> (4 * i) & 7);
    return (seen & changed) != 0;
}

/// One more than the byte, and 0 for the NaN: what a maximum passes over.
__device__ __forceinline__ u32 above_nan(u32 byte) { return (byte + 1) & 0xFF; }

/// Target scale byte of a lift from the largest `above_nan` of its sources: 6 octaves below, not below 0.
__device__ __forceinline__ int lift_target(u32 largest_above_nan) { return max(int(largest_above_nan) - 7, 0); }

/// Four scale bytes, 0xFF from the `left`-th on.
template <bool kWhole>
__device__ __forceinline__ u32 load_scales(const u8* from, int left) {
    if constexpr (kWhole) return __ldg(reinterpret_cast<const u32*>(from));
    u32 four = 0xFFFFFFFF;
#pragma unroll
    for (int b = 0; b < 4; ++b)
        if (b < left) four ^= (from[b] ^ 0xFFu) << (8 * b);
    return four;
}

template <bool kWhole, int kChunks>
__global__ void __launch_bounds__(kLiftThreads)
    lift_rows(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
              u64* counts, const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments) {
    __shared__ LiftTable lifts;
    __shared__ u32 total[3];
    copy_lifts(lifts);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const int sources = cols / E2m1::kBlock, targets = ceil_div(cols, E4m3::kBlock);
    const u32 tasks = u32(rows) * segments;
    Tally tally;
    for (u32 task = blockIdx.x * (kLiftThreads / 32) + threadIdx.x / 32; task < tasks; task += gridDim.x * (kLiftThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int col = segment * (kChunks * kLiftChunkCols) + lane * 16;
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const u64 at = u64(row) * cols + col;
        const int left = cols - col;
        const int first_source = col / E4m3::kBlock * 4;
        uint2 in[kChunks];
        u32 four[kChunks];  // scales of the 128 columns this lane's 16 are among
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            in[i] = {0, 0};
            four[i] = 0xFFFFFFFF;
            if (counted && left > i * kLiftChunkCols) {
                in[i] = ptx::load_8(codes + at / 2 + i * kLiftChunkCols / 2);
                four[i] = load_scales<kWhole>(scales + u64(row) * sources + first_source + i * kLiftChunkCols / 32,
                                              sources - first_source - i * kLiftChunkCols / 32);
            }
        }
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const u32 a = four[i] & 0x00FF00FF, b = four[i] >> 8 & 0x00FF00FF;
            const u32 two = ptx::max_u16x2((a + 0x00010001) & 0x00FF00FF, (b + 0x00010001) & 0x00FF00FF);
            const int target = lift_target(max(two & 0xFFFF, two >> 16));
            const u32 source = __byte_perm(four[i], 0, 0x4440 | lane / 2 % 4);
            const Lift by = lifts.entry[lift_index(source, target)];
            const bool here = left > i * kLiftChunkCols;
            // Codes of padding are 0, but its scales read as NaN: it gets zeros, and counts as nothing.
            if (here) {
                uint4 v = {0, 0, 0, 0};
                if (counted)
                    v = {lift_four<false>(in[i].x, by.magnitudes, by.signs), lift_four<true>(in[i].x, by.magnitudes, by.signs),
                         lift_four<false>(in[i].y, by.magnitudes, by.signs), lift_four<true>(in[i].y, by.magnitudes, by.signs)};
                ptx::store_16(out + at + i * kLiftChunkCols, v);
                if (lane % 8 == 0) out_scales[u64(row) * targets + (first_source + i * kLiftChunkCols / 32) / 4] = u8(target);
            }
            // Two lanes hold one block: pairs of bits, of which the lower one is counted.
            const u32 non_zero = __ballot_sync(kAllLanes, ((in[i].x | in[i].y) & 0x77777777) != 0);
            tally.non_zero += __popc((non_zero | non_zero >> 1) & 0x55555555);
            tally.non_finite += counted && here && source == kScaleNan ? 16 : 0;
            if (__any_sync(kAllLanes, by.changed != 0)) {
                const bool changed = any_changed(in[i].x, by.changed) || any_changed(in[i].y, by.changed);
                const u32 inexact = __ballot_sync(kAllLanes, changed);
                tally.inexact += __popc((inexact | inexact >> 1) & 0x55555555);
            }
        }
    }
    // Ballots counted each block in all 32 lanes.
    tally.flush(counts, total, 32);
}

/// Threads of the column kernels: 16 lanes hold 128 columns of a row, 8 each; either half of a warp an octet of rows. The scales of
/// a warp's 16 rows are looked after by its first 16 lanes.
struct TurnPlace {
    int octet, col, row;

    __device__ __forceinline__ TurnPlace() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        octet = warp * 2 + lane / 16;
        col = lane % 16 * 8;
        row = lane < 16 ? warp * 16 + lane : kTile;
    }
};

/// Zeros for a tile without a row that counts.
__device__ __forceinline__ void clear_columns(u8* out, u8* out_scales, const TilePlace& at, int cols, int capacity) {
    const int first_col = at.panel * kTile;
    for (int i = threadIdx.x; i < kTile * 8; i += kTurnThreads)
        if (first_col + i / 8 < cols)
            ptx::store_16(out + u64(first_col + i / 8) * capacity + at.strip * kTile + i % 8 * 16, {0, 0, 0, 0});
    const int col = first_col + threadIdx.x;
    if (threadIdx.x < kTile && col < cols) out_scales[u64(col) * at.down + at.strip] = 0;
}

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
