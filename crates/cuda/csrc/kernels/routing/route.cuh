// The router computes the scores of the experts, chooses the best experts, and computes the losses of each shard.
// This file also has the router's backward pass. crates/core/src/ops/routing/route.rs defines the order of sums.
//
// kLanes adjacent lanes share a token. Each lane has kPerLane of the token's experts, in groups of four; experts
// <= kLanes * kPerLane. Each CTA has a chunk of 64 tokens; a shard of tokens_per_shard tokens has `chunks` chunks.
//
// route_tokens<kLanes, kPerLane, kAnyRule>: logits and kept are [tokens][experts], bias is [experts] or null, expert and weight are
//   [tokens][top_k], and log_sum_exp is [tokens]. For each chunk, the kernel writes sums over tokens of the probabilities [experts] and of the
//   squares of log_sum_exp, and how many slots chose each expert [experts]. Without kAnyRule, the experts with the largest softmax are chosen,
//   without bias, groups or sigmoids. The kernel writes `kept` for a softmax only. `tiny` is added to those sums of sigmoids that are divisors.
//   min(256, 64 * kLanes) threads per CTA; the grid has shards * chunks CTAs. Dynamic shared memory, in units of 4 bytes: 64 rows
//   of kLanes * kPerLane + 16 numbers, 64 numbers, one number per expert, and threads / kLanes rows of top_k + groups numbers.
// route_documents: reads starts [tokens] and expert [tokens][top_k], and counts in the slots and lengths of RouteDocuments, which are initially zeros.
//   256 threads per CTA; the grid has ceil(tokens * (top_k + 1) / 256) CTAs.
// route_document_losses<kLanes, kPerLane>: for each chunk, computes from `kept` and RouteDocuments what its tokens
//   contribute to the load-balancing losses of documents, [shards * chunks]. Threads and grid are those of route_tokens.
// route_losses<kThreads>: computes load [shards][experts] and losses [shards][2] from the sums of the chunks; `products` is
//   scratch memory [shards][experts]. If document_sums is not null, the load-balancing loss is computed from document_sums.
//   1024 threads per CTA, one cluster of ceil(experts / 64) CTAs per shard; the kernel may be launched early (programmatic dependent launch).
// route_backward<kLanes, kPerLane, Load, kSigmoid>: computes dlogits from the gradients of the weights,
//   of the load-balancing loss (`balance` for each slot of the load) and of the z-loss (`z`). `kept`
//   holds probabilities, or logits with kSigmoid. Load is int, double, or RouteDocuments for the loads of
//   documents, in which case `load` is null. Threads and grid are those of route_tokens. Dynamic shared
//   memory has 4 bytes for each number in 65 rows of kLanes * kPerLane and in 3 * 64 rows of top_k.
//
// Speed on an H200 with 32768 tokens, 4 shards, top 8, softmax, in % of the bandwidth limit. With 128 experts, route_tokens reaches
// 42 % (it uses 65 % of issue slots), with route_losses 32 %, and route_backward 60 %. With 256 experts, they reach 43, 37 and 68 %.
#pragma once
#include "math/divide.cuh"
#include "math/exp.cuh"
#include "math/log.cuh"
#include "math/reduce.cuh"
#include "pieces/routing/choice.cuh"
#include "pieces/routing/token_lanes.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace nib {

/// Replaces logits by probabilities. Returns the logarithm of the sum of exponentials (log sum exp).
template <int kLanes, int kPerLane>
__device__ __forceinline__ float softmax(float (&p)[kPerLane]) {
    using Token = TokenLanes<kLanes, kPerLane>;
    float max = p[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) max = ptx::max_or_nan(max, p[i]);
    max = Token::largest(max);
    u32 smallest = kWarp;
    float lanes[Token::kUsed * 4];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        p[i] = exp_of_negative(__fsub_rn(p[i], max));
        smallest = Quotient::smallest(smallest, p[i]);
        float& lane = lanes[i / 4 % Token::kUsed * 4 + i % 4];
        lane = i < Token::kUsed * 4 ? p[i] : __fadd_rn(lane, p[i]);
    }
    float sum = Token::close(lanes);
    // `exp_of_negative` maps a NaN to a number, so the sum is set to NaN here.
    if (!(fabsf(max) < __uint_as_float(0x7F800000))) sum = __uint_as_float(0x7FC00000);
    const Quotient quotient(sum);
    if (__any_sync(kWarp, Quotient::is_tiny(smallest))) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) p[i] = __fdiv_rn(p[i], sum);
    } else {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) p[i] = quotient.of(p[i]);
    }
    return __fadd_rn(max, log_of_normal(sum));
}

