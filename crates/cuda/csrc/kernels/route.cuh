// The router: softmax over the experts, the largest of them, and the losses of each shard; and the way back. In which order
// sums run is said in crates/core/src/ops/route.rs.
//
// route_tokens<kLanes, kPerLane>: logits [tokens][experts], experts <= kLanes * kPerLane, in shards of tokens_per_shard
// tokens; a cta takes one of the shard's `chunks` chunks of 64 tokens, kLanes lanes a token. probs as the logits; expert and
// weight [tokens][top_k]; log_sum_exp [tokens]; of each chunk the sums of probabilities [experts], of squares of log_sum_exp,
// and its slots' experts counted [experts].
//   16 * kLanes threads; grid shards * chunks; route_shared_bytes(experts, top_k) of dynamic shared memory.
// route_losses<kThreads>: sums those of a shard's chunks: load [shards][experts], losses [shards][2].
//   kThreads threads; grid shards; (16 * 8 + 4) * experts bytes of dynamic shared memory.
// route_backward<kLanes, kPerLane>: dlogits from the gradients of the weights, of the load-balancing loss (its factor
// for one slot: balance) and of the z-loss (z).
//   16 * kLanes threads, any grid; 16 * experts * 4 bytes of dynamic shared memory.
#pragma once
#include "math/exp.cuh"
#include "math/log.cuh"
#include "math/reduce.cuh"
#include "ptx/types.cuh"

namespace nib {

constexpr int kRouteGroups = 16;   // tokens a cta works on at once, and lanes of a sum over tokens
constexpr int kRouteChunk = 64;    // tokens
constexpr int kExpertLanes = 32;   // lanes of a sum over experts
constexpr u32 kWarp = 0xFFFFFFFF;
constexpr u32 kNegInfinityBits = 0xFF800000;

/// kLanes neighbouring lanes share a token: lane l has experts l, l + kLanes, ...
template <int kLanes, int kPerLane>
struct TokenLanes {
    static constexpr int kSets = kExpertLanes / kLanes;  // lanes of the sum that one thread stands for
    static constexpr int kIndexBits = kPerLane == 1 ? 0 : kPerLane == 2 ? 1 : kPerLane == 4 ? 2 : kPerLane == 8 ? 3 : 4;
    static_assert(kSets >= 1 && 1 << kIndexBits == kPerLane);

    __device__ __forceinline__ static float largest(float x) {
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(kWarp, x, lane));
        return x;
    }

    __device__ __forceinline__ static u32 largest(u32 x) {
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) {
            const u32 other = __shfl_xor_sync(kWarp, x, lane);
            x = other > x ? other : x;
        }
        return x;
    }

    /// Sum over the experts in the agreed order: `add(lane, i)` adds the thread's i-th term to a lane.
    template <class Add>
    __device__ __forceinline__ static float sum(Add add) {
        float lanes[kSets] = {};
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) lanes[i % kSets] = add(lanes[i % kSets], i);
#pragma unroll
        for (int half = kSets / 2; half > 0; half /= 2)
#pragma unroll
            for (int i = 0; i < half; ++i) lanes[i] = __fadd_rn(lanes[i], lanes[i + half]);
        float sum = lanes[0];
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kWarp, sum, lane));
        return sum;
    }
};

/// x / y for many x with 0 <= x <= y, y >= 1: IEEE's quotient. The first guess is within a unit in the last place and the
/// reciprocal is the nearest one, so that one correction is enough (Markstein) while the remainder is exact: x zero or not tiny.
struct Quotient {
    float y, reciprocal, rest;

    __device__ __forceinline__ explicit Quotient(float y) : y(y), reciprocal(__frcp_rn(y)) {
        rest = __fmul_rn(__fmaf_rn(-y, reciprocal, 1.0f), reciprocal);
    }
    __device__ __forceinline__ static bool is_tiny(float x) { return x < 8.27e-25f && x > 0.0f; }  // 2^-80
    __device__ __forceinline__ float of(float x) const {
        const float guess = __fmaf_rn(x, reciprocal, __fmul_rn(x, rest));
        return __fmaf_rn(__fmaf_rn(-y, guess, x), reciprocal, guess);
    }
};

__device__ __forceinline__ void order_descending(u32& a, u32& b) {
    const u32 low = a < b ? a : b;
    a = a < b ? b : a;
    b = low;
}

/// Batcher's odd-even merge sort, largest first.
template <int kCount>
__device__ __forceinline__ void sort_descending(u32 (&x)[kCount]) {
#pragma unroll
    for (int p = 1; p < kCount; p *= 2)
#pragma unroll
        for (int k = p; k > 0; k /= 2)
#pragma unroll
            for (int j = k % p; j + k < kCount; j += 2 * k)
#pragma unroll
                for (int i = 0; i < k; ++i)
                    if (i + j + k < kCount && (i + j) / (2 * p) == (i + j + k) / (2 * p)) order_descending(x[i + j], x[i + j + k]);
}

