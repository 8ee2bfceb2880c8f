// Loads and stores of a matrix whose type, F32 or BF16, is known only at run time. A kernel that uses these
// functions handles every combination of types with one instance.
#pragma once
#include "formats/bf16.cuh"
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Loads eight adjacent values from index `at` on, as F32; from the `left`-th on, values are zeros.
__device__ __forceinline__ F32::Eight load_f32_or_bf16(const u8* from, bool is_bf16, u64 at, int left) {
    const bool whole = left >= 8 && at % 8 == 0;
    if (!is_bf16) return whole ? F32::load<true>(from + at * 4, 8) : F32::load<false>(from + at * 4, left);
    const Bf16::Eight x = whole ? Bf16::load<true>(from + at * 2, 8) : Bf16::load<false>(from + at * 2, left);
    F32::Eight wide;
#pragma unroll
    for (int i = 0; i < 8; ++i) wide.number[i] = Bf16::value(x, i);
    return wide;
}

/// Rounds eight values to BF16, to nearest even.
__device__ __forceinline__ uint4 to_bf16(const F32::Eight& x) {
    return {ptx::pack_bf16(x.number[0], x.number[1]), ptx::pack_bf16(x.number[2], x.number[3]),
            ptx::pack_bf16(x.number[4], x.number[5]), ptx::pack_bf16(x.number[6], x.number[7])};
}

/// Stores eight values as F32 at `to`, which is 16-byte aligned.
__device__ __forceinline__ void store_eight(u8* to, const F32::Eight& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
        ptx::store_16(to + i * 16, {__float_as_uint(x.number[4 * i]), __float_as_uint(x.number[4 * i + 1]), __float_as_uint(x.number[4 * i + 2]),
                                    __float_as_uint(x.number[4 * i + 3])});
}

/// Stores the first `left` of eight adjacent values, rounded to nearest even.
__device__ __forceinline__ void store_f32_or_bf16(u8* to, bool is_bf16, u64 at, int left, const F32::Eight& x) {
    const bool whole = left >= 8 && at % 8 == 0;
    if (is_bf16) {
        const uint4 v = to_bf16(x);
        if (whole) {
            ptx::store_16(to + at * 2, v);
        } else {
            const u32 two[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < left) reinterpret_cast<u16*>(to)[at + i] = u16(two[i / 2] >> (i % 2 * 16));
        }
    } else if (whole) {
        store_eight(to + at * F32::kBytes, x);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left) reinterpret_cast<float*>(to)[at + i] = x.number[i];
    }
}

}  // namespace nib
