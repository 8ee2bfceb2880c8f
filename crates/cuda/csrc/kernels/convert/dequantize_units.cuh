// Blocks of any format with their scales -> BF16 or F32 [rows][cols]: f32(code · scales), times the tensor's scale of its row, rounded again,
// where `tensor_scale` is given; for BF16 rounded once more.
//
// dequantize_units<F, Out, kDown>: 256 threads; sizeof(DecodedShared<F, Out, kAcross>) dynamic shared memory, kAcross = kDown ? 2 : 16.
//   Along the rows, or square tiles: codes [rows][cols]; grid ceil(rows / 16) * ceil(cols / 1024).
//   kDown: codes [cols][rows]; grid ceil(rows / 128) * ceil(cols / 128).
#pragma once
#include "formats/plain.cuh"
#include "pieces/convert/units.cuh"

namespace nib {

/// `DecodedArg` of the launch.
struct DecodedArg {
    const u8* codes;
    u8* out;
    RecordPlane records;
    const float* tensor_scale;  // of each row, or null
    int rows, cols;
    // Square tiles: lines that share a record (1 for blocks of lines), lines of one matrix, and how many records it has down them.
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
    constexpr int kAcross = kDown ? 2 : 16, kBits = F::Element::kBits, kBlock = F::kBlock < kUnit ? F::kBlock : kUnit;
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
    // Down the columns, a warp has sixteen columns, and a lane has the upper or the lower half of one.
    const int lane = threadIdx.x % 32, in_tile = threadIdx.x / 32 * 16 + lane % 16, half = lane / 16;
    const int u = kDown ? in_tile * 2 + half : threadIdx.x;
    const int line = first_line + u / kAcross, place = first_place + u % kAcross * kUnit;
    const bool exists = line < lines && place < len;
    const int record_line = exists ? arg.record_line(line) : 0;
    const float of_row = !kDown && exists && arg.tensor_scale != nullptr ? __ldg(arg.tensor_scale + line) : 1.0f;
    u32 record[kUnit / kBlock];
#pragma unroll
    for (int b = 0; b < kUnit / kBlock; ++b) {
        record[b] = 0;
        const int at = place + b * kBlock;
        const int block = F::kLine ? (kDown ? at / kColumnRecord : 0) : at / F::kBlock;
        if (exists && at < len) record[b] = arg.records.template load<F::kScaleBytes>(record_line, block);
    }
    ptx::copies_wait();
    __syncthreads();
    const u8* const codes = shared.codes.unit(u);
#pragma unroll
    for (int sixteen = 0; sixteen < kUnit / 16; ++sixteen) {
        constexpr int kWords = kBits / 2;
        u32 words[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const u32*>(codes + sixteen * kBits * 2)[i];
        float value[16];
        F::Element::decode(words, value);
        constexpr int kFactors = F::kPart < 16 ? 16 / F::kPart : 1;
        float factor[kFactors];
#pragma unroll
        for (int i = 0; i < kFactors; ++i) factor[i] = F::multiplier(record[sixteen * 16 / kBlock], sixteen * 16 % kBlock / F::kPart + i);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int in_unit = sixteen * 16 + i;
            value[i] = __fmul_rn(value[i], factor[i * kFactors / 16]);
            if constexpr (F::kTensor) {
                if constexpr (kDown) {
                    if (arg.tensor_scale != nullptr) value[i] = __fmul_rn(value[i], __ldg(arg.tensor_scale + min(place + in_unit, arg.rows - 1)));
                } else {
                    value[i] = __fmul_rn(value[i], of_row);
                }
            }
        }
        if constexpr (kDown) {
            u8* to[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = shared.values.value(u % 2 * kUnit + sixteen * 16 + i, u / 2);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float one[1] = {value[i]};
                Few<Out, 1>::from_f32(one).store(to[i % 4] + i / 4 * (8 * Values::kUnitBytes));
            }
        } else {
            constexpr int kFew = 16 / Out::kBytes;
#pragma unroll
            for (int part = 0; part < 16; part += kFew) {
                float few[kFew];
#pragma unroll
                for (int i = 0; i < kFew; ++i) few[i] = value[part + i];
                Few<Out, kFew>::from_f32(few).store(shared.values.vector(u, (sixteen * 16 + part) / kFew));
            }
        }
    }
    __syncthreads();
    constexpr int kNumbers = 16 / Out::kBytes;
    const int row = first_row + threadIdx.x / Values::kPerRow, col = first_col + threadIdx.x % Values::kPerRow * kNumbers;
    if (col >= arg.cols) return;
    const u64 step = u64(Values::kRowsAtOnce) * arg.cols * Out::kBytes;
    u8* to = arg.out + (u64(row) * arg.cols + col) * Out::kBytes;
    if (arg.out_aligned) {
#pragma unroll
        for (int i = 0; i < Values::kPasses; ++i) {
            if (row + i * Values::kRowsAtOnce < arg.rows) ptx::store_16(to, *reinterpret_cast<const uint4*>(shared.values.moved(i)));
            to += step;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < Values::kPasses && row + i * Values::kRowsAtOnce < arg.rows; ++i) {
            const u8* const from = shared.values.moved(i);
            for (int n = 0; n < min(arg.cols - col, kNumbers); ++n) {
                if constexpr (Out::kBytes == 2) reinterpret_cast<u16*>(to)[n] = reinterpret_cast<const u16*>(from)[n];
                else reinterpret_cast<u32*>(to)[n] = reinterpret_cast<const u32*>(from)[n];
            }
            to += step;
        }
    }
}

}  // namespace nib
