// Copies rows to other places without decoding them: permutes rows with padding, undoes the permutation, and packs or unpacks all-to-all records.
//
// copy_rows<kUnits, kEach>: for each buffer, row i of `out` is row source[i] of `in` (source null: row i), or `pad`
//   if `in` has no such row. 2^lanes_log2 lanes copy kEach rows, and load a row's codes and scales in one batch. The
//   lanes take rows in index order (row null), or in slot order: row[s], for s below num_slots, is the output row of
//   slot s, and all other rows are padding. In slot order, slots of one source row are adjacent, so that the same
//   lanes read the row from memory once. In index order, a source row would have left the cache before its next use.
//   128 threads per CTA; the grid has ceil(rows · lanes / (128 · kEach)) CTAs; num_slots <= rows. lanes_log2
//   is at most 7; the best lanes_log2 gives each lane up to kUnits units of 16 bytes. kUnits is 6 for short rows, of
//   which more must be in flight, else 8. kEach is 4 if a source row has that many slots, else 1.
//
// Speed on an H200, in % of the bandwidth limit, in BF16, E4M3 and MXFP4 (each time includes
// 3.4 us for a launch). Permute with top 1 of 32: 94, 94 and 91 % at 32768 x 7168; 92, 88 and
// 81 % at 32768 x 2048. Unpermute at 32768 x 7168 in BF16: 96 %. Permute in BF16 and MXFP4: 86
// and 80 % at 32768 x 2048 with top 8 of 128; 85 and 73 % at 32768 x 1024 with top 8 of 64.
#pragma once
#include "ptx/global.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kCopyThreads = 128;

/// One buffer, which holds the codes or the scales of all rows. `unit` is 16,
/// 4 or 1, and divides all addresses, strides and byte counts of the buffer.
struct RowPlane {
    const u8* in;
    u8* out;
    u64 in_stride;
    u64 out_stride;
    u32 bytes;  // number of bytes per row; 0 if the buffer does not exist
    u32 pad;    // the word that fills padding
    u32 unit;
};

/// Copies row `from` of `in` to row `to` of `out`. If `present` is false,
/// the row of `out` is either left unchanged or filled with padding.
struct RowMove {
    u64 from;
    u64 to;
    bool present;
};

/// The lanes that copy a row.
struct RowLanes {
    u32 lane;
    u32 lanes;
};

/// A row in units of 16 bytes: first its codes, then its scales, if these are 16-byte aligned too.
struct WideRows {
    const RowPlane& codes;
    const RowPlane& scales;

    __device__ __forceinline__ u32 code_units() const { return codes.bytes / 16; }
    __device__ __forceinline__ u32 units() const { return code_units() + (scales.unit == 16 ? scales.bytes / 16 : 0); }

    __device__ __forceinline__ const u8* in(u32 unit, u64 row) const {
        const u8* const from = unit < code_units() ? codes.in + row * codes.in_stride : scales.in + row * scales.in_stride - codes.bytes;
        return from + unit * 16;
    }
    __device__ __forceinline__ u8* out(u32 unit, u64 row) const {
        u8* const to = unit < code_units() ? codes.out + row * codes.out_stride : scales.out + row * scales.out_stride - codes.bytes;
        return to + unit * 16;
    }
};

/// Copies several rows. If a row has the same source as the previous row, the source is not read again.
template <int kUnits, int kEach>
__device__ __forceinline__ void copy_wide(const WideRows& rows, const RowMove (&moves)[kEach], RowLanes at) {
    const u32 units = rows.units();
    for (u32 first = at.lane; first < units; first += at.lanes * kUnits) {
        uint4 v[kUnits] = {};
        u64 held = ~u64(0);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            const RowMove& move = moves[e];
            const bool is_new = move.present && move.from != held;
#pragma unroll
            for (int i = 0; i < kUnits; ++i) {
                const u32 unit = first + i * at.lanes;
                ptx::load_16_over(v[i], is_new && unit < units, rows.in(unit, move.from));
            }
            held = is_new ? move.from : held;
#pragma unroll
            for (int i = 0; i < kUnits; ++i) {
                const u32 unit = first + i * at.lanes;
                if (move.present && unit < units) ptx::store_16(rows.out(unit, move.to), v[i]);
            }
        }
    }
}

