// The random Hadamard transform of a matrix, to F32: for quantizations whose kernel does not do it as it reads.
//
// out[out_rows][cols] = the transform of x [rows][cols]. row_id as in quantize.cuh: rows that do not count read as zero.
//
// hadamard_rows<In>: along the rows; cols is a multiple of hadamard.len, out_rows = rows. 256 threads; grid
//   ceil(rows * ceil(cols / 256) / 8), where `by_segments` divides by segments = ceil(cols / 256).
// hadamard_cols<In>: down the columns, from the start of each of num_groups groups (start null: from row 0); groups start at multiples of
//   hadamard.len, and out_rows is one. 256 threads; grid ceil(cols / 128) * ceil(out_rows / 128); 65552 bytes of dynamic
//   shared memory.
#pragma once
#include "formats/bf16.cuh"
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
    hadamard_row(wide, hadamard);
    if (col >= cols) return;
    float4* const to = reinterpret_cast<float4*>(out + first);
    to[0] = {wide.number[0], wide.number[1], wide.number[2], wide.number[3]};
    to[1] = {wide.number[4], wide.number[5], wide.number[6], wide.number[7]};
}

struct HadamardColsShared {
    float tile[kHadamardTile * kHadamardTile];
    u8 signs[kHadamardTile / 8];
};

template <class In>
__global__ void __launch_bounds__(256)
    hadamard_cols(const u8* __restrict__ x, float* __restrict__ out, const int* __restrict__ row_id, const int* __restrict__ start,
                  int num_groups, int rows, int cols, int out_rows, const HadamardArg hadamard) {
    extern __shared__ uint4 raw[];
    HadamardColsShared& shared = *reinterpret_cast<HadamardColsShared*>(raw);
    const int across = ceil_div(cols, kHadamardTile);
    const int first_row = blockIdx.x / across * kHadamardTile;
    const int in_tile = threadIdx.x % kHadamardTile, col = blockIdx.x % across * kHadamardTile + in_tile;
    for (int i = threadIdx.x / kHadamardTile; i < kHadamardTile; i += 2) {
        const int row = first_row + i;
        const bool present = row < rows && col < cols && (row_id == nullptr || __ldg(row_id + row) >= 0);
        shared.tile[i * kHadamardTile + in_tile] = present ? In::number(x + (u64(row) * cols + col) * In::kBytes) : 0.0f;
    }
    if (threadIdx.x < kHadamardTile / 8)
        shared.signs[threadIdx.x] = hadamard.signs_of_eight_rows(first_row + 8 * threadIdx.x, rows, row_id, start, num_groups);
    __syncthreads();
    hadamard_columns<F32>(shared.tile, shared.tile, shared.signs, hadamard);
    __syncthreads();
    for (int i = threadIdx.x / kHadamardTile; i < kHadamardTile; i += 2)
        if (first_row + i < out_rows && col < cols) out[u64(first_row + i) * cols + col] = shared.tile[i * kHadamardTile + in_tile];
}

}  // namespace nib
