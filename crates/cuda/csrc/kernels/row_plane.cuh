// Rows of codes and of their scales, moved as bytes: what kernels/copy_rows.cuh and kernels/spread_rows.cuh share.
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

/// The lanes that take a row, all of them at once.
struct RowLanes {
    u32 lane;
    u32 lanes;
};

/// Both planes in units of 16 bytes: the scales' follow the codes'.
template <typename To>
__device__ __forceinline__ void copy_wide(const RowPlane& codes, const RowPlane& scales, u64 from, bool present, RowLanes at, int copies,
                                          To to) {
    const u32 code_units = codes.bytes / 16, units = code_units + scales.bytes / 16;
    const u8* const codes_in = codes.in + from * codes.in_stride;
    const u8* const scales_in = scales.in + from * scales.in_stride - codes.bytes;
    for (u32 first = 0; first < units; first += at.lanes * kCopyUnits) {
        uint4 v[kCopyUnits];
#pragma unroll
        for (int i = 0; i < kCopyUnits; ++i) {
            const u32 unit = first + i * at.lanes + at.lane;
            const bool is_code = unit < code_units;
            v[i] = ptx::load_16_if(present && unit < units, (is_code ? codes_in : scales_in) + unit * 16,
                                   is_code ? codes.pad : scales.pad);
        }
        for (int copy = 0; copy < copies; ++copy) {
            const u64 row = to(copy);
            u8* const codes_out = codes.out + row * codes.out_stride;
            u8* const scales_out = scales.out + row * scales.out_stride - codes.bytes;
#pragma unroll
            for (int i = 0; i < kCopyUnits; ++i) {
                const u32 unit = first + i * at.lanes + at.lane;
                if (unit < units) ptx::store_16((unit < code_units ? codes_out : scales_out) + unit * 16, v[i]);
            }
        }
    }
}

/// One plane in units of type T.
template <typename T, typename To>
__device__ __forceinline__ void copy_narrow(const RowPlane& plane, u64 from, bool present, RowLanes at, int copies, To to) {
    const T* const in = reinterpret_cast<const T*>(plane.in + from * plane.in_stride);
    const u32 units = plane.bytes / sizeof(T);
    for (int copy = 0; copy < copies; ++copy) {
        T* const out = reinterpret_cast<T*>(plane.out + to(copy) * plane.out_stride);
        for (u32 unit = at.lane; unit < units; unit += at.lanes) out[unit] = present ? __ldg(in + unit) : T(plane.pad);
    }
}

/// Row `from` of both planes, or their pads if not `present`, to the rows to(0) .. to(copies - 1); every lane asks for each of them.
template <typename To>
__device__ __forceinline__ void copy_row(const RowPlane& codes, const RowPlane& scales, u32 from, bool present, RowLanes at, int copies,
                                         To to) {
    if (!present) from = 0;
    if (codes.unit == 16 && scales.unit == 16) {
        copy_wide(codes, scales, from, present, at, copies, to);
        return;
    }
    for (const RowPlane& plane : {codes, scales}) {
        if (plane.unit == 1)
            copy_narrow<u8>(plane, from, present, at, copies, to);
        else
            copy_narrow<u32>(plane, from, present, at, copies, to);
    }
}

}  // namespace nib
