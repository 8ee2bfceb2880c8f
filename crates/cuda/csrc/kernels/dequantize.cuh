// Blocks with scales -> BF16 or F32 [rows][cols]: f32(code · scale), for BF16 rounded again. Codes of four bits are E2M1, of eight
// E4M3 or, if `scales.is_e5m2`, E5M2, whose NaNs and infinities come out as such; a NaN scale makes its block NaN.
// kAligned: every row and line starts on 16 bytes in codes and out (four bits: on 8 and 16).
//
// dequantize_rows<kBits, Out, kAligned>: codes [rows][cols], a scale for each block of a row, or for each square tile.
//   256 threads; a warp takes a segment of 1024 columns at a time; segments = ceil(cols / 1024), and `by_segments` divides by it.
//   Any grid, best ceil(rows · segments / 8) but at most 32 ctas a multiprocessor. Blocks of rows with cols a multiple of the
//   block may be passed as one row, if they are less than 2^30 numbers.
// dequantize_cols<kBits, Out, kAligned>: codes [cols][rows], a scale for each block of a column.
//   256 threads; grid ceil(cols / 128) · ceil(rows / 128); `band` as in TilePlace.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e8m0.cuh"
#include "kernels/column_tile.cuh"
#include "math/reduce.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"
#include "ptx/thread.cuh"

namespace nib {

/// A plane of scales, and what its codes are; `DecodeArg` of the launch.
struct DecodeArg {
    u32 is_f32;  // else E8M0 bytes
    u32 is_e5m2;
    // Square tiles: lines that share a scale (1 for blocks of rows), lines of one matrix, and how many scales it has down them.
    u32 tile_lines;
    u32 matrix_lines;
    u32 matrix_tiles;

    __device__ __forceinline__ float scale(const void* scales, u64 i) const {
        return is_f32 ? __ldg(static_cast<const float*>(scales) + i) : e8m0_decode(__ldg(static_cast<const u8*>(scales) + i));
    }

    /// Which line of scales belongs to this line of codes.
    __device__ __forceinline__ u32 scale_line(u32 line) const {
        if (tile_lines == 1) return line;
        const u32 matrix = line / matrix_lines;
        return matrix * matrix_tiles + (line - matrix * matrix_lines) / tile_lines;
    }
};

/// Codes of kBits bits.
template <int kBits>
struct Code;

template <>
struct Code<4> {
    static constexpr int kBlock = 32;

    /// Values of four codes in the low half of a word.
    __device__ __forceinline__ static void decode_four(u32 four, bool, float (&value)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = E2m1::decode(four >> (4 * i));
    }
};

template <>
struct Code<8> {
    static constexpr int kBlock = 128;

    /// Values of four codes in a word, by way of F16, which has both formats in it; E5M2 is its upper byte.
    __device__ __forceinline__ static void decode_four(u32 four, bool is_e5m2, float (&value)[4]) {
        const u32 low = is_e5m2 ? __byte_perm(four, 0, 0x1404) : ptx::f16x2_from_e4m3x2(ptx::low_u16(four));
        const u32 high = is_e5m2 ? __byte_perm(four, 0, 0x3424) : ptx::f16x2_from_e4m3x2(ptx::high_u16(four));
        const float2 a = ptx::f32x2_from_f16x2(low), b = ptx::f32x2_from_f16x2(high);
        value[0] = a.x;
        value[1] = a.y;
        value[2] = b.x;
        value[3] = b.y;
    }
};

/// Sixteen bytes of numbers, of which `left` exist.
template <class Out, bool kAligned>
__device__ __forceinline__ void store_numbers(u8* to, int left, const float (&x)[16 / Out::kBytes]) {
    if constexpr (kAligned) {
        if (left <= 0) return;
        if constexpr (Out::kBytes == 2)
            ptx::store_16(to, {ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7])});
        else
            ptx::store_16(to, {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])});
    } else {
#pragma unroll
        for (int i = 0; i < 16 / Out::kBytes; ++i) {
            if (i >= left) continue;
            if constexpr (Out::kBytes == 2)
                reinterpret_cast<u16*>(to)[i] = ptx::low_u16(ptx::pack_bf16(x[i], 0.0f));
            else
                reinterpret_cast<float*>(to)[i] = x[i];
        }
    }
}

