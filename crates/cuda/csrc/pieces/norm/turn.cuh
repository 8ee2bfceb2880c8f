// Rotates pairs by their angles, as rotary position embeddings do: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin, every product rounded.
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"

namespace nib {

/// Returns the position of row r in its document: r mod seq_len, minus the index of the document's first row
/// within the sequence. Sequences have seq_len rows. If `starts` is null, each sequence is one document.
struct Positions {
    const int* starts;  // [rows]; clamped to 0 .. r mod seq_len
    u32 seq_len;
    Divider by_seq_len;
    u32 unused;

    __device__ __forceinline__ u32 of(u32 row) const {
        const u32 at = row - by_seq_len.divide(row) * seq_len;
        return starts == nullptr ? at : at - min(u32(max(__ldg(starts + row), 0)), at);
    }
};

/// Loads kCount values of a table.
template <int kCount>
__device__ __forceinline__ void load_angles(const float* from, float (&to)[kCount]) {
    constexpr int kEach = kCount < 4 ? kCount : 4;
#pragma unroll
    for (int i = 0; i < kCount; i += kEach) {
        const Few<F32, kEach> few = Few<F32, kEach>::load(from + i);
#pragma unroll
        for (int k = 0; k < kEach; ++k) to[i + k] = few.value(k);
    }
}

/// The cosines and sines of kCount adjacent pairs at one position.
template <int kCount>
struct Angles {
    float cos[kCount], sin[kCount];

    /// The sine of a pair is stored `sines` elements after its cosine. sign: 1 to rotate, -1 to rotate back.
    __device__ __forceinline__ void load(const float* cosines, u32 sines, float sign) {
        load_angles<kCount>(cosines, cos);
        load_angles<kCount>(cosines + sines, sin);
#pragma unroll
        for (int k = 0; k < kCount; ++k) sin[k] = __fmul_rn(sign, sin[k]);
    }

    /// Rotates pair k in place.
    __device__ __forceinline__ void turn(int k, float& x0, float& x1) const {
        const float y0 = __fsub_rn(__fmul_rn(x0, cos[k]), __fmul_rn(x1, sin[k]));
        x1 = __fadd_rn(__fmul_rn(x1, cos[k]), __fmul_rn(x0, sin[k]));
        x0 = y0;
    }
};

}  // namespace nib
