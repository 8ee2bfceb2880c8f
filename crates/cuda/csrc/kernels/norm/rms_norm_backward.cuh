// Computes dx of an RMS norm, and partial sums of dweight over chunks of 64 rows of a shard; `close_level` (row_tree.cuh) adds the partial sums.
//
// With n = x * inv_rms, dx = inv_rms * (dy * w - n * mean(dy * w * n)). The partial sum of a chunk is fma(dy, n, sum) over its rows in order,
// from 0. kPlus: dx is rounded, plus is added, and the sum is rounded again. x, dy, plus, dx are [shards * rows, d] of type T (Bf16 or F32);
// weight [d], inv_rms [shards * rows] and partial [shards * chunks, d] are F32; chunks = ceil(rows / 64). Without kPlus, plus is null.
// rms_backward_short<T, kThreads, kPlus>: d is a multiple of 8, at most 8 * kThreads. kThreads adjacent threads share a
//   chunk, with eight columns per thread. 128 threads per CTA; the grid has ceil(shards * chunks / (128 / kThreads)) CTAs.
// rms_backward_wide<T, kBlocks, kRows, kPlus>: d is a multiple of 8, at most 256 * kBlocks; kBlocks <= 8. One CTA per chunk; each thread
//   has two adjacent columns of every 256. The CTA processes kRows rows at a time, while asynchronous copies fetch the next rows.
//   128 threads per CTA; the grid has shards * chunks CTAs. Dynamic shared memory: 3 * 2 * kRows * d * sizeof(a value) bytes.
// rms_backward_long<T, kBlocks, kRows, kPlus>: computes what rms_backward_wide computes, for longer rows. For each of
//   kRows rows, 256 threads compute the mean, one thread per partial sum (math/lanes.cuh); all threads share the work on
//   dx and dweight. 256 * kRows threads per CTA; the grid and the shared memory are as large as for rms_backward_wide.
// rms_dx<T, kAligned, kPlus>, rms_dweight<T>: for any d, in two passes. kAligned: d is a multiple of 8. rms_dx has 128 threads per CTA, one warp
//   per row, and ceil(all rows / 4) CTAs. rms_dweight has 128 threads per CTA, one thread per column, and shards * chunks * ceil(d / 128) CTAs.
#pragma once
#include "pieces/norm/gradient_rows.cuh"

namespace nib {

template <typename T, int kThreads, bool kPlus>
__global__ void __launch_bounds__(kShortThreads)
    rms_backward_short(const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ inv_rms, const u8* __restrict__ dy,
                       const u8* __restrict__ plus, u8* __restrict__ dx, float* __restrict__ partial, u32 rows_per_shard, u32 chunks,
                       u32 all_chunks, u32 d) {
    backward_short<T, kThreads, kPlus>(x, weight, inv_rms, dy, plus, dx, partial, rows_per_shard, chunks, all_chunks, d, ReadGradient<T>{});
}

/// Reduces the 256 partial sums of a row by halving. Thread t of 128 wrote
/// the partial sums 2t and 2t + 1 to `part`. One warp calls this function.
__device__ __forceinline__ float close_pairs(const float2 (&part)[kWideThreads], u32 lane) {
    const float2 a = part[lane], b = part[lane + 32], c = part[lane + 64], d = part[lane + 96];
    const float low = (a.x + c.x) + (b.x + d.x), high = (a.y + c.y) + (b.y + d.y);
    const bool upper = lane & 16;
    float sum = (upper ? high : low) + __shfl_xor_sync(0xFFFFFFFF, upper ? low : high, 16);
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
    return sum + __shfl_xor_sync(0xFFFFFFFF, sum, 16);
}

/// The dynamic shared memory that a NormRing needs for rows of d values.
template <typename T, int kRows>
__device__ constexpr u64 norm_ring_shared_bytes(u64 d) {
    return u64(kWideStages) * 2 * kRows * d * T::kBytes;
}

/// A ring of batches in shared memory; a batch has kRows rows of x and dy. kThreads threads fill the ring by asynchronous copies.
template <typename T, int kRows, int kThreads>
struct NormRing {
    u8* stages;
    const u8 *x, *dy;
    NormChunk chunk;
    u32 row_bytes;

    __device__ __forceinline__ u8* x_of(u32 batch) const { return stages + batch % kWideStages * 2 * kRows * row_bytes; }
    __device__ __forceinline__ u8* dy_of(u32 batch) const { return x_of(batch) + kRows * row_bytes; }

