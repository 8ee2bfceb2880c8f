// E4M3 rows -> MXFP4 rows: the same bits as quantizing the decoded values, f32(code · scale).
//
// row_id[rows] (null: every row counts): negative marks padding, which becomes zeros. counts[3] (null: not wanted) += blocks of
// the source with a non-zero code, of those with a value that changed, blocks with a NaN or infinity.
//
// requantize_rows<Scale, kRule>: codes [rows][cols], scales [rows][ceil(cols / 128)], E8M0 bytes (Scale = u8) or F32 (float) -> codes
//   [rows][cols / 2], scales [rows][cols / 32], E8M0; cols % 32 == 0. kRule: as in formats/e8m0.cuh, not F32's. 256 threads; a warp
//   takes a segment of 2048 columns at a time; segments = ceil(cols / that), and `by_segments` divides by it. Any grid, best
//   ceil(rows · segments / 8). Where every row counts and cols % 128 == 0, the launch may pass all of x, if that is less than
//   2^30 numbers, as one row. Planes start on 16 bytes.
//
// Measured on an H200 (share of the larger of (read + written) / 4288 GB/s and written / fill rate):
//   32768 x 7168 under E8M0 scales 50 %, under F32 scales 27 %: the integer units are the limit.
#pragma once
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "math/reduce.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kRequantizeThreads = 256;
constexpr int kRequantizeChunks = 4;
constexpr int kRequantizeChunkCols = 512;
constexpr u32 kE4m3Nan = 0x7F;

__device__ __forceinline__ float scale_value(u8 byte) { return e8m0_decode(byte); }
__device__ __forceinline__ float scale_value(float scale) { return scale; }

/// The largest magnitude of these codes.
__device__ __forceinline__ u32 largest_code(const u32 (&words)[4]) {
    u32 two = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        two = ptx::max_u16x2(two, ptx::max_u16x2(words[i] & 0x007F007F, words[i] >> 8 & 0x007F007F));
    return max(two & 0xFFFF, two >> 16);
}

/// Eight E4M3 codes as E2M1 codes of values `octaves` powers of two larger, nearest-even (kExceeds: there may be values above 6, which
/// saturate); `changed` if one of them then is another number. As in E2m1::encode, F16 scaled by 2^-14 has E2M1 in it; there are from -8
/// to 11 octaves, and the largest value is below 16. What F16's ten bits do not hold becomes 0 in any case.
template <bool kExceeds>
__device__ __forceinline__ u32 encode_shifted(const u32 (&words)[4], int first, int octaves, bool& changed) {
    const u32 one = octaves >= 0 ? u32(octaves + 1) << 10 : 0x400u >> -octaves;
    const u32 factor = one | one << 16;
    u32 half[4], lost = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 pairs = __byte_perm(words[first + i] & 0x7F7F7F7F, 0, 0x3120);  // elements 0, 2, 1, 3
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const u16 pair = odd ? ptx::high_u16(pairs) : ptx::low_u16(pairs);
            u32 value = ptx::mul_f16x2(ptx::f16x2_from_e4m3x2(pair), factor);
            if constexpr (kExceeds) {
                const u32 six = ptx::min_u16x2(value, 0x0E000E00);
                lost |= value ^ six;
                value = six;
            }
            lost |= value & 0x01FF01FF;
            // Half a step less one, and one more where the code below is odd; the code is then in bits 9 to 11.
            half[2 * odd + i] = value + 0x00FF00FF + (value >> 9 & 0x00010001);
        }
    }
    const u32 even = __byte_perm(half[0], half[1], 0x7531), odd = __byte_perm(half[2], half[3], 0x7531);
    const u32 even_signs = __byte_perm(words[first], words[first + 1], 0x6420);
    const u32 odd_signs = __byte_perm(words[first], words[first + 1], 0x7531);
    const u32 codes = (even >> 1 & 0x07070707) | (odd << 3 & 0x70707070) | (even_signs >> 4 & 0x08080808) | (odd_signs & 0x80808080);
    if (lost == 0 && octaves < -1) {
#pragma unroll 1  // what vanished within F16; rare, for where it does, most blocks lose something else
        for (int i = 0; i < 8; ++i) {
            const u32 was = words[first + i / 4] >> (i % 4 * 8) & 0x7F;
            if (was != 0 && (codes >> (4 * i) & 7) == 0) lost = 1;
        }
    }
    changed |= lost != 0;
    return codes;
}

