// Permute and pad: each received row to the rows of its slots, read once for neighbouring slots. Nothing is decoded.
//
// spread_rows: slot_row[s], s below num_slots, is a row of `out`, and source_row of that the row of `in` it copies; slots of one
// row of `in` follow each other. Rows whose source is no row of `in` are `pad` throughout. A warp takes kSpreadSlots slots, and the
// pads among as many rows.
//   128 threads; grid ceil(max(num_slots, rows) / (4 · kSpreadSlots)).
#pragma once
#include "kernels/row_plane.cuh"
#include "ptx/thread.cuh"

namespace nib {

constexpr int kSpreadThreads = 128;
constexpr int kSpreadSlots = 2;

__global__ void __launch_bounds__(kSpreadThreads)
    spread_rows(const __grid_constant__ RowPlane codes, const __grid_constant__ RowPlane scales, const int* __restrict__ source_row,
                const int* __restrict__ slot_row, u32 rows, u32 rows_in, u32 num_slots) {
    constexpr u32 kAll = 0xFFFFFFFF, kNone = 0xFFFFFFFF;
    const RowLanes at = {ptx::lane_idx(), 32};
    const u32 mine = (blockIdx.x * kSpreadThreads + threadIdx.x) / 32 * kSpreadSlots + at.lane;  // a slot, and a row
    const bool takes = at.lane < kSpreadSlots;

    u32 to = kNone, from = kNone;
    if (takes && mine < num_slots) to = u32(__ldg(slot_row + mine));
    u32 pads = __ballot_sync(kAll, takes && mine < rows && u32(__ldg(source_row + mine)) >= rows_in);
    if (to < rows) from = u32(__ldg(source_row + to));

    for (int slot = 0; slot < kSpreadSlots;) {
        const u32 source = __shfl_sync(kAll, from, slot);
        // Neighbours of the same source, this slot first.
        const int copies = __ffs(~(__ballot_sync(kAll, takes && from == source) >> slot)) - 1;
        if (source < rows_in)
            copy_row(codes, scales, source, true, at, copies, [&](int copy) { return u64(__shfl_sync(kAll, to, slot + copy)); });
        slot += copies;
    }
    while (pads != 0) {
        const u32 row = mine - at.lane + __ffs(pads) - 1;
        copy_row(codes, scales, 0, false, at, 1, [&](int) { return u64(row); });
        pads &= pads - 1;
    }
}

}  // namespace nib
