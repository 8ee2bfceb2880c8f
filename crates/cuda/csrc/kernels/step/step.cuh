// Kernels that start a step and its micro-batches, collect counters, and end the step. crates/core/src/ops/step/mod.rs describes every
// value.
//
// begin_step: copies the slot's first words to control[0 .. 4], and the following words to table[told .. told + 3]; sets the
//   clock's micro-batches and the rest of `table` to zeros. 256 threads per CTA; the grid has max(1, ceil(cells / 256)) CTAs.
// begin_micro_batch: copies ids, targets and, if `apart` is 1, starts of the slot's next micro-batch, and writes the ids of the rows;
//   then increments the clock. 1024 threads per CTA, one cluster of 8 CTAs, so that the clock changes only after all CTAs have read it.
// push_amax: CTA s appends table[s], the largest magnitude of span s, to the span's history. 128 threads per CTA; the grid has `spans` CTAs.
// balance_bias: moves each of `experts` biases against the load of its expert, which is summed
//   over `ranks` tables of `cells` cells; `tables` points to the first load. 256 threads, one CTA.
// collect: CTA e adds entry e of the launch to the table. No two entries of a launch share a cell. 128 threads per CTA; the grid has `entries` CTAs.
// end_step: computes the gradient norm, the decision whether the step takes effect, and the
// report. `sums` is scratch memory for ceil(ordered / 4096) numbers. 1024 threads, one CTA.
#pragma once
#include "math/chunk_sum.cuh"
#include "pieces/step/control.cuh"
#include "ptx/thread.cuh"
#include "ptx/types.cuh"

