// Computes the attention windows of documents that are packed one after another into sequences:
// which keys each query sees, and which queries see each key.
//
// find_windows: reads document [t], which never decreases within a sequence of seq_len tokens. Writes first_key and end_query [t], as
//   positions in the sequence. A query sees the last `window` keys of its own document up to its own position; window is 1 to seq_len.
//   256 threads per CTA, one per token; the grid has ceil(t / 256) CTAs; t is below 2^31. Bisection finds the start and the end of a document.
#pragma once
#include "ptx/types.cuh"

namespace nib {

__global__ void __launch_bounds__(256)
    find_windows(const int* __restrict__ document, int* __restrict__ first_key, int* __restrict__ end_query, u32 tokens, u32 seq_len,
                 u32 window) {
    const u32 token = blockIdx.x * 256 + threadIdx.x;
    if (token >= tokens) return;
    const u32 at = token % seq_len;
    const int* const sequence = document + (token - at);
    const int number = sequence[at];
    u32 begin = 0, high = at;
    while (begin < high) {
        const u32 middle = (begin + high) / 2;
        if (sequence[middle] < number)
            begin = middle + 1;
        else
            high = middle;
    }
    u32 end = at + 1;
    high = seq_len;
    while (end < high) {
        const u32 middle = (end + high) / 2;
        if (sequence[middle] <= number)
            end = middle + 1;
        else
            high = middle;
    }
    first_key[token] = int(max(begin, at + 1 > window ? at + 1 - window : 0));
    end_query[token] = int(min(end, at + window));
}

}  // namespace nib
