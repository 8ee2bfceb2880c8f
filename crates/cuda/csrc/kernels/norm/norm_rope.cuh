// RMS norm of each head, rounded, followed by the head's rotation (RoPE, halves convention), rounded; and the backward pass of both operations.
//
// x, y, dy, dx are [rows, 8 * kThreads] of type T (Bf16 or F32), one head per row: head h of token t is row t * heads + h.
// weight is F32 [8 * kThreads], inv_rms F32 [rows], and table F32 [positions, 8 * kThreads], from the first position on: 4
// * kThreads cosines, then as many sines. kThreads adjacent threads share a row, and each has eight columns. A rotation
// needs pairs of columns; the partners of a thread's columns belong to another thread of the row. 128 threads per CTA.
// norm_rope<T, kThreads>: a thread has its eight columns of four consecutive rows, so that
//   heads of one token share their angles. The grid has ceil(rows / (4 * 128 / kThreads)) CTAs.
// norm_rope_backward<T, kThreads>: rotates the gradients back and rounds them, then computes what `rms_backward_short` computes.
#pragma once
#include "pieces/norm/gradient_rows.cuh"
#include "pieces/norm/norm_rows.cuh"
#include "pieces/norm/turn.cuh"

namespace nib {

constexpr int kHeadRows = 4;  // number of rows that a thread has in flight

/// The rotation of rows that are heads, by kThreads adjacent threads, of
/// which this thread is number `index`. sign: 1 to rotate, -1 to rotate back.
template <typename T, int kThreads>
struct HeadTurn {
    static constexpr u32 kHalf = 4 * kThreads;

    const float* angles;  // angles for the columns of this thread
    u32 heads;
    Divider by_heads;
    Positions positions;
    float sign;
    u32 held = 0xFFFFFFFF;  // the position whose angles are loaded
    float cos[8] = {}, sin[8] = {};

    // y0 = x0 cos - x1 sin and y1 = x1 cos + x0 sin. Both have the
    // form mine * cos + other * sin, if sin is given the right sign.
    __device__ __forceinline__ HeadTurn(const float* table, u32 index, u32 heads, Divider by_heads, const Positions& positions, float sign)
        : angles(table + 8 * index % kHalf), heads(heads), by_heads(by_heads), positions(positions), sign(index < kThreads / 2 ? -sign : sign) {}

    /// Loads the angles of a row's token, unless they are already loaded.
    __device__ __forceinline__ void begin(u32 row, bool present) {
        if (!present) return;
        const u32 position = positions.of(by_heads.divide(row));
        if (position == held) return;
        held = position;
        const float* const from = angles + u64(position) * (2 * kHalf);
        const F32::Eight c = F32::load<true>(from, 8), s = F32::load<true>(from + kHalf, 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            cos[i] = c.number[i];
            sin[i] = __fmul_rn(sign, s.number[i]);
        }
    }

    /// Rotates `mine`; the caller rounds the result. The whole warp calls this function.
    __device__ __forceinline__ void turn(float (&y)[8], const typename T::Eight& mine) const {
        typename T::Eight other;
        if constexpr (T::kBytes == 4) {
#pragma unroll
            for (int i = 0; i < 8; ++i) other.number[i] = __shfl_xor_sync(kAllLanes, mine.number[i], kThreads / 2);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) other.word[i] = __shfl_xor_sync(kAllLanes, mine.word[i], kThreads / 2);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = __fadd_rn(__fmul_rn(T::value(mine, i), cos[i]), __fmul_rn(T::value(other, i), sin[i]));
    }

    /// Rotates and rounds a gradient, for the norm's backward pass.
    __device__ __forceinline__ typename T::Eight of(const typename T::Eight& dy) const {
        float turned[8];
        turn(turned, dy);
        return rounded_eight<T>(turned);
    }
};

template <typename T, int kThreads>
__global__ void __launch_bounds__(kNormThreads)
    norm_rope(const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ table, u8* __restrict__ y,
              float* __restrict__ inv_rms, u32 rows, float eps, u32 heads, Divider by_heads, Positions positions) {
    constexpr u32 kWidth = 8 * kThreads;
    const u32 index = threadIdx.x % kThreads;
    const u32 first = (blockIdx.x * (kNormThreads / kThreads) + threadIdx.x / kThreads) * kHeadRows;
    const u64 begin = (u64(first) * kWidth + 8 * index) * T::kBytes;
    typename T::Eight value[kHeadRows];
#pragma unroll
    for (int r = 0; r < kHeadRows; ++r) value[r] = T::template load<true>(x + begin + r * (kWidth * T::kBytes), first + r < rows ? 8 : 0);
    HeadTurn<T, kThreads> heads_turn(table, index, heads, by_heads, positions, 1.0f);
    heads_turn.begin(first, first < rows);
    const F32::Eight w = F32::load<true>(weight + 8 * index, 8);
#pragma unroll
    for (int r = 0; r < kHeadRows; ++r) {
        const bool present = first + r < rows;
        float lane[8] = {}, normal[8], turned[8];
        add_squares<T>(lane, value[r]);
        const float inv = inverse_rms(close_lanes<kThreads>(lane, index), kWidth, eps);
        if (index == 0 && present) inv_rms[first + r] = inv;
#pragma unroll
        for (int i = 0; i < 8; ++i) normal[i] = __fmul_rn(__fmul_rn(T::value(value[r], i), inv), w.number[i]);
        heads_turn.begin(first + r, present);
        heads_turn.turn(turned, rounded_eight<T>(normal));
        store_eight<T, true>(y + begin + r * (kWidth * T::kBytes), turned, present ? 8 : 0);
    }
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kShortThreads)
    norm_rope_backward(const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ inv_rms, const u8* __restrict__ dy,
                       const float* __restrict__ table, u8* __restrict__ dx, float* __restrict__ partial, u32 rows_per_shard, u32 chunks,
                       u32 all_chunks, u32 heads, Divider by_heads, Positions positions) {
    const HeadTurn<T, kThreads> back(table, threadIdx.x % kThreads, heads, by_heads, positions, -1.0f);
    backward_short<T, kThreads, false>(x, weight, inv_rms, dy, nullptr, dx, partial, rows_per_shard, chunks, all_chunks, 8 * kThreads, back);
}

}  // namespace nib
