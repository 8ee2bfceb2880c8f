// Sinks: a score of each query head that no key has. It is a term of the sum of the softmax, and nothing else.
#pragma once
#include "math/exp.cuh"
#include "ptx/types.cuh"

namespace nib {

/// e^x for x <= 0; a NaN stays one.
__device__ __forceinline__ float exp_or_nan(float x) {
    const float e = exp_of_negative(x);
    return x == x ? e : x;
}

/// Adds a head's sink to the sum `total` of a query's weights, which are exp(score - max). If the sink is above `max`, it takes its place. Gives the
/// factor of the weights, 1 or less: what they are relative to has grown so.
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

/// What a row adds to the gradient of a head's sink; `delta`: out · dout. The sink is a term of `lse`, but rounding may make it the larger one.
__device__ __forceinline__ float sink_grad(float sink, float lse, float delta) {
    const float below = sink - lse;
    return -exp_or_nan(below > 0.0f ? 0.0f : below) * delta;
}

}  // namespace nib
