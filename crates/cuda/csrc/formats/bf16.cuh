// Loads and reduces eight adjacent BF16 or F32 values at a time. Each struct (one per type) has the following members.
//   Eight: eight values as they are loaded from memory.
//   Magnitudes: the largest |x| of each of eight columns, as bits whose integer order is that of the magnitudes; NaN compares greater than
//     infinity, and infinity compares greater than all finite values.
//   number: loads one value from memory and converts it to F32.
//   block_maxima: returns the largest |x| along the row, over adjacent groups of eight values and over lanes, as F32 bits.
#pragma once
#include "ptx/global.cuh"
#include "ptx/packed.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr u32 kAllLanes = 0xFFFFFFFF;

/// Returns the factor of value i of eight values. Either all values have a common factor, or each has its own.
__device__ __forceinline__ float inverse_of(float inverse, int) { return inverse; }
__device__ __forceinline__ float inverse_of(const float (&inverse)[8], int i) { return inverse[i]; }

struct Bf16 {
    static constexpr int kBytes = 2;
    static constexpr int kWords = 4;

    /// Value 2i is the low half of word i.
    struct Eight {
        u32 word[kWords];
    };

    struct Magnitudes {
        u32 word[kWords];
    };

    __device__ __forceinline__ static Eight zeros() { return {{0, 0, 0, 0}}; }

    /// Loads one value and converts it to F32.
    __device__ __forceinline__ static float number(const void* from) {
        return __uint_as_float(u32(*static_cast<const u16*>(from)) << 16);
    }

    /// Loads eight values; from the `left`-th on, values are zeros. kAligned:
    /// `from` is 16-byte aligned, and either all eight values exist or none exists.
    template <bool kAligned>
    __device__ __forceinline__ static Eight load(const void* from, int left) {
        Eight x = zeros();
        if constexpr (kAligned) {
            if (left > 0) {
                const uint4 v = ptx::load_16(from);
                x = {{v.x, v.y, v.z, v.w}};
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < left) x.word[i / 2] |= u32(static_cast<const u16*>(from)[i]) << (i % 2 * 16);
        }
        return x;
    }

