// FP8 with one scale per block of 128, per row, per column, or per tensor. The CPU
// implementation of scales per row, per column and per tensor is crates/formats/src/fp8.rs.
#pragma once
#include "formats/block_format.cuh"

namespace nib {

/// Blocks of 128 or of 128 x 128 values, whose scale is F32 or a power of two. `Whole` and `E`
/// are two implementations of the same element, from small_elements.cuh and from e4m3.cuh.
template <class Whole, class E, bool kF32>
struct Fp8Block : OneFactor<Whole> {
    static constexpr int kBlock = 128, kPart = 128, kScaleBytes = kF32 ? 4 : 1;
    static constexpr bool kTiles = true;

    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg rule, TensorInverse) {
        if constexpr (kF32) {
            const auto scale = amax_scale<E>(amax);
            return {__float_as_uint(scale.stored), scale.inverse};
        } else {
            return power_of<Whole>(amax, rule);
        }
    }
    __device__ __forceinline__ static float multiplier(u32 record, int) { return kF32 ? __uint_as_float(record) : e8m0_decode(record); }
};

using E4m3Block = Fp8Block<WholeE4m3, E4m3, true>;
using E4m3BlockPower = Fp8Block<WholeE4m3, E4m3, false>;
using E5m2Block = Fp8Block<WholeE5m2, E5m2, true>;
using E5m2BlockPower = Fp8Block<WholeE5m2, E5m2, false>;

NIB_UNIT_FORMAT(E4m3, Amax, E4m3Block)
NIB_UNIT_FORMAT(E4m3, AnyOther, E4m3BlockPower)
NIB_UNIT_FORMAT(E5m2, Amax, E5m2Block)
NIB_UNIT_FORMAT(E5m2, AnyOther, E5m2BlockPower)

/// One scale per row or per column, which is F32 or a power of two.
template <class E, bool kF32>
struct Fp8Line : OneFactor<E> {
    static constexpr int kBlock = 64, kPart = 64, kScaleBytes = kF32 ? 4 : 1;
    static constexpr bool kLine = true;

    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg rule, TensorInverse) {
        if constexpr (!kF32) return power_of<E>(amax, rule);
        if (amax >= kInfinityBits) return Scaled::nan(kNanBits);
        const float largest = fmaxf(__uint_as_float(amax), 1e-12f);
        const float inverse = __double2float_rn(__ddiv_rn(double(__uint_as_float(E::kMaxBits)), double(largest)));
        return {__float_as_uint(__frcp_rn(inverse)), inverse};
    }
    __device__ __forceinline__ static float multiplier(u32 record, int) { return kF32 ? __uint_as_float(record) : e8m0_decode(record); }
};

using E4m3Line = Fp8Line<WholeE4m3, true>;
using E4m3LinePower = Fp8Line<WholeE4m3, false>;
using E5m2Line = Fp8Line<WholeE5m2, true>;
using E5m2LinePower = Fp8Line<WholeE5m2, false>;

NIB_UNIT_FORMAT(E4m3Row, Amax, E4m3Line, NearestEven)
NIB_UNIT_FORMAT(E4m3Row, AnyOther, E4m3LinePower, NearestEven)
NIB_UNIT_FORMAT(E5m2Row, Amax, E5m2Line, NearestEven)
NIB_UNIT_FORMAT(E5m2Row, AnyOther, E5m2LinePower, NearestEven)

/// One scale per tensor. Blocks of 128 values store no scale; they
/// exist only so that non-zero and non-finite blocks can be counted.
template <class E>
struct Fp8Tensor : OneFactor<E> {
    static constexpr int kBlock = 128, kPart = 128, kScaleBytes = 0;
    static constexpr bool kTensor = true, kTiles = true;

    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg, TensorInverse tensor) {
        const bool nan = amax >= kInfinityBits || tensor.inverse != tensor.inverse;
        return nan ? Scaled::nan(0) : Scaled{0, tensor.inverse};
    }
    __device__ __forceinline__ static float multiplier(u32, int) { return 1.0f; }
};

using E4m3Tensor = Fp8Tensor<WholeE4m3>;
using E5m2Tensor = Fp8Tensor<WholeE5m2>;

NIB_UNIT_FORMAT(E4m3Tensor, AnyOther, E4m3Tensor, NearestEven)
NIB_UNIT_FORMAT(E5m2Tensor, AnyOther, E5m2Tensor, NearestEven)

}  // namespace nib
