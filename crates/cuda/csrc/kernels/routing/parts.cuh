// Divides the rows of each expert into parts: finds the part of each slot's row, and joins several groups into one group.
//
// assign_parts: out[s] = expert[s] * parts + (token_id[s / top_k] / part_tokens) mod parts, or -1 if expert[s] is negative.
//   256 threads per CTA; the grid has ceil(slots / 256) CTAs; slots is below 2^31.
// join_groups: joins `parts` consecutive groups into one group, from the first group's start to the last group's end. `start` has an additional
//   last entry, which is copied. 256 threads per CTA; the grid has ceil((groups + 1) / 256) CTAs, where groups = the number of joined groups.
#pragma once
#include "math/reduce.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kPartThreads = 256;

__global__ void __launch_bounds__(kPartThreads)
    assign_parts(const int* __restrict__ expert, const int* __restrict__ token_id, int* __restrict__ out, u32 slots, Divider by_top_k,
                 u32 parts, Divider by_parts, Divider by_part_tokens) {
    const u32 slot = blockIdx.x * kPartThreads + threadIdx.x;
    if (slot >= slots) return;
    const u32 part = by_part_tokens.divide(u32(__ldg(token_id + by_top_k.divide(slot))));
    const int e = expert[slot];
    out[slot] = e < 0 ? -1 : int(u32(e) * parts + (part - by_parts.divide(part) * parts));
}

__global__ void __launch_bounds__(kPartThreads) join_groups(const int* __restrict__ start, const int* __restrict__ len,
                                                            int* __restrict__ start_out, int* __restrict__ len_out, u32 groups, u32 parts) {
    const u32 group = blockIdx.x * kPartThreads + threadIdx.x;
    if (group > groups) return;
    const int begin = start[group * parts];
    start_out[group] = begin;
    if (group == groups) return;
    const u32 last = group * parts + parts - 1;
    len_out[group] = start[last] + len[last] - begin;
}

}  // namespace nib
