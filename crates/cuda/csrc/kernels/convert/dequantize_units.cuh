// Decodes codes of any block format, with their scales, to BF16 or F32 values [rows][cols]: f32(code · scales). If `tensor_scale` is given,
// the kernel multiplies the value by the tensor scale of its row and rounds the product to F32. BF16 output is then rounded to BF16.
//
// dequantize_units<F, Out, kDown>: 256 threads and sizeof(DecodedShared<F, Out, kAcross>) bytes of dynamic shared memory per CTA; kAcross = kDown ? 2 : 16.
//   Without kDown, blocks lie along the rows, or are 2-D blocks: codes are [rows][cols], and the grid has ceil(rows / 16) * ceil(cols / 1024) CTAs.
//   With kDown, blocks lie down the columns: codes are [cols][rows], and the grid has ceil(rows / 128) * ceil(cols / 128) CTAs.
#pragma once
#include "pieces/convert/unit_decoder.cuh"

namespace nib {

/// The launch code builds this struct as `DecodedArg`.
struct DecodedArg {
    const u8* codes;
    u8* out;
    RecordPlane records;
    const float* tensor_scale;  // tensor scale of each row; null if there are no tensor scales
    int rows, cols;
    // Three numbers for 2-D blocks: how many rows share a scale record (1 for row blocks), how
    // many rows a matrix has, and how many scale records lie below each other in a matrix.
    int tile_lines, matrix_lines, matrix_tiles;
    u32 codes_aligned, out_aligned, pad;

    __device__ __forceinline__ int record_line(int line) const {
        if (tile_lines == 1) return line;
        const int matrix = line / matrix_lines;
        return matrix * matrix_tiles + (line - matrix * matrix_lines) / tile_lines;
    }
};

template <class F, class Out, int kAcross>
struct alignas(16) DecodedShared {
    UnitValues<Out, kAcross> values;
    UnitCodes<F> codes;
};

template <class F, class Out, bool kDown>
__global__ void __launch_bounds__(kUnitThreads, Out::kBytes == 2 ? 3 : 2) dequantize_units(const DecodedArg arg) {
    constexpr int kAcross = kDown ? 2 : 16, kBits = F::Element::kBits, kBlock = kRecorded<F>;
    using Values = UnitValues<Out, kAcross>;
    extern __shared__ uint4 raw[];
    auto& shared = *reinterpret_cast<DecodedShared<F, Out, kAcross>*>(raw);
    const int across = ceil_div(arg.cols, Values::kCols);
    const int first_row = blockIdx.x / across * Values::kRows, first_col = blockIdx.x % across * Values::kCols;
    const int lines = kDown ? arg.cols : arg.rows, len = kDown ? arg.rows : arg.cols;
    const int first_line = kDown ? first_col : first_row, first_place = kDown ? first_row : first_col;
    const u32 line_bytes = code_bytes(kBits, len), first_byte = code_bytes(kBits, first_place);
    shared.codes.template load<kAcross>(arg.codes + u64(first_line) * line_bytes + first_byte, line_bytes, lines - first_line,
                                        int(line_bytes - first_byte), arg.codes_aligned);
    const DecodedPlace<kAcross, kDown> mine;
    const int line = first_line + mine.line, place = first_place + mine.place;
    const bool exists = line < lines && place < len;
    const int record_line = exists ? arg.record_line(line) : 0;
    const float of_row = !kDown && exists && arg.tensor_scale != nullptr ? __ldg(arg.tensor_scale + line) : 1.0f;
    Record<F> record[kUnit / kBlock];
#pragma unroll
    for (int b = 0; b < kUnit / kBlock; ++b) {
        record[b] = 0;
        const int at = place + b * kBlock;
        const int block = F::kLine ? (kDown ? at / kColumnRecord : 0) : at / F::kBlock;
        if (exists && at < len) record[b] = record_of_unit<F>(arg.records.template load<F::kScaleBytes>(record_line, block), at);
    }
    ptx::copies_wait();
    __syncthreads();
    decode_unit<F, Out, kDown>(shared.codes.unit(mine.u), record, shared.values, mine.u, [&](int i, float value) {
        if constexpr (!F::kTensor) return value;
        if constexpr (kDown) return arg.tensor_scale == nullptr ? value : __fmul_rn(value, __ldg(arg.tensor_scale + min(place + i, arg.rows - 1)));
        return __fmul_rn(value, of_row);
    });
    __syncthreads();
    store_decoded(shared.values, arg.out, first_row, first_col, arg.rows, arg.cols, arg.out_aligned);
}

}  // namespace nib
