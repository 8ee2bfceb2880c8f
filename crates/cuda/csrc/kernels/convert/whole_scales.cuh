// For formats with one scale per row, per column or per tensor: the kernels that run before and after the values are
// encoded. These kernels compute maxima with atomics on integer bits, whose order does not matter, so results are deterministic.
//
// row_id decides which rows are valid, by the rule in quantize_units.cuh. Maxima are the bits of F32 magnitudes, initially zeros; the bits
// of NaN compare greater than those of infinity, and the bits of infinity greater than those of finite values. A span is a group of rows.
//
// row_maxima<In>: reads x [rows][cols]. With by_span = 0, the kernel writes one maximum per row. With by_span = 1, it writes one maximum of the finite
//   values per span; by_span = 2 gives all ones if a value is not finite. The span of a row is span_of_row[row], or row / matrix_rows if that is null.
//   256 threads per CTA; the grid has ceil(rows / 32) CTAs. With `earlier`, the kernel only measures rows whose span has no expected magnitude yet.
// column_maxima<In>: reads x [stack * rows][cols] and writes [spans][lines], where lines = stack * cols: one maximum per column and
//   span of rows (span_of_row null: per column). 256 threads per CTA; the grid has stack * ceil(rows / 256) * ceil(cols / 256) CTAs.
// hadamard_maxima<In>: one maximum per span, by the rules of row_maxima, of the Hadamard transform of x [transform.rows][cols] down the columns.
//   The transform has `rows` rows; span_of_row null: they are one span. 256 threads per CTA; the grid has ceil(cols / 128) * ceil(rows / 128) CTAs.
// spans_of_rows: finds the group of each row. `start` has the first row of each of num_groups groups, then the end of
//   the last group. Rows outside all groups get num_groups. 256 threads per CTA; the grid has ceil(rows / 256) CTAs.
// tensor_scales: writes for each of `spans` spans the factor for its values, the factor's reciprocal, and the stored scale, for
//   NVFP4 (kNvfp4) or FP8. The largest magnitude times `headroom` is mapped to the value `largest`. kPower: NVFP4's scale is
//   rounded up to a power of two. With `earlier` (delayed scaling), a span's scale follows from the magnitude that earlier steps
//   predict for the span, if a prediction exists. The kernel then writes the predicted magnitude (infinity if unknown) instead of
//   the factor's reciprocal, and adds the number of values of all spans below earlier.spans to counts[1]. A span has len[span]
//   rows of `cols` values, or matrix_rows rows if `len` is null. 256 threads per CTA; the grid has ceil(spans / 256) CTAs.
// spread_scales: out[row] = scale[span_of_row[row]], or scale[row / matrix_rows] if span_of_row is null. The scale is NaN
//   if `found` says that the span has a value that is not finite. 256 threads per CTA; the grid has ceil(rows / 256) CTAs.
// count_lines: adds to counts[0] the number of non-zero bytes among `lines` bytes. 256 threads per CTA; the grid has ceil(lines / 256) CTAs.
#pragma once
#include "formats/bf16.cuh"
#include "formats/block_format.cuh"
#include "math/reduce.cuh"
#include "pieces/convert/transformed_columns.cuh"

namespace nib {

/// The data of earlier steps from which delayed scales are predicted; the launch code builds this struct as
/// `EarlierArg`. It holds the expected magnitude (0 if unknown) of each of `spans` spans, `stride` elements apart.
struct EarlierArg {
    const float* expected;
    u64 stride;
    int spans;
    u32 pad;

