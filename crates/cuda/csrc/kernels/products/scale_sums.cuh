// Multiplies F32 sums of products by the operands' tensor scales, and writes D in BF16 or F32.
//
// scale_sums<Out>: sums and d are [rows][cols]. d = sums · (a_scale · b_scale), or d + sums · (a_scale · b_scale), rounded once.
//   With contraction = 0: a_scale[row]; b_scale[column], or with groups b_scale[group * cols + column]. Rows outside all groups become zeros.
//   With contraction = 1: d is a stack of `groups` matrices. The scales of a matrix are entries of its group's first row; scales have `capacity` entries.
//   a_scale, b_scale: null if the operand has no tensor scale. start, len: the groups of rows (null: all rows are one group). 256
//   threads per CTA; the grid has ceil(rows * segments / 8) CTAs; segments = ceil(cols / 512), and `by_segments` divides by it.
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"

namespace nib {

/// The launch code builds this struct as `ScaledSums`.
struct ScaledSums {
    const float* sums;
    u8* d;
    const float* a_scale;
    const float* b_scale;
    const int* start;
    const int* len;
    int rows, cols, groups, capacity;
    int contraction, accumulate;
};

constexpr int kSegment = 512;  // number of columns per warp

/// Returns the scale of a row, or 1 if the operand has no tensor scale.
__device__ __forceinline__ float scale_of(const float* scales, u64 row) { return scales == nullptr ? 1.0f : __ldg(scales + row); }

/// The scales of a row of D: a common factor for all its sums, and the
/// scale of each column of B, if columns have scales of their own.
struct RowScale {
    float of_row;
    const float* of_cols;  // null: each scale is 1
    bool counted;

    __device__ __forceinline__ static RowScale of(const ScaledSums& arg, int row) {
        if (arg.contraction) {
            const int group = row / (arg.rows / arg.groups);
            const int first = arg.start == nullptr ? 0 : min(max(__ldg(arg.start + group), 0), arg.capacity - 1);
            // An empty group has no row, and therefore no scale.
            const bool counted = arg.len == nullptr || __ldg(arg.len + group) > 0;
            return {__fmul_rn(scale_of(arg.a_scale, first), scale_of(arg.b_scale, first)), nullptr, counted};
        }
        int low = 0;
        bool counted = true;
        if (arg.start != nullptr) {
            for (int high = arg.groups - 1; low < high;) {  // bisection for the last group whose start is not above the row
                const int middle = (low + high + 1) / 2;
                if (__ldg(arg.start + middle) <= row) low = middle;
                else high = middle - 1;
            }
            const int first = __ldg(arg.start + low);
            counted = row >= first && row < first + __ldg(arg.len + low);
        }
        return {counted ? scale_of(arg.a_scale, row) : 0.0f, arg.b_scale == nullptr ? nullptr : arg.b_scale + u64(low) * arg.cols, counted};
    }
};

/// Scales kCount adjacent values of a row.
template <class Out, int kCount>
__device__ __forceinline__ void scale_few(const ScaledSums& arg, const RowScale& scale, u64 i, int col) {
    float value[kCount] = {};
    if (scale.counted) {
        const auto sums = Few<F32, kCount>::load(arg.sums + i);
        Few<F32, kCount> of_cols;
        if (scale.of_cols != nullptr) of_cols = Few<F32, kCount>::load(scale.of_cols + col);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const float by = scale.of_cols != nullptr ? __fmul_rn(scale.of_row, of_cols.value(j)) : scale.of_row;
            value[j] = __fmul_rn(sums.value(j), by);
        }
    }
    u8* const to = arg.d + i * Out::kBytes;
    if (arg.accumulate) {
        const auto before = Few<Out, kCount>::load_written(to);
#pragma unroll
        for (int j = 0; j < kCount; ++j) value[j] = __fadd_rn(before.value(j), value[j]);
    }
    Few<Out, kCount>::from_f32(value).store(to);
}

template <class Out>
__global__ void __launch_bounds__(256) scale_sums(const ScaledSums arg, Divider by_segments, u32 segments) {
    const u32 task = blockIdx.x * 8 + threadIdx.x / 32;
    const int row = by_segments.divide(task), segment = task - row * segments;
    if (row >= arg.rows) return;
    const RowScale scale = RowScale::of(arg, row);
    const u64 first = u64(row) * arg.cols;
    if (arg.cols % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kSegment; i += 128) {
            const int col = segment * kSegment + i + threadIdx.x % 32 * 4;
            if (col < arg.cols) scale_few<Out, 4>(arg, scale, first + col, col);
        }
    } else {
        for (int col = segment * kSegment + threadIdx.x % 32; col < min(arg.cols, (segment + 1) * kSegment); col += 32)
            scale_few<Out, 1>(arg, scale, first + col, col);
    }
}

}  // namespace nib