    __device__ __forceinline__ void bring(u32 batch) const {
        const u32 base = batch * kRows;
        if (base < chunk.rows) {
            const u32 rows = chunk.rows - base < kRows ? chunk.rows - base : kRows;
            u8 *const x_to = x_of(batch), *const dy_to = dy_of(batch);
            const u64 from = (chunk.first + base) * row_bytes;
#pragma unroll 4
            for (u32 at = 16 * threadIdx.x; at < rows * row_bytes; at += 16 * kThreads) {
                ptx::copy_16_async(x_to + at, x + from + at, true);
                ptx::copy_16_async(dy_to + at, dy + from + at, true);
            }
        }
        ptx::copies_commit();
    }
};

/// Returns two adjacent values in shared memory, as F32.
template <typename T>
__device__ __forceinline__ float2 two_of(const u8* row, u32 column) {
    if constexpr (T::kBytes == 4) return *reinterpret_cast<const float2*>(row + 4 * column);
    const u32 word = *reinterpret_cast<const u32*>(row + 2 * column);
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000)};
}

/// Loads the terms that are added to dx, for rows from `base` on. The loads arrive while the means
/// are computed. A thread has kPairs pairs of adjacent columns; pair p starts at `column_of(p)`.
template <typename T, int kRows, int kPairs, typename Columns>
__device__ __forceinline__ void read_pairs(Few<T, 2> (&pairs)[kRows][kPairs], const u8* from, const NormChunk& chunk, u32 base, u32 d,
                                           const Columns& column_of) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int p = 0; p < kPairs; ++p)
#pragma unroll
            for (int w = 0; w < T::kBytes / 2; ++w) {
                const u64 at = ((chunk.first + base + r) * d + column_of(p)) * T::kBytes + 4 * w;
                pairs[r][p].word[w] = ptx::load_4_if(base + r < chunk.rows && column_of(p) < d, from + at);
            }
}

/// Computes dx of two adjacent columns.
template <typename T>
__device__ __forceinline__ Few<T, 2> pair_gradient(float2 g, float2 w, float2 normal, float inv, float mean) {
    const float dx[2] = {norm_gradient(__fmul_rn(g.x, w.x), normal.x, inv, mean),
                         norm_gradient(__fmul_rn(g.y, w.y), normal.y, inv, mean)};
    return Few<T, 2>::from_f32(dx);
}

template <typename T, int kBlocks, int kRows, bool kPlus>
__global__ void __launch_bounds__(kWideThreads)
    rms_backward_wide(const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ inv_rms, const u8* __restrict__ dy,
                      const u8* __restrict__ plus, u8* __restrict__ dx, float* __restrict__ partial, u32 rows_per_shard, u32 chunks, u32 d) {
    static_assert(kNormChunk % kRows == 0);
    extern __shared__ uint4 ring[];  // layout: [kWideStages][x, dy][kRows][d]
    __shared__ float2 part[kRows][kWideThreads];
    __shared__ float means[kRows];
    const NormChunk chunk(blockIdx.x, chunks, rows_per_shard);
    const u32 row_bytes = d * T::kBytes, warp = threadIdx.x / 32;
    const NormRing<T, kRows, kWideThreads> rows_ring = {reinterpret_cast<u8*>(ring), x, dy, chunk, row_bytes};
    rows_ring.bring(0);
    rows_ring.bring(1);
    float2 weight_of[kBlocks];
    const auto column_of = [&](int b) { return 2 * threadIdx.x + 256 * b; };
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
        if (column_of(b) < d) weight_of[b] = __ldg(reinterpret_cast<const float2*>(weight + column_of(b)));
    float2 sum[kBlocks] = {};
#pragma unroll 1
    for (u32 base = 0; base < chunk.rows; base += kRows) {
        const u32 batch = base / kRows;
        Few<T, 2> more[kRows][kPlus ? kBlocks : 1];
        if constexpr (kPlus) read_pairs(more, plus, chunk, base, d, column_of);
        float inv[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) inv[r] = base + r < chunk.rows ? __ldg(inv_rms + chunk.first + base + r) : 0.0f;
        ptx::copies_wait_but<1>();
        __syncthreads();
        rows_ring.bring(batch + 2);  // into a stage that all threads have finished reading
        const u8 *const xs = rows_ring.x_of(batch), *const dys = rows_ring.dy_of(batch);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (base + r >= chunk.rows) break;
            float2 lane = {0.0f, 0.0f};
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const u32 column = column_of(b);
                if (column >= d) break;
                const float2 v = two_of<T>(xs + r * row_bytes, column), g = two_of<T>(dys + r * row_bytes, column), w = weight_of[b];
                const float2 normal = {__fmul_rn(v.x, inv[r]), __fmul_rn(v.y, inv[r])};
                lane.x = __fmaf_rn(__fmul_rn(g.x, w.x), normal.x, lane.x);
                lane.y = __fmaf_rn(__fmul_rn(g.y, w.y), normal.y, lane.y);
                sum[b].x = __fmaf_rn(g.x, normal.x, sum[b].x);
                sum[b].y = __fmaf_rn(g.y, normal.y, sum[b].y);
            }
            part[r][threadIdx.x] = lane;
        }
        __syncthreads();
