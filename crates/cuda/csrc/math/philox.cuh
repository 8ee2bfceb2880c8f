// Random bits by Philox4x32-10 with the counters of crates/formats/src/philox.rs. The bits are a pure
// function of seed, stream and index, so they depend neither on the launch nor on the thread that
// computes them. A block of 128 bits has sixteen bits for each of eight adjacent columns, so a thread
// with eight columns needs one block if the index of the first element is a multiple of eight.
#pragma once
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Sixteen random bits for each of eight elements: two elements per word, the even one in the low half.
struct RandomBits {
    u32 word[4];

    /// Makes the compiler generate the bits here, before code that may wait for memory.
    __device__ __forceinline__ void draw_by_now() {
#pragma unroll
        for (u32& two : word) ptx::compute_by_now(two);
    }

    __device__ __forceinline__ u32 of(int i) const { return i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xFFFF; }
};

/// The random bits of one (seed, purpose, site, step), addressed by element. This struct is a kernel
/// parameter (`StreamArg` in src/launch/args.rs). The host computes the keys of all rounds. Because the
/// keys are kernel parameters, they are operands in constant memory, which need no extra instruction.
struct Stream {
    static constexpr u32 kFactor0 = 0xD2511F53, kFactor1 = 0xCD9E8D57;
    u32 key[10][2];  // key of each round; the first is the seed, low word first
    u32 purpose;     // shifted left by 16
    u32 site;
    u32 step;

    /// Returns a stream with the same parameters at another step.
    __device__ __forceinline__ Stream at(u32 other) const {
        Stream stream = *this;
        stream.step = other;
        return stream;
    }

    /// Half of the state after the second round. All blocks share it whose indices differ only in the low word.
    struct High {
        u32 c2, c3;
    };
    __device__ __forceinline__ High high(u32 q_high) const {
        const u32 c0 = u32(u64(site) * kFactor1 >> 32) ^ ((q_high & 0xFFFF) | purpose) ^ key[0][0];
        const u64 p0 = u64(c0) * kFactor0;
        return {u32(p0 >> 32) ^ key[1][1], u32(p0)};
    }

    /// Returns the block of 128 bits whose index has this low word. kComplement:
    /// returns the complement, which is cheaper than complementing the result.
    template <bool kComplement = false>
    __device__ __forceinline__ uint4 block(u32 q_low, const High& high) const {
        const u64 first = u64(q_low) * kFactor0, second = u64(u32(first >> 32) ^ step ^ key[0][1]) * kFactor1;
        u32 c0 = u32(second >> 32) ^ (site * kFactor1 ^ key[1][0]), c1 = u32(second), c2 = u32(first) ^ high.c2, c3 = high.c3;
#pragma unroll
        for (int round = 2; round < 10; ++round) {
            const bool complement = kComplement && round == 9;
            const u64 p0 = u64(c0) * kFactor0, p1 = u64(c2) * kFactor1;
            c0 = u32(p1 >> 32) ^ c1 ^ (complement ? ~key[round][0] : key[round][0]);
            c1 = complement ? ~u32(p1) : u32(p1);
            c2 = u32(p0 >> 32) ^ c3 ^ (complement ? ~key[round][1] : key[round][1]);
            c3 = complement ? ~u32(p0) : u32(p0);
        }
        return {c0, c1, c2, c3};
    }

    /// Returns block q modulo 2^48.
    __device__ __forceinline__ uint4 block(u64 q) const { return block(u32(q), high(q >> 32)); }

    /// The complements of the random bits of consecutive elements from `e` on. The number
    /// of requested elements is a power of two, and `e` is a multiple of that number.
    struct Complements {
        const Stream& stream;
        u32 q_low;
        High high;

        /// Returns the complements for eight elements, from element e + 8 · eights on.
        __device__ __forceinline__ RandomBits bits(u32 eights) const {
            const uint4 bits = stream.block<true>(q_low + eights, high);
            return {{bits.x, bits.y, bits.z, bits.w}};
        }
    };
    __device__ __forceinline__ Complements complements(u64 e) const { return {*this, u32(e / 8), high(u32(e / 8 >> 32))}; }

    /// Returns the random bits of eight elements from e + 8 · eights on. kAligned: e is a multiple of 8.
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
            // Shifts by `skipped` half-words, 0 to 7, one bit of `skipped` at a time,
            // so that no register needs an index that is known only at run time.
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