/// Fills a row with padding.
__device__ __forceinline__ void pad_wide(const WideRows& rows, u64 to, RowLanes at) {
    for (u32 unit = at.lane; unit < rows.units(); unit += at.lanes) {
        const u32 pad = unit < rows.code_units() ? rows.codes.pad : rows.scales.pad;
        ptx::store_16(rows.out(unit, to), {pad, pad, pad, pad});
    }
}

/// Copies one buffer's row in units of type T, or writes padding.
template <typename T>
__device__ __forceinline__ void copy_narrow(const RowPlane& plane, RowMove move, RowLanes at) {
    const T* const in = reinterpret_cast<const T*>(plane.in + move.from * plane.in_stride);
    T* const out = reinterpret_cast<T*>(plane.out + move.to * plane.out_stride);
    constexpr u32 kOfPad = 4 / sizeof(T);  // number of units of T per word of padding
    for (u32 unit = at.lane; unit < plane.bytes / sizeof(T); unit += at.lanes)
        out[unit] = move.present ? __ldg(in + unit) : T(plane.pad >> (unit % kOfPad * 8 * sizeof(T)));
}

__device__ __forceinline__ void copy_narrow(const RowPlane& plane, RowMove move, RowLanes at) {
    if (plane.unit == 1)
        copy_narrow<u8>(plane, move, at);
    else
        copy_narrow<u32>(plane, move, at);
}

template <int kUnits, int kEach>
__global__ void __launch_bounds__(kCopyThreads, kUnits == 6 && kEach == 1 ? 8 : 1)
    copy_rows(const __grid_constant__ RowPlane codes, const __grid_constant__ RowPlane scales, const int* __restrict__ source,
              const int* __restrict__ row, u32 rows, u32 rows_in, u32 num_slots, u32 lanes_log2) {
    constexpr u32 kNone = 0xFFFFFFFF;
    const WideRows wide = {codes, scales};
    const RowLanes at = {threadIdx.x & ((1u << lanes_log2) - 1), 1u << lanes_log2};
    const auto source_of = [&](u32 i) { return i >= rows ? kNone : source == nullptr ? i : u32(__ldg(source + i)); };
    const u32 first = (blockIdx.x * (kCopyThreads >> lanes_log2) + (threadIdx.x >> lanes_log2)) * kEach;  // first slot and first row
    RowMove moves[kEach];
    u32 to[kEach], pads = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) to[e] = row == nullptr ? first + e : first + e < num_slots ? u32(__ldg(row + first + e)) : kNone;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const u32 from = source_of(to[e]);
        moves[e] = {from, to[e], from < rows_in};
        pads |= u32(first + e < rows && source_of(first + e) >= rows_in) << e;
    }
    const bool is_narrow = scales.unit != 16 || codes.unit != 16;
    if (is_narrow)
#pragma unroll
        for (int e = 0; e < kEach; ++e)
            if (moves[e].present) {
                copy_narrow(scales, moves[e], at);
                if (codes.unit != 16) copy_narrow(codes, moves[e], at);
            }
    if (codes.unit == 16) copy_wide<kUnits>(wide, moves, at);
    for (; pads != 0; pads &= pads - 1) {
        const RowMove pad = {0, first + __ffs(int(pads)) - 1, false};
        if (is_narrow) copy_narrow(scales, pad, at);
        if (codes.unit == 16)
            pad_wide(wide, pad.to, at);
        else
            copy_narrow(codes, pad, at);
    }
}

}  // namespace nib
