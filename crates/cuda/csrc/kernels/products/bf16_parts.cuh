// Splits F32 numbers into sums of three BF16 parts, for F32 GEMMs on the tensor cores. Each part is the remainder after the preceding parts,
// rounded to nearest even. The sum of the three parts is exact for magnitudes of at least 2^-110; for smaller magnitudes, the last parts are
// subnormal or lost. An infinity in one operand makes the result NaN, because the infinity is multiplied by zero parts of the other operand.
//
// split_parts: writes `count` parts of each number side by side: out[row][i · cols + col] = part (pattern
//   >> 2i & 3) of in[row][col], for i below count. The first part of a NaN or infinity is the value itself.
// sum_parts: out[row][col] = the F32 sum of the kParts (1 or 3) values in[row][r][part][col], over runs r in order, the last part
//   first. The sum replaces the old out, or is added to it, and is rounded once to Out. cols is a multiple of 4. 256 threads per CTA,
//   4 columns per thread; the grid has ceil(units / 256) CTAs; units = rows · cols / 4 is below 2^31, and units_per_row = cols / 4.
// cut_groups: divides each group's rows into `runs` runs of a multiple of kRunRows rows; the last runs may be shorter or empty. start_out
//   is [groups · runs + 1], and len_out is [groups · runs]. 256 threads per CTA; the grid has ceil((groups · runs + 1) / 256) CTAs.
#pragma once
#include "formats/plain.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kPartsThreads = 256;

/// Rounds four numbers to BF16, subtracts the rounded values from the numbers, and returns
/// the rounded values. Numbers that would round to infinity are truncated instead.
__device__ __forceinline__ uint2 take_part(float (&left)[4]) {
    u32 part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 bits = __float_as_uint(left[i]);
        const bool is_finite = (bits & 0x7F800000) != 0x7F800000, is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
        const u32 rounded = bits + 0x7FFF + (bits >> 16 & 1);
        const bool keeps = is_finite && (rounded & 0x7F800000) != 0x7F800000;
        part[i] = is_nan ? 0x7FC00000 : (keeps ? rounded : bits) & 0xFFFF0000;
        left[i] = is_finite ? left[i] - __uint_as_float(part[i]) : 0.0f;
    }
    return {__byte_perm(part[0], part[1], 0x7632), __byte_perm(part[2], part[3], 0x7632)};
}

__global__ void __launch_bounds__(kPartsThreads)
    split_parts(const float* __restrict__ in, u16* __restrict__ out, u32 units, u32 units_per_row, Divider by_units_per_row,
                u32 pattern, u32 count) {
    const u32 unit = blockIdx.x * kPartsThreads + threadIdx.x;
    if (unit >= units) return;
    const uint4 v = ptx::load_16(in + u64(unit) * 4);
    float left[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    const uint2 first = take_part(left), second = take_part(left), third = take_part(left);
    const u32 row = by_units_per_row.divide(unit), at = unit - row * units_per_row;
    for (u32 i = 0; i < count; ++i, pattern >>= 2) {
        const uint2 part = (pattern & 3) == 0 ? first : (pattern & 3) == 1 ? second : third;
        ptx::store_8(out + (u64(row) * count + i) * units_per_row * 4 + at * 4, part);
    }
}

template <typename Out, int kParts>
__global__ void __launch_bounds__(kPartsThreads)
    sum_parts(const float* __restrict__ in, u8* __restrict__ out, u32 units, u32 units_per_row,
              Divider by_units_per_row, u32 runs, int accumulate) {
    const u32 unit = blockIdx.x * kPartsThreads + threadIdx.x;
    if (unit >= units) return;
    const u32 row = by_units_per_row.divide(unit), at = unit - row * units_per_row;
    using X = Few<F32, 4>;
    const float* from = in + (u64(row) * runs * kParts * units_per_row + at) * 4;
    float sum[4] = {};
    for (u32 run = 0; run < runs; ++run) {
        X part[kParts];
#pragma unroll
        for (int p = 0; p < kParts; ++p, from += u64(units_per_row) * 4) part[p] = X::load(from);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float each = part[kParts - 1].value(i);
#pragma unroll
            for (int p = kParts - 2; p >= 0; --p) each = each + part[p].value(i);
            sum[i] = run == 0 ? each : sum[i] + each;
        }
    }
    using Y = Few<Out, 4>;
    u8* const to = out + u64(unit) * Y::kBytes;
    if (accumulate) {
        const Y before = Y::load_written(to);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = before.value(i) + sum[i];
    }
    Y::from_f32(sum).store(to);
}

constexpr int kRunRows = 128;  // a multiple of every scale block and of the number of rows in a GEMM's pipeline stage

__global__ void __launch_bounds__(kPartsThreads)
    cut_groups(const int* __restrict__ start, const int* __restrict__ len, int* __restrict__ start_out, int* __restrict__ len_out,
                 u32 groups, u32 runs) {
    const u32 i = blockIdx.x * kPartsThreads + threadIdx.x;
    if (i > groups * runs) return;
    if (i == groups * runs) {
        start_out[i] = start[groups];
        return;
    }
    const u32 group = i / runs;
    const int rows = len[group], each = ((rows + int(runs) - 1) / int(runs) + kRunRows - 1) / kRunRows * kRunRows;
    const int first = min(int(i - group * runs) * each, rows);
    start_out[i] = start[group] + first;
    len_out[i] = min(each, rows - first);
}

}  // namespace nib
