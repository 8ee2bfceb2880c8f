// Cross-entropy of long rows of logits for the head of a BF16 model. This kernel has its own order of sums,
// and uses the hardware's exponentials. The kernel in cross_entropy.cuh gives the same bits as the CPU.
//
// head_rows<kCluster>: for each row of logits [rows][vocab], writes the loss, and dlogits [rows][vocab] in BF16 unless
//   dlogits is null. bad_ids counts targets at or past the vocabulary's end. Targets past the end, and negative targets, give
//   no loss and no gradient. A cluster processes every (gridDim.x / kCluster)-th row, and each of its CTAs has `part`
//   adjacent elements; part and vocab are multiples of 8. While a row is processed, TMA loads the next row. 512
//   threads per CTA; the grid is a multiple of kCluster CTAs. Dynamic shared memory: HeadRoom, and 2 * part * 4 bytes.
#pragma once
#include "formats/plain.cuh"
#include "math/log.cuh"
#include "pieces/step/control.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/packed.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"

namespace nib {

constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / 32;

/// The shared memory of a CTA besides its two buffers. `maxima` and `sums`
/// have one entry per CTA of the cluster, for each of two alternating rows.
struct alignas(16) HeadRoom {
    ptx::Barrier full[2];
    float in_warp[2][kRowWarps];
    float maxima[2][8];
    float sums[2][8];
};

/// The dynamic shared memory of a CTA: HeadRoom, and the CTA's part of two rows.
__device__ constexpr u64 head_rows_shared_bytes(u64 part) { return sizeof(HeadRoom) + 2 * part * sizeof(float); }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) x = ptx::max_or_nan(x, __shfl_xor_sync(0xFFFFFFFF, x, half));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, half));
    return x;
}

/// e^x computed by the hardware, accurate to about two units in the last place.
__device__ __forceinline__ float fast_exp(float x) { return ptx::exp2_approx(__fmul_rn(x, 1.44269504f)); }

/// The part of a cluster's rows that one CTA has.
template <int kCluster>
struct HeadPart {
    HeadRoom& room;
    int count;  // number of elements of this CTA
    int rank;

    /// Returns the largest logit of this CTA's part. All threads call this function.
    __device__ __forceinline__ float largest(const float4* z) const {
        float max = __uint_as_float(0xFF800000);
#pragma unroll 4
        for (int i = threadIdx.x; i < count / 4; i += kRowThreads) {
            const float4 v = z[i];
            max = ptx::max_or_nan(max, ptx::max_or_nan(ptx::max_or_nan(v.x, v.y), ptx::max_or_nan(v.z, v.w)));
        }
        max = warp_max(max);
        if (threadIdx.x % 32 == 0) room.in_warp[0][threadIdx.x / 32] = max;
        __syncthreads();
        max = warp_max(room.in_warp[0][threadIdx.x % kRowWarps]);
        // If all logits are -infinity, 0 replaces the maximum, so that all exponentials are 0 and not NaN.
        return max == __uint_as_float(0xFF800000) ? 0.0f : max;
    }

    /// Replaces the part's logits by exp(logit - max), and returns the sum of these exponentials. All threads
    /// call this function.
    __device__ __forceinline__ float exponentials(float4* z, float max) const {
        float sum = 0.0f;
#pragma unroll 4
        for (int i = threadIdx.x; i < count / 4; i += kRowThreads) {
            float4 v = z[i];
            v = {fast_exp(v.x - max), fast_exp(v.y - max), fast_exp(v.z - max), fast_exp(v.w - max)};
            sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(v.x, v.y), __fadd_rn(v.z, v.w)));
            z[i] = v;
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) room.in_warp[1][threadIdx.x / 32] = sum;
        __syncthreads();
        return warp_sum(threadIdx.x % 32 < kRowWarps ? room.in_warp[1][threadIdx.x % 32] : 0.0f);
    }

    /// Combines the maxima and sums of the CTAs to those of
    /// the row. `turn` counts the calls of this function.
    __device__ __forceinline__ void meet(int turn, float& max, float& sum) const {
        if constexpr (kCluster > 1) {
            float* const maxima = room.maxima[turn % 2];
            float* const sums = room.sums[turn % 2];
            if (threadIdx.x < kCluster) {
                ptx::store_at(&maxima[rank], threadIdx.x, max);
                ptx::store_at(&sums[rank], threadIdx.x, sum);
            }
            ptx::cluster_sync();
            float all = __uint_as_float(0xFF800000), total = 0.0f;
#pragma unroll
            for (int i = 0; i < kCluster; ++i) all = ptx::max_or_nan(all, maxima[i]);
            // A CTA without elements has a sum of 0.
#pragma unroll
            for (int i = 0; i < kCluster; ++i)
                if (sums[i] != 0.0f) total = __fadd_rn(total, __fmul_rn(sums[i], fast_exp(maxima[i] - all)));
            max = all;
            sum = total;
        }
    }

    /// Writes the gradient, which is factor times each exponential, minus `scale` for the target.
    __device__ __forceinline__ void gradient(const float4* e, u16* out, int target, float factor, float scale) const {
#pragma unroll 4
        for (int i = threadIdx.x; i < count / 4; i += kRowThreads) {
            const float4 v = e[i];
            const float d[4] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
            Few<Bf16, 4>::from_f32(d).store(out + i * 4);
        }
        // The thread that overwrites the target's element here is the one that wrote this element above.
        if (u32(target) < u32(count) && target / 4 % kRowThreads == threadIdx.x) {
            const float d[1] = {__fsub_rn(reinterpret_cast<const float*>(e)[target] * factor, scale)};
            Few<Bf16, 1>::from_f32(d).store(out + target);
        }
    }

    __device__ __forceinline__ void clear(u16* out) const {
        for (int i = threadIdx.x; i < count / 4; i += kRowThreads) ptx::store_8(out + i * 4, {0, 0});
    }
};

