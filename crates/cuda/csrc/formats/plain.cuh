// A few adjacent BF16 or F32 values as stored in memory; each load or store moves 2 to 16 bytes.
#pragma once
#include "formats/bf16.cuh"
#include "ptx/global.cuh"
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

/// kCount values of type T (Bf16 or F32), aligned to their total size.
template <typename T, int kCount>
struct Few {
    static constexpr int kBytes = kCount * T::kBytes;
    static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4 || kBytes == 2, "one load");

    /// For BF16, value 2i is the low half of word i.
    u32 word[(kBytes + 3) / 4];

    __device__ __forceinline__ static Few load(const void* from) {
        if constexpr (kBytes == 16) {
            const uint4 v = ptx::load_16(from);
            return {{v.x, v.y, v.z, v.w}};
        } else if constexpr (kBytes == 8) {
            const uint2 v = ptx::load_8(from);
            return {{v.x, v.y}};
        } else if constexpr (kBytes == 4) {
            return {{__ldg(static_cast<const u32*>(from))}};
        } else {
            return {{__ldg(static_cast<const u16*>(from))}};
        }
    }

    /// Loads values by an ordinary load. This is needed for memory that this
    /// kernel also writes, or that it may read only after `ptx::grid_wait`.
    __device__ __forceinline__ static Few load_written(const void* from) {
        if constexpr (kBytes == 16) {
            const uint4 v = *static_cast<const uint4*>(from);
            return {{v.x, v.y, v.z, v.w}};
        } else if constexpr (kBytes == 8) {
            const uint2 v = *static_cast<const uint2*>(from);
            return {{v.x, v.y}};
        } else if constexpr (kBytes == 4) {
            return {{*static_cast<const u32*>(from)}};
        } else {
            return {{*static_cast<const u16*>(from)}};
        }
    }

    __device__ __forceinline__ void store(void* to) const {
        if constexpr (kBytes == 16)
            ptx::store_16(to, {word[0], word[1], word[2], word[3]});
        else if constexpr (kBytes == 8)
            ptx::store_8(to, {word[0], word[1]});
        else if constexpr (kBytes == 4)
            ptx::store_4(to, word[0]);
        else
            *static_cast<u16*>(to) = u16(word[0]);
    }

    /// Returns value i as F32, exactly.
    __device__ __forceinline__ float value(int i) const {
        if constexpr (T::kBytes == 4) return __uint_as_float(word[i]);
        return __uint_as_float(i % 2 ? word[i / 2] & 0xFFFF0000 : word[i / 2] << 16);
    }

    /// Negates all values if `sign` is a sign bit; keeps them if it is 0.
    __device__ __forceinline__ void flip(u32 sign) {
        constexpr int kWords = (kBytes + 3) / 4;
#pragma unroll
        for (int i = 0; i < kWords; ++i) word[i] ^= T::kBytes == 4 ? sign : sign | sign >> 16;
    }

    /// Rounds the values to nearest even.
    __device__ __forceinline__ static Few from_f32(const float (&x)[kCount]) {
        Few few;
        if constexpr (T::kBytes == 4) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) few.word[i] = __float_as_uint(x[i]);
        } else if constexpr (kCount == 1) {
            few.word[0] = ptx::pack_bf16(x[0], 0);
        } else {
#pragma unroll
            for (int i = 0; i < kCount; i += 2) few.word[i / 2] = ptx::pack_bf16(x[i], x[i + 1]);
        }
        return few;
    }
};

/// Returns a + b, rounded once.
template <typename T, int kCount>
__device__ __forceinline__ Few<T, kCount> add_few(const Few<T, kCount>& a, const Few<T, kCount>& b) {
    float sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = __fadd_rn(a.value(i), b.value(i));
    return Few<T, kCount>::from_f32(sum);
}

/// Eight values that are rounded to nearest even, in the type in which they are stored in memory.
template <typename T>
__device__ __forceinline__ typename T::Eight rounded_eight(const float (&x)[8]) {
    typename T::Eight eight;
    if constexpr (T::kBytes == 4) {
#pragma unroll
        for (int i = 0; i < 8; ++i) eight.number[i] = x[i];
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) eight.word[i] = ptx::pack_bf16(x[2 * i], x[2 * i + 1]);
    }
    return eight;
}

/// Returns a + b of eight adjacent values, not yet rounded to the type of `a`.
template <typename T>
__device__ __forceinline__ void add_eight(float (&sum)[8], const typename T::Eight& a, const typename T::Eight& b) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(T::value(a, i), T::value(b, i));
}

/// Stores the first `left` of eight adjacent values, rounded to nearest even. kAligned: `to` is 16-byte aligned, and
/// `left` covers all eight values or none.
template <typename T, bool kAligned>
__device__ __forceinline__ void store_eight(u8* to, const float (&x)[8], int left) {
    if constexpr (!kAligned) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float one[1] = {x[i]};
            if (i < left) Few<T, 1>::from_f32(one).store(to + i * T::kBytes);
        }
    } else if (left > 0) {
        constexpr int kCount = 16 / T::kBytes;
#pragma unroll
        for (int part = 0; part < 8; part += kCount) {
            float few[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) few[i] = x[part + i];
            Few<T, kCount>::from_f32(few).store(to + part * T::kBytes);
        }
    }
}

}  // namespace nib
