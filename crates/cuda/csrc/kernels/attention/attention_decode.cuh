// Decoding attention on the CUDA cores: one query per head attends to the keys and values in a cache. Heads have up to 256 elements, F32 or BF16.
//
// attention_decode<T, kSinks>: q is [kv_heads * group * head_dim], k [at least `keys` rows, kv_heads * head_dim], v [at least `keys`
//   rows, kv_heads * value_dim], and out [kv_heads * group * value_dim], all of type T. Query head h attends with head h / group of
//   k and v; scores are multiplied by `scale`. kSinks: the F32 attention sinks `sinks` [heads] are added to each head's softmax sum.
//   256 threads per CTA, one CTA per query head. The weights take 4 * keys bytes of dynamic shared memory. All arithmetic is F32.
//   Each warp computes the score of one key at a time; a fixed tree adds the lanes' partial sums. The sum of the weights and the sums
//   of the values consist of fixed partial sums, which are added in a fixed order, so the result's bits do not depend on the device.
#pragma once
#include "formats/plain.cuh"
#include "math/exp.cuh"
#include "pieces/attention/attention_sink.cuh"
#include "pieces/attention/attention_sizes.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kDecodeThreads = 256;
constexpr int kDecodeWarps = kDecodeThreads / 32;
constexpr int kLargestHead = 256;

/// Returns element i of a buffer as F32.
template <class T>
__device__ __forceinline__ float plain_at(const u8* from, u64 i) {
    return Few<T, 1>::load(from + i * T::kBytes).value(0);
}

/// Combines the values of all threads: first by a fixed tree within each warp, then warp by
/// warp in order. Every thread must call this function, and every thread gets the result.
template <class Combine>
__device__ __forceinline__ float over_cta(float mine, float (&warps)[kDecodeWarps], Combine combine) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) mine = combine(mine, __shfl_xor_sync(0xFFFFFFFF, mine, lanes));
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    float all = warps[0];
#pragma unroll
    for (int i = 1; i < kDecodeWarps; ++i) all = combine(all, warps[i]);
    return all;
}

template <class T, bool kSinks>
__global__ void __launch_bounds__(kDecodeThreads)
    attention_decode(const u8* __restrict__ q, const u8* __restrict__ k, const u8* __restrict__ v, u8* __restrict__ out, u32 keys,
                     u32 group, u32 kv_heads, u32 head_dim, u32 value_dim, float scale,
                     const float* __restrict__ sinks) {
    extern __shared__ float weights[];
    __shared__ float query[kLargestHead];
    __shared__ float parts[kDecodeThreads];
    __shared__ float warps[kDecodeWarps];
    const u32 head = blockIdx.x, thread = threadIdx.x;
    const u64 stride = u64(kv_heads) * head_dim, first = u64(head / group) * head_dim;
    for (u32 c = thread; c < head_dim; c += kDecodeThreads) query[c] = plain_at<T>(q, u64(head) * head_dim + c) * scale;
    __syncthreads();

    float max = -infinity();
    for (u32 key = thread / 32; key < keys; key += kDecodeWarps) {
        float score = 0.0f;
        for (u32 c = thread % 32; c < head_dim; c += 32) score = fmaf(query[c], plain_at<T>(k, key * stride + first + c), score);
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) score += __shfl_xor_sync(0xFFFFFFFF, score, lanes);
        if (thread % 32 == 0) weights[key] = score;
        max = ptx::max_or_nan(max, score);
    }
    max = over_cta(max, warps, [](float a, float b) { return ptx::max_or_nan(a, b); });

    float sum = 0.0f;
    for (u32 key = thread; key < keys; key += kDecodeThreads) {
        const float less = weights[key] - max;
        const float weight = less == less ? exp_of_negative(less) : less;
        weights[key] = weight;
        sum += weight;
    }
    sum = over_cta(sum, warps, [](float a, float b) { return a + b; });
    float less = 1.0f;
    if constexpr (kSinks) less = add_sink(__ldg(sinks + head), max, sum);

    // Each element of the output has `runs` threads; each of them processes every `runs`-th key.
    const u32 width = (value_dim + 31) / 32 * 32, runs = kDecodeThreads / width;
    const u32 run = thread / width, c = thread % width;
    const u64 value_stride = u64(kv_heads) * value_dim, value_first = u64(head / group) * value_dim;
    float value = 0.0f;
    if (run < runs && c < value_dim)
        for (u32 key = run; key < keys; key += runs)
            value = fmaf(weights[key], plain_at<T>(v, key * value_stride + value_first + c), value);
    parts[thread] = value;
    __syncthreads();
    if (thread < value_dim) {
        float all = parts[thread];
        for (u32 i = 1; i < runs; ++i) all += parts[i * width + thread];
        const float mean[1] = {all * (less / sum)};
        Few<T, 1>::from_f32(mean).store(out + (u64(head) * value_dim + thread) * T::kBytes);
    }
}

}  // namespace nib
