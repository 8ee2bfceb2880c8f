// BF16 -> a random Hadamard transform down the columns -> blocks with scales down the columns, stored transposed.
//
// quantize_hadamard_cols<E, kF32Scales, Round>: x [rows][cols], cols a multiple of 8; col_codes, col_scales, capacity, row_id, counts and the
//   division into squares as in quantize_cols.cuh, without its row planes. The transform starts at the start of each of num_groups groups (start
//   null: at row 0); groups start at multiples of hadamard.len, and capacity is one. What is missing of a group's last transform block reads as
//   +0, and becomes numbers like others. 256 threads; sizeof(HadamardShared<E, kF32Scales, Round>) dynamic shared memory.
//
// A thread has half a column of a square: all butterflies but the last of 128 are its own, and so is what follows, in the order in which it
// is stored. Random bits are drawn by eights of a row, and change hands in shared memory.
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

/// 128 rows of 256 bytes, the lower half of them 64 bytes further on: then two rows 64 apart lie in different banks.
struct HalvesTile {
    u8 bytes[kTile * 256 + 64];

    __device__ __forceinline__ u8* at(int row, int col) { return bytes + row * 256 + row / 64 * 64 + col * 2; }
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
    HalvesTile input;
    LineTile tile;
    ScaleOf<kF32Scales> scales[kPanels * kTile][kStrips * kBlocks];
    u32 signs[kTile];  // of rows: bit 31
    u32 total[3];
    alignas(16) u8 random[Round::kDraws ? sizeof(HalvesTile) : 16];
};

template <class E, bool kF32Scales, class Round>
__global__ void __launch_bounds__(256, 2)
    quantize_hadamard_cols(const u8* __restrict__ x, u8* __restrict__ col_codes, ScaleOf<kF32Scales>* __restrict__ col_scales, u64* counts,
                           const int* __restrict__ row_id, int rows, int cols, int capacity, int strips, int panels, int band, int whole,
                           int part, PowerRule rule, const RoundingArg rounding, const HadamardArg hadamard,
                           const int* __restrict__ start, int num_groups) {
    using Shared = HadamardShared<E, kF32Scales, Round>;
    constexpr int kBlocks = Shared::kBlocks, kPerByte = 8 / E::kCodeBits;
    constexpr int kHalf = kTile / 2, kHeld = E::kBlock == kTile ? 1 : 2;  // rows of a thread, and its blocks
    extern __shared__ uint4 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    HalvesTile& random = *reinterpret_cast<HalvesTile*>(shared.random);
    const Round round(rounding);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // As they fetch and draw, threads have eight rows of eight columns.
    const int octet = warp * 2 + lane / 16, chunk = lane % 16;
    const int half = lane / 16, column = warp * 16 + lane % 16;
    const Squares at(ceil_div(capacity, kTile), ceil_div(cols, kTile), strips, panels, band, whole, part);
    if (at.strips <= 0 || at.panels <= 0) return;
    const u64 in_bytes = u64(cols) * Bf16::kBytes, col_bytes = u64(capacity) / kPerByte;
    Tally tally;

    const auto fetch = [&](int s, int p) {
        const int first = (at.strip + s) * kTile, col = (at.panel + p) * kTile + chunk * 8;
        const u32 counted = rows_of_lane(row_id, first + warp * 16, rows);
        fetch_octet<Bf16>(shared.input.at(octet * 8, chunk * 8), x + (first + octet * 8) * in_bytes + col * Bf16::kBytes, in_bytes,
                          col < cols ? counted : 0);
    };
    fetch(0, 0);
    for (int s = 0, p = 0; p < at.panels;) {
        const int next_s = s + 1 < at.strips ? s + 1 : 0, next_p = next_s == 0 ? p + 1 : p;
        const int first_row = (at.strip + s) * kTile, first_col = (at.panel + p) * kTile;
        if (threadIdx.x < kTile / 8) {
            const u32 signs = hadamard.signs_of_eight_rows(first_row + 8 * threadIdx.x, rows, row_id, start, num_groups);
#pragma unroll
            for (int i = 0; i < 8; ++i) shared.signs[8 * threadIdx.x + i] = signs >> i << 31;
        }
        if constexpr (Round::kDraws) {
            int id = first_row + warp * 16 + lane % 16;
            if (row_id != nullptr && id < rows) id = max(__ldg(row_id + id), 0);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const u64 element = u64(__shfl_sync(kAllLanes, id, (lane & 16) / 2 + j)) * cols + first_col + chunk * 8;
                const auto bits = round.template bits<true>(element);
                ptx::store_16(random.at(octet * 8 + j, chunk * 8), {bits.word[0], bits.word[1], bits.word[2], bits.word[3]});
            }
        }
        ptx::copies_wait();
        __syncthreads();
        float v[kHalf];
        const u8* const from = shared.input.at(half * kHalf, column);
        const uint4* const signs = reinterpret_cast<const uint4*>(shared.signs + half * kHalf);
#pragma unroll
        for (int i = 0; i < kHalf; i += 4) {
            const uint4 four = signs[i / 4];
            const u32 sign[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)  // the sum turns the sign over
                v[i + j] = __uint_as_float(*reinterpret_cast<const u16*>(from + (i + j) * 256) * 0x10000u + sign[j]);
        }
        butterflies(v, hadamard.len);
        if (hadamard.len == kTile) {
            const float own = half ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < kHalf; ++i) v[i] = __fmaf_rn(v[i], own, __shfl_xor_sync(kAllLanes, v[i], 16));
        }
        float largest[kHeld] = {};
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            v[i] = __fmul_rn(v[i], hadamard.factor);
            largest[i / (kHalf / kHeld)] = ptx::max_magnitude(largest[i / (kHalf / kHeld)], v[i]);
        }
        if constexpr (kHeld == 1) largest[0] = ptx::max_magnitude(largest[0], __shfl_xor_sync(kAllLanes, largest[0], 16));
        const bool present = first_col + column < cols;
        float inverse[kHeld];
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            const auto scale = scale_of<E, kF32Scales>(__float_as_uint(largest[h]), rule);
            inverse[h] = scale.inverse;
            if (kHeld == 2 || half == 0) {
                shared.scales[p * kTile + column][s * kBlocks + half * (kHeld - 1) * kHeld + h] = scale.stored;
                tally.non_finite += present && scale.is_nan();
                if constexpr (!Round::kDraws)
                    tally.non_zero += present && Round::template reaches<E>(__fmul_rn(largest[h], scale.inverse));
            }
        }
        u32 words[kHalf / 4 / kPerByte];