/// Replaces logits by their sigmoids, or by NaNs if log sum exp is NaN.
template <int kPerLane>
__device__ __forceinline__ void sigmoids(float (&x)[kPerLane], float log_sum) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = log_sum == log_sum ? sigmoid(x[i]) : __uint_as_float(0x7FC00000);
}

/// The sum of a row's sigmoids, which may be 0, plus `tiny`.
template <int kLanes, int kPerLane>
__device__ __forceinline__ float sigmoid_sum(const float (&s)[kPerLane], float tiny) {
    using Token = TokenLanes<kLanes, kPerLane>;
    float lanes[Token::kUsed * 4] = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        float& lane = lanes[i / 4 % Token::kUsed * 4 + i % 4];
        lane = __fadd_rn(lane, s[i]);
    }
    return __fadd_rn(Token::close(lanes), tiny);
}

/// Writes a token's experts and their weights, and counts the experts.
template <int kLanes>
__device__ __forceinline__ void write_slots(const float* row, const int* slots, int* expert, float* weight, int* count, int top_k,
                                            int normalize, float tiny, float scale, bool is_token) {
    const int lane = threadIdx.x % kLanes;
    constexpr int kTurn = kLanes < 8 ? kLanes : 8;
    float divisor = 0.0f;
    if (normalize)
#pragma unroll 1
        for (int first = 0; first < top_k; first += kTurn) {
            const float prob = is_token && lane < kTurn && first + lane < top_k ? row[slots[first + lane]] : 0.0f;
            // For indices past the last slot, zeros are added.
#pragma unroll
            for (int i = 0; i < kTurn; ++i) divisor = __fadd_rn(divisor, __shfl_sync(kWarp, prob, i, kLanes));
        }
    divisor = __fadd_rn(divisor, tiny);
    if (!is_token) return;
#pragma unroll 1
    for (int slot = lane; slot < top_k; slot += kLanes) {
        const int e = slots[slot];
        expert[slot] = e;
        weight[slot] = __fmul_rn(normalize ? __fdiv_rn(row[e], divisor) : row[e], scale);
        atomicAdd(&count[e], 1);
    }
}

/// Adds the sixteen partial sums of a sum over tokens, which are in sixteen adjacent threads.
template <class T>
__device__ __forceinline__ T close_token_lanes(T sum) {
#pragma unroll
    for (int half = kTokenLanes / 2; half > 0; half /= 2) sum = add(sum, __shfl_xor_sync(kWarp, sum, half));
    return sum;
}

/// The sum of a column over the rows of the chunk. One thread adds the
/// even partial sums, and the next thread adds the odd partial sums.
template <int kStride>
__device__ __forceinline__ float sum_column(const float* rows, int column) {
    const int odd = threadIdx.x % 2;
    float lanes[kTokenLanes / 2] = {};
#pragma unroll
    for (int i = 0; i < kRouteChunk / 2; ++i) {
        float& lane = lanes[i % (kTokenLanes / 2)];
        lane = __fadd_rn(lane, rows[(2 * i + odd) * kStride + column]);
    }
    tree_sum<kTokenLanes / 4>(lanes);
    return __fadd_rn(lanes[0], __shfl_xor_sync(kWarp, lanes[0], 1));
}

/// Dynamic shared memory of route_tokens: rows of logits, one number per row,
/// one count per expert, and the slots and groups of the tokens in progress.
template <int kLanes, int kPerLane>
__device__ constexpr u64 route_tokens_shared_bytes(u64 experts, u64 top_k, u64 groups) {
    using Token = TokenLanes<kLanes, kPerLane>;
    return 4 * (kRouteChunk * (Token::kExperts + 16 + 1) + experts + Token::kGroups * (top_k + groups));
}

