// Rows to other places: unpermute, messages packed and unpacked. Nothing is decoded.
//
// copy_rows: row i of each plane's `out` is row index[i] of its `in` (null: row i), or `pad` throughout where index[i] is no row of
// `in`. 2^lanes_log2 lanes take a row, its codes and scales in one batch of loads, and then the next row but as many as the grid has.
//   256 threads; any grid, best ceil(rows · lanes / 256); lanes_log2 up to 8, best so that a lane has up to eight units of 16 bytes.
#pragma once
#include "kernels/row_plane.cuh"

namespace nib {

__global__ void __launch_bounds__(kCopyThreads)
    copy_rows(const __grid_constant__ RowPlane codes, const __grid_constant__ RowPlane scales, const int* __restrict__ index,
              u32 rows, u32 rows_in, u32 lanes_log2) {
    const RowLanes at = {threadIdx.x & ((1u << lanes_log2) - 1), 1u << lanes_log2};
    const u32 step = gridDim.x * kCopyThreads >> lanes_log2;
    const auto source_of = [&](u32 row) { return row >= rows ? 0 : index == nullptr ? row : u32(__ldg(index + row)); };
    u32 row = (blockIdx.x * kCopyThreads + threadIdx.x) >> lanes_log2;
    u32 from = source_of(row);
    while (row < rows) {
        const u32 next = source_of(row + step);  // under way while this row is copied
        copy_row(codes, scales, from, from < rows_in, at, 1, [&](int) { return u64(row); });
        row += step;
        from = next;
    }
}

}  // namespace nib
