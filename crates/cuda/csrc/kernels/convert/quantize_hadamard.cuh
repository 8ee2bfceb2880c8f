// Applies a random Hadamard transform to BF16 values down the columns, then quantizes to blocks down the columns. The codes are stored transposed.
//
// quantize_hadamard_cols<E, kLen, Round>: x is [rows][cols], cols a multiple of 8. col_codes, capacity, row_id and counts have the
//   meaning of quantize_cols.cuh; there are no row outputs. col_scales is [capacity / E::kBlock][scale_stride], E8M0, with
//   scale_stride at least cols. The transform has length kLen. The transform restarts at the start of each of num_groups groups (start null:
//   at row 0). Groups start at multiples of kLen, and capacity is a multiple of kLen. Rows missing from a group's last transform
//   block read as +0; after the transform they are ordinary values. A CTA loops over tiles of 128 x 128 values (256 x 128 if two
//   codes share a byte); by_height divides by the number of tiles that lie below each other. 256 threads per CTA. Any grid size
//   gives correct results, and two CTAs per SM are fastest. Dynamic shared memory: sizeof(QuantizeHadamardShared<E, Round>) bytes.
//
// quantize_hadamard_cols_lifted<kLen, Round>: quantizes to MXFP4, but writes the E4M3 codes and col_scales [ceil(capacity / 128)][scale_stride]
//   that lift_lines would compute from it. counts counts MXFP4 blocks. by_height divides by the number of vertically adjacent 128 x 128 tiles.
//
// Each thread has one unit, which is half a column of a 128 x 128 tile; `ldmatrix` loads the unit transposed. A thread generates
// random bits for eight adjacent values of a row, and `ldmatrix` distributes both values and random bits to the threads.
//
// Speed at the two shapes of quantize_hadamard_rows.cuh, in % of the bandwidth limit of quantize.cuh: MXFP4 65 % (52 %), E4M3 90 % (71 %).
#pragma once
#include "math/reduce.cuh"
#include "pieces/convert/column_codes.cuh"
#include "pieces/convert/hadamard_unit.cuh"
#include "pieces/convert/lift.cuh"
#include "ptx/thread.cuh"

namespace nib {

/// A tile has 128 rows of 256 bytes. The 16-byte chunks of a row are swizzled by the row's
/// index, so that the eight rows that `ldmatrix` reads for a matrix are in different banks.
struct UnitsTile {
    uint4 chunks[kTile][kTile / 8];

    __device__ __forceinline__ uint4& at(int row, int chunk) { return chunks[row][chunk ^ (row % 2 * 2 + row / kUnit * 4)]; }

    /// Loads this lane's unit, with two rows per word. The unit is half lane
    /// % 2 of column lane % 4 / 2 * 8 + lane / 4 of the warp's 16 columns.
    __device__ __forceinline__ void load(u32 (&pairs)[kUnit / 2]) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u32 first = shared_address(&at(lane % 4 / 2 * kUnit + lane / 8 * 2 + lane % 2, warp * 2 + lane % 8 / 4));
#pragma unroll
        for (int i = 0; i < kUnit / 8; ++i) {
            u32 four[4];
            ptx::load_matrix_x4_transposed(four, first + i * 8 * sizeof(chunks[0]));
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[4 * i + j] = four[j];
        }
    }
};

/// A tile of codes has one row of 128 bytes for each column of x.
/// The 16-byte chunks of a row are swizzled by the column's index.
struct LineTile {
    u8 bytes[kTile * kTile];

    __device__ __forceinline__ u8* place(int col, int i) { return bytes + col * kTile + (i ^ (col % 8)) * 16; }
    __device__ __forceinline__ uint4 chunk(int col, int i) const {
        return *reinterpret_cast<const uint4*>(bytes + col * kTile + (i ^ (col % 8)) * 16);
    }
};

template <class E, class Round>
struct alignas(16) QuantizeHadamardShared {
    UnitsTile input;
    LineTile tile;
    u32 signs[kTile / 2];  // each word has the signs of two rows, in the bit positions that the two values have
    u32 total[3];
    alignas(16) u8 random[Round::kDraws ? sizeof(UnitsTile) : 16];
};