    /// Loads eight values from 16-byte aligned shared memory.
    __device__ __forceinline__ static Eight load_shared(const u8* from) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        return {{v.x, v.y, v.z, v.w}};
    }

    __device__ __forceinline__ static float value(const Eight& x, int i) {
        const u32 word = x.word[i / 2];
        return __uint_as_float(i % 2 ? word & 0xFFFF0000 : word << 16);
    }

    __device__ __forceinline__ static Magnitudes magnitudes(const Eight& x) {
        Magnitudes m;
#pragma unroll
        for (int i = 0; i < kWords; ++i) m.word[i] = x.word[i] & 0x7FFF7FFF;
        return m;
    }

    __device__ __forceinline__ static u32 larger(u32 a, u32 b) { return ptx::max_u16x2(a, b); }

    /// Returns the largest magnitude of column `col` over kLines rows of magnitudes, as F32 bits.
    template <int kLines>
    __device__ __forceinline__ static u32 column_max(const u32 (*lines)[kWords * 16], int col) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < kLines; ++i) {
            const u32 m = reinterpret_cast<const u16*>(lines[i])[col];
            largest = m > largest ? m : largest;
        }
        return largest << 16;
    }

    /// Returns the largest even-numbered magnitude in the low half of a
    /// word, and the largest odd-numbered magnitude in the high half.
    __device__ __forceinline__ static u32 fold(const Magnitudes& m) {
        return larger(larger(m.word[0], m.word[1]), larger(m.word[2], m.word[3]));
    }

    /// Returns the F32 bits of the largest magnitude of 64 values.
    __device__ __forceinline__ static u32 largest_bits(const Eight (&x)[8]) {
        u32 largest = fold(magnitudes(x[0]));
#pragma unroll
        for (int i = 1; i < 8; ++i) largest = larger(largest, fold(magnitudes(x[i])));
        return fold_two(largest, largest) << 16;
    }

    /// Combines two results of `fold` in one word: the maximum of `a` in the low half, and the maximum of `b` in the high half.
    __device__ __forceinline__ static u32 fold_two(u32 a, u32 b) {
        return larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }

    /// For every kTogether adjacent entries of x, returns the largest magnitude over `kLanes` adjacent lanes, as F32 bits.
    template <int kTogether, int kLanes, int kCount, int kHeld>
    __device__ __forceinline__ static void block_maxima(const Eight (&x)[kCount], u32 (&bits)[kHeld]) {
        static_assert(kHeld * kTogether == kCount);
        u32 largest[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            largest[i] = fold(magnitudes(x[i * kTogether]));
#pragma unroll
            for (int j = 1; j < kTogether; ++j) largest[i] = larger(largest[i], fold(magnitudes(x[i * kTogether + j])));
        }
#pragma unroll
        for (int i = 0; i < kHeld; i += 2) {
            u32 two = fold_two(largest[i], largest[i + 1 < kHeld ? i + 1 : i]);
#pragma unroll
            for (int lane = 1; lane < kLanes; lane *= 2) two = larger(two, __shfl_xor_sync(kAllLanes, two, lane));
            bits[i] = two << 16;
            if (i + 1 < kHeld) bits[i + 1] = two & 0xFFFF0000;
        }
    }

    /// Computes the largest magnitude of each of eight rows over 16 adjacent lanes; lane l gets the result for row l / 2 % 8.
    __device__ __forceinline__ static void row_maxima_of_eight(const Eight (&x)[8], int lane, u32 (&bits)[1]) {
        u32 two[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) two[i] = fold_two(fold(magnitudes(x[2 * i])), fold(magnitudes(x[2 * i + 1])));
        // Each exchange halves the number of rows that a lane holds.
        const bool b3 = lane & 8, b2 = lane & 4, b1 = lane & 2;
        u32 a = larger(b3 ? two[2] : two[0], __shfl_xor_sync(kAllLanes, b3 ? two[0] : two[2], 8));
        u32 b = larger(b3 ? two[3] : two[1], __shfl_xor_sync(kAllLanes, b3 ? two[1] : two[3], 8));
        u32 c = larger(b2 ? b : a, __shfl_xor_sync(kAllLanes, b2 ? a : b, 4));
        c = larger(c, __shfl_xor_sync(kAllLanes, c, 2));
        c = larger(c, __shfl_xor_sync(kAllLanes, c, 1));
        bits[0] = b1 ? c & 0xFFFF0000 : c << 16;
    }

    /// Computes the largest magnitude of each of eight rows over 4 adjacent
    /// lanes; lane l gets the results for rows l % 4 * 2 and l % 4 * 2 + 1.
    __device__ __forceinline__ static void row_maxima_of_eight(const Eight (&x)[8], int lane, u32 (&bits)[2]) {
        u32 two[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) two[i] = fold_two(fold(magnitudes(x[2 * i])), fold(magnitudes(x[2 * i + 1])));
        const bool b1 = lane & 2, b0 = lane & 1;
        const u32 a = larger(b1 ? two[2] : two[0], __shfl_xor_sync(kAllLanes, b1 ? two[0] : two[2], 2));
        const u32 b = larger(b1 ? two[3] : two[1], __shfl_xor_sync(kAllLanes, b1 ? two[1] : two[3], 2));
        const u32 c = larger(b0 ? b : a, __shfl_xor_sync(kAllLanes, b0 ? a : b, 1));
        bits[0] = c << 16;
        bits[1] = c & 0xFFFF0000;
    }
};

struct F32 {
    static constexpr int kBytes = 4;
    static constexpr int kWords = 8;

    struct Eight {
        float number[8];
    };

    struct Magnitudes {
        u32 word[kWords];
    };

    __device__ __forceinline__ static Eight zeros() { return {{0, 0, 0, 0, 0, 0, 0, 0}}; }