    __device__ __forceinline__ bool has(int span) const { return expected != nullptr && span < spans; }
    __device__ __forceinline__ float of(int span) const { return __ldg(expected + span * stride); }
    /// Returns whether the magnitudes of a span must be measured.
    __device__ __forceinline__ bool wants(int span) const { return expected == nullptr || (has(span) && of(span) == 0.0f); }
};

/// Returns the bits of a magnitude, for the computation of a maximum. A non-finite
/// value gives its own bits (by_span 0), 0 (by_span 1), or all ones (by_span 2).
__device__ __forceinline__ u32 magnitude_by(int by_span, float x) {
    const u32 bits = __float_as_uint(x) & 0x7FFFFFFF;
    return bits < kInfinityBits || by_span == 0 ? bits : by_span == 1 ? 0 : 0xFFFFFFFF;
}

/// Loads eight adjacent values of a row. Values of invalid rows, and values past the row's end, are zeros.
template <class In>
__device__ __forceinline__ typename In::Eight load_counted(const u8* x, u64 row, int col, int cols, bool counted) {
    const u8* const at = x + (row * cols + col) * In::kBytes;
    const int left = counted ? cols - col : 0;
    return cols % 8 == 0 ? In::template load<true>(at, left) : In::template load<false>(at, left);
}

template <class In>
__global__ void __launch_bounds__(256)
    row_maxima(const u8* __restrict__ x, u32* maxima, const int* __restrict__ row_id, int id_mask, const int* __restrict__ span_of_row,
               int matrix_rows, int by_span, int rows, int cols, const EarlierArg earlier) {
    constexpr int kRows = 4;  // number of rows per warp
    const int first = (blockIdx.x * 8 + threadIdx.x / 32) * kRows, lane = threadIdx.x % 32;
    u32 largest[kRows];
    int span[kRows];
    bool counted[kRows], any = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int row = first + r;
        largest[r] = 0;
        counted[r] = row < rows && (row_id == nullptr || __ldg(row_id + (row & id_mask)) >= 0);
        span[r] = row >= rows || by_span == 0 ? 0 : span_of_row == nullptr ? row / matrix_rows : __ldg(span_of_row + row);
        counted[r] &= earlier.wants(span[r]);
        any |= counted[r];
    }
    for (int col = lane * 8; any && col < cols; col += 256) {
        typename In::Eight eight[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) eight[r] = load_counted<In>(x, first + r, col, cols, counted[r]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < 8; ++i) largest[r] = max(largest[r], magnitude_by(by_span, In::value(eight[r], i)));
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) largest[r] = __reduce_max_sync(kAllLanes, largest[r]);
    if (lane != 0) return;
    if (by_span == 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            if (first + r < rows) maxima[first + r] = largest[r];
        return;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        // Adjacent rows of one span are combined first, so that they need only one atomic.
        if (r + 1 < kRows && span[r + 1] == span[r]) largest[r + 1] = max(largest[r + 1], largest[r]);
        else raise(maxima + span[r], largest[r]);
    }
}

template <class In>
__global__ void __launch_bounds__(256, In::kBytes == 2 ? 3 : 2)
    hadamard_maxima(const u8* __restrict__ x, u32* maxima, const int* __restrict__ row_id, const int* __restrict__ span_of_row, int by_span, int rows,
                    int cols, const TransformArg transform) {
    constexpr int kRows = TransformPlace::kRows, kTogether = 16;  // spans consist of whole transform blocks
    const TransformPlace at;
    const int across = ceil_div(cols, kHadamardTile), first_row = blockIdx.x / across * kHadamardTile;
    u32 largest[kRows / kTogether] = {};
    transform_columns<In>(x, row_id, cols, transform, first_row, blockIdx.x % across * kHadamardTile, [&](int, const float (&number)[kRows]) {
#pragma unroll
        for (int i = 0; i < kRows / kTogether; ++i) {
            const float* const of = number + i * kTogether;
            float most = fabsf(of[0]);
#pragma unroll
            for (int j = 1; j < kTogether; ++j) most = ptx::max_magnitude(most, of[j]);
            // Multiplication by the factor preserves the order of
            // magnitudes, so only the largest magnitude is multiplied.
            u32 bits = magnitude_by(by_span, __fmul_rn(most, transform.hadamard.factor));
            if (__float_as_uint(most) >= kInfinityBits) {  // rare; in this case smaller values may decide the maximum
                bits = 0;
#pragma unroll
                for (int j = 0; j < kTogether; ++j) bits = max(bits, magnitude_by(by_span, __fmul_rn(of[j], transform.hadamard.factor)));
            }
            largest[i] = max(largest[i], bits);
        }
    });
#pragma unroll
    for (int i = 0; i < kRows / kTogether; ++i) {
#pragma unroll
        for (int lane = 1; lane < 8; lane *= 2) largest[i] = max(largest[i], __shfl_xor_sync(kAllLanes, largest[i], lane));
        const int row = first_row + at.row + i * kTogether;
        if (threadIdx.x % 8 != 0 || row >= rows) continue;
        raise(maxima + (span_of_row == nullptr ? 0 : __ldg(span_of_row + row)), largest[i]);
    }
}

