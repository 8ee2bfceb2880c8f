// Cross-entropy of rows of logits, and its gradient. crates/core/src/ops/vocabulary/cross_entropy.rs defines the order of sums.
//
// cross_entropy<kLanes, kWide, kGroups>: for each row of logits [rows][vocab], writes the loss, and dlogits [rows][vocab], BF16 or F32, unless
//   dlogits is null. bad_ids counts targets at or past the vocabulary's end. Element i is added to partial sum i % 1024 of the row; such a
//   partial sum is called a lane. Each row has a cluster of 1024 / kLanes CTAs. Each CTA has kLanes adjacent lanes, and holds their elements in
//   shared memory from the first read to the last write, so logits are read once. A thread has kWide adjacent lanes (2: vocab is even) and every
//   kGroups-th of their elements; with several groups, the first group sums the lanes. kLanes / kWide * kGroups threads per CTA; grid rows *
//   1024 / kLanes, in clusters of 1024 / kLanes. Dynamic shared memory: EntropyRoom, and 4 bytes for each of ceil(vocab / 1024) * kLanes logits.
// shard_nats: nats[shard] = the sum of the shard's losses; `sums` is scratch memory
// for shards * ceil(each / 4096) numbers. 512 threads per CTA, one CTA per shard.
#pragma once
#include "formats/plain.cuh"
#include "math/chunk_sum.cuh"
#include "math/divide.cuh"
#include "math/exp.cuh"
#include "math/log.cuh"
#include "pieces/step/control.cuh"
#include "ptx/cluster.cuh"
#include "ptx/packed.cuh"
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kSumOver = 1024;  // number of partial sums (lanes) per row
constexpr u32 kOneWarp = 0xFFFFFFFF;

/// Values exchanged between the CTAs and warps of a row. EntropyRoom precedes the logits in shared
/// memory.
struct alignas(16) EntropyRoom {
    float lanes[kSumOver];  // partial sums
    float maxima[128];      // maximum of each warp of each CTA
    float sum;
};

/// The dynamic shared memory of a CTA: EntropyRoom, and the logits of the CTA's part of the row.
template <int kLanes>
__device__ constexpr u64 cross_entropy_shared_bytes(u64 vocab) {
    return sizeof(EntropyRoom) + (vocab + kSumOver - 1) / kSumOver * kLanes * sizeof(float);
}

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000); }

/// Adds numbers that are kHalf apart, then kHalf / 2 apart, and so on; the sum is in x[0].
template <int kHalf>
__device__ __forceinline__ void close_halves(float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) x[i] = __fadd_rn(x[i], x[i + kHalf]);
    if constexpr (kHalf > 1) close_halves<kHalf / 2>(x);
}

/// Reduces 1024 partial sums by halving. One warp calls this function.
__device__ __forceinline__ float close_lanes(const float (&lanes)[kSumOver]) {
    float sum[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] = lanes[i * 32 + threadIdx.x % 32];
    close_halves<16>(sum);
    float all = sum[0];
#pragma unroll
    for (int half = 16; half > 0; half /= 2) all = __fadd_rn(all, __shfl_xor_sync(kOneWarp, all, half));
    return all;
}

/// The part of a row that a CTA has, and the positions of each thread's elements.
template <int kLanes, int kWide, int kGroups>
struct EntropyPart {
    static constexpr int kCluster = kSumOver / kLanes;
    static constexpr int kOwners = kLanes / kWide;  // threads per group
    static constexpr int kThreads = kOwners * kGroups;
    static constexpr int kWarps = kThreads / 32;
    static_assert(kCluster * kWarps <= 128);
    using Logits = Few<F32, kWide>;

    float* held;   // [rounds][kLanes]: the logits, then their exponentials
    int vocab;
    int full;      // number of full rounds of 1024 elements
    int rounds;    // number of rounds, including a partial last round
    int rank, group, lane;

    __device__ __forceinline__ EntropyPart(float* held, int vocab)
        : held(held), vocab(vocab), full(vocab / kSumOver), rounds(ceil_div(vocab, kSumOver)),
          rank(kCluster == 1 ? 0 : int(ptx::cluster_cta_rank())), group(threadIdx.x / kOwners), lane(threadIdx.x % kOwners * kWide) {}

    /// Returns the thread's first element of a round, as an index within the row.
    __device__ __forceinline__ int element(int round) const { return round * kSumOver + rank * kLanes + lane; }
    __device__ __forceinline__ float* place(int round) const { return held + round * kLanes + lane; }

