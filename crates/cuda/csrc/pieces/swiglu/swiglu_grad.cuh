// Computes the gradients of one element of SwiGLU. The gate weight's
// gradient is a sum over elements, whose order is defined here.
#pragma once
#include "math/exp.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Number of columns per partial sum of the gate weight's gradient.
constexpr int kPart = 128;

/// The terms that depend only on the gate.
struct GateTerms {
    float silu;
    float slope;  // derivative of silu at the gate
};

/// Computes g·s and s·(1 + g·(1 - s)) for s = sigmoid(g), with every product rounded.
__device__ __forceinline__ GateTerms gate_terms(float gate, float s) {
    const float rest = __fadd_rn(1.0f, __fmul_rn(gate, __fsub_rn(1.0f, s)));
    return {__fmul_rn(gate, s), __fmul_rn(s, rest)};
}

/// The results for one element: dg = da·w·u·silu'(g), du = da·w·silu(g),
/// a = silu(g)·u·w. Products are evaluated from left to right.
struct SwigluGrad {
    float gate, up, a, silu_up;
};

__device__ __forceinline__ SwigluGrad swiglu_grad(GateTerms of, float up, float da, float weight) {
    const float silu_up = __fmul_rn(of.silu, up);
    const float scaled = __fmul_rn(da, weight);
    return {__fmul_rn(__fmul_rn(scaled, up), of.slope), __fmul_rn(scaled, of.silu), __fmul_rn(silu_up, weight), silu_up};
}

/// Returns Σ x·y of kCount adjacent values, where kCount is a power of two.
/// A fused multiply-add sums each pair, and a binary tree adds those sums.
template <int kCount>
__device__ __forceinline__ float dot_of_neighbours(const float (&x)[kCount], const float (&y)[kCount]) {
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) sums[i] = __fmaf_rn(x[2 * i + 1], y[2 * i + 1], __fmul_rn(x[2 * i], y[2 * i]));
#pragma unroll
    for (int left = kCount / 4; left >= 1; left /= 2)
#pragma unroll
        for (int i = 0; i < left; ++i) sums[i] = __fadd_rn(sums[2 * i], sums[2 * i + 1]);
    return sums[0];
}

}  // namespace nib