/// The chosen experts of one token, in shared memory.
struct Slots {
    int* expert;
    float* prob;
};

/// The top_k largest probabilities, the lower index first among equals.
///
/// A lane sorts its own as integers, the index below the bits of the probability; then the largest of all lanes' first ones
/// is taken top_k times. In 32 bits there is no room for the smallest probabilities: false if one of them was chosen.
template <int kLanes, int kPerLane>
__device__ __forceinline__ bool choose(const float (&p)[kPerLane], int experts, int top_k, Slots slots) {
    using Token = TokenLanes<kLanes, kPerLane>;
    constexpr int kBits = Token::kIndexBits;
    constexpr u32 kBase = kBits <= 2 ? 0 : 0x40000000 - (1u << (32 - kBits));
    const int lane = threadIdx.x % kLanes;
    const u32 below = ((1u << lane) - 1) << (threadIdx.x % 32 - lane);  // of the token's lanes
    u32 key[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const u32 bits = __float_as_uint(p[i]);
        key[i] = (bits > kBase ? (bits - kBase) << kBits : 0) | u32(kPerLane - 1 - i);
        if (i * kLanes + lane >= experts) key[i] = 0;
    }
    sort_descending(key);
    u32 largest = 0;
    for (int slot = 0; slot < top_k; ++slot) {
        largest = Token::largest(key[0]);
        const u32 holders = __ballot_sync(kWarp, key[0] == largest);
        if (key[0] == largest && (holders & below) == 0) {
            slots.expert[slot] = (kPerLane - 1 - (largest & (kPerLane - 1))) * kLanes + lane;
            slots.prob[slot] = __uint_as_float((largest >> kBits) + kBase);
#pragma unroll
            for (int i = 1; i < kPerLane; ++i) key[i - 1] = key[i];
            key[kPerLane - 1] = 0;
        }
    }
    return largest >> kBits != 0;
}

/// The same for any probabilities, NaN among them, expert by expert.
template <int kLanes, int kPerLane>
__device__ __forceinline__ void choose_among_any(const float (&p)[kPerLane], int experts, int top_k, Slots slots) {
    using Token = TokenLanes<kLanes, kPerLane>;
    const int lane = threadIdx.x % kLanes;
    u32 taken = 0;
    for (int slot = 0; slot < top_k; ++slot) {
        u32 best = 0, expert = kWarp;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const bool is_free = (taken >> i & 1) == 0 && i * kLanes + lane < experts;
            const u32 rank = is_free ? (p[i] >= 0.0f ? __float_as_uint(p[i]) + 2 : 1) : 0;  // a NaN above nothing
            if (rank > best) best = rank, expert = i * kLanes + lane;
        }
        const u32 largest = Token::largest(best);
        const u32 lowest = ~Token::largest(best == largest ? ~expert : 0);
        if (lowest == expert) {
            taken |= 1u << expert / kLanes;
            slots.expert[slot] = int(expert);
            slots.prob[slot] = largest == 1 ? __int_as_float(0x7FC00000) : __uint_as_float(largest - 2);
        }
    }
}

/// Closes sixteen lanes that lie `stride` apart.
__device__ __forceinline__ double close_sixteen(const double* lanes, int stride) {
    double sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = __dadd_rn(lanes[i * stride], lanes[(i + 8) * stride]);
#pragma unroll
    for (int half = 4; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) sum[i] = __dadd_rn(sum[i], sum[i + half]);
    return sum[0];
}