    /// Loads the logits; positions past the row's end are -infinity. Returns the thread's largest logit, or a
    /// NaN if any logit is NaN.
    __device__ __forceinline__ float load(const float* __restrict__ row) const {
        constexpr int kBatch = 8;
        float max = -infinity();
        const auto take = [&](int round, const Logits& z) {
            z.store(place(round));
#pragma unroll
            for (int i = 0; i < kWide; ++i) max = ptx::max_or_nan(max, z.value(i));
        };
        int round = group;
#pragma unroll 1
        for (; round + (kBatch - 1) * kGroups < full; round += kBatch * kGroups) {
            Logits z[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) z[i] = Logits::load(row + element(round + i * kGroups));
#pragma unroll
            for (int i = 0; i < kBatch; ++i) take(round + i * kGroups, z[i]);
        }
#pragma unroll 1
        for (; round < rounds; round += kGroups) {
            float past[kWide];
#pragma unroll
            for (int i = 0; i < kWide; ++i) past[i] = -infinity();
            take(round, element(round) < vocab ? Logits::load(row + element(round)) : Logits::from_f32(past));
        }
        return max;
    }

    /// Computes the row's largest logit, or a NaN, from the largest
    /// logit of each thread. The function ends with a barrier.
    __device__ __forceinline__ float largest(EntropyRoom& room, float max) const {
#pragma unroll
        for (int half = 16; half > 0; half /= 2) max = ptx::max_or_nan(max, __shfl_xor_sync(kOneWarp, max, half));
        const int in_warp = threadIdx.x % 32;
        float* const mine = &room.maxima[rank * kWarps + threadIdx.x / 32];
        if constexpr (kCluster == 1) {
            if (in_warp == 0) *mine = max;
            __syncthreads();
        } else {
            ptx::cluster_wait();  // all CTAs of the cluster have started
            if (in_warp < kCluster) ptx::store_at(mine, in_warp, max);
            ptx::cluster_sync();
        }
        max = -infinity();
#pragma unroll
        for (int i = 0; i < kCluster * kWarps; i += 32)
            if (i + in_warp < kCluster * kWarps) max = ptx::max_or_nan(max, room.maxima[i + in_warp]);
#pragma unroll
        for (int half = 16; half > 0; half /= 2) max = ptx::max_or_nan(max, __shfl_xor_sync(kOneWarp, max, half));
        return max;
    }

    /// Replaces the logits by their exponentials and sums them. The comment
    /// of Quotient explains `smallest`. The function ends with a barrier.
    __device__ __forceinline__ float exponentials(EntropyRoom& room, float max, u32& smallest) const {
        float sum[kWide] = {};
#pragma unroll 4
        for (int round = group; round < rounds; round += kGroups) {
            const Logits z = read(round);
            float e[kWide];
#pragma unroll
            for (int i = 0; i < kWide; ++i) {
                e[i] = exp_of_negative(__fsub_rn(z.value(i), max));
                smallest = Quotient::smallest(smallest, e[i]);
                if (kGroups == 1) sum[i] = __fadd_rn(sum[i], e[i]);
            }
            Logits::from_f32(e).store(place(round));
        }
        if constexpr (kGroups > 1) {
            __syncthreads();
            if (group == 0)
#pragma unroll 8
                for (int round = 0; round < rounds; ++round) {
                    const Logits e = read(round);
#pragma unroll
                    for (int i = 0; i < kWide; ++i) sum[i] = __fadd_rn(sum[i], e.value(i));
                }
        }
        float* const lanes = &room.lanes[rank * kLanes + lane];
        if (group == 0)
#pragma unroll
            for (int i = 0; i < kWide; ++i)
                if constexpr (kCluster == 1)
                    lanes[i] = sum[i];
                else
#pragma unroll
                    for (int to = 0; to < kCluster; ++to) ptx::store_at(lanes + i, to, sum[i]);
        if constexpr (kCluster == 1)
            __syncthreads();
        else
            ptx::cluster_sync();
        if (threadIdx.x < 32) {
            const float all = close_lanes(room.lanes);
            // `exp_of_negative` maps a NaN to a number, so the sum is set to NaN here.
            if (threadIdx.x == 0) room.sum = fabsf(max) < infinity() ? all : __uint_as_float(0x7FC00000);
        }
        __syncthreads();
        return room.sum;
    }

    __device__ __forceinline__ Logits read(int round) const {
        if constexpr (kWide == 1) {
            return {{__float_as_uint(*place(round))}};
        } else {
            const uint2 z = *reinterpret_cast<const uint2*>(place(round));
            return {{z.x, z.y}};
        }
    }