namespace nib {

// Indices into `Clock`.
enum { kStep = 0, kMicro = 1 };
// The index, among a slot's scalars, of the first word that
// the host passes to the table, and the number of such words.
enum { kTold = kFromHost, kToldWords = 3 };

constexpr int kBeginThreads = 256;

__global__ void __launch_bounds__(kBeginThreads)
    begin_step(const int* __restrict__ inputs, u32* clock, float* __restrict__ control, double* __restrict__ table, u64 slot, u64 cells,
               u64 told) {
    const u64 i = u64(blockIdx.x) * kBeginThreads + threadIdx.x;
    const int* const from = inputs + clock[kStep] % 2 * slot;
    // If i is below `told`, the unsigned difference wraps around to a large number.
    if (i < cells) table[i] = i - told < kToldWords ? double(from[kTold + (i - told)]) : 0.0;
    if (i < kFromHost) control[i] = __int_as_float(from[i]);
    if (i == 0) clock[kMicro] = 0;
}

constexpr int kMicroThreads = 1024;
constexpr int kMicroCtas = 8;

struct MicroBatch {
    u64 slot;     // number of words per slot
    u64 scalars;  // number of words in a slot before its first id
    u32 tokens;
    u32 micro_batches;
    u32 rank;
    u32 ranks;
    u32 apart;
};

__global__ void __launch_bounds__(kMicroThreads)
    begin_micro_batch(const int* __restrict__ inputs, u32* clock, int* __restrict__ ids, int* __restrict__ targets, int* __restrict__ starts,
                      int* __restrict__ row_id, const __grid_constant__ MicroBatch batch) {
    const u32 begun = clock[kMicro], micro = min(begun, batch.micro_batches - 1);
    const int* const from = inputs + clock[kStep] % 2 * batch.slot + batch.scalars + u64(2 + batch.apart) * batch.tokens * micro;
    const u32 first = (micro * batch.ranks + batch.rank) * batch.tokens;
#pragma unroll 4
    for (u32 i = blockIdx.x * kMicroThreads + threadIdx.x; i < batch.tokens; i += kMicroCtas * kMicroThreads) {
        ids[i] = __ldg(from + i);
        targets[i] = __ldg(from + batch.tokens + i);
        if (batch.apart) starts[i] = __ldg(from + u64(2) * batch.tokens + i);
        row_id[i] = int(first + i);
    }
    ptx::cluster_sync();
    if (blockIdx.x == 0 && threadIdx.x == 0) clock[kMicro] = begun + 1;
}

constexpr int kCollectThreads = 128;
constexpr int kCollectEntries = 100;  // 100 entries make 4 kB of kernel parameters

enum Collected { kU64, kI32, kF32, kF64, kOccupancy, kLargest };

/// Values, and the cells to which they are added: value i is added to cell at + i % cells * stride.
struct CollectEntry {
    const void* source;
    int kind;  // a value of Collected
    u32 values;
    u32 at;
    u32 cells;
    u32 stride;
    u32 capacity;  // for an occupancy: the number of rows that exist,
    u32 slots;     // the number of slots that the plan was given,
    u32 found;     // and how many numbers `source` holds
};

struct CollectEntries {
    CollectEntry entry[kCollectEntries];
};

/// Returns value i of an entry.
__device__ __forceinline__ double value_of(const CollectEntry& entry, u32 i) {
    switch (entry.kind) {
        case kU64: return __ull2double_rn(static_cast<const u64*>(entry.source)[i]);
        case kI32: return double(static_cast<const int*>(entry.source)[i]);
        case kF32:
        case kLargest: return double(static_cast<const float*>(entry.source)[i]);
        case kF64: return static_cast<const double*>(entry.source)[i];
    }
    const int* const found = static_cast<const int*>(entry.source);
    const long long needed = entry.found > 0 ? found[0] : 0, occupied = entry.found > 1 ? found[1] : 0;
    if (i == 2) {
        const long long differ = occupied - (long long)entry.slots;
        return double(differ < 0 ? -differ : differ);
    }
    if (needed <= (long long)entry.capacity) return 0.0;
    return i == 0 ? double(needed) : double(entry.capacity);
}

__global__ void __launch_bounds__(kCollectThreads) collect(double* table, const __grid_constant__ CollectEntries entries) {
    const CollectEntry& entry = entries.entry[blockIdx.x];
#pragma unroll 1
    for (u32 cell = threadIdx.x; cell < entry.cells; cell += kCollectThreads) {
        double* const to = table + entry.at + u64(cell) * entry.stride;
        double sum = *to;
        if (entry.kind == kLargest) {
            // The comparison is also true for a NaN, so a NaN stays in the maximum.
            for (u32 i = cell; i < entry.values; i += entry.cells) {
                const double value = value_of(entry, i);
                if (!(value <= sum) && sum == sum) sum = value;
            }
            *to = sum;
            continue;
        }
#pragma unroll 4
        for (u32 i = cell; i < entry.values; i += entry.cells) sum = __dadd_rn(sum, value_of(entry, i));
        *to = sum;
    }
}

constexpr int kEndThreads = 1024;
constexpr int kReportHead = 4;

struct StepEnd {
    u64 squares;  // length of the array `squares`
    u64 ordered;
    u64 cells;  // cells per rank's table
    u64 ranks;
    u64 alarms, alarms_end;  // alarm cells of a table
    u64 finite, finite_end;
    double clip_norm;
};

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7F800000); }
__device__ __forceinline__ bool is_finite(double x) { return fabs(x) < __longlong_as_double(0x7FF0000000000000); }

__global__ void __launch_bounds__(kEndThreads)
    end_step(const float* __restrict__ squares, const int* __restrict__ order, const double* __restrict__ tables, double* sums, u32* clock,
             float* control, double* __restrict__ reports, const __grid_constant__ StepEnd end) {
    const u32 step = clock[kStep];
    // An index outside `squares` reads as NaN, which stops the run.
    const double square = sum_in_chunks<kEndThreads>(end.ordered, sums, [&](u64 i) {
        const int at = __ldg(order + i);
        return at >= 0 && u64(at) < end.squares ? __ldg(squares + at) : __uint_as_float(0x7FC00000);
    });
    const double norm = __dsqrt_rn(square);
    bool fails = !is_finite(norm);
#pragma unroll 4
    for (u64 i = threadIdx.x; i < end.squares; i += kEndThreads) fails |= !is_finite(__ldg(squares + i));
    for (u64 rank = 0; rank < end.ranks; ++rank) {
        const double* const table = tables + rank * end.cells;
        for (u64 i = end.alarms + threadIdx.x; i < end.alarms_end; i += kEndThreads) fails |= __ldg(table + i) != 0.0;
        for (u64 i = end.finite + threadIdx.x; i < end.finite_end; i += kEndThreads) fails |= !is_finite(__ldg(table + i));
    }
    const u64 cells = end.ranks * end.cells;
    double* const report = reports + step % 2 * (kReportHead + cells);
#pragma unroll 4
    for (u64 i = threadIdx.x; i < cells; i += kEndThreads) report[kReportHead + i] = __ldg(tables + i);
    fails = __syncthreads_or(fails);
    if (threadIdx.x != 0) return;
    const bool clips = end.clip_norm > 0.0 && norm > end.clip_norm;
    const float scale = clips ? __double2float_rn(__ddiv_rn(end.clip_norm, norm)) : 1.0f;
    const float stop = fails ? 1.0f : control[kStop];
    control[kGradScale] = scale;
    control[kStop] = stop;
    report[0] = double(step);
    report[1] = double(stop);
    report[2] = norm;
    report[3] = double(scale);
    clock[kStep] = step + 1;
}