template <int kBits, class Out, bool kAligned>
__global__ void __launch_bounds__(256)
    dequantize_rows(const u8* __restrict__ codes, const void* __restrict__ scales, u8* __restrict__ out, DecodeArg arg, int rows,
                    int cols, Divider by_segments, u32 segments) {
    constexpr int kNumbers = 16 / Out::kBytes;  // of a lane, as one store takes them
    constexpr int kChunkCols = kNumbers * 32, kChunks = 1024 / kChunkCols;
    constexpr int kCodeBytes = kNumbers * kBits / 8, kBlock = Code<kBits>::kBlock;
    const int lane = threadIdx.x % 32;
    const int blocks = ceil_div(cols, kBlock);
    const u64 line_bytes = u64(cols) * kBits / 8;
    const u32 tasks = u32(rows) * segments;
    for (u32 task = blockIdx.x * 8 + threadIdx.x / 32; task < tasks; task += gridDim.x * 8) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int col = segment * 1024 + lane * kNumbers;
        const u8* from = codes + row * line_bytes + u64(col) * kBits / 8;
        const u64 first_scale = u64(arg.scale_line(row)) * blocks;
        u32 four[kChunks][kNumbers / 4];
        float scale[kChunks];
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int at = i * kChunkCols, left = cols - col - at;
            const u8* const place = from + at * kBits / 8;
            if constexpr (!kAligned) {
#pragma unroll
                for (int j = 0; j < kNumbers / 4; ++j) four[i][j] = 0;
#pragma unroll
                for (int j = 0; j < kCodeBytes; ++j)
                    if (j < left) four[i][j / 4] |= u32(__ldg(place + j)) << (j % 4 * 8);
            } else if (left > 0) {
                if constexpr (kCodeBytes == 8) {
                    const uint2 v = ptx::load_8(place);
                    four[i][0] = v.x;
                    four[i][1] = v.y;
                } else if constexpr (kCodeBytes == 4) {
                    const u32 v = __ldg(reinterpret_cast<const u32*>(place));
                    four[i][0] = v;
                    if constexpr (kBits == 4) four[i][1] = v >> 16;
                } else {
                    four[i][0] = __ldg(reinterpret_cast<const u16*>(place));
                }
            }
            if (left > 0) scale[i] = arg.scale(scales, first_scale + (col + at) / kBlock);
        }
        u8* const to = out + (u64(row) * cols + col) * Out::kBytes;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            float x[kNumbers];
#pragma unroll
            for (int j = 0; j < kNumbers / 4; ++j) {
                float value[4];
                Code<kBits>::decode_four(four[i][j], arg.is_e5m2, value);
#pragma unroll
                for (int k = 0; k < 4; ++k) x[4 * j + k] = __fmul_rn(value[k], scale[i]);
            }
            store_numbers<Out, kAligned>(to + i * kChunkCols * Out::kBytes, cols - col - i * kChunkCols, x);
        }
    }
}