template <int kLanes, int kPerLane>
__global__ void __launch_bounds__(kRouteGroups* kLanes)
    route_tokens(const float* __restrict__ logits, float* __restrict__ probs, int* __restrict__ expert, float* __restrict__ weight,
                 float* __restrict__ log_sum_exp, double* __restrict__ prob_sums, double* __restrict__ square_sums,
                 int* __restrict__ counts, int experts, int top_k, int normalize, int tokens_per_shard, int chunks) {
    using Token = TokenLanes<kLanes, kPerLane>;
    constexpr int kThreads = kRouteGroups * kLanes;
    extern __shared__ double shared[];
    double* const lane_sums = shared;                                        // [16][experts], at the end
    double* const lane_squares = shared + kRouteGroups * experts;            // [16]
    int* const count = reinterpret_cast<int*>(lane_squares + kRouteGroups);  // [experts]
    const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const Slots slots = {count + experts + group * top_k, reinterpret_cast<float*>(count + experts + (kRouteGroups + group) * top_k)};

    for (int j = threadIdx.x; j < experts; j += kThreads) count[j] = 0;
    __syncthreads();
    const int shard = blockIdx.x / chunks, first = (blockIdx.x - shard * chunks) * kRouteChunk;
    const int tokens = min(kRouteChunk, tokens_per_shard - first);
    const u64 first_token = u64(shard) * tokens_per_shard + first;
    double sums[kPerLane] = {};
    double squares = 0.0;
    for (int step = 0; step < tokens; step += kRouteGroups) {
        const bool is_token = step + group < tokens;
        const u64 token = first_token + step + group;
        float p[kPerLane];
        const float nothing = __uint_as_float(kNegInfinityBits);
        float max = nothing;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int j = i * kLanes + lane;
            p[i] = is_token && j < experts ? __ldcs(logits + token * experts + j) : nothing;
            max = fmaxf(max, p[i]);  // passes over a NaN
        }
        max = Token::largest(max);
        bool any_tiny = false;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const float less = __fsub_rn(p[i], max);
            p[i] = less <= 0.0f ? exp_of_negative(less) : less;  // a NaN stays one
            any_tiny |= Quotient::is_tiny(p[i]);
        }
        // Where there is no expert the exponential is 0, or the sum NaN anyhow.
        const float sum = Token::sum([&](float lane_sum, int i) { return __fadd_rn(lane_sum, p[i]); });
        const Quotient quotient(sum);
        if (__any_sync(kWarp, any_tiny)) {
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) p[i] = __fdiv_rn(p[i], sum);
        } else {
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) p[i] = quotient.of(p[i]);
        }
        if (is_token)
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                const int j = i * kLanes + lane;
                if (j < experts) __stcs(probs + token * experts + j, p[i]);
                sums[i] = __dadd_rn(sums[i], double(p[i]));
            }
        const bool is_chosen = choose<kLanes, kPerLane>(p, experts, top_k, slots) && sum >= 0.0f;
        if (__any_sync(kWarp, is_token && !is_chosen)) {
            __syncwarp();
            choose_among_any<kLanes, kPerLane>(p, experts, top_k, slots);
        }
        __syncwarp();
        if (is_token) {
            float divisor = 1.0f;
            if (normalize) {
                divisor = 0.0f;
                for (int slot = 0; slot < top_k; ++slot) divisor = __fadd_rn(divisor, slots.prob[slot]);
            }
            for (int slot = lane; slot < top_k; slot += kLanes) {
                const int e = slots.expert[slot];
                expert[token * top_k + slot] = e;
                weight[token * top_k + slot] = normalize ? __fdiv_rn(slots.prob[slot], divisor) : slots.prob[slot];
                atomicAdd(&count[e], 1);
            }
            const float log_sum = __fadd_rn(max, log_of_at_least_one(sum));
            if (lane == 0) log_sum_exp[token] = log_sum;
            squares = __dadd_rn(squares, __dmul_rn(double(log_sum), double(log_sum)));
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
        if (i * kLanes + lane < experts) lane_sums[group * experts + i * kLanes + lane] = sums[i];
    if (lane == 0) lane_squares[group] = squares;
    __syncthreads();
    const u64 out = u64(blockIdx.x) * experts;
    for (int j = threadIdx.x; j < experts; j += kThreads) {
        prob_sums[out + j] = close_sixteen(lane_sums + j, experts);
        counts[out + j] = count[j];
    }
    if (threadIdx.x == 0) square_sums[blockIdx.x] = close_sixteen(lane_squares, 1);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    route_losses(const double* __restrict__ prob_sums, const double* __restrict__ square_sums, const int* __restrict__ counts,
                 int* __restrict__ load, float* __restrict__ losses, int experts, int top_k, int tokens_per_shard, int chunks) {
    constexpr int kLanes = 16, kColumns = kThreads / kLanes;
    extern __shared__ double lane_sums[];                                  // [16][experts]
    int* const count = reinterpret_cast<int*>(lane_sums + kLanes * experts);  // [experts]
    __shared__ double lane_squares[kLanes];
    const int lane = threadIdx.x / kColumns;
    const u64 first = u64(blockIdx.x) * chunks;
    for (int j = threadIdx.x; j < experts; j += kThreads) count[j] = 0;
    __syncthreads();
    for (int j = threadIdx.x % kColumns; j < experts; j += kColumns) {
        double sum = 0.0;
        int slots = 0;
#pragma unroll 4
        for (int chunk = lane; chunk < chunks; chunk += kLanes) {
            sum = __dadd_rn(sum, __ldg(prob_sums + (first + chunk) * experts + j));
            slots += __ldg(counts + (first + chunk) * experts + j);
        }
        lane_sums[lane * experts + j] = sum;
        if (slots != 0) atomicAdd(&count[j], slots);
    }
    if (threadIdx.x < kLanes) {
        double sum = 0.0;
        for (int chunk = threadIdx.x; chunk < chunks; chunk += kLanes) sum = __dadd_rn(sum, __ldg(square_sums + first + chunk));
        lane_squares[threadIdx.x] = sum;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < experts; j += kThreads) {
        load[u64(blockIdx.x) * experts + j] = count[j];
        lane_sums[j] = __dmul_rn(double(count[j]), close_sixteen(lane_sums + j, experts));
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    double balance = 0.0;
    for (int j = threadIdx.x; j < experts; j += kExpertLanes) balance = __dadd_rn(balance, lane_sums[j]);
#pragma unroll
    for (int half = 16; half > 0; half /= 2) balance = __dadd_rn(balance, __shfl_xor_sync(kWarp, balance, half));
    if (threadIdx.x != 0) return;
    // A shard without tokens has no loss, rather than 0 / 0.
    const double per_slot = tokens_per_shard == 0 ? 1.0 : double(u64(tokens_per_shard) * top_k * tokens_per_shard);
    const double per_token = tokens_per_shard == 0 ? 1.0 : double(tokens_per_shard);
    losses[2 * blockIdx.x] = __double2float_rn(__ddiv_rn(__dmul_rn(double(experts), balance), per_slot));
    losses[2 * blockIdx.x + 1] = __double2float_rn(__ddiv_rn(close_sixteen(lane_squares, 1), per_token));
}

/// Each thread's own slot, of which it knows the weight's gradient, the weight and the probability; tokens with more slots
/// than lanes take turns.
template <int kLanes, int kPerLane>
__global__ void __launch_bounds__(kRouteGroups* kLanes)
    route_backward(const float* __restrict__ probs, const int* __restrict__ expert, const float* __restrict__ weight,
                   const float* __restrict__ log_sum_exp, const int* __restrict__ load, const float* __restrict__ dweight,
                   float* __restrict__ dlogits, int experts, int top_k, int normalize, int tokens, Divider by_shard, double balance,
                   float z) {
    using Token = TokenLanes<kLanes, kPerLane>;
    extern __shared__ float chosen[];  // [16][experts]: the chosen experts' gradients, zeros elsewhere
    const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    float* const mine = chosen + group * experts;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
        if (i * kLanes + lane < experts) mine[i * kLanes + lane] = 0.0f;
    __syncwarp();
    for (int first = blockIdx.x * kRouteGroups; first < tokens; first += gridDim.x * kRouteGroups) {
        const bool is_token = first + group < tokens;
        const u64 token = is_token ? first + group : 0;
        const u64 shard = by_shard.divide(u32(token));
        float p[kPerLane], d[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int j = i * kLanes + lane;
            p[i] = j < experts ? __ldcs(probs + token * experts + j) : 0.0f;
            d[i] = j < experts ? __double2float_rn(__dmul_rn(balance, double(__ldg(load + shard * experts + j)))) : 0.0f;
        }
        const float shift = z == 0.0f ? 0.0f : __fmul_rn(z, __ldg(log_sum_exp + token));
        // w = p / sum of p: dp = (dw - sum of dw * w) / sum of p
        float inner = 0.0f, divisor = normalize ? 0.0f : 1.0f;
        if (normalize)
            for (int slot = 0; slot < top_k; ++slot) {
                const u64 at = token * top_k + slot;
                const u32 e = u32(__ldg(expert + at));
                inner = __fadd_rn(inner, __fmul_rn(__ldg(dweight + at), __ldg(weight + at)));
                divisor = __fadd_rn(divisor, e < u32(experts) ? __ldg(probs + token * experts + e) : 0.0f);
            }
        for (int slot = lane; slot < top_k; slot += kLanes) {
            const u64 at = token * top_k + slot;
            const u32 e = u32(__ldg(expert + at));
            if (e < u32(experts)) mine[e] = __fdiv_rn(__fsub_rn(__ldg(dweight + at), inner), divisor);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int j = i * kLanes + lane;
            if (j >= experts) continue;
            d[i] = __fadd_rn(mine[j], d[i]);
            mine[j] = 0.0f;
        }
        const float dot = Token::sum([&](float lane_sum, int i) { return __fmaf_rn(d[i], p[i], lane_sum); });
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int j = i * kLanes + lane;
            const float out = __fmul_rn(p[i], __fadd_rn(__fsub_rn(d[i], dot), shift));
            if (is_token && j < experts) __stcs(dlogits + token * experts + j, out);
        }
        __syncwarp();
    }
}

}  // namespace nib