/// Converts the MXFP4 codes of a unit to E4M3, and returns the new scale. The
/// neighbouring lane has the other half of the 128 values that share this scale.
template <class Round>
__device__ __forceinline__ int lift_unit(const UnitCodes<E2m1, Round>& unit, u32 (&lifted)[kUnit / 4]) {
    constexpr int kBlocks = UnitCodes<E2m1, Round>::kBlocks;
    static_assert(kBlocks == 2, "blocks of 32");
    u32 largest = max(above_nan(unit.scales[0]), above_nan(unit.scales[1]));
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    const int target = lift_target(largest);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        const BlockLift lift(unit.scales[b], target);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 four = lift.sixteen(unit.words[b * 4 + i * 2], unit.words[b * 4 + i * 2 + 1]);
            u32* const to = lifted + b * 8 + i * 4;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
    }
    return target;
}

template <class E, int kLen, class Round, bool kLifted>
__device__ __forceinline__ void quantize_transformed(const u8* __restrict__ x, u8* __restrict__ col_codes, u8* __restrict__ col_scales, u64* counts,
                                                     const int* __restrict__ row_id, int rows, int cols, int capacity, int scale_stride,
                                                     Divider by_height, PowerRule rule, const RoundingArg& rounding, const HadamardArg& hadamard,
                                                     const int* __restrict__ start, int num_groups) {
    using Codes = UnitCodes<E, Round>;
    constexpr int kPerByte = kLifted ? 1 : 8 / E::kCodeBits;
    extern __shared__ uint4 raw[];
    QuantizeHadamardShared<E, Round>& shared = *reinterpret_cast<QuantizeHadamardShared<E, Round>*>(raw);
    UnitsTile& random = *reinterpret_cast<UnitsTile*>(shared.random);
    const Round round(rounding);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // When values are loaded and random bits are generated, a thread has eight rows of eight columns.
    const int eight_rows = (warp * 2 + lane / 16) * 8, chunk = lane % 16;
    const int half = lane % 2, column = warp * 16 + lane % 4 / 2 * 8 + lane / 4;
    const int down = ceil_div(capacity, kTile), across = ceil_div(cols, kTile), height = ceil_div(down, kPerByte), tiles = height * across;
    const u64 in_bytes = u64(cols) * Bf16::kBytes, col_bytes = u64(capacity) / kPerByte;
    Tally tally;

    const auto fetch = [&](int strip, int panel) {
        const int first = strip * kTile, col = panel * kTile + chunk * 8;
        const u32 counted = rows_of_lane<8>(row_id, first + warp * 16, rows);
        const u8* from = x + (first + eight_rows) * in_bytes + col * Bf16::kBytes;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            ptx::copy_16_async(&shared.input.at(eight_rows + j, chunk), from, col < cols && (counted >> j & 1));
            from += in_bytes;
        }
        if (threadIdx.x < kTile / 8) {
            const int row = first + 8 * threadIdx.x;
            const uint4 signs = hadamard.sign_bits_of_eight_rows<kLen>(row, rows, row_id, start, num_groups);
            *reinterpret_cast<uint4*>(shared.signs + 4 * threadIdx.x) = signs;
        }
    };
    int panel = by_height.divide(blockIdx.x), first_strip = (blockIdx.x - panel * height) * kPerByte;
    fetch(first_strip, panel);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        // If two codes share a byte, two strips of x, one below the other, fill the rows of a tile of codes.
        const int end_strip = min(first_strip + kPerByte, down), first_col = panel * kTile;
        const int next = tile + gridDim.x, next_panel = by_height.divide(next), next_strip = (next - next_panel * height) * kPerByte;
        for (int strip = first_strip; strip < end_strip; ++strip) {
            ptx::copies_wait();
            __syncthreads();
            if constexpr (Round::kDraws) {
                int id = strip * kTile + warp * 16 + lane % 16;
                if (row_id != nullptr && id < rows) id = max(__ldg(row_id + id), 0);
#pragma unroll 2
                for (int j = 0; j < 8; ++j) {
                    const u64 element = u64(__shfl_sync(kAllLanes, id, (lane & 16) / 2 + j)) * cols + first_col + chunk * 8;
                    const auto bits = round.draws(element).bits(0);
                    random.at(eight_rows + j, chunk) = {bits.word[0], bits.word[1], bits.word[2], bits.word[3]};
                }
            }
            u32 pairs[kUnit / 2];
            shared.input.load(pairs);
            float v[kUnit];
            const uint4* const signs = reinterpret_cast<const uint4*>(shared.signs + half * (kUnit / 2));
#pragma unroll
            for (int i = 0; i < kUnit / 8; ++i) {
                Bf16::Eight plain = {{pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]}};
                flip(plain, signs[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) v[i * 8 + j] = Bf16::value(plain, j);
            }
            __syncthreads();
            // All threads have read the tile that was fetched, so the next tile may overwrite it.
            const bool more = strip + 1 < end_strip;
            if (more || next < tiles) fetch(more ? strip + 1 : next_strip, more ? panel : next_panel);
            u32 drawn[kUnit / 2];
            if constexpr (Round::kDraws) random.load(drawn);
            const auto bits_of = [&](int i) {
                typename Round::Bits bits;
                if constexpr (Round::kDraws) bits = {{drawn[4 * i], drawn[4 * i + 1], drawn[4 * i + 2], drawn[4 * i + 3]}};
                return bits;
            };
            Codes out;
            out.template encode<kLen>(v, hadamard.factor, rule, round, bits_of);
            if constexpr (kLifted) {
                constexpr int kWords = kUnit / 4;
                u32 lifted[kWords];
                const int target = lift_unit(out, lifted), col = first_col + column;
                if (half == 0 && col < scale_stride && strip * kTile < capacity) col_scales[u64(strip) * scale_stride + col] = u8(target);
                if (col < cols) {
                    tally.non_finite += out.non_finite;
                    tally.non_zero += out.non_zero;
                }
#pragma unroll
                for (int i = 0; i < kWords / 4; ++i) {
                    const u32* const four = lifted + 4 * i;
                    ptx::store_16(shared.tile.place(column, half * (kWords / 4) + i), {four[0], four[1], four[2], four[3]});
                }
                continue;
            }
            if (Codes::kLanes == 1 || half == 0) {
                const int block = strip * (kTile / E::kBlock) + half * Codes::kBlocks, col = first_col + column;
#pragma unroll
                for (int b = 0; b < Codes::kBlocks; ++b)
                    if (col < scale_stride && (block + b) * E::kBlock < capacity) col_scales[u64(block + b) * scale_stride + col] = out.scales[b];
                if (col < cols) {
                    tally.non_finite += out.non_finite;
                    if constexpr (!Round::kDraws) tally.non_zero += out.non_zero;
                }
            }
            constexpr int kChunks = Codes::kWords / 4;
            const int first_chunk = ((strip - first_strip) * 2 + half) * kChunks;
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const u32* const four = out.words + 4 * i;
                ptx::store_16(shared.tile.place(column, first_chunk + i), {four[0], four[1], four[2], four[3]});
            }
        }
        __syncthreads();
        const int left = (min(end_strip * kTile, capacity) - first_strip * kTile) / kPerByte;
        store_turned<E, Round::kDraws && !kLifted, 256>(shared.tile, col_codes + first_col * col_bytes + first_strip * kTile / kPerByte, col_bytes,
                                                        cols - first_col, left, tally);
        first_strip = next_strip, panel = next_panel;
    }
    tally.flush(counts, shared.total);
}

