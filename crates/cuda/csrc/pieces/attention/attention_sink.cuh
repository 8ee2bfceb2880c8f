// Attention sinks: each query head has an additional score that belongs
// to no key. The score of the sink enters only the sum of the softmax.
#pragma once
#include "math/exp.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Returns e^x for x <= 0; a NaN stays a NaN.
__device__ __forceinline__ float exp_or_nan(float x) {
    const float e = exp_of_negative(x);
    return x == x ? e : x;
}

/// Adds a head's sink to the sum `total` of a query's weights, which are exp(score - max). If the sink is above `max`, it becomes the new
/// `max`. Returns the factor, at most 1, by which the weights must be multiplied because `max` has increased.
__device__ __forceinline__ float add_sink(float sink, float& max, float& total) {
    if (sink > max) {
        const float less = exp_or_nan(max - sink);
        total = __fmaf_rn(total, less, 1.0f);
        max = sink;
        return less;
    }
    total += exp_or_nan(sink - max);
    return 1.0f;
}

/// Returns a row's contribution to the gradient of a head's sink; `delta` is out · dout. The sink
/// is a term of `lse`, so mathematically it is at most `lse`, but rounding may make it larger.
__device__ __forceinline__ float sink_grad(float sink, float lse, float delta) {
    const float below = sink - lse;
    return -exp_or_nan(below > 0.0f ? 0.0f : below) * delta;
}

}  // namespace nib
