// The results of quantize_units for a tile: codes in shared memory,
// ordered by unit; scale records in global memory; and counts.
#pragma once
#include "pieces/convert/units_arg.cuh"

namespace nib {

template <class F, class In, int kAcross>
struct UnitRecords {
    static constexpr int kBits = F::Element::kBits, kNextColumn = 2 * UnitCodes<F>::kStride;

    const UnitsArg& arg;
    QuantizeUnitsShared<F, In, kAcross>& shared;
    Tally& tally;

    /// The results for up to four blocks: the bytes of their records, one bit per block that says
    /// whether a code is not zero, and one bit per block that says whether the block has a NaN.
    struct Found {
        u32 bytes = 0, any = 0, nan = 0;

        __device__ __forceinline__ void add(int i, u32 byte, bool is_any, bool is_nan) {
            bytes |= byte << (8 * i);
            any |= u32(is_any) << i;
            nan |= u32(is_nan) << i;
        }
        __device__ __forceinline__ u32 byte(int i) const { return bytes >> (8 * i) & 0xFF; }
        __device__ __forceinline__ void count(Tally& tally) const {
            tally.non_zero += __popc(any);
            tally.non_finite += __popc(nan);
        }
    };

    /// The part of a tile that a thread has: two adjacent columns, and the 32 rows of the thread's quarter of the warp.
    struct TwoColumnsPlace {
        int quarter, in_tile, first_row, row, col;

        __device__ __forceinline__ TwoColumnsPlace(int first_row, int first_col, const TransformPlace& mine = {})
            : quarter(mine.quarter), in_tile(mine.col), first_row(first_row), row(first_row + mine.row), col(first_col + in_tile) {}
    };
    /// Returns the address of the codes of the first column. The
    /// codes of the second column are kNextColumn bytes further.
    __device__ __forceinline__ u8* codes_of(const TwoColumnsPlace& at) const {
        return shared.codes.unit(at.in_tile * 2 + at.quarter / 2) + at.quarter % 2 * (32 * kBits / 8);
    }

    __device__ __forceinline__ bool is_square() const { return F::kTiles && kAcross == 2 && arg.form == kFormTiles; }

    /// Returns the 2-D block to which a value of the tile belongs.
    __device__ __forceinline__ static int square_of(int row, int col) { return row / F::kBlock * 8 + col / F::kBlock & 63; }

    /// Stores the records of the blocks in a unit of a row, and counts these blocks.
    __device__ __forceinline__ void store_row_records(int matrix, int row, int col, int u, const Found& found) const {
        constexpr int kSteps = kUnit / F::kBlock;
        if (row >= arg.rows || col >= arg.cols) return;
        const u64 line = u64(matrix) * arg.rows + row;
        if (arg.row_words.words != nullptr && arg.cols - col >= kUnit) {
            u8* const at = arg.row_words.at(line, col / (4 * F::kBlock)) + col % (4 * F::kBlock) / F::kBlock;
            if constexpr (kSteps == 4) *reinterpret_cast<u32*>(at) = found.bytes;
            else *reinterpret_cast<u16*>(at) = u16(found.bytes);
            found.count(tally);
            return;
        }
#pragma unroll 1
        for (int step = 0; step < kSteps && col + step * F::kBlock < arg.cols; ++step) {
            const int square = square_of(u / kAcross, u % kAcross * kUnit + step * F::kBlock);
            settle({line, col + step * F::kBlock, square, row}, false, found.byte(step), found.any >> step & 1, found.nan >> step & 1);
        }
    }

    /// Stores the records of both columns of a thread, and counts the
    /// blocks. The results of the second column start at bit 2 and byte 2.
    __device__ __forceinline__ void store_column_records(int matrix, const TwoColumnsPlace& at, const Found& found) const {
        constexpr int kSteps = 32 / F::kBlock;
        const u64 line = u64(matrix) * arg.cols + at.col;
        if (arg.cols_in_pairs) {
            if (at.col >= arg.cols) return;
            const RecordPlane& records = arg.col_records;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const int position = at.row + step * F::kBlock;
                const u32 two = __byte_perm(found.bytes, 0, step == 0 ? 0x4420 : 0x4431);
                if (position < arg.capacity)
                    *reinterpret_cast<u16*>(records.records + position / F::kBlock * records.block_stride + line) = u16(two);
            }
            if (arg.form == kFormCols) found.count(tally);
            return;
        }
        // For weights in MX formats, the record bytes of the transposed codes are stored row by row. Record bytes
        // are stored as words if all columns of the warp exist.
        if constexpr (kSteps == 1) {
            if (arg.col_words.words != nullptr && at.first_row + 128 <= arg.capacity && at.col - at.in_tile % 16 + 16 <= arg.cols) {
                store_column_words(line, at, found.bytes);
                if (arg.form == kFormCols) found.count(tally);
                return;
            }
        }
#pragma unroll 1
        for (int i = 0; i < 2 * kSteps; ++i) {
            const int c = i / kSteps, step = i % kSteps, position = at.row + step * F::kBlock, place = 2 * c + step;
            if (at.col + c < arg.cols && position < arg.capacity)
                settle({line + c, position, square_of(at.quarter * 32 + step * F::kBlock, at.in_tile + c), at.col + c}, true, found.byte(place),
                       found.any >> place & 1, found.nan >> place & 1);
        }
    }

