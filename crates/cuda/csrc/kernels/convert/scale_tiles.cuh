// Copies one-byte scales of groups with different lengths between a dense matrix and tiles of 128 x 4 scales, where each group has its own tiles.
//
// tile_scales<kCutRows, kToTiles>: `dense` is [rows][cols]; `tiles` has the layout of nibble_core::ops::CutScales. `starts` [num_groups
//   + 1] are in values, and each start is divided by `per_scale`; a start that is out of range or out of order is clamped to the nearest
//   valid start. Each warp copies one tile, and each CTA eight; the grid has ceil(num_tiles / 8) CTAs, where `num_tiles` is the capacity
//   in tiles. With kToTiles, tiles outside all groups become zeros; without kToTiles, scales outside all groups are not written.
//
// Each lane copies 16 bytes of a tile: four columns of four rows, which are 32 rows apart.
#pragma once
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kScaleTileThreads = 256;
constexpr u32 kScaleTileRows = 128, kScaleTileCols = 4;

/// One group of the ragged tensor. The fields count scales along the dimension that groups divide.
struct ScaleGroup {
    u32 first, len;
    u32 tiles_before;  // number of tiles of the preceding groups, along the dimension that groups divide
    bool is_one;
};

/// Finds the group to which tile `at` belongs, where tiles are counted along the dimension that
/// groups divide. The whole warp calls this function, which examines 32 groups per iteration.
template <u32 kTile>
__device__ __forceinline__ ScaleGroup group_of_tile(u32 at, const int* __restrict__ starts, u32 num_groups, u32 cut, u32 per_scale) {
    constexpr u32 kAll = 0xFFFFFFFF;
    const u32 lane = ptx::lane_idx();
    const auto start_of = [&](u32 group) { return min(u32(max(__ldg(starts + group), 0)) / per_scale, cut); };
    u32 before = 0, reached = 0;  // tiles of the groups examined in earlier iterations, and the largest start so far
#pragma unroll 1
    for (u32 base = 0; base < num_groups; base += 32) {
        const u32 group = base + lane;
        u32 first = start_of(min(group, num_groups));
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const u32 of_lower = __shfl_up_sync(kAll, first, distance);
            if (lane >= distance) first = max(first, of_lower);
        }
        first = max(first, reached);
        u32 next = __shfl_down_sync(kAll, first, 1);
        if (lane == 31) next = max(first, start_of(min(group + 1, num_groups)));
        const u32 len = group < num_groups ? next - first : 0, tiles = (len + kTile - 1) / kTile;
        u32 through = tiles;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const u32 of_lower = __shfl_up_sync(kAll, through, distance);
            if (lane >= distance) through += of_lower;
        }
        through += before;
        const u32 past = __ballot_sync(kAll, at < through);
        if (past != 0) {
            const int owner = __ffs(past) - 1;
            return {__shfl_sync(kAll, first, owner), __shfl_sync(kAll, len, owner), __shfl_sync(kAll, through - tiles, owner), true};
        }
        before = __shfl_sync(kAll, through, 31);
        reached = __shfl_sync(kAll, next, 31);
    }
    return {0, 0, 0, false};
}

template <bool kCutRows, bool kToTiles>
__global__ void __launch_bounds__(kScaleTileThreads)
    tile_scales(u8* __restrict__ dense, u8* __restrict__ tiles, const int* __restrict__ starts, u32 num_groups, u32 rows, u32 cols,
                u32 per_scale, u32 num_tiles) {
    constexpr u32 kCutTile = kCutRows ? kScaleTileRows : kScaleTileCols, kOtherTile = kCutRows ? kScaleTileCols : kScaleTileRows;
    const u32 tile = (blockIdx.x * kScaleTileThreads + threadIdx.x) / 32, lane = ptx::lane_idx();
    if (tile >= num_tiles) return;
    const u32 across = ((kCutRows ? cols : rows) + kOtherTile - 1) / kOtherTile;
    const ScaleGroup group = group_of_tile<kCutTile>(tile / across, starts, num_groups, kCutRows ? rows : cols, per_scale);
    uint4* const there = reinterpret_cast<uint4*>(tiles) + u64(tile) * 32 + lane;
    if (!group.is_one) {
        if (kToTiles) *there = {0, 0, 0, 0};
        return;
    }
    // The next lines compute the tile's index within its group, the group's width in tiles, and the position of this lane's first scale within the group.
    const u32 in_group = tile - group.tiles_before * across;
    const u32 wide = kCutRows ? across : (group.len + kCutTile - 1) / kCutTile;
    const u32 row = in_group / wide * kScaleTileRows + lane, col = in_group % wide * kScaleTileCols;
    const u32 num_rows = kCutRows ? group.len : rows, num_cols = kCutRows ? cols : group.len;
    u8* const from = dense + (kCutRows ? u64(group.first) * cols : group.first) + u64(row) * cols + col;
    u32 word[4] = {};
    if (!kToTiles) {
        const uint4 all = *there;
        word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if (row + 32 * i >= num_rows) break;
        u8* const line = from + u64(32 * i) * cols;
        const u32 left = num_cols - col;
        if (left >= kScaleTileCols && reinterpret_cast<u64>(line) % 4 == 0) {
            u32* const four = reinterpret_cast<u32*>(line);
            if (kToTiles) word[i] = *four;
            else *four = word[i];
            continue;
        }
#pragma unroll
        for (u32 c = 0; c < kScaleTileCols; ++c) {
            if (c >= left) break;
            if (kToTiles) word[i] |= u32(line[c]) << 8 * c;
            else line[c] = u8(word[i] >> 8 * c);
        }
    }
    if (kToTiles) *there = {word[0], word[1], word[2], word[3]};
}

}  // namespace nib
