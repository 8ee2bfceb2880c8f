// Rows that have one number per expert: how the lanes of a
// token share such rows, and how rows are loaded and stored.
#pragma once
#include "math/sort.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kRouteChunk = 64;  // number of tokens per chunk
constexpr int kTokenLanes = 16;  // number of partial sums in a sum over tokens
constexpr int kSumQuads = 16;    // number of groups of four partial sums in a sum over experts
constexpr u32 kWarp = 0xFFFFFFFF;

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }

/// Adds values that are kHalf apart, then kHalf / 2 apart, and so on; the result is in x[0]. Values past the
/// last value are treated as zeros.
template <int kHalf, int kCount, class T>
__device__ __forceinline__ void tree_sum(T (&x)[kCount]) {
    if constexpr (kHalf > 0) {
#pragma unroll
        for (int i = 0; i < kHalf; ++i)
            if (i + kHalf < kCount) x[i] = add(x[i], x[i + kHalf]);
        tree_sum<kHalf / 2>(x);
    }
}

template <int kLanes, int kPerLane>
struct TokenLanes {
    static constexpr int kThreads = kLanes < 4 ? kRouteChunk * kLanes : 256;
    static constexpr int kGroups = kThreads / kLanes;  // number of tokens that are processed at once
    static constexpr int kQuads = kPerLane / 4;
    static constexpr int kSets = kSumQuads / kLanes;  // number of groups of four partial sums per thread
    static constexpr int kUsed = kSets < kQuads ? kSets : kQuads;
    static constexpr int kExperts = kLanes * kPerLane;
    static_assert(kSets >= 1 && kRouteChunk % kGroups == 0);

    /// Returns the first expert of the thread's i-th group of four experts.
    __device__ __forceinline__ static int first_of(int quad) { return 4 * (quad * kLanes + int(threadIdx.x % kLanes)); }

    __device__ __forceinline__ static float largest(float x) {
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) x = ptx::max_or_nan(x, __shfl_xor_sync(kWarp, x, lane));
        return x;
    }

    __device__ __forceinline__ static u32 largest(u32 x) {
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) x = larger_of(x, __shfl_xor_sync(kWarp, x, lane));
        return x;
    }

    /// Adds the partial sums of a sum over experts.
    __device__ __forceinline__ static float close(const float (&lanes)[kUsed * 4]) {
        float quad[kUsed];
#pragma unroll
        for (int i = 0; i < kUsed; ++i)
            quad[i] = __fadd_rn(__fadd_rn(lanes[4 * i], lanes[4 * i + 1]), __fadd_rn(lanes[4 * i + 2], lanes[4 * i + 3]));
        // A group of four experts that do not exist would only add zero.
        tree_sum<kSets / 2>(quad);
        float sum = quad[0];
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kWarp, sum, lane));
        return sum;
    }
};

/// Copies the thread's part of a row to shared memory, asynchronously if rows
/// are 16-byte aligned. Positions past the row's end get the value `nothing`.
template <class Token>
__device__ __forceinline__ void fetch_row(float* row, const float* __restrict__ from, int experts, float nothing) {
    if (experts % 4 == 0) {
#pragma unroll
        for (int i = 0; i < Token::kQuads; ++i) {
            const int j = Token::first_of(i);
            if (j < experts)
                ptx::copy_16_async(row + j, from + j, true);
            else
                *reinterpret_cast<float4*>(row + j) = {nothing, nothing, nothing, nothing};
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 4 * Token::kQuads; ++i) {
        const int j = Token::first_of(i / 4) + i % 4;
        row[j] = j < experts ? __ldcs(from + j) : nothing;
    }
}

/// Reads the thread's part of a row in shared memory.
template <class Token>
__device__ __forceinline__ void read_row(const float* row, float (&x)[4 * Token::kQuads]) {
#pragma unroll
    for (int i = 0; i < Token::kQuads; ++i) {
        const float4 quad = *reinterpret_cast<const float4*>(row + Token::first_of(i));
        x[4 * i] = quad.x, x[4 * i + 1] = quad.y, x[4 * i + 2] = quad.z, x[4 * i + 3] = quad.w;
    }
}

template <class Token>
__device__ __forceinline__ void write_row(float* row, const float (&x)[4 * Token::kQuads]) {
#pragma unroll
    for (int i = 0; i < Token::kQuads; ++i)
        *reinterpret_cast<float4*>(row + Token::first_of(i)) = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
}

/// Stores a token's row from shared memory, where the token's lanes have just written it. The function uses TMA if rows are 16-byte aligned.
template <int kLanes>
__device__ __forceinline__ void send_row(float* to, const float* row, int experts, bool is_token) {
    const int lane = threadIdx.x % kLanes;
    if (experts % 4 == 0) {
        ptx::fence_shared_to_async();
        __syncwarp();
        if (lane == 0 && is_token) ptx::bulk_store(to, row, experts * 4);
        ptx::tma_store_commit();
    } else {
        __syncwarp();
        if (is_token)
#pragma unroll 1
            for (int j = lane; j < experts; j += kLanes) to[j] = row[j];
    }
}

/// Stores the thread's part of a row.
template <class Token>
__device__ __forceinline__ void store_row(float* to, const float (&x)[4 * Token::kQuads], int experts) {
    if (experts % 4 == 0) {
#pragma unroll
        for (int i = 0; i < Token::kQuads; ++i)
            if (Token::first_of(i) < experts)
                __stcs(reinterpret_cast<float4*>(to + Token::first_of(i)), {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]});
        return;
    }
#pragma unroll
    for (int i = 0; i < 4 * Token::kQuads; ++i)
        if (Token::first_of(i / 4) + i % 4 < experts) to[Token::first_of(i / 4) + i % 4] = x[i];
}

}  // namespace nib