template <class E, int kLen, class Round>
__global__ void __launch_bounds__(256, 2)
    quantize_hadamard_cols(const u8* __restrict__ x, u8* __restrict__ col_codes, u8* __restrict__ col_scales, u64* counts,
                           const int* __restrict__ row_id, int rows, int cols, int capacity, int scale_stride, Divider by_height, PowerRule rule,
                           const RoundingArg rounding, const HadamardArg hadamard, const int* __restrict__ start, int num_groups) {
    quantize_transformed<E, kLen, Round, false>(x, col_codes, col_scales, counts, row_id, rows, cols, capacity, scale_stride, by_height, rule, rounding,
                                                hadamard, start, num_groups);
}

template <int kLen, class Round>
__global__ void __launch_bounds__(256, 2)
    quantize_hadamard_cols_lifted(const u8* __restrict__ x, u8* __restrict__ col_codes, u8* __restrict__ col_scales, u64* counts,
                                  const int* __restrict__ row_id, int rows, int cols, int capacity, int scale_stride, Divider by_height, PowerRule rule,
                                  const RoundingArg rounding, const HadamardArg hadamard, const int* __restrict__ start, int num_groups) {
    quantize_transformed<E2m1, kLen, Round, true>(x, col_codes, col_scales, counts, row_id, rows, cols, capacity, scale_stride, by_height, rule, rounding,
                                                  hadamard, start, num_groups);
}

}  // namespace nib
