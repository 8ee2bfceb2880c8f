// Rows to other places: permute and pad, unpermute, messages packed and unpacked. Nothing is decoded.
//
// copy_rows<kUnits>: row i of each plane's `out` is row source[i] of its `in` (source null: row i), or `pad` throughout where that is
// no row of `in`. 2^lanes_log2 lanes take a row, its codes and scales in one batch of loads. In which order: that of the rows, or that
// of slots, where row[s] for s below num_slots names the rows that are not padding (row null: every row itself). Slots of one source
// follow each other, so that it is read from memory once; in the order of the rows it is gone from the cache before it is wanted again.
//   128 threads; grid ceil(rows · lanes / 128); num_slots <= rows; lanes_log2 up to 7, best so that a lane has up to kUnits units of
//   16 bytes. kUnits 6 for short rows, of which more must be under way, else 8.
//
// Measured on an H200, shares of the floor in BF16, E4M3 and MXFP4 (an empty launch takes 3.4 us of each time). Permute, top 1 of 32:
// 32768 x 7168 94, 94, 91 %, 32768 x 2048 92, 88, 81 %; top 4 of 32: 92, 89, 85 % and 87, 80, 70 %; top 8 of 256: 104, 100, 98 % and 101,
// 93, 86 %. 4096 x 7168, top 4 of 32: 86, 80, 60 %. Unpermute 32768 x 7168 in BF16: 96 %.
#pragma once
#include "ptx/global.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kCopyThreads = 128;

/// One plane of rows. `unit`, 16, 4 or 1, divides all of its addresses, strides and bytes.
struct RowPlane {
    const u8* in;
    u8* out;
    u64 in_stride;
    u64 out_stride;
    u32 bytes;  // of a row; 0: there is no such plane
    u32 pad;    // repeated
    u32 unit;
};

/// Row `from` of `in`, or pads if not `present`, to row `to` of `out`.
struct RowMove {
    u64 from;
    u64 to;
    bool present;
};

/// The lanes that move a row.
struct RowLanes {
    u32 lane;
    u32 lanes;
};

/// The codes in units of 16 bytes, and the scales if they lie so too: theirs follow the codes'.
template <int kUnits>
__device__ __forceinline__ void copy_wide(const RowPlane& codes, const RowPlane& scales, RowMove move, RowLanes at) {
    const u32 code_units = codes.bytes / 16, units = code_units + (scales.unit == 16 ? scales.bytes / 16 : 0);
    const u8* const codes_in = codes.in + move.from * codes.in_stride;
    const u8* const scales_in = scales.in + move.from * scales.in_stride - codes.bytes;
    u8* const codes_out = codes.out + move.to * codes.out_stride;
    u8* const scales_out = scales.out + move.to * scales.out_stride - codes.bytes;
    for (u32 first = at.lane; first < units; first += at.lanes * kUnits) {
        uint4 v[kUnits];
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const u32 unit = first + i * at.lanes;
            const bool is_code = unit < code_units;
            v[i] = ptx::load_16_if(move.present && unit < units, (is_code ? codes_in : scales_in) + unit * 16,
                                   is_code ? codes.pad : scales.pad);
        }
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const u32 unit = first + i * at.lanes;
            if (unit < units) ptx::store_16((unit < code_units ? codes_out : scales_out) + unit * 16, v[i]);
        }
    }
}

/// One plane in units of type T.
template <typename T>
__device__ __forceinline__ void copy_narrow(const RowPlane& plane, RowMove move, RowLanes at) {
    const T* const in = reinterpret_cast<const T*>(plane.in + move.from * plane.in_stride);
    T* const out = reinterpret_cast<T*>(plane.out + move.to * plane.out_stride);
    for (u32 unit = at.lane; unit < plane.bytes / sizeof(T); unit += at.lanes)
        out[unit] = move.present ? __ldg(in + unit) : T(plane.pad);
}

__device__ __forceinline__ void copy_narrow(const RowPlane& plane, RowMove move, RowLanes at) {
    if (plane.unit == 1)
        copy_narrow<u8>(plane, move, at);
    else
        copy_narrow<u32>(plane, move, at);
}

template <int kUnits>
__global__ void __launch_bounds__(kCopyThreads, kUnits == 6 ? 8 : 1)
    copy_rows(const __grid_constant__ RowPlane codes, const __grid_constant__ RowPlane scales, const int* __restrict__ source,
              const int* __restrict__ row, u32 rows, u32 rows_in, u32 num_slots, u32 lanes_log2) {
    constexpr u32 kNone = 0xFFFFFFFF;
    const RowLanes at = {threadIdx.x & ((1u << lanes_log2) - 1), 1u << lanes_log2};
    const auto source_of = [&](u32 i) { return i >= rows ? kNone : source == nullptr ? i : u32(__ldg(source + i)); };
    const u32 mine = blockIdx.x * (kCopyThreads >> lanes_log2) + (threadIdx.x >> lanes_log2);  // a slot, and a row
    const u32 to = row == nullptr ? mine : mine < num_slots ? u32(__ldg(row + mine)) : kNone;
    const bool is_pad = mine < rows && source_of(mine) >= rows_in;
    const u32 from = source_of(to);

    const bool is_copied = to < rows && from < rows_in;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const bool present = i == 0;
        if (!(present ? is_copied : is_pad)) continue;
        const RowMove move = {present ? from : 0, present ? to : mine, present};
        if (scales.unit != 16 || codes.unit != 16) copy_narrow(scales, move, at);
        if (codes.unit == 16)
            copy_wide<kUnits>(codes, scales, move, at);
        else
            copy_narrow(codes, move, at);
    }
}

}  // namespace nib
