// Quantizes BF16 or F32 values to blocks of any format, with every scale rule and rounding mode.
// Blocks lie along the rows, down the columns, or both (from one read of x), or are 2-D blocks.
//
// quantize_units<F, In, kRound, kAcross>: x is [stack * rows][cols]. F is a format declared in formats/. kRound is kNearestEven, kNearestAway or
//   kStochastic if F has its own code for that mode; kAnyRounding rounds by `policy`. kStochastic needs cols to be a multiple of 8, because random
//   bits are generated for eight values at a time. kAcross = 2 supports every form; kAcross = 16 supports only row blocks, in tiles of 16 x 1024.
//   256 threads per CTA; the grid has stack * ceil(lines / (256 / kAcross)) * ceil(cols / (64 * kAcross)) CTAs, where lines = capacity if columns are
//   written, else rows. CTAs are ordered in bands that are `band` tiles high. Dynamic shared memory: sizeof(QuantizeUnitsShared<F, In, kAcross>) bytes.
//
//   form kFormRows: the kernel writes row_codes [stack * rows][cols], and scale records for ceil(cols / kBlock) blocks per row.
//   form kFormCols: the kernel writes col_codes [stack * cols][capacity], and scale
//   records for ceil(capacity / kBlock) blocks per column; codes from `rows` on are zeros.
//   form kFormRows + kFormCols: the kernel writes the outputs of kFormRows and those of kFormCols.
//   form kFormTiles: the kernel writes row_codes like kFormRows, the transpose col_codes [stack *
//   cols][rows], and one scale record per 2-D block of kBlock x kBlock values; capacity = rows.
//   row_id (null: all rows are valid): row r is valid if row_id[r & id_mask] is not negative. Invalid rows read as zero, have the least scale
//   record, and are not counted in `counts`. row_id also numbers the rows for random bits; without row_id, a row's number is its index.
//   With `transform` (In is F32, form kFormCols, one matrix), x [transform.rows][cols] is BF16 if of_bf16, else F32. The kernel encodes its
//   Hadamard transform down the columns. The transform has `rows` rows, and id_mask maps a row to the first row of its transform block.
//   If F has one scale per row or column, `row_amax` and `col_amax` hold the bits of the largest magnitudes. The kernel writes to `row_any`
//   and `col_any` whether there is a non-zero code. `col_amax` and `col_any` have one entry per column and group of rows; `span_of_row` maps
//   a row to its group (null: all rows are one group). A column has one scale per `column_record` rows: 128 if groups start at multiples of
//   128, else all rows. If F has one scale per tensor, `tensor` holds the scales, indexed by `span_of_row` (null: by the row's matrix).
//   Squared<F>: has form kFormRows + kFormCols, with the scales of 2-D blocks of kBlock x kBlock values. Squared<F> rounds by `policy`.
//   Chosen<F> takes `scaling`. For 2-D blocks, the kernel sums the loss of each of the two candidate scales in shared memory, in integers.
//   With `found` (only for delayed scales of a tensor), the kernel writes for each of `found_spans` groups of rows the bits of the largest magnitude,
//   initially zeros, or NaN if a value is not finite. found_counts[0] increases by the number of finite values that exceed the `unit` of their group of rows.
//
//   One-byte scale records are stored several at a time if they are contiguous. Three flags say where:
//   row_words: the records of rows are stored in words. Either a row has a multiple of 64 / kBlock records; or cols is a
//     multiple of 128, words of adjacent rows are contiguous, and transpose_scales moves the words to their final place.
//   col_words: the records of columns are stored in words, if the records of a column are contiguous and their number is a multiple of four.
//   cols_in_pairs: the records of two adjacent columns are stored together, if they are contiguous (line_stride 1), and cols and block_stride are even.
//
// quantize_units_decoded<F, In, kRound, kAcross>: writes row-major BF16 values instead of codes: row_codes is [stack * rows][cols], and
//   col_codes is [capacity][cols]. The kernel does not support kFormTiles, and supports rows and columns together only if kDecodesBoth.
//   The values are those that dequantize_units would compute without a tensor scale. Scale records are still written; rows_aligned and
//   cols_aligned refer to the values. Dynamic shared memory: sizeof(DecodedUnitsShared<F, In, kRound, kAcross>) bytes.
//
// A thread encodes 64 values of a row, then 32 rows of two columns. Asynchronous copies bring the tile to shared memory. Threads read
// the values from shared memory and write codes to shared memory, so that global memory is accessed in runs of at least 128 bytes.
#pragma once
#include "pieces/convert/table_encoder.cuh"
#include "pieces/convert/unit_decoder.cuh"
#include "pieces/convert/unit_encoder.cuh"

