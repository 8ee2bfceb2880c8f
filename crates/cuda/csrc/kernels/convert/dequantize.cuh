// Decodes block-scaled codes to BF16 or F32 [rows][cols]; each block of kBlock values has one scale. A value is f32(code · scale), which is then
// rounded for BF16. Four-bit codes are E2M1. Eight-bit codes are E4M3, or E5M2 (NaNs and infinities preserved) if `scales.is_e5m2`. A NaN scale makes
// all values of its block NaN. kAligned: every row of `out` is 16-byte aligned, and every row of codes 16-byte (four-bit codes: 8-byte) aligned.
//
// dequantize_rows<kBits, kBlock, Out, kAligned>: decodes codes [rows][cols] that have one scale per block of a row, or one scale per 2-D block.
//   256 threads per CTA. A warp decodes one segment of 1024 columns at a time. A row has `segments` = ceil(cols / 1024) segments;
//   `by_segments` divides by `segments`. Any grid size gives correct results; the fastest grid has ceil(rows · segments / 8) CTAs, but
//   at most 128 CTAs per SM. If cols is a multiple of the block size, the launch may pass all rows as one row of less than 2^30 values.
// dequantize_cols<kBits, kBlock, Out, kAligned>: decodes codes [cols][rows] that have one scale per block of a column.
//   256 threads per CTA; the grid has ceil(cols / 128) · ceil(rows / 128) CTAs. TilePlace orders the CTAs in bands that are `band` tiles high.
//
// Speed on an H200 at 32768 x 7168 (4096 x 7168), in % of the bandwidth limit. The limit is max((read + written) / 4288 GB/s, written / fill rate).
//   For row blocks, MXFP4 to BF16 reaches 93 % (82 %), MXFP4 to F32 101 % (95 %), E4M3 to BF16 94 % (83 %), E4M3 to F32 93 % (88 %), and MXFP8 to BF16 95 %.
//   For column blocks, MXFP4 to BF16 reaches 85 % (75 %), MXFP4 to F32 96 % (89 %), E4M3 to BF16 90 % (84 %), and E4M3 to F32 92 % (88 %).
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/plain.cuh"
#include "math/reduce.cuh"
#include "pieces/convert/column_tile.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

/// The scale buffer and the code format; the launch code builds it as `DecodeArg`.
struct DecodeArg {
    u32 is_f32;  // true if the scales are F32, false if they are E8M0 bytes
    u32 is_e5m2;
    // For blocks down the columns, line_stride is the distance from the scales of one column to those of the next
    // column. block_stride is the distance from the scale of one block to that of the next block in the column.
    u32 line_stride;
    u32 block_stride;
    // Three numbers for 2-D blocks: how many rows share a scale (1 for row blocks), how
    // many rows a matrix has, and how many scales lie below each other in a matrix.
    u32 tile_lines;
    u32 matrix_lines;
    u32 matrix_tiles;

    __device__ __forceinline__ float scale(const void* scales, u64 i) const {
        return is_f32 ? __ldg(static_cast<const float*>(scales) + i) : e8m0_decode(__ldg(static_cast<const u8*>(scales) + i));
    }

    /// The index of the row of scales that applies to this row of codes.
    __device__ __forceinline__ u32 scale_line(u32 line) const {
        if (tile_lines == 1) return line;
        const u32 matrix = line / matrix_lines;
        return matrix * matrix_tiles + (line - matrix * matrix_lines) / tile_lines;
    }
};

/// Converts eight E2M1 codes to E5M2 codes of the same values. An E5M2 code is the upper byte of the value's F16 encoding.
__device__ __forceinline__ uint2 e5m2_from_e2m1(u32 eight) {
    // kSmall holds the codes of 0, 0.5, 1 and 1.5, and kLarge those of 2, 3, 4 and 6. A code
    // without its sign selects one byte of kSmall or kLarge.
    constexpr u32 kSmall = 0x3E3C3800, kLarge = 0x46444240;
    const u32 magnitudes = eight & 0x77777777, even_signs = eight << 4;
    const u32 low = __byte_perm(kSmall, kLarge, magnitudes), high = __byte_perm(kSmall, kLarge, magnitudes >> 16);
    return {low | (__byte_perm(even_signs, eight, 0x5140) & 0x80808080), high | (__byte_perm(even_signs, eight, 0x7362) & 0x80808080)};
}

