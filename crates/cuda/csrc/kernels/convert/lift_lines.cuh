// Converts blocks with power-of-two scales to E4M3 with one power-of-two scale per 128 values of a row, or per 128 x 128
// values. E4M3 must contain every value of the source element. A value that E4M3 cannot represent under the new scale is
// rounded to nearest even. The CPU implementation is crates/formats/src/lift.rs. GEMMs use this kernel for row blocks, and
// for column blocks, which are stored transposed. The kernel in lift_rows.cuh also counts blocks and skips padding rows.
//
// lift_lines<F, kWhole, kSquares>: reads codes [matrices * n][code_bytes(len)] and writes `out` [matrices * n][len]. `from` and `to` are the
//   scale records of source and output; the records are contiguous along a row, or across rows. kSquares: 128 rows of a matrix share a scale
//   in `to`, which has ceil(n / 128) rows of ceil(len / 128) scales per matrix. kWhole: len % 16 == 0, and buffers are 16-byte aligned.
//   256 threads per CTA; the grid has matrices * ceil(n / 32) * ceil(len / 512) CTAs. A CTA converts 512 values of 32 rows, so that all scale
//   bytes of a memory sector are read together in either layout. A thread converts 16 adjacent values of a row, then the 16 values that lie
//   128 values further, and so on. With kSquares, each of the four CTAs of a 2-D block reads the scales of all 128 rows of the block.
#pragma once
#include "pieces/convert/lift.cuh"
#include "pieces/convert/lifted_scale.cuh"
#include "pieces/convert/units.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kLiftedLines = 32, kLiftedCols = 512, kLiftedTargets = kLiftedCols / kLifted;

/// Returns one plus the largest of four scales, or 0 if all four are NaN. NaN scales are ignored.
__device__ __forceinline__ u32 above_largest(u32 four) {
    const u32 two = ptx::max_u16x2(above_nan_x2(four), above_nan_x2(four >> 8));
    return max(two & 0xFFFF, two >> 16);
}

/// Loads the scale records of four blocks of a row, starting at `block`. Records past the row's end are returned as NaN.
__device__ __forceinline__ u32 four_records(const RecordPlane& from, int line, int block, int blocks) {
    u32 four = 0xFFFFFFFF;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (block + i < blocks) four = (four & ~(0xFFu << 8 * i)) | from.template load<1>(line, block + i) << 8 * i;
    return four;
}

/// Converts sixteen codes with the scale `source` to E4M3 codes with the scale `target`.
template <class E>
__device__ __forceinline__ uint4 lift_sixteen(const u32 (&words)[E::kBits / 2], u32 source, int target) {
    if constexpr (E::kBits == 4) {
        return BlockLift(source, target).sixteen(words[0], words[1]);
    } else {
        if (source == kScaleNan) return {0x7F7F7F7F, 0x7F7F7F7F, 0x7F7F7F7F, 0x7F7F7F7F};
        // If the scales differ by kLiftFar powers of two, every value has already
        // underflowed to zero, so a larger difference gives the same result.
        const float factor = __uint_as_float(u32(127 + max(int(source) - target, -kLiftFar)) << 23);
        float value[16];
        E::decode(words, value);
        u32 lifted[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) four[j] = __fmul_rn(value[4 * i + j], factor);
            lifted[i] = u32(ptx::e4m3x2_from_f32(four[0], four[1])) | u32(ptx::e4m3x2_from_f32(four[2], four[3])) << 16;
        }
        return {lifted[0], lifted[1], lifted[2], lifted[3]};
    }
}

