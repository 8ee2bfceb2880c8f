// The arguments of quantize_units, and its shared memory.
#pragma once
#include "math/reduce.cuh"
#include "pieces/convert/transformed_columns.cuh"
#include "pieces/convert/units.cuh"

namespace nib {

constexpr int kFormRows = 1;
constexpr int kFormCols = 2;
constexpr int kFormTiles = 4;

/// One-byte records, where four adjacent records of a row or column form a word.
struct RecordWords {
    u8* words;              // null if records are stored one at a time, to a RecordPlane
    u64 line_stride, next;  // distance in bytes from a row or column to the next, and from a word to the next word of the same row or column

    __device__ __forceinline__ u8* at(u64 line, int word) const { return words + line * line_stride + u32(word) * next; }
};

/// The launch code builds this struct as `UnitsArg`.
struct UnitsArg {
    const u8* x;
    u8* row_codes;
    u8* col_codes;
    RecordPlane row_records, col_records;
    RecordWords row_words, col_words;
    u64* counts;
    const int* row_id;
    const u32* row_amax;
    const u32* col_amax;
    u8* row_any;
    u8* col_any;
    const TensorInverse* tensor;
    const int* span_of_row;
    u32* found;
    u64* found_counts;
    int rows, cols, capacity;
    int form, policy, band, id_mask;
    u32 x_aligned, rows_aligned, cols_aligned;
    u32 cols_in_pairs;         // true if record bytes of two adjacent columns are stored together: an even column and the next one, in two bytes
    int found_spans;
    u32 column_record;         // number of rows of a column per record, in formats with one scale per row or column
    int across, down, stack;   // number of tiles across and down a matrix; number of matrices
    // Divisors for the index of a CTA: the number of tiles of a matrix, of a band, of
    // one column of a band, and of one column of the last band, which may be shorter.
    Divider by_matrix, by_band, by_height, by_last;
    ScaleArg rule;
    u32 of_bf16;             // whether x is BF16, if there is a transform
    TransformArg transform;  // transform down the columns, applied to values as they are read
    ScalingArg scaling;      // options of Chosen formats

    __device__ __forceinline__ bool counts_row(int row) const { return row < rows && (row_id == nullptr || __ldg(row_id + (row & id_mask)) >= 0); }
    /// Returns the index that numbers a row for random bits.
    __device__ __forceinline__ u64 number_of(int matrix, int row) const {
        return row_id == nullptr || row >= rows ? u64(matrix) * rows + row : u64(max(__ldg(row_id + row), 0));
    }
    /// Returns the span of a row, which is the span of the row's group, or `otherwise` if there are no groups.
    __device__ __forceinline__ int span_of(int row, int otherwise) const {
        return span_of_row == nullptr ? otherwise : __ldg(span_of_row + min(row, rows - 1));
    }
    /// Returns the index of the maximum that applies at position `row` of the row or column `line`.
    __device__ __forceinline__ u64 maximum_of(bool down, u64 line, int row) const {
        return down ? u64(span_of(row, 0)) * (u64(stack) * cols) + line : line;
    }
    __device__ __forceinline__ TensorInverse tensor_of(int matrix, int row) const {
        if (tensor == nullptr) return {1.0f, 1.0f};
        const float2 of = __ldg(reinterpret_cast<const float2*>(tensor) + span_of(row, matrix));
        return {of.x, of.y};
    }
};

/// The rounding errors of 2-D blocks, for both candidate scales.
template <bool kCandidates>
struct SquareLosses {};
template <>
struct SquareLosses<true> {
    u32 square_lost[2][64];
};

template <class F>
constexpr bool kChooses = F::kChosen && F::kCandidates;

template <class F>
constexpr bool kCorrects = F::kChosen && F::kCorrection;

/// True if the format has 2-D blocks with several levels of scales.
template <class F>
constexpr bool kInSquares = F::kSquares && kHasParts<F>;

/// The largest magnitude of each 4 x 4 block of a tile, row after row.
template <bool kQuads>
struct SquareQuads {};
template <>
struct SquareQuads<true> {
    u32 quad_max[32 * 32];
};

template <class F, class In, int kAcross>
struct alignas(16) QuantizeUnitsShared : SquareLosses<kChooses<F>>, SquareQuads<kInSquares<F>> {
    UnitValues<In, kAcross> values;
    UnitCodes<F> codes;
    u32 square_max[64];  // largest magnitudes of the 2-D blocks of a tile, row after row
    u32 square_any[64];
    u32 total[3];
};

/// True if an instance that decodes writes rows and columns from one read.
/// For BF16 without random bits, two launches take less time than one launch.
template <class In, int kRound, int kAcross>
constexpr bool kDecodesBoth = kAcross == 2 && (In::kBytes == 4 || kRound == kStochastic);

/// The shared memory of kernels that quantize and decode in one pass. If both rows and
/// columns are written, it also holds the codes of rows until the columns are encoded.
template <class F, class In, int kRound, int kAcross, bool kBoth = kDecodesBoth<In, kRound, kAcross>>
struct DecodedUnitsShared : QuantizeUnitsShared<F, In, kAcross> {};
template <class F, class In, int kRound, int kAcross>
struct DecodedUnitsShared<F, In, kRound, kAcross, true> : QuantizeUnitsShared<F, In, kAcross> {
    alignas(16) UnitCodes<F> of_rows;

    /// Each thread saves the codes of its own unit.
    __device__ __forceinline__ void keep_codes_of_rows() {
        const uint4* const from = reinterpret_cast<const uint4*>(this->codes.unit(threadIdx.x));
        uint4* const to = reinterpret_cast<uint4*>(of_rows.unit(threadIdx.x));
#pragma unroll
        for (int i = 0; i < UnitCodes<F>::kVectors; ++i) to[i] = from[i];
    }
};

}  // namespace nib
