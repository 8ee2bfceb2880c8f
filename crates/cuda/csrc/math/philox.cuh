// Randomness as a function: Philox4x32-10 with the counters of crates/formats/src/philox.rs, so that the bits depend neither on
// the launch nor on who computes what. A thread that holds eight neighbouring columns calls it once: their sixteen bits
// each are one block, if the first element's index is a multiple of eight.
#pragma once
#include "ptx/types.cuh"

namespace nib {

/// Sixteen bits of each of eight elements, two a word, the even element's in the low half.
struct RandomBits {
    u32 word[4];

    __device__ __forceinline__ u32 of(int i) const { return i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xFFFF; }
};

/// Random bits for one (seed, purpose, site, step), addressed by element; the launch passes it by value (`StreamArg` in
/// src/launch.rs). The keys of the rounds come from the host: they are operands out of constant memory, and cost nothing.
struct Stream {
    u32 key[10][2];  // of the first round: the seed, low word first
    u32 purpose;     // shifted left by 16
    u32 site;
    u32 step;

    /// The q-th block of 128 bits, q modulo 2^48.
    __device__ __forceinline__ uint4 block(u64 q) const {
        u32 c0 = u32(q), c1 = (u32(q >> 32) & 0xFFFF) | purpose, c2 = site, c3 = step;
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const u64 p0 = u64(c0) * 0xD2511F53u, p1 = u64(c2) * 0xCD9E8D57u;
            c0 = u32(p1 >> 32) ^ c1 ^ key[round][0];
            c1 = u32(p1);
            c2 = u32(p0 >> 32) ^ c3 ^ key[round][1];
            c3 = u32(p0);
        }
        return {c0, c1, c2, c3};
    }

    /// The bits of eight elements from e + 8 · eights on. kAligned: e is a multiple of 8.
    template <bool kAligned>
    __device__ __forceinline__ RandomBits bits(u64 e, u32 eights) const {
        const u64 q = e / 8 + eights;
        const uint4 low = block(q);
        if constexpr (kAligned) {
            return {{low.x, low.y, low.z, low.w}};
        } else {
            const uint4 high = block(q + 1);
            u32 w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const u32 skipped = u32(e) % 8;
            // A shift by up to seven half-words, a bit of their number at a time, so that no register is indexed.
#pragma unroll
            for (int i = 0; i < 6; ++i) w[i] = skipped & 4 ? w[i + 2] : w[i];
#pragma unroll
            for (int i = 0; i < 5; ++i) w[i] = skipped & 2 ? w[i + 1] : w[i];
#pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = skipped & 1 ? __funnelshift_r(w[i], w[i + 1], 16) : w[i];
            return {{w[0], w[1], w[2], w[3]}};
        }
    }
};

}  // namespace nib
