// BF16 -> a random Hadamard transform down the columns -> blocks with scales down the columns, stored transposed.
//
// quantize_hadamard_cols<E, kF32Scales, Round>: x [rows][cols], cols a multiple of 8; col_codes, col_scales, capacity, row_id, counts, grid
//   and band as in quantize_cols.cuh, without its row planes. The transform starts at the start of each of num_groups groups (start null: at row
//   0); groups start at multiples of hadamard.len, and capacity is one. What is missing of a group's last transform block reads as +0, and
//   becomes numbers like others. 512 threads; sizeof(HadamardShared<E, kF32Scales, Round>) dynamic shared memory.
//
// A thread has a quarter of a column of a square: the butterflies up to stride 16 are its own, and so is what follows, in the order in which
// it is stored. Random bits are drawn by eights of a row, and change hands in shared memory.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "kernels/quantize_cols.cuh"
#include "math/hadamard.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kQuarter = kTile / 4;

/// 128 rows of 256 bytes, each quarter of them 32 bytes further on: then rows of different quarters lie in different banks.
struct QuartersTile {
    static constexpr int kRowBytes = kTile * Bf16::kBytes;
    u8 bytes[kTile * kRowBytes + 3 * 32];

    __device__ __forceinline__ u8* at(int row, int col) { return bytes + row * kRowBytes + row / kQuarter * 32 + col * Bf16::kBytes; }
};

/// Lines of 128 bytes of codes, a column each, in chunks of 16: a column's own number decides about their order.
struct LineTile {
    u8 bytes[kTile * kTile];

    __device__ __forceinline__ u8* place(int col, int i) { return bytes + col * kTile + (i ^ (col % 8)) * 16; }
    __device__ __forceinline__ uint4 chunk(int col, int i) const {
        return *reinterpret_cast<const uint4*>(bytes + col * kTile + (i ^ (col % 8)) * 16);
    }
};

/// Puts the codes of eight rows to the words of a column.
template <int kCount>
__device__ __forceinline__ void put_words(u32 (&words)[kCount], int i, u32 codes) {
    words[i] = codes;
}
template <int kCount>
__device__ __forceinline__ void put_words(u32 (&words)[kCount], int i, uint2 codes) {
    words[i] = codes.x;
    words[i + 1] = codes.y;
}

template <class E, bool kF32Scales, class Round>
struct alignas(16) HadamardShared {
    static constexpr int kBlocks = kTile / E::kBlock;
    QuartersTile input;
    LineTile tile;
    u32 signs[kTile];  // of rows: bit 31
    u32 total[3];
    alignas(16) u8 random[Round::kDraws ? sizeof(QuartersTile) : 16];
};

