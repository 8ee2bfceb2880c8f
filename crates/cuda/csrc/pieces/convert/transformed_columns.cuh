// The random Hadamard transform down the columns of a tile of 128 x 128 values, in
// registers. A thread has 32 rows of two adjacent columns. Each quarter of a warp (eight
// lanes) has a quarter of the rows. quantize_units divides a tile in the same way.
#pragma once
#include "formats/plain.cuh"
#include "math/hadamard.cuh"

namespace nib {

/// The launch code builds this struct as `TransformArg`. Transform blocks begin at the start of each
/// of num_groups groups. A group's start is a multiple of the block's length (start null: row 0).
struct TransformArg {
    const int* start;
    int num_groups;
    int rows;  // number of rows of the matrix that is transformed
    HadamardArg hadamard;

    __device__ __forceinline__ bool is_wanted() const { return hadamard.len != 0; }
};

/// Loads two adjacent values of a row. Values past the row's end and in
/// an invalid row are zeros. kPairs: rows have an even number of columns.
template <class In, bool kPairs>
__device__ __forceinline__ Few<In, 2> load_pair(const u8* from, int left, bool counted) {
    Few<In, 2> two = {};
    const bool present = counted && left > 0;
    if constexpr (kPairs) {
        if (present) two = Few<In, 2>::load(from);
    } else {
        const float x[2] = {present ? In::number(from) : 0.0f, present && left > 1 ? In::number(from + In::kBytes) : 0.0f};
        two = Few<In, 2>::from_f32(x);
    }
    return two;
}

/// The rows and columns of a tile that this thread has.
struct TransformPlace {
    static constexpr int kRows = 32, kCols = 2;
    int quarter = threadIdx.x % 32 / 8, row = quarter * kRows, col = threadIdx.x / 32 * 16 + threadIdx.x % 8 * kCols;
};

/// Transforms this thread's values of the tile of x [arg.rows][cols] that begins at row `first_row` and column `first_col`, without
/// multiplying by the factor. row_id marks invalid rows by the rule in quantize_units.cuh. A transform block without a valid row
/// becomes zeros. All 256 threads of the CTA call this function. `take(c, number)` receives the results for the thread's column c.
template <class In, class Take>
__device__ __forceinline__ void transform_columns(const u8* __restrict__ x, const int* __restrict__ row_id, int cols, const TransformArg& arg,
                                                  int first_row, int first_col, const Take& take) {
    constexpr int kRows = TransformPlace::kRows;
    __shared__ u32 signs[kHadamardTile / kRows];
    const TransformPlace at;
    const int lane = threadIdx.x % 32;
    u32 counted = 0;
#pragma unroll
    for (int i = 0; i < kHadamardTile / kRows; ++i) {
        const int row = first_row + i * kRows + lane;
        const u32 of_quarter = __ballot_sync(kAllLanes, row < arg.rows && (row_id == nullptr || __ldg(row_id + row) >= 0));
        if (i == at.quarter) counted = of_quarter;
    }
    Few<In, TransformPlace::kCols> plain[kRows];
    const u8* const from = x + (u64(first_row + at.row) * cols + first_col + at.col) * In::kBytes;
    const u64 step = u64(cols) * In::kBytes;
    const int left = cols - first_col - at.col;
    if (cols % TransformPlace::kCols == 0) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) plain[i] = load_pair<In, true>(from + i * step, left, counted >> i & 1);
    } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i) plain[i] = load_pair<In, false>(from + i * step, left, counted >> i & 1);
    }
    if (threadIdx.x < kHadamardTile / 8) {
        const int row = first_row + 8 * threadIdx.x;
        reinterpret_cast<u8*>(signs)[threadIdx.x] = arg.hadamard.signs_of_eight_rows(row, arg.rows, row_id, arg.start, arg.num_groups);
    }
    __syncthreads();
    const u32 negated = signs[at.quarter];
#pragma unroll
    for (int i = 0; i < kRows; ++i) plain[i].flip(negated << (31 - i) & 0x80000000);
#pragma unroll
    for (int c = 0; c < TransformPlace::kCols; ++c) {
        float number[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) number[i] = plain[i].value(c);
        hadamard_across(number, lane, 8, arg.hadamard.len);
        take(c, number);
    }
}

/// Transforms all columns of this thread, and multiplies the results by the factor.
template <class In>
__device__ __forceinline__ void transform_columns(const u8* __restrict__ x, const int* __restrict__ row_id, int cols, const TransformArg& arg,
                                                  int first_row, int first_col, float (&number)[TransformPlace::kCols][TransformPlace::kRows]) {
    const float factor = arg.hadamard.factor;
    transform_columns<In>(x, row_id, cols, arg, first_row, first_col, [&](int c, const float (&transformed)[TransformPlace::kRows]) {
#pragma unroll
        for (int i = 0; i < TransformPlace::kRows; ++i) number[c][i] = __fmul_rn(transformed[i], factor);
    });
}

}  // namespace nib
