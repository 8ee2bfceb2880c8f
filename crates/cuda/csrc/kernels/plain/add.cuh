// Computes a + b in F32, rounded once. Optionally a third term is then added, and the sum is rounded again.
//
// add<T, kPlus>: out[i] = a[i] + b[i], rounded; kPlus: plus[i] is then added to out[i], and the sum is rounded. T is Bf16 or F32;
//   buffers are 16-byte aligned. 256 threads per CTA; the grid has ceil(len / (4 · 256 · values in 16 bytes)) CTAs, for any len.
#pragma once
#include "formats/plain.cuh"

namespace nib {

constexpr int kAddThreads = 256;
constexpr int kAddUnits = 4;  // number of units per thread, whose loads are all in flight

/// kCount adjacent values of each term, at offset `at` bytes in its buffer.
template <typename T, int kCount, bool kPlus>
struct Terms {
    using X = Few<T, kCount>;
    X a, b, plus;

    __device__ __forceinline__ void load(const u8* from_a, const u8* from_b, const u8* from_plus, u64 at) {
        a = X::load(from_a + at);
        b = X::load(from_b + at);
        if constexpr (kPlus) plus = X::load(from_plus + at);
    }

    __device__ __forceinline__ X sum() const {
        const X two = add_few(a, b);
        if constexpr (kPlus) return add_few(two, plus);
        return two;
    }
};

template <typename T, bool kPlus>
__global__ void __launch_bounds__(kAddThreads)
    add(const u8* __restrict__ a, const u8* __restrict__ b, const u8* __restrict__ plus, u8* __restrict__ out, u64 len) {
    constexpr int kCount = 16 / T::kBytes;
    using Unit = Terms<T, kCount, kPlus>;
    const u64 units = len / kCount;
    const u64 first = u64(blockIdx.x) * (kAddThreads * kAddUnits) + threadIdx.x;
    const u64 left = units * kCount + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && left < len) {
        Terms<T, 1, kPlus> one;
        one.load(a, b, plus, left * T::kBytes);
        one.sum().store(out + left * T::kBytes);
    }
    if (first + (kAddUnits - 1) * kAddThreads < units) {
        Unit x[kAddUnits];
#pragma unroll
        for (int i = 0; i < kAddUnits; ++i) x[i].load(a, b, plus, (first + i * kAddThreads) * 16);
#pragma unroll
        for (int i = 0; i < kAddUnits; ++i) x[i].sum().store(out + (first + i * kAddThreads) * 16);
        return;
    }
    for (u64 unit = first; unit < units && unit < first + kAddUnits * kAddThreads; unit += kAddThreads) {
        Unit x;
        x.load(a, b, plus, unit * 16);
        x.sum().store(out + unit * 16);
    }
}

}  // namespace nib
