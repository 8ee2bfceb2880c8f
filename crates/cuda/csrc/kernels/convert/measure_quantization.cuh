// Compares quantized values with the originals. Adds four numbers to `counts`: how many non-zero values are exact, how many non-zero values
// became zero, how many values exceed the largest code, and how many non-zero values there are. dequantize_units decodes in the same way.
//
// measure_quantization<F, X, kDown>: 256 threads and sizeof(UnitCodes<F>) bytes of dynamic shared memory per CTA; kAcross = kDown ? 2 : 16.
//   Without kDown, blocks lie along the rows, or are 2-D blocks: codes are [rows][cols], and the grid has ceil(rows / 16) * ceil(cols / 1024) CTAs.
//   With kDown, blocks lie down the columns: codes are [cols][rows], and the grid has ceil(rows / 128) * ceil(cols / 128) CTAs.
// The kernel loads the original values one by one, because a training run calls it in only a few steps.
#pragma once
#include "formats/plain.cuh"
#include "pieces/convert/units.cuh"

namespace nib {

/// The launch code builds this struct as `MeasuredArg`.
struct MeasuredArg {
    const u8* codes;
    const u8* x;
    u64* counts;
    const int* row_id;  // id of each row of x, negative for padding rows; null: all rows are valid
    RecordPlane records;
    const float* tensor_scale;  // tensor scale of each row; null if there are no tensor scales
    int rows, cols;
    int x_rows;  // rows of x, at most `rows`
    // Three numbers for 2-D blocks: how many rows share a scale record (1 for row blocks), how
    // many rows a matrix has, and how many scale records lie below each other in a matrix.
    int tile_lines, matrix_lines, matrix_tiles;
    u32 codes_aligned, pad;

    __device__ __forceinline__ int record_line(int line) const {
        if (tile_lines == 1) return line;
        const int matrix = line / matrix_lines;
        return matrix * matrix_tiles + (line - matrix * matrix_lines) / tile_lines;
    }
};

template <class F, class X, bool kDown>
__global__ void __launch_bounds__(kUnitThreads, 2) measure_quantization(const MeasuredArg arg) {
    constexpr int kAcross = kDown ? 2 : 16, kBits = F::Element::kBits, kBlock = F::kBlock < kUnit ? F::kBlock : kUnit;
    constexpr int kRows = kUnitThreads / kAcross, kCols = kAcross * kUnit;
    extern __shared__ uint4 raw[];
    auto& shared = *reinterpret_cast<UnitCodes<F>*>(raw);
    const int across = ceil_div(arg.cols, kCols);
    const int first_row = blockIdx.x / across * kRows, first_col = blockIdx.x % across * kCols;
    const int lines = kDown ? arg.cols : arg.rows, len = kDown ? arg.rows : arg.cols;
    const int first_line = kDown ? first_col : first_row, first_place = kDown ? first_row : first_col;
    const u32 line_bytes = code_bytes(kBits, len), first_byte = code_bytes(kBits, first_place);
    shared.template load<kAcross>(arg.codes + u64(first_line) * line_bytes + first_byte, line_bytes, lines - first_line,
                                  int(line_bytes - first_byte), arg.codes_aligned);
    // If blocks lie down the columns, a warp has sixteen columns, and a lane has the upper or the lower half of one column.
    const int lane = threadIdx.x % 32, in_tile = threadIdx.x / 32 * 16 + lane % 16, half = lane / 16;
    const int u = kDown ? in_tile * 2 + half : threadIdx.x;
    const int line = first_line + u / kAcross, place = first_place + u % kAcross * kUnit;
    const bool exists = line < lines && place < len;
    const int record_line = exists ? arg.record_line(line) : 0;
    ptx::copies_wait();
    __syncthreads();
    u32 exact = 0, underflowed = 0, saturated = 0, values = 0;
#pragma unroll 1
    for (int sixteen = 0; sixteen < kUnit / 16; ++sixteen) {
        const int at = place + sixteen * 16;
        if (!exists || at >= len) break;
        constexpr int kWords = kBits / 2;
        u32 words[kWords];
        const u8* const codes = shared.unit(u) + sixteen * kBits * 2;
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const u32*>(codes)[i];
        float element[16];
        F::Element::decode(words, element);
        const int in_record = at / kBlock * kBlock;
        const int block = F::kLine ? (kDown ? in_record / kColumnRecord : 0) : in_record / F::kBlock;
        const Record<F> record = arg.records.template load<F::kScaleBytes>(record_line, block);
        constexpr int kFactors = F::kPart < 16 ? 16 / F::kPart : 1;
        float factor[kFactors];
#pragma unroll
        for (int i = 0; i < kFactors; ++i) factor[i] = F::multiplier(record, at % F::kBlock / F::kPart + i);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int row = kDown ? at + i : line, col = kDown ? line : at + i;
            if (row >= arg.x_rows || col >= arg.cols || (arg.row_id != nullptr && __ldg(arg.row_id + row) < 0)) continue;
            float q = __fmul_rn(element[i], factor[i * kFactors / 16]);
            if constexpr (F::kTensor)
                if (arg.tensor_scale != nullptr) q = __fmul_rn(q, __ldg(arg.tensor_scale + row));
            const float x = Few<X, 1>::load(arg.x + (u64(row) * arg.cols + col) * X::kBytes).value(0);
            if (x == 0.0f) continue;
            exact += q == x;
            underflowed += q == 0.0f && x == x;
            saturated += fabsf(element[i]) == F::Element::kMax && fabsf(x) > fabsf(q) && q != 0.0f;
            ++values;
        }
    }
    const u32 found[4] = {exact, underflowed, saturated, values};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 sum = __reduce_add_sync(~0u, found[i]);
        if (lane == 0 && sum != 0) atomicAdd(&arg.counts[i], u64(sum));
    }
}

}  // namespace nib
