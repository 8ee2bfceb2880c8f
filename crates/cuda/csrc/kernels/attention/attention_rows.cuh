// Computes two numbers per query, lse · factor and delta, that the backward pass of attention needs besides q and dout.
//
// attention_rows<T, kLanes, kEach, kSinks>: reads out and dout [t, heads · value_dim] of type T, and lse [t,
//   heads]. Writes two F32 buffers [sequences][heads][padded]: lse · factor, which is +infinity past the
//   sequence's end (so that P is 0 there), and delta = Σ out · dout, which is 0 past the sequence's end.
//   kSinks: also reads the F32 attention sinks `sinks` [heads], and writes to `dsinks` [t,
//   heads], F32, each row's contribution to the gradient of the sinks, -exp(sink - lse) · delta.
//   256 threads per CTA; the grid has ceil(sequences · padded · heads · kLanes / 256) CTAs. kLanes lanes read a head's
//   row, kEach elements at a time. kLanes = 32 with kEach = 1 supports any value_dim; all other pairs need value_dim =
//   kLanes · kEach and 16-byte aligned rows. Each lane sums its elements in order, and a tree adds the lanes' sums.
#pragma once
#include "pieces/attention/attention_tile.cuh"

namespace nib {

template <class T, int kLanes, int kEach, bool kSinks>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_rows(const u8* __restrict__ out, const u8* __restrict__ dout, const float* __restrict__ lse,
                   float* __restrict__ lse_rows, float* __restrict__ delta_rows, float factor, AttentionSizes sizes,
                   const float* __restrict__ sinks, float* __restrict__ dsinks) {
    const u64 at = u64(blockIdx.x) * (kAttentionThreads / kLanes) + threadIdx.x / kLanes;
    const u32 line = u32(at / sizes.heads), head = u32(at % sizes.heads);
    const int sequence = int(line / sizes.padded), row = int(line % sizes.padded);
    const bool inside = sequence < sizes.sequences;
    float delta = 0.0f, log_sum = infinity();
    if (inside && row < sizes.seq_len) {
        const u64 start = element_of(sizes, sizes.heads, sizes.value_dim, sequence, row, head);
        for (int d = threadIdx.x % kLanes * kEach; d < sizes.value_dim; d += kLanes * kEach) {
            const auto x = Few<T, kEach>::load(out + (start + d) * T::kBytes);
            const auto y = Few<T, kEach>::load(dout + (start + d) * T::kBytes);
#pragma unroll
            for (int i = 0; i < kEach; ++i) delta = __fmaf_rn(x.value(i), y.value(i), delta);
        }
        log_sum = lse[u64(u32(sequence * sizes.seq_len + row)) * sizes.heads + head] * factor;
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) delta += __shfl_xor_sync(kAllLanes, delta, lanes);
    if (inside && threadIdx.x % kLanes == 0) {
        const u64 to = (u64(u32(sequence)) * sizes.heads + head) * sizes.padded + row;
        lse_rows[to] = log_sum;
        delta_rows[to] = delta;
        if constexpr (kSinks) {
            if (row < sizes.seq_len) {
                const u64 at_head = u64(u32(sequence * sizes.seq_len + row)) * sizes.heads + head;
                dsinks[at_head] = sink_grad(__ldg(sinks + head), lse[at_head], delta);
            }
        }
    }
}

}  // namespace nib
