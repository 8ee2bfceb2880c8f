// Looks up embedding rows by id, and computes the gradient of the embedding.
//
// embed<T, kCount>: x[i] = table[ids[i]], rounded to T (Bf16 or F32); table is F32 [vocab, d]. An id out of range gives zeros and is counted.
//   units = ceil(d / kCount), at least 1; kCount is 4 if d is a multiple of 4, else 1.
//   256 threads per CTA; the grid has ceil(rows * units / 1024) CTAs; rows * units is below 2^31.
//
// kThreads is always kEmbedThreads. kThreads is a template parameter only so that these kernels are compiled where they are launched.
// The backward pass sorts the tokens by key = shard * vocab + id with a stable radix sort, one digit per pass: embed_digits
// extracts the digits, and `plan_permute` sorts. A run of tokens with the same key is divided into chunks of 64 tokens.
// embed_digits<kThreads>: digit[i] = key(order[i]) >> shift & mask. If `order` is
// null, tokens are in their original order, which the kernel writes to order_out.
//   256 threads per CTA; the grid has ceil(tokens / 256) CTAs.
// embed_chunks<kThreads>: lists the chunks of the sorted tokens, and the runs that have several chunks, in any order. counts[0] counts the chunks and
//   counts[1] the runs; both are initially zeros. 256 threads per CTA; the grid has ceil(tokens / 256) CTAs. `chunks` is [tokens], `runs` [tokens / 64].
// embed_sums<T, kCount>: sums each chunk's rows of dy [tokens, d] in order. If the run has no other chunk, it adds the sum to
//   the row of grad, F32 [shards * vocab, d]; otherwise it stores the sum as a row of partial, F32 [ceil(tokens / 32), d].
//   256 threads per CTA; any grid size gives correct results; blocks = ceil(d / (256 * kCount)).
// embed_close<kCount>: adds the sums of each run's chunks by a binary tree over neighbours, and adds the result to grad.
//   256 threads per CTA; any grid size gives correct results; blocks = ceil(d / (32 * kCount)).
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"
#include "pieces/plain/row_sums.cuh"

namespace nib {

constexpr int kEmbedThreads = 256;
constexpr int kEmbedUnits = 4;  // number of units per thread, whose loads are all in flight
constexpr u32 kEmbedChunk = 64;
constexpr int kEmbedRows = 8;  // number of rows of dy whose loads are in flight

template <typename T, int kCount>
__global__ void __launch_bounds__(kEmbedThreads)
    embed(const float* __restrict__ table, const int* __restrict__ ids, u8* __restrict__ x, u64* __restrict__ bad_ids, u32 tasks, u32 units,
          Divider by_units, u32 vocab, u32 d) {
    using Row = Few<F32, kCount>;
    Row from[kEmbedUnits];
    const u32 first = blockIdx.x * (kEmbedThreads * kEmbedUnits) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kEmbedUnits; ++i) {
        const u32 task = first + i * kEmbedThreads;
        from[i] = {};
        if (task >= tasks) continue;
        const u32 row = by_units.divide(task), unit = task - row * units, id = u32(__ldg(ids + row));
        if (id >= vocab) {
            if (unit == 0) atomicAdd(bad_ids, u64(1));
        } else if (unit * kCount < d) {
            from[i] = Row::load(table + u64(id) * d + unit * kCount);
        }
    }
#pragma unroll
    for (int i = 0; i < kEmbedUnits; ++i) {
        const u32 task = first + i * kEmbedThreads;
        if (task >= tasks) continue;
        const u32 row = by_units.divide(task), unit = task - row * units;
        if (unit * kCount >= d) continue;
        float value[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) value[k] = from[i].value(k);
        Few<T, kCount>::from_f32(value).store(x + (u64(row) * d + unit * kCount) * T::kBytes);
    }
}

/// Computes the sort keys of the tokens.
struct EmbedKeys {
    u32 tokens;
    u32 vocab;
    u32 none;  // key above all others, for ids outside the embedding
    Divider by_shard;

    __device__ __forceinline__ u32 of(const int* __restrict__ ids, u32 token) const {
        const u32 id = u32(__ldg(ids + token));
        return id < vocab ? by_shard.divide(token) * vocab + id : none;
    }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    embed_digits(const int* __restrict__ ids, const int* __restrict__ order, int* __restrict__ digit, int* __restrict__ order_out, EmbedKeys keys,
                 u32 shift, u32 mask) {
    static_assert(kThreads == kEmbedThreads);
    const u32 i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= keys.tokens) return;
    const u32 token = order == nullptr ? i : u32(__ldg(order + i));
    digit[i] = int(keys.of(ids, token) >> shift & mask);
    if (order == nullptr) order_out[i] = int(i);
}

/// The tokens in sorted order.
struct EmbedSorted {
    const int* ids;
    const int* order;
    EmbedKeys keys;

    __device__ __forceinline__ u32 key(u32 i) const { return keys.of(ids, u32(__ldg(order + i))); }

