// One AdamW step in place; every operation is rounded. With g = grad * grad_scale and decay = lr * weight_decay:
//   m = beta1 m + rest1 g; v = beta2 v + rest2 g^2; w = (w - decay w) - lr (m bias1) / (sqrt(v bias2) + eps).
//
// adamw<G, M>: each tensor of the list has w [len] F32, grad [len] of type G, and m and v [len] of type M (Bf16 or F32). m and v are
//   rounded to nearest even when they are written, but used unrounded. `control` has the step's scalars (`Control` of nibble-core);
//   if STOP is set, nothing changes. Tensor i has ceil(len / 2048) CTAs, from first_cta[i] to the next tensor's first CTA.
//   256 threads per CTA; the grid has the CTAs of all tensors; any len except 0; buffers are 16-byte aligned.
#pragma once
#include "formats/plain.cuh"
#include "pieces/step/control.cuh"
#include "pieces/step/tensor_list.cuh"

namespace nib {

constexpr int kAdamThreads = 256;
constexpr int kAdamUnits = 2;  // number of units per thread, whose loads are all in flight
constexpr int kAdamCount = 4;  // values per unit: 16 bytes of F32

/// The constants that are the same in all steps.
struct AdamArg {
    float beta1, rest1;
    float beta2, rest2;
    float eps;
};

/// The buffers of one tensor.
struct AdamTensor {
    u8* w;
    const u8* grad;
    u8* m;
    u8* v;
    u64 len;
    float weight_decay;
    u32 first_cta;
};

/// As many tensors as fit into the arguments of one launch.
struct AdamTensors {
    AdamTensor tensor[kListedTensors];
    u64 count;
};

/// The scalars of a step.
struct AdamStep {
    float lr, bias1, bias2, grad_scale, decay;
};

template <typename G, typename M, int kCount>
struct AdamUnit {
    Few<F32, kCount> w;
    Few<G, kCount> grad;
    Few<M, kCount> m, v;

    __device__ __forceinline__ static AdamUnit load(const u8* w, const u8* grad, const u8* m, const u8* v, u64 at) {
        return {Few<F32, kCount>::load_written(w + at * 4), Few<G, kCount>::load(grad + at * G::kBytes),
                Few<M, kCount>::load_written(m + at * M::kBytes), Few<M, kCount>::load_written(v + at * M::kBytes)};
    }

    __device__ __forceinline__ void step(u8* to_w, u8* to_m, u8* to_v, u64 at, const AdamArg& arg, const AdamStep& s) const {
        float new_w[kCount], new_m[kCount], new_v[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float g = __fmul_rn(grad.value(i), s.grad_scale), old = w.value(i);
            new_m[i] = __fadd_rn(__fmul_rn(arg.beta1, m.value(i)), __fmul_rn(arg.rest1, g));
            new_v[i] = __fadd_rn(__fmul_rn(arg.beta2, v.value(i)), __fmul_rn(arg.rest2, __fmul_rn(g, g)));
            const float below = __fadd_rn(__fsqrt_rn(__fmul_rn(new_v[i], s.bias2)), arg.eps);
            const float above = __fmul_rn(s.lr, __fmul_rn(new_m[i], s.bias1));
            new_w[i] = __fsub_rn(__fsub_rn(old, __fmul_rn(s.decay, old)), __fdiv_rn(above, below));
        }
        Few<F32, kCount>::from_f32(new_w).store(to_w + at * 4);
        Few<M, kCount>::from_f32(new_m).store(to_m + at * M::kBytes);
        Few<M, kCount>::from_f32(new_v).store(to_v + at * M::kBytes);
    }
};

template <typename G, typename M>
__global__ void __launch_bounds__(kAdamThreads)
    adamw(const __grid_constant__ AdamTensors tensors, const float* __restrict__ control, const __grid_constant__ AdamArg arg) {
    // Reads LR, BIAS1, BIAS2, GRAD_SCALE and STOP of `Control`.
    if (__ldg(control + kStop) != 0.0f) return;
    const u32 number = tensor_of_cta(tensors);
    const auto& [w, grad, m, v, len, weight_decay, first_cta] = tensors.tensor[number];
    const u32 last_cta = (number + 1 < tensors.count ? tensors.tensor[number + 1].first_cta : gridDim.x) - 1;
    const float lr = __ldg(control + kLr);
    const AdamStep step = {lr, __ldg(control + kBias1), __ldg(control + kBias2), __ldg(control + kGradScale), __fmul_rn(lr, weight_decay)};
    using Unit = AdamUnit<G, M, kAdamCount>;
    const u64 units = len / kAdamCount;
    const u64 first = u64(blockIdx.x - first_cta) * (kAdamThreads * kAdamUnits) + threadIdx.x;
    const u64 left = units * kAdamCount + threadIdx.x;
    if (blockIdx.x == last_cta && left < len)
        AdamUnit<G, M, 1>::load(w, grad, m, v, left).step(w, m, v, left, arg, step);
    if (first + (kAdamUnits - 1) * kAdamThreads < units) {
        Unit unit[kAdamUnits];
#pragma unroll
        for (int i = 0; i < kAdamUnits; ++i) unit[i] = Unit::load(w, grad, m, v, (first + i * kAdamThreads) * kAdamCount);
#pragma unroll
        for (int i = 0; i < kAdamUnits; ++i) unit[i].step(w, m, v, (first + i * kAdamThreads) * kAdamCount, arg, step);
        return;
    }
    for (u64 unit = first; unit < units && unit < first + kAdamUnits * kAdamThreads; unit += kAdamThreads)
        Unit::load(w, grad, m, v, unit * kAdamCount).step(w, m, v, unit * kAdamCount, arg, step);
}

}  // namespace nib