template <int kCluster>
__global__ void __launch_bounds__(kRowThreads, 1)
    head_rows(const float* __restrict__ logits, const int* __restrict__ targets, float* __restrict__ loss, u16* __restrict__ dlogits,
              u64* __restrict__ bad_ids, int rows, int vocab, int part, const float* __restrict__ control) {
    extern __shared__ float4 shared[];
    HeadRoom& room = *reinterpret_cast<HeadRoom*>(shared);
    float4* const buffers = reinterpret_cast<float4*>(&room + 1);
    const int rank = kCluster == 1 ? 0 : int(ptx::cluster_cta_rank()), first = rank * part;
    const HeadPart<kCluster> mine{room, min(max(vocab - first, 0), part), rank};
    const int clusters = gridDim.x / kCluster, begin = blockIdx.x / kCluster;

    const float scale = dlogits == nullptr ? 0.0f : __ldg(control + kLossScale);
    const auto bring = [&](int row, int buffer) {
        if (row >= rows || mine.count == 0) return;
        ptx::barrier_arrive_expect(room.full[buffer], mine.count * 4);
        ptx::bulk_load(buffers + buffer * (part / 4), logits + u64(row) * vocab + first, mine.count * 4, room.full[buffer]);
    };
    if (threadIdx.x == 0) {
        ptx::barrier_init(room.full[0], 1);
        ptx::barrier_init(room.full[1], 1);
        ptx::barrier_init_fence();
    }
    if constexpr (kCluster > 1)
        ptx::cluster_sync();  // all CTAs of the cluster have started
    else
        __syncthreads();
    if (threadIdx.x == 0) {
        bring(begin, 0);
        bring(begin + clusters, 1);
    }
    int turn = 0;
    for (int row = begin, i = 0; row < rows; row += clusters, ++i) {
        const int buffer = i % 2, target = __ldg(targets + row);
        float4* const held = buffers + buffer * (part / 4);
        u16* const out = dlogits == nullptr ? nullptr : dlogits + u64(row) * vocab + first;
        if (mine.count > 0) ptx::barrier_wait(room.full[buffer], i / 2 % 2);
        if (u32(target) >= u32(vocab)) {
            if (rank == 0 && threadIdx.x == 0) {
                loss[row] = 0.0f;
                if (target >= 0) atomicAdd(bad_ids, u64(1));
            }
            if (out != nullptr) mine.clear(out);
        } else {
            const float part_max = mine.largest(held);
            float max = part_max, sum = mine.exponentials(held, part_max);
            mine.meet(turn++, max, sum);
            if (rank == 0 && threadIdx.x == 0)
                loss[row] = __fadd_rn(log_of_normal(sum), __fsub_rn(max, __ldg(logits + u64(row) * vocab + target)));
            const float factor = __fdiv_rn(__fmul_rn(scale, kCluster == 1 ? 1.0f : fast_exp(part_max - max)), sum);
            if (out != nullptr) mine.gradient(held, out, target - first, factor, scale);
        }
        // Orders this row's reads and writes of the buffer before TMA's next write to it.
        ptx::fence_shared_to_async();
        __syncthreads();
        if (threadIdx.x == 0) bring(row + 2 * clusters, buffer);
    }
}

}  // namespace nib
