// BF16 or F32 -> blocks with scales, for every shape, element, rule, rounding and form: what the fast kernels leave to it, chiefly
// widths that are no multiple of 8. An element at a time, so it reaches a fraction of their speed.
//
// quantize_any<In, E>: x [stack * rows][cols]; row_id, counts as in quantize.cuh; `policy` is one of kNearestEven and those after it.
//   every_row: row_id gives numbers for random bits only, those of padding as 0; each row counts. 128 threads; grid
//   stack * ceil(lines / 128) * ceil(cols / 128), lines = capacity where columns are written, else rows; no dynamic shared memory.
//   form kRows:  row_codes [rows][cols], row_scales [rows][ceil(cols / E::kBlock)]; cols is even where two codes share a byte.
//   form kCols:  col_codes [cols][capacity], col_scales [cols][ceil(capacity / E::kBlock)], zeros from `rows` to `capacity`, which
//     is even where two codes share a byte.
//   both (kRows | kCols): either of these.
//   form kTiles: row_codes as in kRows, col_codes [stack][cols][rows], and one scale for 128 x 128 elements: row_scales
//     [stack][ceil(rows / 128)][ceil(cols / 128)], col_scales [stack][ceil(cols / 128)][ceil(rows / 128)]. FP8; capacity = rows.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kFormRows = 1;
constexpr int kFormCols = 2;
constexpr int kFormTiles = 4;

constexpr int kNearestEven = 0;
constexpr int kNearestAway = 1;
constexpr int kStochastic = 2;
constexpr int kDither = 3;

/// The code of the first of eight.
__device__ __forceinline__ u32 first_code(u32 codes) { return codes & 0xF; }
__device__ __forceinline__ u32 first_code(uint2 codes) { return codes.x & 0xFF; }

struct AnyShared {
    u32 row_max[4][128];       // of the 32 columns of each warp
    float row_inverse[4][128];
    u32 row_any[4][128];       // whether a code of those columns is not zero
    u8 turned[128][132];       // codes of each column; a word more than there are, so that columns lie in different banks
    u32 largest[4];
    u32 total[3];
};

/// A block's scale by a rule known at run time.
struct AnyScale {
    u32 bits;  // as stored: F32, or a byte
    float inverse;

    template <class E>
    __device__ __forceinline__ static AnyScale of(u32 amax, bool is_f32, PowerRule rule) {
        if (is_f32) {
            const auto scale = amax_scale<E>(amax);
            return {__float_as_uint(scale.stored), scale.inverse};
        }
        const auto scale = power_scale<E>(amax, rule);
        return {scale.stored, scale.inverse};
    }
    __device__ __forceinline__ bool is_nan() const { return __float_as_uint(inverse) == kNanBits; }
    __device__ __forceinline__ void store(void* scales, bool is_f32, u64 at) const {
        if (is_f32) {
            static_cast<u32*>(scales)[at] = bits;
        } else {
            static_cast<u8*>(scales)[at] = u8(bits);
        }
    }
};

/// A rounding known at run time, for one number.
struct AnyRounding {
    const RoundingArg& arg;
    int policy;
    u32 step;

    /// The code of v * inverse; `element` is the number's index for random bits.
    template <class E>
    __device__ __forceinline__ u32 encode(float v, float inverse, u64 element) const {
        if (__float_as_uint(inverse) == kNanBits) return 0;
        switch (policy) {
            case kNearestEven: return first<E>(NearestEven(arg), v, inverse, element);
            case kNearestAway: return first<E>(NearestAway(arg), v, inverse, element);
            case kStochastic: return first<E>(Stochastic(arg, step), v, inverse, element);
            default: return first<E>(Dither(arg, step), v, inverse, element);
        }
    }

private:
    template <class E, class Round>
    __device__ __forceinline__ static u32 first(const Round& round, float v, float inverse, u64 element) {
        typename F32::Eight eight = F32::zeros();
        eight.number[0] = v;
        return first_code(round.template encode<E, kRuleFloor, F32>(eight, inverse, round.template bits<false>(element)));
    }
};