/// Dynamic shared memory of route_backward: rows of probabilities, one row for sums over all tokens, and three numbers per slot.
template <int kLanes, int kPerLane>
__device__ constexpr u64 route_backward_shared_bytes(u64 top_k) {
    return 4 * ((kRouteChunk + 1) * TokenLanes<kLanes, kPerLane>::kExperts + 3 * kRouteChunk * top_k);
}

/// The number of CTAs per SM for which the registers must suffice.
template <int kPerLane, bool kWide>
constexpr int kRouteCtas = kPerLane > 16 ? 1 : kWide ? 2 : 4;

template <int kLanes, int kPerLane, bool kAnyRule>
__global__ void __launch_bounds__(TokenLanes<kLanes, kPerLane>::kThreads, kRouteCtas<kPerLane, kAnyRule>)
    route_tokens(const float* __restrict__ logits, const float* __restrict__ bias, float* __restrict__ kept, int* __restrict__ expert,
                 float* __restrict__ weight, float* __restrict__ log_sum_exp, float* __restrict__ prob_sums,
                 float* __restrict__ square_sums, int* __restrict__ counts, int experts, int top_k, int normalize, int tokens_per_shard,
                 int chunks, int is_sigmoid, int groups, int top_groups, int two_largest, int in_turn, float tiny, float scale) {
    using Token = TokenLanes<kLanes, kPerLane>;
    constexpr int kThreads = Token::kThreads, kGroups = Token::kGroups;
    extern __shared__ float4 shared[];
    constexpr int kStride = Token::kExperts + 16;                   // adjacent rows start half of the banks apart
    float* const rows = reinterpret_cast<float*>(shared);           // [64][kStride]: logits, then probabilities
    float* const logs = rows + kRouteChunk * kStride;               // [64]: log sum exp of each token
    int* const count = reinterpret_cast<int*>(logs + kRouteChunk);  // [experts]: slots that chose the expert
    const int group = threadIdx.x / kLanes;
    int* const slots = count + experts + group * top_k;  // [tokens at once][top_k]: slots of this thread's token
    u32* const group_scores = reinterpret_cast<u32*>(count + experts + kGroups * top_k) + group * groups;  // [tokens at once][groups]
    const int shard = blockIdx.x / chunks, first = (blockIdx.x - shard * chunks) * kRouteChunk;
    const int tokens = min(kRouteChunk, tokens_per_shard - first);
    const u64 first_token = u64(shard) * tokens_per_shard + first;
    const float nothing = __uint_as_float(0xFF800000);
    const auto fetch = [&](int at) {
        if (at < kRouteChunk)
            fetch_row<Token>(rows + at * kStride, logits + (first_token + min(at, tokens - 1)) * experts, experts, nothing);
        ptx::copies_commit();
    };
    fetch(group);
    fetch(group + kGroups);
#pragma unroll 1
    for (int j = threadIdx.x; j < experts; j += kThreads) count[j] = 0;
    __syncthreads();
#pragma unroll 1
    for (int at = group; at < kRouteChunk; at += kGroups) {
        const bool is_token = at < tokens;
        const u64 token = first_token + at;
        float* const row = rows + at * kStride;
        // A thread reads back only values that it copied itself.
        ptx::copies_wait_but<1>();
        float p[kPerLane];
        read_row<Token>(row, p);
        fetch(at + 2 * kGroups);
        const float log_sum = softmax<kLanes, kPerLane>(p);
        const bool has_sigmoids = kAnyRule && is_sigmoid;
        if (has_sigmoids) {
            read_row<Token>(row, p);
            sigmoids(p, log_sum);
        }
        if (is_token) {
            if (!has_sigmoids) store_row<Token>(kept + token * experts, p, experts);
        } else {
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) p[i] = 0.0f;  // zeros, which are then summed
        }
        if constexpr (!kAnyRule) write_row<Token>(row, p);
        if (threadIdx.x % kLanes == 0) {
            logs[at] = is_token ? log_sum : 0.0f;
            if (is_token) log_sum_exp[token] = log_sum;
        }
        if constexpr (kAnyRule) {
            if (in_turn) {
                write_row<Token>(row, p);
#pragma unroll 1
                for (int slot = threadIdx.x % kLanes; slot < top_k; slot += kLanes)
                    slots[slot] = (first + at + slot * (experts / top_k)) % experts;
            } else {
                choose_by_rule<kLanes, kPerLane>(p, row, bias, group_scores, experts, top_k, groups, top_groups, two_largest, slots);
            }
        } else {
            const bool is_chosen = choose<kLanes, kPerLane>(p, top_k, slots) && log_sum == log_sum;
            if (__any_sync(kWarp, is_token && !is_chosen)) {
                __syncwarp();
                const auto rank = [&](int i) -> u32 {
                    const bool is_expert = Token::first_of(i / 4) + i % 4 < experts;
                    return is_expert ? (p[i] >= 0.0f ? __float_as_uint(p[i]) + 2 : 1) : 0;  // a NaN is not above any other score
                };
                choose_any<kLanes, kPerLane>(rank, top_k, slots);
            }
        }
        __syncwarp();
        write_slots<kLanes>(row, slots, expert + token * top_k, weight + token * top_k, count, top_k, normalize, kAnyRule ? tiny : 0.0f, scale,
                            is_token);
        __syncwarp();
        if (has_sigmoids) {
            const float sum = sigmoid_sum<kLanes, kPerLane>(p, tiny);
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) p[i] = __fdiv_rn(p[i], sum);
            write_row<Token>(row, p);  // written for the sums over tokens
        }
    }
    __syncthreads();
    const u64 out = u64(blockIdx.x) * experts;
