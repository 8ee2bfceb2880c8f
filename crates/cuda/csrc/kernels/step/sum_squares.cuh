// Sums the squares of equal parts of a matrix, in F64 and in the CPU's order (math/chunk_sum.cuh). A chunk of 4096 values
// has 16 partial sums, which are added 8, 4, 2 and 1 apart. Then a binary tree over neighbours adds the sums of the chunks.
//
// sum_squares<T>: each tensor of the list has parts of len values of type T (Bf16 or F32), with ceil(len / 4096)
//   chunks each; sums is F64 [all_chunks]. x begins at chunk first_chunk of the first part. Eight threads share
//   a chunk; each of them has two of the chunk's partial sums. Tensor i has ceil(all_chunks / 32) CTAs, from
//   first_cta[i] to the next tensor's first CTA. 256 threads per CTA; the grid has the CTAs of all tensors.
// close_squares<kThreads>: kThreads is kSquaresThreads. The kernel adds kSquaresGroup adjacent sums of each tensor's
//   sums [parts * count] to one sum, and writes out [parts * groups] F64. If there is one group per part, it rounds the
//   sum to F32 and stores it in into[at + part], and out is null. 256 threads per CTA; the grid has parts * groups CTAs
//   of all tensors. The kernel may be launched early. No sum is -0, so positions past the last sum may be read as +0.
#pragma once
#include "formats/plain.cuh"
#include "pieces/step/tensor_list.cuh"
#include "ptx/thread.cuh"

namespace nib {

constexpr int kSquaresThreads = 256;
constexpr int kSquaresChunk = 4096;
constexpr int kSquaresLanes = 16;
constexpr int kSquaresEach = 8;                                       // number of sums that a thread adds
constexpr int kSquaresGroup = kSquaresThreads * kSquaresEach;

/// Returns lane + x * x; the product is exact.
__device__ __forceinline__ double add_square(double lane, float x) { return __fma_rn(double(x), double(x), lane); }

/// Adds the squares of `rounds` * 16 values to two partial sums; with kCount = 2, each load reads
/// two values.
template <typename T, int kCount>
__device__ __forceinline__ void add_rounds(const u8* from, u32 rounds, double (&lane)[2]) {
    using X = Few<T, kCount>;
    constexpr int kAhead = 16;
    u32 round = 0;
#pragma unroll 1
    for (; round + kAhead <= rounds; round += kAhead) {
        X x[kAhead][2 / kCount];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int k = 0; k < 2; k += kCount) x[i][k / kCount] = X::load(from + ((round + i) * kSquaresLanes + k) * T::kBytes);
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int k = 0; k < 2; ++k) lane[k] = add_square(lane[k], x[i][k / kCount].value(k % kCount));
    }
#pragma unroll 1
    for (; round < rounds; ++round)
#pragma unroll
        for (int k = 0; k < 2; ++k) lane[k] = add_square(lane[k], T::number(from + (round * kSquaresLanes + k) * T::kBytes));
}

/// The chunks of one tensor.
struct SquaresTensor {
    const u8* x;
    double* sums;
    u64 len;  // number of values per part
    u32 chunks;  // number of chunks per part
    u32 all_chunks;
    u32 first_cta;
    u32 first_chunk;
};

struct SquaresTensors {
    SquaresTensor tensor[kListedTensors];
    u64 count;
};

template <typename T>
__global__ void __launch_bounds__(kSquaresThreads) sum_squares(const __grid_constant__ SquaresTensors tensors) {
    const auto& [x, sums, len, chunks, all_chunks, first_cta, first_chunk] = tensors.tensor[tensor_of_cta(tensors)];
    const u32 index = threadIdx.x % 8, number = (blockIdx.x - first_cta) * (kSquaresThreads / 8) + threadIdx.x / 8;
    double lane[2] = {};
    if (number < all_chunks) {
        const u32 of_parts = first_chunk + number, part = of_parts / chunks;
        const u64 within = u64(of_parts - part * chunks) * kSquaresChunk, left = len - within;
        const u32 count = left < kSquaresChunk ? u32(left) : kSquaresChunk;
        const u32 rounds = count / kSquaresLanes, rest = count % kSquaresLanes;
        const u8* const from = x + (part * len + within - u64(first_chunk) * kSquaresChunk + 2 * index) * T::kBytes;
        // Parts may be misaligned for loads of two values.
        if (u64(from) % (2 * T::kBytes) == 0)
            add_rounds<T, 2>(from, rounds, lane);
        else
            add_rounds<T, 1>(from, rounds, lane);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            if (2 * index + k < rest) lane[k] = add_square(lane[k], T::number(from + (rounds * kSquaresLanes + k) * T::kBytes));
    }
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2)
#pragma unroll
        for (int k = 0; k < 2; ++k) lane[k] += __shfl_xor_sync(0xFFFFFFFF, lane[k], distance);
    if (index == 0 && number < all_chunks) sums[number] = lane[0] + lane[1];
}

/// Returns the tree sum of eight neighbours.
__device__ __forceinline__ double close_eight_sums(const double (&x)[8]) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/// The sums of one tensor.
struct SumsTensor {
    const double* sums;
    double* out;
    u32 count;
    u32 groups;
    u32 at;
    u32 first_cta;
};

struct SumsTensors {
    SumsTensor tensor[kListedTensors];
    u64 count;
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads) close_squares(const __grid_constant__ SumsTensors tensors, float* into) {
    __shared__ double of_warp[kSquaresThreads / 32];
    static_assert(kSquaresEach == 8 && kThreads == kSquaresThreads && kThreads == 256);
    const auto& [sums, out, count, groups, at, first_cta] = tensors.tensor[tensor_of_cta(tensors)];
    const u32 cta = blockIdx.x - first_cta, part = cta / groups, group = cta - part * groups;
    const u32 first = group * kSquaresGroup + threadIdx.x * kSquaresEach;
    ptx::grid_wait();
    double x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = first + i < count ? sums[u64(part) * count + first + i] : 0.0;
    double sum = close_eight_sums(x);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = of_warp[i];
    sum = close_eight_sums(x);
    if (out == nullptr)
        into[at + part] = float(sum);
    else
        out[cta] = sum;
}

}  // namespace nib