template <class In, class E>
__global__ void __launch_bounds__(128)
    quantize_any(const u8* __restrict__ x, u8* __restrict__ row_codes, void* row_scales, u8* __restrict__ col_codes, void* col_scales,
                 u64* counts, const int* __restrict__ row_id, int rows, int cols, int capacity, int form, int is_f32, int policy, int every_row,
                 PowerRule rule, const RoundingArg rounding) {
    constexpr int kBlocks = 128 / E::kBlock;  // along one side of the square of this cta
    constexpr u32 kMagnitude = (1 << (E::kCodeBits - 1)) - 1;
    __shared__ AnyShared shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool has_rows = form != kFormCols, has_cols = form != kFormRows, square = form == kFormTiles;
    const int across = ceil_div(cols, 128), down = ceil_div(has_cols ? capacity : rows, 128);
    const int panel = blockIdx.x % across, strip = blockIdx.x / across % down;
    const u64 matrix = blockIdx.x / across / down;
    const int first_row = strip * 128, first_col = panel * 128, col = first_col + threadIdx.x;
    x += matrix * rows * cols * In::kBytes;
    row_codes += matrix * rows * cols;  // stacked matrices have a byte an element
    col_codes += matrix * rows * cols;
    Tally tally;
    const auto value = [&](int i) {
        const int row = first_row + i;
        const bool counted = row < rows && col < cols && (row_id == nullptr || every_row || __ldg(row_id + row) >= 0);
        return counted ? In::number(x + (u64(row) * cols + col) * In::kBytes) : 0.0f;
    };

    u32 col_max[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        col_max[b] = 0;
        for (int i = b * E::kBlock; i < (b + 1) * E::kBlock; ++i) {
            const u32 magnitude = __float_as_uint(value(i)) & 0x7FFFFFFF;
            col_max[b] = magnitude > col_max[b] ? magnitude : col_max[b];
            const u32 of_warp = __reduce_max_sync(kAllLanes, magnitude);
            if (lane == 0) shared.row_max[warp][i] = of_warp;
        }
    }
    __syncthreads();

    // Thread i looks after the scales of row i and of column i.
    float col_inverse[kBlocks];
    const int row = first_row + threadIdx.x;
    u32 amax[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) amax[w] = shared.row_max[w][threadIdx.x];
    const u32 row_amax = max(max(amax[0], amax[1]), max(amax[2], amax[3]));
    if (square) {
        const u32 of_warp = __reduce_max_sync(kAllLanes, row_amax);
        if (lane == 0) shared.largest[warp] = of_warp;
        __syncthreads();
        const u32 largest = max(max(shared.largest[0], shared.largest[1]), max(shared.largest[2], shared.largest[3]));
        const AnyScale scale = AnyScale::of<E>(largest, is_f32, rule);
        if (threadIdx.x == 0) {
            scale.store(row_scales, is_f32, (matrix * down + strip) * across + panel);
            scale.store(col_scales, is_f32, (matrix * across + panel) * down + strip);
            tally.non_finite += scale.is_nan();
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) col_inverse[b] = scale.inverse;
        for (int w = 0; w < 4; ++w) shared.row_inverse[w][threadIdx.x] = scale.inverse;
    } else {
        const int row_blocks = ceil_div(cols, E::kBlock), col_blocks = ceil_div(capacity, E::kBlock);
        if (has_rows) {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const AnyScale scale = AnyScale::of<E>(kBlocks == 1 ? row_amax : amax[b], is_f32, rule);
                for (int w = b * (4 / kBlocks); w < (b + 1) * (4 / kBlocks); ++w) shared.row_inverse[w][threadIdx.x] = scale.inverse;
                const int block = panel * kBlocks + b;
                if (row < rows && block < row_blocks) {
                    scale.store(row_scales, is_f32, u64(row) * row_blocks + block);
                    tally.non_finite += scale.is_nan();
                }
            }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const AnyScale scale = AnyScale::of<E>(col_max[b], is_f32, rule);
            col_inverse[b] = scale.inverse;
            const int block = strip * kBlocks + b;
            if (has_cols && col < cols && block < col_blocks) {
                scale.store(col_scales, is_f32, u64(col) * col_blocks + block);
                if (!has_rows) tally.non_finite += scale.is_nan();
            }
        }
    }
    __syncthreads();

    const AnyRounding round{rounding, policy, rounding.step()};
    constexpr int kPerByte = 8 / E::kCodeBits;
    const u64 row_bytes = u64(cols) / kPerByte, col_bytes = u64(capacity) / kPerByte;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        u32 any = 0, even = 0;
        for (int i = b * E::kBlock; i < (b + 1) * E::kBlock; ++i) {
            const int at = first_row + i;
            const float v = value(i);
            const u64 id = row_id == nullptr || at >= rows ? matrix * rows + at : max(__ldg(row_id + at), 0);
            const u64 element = id * cols + col;
            if (has_rows) {
                const u32 code = round.encode<E>(v, shared.row_inverse[warp][i], element);
                const bool any_here = __any_sync(kAllLanes, (code & kMagnitude) != 0);
                if (lane == 0) shared.row_any[warp][i] = any_here;
                if constexpr (E::kCodeBits == 4) {
                    const u32 odd = __shfl_down_sync(kAllLanes, code, 1);
                    if (at < rows && col < cols && lane % 2 == 0) row_codes[at * row_bytes + col / 2] = u8(code | odd << 4);
                } else {
                    if (at < rows && col < cols) row_codes[at * row_bytes + col] = u8(code);
                }
            }
            if (has_cols) {
                const u32 code = round.encode<E>(v, col_inverse[b], element);
                any |= code & kMagnitude;
                if constexpr (E::kCodeBits == 4) {
                    if (i % 2 == 1) shared.turned[threadIdx.x][i / 2] = u8(even | code << 4);
                    even = code;
                } else {
                    shared.turned[threadIdx.x][i] = u8(code);
                }
            }
        }
        if (!has_rows) tally.non_zero += any != 0;
    }
    __syncthreads();
    if (has_cols) {
        const int bytes = min(capacity - first_row, 128) / kPerByte;
        for (int line = warp; line < min(cols - first_col, 128); line += 4) {
            u8* const to = col_codes + (first_col + line) * col_bytes + first_row / kPerByte;
            for (int i = lane; i < bytes; i += 32) to[i] = shared.turned[line][i];
        }
    }
    if (has_rows) {
        u32 any[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) any[w] = shared.row_any[w][threadIdx.x];
        const u32 of_row = any[0] | any[1] | any[2] | any[3];
        if (square) {
            const bool of_square = __syncthreads_or(of_row);
            tally.non_zero += threadIdx.x == 0 && of_square;
        } else if constexpr (kBlocks == 1) {
            tally.non_zero += of_row;
        } else {
            tally.non_zero += any[0] + any[1] + any[2] + any[3];
        }
    }
    tally.flush(counts, shared.total);
}

}  // namespace nib
