// Sums F32 rows as a binary tree over neighbours, ((0+1)+(2+3))...; a node without a right neighbour moves up unchanged.
//
// close_level<kCount>: sums x [shards * rows, cols] in groups of kGroupRows rows; the last group of
//   a shard may be shorter. The sums go to out [shards * groups, cols]; but if there is one group
//   per shard, they are added to out [shards, cols]. kCount is 4 if cols is a multiple of 4, else 1.
//   256 threads per CTA; the grid has shards * groups * ceil(cols / (32 * kCount)) CTAs. The kernel may be launched early (programmatic dependent launch).
//
// The number of rows in a group is a power of two, so the tree over the groups'
// sums continues the tree over the rows. Each launch computes one level of groups.
#pragma once
#include "pieces/plain/row_sums.cuh"

namespace nib {

template <int kCount>
__global__ void __launch_bounds__(kTreeThreads)
    close_level(const float* x, float* out, u32 rows, u32 cols, u32 groups, u32 blocks, int add) {
    __shared__ TreeRoom<kCount> room;
    const u32 row = blockIdx.x / blocks, block = blockIdx.x - row * blocks;
    const u32 shard = row / groups, first = (row - shard * groups) * kGroupRows;
    const u32 column = (block * kTreeQuads + threadIdx.x % kTreeQuads) * kCount;
    const bool present = column < cols;
    ptx::grid_wait();
    float sum[kCount];
    const u32 count = rows - first < kGroupRows ? rows - first : kGroupRows;
    close_rows<kCount>(x + (u64(shard) * rows + first) * cols + column, count, cols, present, room, sum);
    if (threadIdx.x >= kTreeQuads || !present) return;
    float* const to = out + u64(row) * cols + column;
    if (add)
        add_to<kCount>(to, sum);
    else
        Few<F32, kCount>::from_f32(sum).store(to);
}

}  // namespace nib