#pragma unroll 1
    for (int j = threadIdx.x; j < experts; j += kThreads) counts[out + j] = count[j];
#pragma unroll 1
    for (int task = threadIdx.x; task < ceil_div(2 * experts, 32) * 32; task += kThreads) {
        const int j = min(task / 2, experts - 1);
        const float sum = sum_column<kStride>(rows, j);
        if (task % 2 == 0 && task < 2 * experts) prob_sums[out + j] = sum;
    }
    if (threadIdx.x < 32) {
        float squares = 0.0f;
        for (int at = threadIdx.x % kTokenLanes; at < kRouteChunk; at += kTokenLanes)
            squares = __fadd_rn(squares, __fmul_rn(logs[at], logs[at]));
        squares = close_token_lanes(squares);
        if (threadIdx.x == 0) square_sums[blockIdx.x] = squares;
    }
}

/// For shards that are sequences of documents. For each token, the struct has the position in the shard of
/// the first token of the token's document. The rows of these first tokens also hold how many slots of the
/// document chose each expert [tokens][experts_padded], and how many tokens the document has [tokens].
struct RouteDocuments {
    const int* starts;
    const int* slots;
    const int* lengths;

    /// Length of a row of `slots`, rounded up so that rows are 16-byte aligned.
    __device__ __forceinline__ static u64 padded(int experts) { return ceil_div(experts, 4) * 4; }

    /// Returns the row that belongs to the document of a token.
    __device__ __forceinline__ static u64 row(const int* starts, u64 shard, int tokens_per_shard, int at) {
        const u64 first = shard * tokens_per_shard;
        return first + min(max(__ldg(starts + first + at), 0), at);
    }

    /// Reads a row of `slots` for this thread's experts; zeros past the last expert.
    template <class Token>
    __device__ __forceinline__ void read(u64 row, int experts, int (&x)[4 * Token::kQuads]) const {
#pragma unroll
        for (int i = 0; i < Token::kQuads; ++i) {
            const int j = Token::first_of(i);
            const int4 quad = j < experts ? __ldg(reinterpret_cast<const int4*>(slots + row * padded(experts) + j)) : int4{0, 0, 0, 0};
            x[4 * i] = quad.x, x[4 * i + 1] = quad.y, x[4 * i + 2] = quad.z, x[4 * i + 3] = quad.w;
        }
    }
};