template <int kBits, class Out, bool kAligned>
__global__ void __launch_bounds__(256, 4)
    dequantize_cols(const u8* __restrict__ codes, const void* __restrict__ scales, u8* __restrict__ out, DecodeArg arg, int rows,
                    int cols, int band) {
    constexpr int kBlock = Code<kBits>::kBlock, kBlocks = kTile / kBlock;
    __shared__ ColumnTile tile;
    __shared__ float scale[kBlocks][kTile];
    const TilePlace at(cols, ceil_div(rows, kTile) * kTile, band);
    const int first_row = at.strip * kTile, first_col = at.panel * kTile;
    const u64 line_bytes = u64(rows) * kBits / 8;
    const int blocks = ceil_div(rows, kBlock);

    // Sixteen codes of a column at a time, a byte each.
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
        const int col = pass * 32 + threadIdx.x / 8, chunk = threadIdx.x % 8;
        const int left = first_col + col < cols ? rows - first_row - chunk * 16 : 0;
        const u8* const from = codes + (first_col + col) * line_bytes + u64(first_row + chunk * 16) * kBits / 8;
        uint4 v = {0, 0, 0, 0};
        if constexpr (kBits == 4) {
            // Lines are whole blocks of 32.
            if (left > 0) {
                const uint2 packed = ptx::load_8(from);
                const u32 even[2] = {packed.x & 0x0F0F0F0F, packed.y & 0x0F0F0F0F};
                const u32 odd[2] = {packed.x >> 4 & 0x0F0F0F0F, packed.y >> 4 & 0x0F0F0F0F};
                v = {__byte_perm(even[0], odd[0], 0x5140), __byte_perm(even[0], odd[0], 0x7362), __byte_perm(even[1], odd[1], 0x5140),
                     __byte_perm(even[1], odd[1], 0x7362)};
            }
        } else if constexpr (kAligned) {
            if (left > 0) v = ptx::load_16(from);
        } else {
            u32 word[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (i < left) word[i / 4] |= u32(__ldg(from + i)) << (i % 4 * 8);
            v = {word[0], word[1], word[2], word[3]};
        }
        // The halves of a pair of octets are exchanged in the upper half of the tile.
        u8* const place = tile.bytes + col * kTile + (chunk ^ (col / 8 % 8)) * 16;
        *reinterpret_cast<uint4*>(place) = col < kTile / 2 ? v : uint4{v.z, v.w, v.x, v.y};
    }
    for (int i = threadIdx.x; i < kTile * kBlocks; i += 256) {
        const int col = i / kBlocks, block = at.strip * kBlocks + i % kBlocks;
        if (first_col + col < cols && block < blocks)
            scale[i % kBlocks][col] = arg.scale(scales, u64(first_col + col) * blocks + block);
    }
    __syncthreads();

    // Eight rows of eight columns a thread, turned in registers.
    const int lane = threadIdx.x % 32, octet = threadIdx.x / 32 * 2 + lane / 16, chunk = lane % 16;
    const u8* const place = tile.place(chunk * 8, octet);
    float by[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) by[c] = scale[octet * 8 / kBlock][chunk * 8 + c];
    u32 row[2][8];  // of each row the first four columns, then the others
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint2 col[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) col[c] = *reinterpret_cast<const uint2*>(place + (half * 4 + c) * kTile);
        u32 upper[4], lower[4];
        turn_4x4({col[0].x, col[1].x, col[2].x, col[3].x}, upper);
        turn_4x4({col[0].y, col[1].y, col[2].y, col[3].y}, lower);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            row[half][j] = upper[j];
            row[half][4 + j] = lower[j];
        }
    }
    const int my_row = first_row + octet * 8, my_col = first_col + chunk * 8;
    u8* const to = out + (u64(my_row) * cols + my_col) * Out::kBytes;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (my_row + j >= rows) continue;
        float x[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float value[4];
            const u32 four = row[half][j];
            if constexpr (kBits == 4) {
#pragma unroll
                for (int c = 0; c < 4; ++c) value[c] = E2m1::decode(four >> (8 * c));
            } else {
                Code<8>::decode_four(four, arg.is_e5m2, value);
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) x[half * 4 + c] = __fmul_rn(value[c], by[half * 4 + c]);
        }
        u8* const line = to + u64(j) * cols * Out::kBytes;
        if constexpr (Out::kBytes == 2) {
            store_numbers<Out, kAligned>(line, cols - my_col, x);
        } else {
            store_numbers<Out, kAligned>(line, cols - my_col, {x[0], x[1], x[2], x[3]});
            store_numbers<Out, kAligned>(line + 16, cols - my_col - 4, {x[4], x[5], x[6], x[7]});
        }
    }
}

}  // namespace nib
