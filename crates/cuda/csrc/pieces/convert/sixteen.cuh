// Values of a tile as threads of quantize_units read them from shared memory: sixteen adjacent values of a row
// (`Sixteen`), or sixteen rows of two adjacent columns (`TwoColumns`). BF16 values stay packed in pairs as long as this
// takes less work. A word holds two adjacent values of a row in `Sixteen`, and the values of both columns in one row in `TwoColumns`.
#pragma once
#include "formats/bf16.cuh"
#include "ptx/packed.cuh"

namespace nib {

/// Clamps the magnitudes in both halves of BF16 pairs to those of `limits`.
template <int kWords>
__device__ __forceinline__ void clamp_pairs(u32 (&words)[kWords], u32 limits) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = ptx::clamp_magnitude_bf16x2(words[i], limits);
}

/// Returns the largest magnitude of kCount BF16 pairs, separately for each half. The signs of the result are undefined.
template <int kCount, int kWords>
__device__ __forceinline__ u32 largest_of_pairs(const u32 (&words)[kWords], int first) {
    u32 largest = words[first];
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = ptx::max_magnitude_bf16x2(largest, words[first + i]);
    return largest;
}

/// Returns the magnitude in the low or the high half of a word, as F32 bits.
__device__ __forceinline__ u32 low_magnitude(u32 pair) { return pair << 16 & 0x7FFFFFFF; }
__device__ __forceinline__ u32 high_magnitude(u32 pair) { return pair & 0x7FFF0000; }

/// Sixteen adjacent values of a row.
template <class In>
struct Sixteen;

template <>
struct Sixteen<F32> {
    float number[16];

    template <class Values>
    __device__ __forceinline__ static Sixteen load(Values& values, int u, int sixteenth) {
        Sixteen x;
#pragma unroll
        for (int i = 0; i < 4; ++i) reinterpret_cast<float4*>(x.number)[i] = *reinterpret_cast<const float4*>(values.vector(u, sixteenth * 4 + i));
        return x;
    }
    __device__ __forceinline__ float value(int i) const { return number[i]; }

    /// Returns the F32 bits of the largest magnitude of kCount of the values.
    template <int kCount>
    __device__ __forceinline__ u32 largest(int first) const {
        float largest = number[first];
#pragma unroll
        for (int i = 1; i < kCount; ++i) largest = ptx::max_magnitude(largest, number[first + i]);
        return __float_as_uint(largest) & 0x7FFFFFFF;
    }
};

template <>
struct Sixteen<Bf16> {
    u32 pair[8];

    template <class Values>
    __device__ __forceinline__ static Sixteen load(Values& values, int u, int sixteenth) {
        Sixteen x;
#pragma unroll
        for (int i = 0; i < 2; ++i) reinterpret_cast<uint4*>(x.pair)[i] = *reinterpret_cast<const uint4*>(values.vector(u, sixteenth * 2 + i));
        return x;
    }
    __device__ __forceinline__ float value(int i) const { return __uint_as_float(i % 2 ? pair[i / 2] & 0xFFFF0000 : pair[i / 2] << 16); }

    /// Clamps all sixteen values to the limit.
    __device__ __forceinline__ void clamp(u32 limits) { clamp_pairs(pair, limits); }

    /// Returns the largest magnitude of kPairs pairs, separately for each half.
    template <int kPairs>
    __device__ __forceinline__ u32 largest_pair(int first) const {
        return largest_of_pairs<kPairs>(pair, first);
    }
    template <int kCount>
    __device__ __forceinline__ u32 largest(int first) const {
        const u32 two = largest_pair<kCount / 2>(first / 2);
        return max(low_magnitude(two), high_magnitude(two));
    }
};

/// Loads sixteen rows of two adjacent columns of a tile, starting `first` rows (a multiple of 16) below `from`.
template <class Rows, class Two>
__device__ __forceinline__ void load_rows(const Rows& from, int first, Two (&row)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) row[i] = *reinterpret_cast<const Two*>(from.at[i % 4] + (first + i) / 4 * from.kNext);
}

/// Sixteen rows of two adjacent columns.
template <class In>
struct TwoColumns;

template <>
struct TwoColumns<F32> {
    float2 row[16];

    template <bool kSecond>
    __device__ __forceinline__ float value(int i) const {
        return kSecond ? row[i].y : row[i].x;
    }
    template <int kCount>
    __device__ __forceinline__ void largest(int first, u32 (&bits)[2]) const {
        float2 of = row[first];
#pragma unroll
        for (int i = 1; i < kCount; ++i) of = {ptx::max_magnitude(of.x, row[first + i].x), ptx::max_magnitude(of.y, row[first + i].y)};
        bits[0] = __float_as_uint(of.x) & 0x7FFFFFFF;
        bits[1] = __float_as_uint(of.y) & 0x7FFFFFFF;
    }
};

template <>
struct TwoColumns<Bf16> {
    u32 row[16];

    template <bool kSecond>
    __device__ __forceinline__ float value(int i) const {
        return __uint_as_float(kSecond ? row[i] & 0xFFFF0000 : row[i] << 16);
    }
    /// Clamps each column to its limit.
    __device__ __forceinline__ void clamp(u32 limits) { clamp_pairs(row, limits); }

    /// Returns the largest magnitude of kCount rows, separately for each column.
    template <int kCount>
    __device__ __forceinline__ u32 largest_pair(int first) const {
        return largest_of_pairs<kCount>(row, first);
    }
    template <int kCount>
    __device__ __forceinline__ void largest(int first, u32 (&bits)[2]) const {
        const u32 two = largest_pair<kCount>(first);
        bits[0] = low_magnitude(two);
        bits[1] = high_magnitude(two);
    }
};

/// 32 rows of two adjacent columns that a thread encodes. They are either in shared memory or in the thread's registers.
template <class Rows>
struct SharedColumns {
    const Rows from;

    /// Loads sixteen rows from row `first` on, a multiple of 16.
    template <class Two>
    __device__ __forceinline__ void load(int first, Two (&row)[16]) const {
        load_rows(from, first, row);
    }
};
struct HeldColumns {
    float number[2][32];

    /// Loads sixteen rows of two columns. `first` is known at compile time.
    __device__ __forceinline__ void load(int first, float2 (&row)[16]) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) row[i] = {number[0][first + i], number[1][first + i]};
    }
};

}  // namespace nib
