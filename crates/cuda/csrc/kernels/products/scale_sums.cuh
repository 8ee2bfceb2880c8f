// Sums of products under scales of the operands' tensors: D, of BF16 or F32, from F32 sums.
//
// scale_sums<Out>: sums, d [rows][cols]; d = sums · (a_scale · b_scale), or that added to d, one addition, rounded once.
//   contraction 0: a_scale[row] of each row; b_scale[column], or of the matrix of the row's group, [groups * cols]; rows of no group are zeros.
//   contraction 1: d is `groups` matrices; both scales are those of the first row of the matrix's group, of `capacity` rows.
//   a_scale, b_scale: null where an operand has none. start, len (null: all rows are one group): groups of the rows. 256 threads; grid ceil(rows * cols / 1024) or fewer.
#pragma once
#include "formats/plain.cuh"
#include "math/hadamard.cuh"

namespace nib {

/// `ScaledSums` of the launch.
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

/// The scale of a row; 1 where an operand has none.
__device__ __forceinline__ float of(const float* scales, u64 row) { return scales == nullptr ? 1.0f : __ldg(scales + row); }

template <class Out>
__global__ void __launch_bounds__(256) scale_sums(const ScaledSums arg) {
    const u64 count = u64(arg.rows) * arg.cols;
    for (u64 i = u64(blockIdx.x) * 256 + threadIdx.x; i < count; i += u64(gridDim.x) * 256) {
        const int row = int(i / arg.cols), col = int(i % arg.cols);
        float scale = 0.0f;
        bool counted = true;
        if (arg.contraction) {
            const int group = row / (arg.rows / arg.groups);
            const int first = arg.start == nullptr ? 0 : min(max(__ldg(arg.start + group), 0), arg.capacity - 1);
            counted = arg.len == nullptr || __ldg(arg.len + group) > 0;  // where there is no row, there is no scale
            scale = __fmul_rn(of(arg.a_scale, first), of(arg.b_scale, first));
        } else {
            int group = 0;
            if (arg.start != nullptr) {
                int low = 0, high = arg.groups - 1;  // the last start that is not above the row
                while (low < high) {
                    const int middle = (low + high + 1) / 2;
                    if (__ldg(arg.start + middle) <= row) low = middle;
                    else high = middle - 1;
                }
                group = low;
                const int first = __ldg(arg.start + group);
                counted = row >= first && row < first + __ldg(arg.len + group);
            }
            if (counted) scale = __fmul_rn(of(arg.a_scale, row), of(arg.b_scale, u64(group) * arg.cols + col));
        }
        float value = counted ? __fmul_rn(arg.sums[i], scale) : 0.0f;
        u8* const to = arg.d + i * Out::kBytes;
        if (arg.accumulate) value = __fadd_rn(Out::number(to), value);
        const float one[1] = {value};
        Few<Out, 1>::from_f32(one).store(to);
    }
}

}  // namespace nib
