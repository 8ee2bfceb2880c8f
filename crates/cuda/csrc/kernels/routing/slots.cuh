// Assigns slots to ranks, and packs the records that describe to a rank the tokens that it
// receives. Experts are divided evenly and in order: an expert's rank is expert / experts_each.
//
// assign_ranks: rank[s] = the rank of expert[s], or -1 if expert[s] is not below `experts`. first[s] is the same, but -1 if
//   an earlier slot of the token has that rank. assign_ranks also adds each rank's number of tokens to counts[2 * rank] and
//   its number of slots to counts[2 * rank + 1], after sums within each CTA. 256 threads per CTA. Any grid size gives correct
//   results; one thread per slot, but at most a few CTAs per SM, is fastest. Dynamic shared memory: 8 bytes per rank.
// pack_slots: a record has 1 + 2 * top_k words. Record i describes the token of slot[i] to the rank of expert[slot[i]]. Its
//   words are token_id + 1; then for each slot of the token, its expert, numbered from 1 for the rank's first expert, or 0 if
//   the expert is on another rank; then the bits of each slot's weight. If slot[i] is not below `slots`, the record is zeros.
// unpack_slots: splits records into token_id, expert (both numbered from 0 again) and weight.
//   256 threads per CTA; the grid has ceil(words / 256) CTAs, where `words`, the number of words in all records, is below 2^31.
#pragma once
#include "math/reduce.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kSlotThreads = 256;

__global__ void __launch_bounds__(kSlotThreads)
    assign_ranks(const int* __restrict__ expert, int* __restrict__ rank_out, int* __restrict__ first_out, int* __restrict__ counts, u32 slots,
                 u32 top_k, Divider by_top_k, u32 experts, Divider by_experts_each, u32 world) {
    extern __shared__ int count[];
    for (u32 i = threadIdx.x; i < 2 * world; i += kSlotThreads) count[i] = 0;
    __syncthreads();
    const auto rank_of = [&](u32 slot) {
        const u32 e = u32(__ldg(expert + slot));
        return e < experts ? int(by_experts_each.divide(e)) : -1;
    };
    for (u32 slot = blockIdx.x * kSlotThreads + threadIdx.x; slot < slots; slot += gridDim.x * kSlotThreads) {
        const u32 earlier = slot - by_top_k.divide(slot) * top_k;
        const int rank = rank_of(slot);
        int first = rank;
        for (u32 back = 1; back <= earlier; ++back)
            if (rank_of(slot - back) == rank) first = -1;
        rank_out[slot] = rank;
        first_out[slot] = first;
        if (first >= 0) atomicAdd(&count[2 * rank], 1);
        if (rank >= 0) atomicAdd(&count[2 * rank + 1], 1);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 2 * world; i += kSlotThreads)
        if (count[i] != 0) atomicAdd(&counts[i], count[i]);
}

/// The position of a word within its record.
struct RecordWord {
    u32 record;
    u32 word;

    __device__ __forceinline__ RecordWord(u32 at, u32 top_k, Divider by_words)
        : record(by_words.divide(at)), word(at - record * (1 + 2 * top_k)) {}
};

__global__ void __launch_bounds__(kSlotThreads)
    pack_slots(const int* __restrict__ slot, const int* __restrict__ expert, const float* __restrict__ weight, const int* __restrict__ token_id,
               int* __restrict__ records, u32 words, u32 slots, u32 top_k, Divider by_words, Divider by_top_k, u32 experts_each,
               Divider by_experts_each) {
    const u32 i = blockIdx.x * kSlotThreads + threadIdx.x;
    if (i >= words) return;
    const RecordWord at(i, top_k, by_words);
    const u32 from = u32(__ldg(slot + at.record));
    const bool present = from < slots;
    const u32 token = present ? by_top_k.divide(from) : 0;
    int value = 0;
    if (present && at.word == 0) {
        value = int(u32(__ldg(token_id + token)) + 1);
    } else if (present && at.word <= top_k) {
        const int mine = __ldg(expert + from), other = __ldg(expert + token * top_k + at.word - 1);
        if (mine >= 0 && other >= 0) {
            const u32 rank = by_experts_each.divide(u32(mine));
            if (by_experts_each.divide(u32(other)) == rank) value = int(u32(other) - rank * experts_each + 1);
        }
    } else if (present) {
        value = __float_as_int(__ldg(weight + token * top_k + at.word - 1 - top_k));
    }
    records[i] = value;
}

__global__ void __launch_bounds__(kSlotThreads)
    unpack_slots(const int* __restrict__ records, int* __restrict__ token_id, int* __restrict__ expert, float* __restrict__ weight, u32 words,
                 u32 top_k, Divider by_words) {
    const u32 i = blockIdx.x * kSlotThreads + threadIdx.x;
    if (i >= words) return;
    const RecordWord at(i, top_k, by_words);
    const u32 value = u32(__ldg(records + i));
    if (at.word == 0)
        token_id[at.record] = int(value - 1);
    else if (at.word <= top_k)
        expert[at.record * top_k + at.word - 1] = int(value - 1);
    else
        weight[at.record * top_k + at.word - 1 - top_k] = __uint_as_float(value);
}

}  // namespace nib
