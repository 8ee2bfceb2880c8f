// a + b, in F32, rounded once.
//
// add<T, U>: out[i] = a[i] + b[i]; of a and out T, of b U: Bf16 or F32. Buffers on 16 bytes.
//   256 threads; grid ceil(len / (4 · 256 · numbers of the wider type in 16 bytes)); any len.
#pragma once
#include "formats/plain.cuh"

namespace nib {

constexpr int kAddThreads = 256;
constexpr int kAddUnits = 4;  // a thread's, so many loads of each term in flight

template <typename T, typename U, int kCount>
__device__ __forceinline__ Few<T, kCount> add_few(const Few<T, kCount>& a, const Few<U, kCount>& b) {
    float sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = a.value(i) + b.value(i);
    return Few<T, kCount>::from_f32(sum);
}

template <typename T, typename U>
__global__ void __launch_bounds__(kAddThreads)
    add(const u8* __restrict__ a, const u8* __restrict__ b, u8* __restrict__ out, u64 len) {
    constexpr int kCount = 16 / (T::kBytes > U::kBytes ? T::kBytes : U::kBytes);
    using X = Few<T, kCount>;
    using Y = Few<U, kCount>;
    const u64 units = len / kCount;
    const u64 first = u64(blockIdx.x) * (kAddThreads * kAddUnits) + threadIdx.x;
    const u64 left = units * kCount + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && left < len)
        add_few<T, U>(Few<T, 1>::load(a + left * T::kBytes), Few<U, 1>::load(b + left * U::kBytes)).store(out + left * T::kBytes);
    if (first + (kAddUnits - 1) * kAddThreads < units) {
        X x[kAddUnits];
        Y y[kAddUnits];
#pragma unroll
        for (int i = 0; i < kAddUnits; ++i) {
            x[i] = X::load(a + (first + i * kAddThreads) * X::kBytes);
            y[i] = Y::load(b + (first + i * kAddThreads) * Y::kBytes);
        }
#pragma unroll
        for (int i = 0; i < kAddUnits; ++i) add_few<T, U>(x[i], y[i]).store(out + (first + i * kAddThreads) * X::kBytes);
        return;
    }
    for (u64 unit = first; unit < units && unit < first + kAddUnits * kAddThreads; unit += kAddThreads)
        add_few<T, U>(X::load(a + unit * X::kBytes), Y::load(b + unit * Y::kBytes)).store(out + unit * X::kBytes);
}

}  // namespace nib