    /// Writes the gradient of a row; `of` maps an exponential to its gradient.
    template <class Out, class Of>
    __device__ __forceinline__ void write(u8* row, const Of& of) const {
#pragma unroll 4
        for (int round = group; round < rounds; round += kGroups) {
            const Logits e = read(round);
            float d[kWide];
#pragma unroll
            for (int i = 0; i < kWide; ++i) d[i] = of(e.value(i));
            if (element(round) < vocab) Few<Out, kWide>::from_f32(d).store(row + u64(element(round)) * Out::kBytes);
        }
    }

    /// Computes the gradient of a row whose target is `target`.
    template <class Out>
    __device__ __forceinline__ void gradient(u8* row, int target, float sum, float scale, u32 smallest) const {
        if (__any_sync(kOneWarp, Quotient::is_tiny(smallest))) {
            write<Out>(row, [&](float e) { return __fmul_rn(scale, __fdiv_rn(e, sum)); });
        } else {
            const Quotient quotient(sum);
            write<Out>(row, [&](float e) { return __fmul_rn(scale, quotient.of(e)); });
        }
        // The thread that overwrites the target's gradient here is the one that wrote this element above.
        const int round = target / kSumOver, at = target % kSumOver - rank * kLanes - lane;
        if (u32(at) < u32(kWide) && round % kGroups == group) {
            const float share = __fdiv_rn(place(round)[at], sum);
            const float d[1] = {__fmul_rn(scale, __fsub_rn(share, 1.0f))};
            Few<Out, 1>::from_f32(d).store(row + u64(target) * Out::kBytes);
        }
    }

    template <class Out>
    __device__ __forceinline__ void clear(u8* row) const {
        const float zeros[kWide] = {};
        for (int round = group; round < rounds; round += kGroups)
            if (element(round) < vocab) Few<Out, kWide>::from_f32(zeros).store(row + u64(element(round)) * Out::kBytes);
    }
};

template <int kLanes, int kWide, int kGroups>
__global__ void __launch_bounds__(kLanes / kWide * kGroups, kLanes / kWide * kGroups <= 256 ? 3 : kLanes / kWide * kGroups <= 512 ? 2 : 1)
    cross_entropy(const float* __restrict__ logits, const int* __restrict__ targets, float* __restrict__ loss, u8* __restrict__ dlogits,
                  u64* __restrict__ bad_ids, int vocab, const float* __restrict__ control, int is_bf16) {
    using Part = EntropyPart<kLanes, kWide, kGroups>;
    extern __shared__ float4 shared[];
    EntropyRoom& room = *reinterpret_cast<EntropyRoom*>(shared);
    const Part part(reinterpret_cast<float*>(&room + 1), vocab);
    const u32 row = blockIdx.x / Part::kCluster;
    const float* const z = logits + u64(row) * vocab;
    u8* const gradient = dlogits == nullptr ? nullptr : dlogits + u64(row) * vocab * (is_bf16 ? Bf16::kBytes : F32::kBytes);
    const bool is_first = part.rank == 0 && threadIdx.x == 0;
    const int target = __ldg(targets + row);
    if (u32(target) >= u32(vocab)) {
        if (is_first) {
            loss[row] = 0.0f;
            if (target >= 0) atomicAdd(bad_ids, u64(1));
        }
        if (gradient != nullptr) is_bf16 ? part.template clear<Bf16>(gradient) : part.template clear<F32>(gradient);
        return;
    }
    if constexpr (Part::kCluster > 1) ptx::cluster_arrive();
    const float max = part.largest(room, part.load(z));
    u32 smallest = kOneWarp;
    const float sum = part.exponentials(room, max, smallest);
    if (is_first) loss[row] = __fadd_rn(log_of_normal(sum), __fsub_rn(max, __ldg(z + target)));
    if (gradient == nullptr) return;
    const float scale = __ldg(control + kLossScale);
    if (is_bf16)
        part.template gradient<Bf16>(gradient, target, sum, scale, smallest);
    else
        part.template gradient<F32>(gradient, target, sum, scale, smallest);
}

constexpr int kNatsThreads = 512;

__global__ void __launch_bounds__(kNatsThreads)
    shard_nats(const float* __restrict__ loss, double* sums, double* __restrict__ nats, u64 each, u64 chunks) {
    const float* const of_shard = loss + blockIdx.x * each;
    const double sum = sum_in_chunks<kNatsThreads>(each, sums + blockIdx.x * chunks, [&](u64 i) { return __ldg(of_shard + i); });
    if (threadIdx.x == 0) nats[blockIdx.x] = sum;
}

}  // namespace nib
