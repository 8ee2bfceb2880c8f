// GEMM D = A·Bᵀ of any two operands, dense or grouped, on the CUDA cores. The kernel serves F32 GEMMs,
// and cases that the tensor-core kernels do not support (odd sizes, rare pairs of formats).
//
// An operand is F32, BF16, or codes (E4M3, E5M2, or two E2M1 codes per byte) with one scale per block along the
// contraction. Element (row, k) is at row * row_stride + k * k_stride elements; one of the strides is 1.
// grouped_fp8_block.cuh explains kRagged; groups of F32 or BF16 operands may start at any row. Rows of D outside all
// groups are not written. Sums are F32, in order of k. The kernel sums the dot product of each block, then computes total
// = fma(scale_a * scale_b, dot, total). F32 and BF16 operands too are summed in blocks, of 128 elements with scales of 1.
//
// Grid: the CTA index runs over tiles of columns first, then over tiles of rows (kRows:
// up to rows / 64 + groups tiles, some of them idle), then over groups (kContraction).
// CTA: 256 threads compute 64 x 64 outputs, 4 x 4 per thread.
#pragma once
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "pieces/products/grouped_schedule.cuh"

namespace nib {

constexpr int kSimtTile = 64;
constexpr int kSimtStep = 32;  // elements of k per step; a divisor of every block size
constexpr int kSimtThreads = 256;

enum Stored { kStoredF32, kStoredBf16, kStoredE4m3, kStoredE5m2, kStoredE2m1 };

/// One operand of the GEMM.
struct Side {
    const void* values;
    long long row_stride, k_stride;
    Scales scales;  // null if the operand is F32 or BF16
    int stored;     // the element type, a value of the enum Stored
    int tile_rows;  // number of rows that share a scale: 1, or the size of a 2-D block
};

__device__ __forceinline__ float decode_e5m2(u32 code) {
    // The exponent biases of the two formats differ by 112. In
    // both formats, infinities and NaN have the largest exponent.
    const float finite = __fmul_rn(__uint_as_float((code & 0x7F) << 21), 5.192296858534828e33f);
    const u32 magnitude = (code & 0x7C) == 0x7C ? kInfinityBits | (code & 3) << 21 : __float_as_uint(finite);
    return __uint_as_float(magnitude | (code & 0x80) << 24);
}

template <class Element>
__device__ __forceinline__ float element(const Side& side, long long at);
struct StoredF32 {};
struct StoredBf16 {};
struct StoredCodes {};
template <>
__device__ __forceinline__ float element<StoredF32>(const Side& side, long long at) {
    return __ldg(static_cast<const float*>(side.values) + at);
}
template <>
__device__ __forceinline__ float element<StoredBf16>(const Side& side, long long at) {
    return __uint_as_float(u32(__ldg(static_cast<const u16*>(side.values) + at)) << 16);
}
template <>
__device__ __forceinline__ float element<StoredCodes>(const Side& side, long long at) {
    const u8* const codes = static_cast<const u8*>(side.values);
    if (side.stored == kStoredE2m1) return E2m1::decode(__ldg(codes + at / 2) >> (at % 2 * 4) & 15);
    const u32 code = __ldg(codes + at);
    if (side.stored == kStoredE5m2) return decode_e5m2(code);
    return (code & 0x7F) == 0x7F ? __uint_as_float(kNanBits) : E4m3::decode(code);
}

/// Loads 64 rows by 32 elements of k of an operand into shared memory, k outermost, with zeros outside the operand.
template <class Element>
__device__ __forceinline__ void load_piece(float (&piece)[kSimtStep][kSimtTile + 1], const Side& side, int row, int rows, int k,
                                           int end) {
    const bool k_inner = side.k_stride == 1;
#pragma unroll
    for (int i = 0; i < kSimtTile * kSimtStep / kSimtThreads; ++i) {
        const int at = int(threadIdx.x) + i * kSimtThreads;
        const int r = k_inner ? at / kSimtStep : at % kSimtTile;
        const int c = k_inner ? at % kSimtStep : at / kSimtTile;
        const bool inside = r < rows && k + c < end;
        piece[c][r] = inside ? element<Element>(side, (row + r) * side.row_stride + (k + c) * side.k_stride) : 0.0f;
    }
}

/// Returns the scale of a block of a row; 1 for an F32 or BF16 operand, or outside the operand.
__device__ __forceinline__ float scale_of(const Side& side, int scale_row, bool inside, int block) {
    return side.scales.values == nullptr || !inside ? 1.0f : side.scales.decode(side.scales.load(scale_row, block));
}

template <class Element, Ragged kRagged>
__global__ void __launch_bounds__(kSimtThreads)
    product_simt(const __grid_constant__ Side a, const __grid_constant__ Side b, const __grid_constant__ Groups groups,
                 void* d, int block, int out_is_f32, int accumulate, int tiles_n, int tiles_m) {
    __shared__ float piece_a[kSimtStep][kSimtTile + 1];
    __shared__ float piece_b[kSimtStep][kSimtTile + 1];
    int tile = int(blockIdx.x) / tiles_n % tiles_m, group = int(blockIdx.x) / tiles_n / tiles_m;
    int start = 0, len = groups.m;
    if (kRagged == Ragged::kContraction) {
        const auto rows = groups.span(group, groups.k);
        start = rows.first;
        // All values of the last block take part, because a Hadamard
        // transform may have made the padding of the block non-zero.
        len = a.scales.values == nullptr ? rows.len : min(ceil_div(rows.len, block) * block, rows.padded);
    } else if (groups.start != nullptr) {
        for (group = 0;; ++group) {
            if (group == groups.count) return;
            const auto rows = groups.span(group, groups.m);
            start = rows.first;
            len = rows.len;
            if (tile < ceil_div(len, kSimtTile)) break;
            tile -= ceil_div(len, kSimtTile);
        }
    }
    const bool by_rows = kRagged == Ragged::kRows;
    const int row = tile * kSimtTile, col = int(blockIdx.x) % tiles_n * kSimtTile;  // position of this CTA's outputs within the group's D
    const int rows = min((by_rows ? len : groups.m) - row, kSimtTile), cols = min(groups.n - col, kSimtTile);
    const int row_a = by_rows ? start + row : row, row_b = by_rows ? group * groups.n + col : col;
    const int from = by_rows ? 0 : start, end = by_rows ? groups.k : start + len;
    // A 2-D block never extends from one matrix of a stack to the next matrix.
    const int first_b = by_rows ? group * ceil_div(groups.n, b.tile_rows) : 0;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;

    float total[4][4] = {}, dot[4][4] = {};
    for (int k = from; k < end; k += kSimtStep) {
        load_piece<Element>(piece_a, a, row_a, rows, k, end);
        load_piece<Element>(piece_b, b, row_b, cols, k, end);
        __syncthreads();
#pragma unroll 8
        for (int c = 0; c < kSimtStep; ++c) {
            float left[4], right[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                left[i] = piece_a[c][y + 16 * i];
                right[i] = piece_b[c][x + 16 * i];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) dot[i][j] = __fmaf_rn(left[i], right[j], dot[i][j]);
        }
        __syncthreads();
        if ((k + kSimtStep - from) % block != 0 && k + kSimtStep < end) continue;
        float scale_a[4], scale_b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = y + 16 * i, c = x + 16 * i;
            scale_a[i] = scale_of(a, (row_a + r) / a.tile_rows, r < rows, k / block);
            scale_b[i] = scale_of(b, b.tile_rows == 1 ? row_b + c : first_b + (col + c) / b.tile_rows, c < cols, k / block);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total[i][j] = __fmaf_rn(scale_a[i] * scale_b[j], dot[i][j], total[i][j]);
                dot[i][j] = 0.0f;
            }
    }

    const long long row_d = by_rows ? start + row : (long long)group * groups.m + row;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int r = y + 16 * i, c = x + 16 * j;
            if (r >= rows || c >= cols) continue;
            const long long at = (row_d + r) * groups.n + col + c;
            if (out_is_f32) {
                float* const to = static_cast<float*>(d) + at;
                *to = accumulate ? *to + total[i][j] : total[i][j];
            } else {
                u16* const to = static_cast<u16*>(d) + at;
                const float sum = accumulate ? __uint_as_float(u32(*to) << 16) + total[i][j] : total[i][j];
                *to = static_cast<u16>(ptx::pack_bf16(sum, 0.0f));
            }
        }
}

}  // namespace nib
