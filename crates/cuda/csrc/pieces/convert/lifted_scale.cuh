// The scale of a block that is lifted to E4M3, for every element with a lift. The CPU implementation is crates/formats/src/lift.rs.
#pragma once
#include "formats/e8m0.cuh"

namespace nib {

constexpr int kLifted = 128;  // values of a line that share a scale after the lift, and lines of a 2-D block

/// log2 of the ratio between the largest source scale and the lifted scale.
/// It is chosen so that the largest possible value still fits in E4M3.
template <class E>
__host__ __device__ constexpr int lift_headroom() {
    int octaves = 0;
    for (float largest = 2.0f * E::kMax; largest <= 448.0f; largest *= 2.0f) ++octaves;
    return octaves;
}

/// Returns the scale of the lifted values. The argument
/// `above_largest` is one plus the largest of the source scales.
template <class E>
__device__ __forceinline__ int lifted_scale(u32 above_largest) {
    return max(int(above_largest) - 1 - lift_headroom<E>(), 0);
}

}  // namespace nib