__global__ void __launch_bounds__(256)
    route_documents(const int* __restrict__ starts, const int* __restrict__ expert, int* slots, int* lengths, u32 tasks, int experts, int top_k,
                    int tokens_per_shard) {
    const u32 task = blockIdx.x * 256 + threadIdx.x;
    if (task >= tasks) return;
    const u32 token = task / (top_k + 1), slot = task % (top_k + 1), shard = token / tokens_per_shard;
    const u64 row = RouteDocuments::row(starts, shard, tokens_per_shard, int(token - shard * tokens_per_shard));
    if (slot == u32(top_k)) {
        atomicAdd(lengths + row, 1);
        return;
    }
    const u32 e = expert[u64(token) * top_k + slot];
    if (e < u32(experts)) atomicAdd(slots + row * RouteDocuments::padded(experts) + e, 1);
}

template <int kLanes, int kPerLane>
__global__ void __launch_bounds__(TokenLanes<kLanes, kPerLane>::kThreads)
    route_document_losses(const float* __restrict__ kept, const float* __restrict__ log_sum_exp, RouteDocuments documents,
                          float* __restrict__ sums, int experts, int tokens_per_shard, int chunks, int is_sigmoid, float tiny) {
    using Token = TokenLanes<kLanes, kPerLane>;
    __shared__ float parts[kRouteChunk];
    const int group = threadIdx.x / kLanes;
    const int shard = blockIdx.x / chunks, first = (blockIdx.x - shard * chunks) * kRouteChunk;
#pragma unroll 1
    for (int at = group; at < kRouteChunk; at += Token::kGroups) {
        // If the shard ends within a warp, the remaining lanes repeat the work of the last token.
        const bool is_token = first + at < tokens_per_shard;
        const int in_shard = min(first + at, tokens_per_shard - 1);
        const u64 token = u64(shard) * tokens_per_shard + in_shard;
        float p[kPerLane], lanes[Token::kUsed * 4] = {};
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int j = Token::first_of(i / 4) + i % 4;
            p[i] = j < experts ? __ldg(kept + token * experts + j) : is_sigmoid ? __uint_as_float(0xFF800000) : 0.0f;
        }
        if (is_sigmoid) {
            sigmoids(p, __ldg(log_sum_exp + token));
            const float sum = sigmoid_sum<kLanes, kPerLane>(p, tiny);
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) p[i] = __fdiv_rn(p[i], sum);
        }
        const u64 row = RouteDocuments::row(documents.starts, shard, tokens_per_shard, in_shard);
        int slots[kPerLane];
        documents.read<Token>(row, experts, slots);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            float& sum = lanes[i / 4 % Token::kUsed * 4 + i % 4];
            sum = __fmaf_rn(float(slots[i]), p[i], sum);
        }
        const float part = __fdiv_rn(Token::close(lanes), float(__ldg(documents.lengths + row)));
        if (threadIdx.x % kLanes == 0) parts[at] = is_token ? part : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float sum = 0.0f;
    for (int at = threadIdx.x % kTokenLanes; at < kRouteChunk; at += kTokenLanes) sum = __fadd_rn(sum, parts[at]);
    sum = close_token_lanes(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/// Returns the sum over the chunks of a shard, in every thread of a warp.
__device__ __forceinline__ double sum_chunks(const float* sums, int chunks) {
    double sum = 0.0;
    for (int chunk = threadIdx.x % kTokenLanes; chunk < chunks; chunk += kTokenLanes) sum = __dadd_rn(sum, double(__ldg(sums + chunk)));
    return close_token_lanes(sum);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    route_losses(const float* __restrict__ prob_sums, const float* __restrict__ square_sums, const int* __restrict__ counts,
                 const float* __restrict__ document_sums, double* products, int* __restrict__ load, float* __restrict__ losses, int experts,
                 int top_k, int tokens_per_shard, int chunks) {
    constexpr int kColumns = kThreads / kTokenLanes;
    __shared__ double sums[kTokenLanes][kColumns];
    __shared__ int slots[kColumns];
    const u32 block = ptx::cluster_cta_rank();
    const int column = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
    const int clusters = ceil_div(experts, kColumns), shard = blockIdx.x / clusters;
    const int j = block * kColumns + column;
    if (lane == 0) slots[column] = 0;
    __syncthreads();
    ptx::grid_wait();
    double sum = 0.0;
    int chosen = 0;
    if (j < experts) {
        const u64 from = u64(shard) * chunks * experts + j;
#pragma unroll 8
        for (int chunk = lane; chunk < chunks; chunk += kTokenLanes) {
            sum = __dadd_rn(sum, double(__ldg(prob_sums + from + u64(chunk) * experts)));
            chosen += __ldg(counts + from + u64(chunk) * experts);
        }
    }
    sums[lane][column] = sum;
    if (chosen != 0) atomicAdd(&slots[column], chosen);
    __syncthreads();
    if (lane == 0 && j < experts) {
        double lanes[kTokenLanes];
#pragma unroll
        for (int i = 0; i < kTokenLanes; ++i) lanes[i] = sums[i][column];
        tree_sum<kTokenLanes / 2>(lanes);
        load[u64(shard) * experts + j] = slots[column];
        products[u64(shard) * experts + j] = __dmul_rn(double(slots[column]), lanes[0]);
    }
    // A shard without tokens gets a loss of 0, not 0 / 0.
    const bool is_first = block == 0, is_squares = threadIdx.x / 32 == 1, is_documents = threadIdx.x / 32 == 2 && document_sums != nullptr;
    if (is_first && is_squares) {
        const double squares = sum_chunks(square_sums + u64(shard) * chunks, chunks);
        const double per_token = tokens_per_shard == 0 ? 1.0 : double(tokens_per_shard);
        if (threadIdx.x % 32 == 0) losses[2 * shard + 1] = __double2float_rn(__ddiv_rn(squares, per_token));
    }
    if (is_first && is_documents) {
        const double balance = sum_chunks(document_sums + u64(shard) * chunks, chunks);
        const double per_slot = tokens_per_shard == 0 ? 1.0 : double(u64(tokens_per_shard) * top_k);
        if (threadIdx.x % 32 == 0) losses[2 * shard] = __double2float_rn(__ddiv_rn(__dmul_rn(double(experts), balance), per_slot));
    }
    ptx::cluster_sync();  // makes the products visible to the first CTA
    if (!is_first || threadIdx.x >= 32 || document_sums != nullptr) return;
    // Each of sixteen threads has four partial sums.
    double quad[4] = {};
#pragma unroll 1
    for (int base = 4 * (threadIdx.x % kSumQuads); base < experts; base += 4 * kSumQuads)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (base + c < experts) quad[c] = __dadd_rn(quad[c], products[u64(shard) * experts + base + c]);
    double balance = __dadd_rn(__dadd_rn(quad[0], quad[1]), __dadd_rn(quad[2], quad[3]));
    balance = close_token_lanes(balance);
    const double per_slot = tokens_per_shard == 0 ? 1.0 : double(u64(tokens_per_shard) * top_k * tokens_per_shard);
    if (threadIdx.x == 0) losses[2 * shard] = __double2float_rn(__ddiv_rn(__dmul_rn(double(experts), balance), per_slot));
}

/// Values that the slots of a token share. With w = f * p /
/// sum of p, dp = (f * dw - sum of dw * w) / sum of p.
struct SlotSums {
    float inner;
    float divisor;
};

/// Computes these values from a token's slots and its row of scores, all in shared memory.
template <int kLanes>
__device__ __forceinline__ SlotSums sum_slots(const float* row, const u32* expert, const float* weight, const float* dweight, int experts,
                                              int top_k) {
    constexpr int kTurn = kLanes < 8 ? kLanes : 8;
    const int lane = threadIdx.x % kLanes;
    SlotSums sums = {0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < top_k; first += kTurn) {
        const bool is_slot = lane < kTurn && first + lane < top_k;
        const u32 e = is_slot ? expert[first + lane] : kWarp;
        const float product = is_slot ? __fmul_rn(dweight[first + lane], weight[first + lane]) : 0.0f;
        const float prob = e < u32(experts) ? row[e] : 0.0f;
        // For indices past the last slot, zeros are added.
#pragma unroll
        for (int i = 0; i < kTurn; ++i) {
            sums.inner = __fadd_rn(sums.inner, __shfl_sync(kWarp, product, i, kLanes));
            sums.divisor = __fadd_rn(sums.divisor, __shfl_sync(kWarp, prob, i, kLanes));
        }
    }
    return sums;
}

/// Computes the gradients of a row of logits, from the gradients d of the
/// chosen probabilities and the gradients `all` of the load-balancing loss.
template <int kLanes, int kPerLane>
__device__ __forceinline__ void through_softmax(float (&d)[kPerLane], const float (&p)[kPerLane], const float (&all)[kPerLane], float shift) {
    using Token = TokenLanes<kLanes, kPerLane>;
    float lanes[Token::kUsed * 4] = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        d[i] = __fadd_rn(d[i], all[i]);
        float& sum = lanes[i / 4 % Token::kUsed * 4 + i % 4];
        sum = __fmaf_rn(d[i], p[i], sum);
    }
    const float dot = Token::close(lanes);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) d[i] = __fmul_rn(p[i], __fadd_rn(__fsub_rn(d[i], dot), shift));
}