/// Decodes four FP8 codes. The conversion goes through F16, which can represent every value of both FP8 formats.
__device__ __forceinline__ void decode_four(u32 four, bool is_e5m2, float (&value)[4]) {
    const u32 low = is_e5m2 ? __byte_perm(four, 0, 0x1404) : ptx::f16x2_from_e4m3x2(ptx::low_u16(four));
    const u32 high = is_e5m2 ? __byte_perm(four, 0, 0x3424) : ptx::f16x2_from_e4m3x2(ptx::high_u16(four));
    const float2 a = ptx::f32x2_from_f16x2(low), b = ptx::f32x2_from_f16x2(high);
    value[0] = a.x;
    value[1] = a.y;
    value[2] = b.x;
    value[3] = b.y;
}

/// Stores sixteen bytes of values; only the first `left` values lie inside the row.
template <class Out, bool kAligned>
__device__ __forceinline__ void store_numbers(u8* to, int left, const float (&x)[16 / Out::kBytes]) {
    constexpr int kNumbers = 16 / Out::kBytes;
    if constexpr (kAligned) {
        if (left > 0) Few<Out, kNumbers>::from_f32(x).store(to);
    } else {
#pragma unroll
        for (int i = 0; i < kNumbers; ++i)
            if (i < left) Few<Out, 1>::from_f32({x[i]}).store(to + i * Out::kBytes);
    }
}

template <int kBits, int kBlock, class Out, bool kAligned>
__global__ void __launch_bounds__(256)
    dequantize_rows(const u8* __restrict__ codes, const void* __restrict__ scales, u8* __restrict__ out, DecodeArg arg, int rows,
                    int cols, Divider by_segments, u32 segments) {
    constexpr int kNumbers = 16 / Out::kBytes;  // number of values that a lane writes with one store
    constexpr int kChunkCols = kNumbers * 32, kChunks = 1024 / kChunkCols;
    constexpr int kCodeBytes = kNumbers * kBits / 8;
    const bool is_e5m2 = kBits == 4 || arg.is_e5m2;
    const int lane = threadIdx.x % 32;
    const int blocks = ceil_div(cols, kBlock);
    const u64 line_bytes = u64(cols) * kBits / 8;
    const u32 tasks = u32(rows) * segments;
    for (u32 task = blockIdx.x * 8 + threadIdx.x / 32; task < tasks; task += gridDim.x * 8) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int col = segment * 1024 + lane * kNumbers;
        const u8* from = codes + row * line_bytes + u64(col) * kBits / 8;
        const u64 first_scale = u64(arg.scale_line(row)) * blocks;
        u32 four[kChunks][kNumbers / 4];  // codes; if codes have four bits, the first word holds eight codes
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
                    four[i][0] = __ldg(reinterpret_cast<const u32*>(place));
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
            if constexpr (kBits == 4) {
                const uint2 wide = e5m2_from_e2m1(four[i][0]);
                four[i][0] = wide.x;
                if constexpr (kNumbers == 8) four[i][1] = wide.y;
            }
#pragma unroll
            for (int j = 0; j < kNumbers / 4; ++j) {
                float value[4];
                decode_four(four[i][j], is_e5m2, value);
#pragma unroll
                for (int k = 0; k < 4; ++k) x[4 * j + k] = __fmul_rn(value[k], scale[i]);
            }
            store_numbers<Out, kAligned>(to + i * kChunkCols * Out::kBytes, cols - col - i * kChunkCols, x);
        }
    }
}

/// Loads sixteen codes, of which the first `left` lie inside the row, and returns one byte per code. Four-bit codes are converted to E5M2.
template <int kBits, bool kAligned>
__device__ __forceinline__ uint4 load_codes(const u8* from, int left) {
    if constexpr (kBits == 4) {
        // If codes have four bits, row lengths are multiples of 32 values.
        const uint2 packed = left > 0 ? ptx::load_8(from) : uint2{0, 0};
        const uint2 low = e5m2_from_e2m1(packed.x), high = e5m2_from_e2m1(packed.y);
        return {low.x, low.y, high.x, high.y};
    } else if constexpr (kAligned) {
        return left > 0 ? ptx::load_16(from) : uint4{0, 0, 0, 0};
    } else {
        u32 word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (i < left) word[i / 4] |= u32(__ldg(from + i)) << (i % 4 * 8);
        return {word[0], word[1], word[2], word[3]};
    }
}