template <class In>
__global__ void __launch_bounds__(256)
    column_maxima(const u8* __restrict__ x, u32* maxima, const int* __restrict__ row_id, int id_mask, const int* __restrict__ span_of_row,
                  int lines, int rows, int cols) {
    constexpr int kRows = 32, kTogether = 4;  // number of rows per warp, and number of rows that a warp loads at a time
    const int across = ceil_div(cols, 256), down = ceil_div(rows, 8 * kRows), lane = threadIdx.x % 32;
    const int col = blockIdx.x % across * 256 + lane * 8, first = (blockIdx.x / across % down * 8 + threadIdx.x / 32) * kRows;
    const u64 matrix = blockIdx.x / across / down;
    const int of_lane = first + lane;
    const u32 counted = __ballot_sync(kAllLanes, of_lane < rows && (row_id == nullptr || __ldg(row_id + (of_lane & id_mask)) >= 0));
    const int spans = span_of_row == nullptr || of_lane >= rows ? 0 : __ldg(span_of_row + of_lane);
    u32 largest[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int span = 0;
    const auto settle = [&] {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (largest[i] != 0) raise(maxima + u64(span) * lines + matrix * cols + col + i, largest[i]);
            largest[i] = 0;
        }
    };
    for (int i = 0; i < kRows; i += kTogether) {
        typename In::Eight eight[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) eight[j] = load_counted<In>(x, matrix * rows + first + i + j, col, cols, counted >> (i + j) & 1);
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int of_row = __shfl_sync(kAllLanes, spans, i + j);
            if (of_row != span) settle();
            span = of_row;
#pragma unroll
            for (int k = 0; k < 8; ++k) largest[k] = max(largest[k], __float_as_uint(In::value(eight[j], k)) & 0x7FFFFFFF);
        }
    }
    settle();
}

__global__ void __launch_bounds__(256) spans_of_rows(const int* __restrict__ start, int num_groups, int* out, int rows) {
    const int row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    if (row < __ldg(start) || row >= __ldg(start + num_groups)) {
        out[row] = num_groups;
        return;
    }
    int low = 0, high = num_groups - 1;  // bisection for the last group whose start is not above the row
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (__ldg(start + middle) <= row) low = middle;
        else high = middle - 1;
    }
    out[row] = low;
}

template <bool kNvfp4, bool kPower>
__global__ void __launch_bounds__(256)
    tensor_scales(const u32* __restrict__ maxima, int spans, float headroom, float largest, TensorInverse* inverses, float* scales, const EarlierArg earlier,
                  const int* __restrict__ len, int matrix_rows, int cols, u64* counts) {
    const int span = blockIdx.x * 256 + threadIdx.x;
    if (span >= spans) return;
    u32 bits = maxima[span];
    float limit = __uint_as_float(kInfinityBits);
    if (earlier.has(span)) {
        const float expected = earlier.of(span);
        if (expected != 0.0f) {
            limit = expected;
            bits = __float_as_uint(expected);
        }
        const u64 values = u64(len == nullptr ? matrix_rows : __ldg(len + span)) * cols;
        if (values != 0) atomicAdd(counts + 1, values);
    }
    const float most = 0x1.fffffep127f, amax = bits >= kInfinityBits ? __uint_as_float(bits) : fminf(__fmul_rn(__uint_as_float(bits), headroom), most);
    float inverse = 1.0f, scale = 1.0f;
    if (bits > kInfinityBits) {
        inverse = scale = __uint_as_float(kNanBits);
    } else if (bits != 0) {
        inverse = __fdiv_rn(largest, amax);
        if constexpr (kPower) {
            scale = fmaxf(__uint_as_float((__float_as_uint(__fdiv_rn(amax, largest)) + 0x7FFFFF) & 0xFF800000), 0x1p-126f);
            inverse = __frcp_rn(scale);
        } else if constexpr (kNvfp4) {
            inverse = fminf(inverse, most);
            scale = __fdiv_rn(amax, largest);
        } else {
            inverse = inverse > most ? most : inverse;
            scale = __frcp_rn(inverse);
        }
    }
    inverses[span] = {inverse, earlier.expected != nullptr ? limit : __frcp_rn(inverse)};
    scales[span] = scale;
}

__global__ void __launch_bounds__(256)
    spread_scales(const float* __restrict__ scales, const int* __restrict__ span_of_row, int matrix_rows, float* out, int rows,
                  const u32* __restrict__ found, int found_spans) {
    const int row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    const int span = span_of_row == nullptr ? row / matrix_rows : __ldg(span_of_row + row);
    const bool marked = found != nullptr && span < found_spans && __ldg(found + span) >= kInfinityBits;
    out[row] = marked ? __uint_as_float(kNanBits) : __ldg(scales + span);
}

__global__ void __launch_bounds__(256) count_lines(const u8* __restrict__ any, int lines, u64* counts) {
    __shared__ u32 total[3];
    const int line = blockIdx.x * 256 + threadIdx.x;
    Tally tally;
    tally.non_zero += line < lines && __ldg(any + line) != 0;
    tally.flush(counts, total);
}

}  // namespace nib