/// Computes the gradients of a row of logits through sigmoids. The loss uses the quotient
/// of each sigmoid and the sum of sigmoids. Logits past the last expert are -infinity.
template <int kLanes, int kPerLane>
__device__ __forceinline__ void through_sigmoids(float (&d)[kPerLane], const float (&logits)[kPerLane], const float (&all)[kPerLane],
                                                 float log_sum, float z, float shift, float tiny) {
    using Token = TokenLanes<kLanes, kPerLane>;
    float s[kPerLane], lanes[Token::kUsed * 4] = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) s[i] = logits[i];
    sigmoids(s, log_sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        float& sum = lanes[i / 4 % Token::kUsed * 4 + i % 4];
        sum = __fmaf_rn(all[i], s[i], sum);
    }
    const float sum = sigmoid_sum<kLanes, kPerLane>(s, tiny);
    const float mean = __fdiv_rn(Token::close(lanes), sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        // 1 - sigmoid(x) = sigmoid(-x). s is NaN if the whole row counts as NaN.
        const float slope = __fmul_rn(s[i], sigmoid(-logits[i]));
        d[i] = __fmul_rn(__fadd_rn(d[i], __fdiv_rn(__fsub_rn(all[i], mean), sum)), slope);
        if (z != 0.0f) d[i] = __fadd_rn(d[i], __fmul_rn(shift, exp_of_negative(__fsub_rn(logits[i], log_sum))));
    }
}