    /// Returns the first position from `low` to `high` whose key is at least `key`, or `high` if there is none.
    __device__ __forceinline__ u32 find(u32 key, u32 low, u32 high) const {
#pragma unroll 1
        while (low < high) {
            const u32 middle = low + (high - low) / 2;
            if (this->key(middle) < key)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
};

/// A chunk: up to 64 tokens of one key, from position `first` of the sorted order on.
struct alignas(16) EmbedTask {
    u32 key;
    u32 first;
    u32 len;
    int place;  // row of `partial`, or -1 if the run has no other chunk
};

/// Appends values to a list, from those threads of a warp
/// that have a value. The warp uses one atomic.
template <typename V>
__device__ __forceinline__ void append(bool has, const V& value, V* list, u64* count) {
    const u32 all = __ballot_sync(0xFFFFFFFF, has), lane = threadIdx.x % 32;
    if (all == 0) return;
    u64 first = lane == 0 ? atomicAdd(count, u64(__popc(all))) : 0;
    first = __shfl_sync(0xFFFFFFFF, first, 0);
    if (has) list[first + __popc(all & ((1u << lane) - 1))] = value;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    embed_chunks(const int* __restrict__ ids, const int* __restrict__ order, EmbedTask* __restrict__ chunks, EmbedTask* __restrict__ runs,
                 u64* __restrict__ counts, EmbedKeys keys) {
    static_assert(kThreads == kEmbedThreads);
    const EmbedSorted sorted = {ids, order, keys};
    const u32 i = blockIdx.x * kThreads + threadIdx.x, tokens = keys.tokens;
    const u32 key = i < tokens ? sorted.key(i) : keys.none;
    EmbedTask chunk = {}, run = {};
    bool is_chunk = false, is_run = false;
    if (key != keys.none) {
        const u32 start = i == 0 || sorted.key(i - 1) != key ? i : sorted.find(key, 0, i - 1);
        is_chunk = (i - start) % kEmbedChunk == 0;
        if (is_chunk) {
            const u32 limit = tokens - i < kEmbedChunk ? tokens : i + kEmbedChunk;
            const bool more = limit < tokens && sorted.key(limit) == key;
            const u32 end = more ? limit : sorted.find(key + 1, i + 1, limit);
            // A run of several chunks has at least 32 tokens per chunk, so no other run has these rows of `partial`.
            const u32 place = (start + 31) / 32;
            const bool several = more || i > start;
            chunk = {key, i, end - i, several ? int(place + (i - start) / kEmbedChunk) : -1};
            is_run = more && i == start;
            if (is_run) {
                const u32 len = sorted.find(key + 1, limit + 1, tokens) - i;
                run = {key, place, (len + kEmbedChunk - 1) / kEmbedChunk, -1};
            }
        }
    }
    append(is_chunk, chunk, chunks, counts);
    append(is_run, run, runs, counts + 1);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kEmbedThreads)
    embed_sums(const u8* __restrict__ dy, const int* __restrict__ order, const EmbedTask* __restrict__ chunks, const u64* __restrict__ counts,
               float* grad, float* __restrict__ partial, u32 d, u32 blocks) {
    using Row = Few<T, kCount>;
    const u32 work = u32(counts[0]) * blocks;
#pragma unroll 1
    for (u32 at = blockIdx.x; at < work; at += gridDim.x) {
        const u32 number = at / blocks, column = ((at - number * blocks) * kEmbedThreads + threadIdx.x) * kCount;
        if (column >= d) continue;
        const uint4 task = ptx::load_16(chunks + number);  // the fields key, first, len, place
        float sum[kCount] = {};
#pragma unroll 1
        for (u32 base = 0; base < task.z; base += kEmbedRows) {
            Row row[kEmbedRows];
#pragma unroll
            for (int r = 0; r < kEmbedRows; ++r)
                if (base + r < task.z) row[r] = Row::load(dy + (u64(u32(__ldg(order + task.y + base + r))) * d + column) * T::kBytes);
#pragma unroll
            for (int r = 0; r < kEmbedRows; ++r)
                if (base + r < task.z)
#pragma unroll
                    for (int k = 0; k < kCount; ++k) sum[k] = __fadd_rn(sum[k], row[r].value(k));
        }
        if (int(task.w) < 0)
            add_to<kCount>(grad + u64(task.x) * d + column, sum);
        else
            Few<F32, kCount>::from_f32(sum).store(partial + u64(task.w) * d + column);
    }
}

template <int kCount>
__global__ void __launch_bounds__(kTreeThreads)
    embed_close(const float* __restrict__ partial, const EmbedTask* __restrict__ runs, const u64* __restrict__ counts, float* grad, u32 d,
                u32 blocks) {
    __shared__ TreeRoom<kCount> room;
    const u32 work = u32(counts[1]) * blocks;
#pragma unroll 1
    for (u32 at = blockIdx.x; at < work; at += gridDim.x) {
        const u32 number = at / blocks, column = ((at - number * blocks) * kTreeQuads + threadIdx.x % kTreeQuads) * kCount;
        const bool present = column < d;
        const uint4 run = ptx::load_16(runs + number);  // the fields key, first row of partial, rows
        float sum[kCount];
        close_rows<kCount>(partial + u64(run.y) * d + column, run.z, d, present, room, sum);
        if (threadIdx.x < kTreeQuads && present) add_to<kCount>(grad + u64(run.x) * d + column, sum);
    }
}

}  // namespace nib
