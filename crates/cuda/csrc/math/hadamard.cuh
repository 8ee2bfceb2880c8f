// The random Hadamard transform before a quantization, with the bits of crates/formats/src/hadamard.rs: signs, F32 butterflies with
// strides 1, 2, 4 ..., one multiplication by 1 / sqrt(len). `HadamardArg` goes to the kernel by value (src/launch.rs).
//
// The kernels that quantize hold 64 numbers a lane (pieces/convert/hadamard_unit.cuh): `flip`, `butterflies`, `scale_exactly`. Signs depend on the
// position along the transform alone: who stays at his columns draws them once.
//
// Along the rows (hadamard_row): a lane holds eight neighbouring columns, and neighbouring lanes a transform block.
//
//   flip(x, arg.sign_bits_of_eight(col));   // not in a row of padding: its zeros stay +0
//   F32::Eight wide = widen<In>(x);         // from here on in place of In::Eight
//   hadamard_row(wide, arg);
//
// Down the columns (hadamard_columns): of a tile of 128 x 128 numbers in shared memory to one of floats, by 256 threads. The signs depend on the row's position in its group; eight rows are one byte:
//
//   if (threadIdx.x < 16) shared.signs[threadIdx.x] = arg.signs_of_eight_rows(first_row + 8 * threadIdx.x, rows, row_id, start, num_groups);
//   (barrier: the tile, with +0 where a row does not count, and the signs)
//   hadamard_columns<In>(shared.input, shared.tile, shared.signs, arg);   // F32 also in place
//   (barrier)
//
// After it rows that did not count may be non-zero, up to the end of their transform block: their codes count like others, and
// draw the random bits of row id 0 (of their position where there are no groups).
#pragma once
#include "formats/bf16.cuh"
#include "math/philox.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kHadamardTile = 128;  // rows and columns

/// Where row `row` lies in its group, `start` being the first rows of `num_groups` groups and the end of the last (null: all rows are
/// one group).
__device__ __forceinline__ u32 position_in_group(const int* __restrict__ start, int num_groups, int row) {
    if (start == nullptr) return row;
    int low = 0, high = num_groups;  // the last start that is not above `row` is in [low, high]
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (__ldg(start + middle) <= row) low = middle;
        else high = middle - 1;
    }
    return row - __ldg(start + low);
}

struct HadamardArg {
    Stream stream;  // of the signs
    u32 len;        // of a transform block: 16, 32, 64 or 128
    float factor;

    /// Bit i: whether position k + i, k a multiple of 8, is negated.
    __device__ __forceinline__ u32 signs_of_eight(u64 k) const {
        const uint4 bits = stream.block(k / 8);
        const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
        u32 signs = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) signs |= (words[i] >> 15 & 1) << (2 * i) | words[i] >> 31 << (2 * i + 1);
        return signs;
    }

    /// The sign bits of eight BF16 numbers from position k on, as they lie in their words.
    __device__ __forceinline__ uint4 sign_bits_of_eight(u64 k) const {
        constexpr u32 kSigns = 0x80008000;
        const uint4 bits = stream.block(k / 8);
        return {bits.x & kSigns, bits.y & kSigns, bits.z & kSigns, bits.w & kSigns};
    }

    /// Those of eight rows from `row` on, down the columns, as they lie in the words of two rows.
    template <int kLen>
    __device__ __forceinline__ uint4 sign_bits_of_eight_rows(int row, int rows, const int* __restrict__ row_id,
                                                             const int* __restrict__ start, int num_groups) const {
        if (!block_counts(row, kLen, rows, row_id)) return {0, 0, 0, 0};
        return sign_bits_of_eight(position_in_group(start, num_groups, row));
    }

    /// Those of eight rows from `row` on, down the columns. None in a transform block without a row that counts, as row_id and `rows` say:
    /// its zeros stay +0. A group's rows come first, so the first one tells.
    __device__ __forceinline__ u8 signs_of_eight_rows(int row, int rows, const int* __restrict__ row_id,
                                                      const int* __restrict__ start, int num_groups) const {
        return block_counts(row, len, rows, row_id) ? u8(signs_of_eight(position_in_group(start, num_groups, row))) : 0;
    }