constexpr int kPushThreads = 128;

/// The history record of a span, in F32: the expected
/// magnitude, the position of the next write, and the history.
enum { kExpected = 0, kNext = 1, kHistory = 2 };

/// The greatest length of a history, and the largest margin.
enum : u32 { kLongest = 1u << 16, kWidest = 16 };

/// The start of a span's record, the length of its history, a flag
/// that only the most recent magnitude counts, and the margin.
struct SpanWords {
    u32 first;
    u32 history;
    u32 recent;
    u32 margin;
};

__global__ void __launch_bounds__(kPushThreads)
    push_amax(const double* __restrict__ table, const SpanWords* __restrict__ spans, const float* __restrict__ control, float* records, u64 len) {
    __shared__ u32 of_warps[kPushThreads / 32];
    if (control[kStop] != 0.0f) return;
    const SpanWords span = spans[blockIdx.x];
    const float amax = __double2float_rn(table[blockIdx.x]);
    const bool in_range = span.history > 0 && span.history <= kLongest && span.margin <= kWidest;
    const bool there = in_range && u64(span.first) + kHistory + span.history <= len;
    if (!there || !(amax > 0.0f) || !is_finite(amax)) return;
    float* const record = records + span.first;
    const u32 next = __float2uint_rz(record[kNext]) % span.history;
    // Magnitudes and their bits, as integers, have the same order.
    u32 largest = __float_as_uint(amax);
    if (span.recent == 0) {
        for (u32 i = threadIdx.x; i < span.history; i += kPushThreads) {
            if (i != next) largest = max(largest, __float_as_uint(record[kHistory + i]));
        }
    }
    largest = __reduce_max_sync(0xFFFFFFFF, largest);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int warp = 1; warp < kPushThreads / 32; ++warp) largest = max(largest, of_warps[warp]);
    const float expected = __fmul_rn(__uint_as_float(largest), float(1u << span.margin));
    record[kHistory + next] = amax;
    record[kExpected] = fminf(expected, 0x1.fffffep127f);
    record[kNext] = float((next + 1) % span.history);
}

constexpr int kBalanceThreads = 256;

/// Loads are integers, so their sums are exact in any order.
__device__ __forceinline__ double load_of_ranks(const double* __restrict__ tables, u64 cells, int ranks, int expert) {
    double load = 0.0;
    for (int rank = 0; rank < ranks; ++rank) load = __dadd_rn(load, tables[rank * cells + expert]);
    return load;
}

__global__ void __launch_bounds__(kBalanceThreads)
    balance_bias(const double* __restrict__ tables, const float* __restrict__ control, float* __restrict__ bias, u64 cells, int ranks,
                 int experts, float rate) {
    __shared__ double sums[kBalanceThreads];
    if (control[kStop] != 0.0f) return;
    double sum = 0.0;
    for (int e = threadIdx.x; e < experts; e += kBalanceThreads) sum = __dadd_rn(sum, load_of_ranks(tables, cells, ranks, e));
    sums[threadIdx.x] = sum;
    __syncthreads();
#pragma unroll 1
    for (int half = kBalanceThreads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[threadIdx.x + half]);
        __syncthreads();
    }
    for (int e = threadIdx.x; e < experts; e += kBalanceThreads) {
        const double load = __dmul_rn(load_of_ranks(tables, cells, ranks, e), double(experts));
        if (load < sums[0])
            bias[e] = __fadd_rn(bias[e], rate);
        else if (load > sums[0])
            bias[e] = __fsub_rn(bias[e], rate);
    }
}

}  // namespace nib
