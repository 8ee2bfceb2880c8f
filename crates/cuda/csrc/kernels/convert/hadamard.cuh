// The random Hadamard transform of a matrix, to F32: for quantizations whose kernel does not do it as it reads.
//
// out[out_rows][cols] = the transform of x [rows][cols]. row_id as in quantize.cuh: rows that do not count read as zero.
//
// hadamard_rows<In>: along the rows; cols is a multiple of hadamard.len, out_rows = rows. 256 threads; grid
//   ceil(rows * ceil(cols / 256) / 8), where `by_segments` divides by segments = ceil(cols / 256).
// hadamard_cols<In>: down the columns, from the start of each of num_groups groups (start null: from row 0); groups start at multiples of
//   hadamard.len, and out_rows is one. 256 threads; grid ceil(cols / 128) * ceil(out_rows / 128).
#pragma once
#include "formats/plain.cuh"
#include "math/hadamard.cuh"
#include "math/reduce.cuh"

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
    // cols is a multiple of 16, so eight columns exist or none.
    auto plain = In::template load<true>(x + first * In::kBytes, present ? 8 : 0);
    if (present) flip(plain, hadamard.sign_bits_of_eight(col));
    F32::Eight wide = widen<In>(plain);
    hadamard_across(wide.number, threadIdx.x % 32, 1, hadamard);
    if (col >= cols) return;
    float4* const to = reinterpret_cast<float4*>(out + first);
    to[0] = {wide.number[0], wide.number[1], wide.number[2], wide.number[3]};
    to[1] = {wide.number[4], wide.number[5], wide.number[6], wide.number[7]};
}

/// Two neighbours of a row, as far as it has them; zeros where it does not count. kPairs: rows have an even number.
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

template <class In>
__global__ void __launch_bounds__(256)
    hadamard_cols(const u8* __restrict__ x, float* __restrict__ out, const int* __restrict__ row_id, const int* __restrict__ start,
                  int num_groups, int rows, int cols, int out_rows, const HadamardArg hadamard) {
    constexpr int kRows = 32, kCols = 2;  // of a lane; four lanes have the rows of a tile
    __shared__ u32 signs[kHadamardTile / kRows];
    const int across = ceil_div(cols, kHadamardTile), lane = threadIdx.x % 32, quarter = lane / 8;
    const int first_row = blockIdx.x / across * kHadamardTile, row = first_row + quarter * kRows;
    const int col = blockIdx.x % across * kHadamardTile + threadIdx.x / 32 * 16 + lane % 8 * kCols;
    u32 counted = 0;
#pragma unroll
    for (int i = 0; i < kHadamardTile / kRows; ++i) {
        const int r = first_row + i * kRows + lane;
        const u32 of_quarter = __ballot_sync(kAllLanes, r < rows && (row_id == nullptr || __ldg(row_id + r) >= 0));
        if (i == quarter) counted = of_quarter;
    }
    const u64 first = u64(row) * cols + col;
    const bool in_pairs = cols % kCols == 0;
    Few<In, kCols> plain[kRows];
    const u8* const from = x + first * In::kBytes;
    const u64 step = u64(cols) * In::kBytes;
    if (in_pairs) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) plain[i] = load_pair<In, true>(from + i * step, cols - col, counted >> i & 1);
    } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i) plain[i] = load_pair<In, false>(from + i * step, cols - col, counted >> i & 1);
    }
    if (threadIdx.x < kHadamardTile / 8)
        reinterpret_cast<u8*>(signs)[threadIdx.x] = hadamard.signs_of_eight_rows(first_row + 8 * threadIdx.x, rows, row_id, start, num_groups);
    __syncthreads();
    const u32 negated = signs[quarter];
    float number[kCols][kRows];
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            number[c][i] = __uint_as_float(__float_as_uint(plain[i].value(c)) ^ (negated << (31 - i) & 0x80000000));
        hadamard_across(number[c], lane, 8, hadamard);
    }
    float* const to = out + first;
    if (in_pairs) {
        const int present = col < cols ? out_rows - row : 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            if (i < present) *reinterpret_cast<float2*>(to + u64(i) * cols) = {number[0][i], number[1][i]};
    } else {
#pragma unroll
        for (int i = 0; i < kRows * kCols; ++i)
            if (i / kCols < out_rows - row && col + i % kCols < cols) to[u64(i / kCols) * cols + i % kCols] = number[i % kCols][i / kCols];
    }
}

}  // namespace nib