namespace nib {

/// Copies a tile to shared memory, with zeros outside the matrix and in invalid rows.
template <class In, int kAcross>
__device__ __forceinline__ void fetch_tile(UnitValues<In, kAcross>& values, const UnitsArg& arg, int matrix, int first_row, int first_col) {
    using Values = UnitValues<In, kAcross>;
    constexpr int kNumbers = 16 / In::kBytes;
    int row = first_row + threadIdx.x / Values::kPerRow;
    const int col = first_col + threadIdx.x % Values::kPerRow * kNumbers;
    const u64 step = u64(Values::kRowsAtOnce) * arg.cols * In::kBytes;
    const u8* from = arg.x + ((u64(matrix) * arg.rows + row) * arg.cols + col) * In::kBytes;
    if (arg.x_aligned) {
        // A copy of zero bytes reads nothing, so its address may lie outside the matrix.
        const int rows = col < arg.cols ? arg.rows : 0, left = rows - row;
        if (arg.row_id == nullptr) {
#pragma unroll
            for (int i = 0; i < Values::kPasses; ++i) ptx::copy_16_async(values.moved(i), from + i * step, i * Values::kRowsAtOnce < left);
        } else {
#pragma unroll
            for (int i = 0; i < Values::kPasses; ++i) {
                const int r = row + i * Values::kRowsAtOnce;
                ptx::copy_16_async(values.moved(i), from + i * step, r < rows && arg.counts_row(r));
            }
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < Values::kPasses; ++i) {
            u8* const to = values.moved(i);
            const bool present = arg.counts_row(row);
            for (int n = 0; n < kNumbers; ++n) {
                const bool here = present && col + n < arg.cols;
                if constexpr (In::kBytes == 2) reinterpret_cast<u16*>(to)[n] = here ? reinterpret_cast<const u16*>(from)[n] : u16(0);
                else reinterpret_cast<u32*>(to)[n] = here ? reinterpret_cast<const u32*>(from)[n] : 0;
            }
            from += step;
            row += Values::kRowsAtOnce;
        }
    }
}

/// Transforms this thread's columns of a tile.
__device__ __forceinline__ void transform_tile(HeldColumns& columns, const UnitsArg& arg, int first_row, int first_col) {
    if (arg.of_bf16) transform_columns<Bf16>(arg.x, arg.row_id, arg.cols, arg.transform, first_row, first_col, columns.number);
    else transform_columns<F32>(arg.x, arg.row_id, arg.cols, arg.transform, first_row, first_col, columns.number);
}

/// Writes the transform of a tile to shared memory.
template <int kAcross>
__device__ __forceinline__ void transform_tile(UnitValues<F32, kAcross>& values, const UnitsArg& arg, int first_row, int first_col) {
    constexpr int kRows = TransformPlace::kRows;
    HeldColumns columns;
    transform_tile(columns, arg, first_row, first_col);
    const auto& number = columns.number;
    const TransformPlace at;
    const auto to = values.rows_from(at.row, at.col);
#pragma unroll
    for (int i = 0; i < kRows; ++i) *reinterpret_cast<float2*>(to.at[i % 4] + i / 4 * to.kNext) = {number[0][i], number[1][i]};
}

/// The tile of this CTA. Tiles are ordered in bands of `band` strips, and within a band panel by panel from left to
/// right, so that concurrent writes are adjacent.
struct CtaPlace {
    int matrix, strip, panel;