private:
    /// Whether the transform block of a row has one that counts.
    __device__ __forceinline__ static bool block_counts(int row, int len, int rows, const int* __restrict__ row_id) {
        const int first = row & ~(len - 1);
        return first < rows && (row_id == nullptr || __ldg(row_id + first) >= 0);
    }
};

/// Eight numbers as F32.
template <class In>
__device__ __forceinline__ F32::Eight widen(const typename In::Eight& x) {
    F32::Eight wide;
#pragma unroll
    for (int i = 0; i < 8; ++i) wide.number[i] = In::value(x, i);
    return wide;
}

/// The butterflies of strides 1, 2, 4 ... below `kCount`, as far as they are below `len`.
template <int kCount>
__device__ __forceinline__ void butterflies(float (&x)[kCount], u32 len) {
#pragma unroll
    for (int stride = 1; stride < kCount; stride *= 2) {
        if (stride >= 16 && stride >= len) break;  // no length is below 16
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i & stride) continue;
            const float a = x[i], b = x[i + stride];
            x[i] = __fadd_rn(a, b);
            x[i + stride] = __fsub_rn(a, b);
        }
    }
}

/// The last step for numbers that came from BF16: the factor by which they are still to be multiplied, a power of two. Then nothing is lost
/// if that is done later, along with another power of two: they are multiples of 2^-133.
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

/// The transform block of neighbouring lanes, without its signs. All lanes of the warp come here.
__device__ __forceinline__ void hadamard_row(F32::Eight& wide, const HadamardArg& arg) {
    float(&x)[8] = wide.number;
    butterflies(x, arg.len);
    for (u32 lanes = 1; lanes < arg.len / 8; lanes *= 2) {
        // The upper lane's result is its partner's number less its own.
        const float own = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __fmaf_rn(x[i], own, __shfl_xor_sync(kAllLanes, x[i], lanes));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], arg.factor);
}

/// The columns of `from` [128][128], to `tile`; signs[16] as in the file's header. 256 threads, two a column; all come here.
template <class In>
__device__ __forceinline__ void hadamard_columns(const void* from, float* tile, const u8* signs, const HadamardArg& arg) {
    constexpr int kHalf = kHadamardTile / 2;
    const int col = threadIdx.x % kHadamardTile, half = threadIdx.x / kHadamardTile;
    const int first = half * kHalf * kHadamardTile + col;
    const u8* const in = static_cast<const u8*>(from) + first * In::kBytes;
    float* const mine = tile + first;
    const uint2 sign = *reinterpret_cast<const uint2*>(signs + half * 8);
    float x[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const u32 negated = (i < 32 ? sign.x : sign.y) << (31 - i % 32) & 0x80000000;
        x[i] = __uint_as_float(__float_as_uint(In::number(in + i * kHadamardTile * In::kBytes)) ^ negated);
    }
    butterflies(x, arg.len);
    const float factor = arg.len == kHadamardTile ? 1.0f : arg.factor;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) mine[i * kHadamardTile] = __fmul_rn(x[i], factor);
    if (arg.len < kHadamardTile) return;
    // The last stride joins the halves of a column.
    __syncthreads();
    float* const pair = tile + half * (kHalf / 2) * kHadamardTile + col;
#pragma unroll 8
    for (int i = 0; i < kHalf / 2; ++i) {
        float* const a = pair + i * kHadamardTile;
        float* const b = a + kHalf * kHadamardTile;
        const float low = *a, high = *b;
        *a = __fmul_rn(__fadd_rn(low, high), arg.factor);
        *b = __fmul_rn(__fsub_rn(low, high), arg.factor);
    }
}

}  // namespace nib
