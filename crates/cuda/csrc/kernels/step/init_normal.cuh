// out[i] = std · normal(first + i) for i < len. These are the normally
// distributed numbers of a random stream, addressed by element (math/normal.cuh).
//
// init_normal: a thread computes four elements that share a block of random bits. Any grid size gives correct
//   results; ceil((first % 4 + len) / 1024) CTAs of 256 threads, but at most 32 CTAs per SM, are fastest.
#pragma once
#include "math/normal.cuh"
#include "math/philox.cuh"
#include "ptx/global.cuh"

namespace nib {

__global__ void __launch_bounds__(256) init_normal(float* __restrict__ out, Stream stream, u64 first, u64 len, float std) {
    __shared__ Tails<4> tails[8];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 skipped = first % 4, quads = (skipped + len + 3) / 4;
    for (u64 warp_quad = u64(blockIdx.x) * 256 + warp * 32; warp_quad < quads; warp_quad += u64(gridDim.x) * 256) {
        const u64 quad = warp_quad + lane;
        const uint4 words = stream.block(first / 4 + quad);
        float x[4];
        normals({words.x, words.y, words.z, words.w}, tails[warp], x);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], std);
        const u64 at = 4 * quad;  // the first element of these four has the index `at` - skipped in out
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