    __device__ __forceinline__ explicit CtaPlace(const UnitsArg& arg) {
        u32 index = blockIdx.x;
        matrix = arg.by_matrix.divide(index);
        index -= matrix * arg.across * arg.down;
        const int band = arg.by_band.divide(index);
        index -= band * arg.band * arg.across;
        const bool is_last = (band + 1) * arg.band > arg.down;
        panel = (is_last ? arg.by_last : arg.by_height).divide(index);
        strip = band * arg.band + index - panel * (is_last ? arg.down - band * arg.band : arg.band);
    }
};

/// The number of CTAs per SM, which is limited by registers.
template <class F, class In, int kRound>
constexpr int kUnitCtas = In::kBytes == 4 || (F::kPart < 16 && !kSideBySide<F, In, kRound>) ? 2 : F::kLine || kRound >= kStochastic ? 3 : 4;

/// Whether TableEncoder encodes the values.
template <class F, class In, int kRound>
constexpr bool kByTable = In::kBytes == 2 && F::template has_table<kRound>();

/// Whether a thread encodes the transform of its columns from registers, so that shared.values is never written. Not writing
/// shared.values is safe, because `found`, which would read it, is never used with a transform. kAnyRounding is excluded because its
/// loops index the values. Stochastic rounding of a format with part scales is excluded because its random bits leave no registers.
template <class F, int kRound>
constexpr bool kHoldsTransform = kRound != kAnyRounding && !(F::kPart < 16 && kRound == kStochastic);

template <class F, class In, int kRound, int kAcross, bool kTabled = kByTable<F, In, kRound>>
struct EncoderOf {
    using Type = UnitEncoder<F, In, kRound, kAcross>;
};
template <class F, class In, int kRound, int kAcross>
struct EncoderOf<F, In, kRound, kAcross, true> {
    using Type = TableEncoder<F, In, kAcross>;
};

/// Decodes the codes of a tile's rows, or of its columns, and stores the values. The
/// encoded values are overwritten, so there is a barrier before this step and one after it.
template <class F, class In, int kAcross, bool kDown>
__device__ __forceinline__ void decode_tile(QuantizeUnitsShared<F, In, kAcross>& shared, UnitCodes<F>& codes, const UnitsArg& arg, int matrix, int first_row,
                                            int first_col) {
    constexpr int kBlock = kRecorded<F>;
    static_assert(!F::kLine, "records of blocks");
    auto& values = *reinterpret_cast<UnitValues<Bf16, kAcross>*>(&shared.values);
    const DecodedPlace<kAcross, kDown> mine;
    const int lines = kDown ? arg.cols : arg.rows, len = kDown ? arg.capacity : arg.cols;
    const int line = (kDown ? first_col : first_row) + mine.line, place = (kDown ? first_row : first_col) + mine.place;
    const RecordPlane& records = kDown ? arg.col_records : arg.row_records;
    Record<F> record[kUnit / kBlock];
#pragma unroll
    for (int b = 0; b < kUnit / kBlock; ++b) {
        record[b] = 0;
        const int at = place + b * kBlock;
        if (line < lines && at < len) record[b] = record_of_unit<F>(records.template load_written<F::kScaleBytes>(u64(matrix) * lines + line, at / F::kBlock), at);
    }
    decode_unit<F, Bf16, kDown>(codes.unit(mine.u), record, values, mine.u, [](int, float value) { return value; });
    __syncthreads();
    u8* const out = (kDown ? arg.col_codes : arg.row_codes) + u64(matrix) * arg.rows * arg.cols * Bf16::kBytes;
    store_decoded(values, out, first_row, first_col, kDown ? arg.capacity : arg.rows, arg.cols, kDown ? arg.cols_aligned : arg.rows_aligned);
}

template <class F, class In, int kRound, int kAcross, bool kDecoded, class Shared>
__device__ __forceinline__ void quantize_tile(const UnitsArg& arg, const RoundingArg& rounding) {
    extern __shared__ uint4 raw[];
    using Values = UnitValues<In, kAcross>;
    constexpr int kBits = F::Element::kBits;
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const bool is_square = arg.form == kFormTiles;
    const CtaPlace at(arg);
    const int matrix = at.matrix, first_row = at.strip * Values::kRows, first_col = at.panel * Values::kCols;
    const u32 row_bytes = code_bytes(kBits, arg.cols), col_bytes = code_bytes(kBits, arg.capacity);
    Tally tally;
    constexpr bool kTabled = kByTable<F, In, kRound>;
    __shared__ PairCode table[kTabled ? 128 : 1];  // indexed by the scale byte
    if constexpr (kTabled) {
        if (threadIdx.x < 128) table[threadIdx.x] = F::pair_code(threadIdx.x);
    }
    const typename EncoderOf<F, In, kRound, kAcross>::Type encoder(arg, rounding, shared, tally, table);
    const auto store = [&](bool rows) {
        const u32 first_byte = code_bytes(kBits, rows ? first_col : first_row), line_bytes = rows ? row_bytes : col_bytes;
        const u64 line = rows ? u64(matrix) * arg.rows + first_row : u64(matrix) * arg.cols + first_col;
        shared.codes.template store<kAcross>((rows ? arg.row_codes : arg.col_codes) + line * line_bytes + first_byte, line_bytes,
                                             rows ? arg.rows - first_row : arg.cols - first_col, int(line_bytes - first_byte),
                                             rows ? arg.rows_aligned : arg.cols_aligned);
    };
    constexpr bool kMayTransform = In::kBytes == 4 && kAcross == 2;
    if constexpr (kMayTransform && kHoldsTransform<F, kRound>) {
        if (arg.transform.is_wanted()) {
            HeldColumns columns;
            transform_tile(columns, arg, first_row, first_col);
            encoder.encode_columns(matrix, first_row, first_col, columns);
            __syncthreads();
            if constexpr (kDecoded) decode_tile<F, In, kAcross, true>(shared, shared.codes, arg, matrix, first_row, first_col);
            else store(false);
            tally.flush(arg.counts, shared.total);
            return;
        }
        fetch_tile<In, kAcross>(shared.values, arg, matrix, first_row, first_col);
    } else if constexpr (kMayTransform) {
        if (arg.transform.is_wanted()) transform_tile(shared.values, arg, first_row, first_col);
        else fetch_tile<In, kAcross>(shared.values, arg, matrix, first_row, first_col);
    } else {
        fetch_tile<In, kAcross>(shared.values, arg, matrix, first_row, first_col);
    }

    constexpr bool kMayBeSquare = (F::kTiles || F::kSquares) && kAcross == 2;
    const bool has_squares = F::kSquares || is_square;
    if constexpr (kMayBeSquare) {
        if constexpr (kInSquares<F>) {
            for (int i = threadIdx.x; i < 32 * 32; i += kUnitThreads) shared.quad_max[i] = 0;
        }
        if (has_squares && threadIdx.x < 64) {
            shared.square_max[threadIdx.x] = 0;
            shared.square_any[threadIdx.x] = 0;
            if constexpr (kChooses<F>) shared.square_lost[0][threadIdx.x] = shared.square_lost[1][threadIdx.x] = 0;
        }
    }
    ptx::copies_wait();
    __syncthreads();
    if constexpr (kMayBeSquare) {
        if constexpr (kInSquares<F>) {
            const int row = threadIdx.x / 2, first_quad = threadIdx.x % 2 * (kUnit / 4);
#pragma unroll 1
            for (int i = 0; i < kUnit / 16; ++i) {
                const Sixteen<In> x = Sixteen<In>::load(shared.values, threadIdx.x, i);
#pragma unroll
                for (int j = 0; j < 4; ++j) atomicMax(&shared.quad_max[row / 4 * 32 + first_quad + i * 4 + j], x.template largest<4>(j * 4));
            }
        }
        if (has_squares) {
            constexpr int kSide = F::kBlock < kUnit ? F::kBlock : kUnit;
#pragma unroll 1
            for (int first = 0; first < kUnit; first += kSide) {
                u32 largest = 0;
#pragma unroll
                for (int i = 0; i < kSide; i += 16)
                    largest = max(largest, Sixteen<In>::load(shared.values, threadIdx.x, (first + i) / 16).template largest<16>(0));
                const int col = threadIdx.x % 2 * kUnit + first;
                atomicMax(&shared.square_max[threadIdx.x / 2 / F::kBlock * 8 + col / F::kBlock], largest);
            }
            __syncthreads();
            if constexpr (kChooses<F>) {
                if (arg.scaling.candidates != 0) {
                    encoder.compare_squares(matrix, first_row + int(threadIdx.x) / kAcross);
                    __syncthreads();
                }
            }
        }
    }
    if constexpr (kDecoded) {
        if (arg.form != kFormCols) {
            encoder.encode_row(matrix, first_row + int(threadIdx.x) / kAcross, first_col + int(threadIdx.x) % kAcross * kUnit, threadIdx.x);
            __syncthreads();
            if (arg.form == kFormRows) decode_tile<F, In, kAcross, false>(shared, shared.codes, arg, matrix, first_row, first_col);
        }
        if constexpr (kAcross == 2) {
            if (arg.form != kFormRows) {
                constexpr bool kBoth = kDecodesBoth<In, kRound, kAcross>;
                // The values are needed until the columns are encoded, so the codes of rows do not overwrite the values.
                if constexpr (kBoth) {
                    if (arg.form != kFormCols) {
                        shared.keep_codes_of_rows();
                        __syncthreads();
                    }
                }
                encoder.encode_columns(matrix, first_row, first_col);
                __syncthreads();
                if constexpr (kBoth) {
                    if (arg.form != kFormCols) {
                        decode_tile<F, In, kAcross, false>(shared, shared.of_rows, arg, matrix, first_row, first_col);
                        __syncthreads();
                    }
                }
                decode_tile<F, In, kAcross, true>(shared, shared.codes, arg, matrix, first_row, first_col);
            }
        }
        tally.flush(arg.counts, shared.total);
        return;
    }
    if (arg.form != kFormCols) {
        const int u = threadIdx.x;
        encoder.encode_row(matrix, first_row + u / kAcross, first_col + u % kAcross * kUnit, u);
        __syncthreads();
        if (is_square && threadIdx.x < 64) tally.non_zero += shared.square_any[threadIdx.x] != 0;
        store(true);
    }
    if constexpr (kAcross == 2) {
        if (arg.form != kFormRows) {
            // All threads must have stored the codes of rows before the codes of columns overwrite them in shared memory.
            if (arg.form != kFormCols) __syncthreads();
            encoder.encode_columns(matrix, first_row, first_col);
            __syncthreads();
            store(false);
        }
    }
    tally.flush(arg.counts, shared.total);
}

template <class F, class In, int kRound, int kAcross>
__global__ void __launch_bounds__(kUnitThreads, kUnitCtas<F, In, kRound>) quantize_units(const UnitsArg arg, const RoundingArg rounding) {
    quantize_tile<F, In, kRound, kAcross, false, QuantizeUnitsShared<F, In, kAcross>>(arg, rounding);
}

template <class F, class In, int kRound, int kAcross>
__global__ void __launch_bounds__(kUnitThreads, kUnitCtas<F, In, kRound>) quantize_units_decoded(const UnitsArg arg, const RoundingArg rounding) {
    quantize_tile<F, In, kRound, kAcross, true, DecodedUnitsShared<F, In, kRound, kAcross>>(arg, rounding);
}

}  // namespace nib