template <class F, bool kWhole, bool kSquares>
__global__ void __launch_bounds__(256) lift_lines(const u8* __restrict__ codes, const RecordPlane from, u8* __restrict__ out, const RecordPlane to,
                                                  int n, int len) {
    using E = typename F::Element;
    constexpr int kBits = E::kBits, kRecords = kLiftedCols / F::kBlock;
    static_assert(F::kBlock == 32 && F::kScaleBytes == 1, "a word holds the scales of 128 values");
    __shared__ u32 scales[kLiftedLines][kLiftedTargets], above[kLiftedTargets];
    const int across = ceil_div(len, kLiftedCols), down = ceil_div(n, kLiftedLines);
    const int matrix = int(blockIdx.x / across) / down, in_matrix = int(blockIdx.x / across) % down * kLiftedLines;
    const int first_line = matrix * n + in_matrix, lines = (matrix + 1) * n, first_col = int(blockIdx.x % across) * kLiftedCols;
    if (kSquares && threadIdx.x < kLiftedTargets) above[threadIdx.x] = 0;
    const int in_tile = threadIdx.x / 8, line = first_line + in_tile, col = first_col + threadIdx.x % 8 * 16;
    const u32 line_bytes = code_bytes(kBits, len);

    u32 words[kLiftedTargets][kBits / 2] = {};
#pragma unroll
    for (int t = 0; t < kLiftedTargets; ++t) {
        const int first = col + t * kLifted;
        if (line >= lines || first >= len) continue;
        const u32 at = first / 8 * kBits;
        const u8* const in = codes + u64(line) * line_bytes + at;
        if constexpr (kWhole && kBits == 4) {
            const uint2 eight = ptx::load_8(in);
            words[t][0] = eight.x;
            words[t][1] = eight.y;
        } else if constexpr (kWhole) {
#pragma unroll
            for (int i = 0; i < kBits / 2; ++i) words[t][i] = __ldg(reinterpret_cast<const u32*>(in) + i);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * kBits; ++i)
                if (at + i < line_bytes) words[t][i / 4] |= u32(__ldg(in + i)) << (i % 4 * 8);
        }
    }
    // Adjacent threads read adjacent bytes.
    const bool by_line = from.block_stride == 1;
#pragma unroll
    for (int i = threadIdx.x; i < kLiftedLines * kRecords; i += 256) {
        const int l = by_line ? i / kRecords : i % kLiftedLines, r = by_line ? i % kRecords : i / kLiftedLines;
        const bool exists = first_line + l < lines && first_col + r * F::kBlock < len;
        const u32 record = exists ? from.template load<1>(first_line + l, first_col / F::kBlock + r) : kScaleNan;
        reinterpret_cast<u8*>(scales[l])[r] = u8(record);
    }
    __syncthreads();

    if constexpr (kSquares) {
        // A thread has the scale records of half a row of the tile; these records belong to two 2-D blocks.
        const int l = matrix * n + in_matrix / kLifted * kLifted + int(threadIdx.x / 2), half = threadIdx.x % 2;
#pragma unroll
        for (int t = 0; t < kLiftedTargets; ++t) {
            const bool mine = t / 2 == half && l < lines;
            const int block = first_col / F::kBlock + t * (kLifted / F::kBlock);
            const u32 of_warp = __reduce_max_sync(~0u, mine ? above_largest(four_records(from, l, block, ceil_div(len, F::kBlock))) : 0);
            if (threadIdx.x % 32 == 0) atomicMax(&above[t], of_warp);
        }
        __syncthreads();
        if (threadIdx.x < kLiftedTargets && in_matrix % kLifted == 0 && first_col + threadIdx.x * kLifted < len)
            to.template store<1>(matrix * ceil_div(n, kLifted) + in_matrix / kLifted, first_col / kLifted + threadIdx.x,
                                 u32(lifted_scale<E>(above[threadIdx.x])));
    } else if (threadIdx.x < kLiftedLines * kLiftedTargets) {
        const int i = threadIdx.x;
        const bool along = to.block_stride == 1;
        const int l = along ? i / kLiftedTargets : i % kLiftedLines, t = along ? i % kLiftedTargets : i / kLiftedLines;
        if (first_line + l < lines && first_col + t * kLifted < len)
            to.template store<1>(first_line + l, first_col / kLifted + t, u32(lifted_scale<E>(above_largest(scales[l][t]))));
    }
    u8* at = out + u64(line) * len + col;
#pragma unroll
    for (int t = 0; t < kLiftedTargets; ++t, at += kLifted) {
        const int first = col + t * kLifted;
        if (line >= lines || first >= len) continue;
        const u32 four = scales[in_tile][t], source = four >> (threadIdx.x % 8 / 2 * 8) & 0xFF;
        const uint4 lifted = lift_sixteen<E>(words[t], source, lifted_scale<E>(kSquares ? above[t] : above_largest(four)));
        if constexpr (kWhole) {
            ptx::store_16(at, lifted);
        } else {
            const u32 of[4] = {lifted.x, lifted.y, lifted.z, lifted.w};
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (first + i < len) at[i] = u8(of[i / 4] >> (i % 4 * 8));
        }
    }
}

}  // namespace nib
