// Rows to other places: permute and pad (codes and scales in one launch), unpermute, messages packed and unpacked. Nothing is decoded.
//
// copy_rows: row i of each plane's `out` is row index[i] of its `in` (null: row i), or `pad` throughout where index[i] is no row of
// `in`. A warp takes a row: its codes, then its scales.
//   256 threads; grid ceil(rows / 8).
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

template <typename T>
__device__ __forceinline__ T load_if(bool present, const T* from, u32 otherwise) {
    return present ? __ldg(from) : T(otherwise);
}
template <>
__device__ __forceinline__ uint4 load_if(bool present, const uint4* from, u32 otherwise) {
    return ptx::load_16_if(present, from, otherwise);
}

/// Row `from` of a plane to row `to`, by one warp in units of type T.
template <typename T>
__device__ __forceinline__ void copy_row(const RowPlane& plane, u64 to, u64 from, bool present) {
    const T* const in = reinterpret_cast<const T*>(plane.in + from * plane.in_stride);
    T* const out = reinterpret_cast<T*>(plane.out + to * plane.out_stride);
    const u32 units = plane.bytes / sizeof(T);
    for (u32 first = threadIdx.x % 32; first < units; first += 32 * kCopyUnits) {
        T v[kCopyUnits];
#pragma unroll
        for (int i = 0; i < kCopyUnits; ++i)
            v[i] = load_if(present && first + i * 32 < units, in + first + i * 32, plane.pad);
#pragma unroll
        for (int i = 0; i < kCopyUnits; ++i)
            if (first + i * 32 < units) out[first + i * 32] = v[i];
    }
}

__device__ __forceinline__ void copy_row(const RowPlane& plane, u64 to, u64 from, bool present) {
    if (plane.unit == 16)
        copy_row<uint4>(plane, to, from, present);
    else if (plane.unit == 4)
        copy_row<u32>(plane, to, from, present);
    else
        copy_row<u8>(plane, to, from, present);
}

__global__ void __launch_bounds__(kCopyThreads)
    copy_rows(const __grid_constant__ RowPlane codes, const __grid_constant__ RowPlane scales, const int* __restrict__ index,
              u32 rows, u32 rows_in) {
    const u32 row = (blockIdx.x * kCopyThreads + threadIdx.x) / 32;
    if (row >= rows) return;
    const u32 from = index == nullptr ? row : u32(__ldg(index + row));
    const bool present = from < rows_in;
    copy_row(codes, row, present ? from : 0, present);
    copy_row(scales, row, present ? from : 0, present);
}

}  // namespace nib