template <class E, bool kF32Scales, class Round>
__global__ void __launch_bounds__(512, 2)
    quantize_hadamard_cols(const u8* __restrict__ x, u8* __restrict__ col_codes, ScaleOf<kF32Scales>* __restrict__ col_scales, u64* counts,
                           const int* __restrict__ row_id, int rows, int cols, int capacity, int band, PowerRule rule,
                           const RoundingArg rounding, const HadamardArg hadamard, const int* __restrict__ start, int num_groups) {
    using Shared = HadamardShared<E, kF32Scales, Round>;
    constexpr int kBlocks = Shared::kBlocks, kPerByte = 8 / E::kCodeBits, kRowBytes = QuartersTile::kRowBytes;
    constexpr int kLanes = E::kBlock / kQuarter;  // of a block: 1 or 4, eight lanes apart
    extern __shared__ uint4 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    QuartersTile& random = *reinterpret_cast<QuartersTile*>(shared.random);
    const Round round(rounding);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // As they fetch and draw, threads have four rows of eight columns.
    const int four_rows = (warp * 2 + lane / 16) * 4, chunk = lane % 16;
    const int quarter = lane / 8, column = warp * 8 + lane % 8;
    const int down = ceil_div(capacity, kTile);
    const TilePlace at(cols, ceil_div(down, kPerByte) * kTile, band);
    const int first_strip = at.strip * kPerByte, end_strip = min(first_strip + kPerByte, down), first_col = at.panel * kTile;
    const u64 in_bytes = u64(cols) * Bf16::kBytes, col_bytes = u64(capacity) / kPerByte;
    Tally tally;

    const auto fetch = [&](int strip) {
        const int first = strip * kTile, col = first_col + chunk * 8;
        const u32 counted = rows_of_lane<4>(row_id, first + warp * 8, rows);
        fetch_rows<Bf16, 4>(shared.input.at(four_rows, chunk * 8), x + (first + four_rows) * in_bytes + col * Bf16::kBytes, in_bytes,
                            col < cols ? counted : 0);
    };
    fetch(first_strip);
    for (int strip = first_strip; strip < end_strip; ++strip) {
        const int first_row = strip * kTile;
        if (threadIdx.x < kTile / 8) {
            const u32 signs = hadamard.signs_of_eight_rows(first_row + 8 * threadIdx.x, rows, row_id, start, num_groups);
#pragma unroll
            for (int i = 0; i < 8; ++i) shared.signs[8 * threadIdx.x + i] = signs >> i << 31;
        }
        if constexpr (Round::kDraws) {
            int id = first_row + warp * 8 + lane % 8;
            if (row_id != nullptr && id < rows) id = max(__ldg(row_id + id), 0);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u64 element = u64(__shfl_sync(kAllLanes, id, (lane & 16) / 4 + j)) * cols + first_col + chunk * 8;
                const auto bits = round.template bits<true>(element);
                ptx::store_16(random.at(four_rows + j, chunk * 8), {bits.word[0], bits.word[1], bits.word[2], bits.word[3]});
            }
        }
        ptx::copies_wait();
        __syncthreads();
        float v[kQuarter];
        const u8* const from = shared.input.at(quarter * kQuarter, column);
        const uint4* const signs = reinterpret_cast<const uint4*>(shared.signs + quarter * kQuarter);
#pragma unroll
        for (int i = 0; i < kQuarter; i += 4) {
            const uint4 four = signs[i / 4];
            const u32 sign[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)  // the sum turns the sign over
                v[i + j] = __uint_as_float(*reinterpret_cast<const u16*>(from + (i + j) * kRowBytes) * 0x10000u + sign[j]);
        }
        butterflies(v, hadamard.len);
        for (u32 lanes = 8; lanes < hadamard.len / 4; lanes *= 2) {
            const float own = lane & lanes ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < kQuarter; ++i) v[i] = __fmaf_rn(v[i], own, __shfl_xor_sync(kAllLanes, v[i], lanes));
        }
        float largest = 0;
#pragma unroll
        for (int i = 0; i < kQuarter; ++i) {
            v[i] = __fmul_rn(v[i], hadamard.factor);
            largest = ptx::max_magnitude(largest, v[i]);
        }
#pragma unroll
        for (int lanes = 8; lanes < 8 * kLanes; lanes *= 2)
            largest = ptx::max_magnitude(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
        const auto scale = scale_of<E, kF32Scales>(__float_as_uint(largest), rule);
        if (quarter % kLanes == 0) {
            const bool present = first_col + column < cols;
            col_scales[u64(strip * kBlocks + quarter / kLanes) * at.across * kTile + first_col + column] = scale.stored;
            tally.non_finite += present && scale.is_nan();
            if constexpr (!Round::kDraws)
                tally.non_zero += present && Round::template reaches<E>(__fmul_rn(largest, scale.inverse));
        }
        u32 words[kQuarter / 4 / kPerByte];
#pragma unroll
        for (int i = 0; i < kQuarter; i += 8) {
            F32::Eight eight;
#pragma unroll
            for (int j = 0; j < 8; ++j) eight.number[j] = v[i + j];
            typename Round::Bits bits;
            if constexpr (Round::kDraws) {
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const u8* const drawn = random.at(quarter * kQuarter + i + j, column);
                    bits.word[j / 2] =
                        *reinterpret_cast<const u16*>(drawn) | u32(*reinterpret_cast<const u16*>(drawn + kRowBytes)) << 16;
                }
            }
            auto codes = round.template encode<E, kRuleFloor, F32>(eight, scale.inverse, bits);
            if (scale.is_nan()) codes = E::zeros();
            put_words(words, i / 4 / kPerByte, codes);
        }
        // Two strips of half bytes fill the lines of a tile.
        const int first_chunk = (strip - first_strip) * 4 + quarter * (2 / kPerByte);
#pragma unroll
        for (int i = 0; i < 2 / kPerByte; ++i)
            ptx::store_16(shared.tile.place(column, first_chunk + i), {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
        __syncthreads();
        // What was fetched and drawn has been read.
        if (strip + 1 < end_strip) fetch(strip + 1);
    }
    const int left = (min(end_strip * kTile, capacity) - first_strip * kTile) / kPerByte;
    store_turned<E, Round::kDraws, 512>(shared.tile, col_codes + first_col * col_bytes + first_strip * kTile / kPerByte, col_bytes,
                                        cols - first_col, left, tally);
    tally.flush(counts, shared.total);
}

}  // namespace nib
