// Selects the experts of a token, either by sorting probabilities, or one by one from any scores.
#pragma once
#include "math/sort.cuh"
#include "pieces/routing/token_lanes.cuh"

namespace nib {

constexpr int kSorted = 8;  // the greatest number of experts that the fast selection finds

/// Maps numbers to integers in the same order: a larger number has a larger rank, a NaN has rank 1, and an absent
/// expert has rank 0. Choice scores are never -0.
__device__ __forceinline__ u32 rank_of(float x) {
    const u32 bits = __float_as_uint(x);
    return x == x ? bits ^ (u32(int(bits) >> 31) | 0x80000000) : 1;
}
__device__ __forceinline__ float number_of(u32 rank) {
    const u32 bits = rank >> 31 != 0 ? rank ^ 0x80000000 : ~rank;
    return __uint_as_float(rank == 1 ? 0x7FC00000 : bits);
}

/// Leaves the ranks [experts] of a token's `top` best groups unchanged, and sets all
/// other ranks to zero. `scores` is scratch memory for the ranks of the groups [groups].
template <int kLanes>
__device__ __forceinline__ void keep_best_groups(u32* ranks, u32* scores, int experts, int groups, int top, int two_largest) {
    const int lane = threadIdx.x % kLanes, each = experts / groups;
#pragma unroll 1
    for (int group = lane; group < groups; group += kLanes) {
        u32 first = 0, second = 0;
        int at = lane % each;  // lanes start at different experts, and therefore at different banks
#pragma unroll 1
        for (int i = 0; i < each; ++i) {
            const u32 rank = ranks[group * each + at];
            second = larger_of(second, rank < first ? rank : first);
            first = larger_of(first, rank);
            if (++at == each) at = 0;
        }
        scores[group] = two_largest ? rank_of(__fadd_rn(number_of(first), number_of(second))) : first;
    }
    __syncwarp();
#pragma unroll 1
    for (int group = lane; group < groups; group += kLanes) {
        const u32 mine = scores[group];
        int ahead = 0;
#pragma unroll 1
        for (int other = 0; other < groups; ++other) ahead += scores[other] > mine || (scores[other] == mine && other < group);
        if (ahead < top) continue;
#pragma unroll 1
        for (int i = 0; i < each; ++i) ranks[group * each + i] = 0;
    }
    __syncwarp();
}

/// Writes the experts of the top_k <= 8 largest probabilities, largest first, to `slots`.
///
/// Probabilities are sorted as integers whose last bits are replaced by the expert's index. Returns false if the
/// replaced bits would have been decisive, or if top_k is above 8.
template <int kLanes, int kPerLane>
__device__ __forceinline__ bool choose(const float (&p)[kPerLane], int top_k, int* slots) {
    using Token = TokenLanes<kLanes, kPerLane>;
    constexpr u32 kIndex = kLanes * kPerLane - 1;
    u32 best[kSorted];
#pragma unroll
    for (int block = 0; block < kPerLane; block += kSorted) {
        u32 key[kSorted];
#pragma unroll
        for (int i = 0; i < kSorted; ++i) {
            const u32 index = Token::first_of((block + i) / 4) + i % 4;
            key[i] = (__float_as_uint(p[block + i]) << 2 & ~kIndex) | (kIndex - index);  // p <= 1 leaves the top two bits unused
        }
        sort_descending(key);
        if (block == 0)
#pragma unroll
            for (int i = 0; i < kSorted; ++i) best[i] = key[i];
        else
            keep_largest(best, key);
    }
    u32 mine[kSorted];
#pragma unroll
    for (int i = 0; i < kSorted; ++i) mine[i] = best[i];
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) {
        u32 other[kSorted];
#pragma unroll
        for (int i = 0; i < kSorted; ++i) other[i] = __shfl_xor_sync(kWarp, best[i], lane);
        keep_largest(best, other);
    }
    // True if two adjacent values in the order differ only in the index. The
    // two are chosen experts, or the last chosen expert and the next expert.
    bool is_alike = false;
    u32 last = best[0];
#pragma unroll
    for (int i = 1; i < kSorted; ++i) {
        if (i >= top_k) continue;
        is_alike = is_alike || (best[i - 1] ^ best[i]) <= kIndex;
        last = best[i];
    }
    u32 below = kWarp;  // difference between the last chosen value and the next smaller value of this lane
#pragma unroll
    for (int i = 0; i < kSorted; ++i) {
        const u32 distance = last - 1 - mine[i];
        below = distance < below ? distance : below;
    }
    is_alike = is_alike || below < (last & kIndex);
    // If all eight experts that a lane kept were chosen, the next expert of the lane is unknown.
    if (kPerLane > kSorted) is_alike = is_alike || mine[kSorted - 1] >= last;
    constexpr int kTurn = kLanes < kSorted ? kLanes : kSorted;
#pragma unroll
    for (int turn = 0; turn < kSorted; turn += kTurn) {
        const int lane = threadIdx.x % kLanes;
        u32 key = best[turn];
#pragma unroll
        for (int i = 1; i < kTurn; ++i) key = lane == i ? best[turn + i] : key;
        if (lane < kTurn && turn + lane < top_k) slots[turn + lane] = int(kIndex - (key & kIndex));
    }
    return !is_alike && top_k <= kSorted;
}

/// Selects the experts of the largest ranks, for any top_k; among equal ranks, the lower index comes first. `rank_at(i)`
/// returns the rank of this lane's expert i, or 0 if the expert cannot be chosen. The experts are found one by one.
template <int kLanes, int kPerLane, class Rank>
__device__ __forceinline__ void choose_any(const Rank& rank_at, int top_k, int* slots) {
    using Token = TokenLanes<kLanes, kPerLane>;
    u32 taken = 0;
    for (int slot = 0; slot < top_k; ++slot) {
        u32 best = 0, index = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const u32 rank = (taken >> i & 1) == 0 ? rank_at(i) : 0;
            if (rank > best) best = rank, index = i;
        }
        const u32 expert = Token::first_of(index / 4) + index % 4;
        const u32 largest = Token::largest(best);
        const u32 lowest = ~Token::largest(best == largest ? ~expert : 0);
        if (lowest == expert && best == largest) {
            taken |= 1u << index;
            slots[slot] = int(expert);
        }
    }
}

/// Chooses experts by softmax or sigmoid scores p, with a bias and groups. Leaves p in the token's
/// row in shared memory.
template <int kLanes, int kPerLane>
__device__ __forceinline__ void choose_by_rule(const float (&p)[kPerLane], float* row, const float* __restrict__ bias, u32* group_scores,
                                               int experts, int top_k, int groups, int top_groups, int two_largest, int* slots) {
    using Token = TokenLanes<kLanes, kPerLane>;
    float ranks[kPerLane];  // ranks, as bits
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int j = Token::first_of(i / 4) + i % 4;
        const float added = bias != nullptr && j < experts ? __ldg(bias + j) : 0.0f;
        ranks[i] = __uint_as_float(j < experts ? rank_of(__fadd_rn(p[i], added)) : 0);
    }
    if (groups > 0) {
        write_row<Token>(row, ranks);
        __syncwarp();
        keep_best_groups<kLanes>(reinterpret_cast<u32*>(row), group_scores, experts, groups, top_groups, two_largest);
        read_row<Token>(row, ranks);
    }
    write_row<Token>(row, p);
    choose_any<kLanes, kPerLane>([&](int i) { return __float_as_uint(ranks[i]); }, top_k, slots);
}

}  // namespace nib
