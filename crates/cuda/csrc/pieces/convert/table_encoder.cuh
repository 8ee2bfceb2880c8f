// The encoder of quantize_units for blocks of sixteen E2M1 values with a scale byte. BF16
// values are converted to codes two at a time, with the entry for their scale byte in a
// shared-memory table. The assignment of values to threads is that of unit_encoder.cuh.
//
// Padding reads as zeros, and zeros get the scale byte 0 and zero codes, so padding needs no special case here.
#pragma once
#include "formats/rounding.cuh"
#include "pieces/convert/sixteen.cuh"
#include "pieces/convert/unit_records.cuh"

namespace nib {

template <class F, class In, int kAcross>
struct TableEncoder : UnitRecords<F, In, kAcross> {
    using Records = UnitRecords<F, In, kAcross>;
    using Records::arg, Records::shared, Records::is_square;
    using typename Records::Found;
    static_assert(F::kBlock == 16 && F::Element::kBits == 4 && In::kBytes == 2);

    const PairCode* table;

    __device__ __forceinline__ TableEncoder(const UnitsArg& arg, const RoundingArg&, QuantizeUnitsShared<F, In, kAcross>& shared, Tally& tally,
                                            const PairCode* table)
        : Records{arg, shared, tally}, table(table) {}

    /// Encodes unit `u` of the tile, which is four blocks of a row.
    __device__ __forceinline__ void encode_row(int matrix, int row, int col, int u) const {
        u8* const to = shared.codes.unit(u);
        Sixteen<In> x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = Sixteen<In>::load(shared.values, u, i);
        u32 amax[2];  // each word has the largest magnitudes of two blocks
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 a = x[2 * i].template largest_pair<8>(0), b = x[2 * i + 1].template largest_pair<8>(0);
            amax[i] = ptx::magnitudes_bf16x2(ptx::max_magnitude_bf16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)));
        }
        if (is_square()) {
            const int square = Records::square_of(u / kAcross, u % kAcross * kUnit);
#pragma unroll
            for (int i = 0; i < 2; ++i) amax[i] = square_pair(square + 2 * i, square + 2 * i + 1);
        }
        Found found;
        found.bytes = __byte_perm(F::bytes_of(amax[0]), F::bytes_of(amax[1]), 0x5410);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32(&p)[8] = x[i + j].pair;
                const PairCode of = table[found.byte(i + j)];
                const auto two = PairCode::Two::of(of, of);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    u32 of_four[4];
                    two.magnitudes(p + 4 * k, of_four);
                    words[2 * j + k] = pack_row(p + 4 * k, of_four);
                }
                found.any |= u32(((words[2 * j] | words[2 * j + 1]) & E2m1::kMagnitudes) != 0) << (i + j);
            }
            Records::store_words(to + i * 8, words);
        }
        mark_infinite(amax[0], amax[1], found);
        if (found.nan != 0) Records::template clear<16>(to, found.nan);
        this->store_row_records(matrix, row, col, u, found);
    }

    /// Encodes this thread's rows of two columns of the tile, two blocks per column.
    __device__ __forceinline__ void encode_columns(int matrix, int first_row, int first_col) const {
        const typename Records::TwoColumnsPlace at(first_row, first_col);
        u8* const to = this->codes_of(at);
        const auto from = shared.values.rows_from(at.quarter * 32, at.in_tile);
        u32 words[2][4], bytes[2], amax[2];
        Found found;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int row = at.quarter * 32 + step * 16;
            TwoColumns<In> x;
            load_rows(from, step * 16, x.row);
            amax[step] = ptx::magnitudes_bf16x2(x.template largest_pair<16>(0));
            if (is_square()) {
                const int square = Records::square_of(row, at.in_tile);
                amax[step] = square_pair(square, square);
            }
            bytes[step] = F::bytes_of(amax[step]);
            const auto two = PairCode::Two::of(table[bytes[step] & 0xFF], table[bytes[step] >> 8]);
            u32 rows[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 of_four[4];
                two.magnitudes(x.row + 4 * i, of_four);
                rows[i] = pack_columns(x.row + 4 * i, of_four);
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                u32(&of)[4] = words[c];
                of[2 * step] = __byte_perm(rows[0], rows[1], c == 0 ? 0x5410 : 0x7632);
                of[2 * step + 1] = __byte_perm(rows[2], rows[3], c == 0 ? 0x5410 : 0x7632);
                found.any |= u32(((of[2 * step] | of[2 * step + 1]) & E2m1::kMagnitudes) != 0) << (step + 2 * c);
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) Records::store_words(to + c * Records::kNextColumn, words[c]);
        found.bytes = __byte_perm(bytes[0], bytes[1], 0x5140);
        mark_infinite(__byte_perm(amax[0], amax[1], 0x5410), __byte_perm(amax[0], amax[1], 0x7632), found);
        if (found.nan != 0) {
            Records::template clear<16>(to, found.nan & 3);
            Records::template clear<16>(to + Records::kNextColumn, found.nan >> 2);
        }
        this->store_column_records(matrix, at, found);
    }

private:
    /// Returns the largest magnitudes of two 2-D blocks, as BF16 values.
    __device__ __forceinline__ u32 square_pair(int a, int b) const { return __byte_perm(shared.square_max[a], shared.square_max[b], 0x7632); }

    /// Marks which of four blocks have an infinity or a NaN; such blocks
    /// are rare. `low` and `high` hold the blocks' largest magnitudes.
    __device__ __forceinline__ static void mark_infinite(u32 low, u32 high, Found& found) {
        constexpr u32 kSigns = 0x80008000, kToSign = 0x00800080;  // added to an infinity or a NaN, this constant sets the sign bit
        if (((low + kToSign | high + kToSign) & kSigns) == 0) return;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const u32 amax = (i < 2 ? low : high) >> (i % 2 * 16) & 0xFFFF;
            if (amax < 0x7F80) continue;
            found.nan |= 1 << i;
            found.any &= ~(1 << i);
            found.bytes = (found.bytes & ~(0xFFu << 8 * i)) | F::kNan << 8 * i;
        }
    }
};

}  // namespace nib