    __device__ __forceinline__ static float number(const void* from) { return *static_cast<const float*>(from); }

    template <bool kAligned>
    __device__ __forceinline__ static Eight load(const void* at, int left) {
        Eight x = zeros();
        const float* from = static_cast<const float*>(at);
        if constexpr (kAligned) {
            if (left > 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint4 v = ptx::load_16(from + 4 * i);
                    x.number[4 * i] = __uint_as_float(v.x);
                    x.number[4 * i + 1] = __uint_as_float(v.y);
                    x.number[4 * i + 2] = __uint_as_float(v.z);
                    x.number[4 * i + 3] = __uint_as_float(v.w);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < left) x.number[i] = from[i];
        }
        return x;
    }

    __device__ __forceinline__ static Eight load_shared(const u8* from) {
        const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 16);
        return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    }

    __device__ __forceinline__ static float value(const Eight& x, int i) { return x.number[i]; }

    __device__ __forceinline__ static Magnitudes magnitudes(const Eight& x) {
        Magnitudes m;
#pragma unroll
        for (int i = 0; i < kWords; ++i) m.word[i] = __float_as_uint(x.number[i]) & 0x7FFFFFFF;
        return m;
    }

    __device__ __forceinline__ static u32 larger(u32 a, u32 b) { return a > b ? a : b; }

    template <int kLines>
    __device__ __forceinline__ static u32 column_max(const u32 (*lines)[kWords * 16], int col) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < kLines; ++i) largest = larger(largest, lines[i][col]);
        return largest;
    }

    __device__ __forceinline__ static u32 fold(const Magnitudes& m) {
        u32 largest = m.word[0];
#pragma unroll
        for (int i = 1; i < kWords; ++i) largest = larger(largest, m.word[i]);
        return largest;
    }

    __device__ __forceinline__ static u32 largest_bits(const Eight (&x)[8]) {
        u32 largest = fold(magnitudes(x[0]));
#pragma unroll
        for (int i = 1; i < 8; ++i) largest = larger(largest, fold(magnitudes(x[i])));
        return largest;
    }

    template <int kTogether, int kLanes, int kCount, int kHeld>
    __device__ __forceinline__ static void block_maxima(const Eight (&x)[kCount], u32 (&bits)[kHeld]) {
        static_assert(kHeld * kTogether == kCount);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            bits[i] = fold(magnitudes(x[i * kTogether]));
#pragma unroll
            for (int j = 1; j < kTogether; ++j) bits[i] = larger(bits[i], fold(magnitudes(x[i * kTogether + j])));
#pragma unroll
            for (int lane = 1; lane < kLanes; lane *= 2)
                bits[i] = larger(bits[i], __shfl_xor_sync(kAllLanes, bits[i], lane));
        }
    }

    /// Computes the largest magnitude of each of eight rows. kHeld = 1: over 16 adjacent lanes, where lane l
    /// gets row l / 2 % 8. kHeld = 2: over 4 adjacent lanes, where lane l gets rows l % 4 * 2 and l % 4 * 2 + 1.
    template <int kHeld>
    __device__ __forceinline__ static void row_maxima_of_eight(const Eight (&x)[8], int lane, u32 (&bits)[kHeld]) {
        u32 one[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) one[i] = fold(magnitudes(x[i]));
        // Each exchange halves the number of rows that a lane holds.
#pragma unroll
        for (int half = 4; half >= kHeld; half /= 2) {
            const int distance = kHeld == 1 ? 2 * half : half / 2;
            const bool upper = lane & distance;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const u32 sent = upper ? one[i] : one[i + half];
                one[i] = larger(upper ? one[i + half] : one[i], __shfl_xor_sync(kAllLanes, sent, distance));
            }
        }
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            bits[i] = kHeld == 1 ? larger(one[0], __shfl_xor_sync(kAllLanes, one[0], 1)) : one[i];
    }
};

}  // namespace nib
