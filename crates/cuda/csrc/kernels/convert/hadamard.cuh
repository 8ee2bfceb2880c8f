// The random Hadamard transform of a matrix, with F32 output, for quantization kernels that do not apply the
// transform themselves.
//
// Computes out[out_rows][cols], the transform of x [rows][cols]. row_id[rows] (null: all rows are valid): negative ids mark padding rows, which read as zero.
//
// hadamard_rows<In>: transforms along the rows; cols is a multiple of hadamard.len, and out_rows = rows.
//   256 threads per CTA; the grid has ceil(rows * segments / 8) CTAs, where segments = ceil(cols / 256); `by_segments` divides by `segments`.
// hadamard_cols<In>: transforms down the columns of x [transform.rows][cols]; out_rows is a multiple of the transform's length.
//   256 threads per CTA; the grid has ceil(cols / 128) * ceil(out_rows / 128) CTAs.
#pragma once
#include "math/reduce.cuh"
#include "pieces/convert/transformed_columns.cuh"

namespace nib {

template <class In>
__global__ void __launch_bounds__(256)
    hadamard_rows(const u8* __restrict__ x, float* __restrict__ out, const int* __restrict__ row_id, int rows, int cols,
                  Divider by_segments, u32 segments, const HadamardArg hadamard) {
    const u32 task = blockIdx.x * 8 + threadIdx.x / 32;
    if (task >= u32(rows) * segments) return;
    const u32 row = by_segments.divide(task), segment = task - row * segments;
    const int col = segment * 256 + threadIdx.x % 32 * 8;
    const bool present = col < cols && (row_id == nullptr || __ldg(row_id + row) >= 0);
    const u64 first = u64(row) * cols + col;
    // cols is a multiple of 16, so either all eight columns lie inside the matrix or none does.
    auto plain = In::template load<true>(x + first * In::kBytes, present ? 8 : 0);
    if (present) flip(plain, hadamard.sign_bits_of_eight(col));
    F32::Eight wide = widen<In>(plain);
    hadamard_across(wide.number, threadIdx.x % 32, 1, hadamard);
    if (col >= cols) return;
    float4* const to = reinterpret_cast<float4*>(out + first);
    to[0] = {wide.number[0], wide.number[1], wide.number[2], wide.number[3]};
    to[1] = {wide.number[4], wide.number[5], wide.number[6], wide.number[7]};
}

template <class In>
__global__ void __launch_bounds__(256)
    hadamard_cols(const u8* __restrict__ x, float* __restrict__ out, const int* __restrict__ row_id, int cols, int out_rows, const TransformArg transform) {
    constexpr int kRows = TransformPlace::kRows, kCols = TransformPlace::kCols;
    const TransformPlace at;
    const int across = ceil_div(cols, kHadamardTile);
    const int first_row = blockIdx.x / across * kHadamardTile, first_col = blockIdx.x % across * kHadamardTile;
    float number[kCols][kRows];
    transform_columns<In>(x, row_id, cols, transform, first_row, first_col, number);
    const int row = first_row + at.row, col = first_col + at.col, rows_left = out_rows - row, cols_left = cols - col;
    float* const to = out + u64(row) * cols + col;
    if (cols % kCols == 0) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            if (i < rows_left && cols_left > 0) *reinterpret_cast<float2*>(to + u64(i) * cols) = {number[0][i], number[1][i]};
    } else {
#pragma unroll
        for (int i = 0; i < kRows * kCols; ++i)
            if (i / kCols < rows_left && i % kCols < cols_left) to[u64(i / kCols) * cols + i % kCols] = number[i % kCols][i / kCols];
    }
}

}  // namespace nib