#pragma unroll
        for (int i = 0; i < kHalf; i += 8) {
            F32::Eight eight;
#pragma unroll
            for (int j = 0; j < 8; ++j) eight.number[j] = v[i + j];
            typename Round::Bits bits;
            if constexpr (Round::kDraws) {
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const u8* const drawn = random.at(half * kHalf + i + j, column);
                    bits.word[j / 2] = *reinterpret_cast<const u16*>(drawn) | u32(*reinterpret_cast<const u16*>(drawn + 256)) << 16;
                }
            }
            const float by = inverse[i / (kHalf / kHeld)];
            auto codes = round.template encode<E, kRuleFloor, F32>(eight, by, bits);
            if (__float_as_uint(by) == kNanBits) codes = E::zeros();
            put_words(words, i / 4 / kPerByte, codes);
        }
        // What was fetched and drawn has been read. A tile holds two strips of half bytes.
        const int first_chunk = (kPerByte == 2 ? s % 2 * 4 : 0) + half * (4 / kPerByte);
#pragma unroll
        for (int i = 0; i < 4 / kPerByte; ++i)
            ptx::store_16(shared.tile.place(column, first_chunk + i), {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
        __syncthreads();
        if (next_p < at.panels) fetch(next_s, next_p);
        if (kPerByte == 1 || s % 2 == 1 || s + 1 == at.strips) {
            const int first = (at.strip + s / kPerByte * kPerByte) * kTile;  // row
            const int end = min(first_row + kTile, capacity);
            store_turned<E, Round::kDraws>(shared.tile, col_codes + first_col * col_bytes + first / kPerByte, col_bytes, cols - first_col,
                                           (end - first) / kPerByte, tally);
        }
        s = next_s;
        p = next_p;
    }
    const int first_col = at.panel * kTile, first = at.strip * kBlocks, col_blocks = capacity / E::kBlock;
#pragma unroll 1
    for (int i = threadIdx.x; i < at.panels * kTile && first_col + i < cols; i += 256)
        store_scales(col_scales + u64(first_col + i) * col_blocks + first, shared.scales[i], min(at.strips * kBlocks, col_blocks - first));
    tally.flush(counts, shared.total);
}

}  // namespace nib
