// Copies rows of bytes into longer or shorter rows.
//
// recut_lines: copies [lines][from_bytes] to [lines][to_bytes], which has `total` bytes. Output bytes past the end of a source
//   row are zeros. The mask `last` selects the valid bits of the last byte of a source row; the other bits become zeros. 256
//   threads per CTA. Any grid size gives correct results; ceil(total / 256) CTAs, but at most a few per SM, are fastest.
#pragma once
#include "ptx/types.cuh"

namespace nib {

__global__ void __launch_bounds__(256)
    recut_lines(const u8* __restrict__ from, u8* __restrict__ to, u64 from_bytes, u64 to_bytes, u32 last, u64 total) {
    for (u64 i = u64(blockIdx.x) * 256 + threadIdx.x; i < total; i += u64(gridDim.x) * 256) {
        const u64 line = i / to_bytes, at = i - line * to_bytes;
        const u32 byte = at < from_bytes ? __ldg(from + line * from_bytes + at) : 0;
        to[i] = u8(at + 1 == from_bytes ? byte & last : byte);
    }
}

}  // namespace nib
