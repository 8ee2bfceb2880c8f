// GELU and its gradient, computed element by element and rounded once.
//
// gelu<T, kBackward>: out[i] = h[i] · Φ(h[i]), and da is null. kBackward: out[i] = da[i] · (Φ(h[i]) + h[i] · φ(h[i])). T is Bf16 or
//   F32; buffers are 16-byte aligned. 256 threads per CTA; the grid has ceil(len / (256 · values in 16 bytes)) CTAs, for any len.
#pragma once
#include "formats/plain.cuh"
#include "math/normal_cdf.cuh"

namespace nib {

constexpr int kGeluThreads = 256;

template <typename T, int kCount, bool kBackward>
__device__ __forceinline__ void gelu_of(const u8* h, const u8* da, u8* out, u64 at) {
    using X = Few<T, kCount>;
    const X from = X::load(h + at);
    X grad;
    if constexpr (kBackward) grad = X::load(da + at);
    float made[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float x = from.value(i);
        const float2 normal = normal_cdf(x);
        if constexpr (kBackward)
            made[i] = __fmul_rn(grad.value(i), __fmaf_rn(x, normal.y, normal.x));
        else
            made[i] = __fmul_rn(x, normal.x);
    }
    X::from_f32(made).store(out + at);
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kGeluThreads)
    gelu(const u8* __restrict__ h, const u8* __restrict__ da, u8* __restrict__ out, u64 len) {
    constexpr int kCount = 16 / T::kBytes;
    const u64 units = len / kCount, unit = u64(blockIdx.x) * kGeluThreads + threadIdx.x;
    const u64 left = units * kCount + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && left < len) gelu_of<T, 1, kBackward>(h, da, out, left * T::kBytes);
    if (unit < units) gelu_of<T, kCount, kBackward>(h, da, out, unit * 16);
}

}  // namespace nib
