// Copies many strided runs of rows of bytes in one launch, because each run alone would be too short to fill the device.
//
// copy_many: run i copies `lines` rows of `len` units from `from` to `to`. A unit has 2^log bytes, and every address
//   and stride is a multiple of a unit. Strides are in units. Runs do not overlap. A CTA copies 1024 units of one run.
//   256 threads per CTA; the grid has the CTAs of all runs; the table of runs is a kernel parameter.
#pragma once
#include "ptx/types.cuh"

namespace nib {

constexpr int kCopyThreads = 256;
constexpr u32 kCopyUnits = 4;  // number of units per thread, all in flight at once
constexpr int kMostCopies = 64;

/// A run of rows, and the index of its first CTA.
struct CopyRun {
    const u8* from;
    u8* to;
    u32 from_stride;
    u32 to_stride;
    u32 len;
    u32 units;  // number of units in all rows of the run
    u32 log;
    u32 first_cta;
};

struct CopyTable {
    CopyRun runs[kMostCopies];
};

template <class Unit>
__device__ __forceinline__ void copy_run(const CopyRun& run, u32 first) {
    const Unit* const from = reinterpret_cast<const Unit*>(run.from);
    Unit* const to = reinterpret_cast<Unit*>(run.to);
    Unit unit[kCopyUnits];
#pragma unroll
    for (u32 i = 0; i < kCopyUnits; ++i) {
        const u32 at = first + i * kCopyThreads, line = at / run.len;
        if (at < run.units) unit[i] = from[u64(line) * run.from_stride + (at - line * run.len)];
    }
#pragma unroll
    for (u32 i = 0; i < kCopyUnits; ++i) {
        const u32 at = first + i * kCopyThreads, line = at / run.len;
        if (at < run.units) to[u64(line) * run.to_stride + (at - line * run.len)] = unit[i];
    }
}

__global__ void __launch_bounds__(kCopyThreads) copy_many(const __grid_constant__ CopyTable table, u32 runs) {
    u32 mine = 0;
    while (mine + 1 < runs && table.runs[mine + 1].first_cta <= blockIdx.x) ++mine;
    const CopyRun& run = table.runs[mine];
    const u32 first = (blockIdx.x - run.first_cta) * (kCopyThreads * kCopyUnits) + threadIdx.x;
    switch (run.log) {
        case 4: copy_run<uint4>(run, first); break;
        case 3: copy_run<uint2>(run, first); break;
        case 2: copy_run<u32>(run, first); break;
        case 1: copy_run<u16>(run, first); break;
        default: copy_run<u8>(run, first);
    }
}

}  // namespace nib
