// A tile of 128 x 128 one-byte codes, which shared memory holds transposed. A
// write stores eight rows of a column at a time, and a read loads sixteen rows.
//
// Column c has 128 bytes, which are 16 slots of 8 bytes. Octet o (rows 8o .. 8o + 7) of the column is in slot
// 2·((o / 2) ^ (c / 8 % 8)) + (o % 2 ^ c / 64). If the 16 lanes of a half-warp differ in c / 8, they write without
// bank conflicts. Eight lanes that read the eight 16-byte chunks of a column have no bank conflicts either.
#pragma once
#include "ptx/global.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kTile = 128;  // number of rows and of columns of a tile; also the size of an FP8 block

struct ColumnTile {
    u8 bytes[kTile * kTile];

    /// Returns the address of rows 8·octet to 8·octet + 7 of column `col`, which is a
    /// multiple of 8. The address of each of the next seven columns is kTile bytes higher.
    __device__ __forceinline__ u8* place(int col, int octet) {
        const int chunk = octet / 2 ^ (col / 8 % 8);
        const int half = (octet ^ col / 64) & 1;
        return bytes + col * kTile + chunk * 16 + half * 8;
    }

    /// Loads rows 16i to 16i + 15 of column `col`.
    __device__ __forceinline__ uint4 chunk(int col, int i) const {
        const uint4 v = *reinterpret_cast<const uint4*>(bytes + col * kTile + (i ^ (col / 8 % 8)) * 16);
        return col < kTile / 2 ? v : uint4{v.z, v.w, v.x, v.y};
    }

    /// Stores the whole tile; adjacent columns are `stride` bytes apart. Columns 0 to 63 are stored
    /// from `low` on, and columns 64 to 127 from `high` on. `low_left` and `high_left` are the
    /// numbers of columns that exist. All `kThreads` threads call this function, after a barrier.
    template <int kThreads>
    __device__ __forceinline__ void store(u8* low, int low_left, u8* high, int high_left, u64 stride) const {
        const int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
        low += first * stride + chunk * 16;
        high += first * stride + chunk * 16;
#pragma unroll
        for (int line = 0; line < kTile / 2; line += kThreads / 8) {
            // The order of octets depends on the half of the tile that a column is in: `v` is for the first half, `w`
            // for the second.
            const u8* from = bytes + (line + first) * kTile + (chunk ^ ((line + first) / 8 % 8)) * 16;
            const uint4 v = *reinterpret_cast<const uint4*>(from);
            const uint4 w = *reinterpret_cast<const uint4*>(from + kTile / 2 * kTile);
            if (line + first < low_left) ptx::store_16(low + line * stride, v);
            if (line + first < high_left) ptx::store_16(high + line * stride, {w.z, w.w, w.x, w.y});
        }
    }

    /// Stores the whole tile to `codes`, whose columns are `stride` bytes apart. Column 0 of the tile goes to
    /// column `first_col`, and row 0 to byte `first_row` of that column. Columns from `cols` on do not exist.
    template <int kThreads>
    __device__ __forceinline__ void store(u8* codes, int first_col, int cols, u64 stride, int first_row) const {
        u8* const low = codes + first_col * stride + first_row;
        store<kThreads>(low, cols - first_col, low + kTile / 2 * stride, cols - first_col - kTile / 2, stride);
    }
};

/// The tile that this CTA processes. Tiles are ordered in bands of `band` strips of 128 rows, and within a band panel
/// by panel. So CTAs that run concurrently write 128 · band adjacent bytes of each output row. For a single band, the
/// launch passes the number of strips.
struct TilePlace {
    int strip, panel;  // strip of 128 rows, and panel of 128 columns
    int across, down;  // number of panels, and number of strips

    __device__ __forceinline__ TilePlace(int cols, int capacity, int band)
        : TilePlace(blockIdx.x, ceil_div(cols, kTile), capacity / kTile, band) {}

    /// Returns the place of tile `index`.
    __device__ __forceinline__ TilePlace(int index, int across, int down, int band) : across(across), down(down) {
        const int first = index / (band * across) * band;
        const int height = min(band, down - first);
        const int within = index - first * across;
        panel = within / height;
        strip = first + within - panel * height;
    }
};

/// Transposes four rows of four one-byte codes.
__device__ __forceinline__ void turn_4x4(const u32 (&row)[4], u32 (&col)[4]) {
    const u32 a = __byte_perm(row[0], row[1], 0x5140), b = __byte_perm(row[2], row[3], 0x5140);
    const u32 c = __byte_perm(row[0], row[1], 0x7362), d = __byte_perm(row[2], row[3], 0x7362);
    col[0] = __byte_perm(a, b, 0x5410);
    col[1] = __byte_perm(a, b, 0x7632);
    col[2] = __byte_perm(c, d, 0x5410);
    col[3] = __byte_perm(c, d, 0x7632);
}

/// Transposes codes of eight rows of eight columns and writes them to `place` in a ColumnTile.
/// four_cols[0] has the first four columns of each row, and four_cols[1] the last four.
__device__ __forceinline__ void turn_8x8(const u32 (&four_cols)[2][8], u8* place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32(&of)[8] = four_cols[half];
        u32 upper[4], lower[4];
        turn_4x4({of[0], of[1], of[2], of[3]}, upper);
        turn_4x4({of[4], of[5], of[6], of[7]}, lower);
#pragma unroll
        for (int c = 0; c < 4; ++c) ptx::store_8(place + (half * 4 + c) * kTile, {upper[c], lower[c]});
    }
}

}  // namespace nib