template <int kBits, int kBlock, class Out, bool kAligned>
__global__ void __launch_bounds__(256, !kAligned ? 3 : kBits == 4 ? 5 : 4)
    dequantize_cols(const u8* __restrict__ codes, const void* __restrict__ scales, u8* __restrict__ out, DecodeArg arg, int rows,
                    int cols, int band) {
    constexpr int kBlocks = kTile / kBlock;
    const bool is_e5m2 = kBits == 4 || arg.is_e5m2;
    __shared__ ColumnTile tile;
    __shared__ float scale[kBlocks][kTile];
    const TilePlace at(cols, ceil_div(rows, kTile) * kTile, band);
    const int first_row = at.strip * kTile, first_col = at.panel * kTile;
    const u64 line_bytes = u64(rows) * kBits / 8;
    const int blocks = ceil_div(rows, kBlock);

    // All loads are issued before the first store. Each load reads sixteen codes of a column.
    constexpr int kScales = ceil_div(kTile * kBlocks, 256);
    float fetched[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
        const int index = i * 256 + threadIdx.x, col = first_col + index / kBlocks, block = at.strip * kBlocks + index % kBlocks;
        const bool exists = index < kTile * kBlocks && col < cols && block < blocks;
        fetched[i] = exists ? arg.scale(scales, u64(col) * arg.line_stride + u64(block) * arg.block_stride) : 0.0f;
    }
    const int line = threadIdx.x / 8, chunk_16 = threadIdx.x % 8;
    uint4 sixteen[4];
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
        const int col = first_col + pass * 32 + line;
        const int left = col < cols ? rows - first_row - chunk_16 * 16 : 0;
        sixteen[pass] = load_codes<kBits, kAligned>(codes + col * line_bytes + u64(first_row + chunk_16 * 16) * kBits / 8, left);
    }
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
        const int col = pass * 32 + line;
        const uint4 v = sixteen[pass];
        // In the upper half of the tile, the two halves of a pair of octets are exchanged.
        *reinterpret_cast<uint4*>(tile.bytes + col * kTile + (chunk_16 ^ (col / 8 % 8)) * 16) = pass < 2 ? v : uint4{v.z, v.w, v.x, v.y};
    }
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
        const int index = i * 256 + threadIdx.x;
        if (index < kTile * kBlocks) scale[index % kBlocks][index / kBlocks] = fetched[i];
    }
    __syncthreads();

    // Each thread transposes eight rows of eight columns in registers. For F32 the eight columns of a thread are two
    // groups of four, so that adjacent threads store adjacent bytes.
    const int lane = threadIdx.x % 32, octet = threadIdx.x / 32 * 2 + lane / 16, chunk = lane % 16;
    const auto first = [&](int half) { return Out::kBytes == 2 ? chunk * 8 + half * 4 : half * (kTile / 2) + chunk * 4; };
    u32 row[2][8];
    float by[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u8* const place = tile.place(first(half) / 8 * 8, octet) + first(half) % 8 * kTile;
        uint2 col[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            col[c] = *reinterpret_cast<const uint2*>(place + c * kTile);
            by[half][c] = scale[octet * 8 / kBlock][first(half) + c];
        }
        u32 upper[4], lower[4];
        turn_4x4({col[0].x, col[1].x, col[2].x, col[3].x}, upper);
        turn_4x4({col[0].y, col[1].y, col[2].y, col[3].y}, lower);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            row[half][j] = upper[j];
            row[half][4 + j] = lower[j];
        }
    }
    const int my_row = first_row + octet * 8;
    u8* const to = out + (u64(my_row) * cols + first_col) * Out::kBytes;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int left = my_row + j < rows ? cols - first_col : 0;
        float x[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float value[4];
            decode_four(row[half][j], is_e5m2, value);
#pragma unroll
            for (int c = 0; c < 4; ++c) x[half * 4 + c] = __fmul_rn(value[c], by[half][c]);
        }
        u8* const line = to + u64(j) * cols * Out::kBytes;
        if constexpr (Out::kBytes == 2) {
            store_numbers<Out, kAligned>(line + first(0) * 2, left - first(0), x);
        } else {
            store_numbers<Out, kAligned>(line + first(0) * 4, left - first(0), {x[0], x[1], x[2], x[3]});
            store_numbers<Out, kAligned>(line + first(1) * 4, left - first(1), {x[4], x[5], x[6], x[7]});
        }
    }
}

}  // namespace nib