#pragma unroll 1
        for (u32 r = warp; r < kRows; r += kWideThreads / 32) {
            if (base + r >= chunk.rows) break;
            const float total = close_pairs(part[r], threadIdx.x % 32);
            if (threadIdx.x % 32 == 0) means[r] = __fdiv_rn(total, float(d));
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (base + r >= chunk.rows) break;
            const float mean = means[r];
            u8* const to = dx + (chunk.first + base + r) * row_bytes;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const u32 column = column_of(b);
                if (column >= d) break;
                const float2 v = two_of<T>(xs + r * row_bytes, column), g = two_of<T>(dys + r * row_bytes, column), w = weight_of[b];
                const float2 normal = {__fmul_rn(v.x, inv[r]), __fmul_rn(v.y, inv[r])};
                Few<T, 2> made = pair_gradient<T>(g, w, normal, inv[r], mean);
                if constexpr (kPlus) made = add_few(made, more[r][b]);
                made.store(to + column * T::kBytes);
            }
        }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
        if (column_of(b) < d) *reinterpret_cast<float2*>(partial + u64(blockIdx.x) * d + column_of(b)) = sum[b];
}

constexpr int kLanes = 256;  // number of partial sums per row

/// Reduces the 256 partial sums of a row by halving; every thread of a warp gets the sum.
__device__ __forceinline__ float close_row(const float (&part)[kLanes], u32 lane) {
    float x[kLanes / 32];
#pragma unroll
    for (int i = 0; i < kLanes / 32; ++i) x[i] = part[lane + 32 * i];
    float sum = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
    return sum;
}

template <typename T, int kBlocks, int kRows, bool kPlus>
__global__ void __launch_bounds__(kLanes* kRows)
    rms_backward_long(const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ inv_rms, const u8* __restrict__ dy,
                      const u8* __restrict__ plus, u8* __restrict__ dx, float* __restrict__ partial, u32 rows_per_shard, u32 chunks, u32 d) {
    static_assert(kNormChunk % kRows == 0 && kBlocks % (2 * kRows) == 0);
    constexpr int kThreads = kLanes * kRows;
    constexpr int kPairs = kBlocks / (2 * kRows);  // one pair of adjacent columns in every 2 * kThreads columns
    extern __shared__ uint4 ring[];                // layout: [kWideStages][x, dy][kRows][d]
    __shared__ float part[2][kRows][kLanes];       // partial sums of this batch and of the previous batch, which may still be read
    const NormChunk chunk(blockIdx.x, chunks, rows_per_shard);
    const u32 row_bytes = d * T::kBytes, lane = threadIdx.x % kLanes, own = threadIdx.x / kLanes;
    const NormRing<T, kRows, kThreads> rows_ring = {reinterpret_cast<u8*>(ring), x, dy, chunk, row_bytes};
    rows_ring.bring(0);
    rows_ring.bring(1);
    const auto pair_of = [&](int p) { return 2 * threadIdx.x + 2 * kThreads * p; };
    float of_lane[kBlocks];
    float2 of_pair[kPairs], sum[kPairs] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) of_lane[b] = lane + kLanes * b < d ? __ldg(weight + lane + kLanes * b) : 0.0f;
#pragma unroll
    for (int p = 0; p < kPairs; ++p)
        if (pair_of(p) < d) of_pair[p] = __ldg(reinterpret_cast<const float2*>(weight + pair_of(p)));
