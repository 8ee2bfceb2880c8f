// The random Hadamard transform that precedes a quantization, bit-identical to crates/formats/src/hadamard.rs: signs, F32
// butterflies with strides 1, 2, 4 ..., and one multiplication by 1 / sqrt(len). `HadamardArg` is a kernel parameter
// (src/launch/args.rs).
//
// Kernels that also quantize hold 64 values per lane (pieces/convert/hadamard_unit.cuh) and use `flip`, `butterflies` and
// `scale_exactly`. Signs depend only on the position along the transform, so a thread whose columns stay the same generates its
// signs once.
//
// Kernels that only transform (kernels/convert/hadamard.cuh) hold fewer values
// per lane and exchange more between lanes; they use `hadamard_across`.
//
// Down the columns, a sign depends on the row's position in its group, counted from `first`; the signs of eight rows are one byte (`signs_of_eight_rows`).
// A transform down the columns may make padding rows non-zero, up to the end of their transform block. The codes of such rows are
// counted like other codes, and use the random bits of row id 0 (or of the row's index if there are no groups).
#pragma once
#include "formats/bf16.cuh"
#include "math/philox.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kHadamardTile = 128;  // tile height and width

/// Returns the position of row `row` in its group. `start` has the first row of each of
/// `num_groups` groups, then the end of the last group (null: all rows are one group).
__device__ __forceinline__ u32 position_in_group(const int* __restrict__ start, int num_groups, int row) {
    if (start == nullptr) return row;
    int low = 0, high = num_groups;  // invariant: the last start that is not above `row` is in [low, high]
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (__ldg(start + middle) <= row) low = middle;
        else high = middle - 1;
    }
    return row - __ldg(start + low);
}

struct HadamardArg {
    Stream stream;  // stream of the random signs
    u32 len;        // length of a transform block: 16, 32, 64 or 128
    float factor;
    u32 first;           // position that the first row of each group has in the whole group; 0 along rows
    const u32* step_at;  // the step that selects the random signs; null: the stream's own step

    /// Returns block `q` of random bits at the current step.
    __device__ __forceinline__ uint4 block(u64 q) const {
        return stream.at(step_at == nullptr ? stream.step : __ldg(step_at)).block(q);
    }

    /// Returns eight bits; bit i says whether the value at position k + i is negated. k is a multiple of 8.
    __device__ __forceinline__ u32 signs_of_eight(u64 k) const {
        const uint4 bits = block(k / 8);
        const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
        u32 signs = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) signs |= (words[i] >> 15 & 1) << (2 * i) | words[i] >> 31 << (2 * i + 1);
        return signs;
    }

    /// Returns the signs of eight BF16 values from position k on, in the sign bits of the values in four words.
    __device__ __forceinline__ uint4 sign_bits_of_eight(u64 k) const {
        constexpr u32 kSigns = 0x80008000;
        const uint4 bits = block(k / 8);
        return {bits.x & kSigns, bits.y & kSigns, bits.z & kSigns, bits.w & kSigns};
    }

    /// Returns the sign bits of eight rows from `row` on, two rows per word, for a transform
    /// down the columns. In a transform block without a valid row, the sign bits are zeros.
    template <int kLen>
    __device__ __forceinline__ uint4 sign_bits_of_eight_rows(int row, int rows, const int* __restrict__ row_id,
                                                             const int* __restrict__ start, int num_groups) const {
        if (!block_counts(row, kLen, rows, row_id)) return {0, 0, 0, 0};
        return sign_bits_of_eight(first + position_in_group(start, num_groups, row));
    }

    /// Returns the signs of eight rows from `row` on, one bit each, for a transform down the columns. In a
    /// transform block without a valid row (by row_id and `rows`), the signs are zeros, so that the block's
    /// zeros stay +0. A group's valid rows precede its padding, so testing the block's first row is enough.
    __device__ __forceinline__ u8 signs_of_eight_rows(int row, int rows, const int* __restrict__ row_id,
                                                      const int* __restrict__ start, int num_groups) const {
        return block_counts(row, len, rows, row_id) ? u8(signs_of_eight(first + position_in_group(start, num_groups, row))) : 0;
    }

private:
    /// Returns whether the transform block of `row` has a valid row.
    __device__ __forceinline__ static bool block_counts(int row, int len, int rows, const int* __restrict__ row_id) {
        const int first = row & ~(len - 1);
        return first < rows && (row_id == nullptr || __ldg(row_id + first) >= 0);
    }
};

/// Converts eight values to F32.
template <class In>
__device__ __forceinline__ F32::Eight widen(const typename In::Eight& x) {
    F32::Eight wide;
#pragma unroll
    for (int i = 0; i < 8; ++i) wide.number[i] = In::value(x, i);
    return wide;
}

/// Performs the butterflies of strides 1, 2, 4 ... that are below both `kCount` and `len`.
template <int kCount>
__device__ __forceinline__ void butterflies(float (&x)[kCount], u32 len) {
#pragma unroll
    for (int stride = 1; stride < kCount; stride *= 2) {
        if (stride >= 16 && stride >= len) break;  // every length is at least 16
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i & stride) continue;
            const float a = x[i], b = x[i + stride];
            x[i] = __fadd_rn(a, b);
            x[i + stride] = __fsub_rn(a, b);
        }
    }
}

/// The last step of the transform: multiplies values that came from BF16 by `factor`. If the factor
/// is a power of two (lengths 16 and 64), this function only returns it, and the caller multiplies
/// by it together with another power of two. The caller's multiplication is exact because the
/// values are multiples of 2^-133. For other lengths, this function multiplies and returns 1.
template <int kLen, int kCount>
__device__ __forceinline__ float scale_exactly(float (&x)[kCount], float factor) {
    if constexpr (kLen == 16 || kLen == 64) {
        return factor;
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = __fmul_rn(x[i], factor);
        return 1;
    }
}

__device__ __forceinline__ void flip(Bf16::Eight& x, const uint4& signs) {
    x = {{x.word[0] ^ signs.x, x.word[1] ^ signs.y, x.word[2] ^ signs.z, x.word[3] ^ signs.w}};
}
__device__ __forceinline__ void flip(F32::Eight& x, const uint4& signs) {
    const u32 words[4] = {signs.x, signs.y, signs.z, signs.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        x.number[i] = __uint_as_float(__float_as_uint(x.number[i]) ^ (i % 2 ? words[i / 2] & 0x80000000 : words[i / 2] << 16));
}

/// Transforms blocks of `len` values. The caller has already flipped the signs of the values, and later multiplies the result by the
/// factor. A lane holds kCount values; the lane `distance` further holds the next kCount values. All lanes of the warp call this function.
template <int kCount>
__device__ __forceinline__ void hadamard_across(float (&x)[kCount], u32 lane, u32 distance, u32 len) {
    butterflies(x, len);
    for (u32 held = kCount; held < len; held *= 2, distance *= 2) {
        // The upper lane's result is the value of its partner minus its own value.
        const float own = lane & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = __fmaf_rn(x[i], own, __shfl_xor_sync(kAllLanes, x[i], distance));
    }
}

/// Transforms blocks of `len` values, and multiplies the result by the factor.
template <int kCount>
__device__ __forceinline__ void hadamard_across(float (&x)[kCount], u32 lane, u32 distance, const HadamardArg& arg) {
    hadamard_across(x, lane, distance, arg.len);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __fmul_rn(x[i], arg.factor);
}

}  // namespace nib