/// Eight values f32(code · scale) as E2M1 codes under a scale; `changed` if one of them then is another number.
template <class To>
__device__ __forceinline__ u32 encode_scaled(const u32 (&words)[4], int first, float scale, const To& to, bool& changed) {
    F32::Eight x;
#pragma unroll
    for (int i = 0; i < 8; ++i) x.number[i] = __fmul_rn(E4m3::decode(words[first + i / 4] >> (i % 4 * 8)), scale);
    const u32 codes = E2m1::encode<true>(x, to.inverse);
    const float target = e8m0_decode(to.stored);
#pragma unroll
    for (int i = 0; i < 8; ++i) changed |= __fmul_rn(E2m1::decode(codes >> (4 * i)), target) != x.number[i];
    return codes;
}

/// How many of the four blocks of 128 columns have a lane, of eight each, whose bit is set.
__device__ __forceinline__ u32 blocks_with(u32 lanes) { return __popc((((lanes & 0x7F7F7F7F) + 0x7F7F7F7F) | lanes) & 0x80808080); }

template <class Scale, int kRule>
__global__ void __launch_bounds__(kRequantizeThreads)
    requantize_rows(const u8* __restrict__ codes, const Scale* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
                    u64* counts, const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments) {
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32;
    const int sources = ceil_div(cols, E4m3::kBlock), targets = cols / E2m1::kBlock;
    const u32 tasks = u32(rows) * segments;
    Tally tally;
    for (u32 task = blockIdx.x * (kRequantizeThreads / 32) + threadIdx.x / 32; task < tasks;
         task += gridDim.x * (kRequantizeThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int first_col = segment * (kRequantizeChunks * kRequantizeChunkCols) + lane * 16;
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        uint4 in[kRequantizeChunks];
        Scale source[kRequantizeChunks];
#pragma unroll
        for (int i = 0; i < kRequantizeChunks; ++i) {
            const int col = first_col + i * kRequantizeChunkCols;
            in[i] = {0, 0, 0, 0};
            source[i] = 0;
            if (counted && col < cols) {
                in[i] = ptx::load_16(codes + u64(row) * cols + col);
                source[i] = __ldg(scales + u64(row) * sources + col / E4m3::kBlock);
            }
        }
#pragma unroll
        for (int i = 0; i < kRequantizeChunks; ++i) {
            const int col = first_col + i * kRequantizeChunkCols;
            const u32 words[4] = {in[i].x, in[i].y, in[i].z, in[i].w};
            const u32 own = largest_code(words);
            // Two lanes hold a block of the target.
            const u32 largest = max(own, __shfl_xor_sync(kAllLanes, own, 1));
            const u32 amax = __float_as_uint(__fmul_rn(E4m3::decode(largest), scale_value(source[i]))) & 0x7FFFFFFF;
            const auto to = block_scale<E2m1, kRule>(largest == kE4m3Nan ? kNanBits : amax);
            bool changed = false;
            uint2 encoded;
            if constexpr (sizeof(Scale) == 1) {
                // In a block of zeros or with a NaN the octaves do not matter.
                const int octaves = max(min(int(source[i]) - int(to.stored), 11), -8);
                encoded.x = encode_shifted<rule_exceeds(kRule)>(words, 0, octaves, changed);
                encoded.y = encode_shifted<rule_exceeds(kRule)>(words, 2, octaves, changed);
            } else {
                encoded.x = encode_scaled(words, 0, source[i], to, changed);
                encoded.y = encode_scaled(words, 2, source[i], to, changed);
            }
            if (to.is_nan()) encoded = {0, 0};
            if (col < cols) {
                ptx::store_8(out + (u64(row) * cols + col) / 2, encoded);
                if (lane % 2 == 0) out_scales[u64(row) * targets + col / E2m1::kBlock] = to.stored;
            }
            tally.non_zero += blocks_with(__ballot_sync(kAllLanes, own != 0));
            tally.inexact += blocks_with(__ballot_sync(kAllLanes, changed && !to.is_nan()));
            tally.non_finite += blocks_with(__ballot_sync(kAllLanes, to.is_nan()));
        }
    }
    // Ballots counted each block in all 32 lanes.
    tally.flush(counts, total, 32);
}

}  // namespace nib