#pragma unroll 1
    for (u32 base = 0; base < chunk.rows; base += kRows) {
        const u32 batch = base / kRows;
        Few<T, 2> more[kRows][kPlus ? kPairs : 1];
        if constexpr (kPlus) read_pairs(more, plus, chunk, base, d, pair_of);
        float inv[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) inv[r] = base + r < chunk.rows ? __ldg(inv_rms + chunk.first + base + r) : 0.0f;
        ptx::copies_wait_but<1>();
        __syncthreads();
        rows_ring.bring(batch + 2);  // into a stage that all threads have finished reading
        const u8 *const xs = rows_ring.x_of(batch), *const dys = rows_ring.dy_of(batch);
        float(&parts)[kRows][kLanes] = part[batch % 2];
        if (base + own < chunk.rows) {
            float mine = inv[0], total = 0.0f;
#pragma unroll
            for (int r = 1; r < kRows; ++r) mine = own == r ? inv[r] : mine;
            const u8 *const x_row = xs + own * row_bytes, *const dy_row = dys + own * row_bytes;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const u32 column = lane + kLanes * b;
                if (column >= d) break;
                const float v = T::number(x_row + column * T::kBytes), g = T::number(dy_row + column * T::kBytes);
                total = __fmaf_rn(__fmul_rn(g, of_lane[b]), __fmul_rn(v, mine), total);
            }
            parts[own][lane] = total;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (base + r >= chunk.rows) break;
            const float mean = __fdiv_rn(close_row(parts[r], threadIdx.x % 32), float(d));
            u8* const to = dx + (chunk.first + base + r) * row_bytes;
#pragma unroll
            for (int p = 0; p < kPairs; ++p) {
                const u32 column = pair_of(p);
                if (column >= d) break;
                const float2 v = two_of<T>(xs + r * row_bytes, column), g = two_of<T>(dys + r * row_bytes, column), w = of_pair[p];
                const float2 normal = {__fmul_rn(v.x, inv[r]), __fmul_rn(v.y, inv[r])};
                sum[p].x = __fmaf_rn(g.x, normal.x, sum[p].x);
                sum[p].y = __fmaf_rn(g.y, normal.y, sum[p].y);
                Few<T, 2> made = pair_gradient<T>(g, w, normal, inv[r], mean);
                if constexpr (kPlus) made = add_few(made, more[r][p]);
                made.store(to + column * T::kBytes);
            }
        }
    }
#pragma unroll
    for (int p = 0; p < kPairs; ++p)
        if (pair_of(p) < d) *reinterpret_cast<float2*>(partial + u64(blockIdx.x) * d + pair_of(p)) = sum[p];
}

template <typename T, bool kAligned, bool kPlus>
__global__ void __launch_bounds__(kWideThreads)
    rms_dx(const u8* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ inv_rms, const u8* __restrict__ dy,
           const u8* __restrict__ plus, u8* __restrict__ dx, u32 rows, u32 d) {
    const u32 index = threadIdx.x % 32, row = blockIdx.x * (kWideThreads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const u64 begin = u64(row) * d * T::kBytes;
    const float inv = __ldg(inv_rms + row);
    float lane[8] = {};
#pragma unroll 2
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const u64 from = begin + u64(at) * T::kBytes;
        const typename T::Eight v = T::template load<kAligned>(x + from, left), g = T::template load<kAligned>(dy + from, left);
        const F32::Eight w = F32::load<kAligned>(weight + at, left);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left) lane[i] = __fmaf_rn(__fmul_rn(T::value(g, i), w.number[i]), __fmul_rn(T::value(v, i), inv), lane[i]);
    }
    const float mean = __fdiv_rn(close_lanes<32>(lane, index), float(d));
#pragma unroll 2
    for (u32 at = 8 * index; at < d; at += 256) {
        const int left = int(d - at);
        const u64 from = begin + u64(at) * T::kBytes;
        const typename T::Eight v = T::template load<kAligned>(x + from, left), g = T::template load<kAligned>(dy + from, left);
        const F32::Eight w = F32::load<kAligned>(weight + at, left);
        float out[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            out[i] = norm_gradient(__fmul_rn(T::value(g, i), w.number[i]), __fmul_rn(T::value(v, i), inv), inv, mean);
        if constexpr (kPlus) add_plus<T>(out, T::template load<kAligned>(plus + from, left));
        store_eight<T, kAligned>(dx + from, out, left);
    }
}

template <typename T>
__global__ void __launch_bounds__(kWideThreads)
    rms_dweight(const u8* __restrict__ x, const float* __restrict__ inv_rms, const u8* __restrict__ dy, float* __restrict__ partial,
                u32 rows_per_shard, u32 chunks, u32 d, u32 blocks) {
    const u32 number = blockIdx.x / blocks, column = (blockIdx.x - number * blocks) * kWideThreads + threadIdx.x;
    if (column >= d) return;
    const NormChunk chunk(number, chunks, rows_per_shard);
    float sum = 0.0f;
#pragma unroll 8
    for (u32 r = 0; r < chunk.rows; ++r) {
        const u64 row = chunk.first + r, at = (row * d + column) * T::kBytes;
        sum = __fmaf_rn(T::number(dy + at), __fmul_rn(T::number(x + at), __ldg(inv_rms + row)), sum);
    }
    partial[u64(number) * d + column] = sum;
}

}  // namespace nib
