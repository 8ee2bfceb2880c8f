// Rows to other places: permute and pad (codes and scales in one launch), unpermute, messages packed and unpacked. Nothing is decoded.
//
// copy_rows: row i of each plane's `out` is row index[i] of its `in` (null: row i), or `pad` throughout where index[i] is no row of
// `in`. 2^lanes_log2 lanes take a row, its codes and scales in one batch of loads, and then the next row but as many as the grid has.
//   256 threads; any grid, best ceil(rows · lanes / 256); lanes_log2 up to 8, best so that a lane has about eight units of 16 bytes.
#pragma once
#include "ptx/global.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kCopyThreads = 256;
constexpr int kCopyUnits = 8;  // a lane's, so many loads in flight

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

/// The lanes that take a row.
struct RowLanes {
    u32 lane;
    u32 lanes;
};

/// Row `from` of both planes to row `to`, in units of 16 bytes: the scales' follow the codes'.
__device__ __forceinline__ void copy_wide(const RowPlane& codes, const RowPlane& scales, u64 to, u64 from, bool present, RowLanes at) {
    const u32 code_units = codes.bytes / 16, units = code_units + scales.bytes / 16;
    const u8* const codes_in = codes.in + from * codes.in_stride;
    const u8* const scales_in = scales.in + from * scales.in_stride - codes.bytes;
    u8* const codes_out = codes.out + to * codes.out_stride;
    u8* const scales_out = scales.out + to * scales.out_stride - codes.bytes;
    for (u32 first = at.lane; first < units; first += at.lanes * kCopyUnits) {
        uint4 v[kCopyUnits];
#pragma unroll
        for (int i = 0; i < kCopyUnits; ++i) {
            const u32 unit = first + i * at.lanes;
            const bool is_code = unit < code_units;
            v[i] = ptx::load_16_if(present && unit < units, (is_code ? codes_in : scales_in) + unit * 16,
                                   is_code ? codes.pad : scales.pad);
        }
#pragma unroll
        for (int i = 0; i < kCopyUnits; ++i) {
            const u32 unit = first + i * at.lanes;
            if (unit < units) ptx::store_16((unit < code_units ? codes_out : scales_out) + unit * 16, v[i]);
        }
    }
}

/// Row `from` of one plane to row `to`, in units of type T.
template <typename T>
__device__ __forceinline__ void copy_narrow(const RowPlane& plane, u64 to, u64 from, bool present, RowLanes at) {
    const T* const in = reinterpret_cast<const T*>(plane.in + from * plane.in_stride);
    T* const out = reinterpret_cast<T*>(plane.out + to * plane.out_stride);
    for (u32 unit = at.lane; unit < plane.bytes / sizeof(T); unit += at.lanes) out[unit] = present ? __ldg(in + unit) : T(plane.pad);
}

__device__ __forceinline__ void copy_narrow(const RowPlane& plane, u64 to, u64 from, bool present, RowLanes at) {
    if (plane.unit == 1)
        copy_narrow<u8>(plane, to, from, present, at);
    else
        copy_narrow<u32>(plane, to, from, present, at);
}

__global__ void __launch_bounds__(kCopyThreads)
    copy_rows(const __grid_constant__ RowPlane codes, const __grid_constant__ RowPlane scales, const int* __restrict__ index,
              u32 rows, u32 rows_in, u32 lanes_log2) {
    const RowLanes at = {threadIdx.x & ((1u << lanes_log2) - 1), 1u << lanes_log2};
    const u32 step = gridDim.x * kCopyThreads >> lanes_log2;
    const auto source_of = [&](u32 row) { return row >= rows ? 0 : index == nullptr ? row : u32(__ldg(index + row)); };
    u32 row = (blockIdx.x * kCopyThreads + threadIdx.x) >> lanes_log2;
    u32 from = source_of(row);
    while (row < rows) {
        const u32 next_row = row + step;
        const u32 next = source_of(next_row);  // under way while this row is copied
        const bool present = from < rows_in;
        if (!present) from = 0;
        if (codes.unit == 16 && scales.unit == 16) {
            copy_wide(codes, scales, row, from, present, at);
        } else {
            copy_narrow(codes, row, from, present, at);
            copy_narrow(scales, row, from, present, at);
        }
        row = next_row;
        from = next;
    }
}

}  // namespace nib
