// Philox4x32-10, and the random bits of an element: the twin of crates/formats/src/philox.rs.
#pragma once
#include "ptx/types.cuh"

namespace nib {

/// Random bits of one (seed, purpose, site, step), addressed by element.
struct Stream {
    u64 seed;
    u32 purpose;
    u32 site;
    u32 step;

    /// Block q (modulo 2^48) of 128 bits: counter (q low, q high16 | purpose << 16, site, step), key = seed.
    __device__ __forceinline__ uint4 block(u64 q) const {
        u32 c0 = u32(q), c1 = (u32(q >> 32) & 0xFFFF) | purpose << 16, c2 = site, c3 = step;
        u32 k0 = u32(seed), k1 = u32(seed >> 32);
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const u64 p0 = u64(c0) * 0xD2511F53u;
            const u64 p1 = u64(c2) * 0xCD9E8D57u;
            c0 = u32(p1 >> 32) ^ c1 ^ k0;
            c1 = u32(p1);
            c2 = u32(p0 >> 32) ^ c3 ^ k1;
            c3 = u32(p0);
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        return {c0, c1, c2, c3};
    }
};

}  // namespace nib