/// The loads are counts per shard, sums over all shards
/// (with a stride of 0), or counts per document.
template <int kLanes, int kPerLane, class Load, bool kSigmoid>
__global__ void __launch_bounds__(TokenLanes<kLanes, kPerLane>::kThreads, kRouteCtas<kPerLane, kSigmoid>)
    route_backward(const float* __restrict__ kept, const int* __restrict__ expert, const float* __restrict__ weight,
                   const float* __restrict__ log_sum_exp, const Load* __restrict__ load, const float* __restrict__ dweight,
                   float* __restrict__ dlogits, int experts, int load_stride, int top_k, int normalize, int tokens_per_shard, int chunks,
                   double balance, float z, float tiny, float scale, RouteDocuments documents) {
    using Token = TokenLanes<kLanes, kPerLane>;
    constexpr bool kOfDocuments = sizeof(Load) == sizeof(RouteDocuments);
    constexpr int kThreads = Token::kThreads, kGroups = Token::kGroups, kStride = Token::kExperts;
    extern __shared__ float4 shared[];
    float* const rows = reinterpret_cast<float*>(shared);  // [64][kStride]: the rows of `kept`, then the chosen experts' gradients
    float* const balances = rows + kRouteChunk * kStride;  // [kStride]: the load-balancing loss's contribution
    float* const weights = balances + kStride;             // [64][top_k]; the next two arrays have the same size
    float* const dweights = weights + kRouteChunk * top_k;
    u32* const chosen = reinterpret_cast<u32*>(dweights + kRouteChunk * top_k);
    const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int shard = blockIdx.x / chunks, first = (blockIdx.x - shard * chunks) * kRouteChunk;
    const int tokens = min(kRouteChunk, tokens_per_shard - first);
    const u64 first_token = u64(shard) * tokens_per_shard + first;
    const float nothing = kSigmoid ? __uint_as_float(0xFF800000) : 0.0f;
#pragma unroll 1
    for (int at = group; at < tokens; at += kGroups)
        fetch_row<Token>(rows + at * kStride, kept + (first_token + at) * experts, experts, nothing);
    for (int slot = threadIdx.x; slot < tokens * top_k; slot += kThreads) {
        const u64 from = first_token * top_k + slot;
        ptx::copy_4_async(chosen + slot, expert + from, true);
        ptx::copy_4_async(weights + slot, weight + from, true);
        ptx::copy_4_async(dweights + slot, dweight + from, true);
    }
    if constexpr (!kOfDocuments) {
#pragma unroll 1
        for (int j = threadIdx.x; j < kStride; j += kThreads) {
            const Load slots = j < experts ? __ldg(load + u64(shard) * load_stride + j) : 0;
            balances[j] = __double2float_rn(__dmul_rn(balance, double(slots)));
        }
    }
    ptx::copies_wait();
    __syncthreads();
#pragma unroll 1
    for (int at = group; at - group < tokens; at += kGroups) {
        // If the tokens end within a warp, the remaining lanes repeat the work of the last token on rows of their own.
        const bool is_token = at < tokens;
        const u64 token = first_token + min(at, tokens - 1);
        const int slots = min(at, tokens - 1) * top_k;
        float* const row = rows + at * kStride;
        float p[kPerLane], d[kPerLane];
        read_row<Token>(row, p);
        const float log_sum = kSigmoid || z != 0.0f ? __ldg(log_sum_exp + token) : 0.0f;
        const float shift = z == 0.0f ? 0.0f : __fmul_rn(z, log_sum);
        if constexpr (kSigmoid) {
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) d[i] = p[i];
            sigmoids(d, log_sum);
            write_row<Token>(row, d);
            __syncwarp();
        }
        SlotSums sums = {0.0f, 1.0f};
        if (normalize) {
            sums = sum_slots<kLanes>(row, chosen + slots, weights + slots, dweights + slots, experts, top_k);
            if constexpr (kSigmoid) sums.divisor = __fadd_rn(sums.divisor, tiny);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) d[i] = 0.0f;
        write_row<Token>(row, d);
        __syncwarp();
#pragma unroll 1
        for (int slot = lane; slot < top_k; slot += kLanes) {
            const u32 e = chosen[slots + slot];
            if (e < u32(experts)) row[e] = __fdiv_rn(__fsub_rn(__fmul_rn(scale, dweights[slots + slot]), sums.inner), sums.divisor);
        }
        __syncwarp();
        read_row<Token>(row, d);
        float all[kPerLane];
        if constexpr (kOfDocuments) {
            const u64 document = RouteDocuments::row(documents.starts, shard, tokens_per_shard, first + min(at, tokens - 1));
            const double each = __ddiv_rn(balance, double(__ldg(documents.lengths + document)));
            int slots_of[kPerLane];
            documents.read<Token>(document, experts, slots_of);
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) all[i] = __double2float_rn(__dmul_rn(each, double(slots_of[i])));
        } else {
            read_row<Token>(balances, all);
        }
        if constexpr (kSigmoid)
            through_sigmoids<kLanes, kPerLane>(d, p, all, log_sum, z, shift, tiny);
        else
            through_softmax<kLanes, kPerLane>(d, p, all, shift);
        __syncwarp();
        write_row<Token>(row, d);
        send_row<kLanes>(dlogits + token * experts, row, experts, is_token);
    }
    ptx::tma_store_wait_read<0>();  // TMA must have read the rows before the CTA exits and frees its shared memory
}

}  // namespace nib