    /// Zeros the codes of those blocks (or parts of blocks) of kCount values whose bit is set in the argument.
    template <int kCount>
    __device__ __forceinline__ static void clear(u8* to, u32 blocks) {
        constexpr int kBytes = kCount * kBits / 8;
#pragma unroll 1
        for (; blocks != 0; blocks >>= 1, to += kBytes) {
#pragma unroll 1
            for (int i = 0; i < kBytes && (blocks & 1); i += 4) *reinterpret_cast<u32*>(to + i) = 0;
        }
    }

    /// Stores codes by the widest store that their alignment allows. Codes are
    /// aligned to the number of bytes that they fill, except six-bit codes.
    template <int kCount>
    __device__ __forceinline__ static void store_words(u8* to, const u32 (&words)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; i += kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1) {
            if constexpr (kCount % 4 == 0) reinterpret_cast<uint4*>(to)[i / 4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
            else if constexpr (kCount % 2 == 0) reinterpret_cast<uint2*>(to)[i / 2] = {words[i], words[i + 1]};
            else reinterpret_cast<u32*>(to)[i] = words[i];
        }
    }

    struct Place {
        u64 line;
        int position, square;
        int across;  // index of the row or column within its matrix
    };

    /// Writes the record of a block, and counts the block once.
    __device__ __forceinline__ void settle(const Place& place, bool down, Record<F> record, bool any, bool is_nan) const {
        const RecordPlane& records = down ? arg.col_records : arg.row_records;
        const bool has_counts = !down || arg.form == kFormCols;
        if constexpr (F::kLine) {
            const int each = down ? int(arg.column_record) : arg.cols;
            if (any) (down ? arg.col_any : arg.row_any)[arg.maximum_of(down, place.line, place.position)] = 1;
            if (place.position % each != 0) return;
            records.template store<F::kScaleBytes>(place.line, place.position / each, record);
            // A row or column, or the part of it that lies in one group, is counted only once.
            const bool first = place.position == 0 || !down || arg.span_of(place.position, 0) != arg.span_of(place.position - 1, 0);
            tally.non_finite += has_counts && is_nan && first;
            return;
        }
        const int block = place.position / F::kBlock;
        if (is_square()) {
            if (any && !down) shared.square_any[place.square] = 1;
            if (place.across % F::kBlock != 0) return;
            const int matrix = int(place.line / (down ? arg.cols : arg.rows));
            const u64 tiles = u64(ceil_div(down ? arg.cols : arg.rows, F::kBlock));
            records.template store<F::kScaleBytes>(matrix * tiles + place.across / F::kBlock, block, record);
            tally.non_finite += !down && is_nan;
            return;
        }
        records.template store<F::kScaleBytes>(place.line, block, record);
        tally.non_zero += has_counts && any;
        tally.non_finite += has_counts && is_nan;
    }

private:
    /// Stores the four record bytes of a column as a word. Each of four lanes has one byte of each of two
    /// columns. After two exchanges between lanes, one lane stores the first column and another lane the second.
    __device__ __forceinline__ void store_column_words(u64 line, const TwoColumnsPlace& place, u32 bytes) const {
        const u32 other = __shfl_xor_sync(kAllLanes, bytes, 8);
        const u32 half = place.quarter % 2 == 0 ? __byte_perm(bytes, other, 0x0040) : __byte_perm(other, bytes, 0x0062);
        const u32 word = __byte_perm(half, __shfl_xor_sync(kAllLanes, half, 16), 0x5410);
        if (place.quarter >= 2) return;
        *reinterpret_cast<u32*>(arg.col_words.at(line + place.quarter % 2, place.first_row / (4 * F::kBlock))) = word;
    }
};

}  // namespace nib
