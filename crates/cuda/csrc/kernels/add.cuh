// a + b, in F32, rounded once.
//
// add<T>: out[i] = a[i] + b[i]. T is Bf16 or F32; buffers on 16 bytes.
//   256 threads; grid ceil(len / (4 · 256 · numbers in 16 bytes)); any len.
#pragma once
#include "formats/plain.cuh"

namespace nib {

constexpr int kAddThreads = 256;
constexpr int kAddUnits = 4;  // a thread's, so many loads of each term in flight

template <typename T, int kCount>
__device__ __forceinline__ Few<T, kCount> add_few(const Few<T, kCount>& a, const Few<T, kCount>& b) {
    float sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = a.value(i) + b.value(i);
    return Few<T, kCount>::from_f32(sum);
}

template <typename T>
__global__ void __launch_bounds__(kAddThreads)
    add(const u8* __restrict__ a, const u8* __restrict__ b, u8* __restrict__ out, u64 len) {
    using X = Few<T, 16 / T::kBytes>;
    constexpr int kCount = 16 / T::kBytes;
    const u64 units = len / kCount;
    const u64 first = u64(blockIdx.x) * (kAddThreads * kAddUnits) + threadIdx.x;
    const u64 left = units * kCount + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && left < len) {
        using One = Few<T, 1>;
        const u64 at = left * T::kBytes;
        add_few<T, 1>(One::load(a + at), One::load(b + at)).store(out + at);
    }
    if (first + (kAddUnits - 1) * kAddThreads < units) {
        X x[kAddUnits], y[kAddUnits];
#pragma unroll
        for (int i = 0; i < kAddUnits; ++i) {
            x[i] = X::load(a + (first + i * kAddThreads) * 16);
            y[i] = X::load(b + (first + i * kAddThreads) * 16);
        }
#pragma unroll
        for (int i = 0; i < kAddUnits; ++i) add_few<T, kCount>(x[i], y[i]).store(out + (first + i * kAddThreads) * 16);
        return;
    }
    for (u64 unit = first; unit < units && unit < first + kAddUnits * kAddThreads; unit += kAddThreads)
        add_few<T, kCount>(X::load(a + unit * 16), X::load(b + unit * 16)).store(out + unit * 16);
}

}  // namespace nib
