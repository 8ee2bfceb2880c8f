// out[i] = std · normal(first + i), i < len: the normal numbers of a stream, addressed by element (math/normal.cuh).
//
// init_normal: a thread takes four elements that share a block of random bits. Any grid, best
// ceil((first % 4 + len) / 1024) ctas of 256 threads but at most 32 a multiprocessor.
#pragma once
#include "math/normal.cuh"
#include "math/philox.cuh"
#include "ptx/global.cuh"

namespace nib {

__global__ void __launch_bounds__(256) init_normal(float* __restrict__ out, Stream stream, u64 first, u64 len, float std) {
    const u64 skipped = first % 4, quads = (skipped + len + 3) / 4;
    for (u64 quad = u64(blockIdx.x) * 256 + threadIdx.x; quad < quads; quad += u64(gridDim.x) * 256) {
        const uint4 bits = stream.block(first / 4 + quad);
        const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(normal_from_bits(words[i]), std);
        const u64 at = 4 * quad;  // of the first one in out, less `skipped`
        if (skipped == 0 && at + 4 <= len) {
            ptx::store_16(out + at, {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])});
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (at + i >= skipped && at + i - skipped < len) out[at + i - skipped] = x[i];
        }
    }
}

}  // namespace nib
