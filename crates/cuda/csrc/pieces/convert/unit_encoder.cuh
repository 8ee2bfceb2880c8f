// The encoder of quantize_units: it converts the values that a thread has of a tile to codes in shared memory and to scale records.
//
// Along the rows, a thread has one unit of 64 values. Down the columns, a thread has 32 rows
// of two adjacent columns, which it reads together. The four quarters of a warp have 32 rows
// each of the same columns, so blocks of 64 and of 128 rows only need exchanges within a warp.
#pragma once
#include "formats/rounding.cuh"
#include "math/philox.cuh"
#include "pieces/convert/sixteen.cuh"
#include "pieces/convert/unit_records.cuh"

namespace nib {

/// Random bits for the values of a unit, generated one value at a time.
struct UnitBits {
    Stream stream;
    u64 q;  // index of the most recently generated block of eight numbers
    uint4 drawn;

    __device__ __forceinline__ explicit UnitBits(const RoundingArg& arg) : stream(arg.stream.at(arg.step())), q(~0ull), drawn{0, 0, 0, 0} {}

    __device__ __forceinline__ u32 of(u64 element) {
        if (element / 8 != q) {
            q = element / 8;
            drawn = stream.block(q);
        }
        const u32 word = element & 4 ? (element & 2 ? drawn.w : drawn.z) : (element & 2 ? drawn.y : drawn.x);
        return element & 1 ? word >> 16 : word & 0xFFFF;
    }
};

/// True if a format encodes the blocks of two adjacent rows
/// or columns together, two BF16 values at a time.
template <class F, class In, int kRound>
constexpr bool kSideBySide = F::kPart < 16 && In::kBytes == 2 && F::template has_pairs<kRound>();

template <class F, class In, int kRound, int kAcross>
struct UnitEncoder : UnitRecords<F, In, kAcross> {
    using Records = UnitRecords<F, In, kAcross>;
    using Records::arg, Records::shared, Records::tally, Records::kBits, Records::is_square, Records::square_of;
    using typename Records::Found;
    static constexpr int kWords = kBits / 2;                             // number of words that sixteen codes fill
    static constexpr int kFactors = F::kPart < 16 ? 16 / F::kPart : 1;   // number of factors for sixteen values
    static constexpr bool kAny = kRound == kAnyRounding, kPairs = kSideBySide<F, In, kRound>;
    static constexpr bool kNotes = F::kTensor && F::kScaleBytes == 0;    // the tensor scale is the only scale
    static constexpr bool kDraws = kRound == kStochastic;                // if so, rows have a multiple of eight values
    static constexpr bool kWithin = In::kBytes == 2 && !kAny, kLimits = kWithin && !kDraws && F::kLimits;
    // True if padding needs a special case. Padding reads as zeros, whose codes are zeros. If the only record
    // of a block is one byte, or is that of HiFloat4 encoded in pairs, zeros already get the least record.
    static constexpr bool kPads = F::kTensor || F::kLine || !(F::kScaleBytes == 1 || kPairs);
    static constexpr int kHeld = kAny ? kWords : 2 * kWords;             // number of words that are stored at a time

    const RoundingArg& rounding;

    __device__ __forceinline__ UnitEncoder(const UnitsArg& arg, const RoundingArg& rounding, QuantizeUnitsShared<F, In, kAcross>& shared, Tally& tally,
                                           const PairCode*)
        : Records{arg, shared, tally}, rounding(rounding) {}

    /// Encodes unit `u` of the tile, which is 64 values of a row.
    __device__ __forceinline__ void encode_row(int matrix, int row, int col, int u) const {
        constexpr int kStep = F::kBlock < kUnit ? F::kBlock : kUnit, kSteps = kUnit / kStep;  // number of values per record
        const bool exists = row < arg.rows && col < arg.cols, is_padding = kPads && !arg.counts_row(row);
        const u64 line = u64(matrix) * arg.rows + row;
        u8* const to = shared.codes.unit(u);
        UnitBits bits(rounding);
        TensorInverse tensor{1.0f, 1.0f};
        if constexpr (F::kTensor) tensor = arg.tensor_of(matrix, row);
        Found found;
        u32 words[kHeld];
#pragma unroll(kAny ? 1 : kSteps)
        for (int step = 0; step < kSteps; ++step) {
            const int first = step * kStep, position = col + first;
            const int square = square_of(u / kAcross, u % kAcross * kUnit + first);
            Sixteen<In> x[kStep / 16];
#pragma unroll
            for (int i = 0; i < kStep / 16; ++i) x[i] = Sixteen<In>::load(shared.values, u, first / 16 + i);
            Scaled scale;
            Record<F> of_parts = 0;
            bool any = false;
            if constexpr (kPairs) {
                static_assert(kStep == kUnit);
                scale = row_in_pairs(x, to, any);
            } else {
                u32 largest = x[0].template largest<16>(0);
#pragma unroll
                for (int i = 1; i < kStep / 16; ++i) largest = max(largest, x[i].template largest<16>(0));
                if constexpr (F::kBlock == 128) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
                scale = scale_of(largest, exists ? arg.row_amax : nullptr, line, square, tensor, is_padding);
                if constexpr (kChooses<F>) scale = better_of(scale, largest, square, tensor, is_padding, [&](int i) { return x[0].value(i); });
                if constexpr (kCorrects<F>) correct(scale, bits, matrix, row, position, is_padding, [&](int i) { return x[0].value(i); });
                if constexpr (kNotes) {
                    if (arg.found != nullptr) {
                        note(matrix, row, exists && !is_padding, largest, [&](int i, int j) {
                            return In::number(shared.values.vector(u, (i * 16 + j) * In::kBytes / 16) + (i * 16 + j) * In::kBytes % 16);
                        });
                    }
                }
#pragma unroll(kAny ? 1 : kStep / 16)
                for (int i = 0; i < kStep / 16; ++i) {
                    // If the loop is not unrolled (kAny), the thread loads
                    // its values again, because registers cannot be indexed.
                    Sixteen<In> mine = kAny ? Sixteen<In>::load(shared.values, u, first / 16 + i) : x[i];
                    if constexpr (kLimits) mine.clamp(limit_pair(F::limit(scale), F::limit(scale)));
                    u32 amax[kFactors], eighth[2];
                    if constexpr (kInSquares<F>) {
                        octave_maxima<false>(u / kAcross, u % kAcross * kUnit + first + i * 16, amax, eighth);
                    } else if constexpr (kHasParts<F>) {
#pragma unroll
                        for (int j = 0; j < kFactors; ++j) amax[j] = mine.template largest<F::kPart>(j * F::kPart);
                    }
                    float v[16];
#pragma unroll
                    for (int j = 0; j < 16; ++j) v[j] = mine.value(j);
                    RandomBits drawn[2];
                    if constexpr (kDraws) {
                        const Stream::Complements draws = bits.stream.complements(element(matrix, row, position + i * 16));
                        drawn[0] = draws.bits(0);
                        drawn[1] = draws.bits(1);
                    }
                    const auto decide = [&](int j, u32 one = 0, u32 code = 0) {
                        if constexpr (kDraws) return ptx::halves_mul_add(drawn[j / 8].word[j % 8 / 2], j % 2 ? one << 8 : one, code);
                        else return decision(bits, matrix, row, position + i * 16 + j);
                    };
                    u32* const mine_words = words + (kAny ? 0 : (first / 16 + i) % 2 * kWords);
                    any |= encode_sixteen(v, amax, eighth, scale, of_parts, i, mine_words, decide);
                    put(to, first / 16 + i, words);
                }
                if constexpr (F::kBlock == 128) any |= __shfl_xor_sync(kAllLanes, int(any), 1) != 0;
                if constexpr (kPartsHaveScales<F>) {
                    of_parts <<= threadIdx.x % 2 * (kUnit / F::kPart * F::kPartBits);
                    of_parts |= __shfl_xor_sync(kAllLanes, of_parts, 1);
                }
            }
            const bool is_nan = scale.is_nan();
            any &= !is_nan && !is_padding;
            found.add(step, scale.record, any, is_nan);
            if (kSteps == 1 && exists && !(F::kBlock == 128 && threadIdx.x % 2 != 0))
                this->settle({line, position, square, row}, false, scale.record | of_parts, any, is_nan);
        }
        if (found.nan != 0) this->template clear<kStep>(to, found.nan);
        if constexpr (kSteps > 1) {
            this->store_row_records(matrix, row, col, u, found);
        }
    }

    /// Adds the rounding errors of this thread's values of a row, for
    /// both candidate scales of the 2-D blocks that contain the values.
    __device__ __forceinline__ void compare_squares(int matrix, int row) const {
        TensorInverse tensor{1.0f, 1.0f};
        if constexpr (F::kTensor) tensor = arg.tensor_of(matrix, row);
#pragma unroll 1
        for (int i = 0; i < kUnit / 16; ++i) {
            const int square = square_of(threadIdx.x / kAcross, threadIdx.x % kAcross * kUnit + i * 16);
            const u32 largest = arg.scaling.over(shared.square_max[square]);
            const Scaled six = F::scale(largest, arg.rule, tensor), four = F::template scale<true>(largest, arg.rule, tensor);
            const Sixteen<In> sixteen = Sixteen<In>::load(shared.values, threadIdx.x, i);
            float x[16];
#pragma unroll
            for (int j = 0; j < 16; ++j) x[j] = sixteen.value(j);
            if (six.is_nan()) continue;
            atomicAdd(&shared.square_lost[0][square], F::lost(x, six, six, tensor, arg.scaling.candidates == 1));
            atomicAdd(&shared.square_lost[1][square], F::lost(x, four, six, tensor, arg.scaling.candidates == 1));
        }
    }

    /// Encodes this thread's rows of two columns of the tile, which are in shared memory.
    __device__ __forceinline__ void encode_columns(int matrix, int first_row, int first_col) const {
        const TransformPlace mine;
        encode_columns(matrix, first_row, first_col, SharedColumns{shared.values.rows_from(mine.row, mine.col)});
    }

    /// Encodes this thread's rows of two columns, which `from` holds.
    template <class Columns>
    __device__ __forceinline__ void encode_columns(int matrix, int first_row, int first_col, const Columns& from) const {
        constexpr int kStep = F::kBlock < 32 ? F::kBlock : 32, kSteps = 32 / kStep;
        const typename Records::TwoColumnsPlace at(first_row, first_col);
        const int quarter = at.quarter, in_tile = at.in_tile, row = at.row, col = at.col;
        // If a block has more rows than a thread, this is the first row of the block to which the thread's rows belong.
        const int block_row = F::kBlock <= 32 ? row : first_row + quarter * 32 / (F::kBlock == 64 ? 64 : 128) * 64;
        const u64 line = u64(matrix) * arg.cols + col;
        u8* const to = this->codes_of(at);
        UnitBits bits(rounding);
        Found found;  // the results of the second column start at bit 2 and byte 2
        u32 words[2][kHeld];
#pragma unroll(kAny ? 1 : kSteps)
        for (int step = 0; step < kSteps; ++step) {
            const int first = step * kStep, position = block_row + first;
            const bool is_padding = kPads && !arg.counts_row(position);
            TwoColumns<In> x[kStep / 16];
#pragma unroll
            for (int i = 0; i < kStep / 16; ++i) from.load(first + i * 16, x[i].row);
            Scaled scale[2];
            Record<F> of_parts[2] = {0, 0};
            bool any[2] = {false, false};
            if constexpr (kPairs) {
                static_assert(kStep == 32);
                columns_in_pairs(x, to, scale, any);
            } else {
                u32 largest[2];
                x[0].template largest<16>(0, largest);
#pragma unroll
                for (int i = 1; i < kStep / 16; ++i) {
                    u32 more[2];
                    x[i].template largest<16>(0, more);
                    largest[0] = max(largest[0], more[0]);
                    largest[1] = max(largest[1], more[1]);
                }
                TensorInverse tensor{1.0f, 1.0f};
                if constexpr (F::kTensor) tensor = arg.tensor_of(matrix, row + first);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if constexpr (F::kBlock >= 64 && !F::kLine) largest[c] = max(largest[c], __shfl_xor_sync(kAllLanes, largest[c], 8));
                    if constexpr (F::kBlock == 128) largest[c] = max(largest[c], __shfl_xor_sync(kAllLanes, largest[c], 16));
                    const u32* const of_lines = col + c < arg.cols ? arg.col_amax : nullptr;
                    scale[c] = scale_of(largest[c], of_lines, arg.maximum_of(true, line + c, position), square_of(quarter * 32 + first, in_tile + c), tensor, is_padding);
                    if constexpr (kChooses<F>) {
                        scale[c] = better_of(scale[c], largest[c], square_of(quarter * 32 + first, in_tile + c), tensor, is_padding, [&](int i) {
                            return c == 0 ? x[0].template value<false>(i) : x[0].template value<true>(i);
                        });
                    }
                    if constexpr (kCorrects<F>) {
                        correct(scale[c], bits, matrix, position, col + c, is_padding, [&](int i) {
                            return c == 0 ? x[0].template value<false>(i) : x[0].template value<true>(i);
                        });
                    }
                }
                if constexpr (kNotes) {
                    if (arg.found != nullptr && arg.form == kFormCols) {
                        note(matrix, row, col < arg.cols && !is_padding, max(largest[0], largest[1]), [&](int i, int j) {
                            return In::number(shared.values.value(quarter * 32 + i % 2 * 16 + j, in_tile + i / 2));
                        });
                    }
                }
#pragma unroll(kAny ? 1 : kStep / 16)
                for (int i = 0; i < kStep / 16; ++i) {
                    TwoColumns<In> mine;
                    if constexpr (kAny) {
                        from.load(first + i * 16, mine.row);
                    } else {
                        mine = x[i];
                    }
                    if constexpr (kLimits) mine.clamp(limit_pair(F::limit(scale[0]), F::limit(scale[1])));
                    u32 amax[2][kFactors], eighth[2][2];
                    if constexpr (kInSquares<F>) {
                        const int in_row = quarter * 32 + first + i * 16;
                        octave_maxima<true>(in_row, in_tile, amax[0], eighth[0]);
                        octave_maxima<true>(in_row, in_tile + 1, amax[1], eighth[1]);
                    } else if constexpr (kHasParts<F>) {
#pragma unroll
                        for (int j = 0; j < kFactors; ++j) {
                            u32 of[2];
                            mine.template largest<F::kPart>(j * F::kPart, of);
                            amax[0][j] = of[0];
                            amax[1][j] = of[1];
                        }
                    }
                    // The index of these sixteen values within their block, counted in units of sixteen values.
                    const int which = F::kBlock == 64 ? quarter % 2 * 2 + i : i;
                    const int sixteenth = first / 16 + i, held = kAny ? 0 : sixteenth % 2 * kWords;
                    float v[16];
                    int c = 0;
                    u32 drawn[16];  // random bits for the two columns of each row
                    if constexpr (kDraws) draw_rows(bits.stream, matrix, row + first + i * 16, col, drawn);
                    const auto decide = [&](int j, u32 one = 0, u32 code = 0) {
                        if constexpr (kDraws) return ptx::halves_mul_add(drawn[j], c == 0 ? one : one << 8, code);
                        else return decision(bits, matrix, row + first + i * 16 + j, col + c);
                    };
#pragma unroll
                    for (int j = 0; j < 16; ++j) v[j] = mine.template value<false>(j);
                    any[0] |= encode_sixteen(v, amax[0], eighth[0], scale[0], of_parts[0], which, words[0] + held, decide);
                    c = 1;
#pragma unroll
                    for (int j = 0; j < 16; ++j) v[j] = mine.template value<true>(j);
                    any[1] |= encode_sixteen(v, amax[1], eighth[1], scale[1], of_parts[1], which, words[1] + held, decide);
                    put(to, sixteenth, words[0]);
                    put(to + Records::kNextColumn, sixteenth, words[1]);
                }
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if constexpr (kPartsHaveScales<F>) of_parts[c] <<= quarter * (32 / F::kPart * F::kPartBits);
                    if constexpr (kHasParts<F>) of_parts[c] |= __shfl_xor_sync(kAllLanes, of_parts[c], 8);
                    if constexpr (kPartsHaveScales<F>) of_parts[c] |= __shfl_xor_sync(kAllLanes, of_parts[c], 16);
                    if constexpr (F::kBlock >= 64) any[c] |= __shfl_xor_sync(kAllLanes, int(any[c]), 8) != 0;
                    if constexpr (F::kBlock == 128) any[c] |= __shfl_xor_sync(kAllLanes, int(any[c]), 16) != 0;
                }
            }
            bool nan[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                nan[c] = scale[c].is_nan();
                any[c] &= !nan[c] && !is_padding;
                found.add(2 * c + step, scale[c].record, any[c], nan[c]);
            }
            if constexpr (F::kBlock > 32) {
                // One lane of the lanes that share a block writes the record of each column.
#pragma unroll
                for (int i = 0; i < (F::kLine ? 2 : 1); ++i) {
                    const int c = F::kLine ? i : F::kBlock == 64 ? quarter % 2 : quarter, mine = c % 2;
                    // A short column may end before the first row of some lanes.
                    const int place = F::kLine ? row : position;
                    if (c < 2 && col + c < arg.cols && place < arg.capacity)
                        this->settle({line + c, place, square_of(quarter * 32 + first, in_tile + c), col + c}, true,
                                     mine ? scale[1].record | of_parts[1] : scale[0].record | of_parts[0], mine ? any[1] : any[0], mine ? nan[1] : nan[0]);
                }
            }
        }
        if (found.nan != 0) {
            this->template clear<kStep>(to, found.nan & 3);
            this->template clear<kStep>(to + Records::kNextColumn, found.nan >> 2);
        }
        if constexpr (F::kBlock <= 32) {
            this->store_column_records(matrix, at, found);
        }
    }

private:
    /// For delayed scales: includes the largest magnitude of 64 values in the maximum of their span, and counts
    /// the finite values that exceed the expected magnitude. `amax` is the largest magnitude of the 64 values,
    /// or of their whole block; `value(i, j)` is value j of sixteen i. The whole warp calls this function.
    template <class Value>
    __device__ __forceinline__ void note(int matrix, int row, bool counts, u32 amax, const Value& value) const {
        int span = counts ? arg.span_of(row, matrix) : -1;
        if (unsigned(span) >= unsigned(arg.found_spans)) span = -1;
        u32 bits = span < 0 ? 0 : amax >= kInfinityBits ? kNanBits : amax;
        const float expected = span < 0 ? 0.0f : arg.tensor_of(matrix, row).unit;
        u32 larger = 0;
        if (span >= 0 && !(__uint_as_float(amax) <= expected)) {
            // Values above the expected magnitude are rare. The values are read again, because
            // registers cannot be indexed.
#pragma unroll 1
            for (int i = 0; i < 64; ++i) {
                const u32 magnitude = __float_as_uint(value(i / 16, i % 16)) & 0x7FFFFFFF;
                larger += __uint_as_float(magnitude) > expected && magnitude < kInfinityBits;
            }
        }
        larger = __reduce_add_sync(kAllLanes, larger);
        if (threadIdx.x % 32 == 0 && larger != 0) atomicAdd(arg.found_counts, u64(larger));
        int is_one_span;
        __match_all_sync(kAllLanes, span, &is_one_span);
        if (is_one_span) {
            bits = __reduce_max_sync(kAllLanes, bits);
            if (threadIdx.x % 32 != 0) return;
        }
        if (bits != 0) raise(arg.found + span, bits);
    }

    /// Packs two F32 values that are BF16 numbers into one word.
    __device__ __forceinline__ static u32 limit_pair(float low, float high) {
        return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    }

    /// Returns the least record, which is the record of padding.
    __device__ __forceinline__ static Scaled least() { return {F::kScaleBytes == 4 && F::kPart >= 16 ? 0x00800000u : 0u, 1.0f}; }

    /// Computes the scale of a block. The argument has the bits of the block's largest magnitude, or
    /// of the largest magnitude of the 2-D block, row or column with which the block shares a scale.
    __device__ __forceinline__ Scaled scale_of(u32 largest, const u32* of_lines, u64 maximum, int square, TensorInverse tensor, bool is_padding) const {
        if constexpr (F::kTiles && kAcross == 2) {
            if (is_square()) largest = shared.square_max[square];
        }
        if constexpr (F::kSquares) largest = shared.square_max[square];
        if constexpr (F::kLine) largest = of_lines == nullptr ? 0 : __ldg(of_lines + maximum);
        if constexpr (F::kChosen) largest = arg.scaling.over(largest);
        Scaled scale = of_largest(largest, tensor);
        if constexpr (F::kChosen && F::kThresholds) {
            if (arg.scaling.divides && !scale.is_nan()) scale.inverse = __frcp_rn(F::multiplier(scale.record, 0));
        }
        return is_padding ? least() : scale;
    }

    __device__ __forceinline__ Scaled of_largest(u32 largest, TensorInverse tensor) const {
        if constexpr (kCorrects<F>) return F::scale(largest, arg.rule, tensor, arg.scaling.corrects ? F::kClippedSixth : F::kSixth);
        else return F::scale(largest, arg.rule, tensor);
    }

    /// For a block of sixteen values, or its 2-D block: returns the scale that maps the largest magnitude to 4 if that scale has
    /// smaller rounding errors than the scale that maps it to 6.
    template <class Value>
    __device__ __forceinline__ Scaled better_of(const Scaled& six, u32 largest, int square, TensorInverse tensor, bool is_padding,
                                                const Value& value) const {
        if (arg.scaling.candidates == 0 || is_padding || six.is_nan()) return six;
        if (is_square()) largest = shared.square_max[square];
        const Scaled four = F::template scale<true>(arg.scaling.over(largest), arg.rule, tensor);
        u32 of_six, of_four;
        if (is_square()) {
            of_six = shared.square_lost[0][square];
            of_four = shared.square_lost[1][square];
        } else {
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) x[i] = value(i);
            of_six = F::lost(x, six, six, tensor, arg.scaling.candidates == 1);
            of_four = F::lost(x, four, six, tensor, arg.scaling.candidates == 1);
        }
        return of_four < of_six ? four : six;
    }

    /// Corrects the record of a block of sixteen values after
    /// the values are rounded. The first value is at (row, col).
    template <class Value>
    __device__ __forceinline__ void correct(Scaled& scale, UnitBits& bits, int matrix, int row, int col, bool is_padding, const Value& value) const {
        if (arg.scaling.corrects == 0 || is_padding || scale.is_nan()) return;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = value(i);
        scale.record = F::corrected(x, scale, bits.of(element(matrix, row, col)));
    }

    /// For sixteen values of a row or column, which start at (row, col) of the tile: loads the largest magnitudes of the 4 x 4
    /// blocks (`amax`) and of the 8 x 8 blocks (`eighth`) that contain these values. They decide the second- and third-level scales.
    template <bool kDown>
    __device__ __forceinline__ void octave_maxima(int row, int col, u32 (&amax)[kFactors], u32 (&eighth)[2]) const {
        static_assert(kFactors == 4, "four values have an octave");
#pragma unroll
        for (int i = 0; i < 4; ++i) amax[i] = shared.quad_max[(row / 4 + (kDown ? i : 0)) * 32 + col / 4 + (kDown ? 0 : i)];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32* const quads = shared.quad_max + (row / 8 + (kDown ? i : 0)) * 64 + (col / 8 + (kDown ? 0 : i)) * 2;
            eighth[i] = max(max(quads[0], quads[1]), max(quads[32], quads[33]));
        }
    }

    /// Returns the index of an element, for random bits.
    __device__ __forceinline__ u64 element(int matrix, int row, int col) const { return rounding.first + arg.number_of(matrix, row) * arg.cols + col; }

    __device__ __forceinline__ Decision decision(UnitBits& bits, int matrix, int row, int col) const {
        const bool draws = arg.policy == kStochastic || arg.policy == kDither;
        return {arg.policy, rounding.delta_q16, draws ? bits.of(element(matrix, row, col)) : 0};
    }

    /// The complements of the random bits for sixteen rows of this thread's two columns.
    /// Random bits are generated for eight columns, which four lanes share. Each of the four
    /// lanes generates the random bits of every fourth row, and the lanes exchange these bits.
    __device__ __forceinline__ void draw_rows(const Stream& stream, int matrix, int row, int col, u32 (&drawn)[16]) const {
        const int mine = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            RandomBits bits = stream.complements(element(matrix, row + i + mine, col / 8 * 8)).bits(0);
            // Transposes 4 x 4 words over the four lanes: lanes 1 apart exchange first, then lanes 2 apart.
            u32(&w)[4] = bits.word;
            const bool odd = mine & 1, upper = mine & 2;
            const u32 a = __shfl_xor_sync(kAllLanes, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(kAllLanes, odd ? w[2] : w[3], 1);
            const u32 of[4] = {odd ? a : w[0], odd ? w[1] : a, odd ? b : w[2], odd ? w[3] : b};
            const u32 c = __shfl_xor_sync(kAllLanes, upper ? of[0] : of[2], 2), d = __shfl_xor_sync(kAllLanes, upper ? of[1] : of[3], 2);
            drawn[i] = upper ? c : of[0];
            drawn[i + 1] = upper ? d : of[1];
            drawn[i + 2] = upper ? of[2] : c;
            drawn[i + 3] = upper ? of[3] : d;
        }
    }

    /// Encodes sixteen values, which are the `which`-th sixteen of their block, to `words`. Returns
    /// whether any code is not zero. `amax` has the largest magnitudes of their parts. `eighth`,
    /// for 2-D blocks only, has those of pairs of parts. The record bits of these parts are added
    /// to `of_parts`. Under a NaN scale the codes are undefined; `clear` makes them zeros.
    template <class Decide>
    __device__ __forceinline__ bool encode_sixteen(const float (&v)[16], const u32 (&amax)[kFactors], const u32 (&eighth)[2], const Scaled& scale,
                                                   Record<F>& of_parts, int which, u32* words, const Decide& decide) const {
        float factor[kFactors];
        if constexpr (kInSquares<F> && F::kChosen) {
            of_parts |= F::refine_in_square(scale.inverse, amax, eighth, which * kFactors, factor, arg.scaling.high, arg.scaling.low);
        } else if constexpr (kInSquares<F>) {
            of_parts |= F::refine_in_square(scale.inverse, amax, eighth, which * kFactors, factor);
        } else if constexpr (F::kChosen && F::kThresholds) {
            of_parts |= F::refine(scale.inverse, amax, which * kFactors, factor, arg.scaling.high, arg.scaling.low);
        } else if constexpr (kPartsHaveScales<F> && F::kChosen) {
            const u32 over[1] = {arg.scaling.over(amax[0])};
            of_parts |= F::refine(scale.inverse, over, which, factor);
        } else if constexpr (kHasParts<F>) {
            of_parts |= F::refine(scale.inverse, amax, which * kFactors, factor);
        } else {
            factor[0] = scale.inverse;
        }
        u32 of[kWords];
        const bool any = F::template encode<kRound, kWithin>(v, factor, of, decide);
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = of[i];
        return any;
    }

    /// Encodes the two halves of a block of 64 values together: the low halves of words belong to the first 32 values, the high halves to the others.
    __device__ __forceinline__ Scaled row_in_pairs(const Sixteen<In> (&x)[4], u8* to, bool& any) const {
        u32 amax[8], factor[8];  // values of parts i and i + 8
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 a = x[i / 4].template largest_pair<2>(i % 4 * 2), b = x[2 + i / 4].template largest_pair<2>(i % 4 * 2);
            amax[i] = ptx::magnitudes_bf16x2(ptx::max_magnitude_bf16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)));
        }
        const u32 two = largest_of(amax);
        Scaled scale = F::scale(max(two << 16, two & 0xFFFF0000), arg.rule, {1.0f, 1.0f});
        const u32 inverse = __float_as_uint(scale.inverse);
        const u32 octaves = F::refine_pairs(__byte_perm(inverse, inverse, 0x3232), amax, factor);
        const bool is_nan = scale.is_nan();
        if (!is_nan) scale.record |= F::octaves_of_half(octaves, 0) | F::octaves_of_half(octaves >> 16, 1);
        u32 seen = 0, words[kHeld];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int part = i % 2 * 4 + 2 * j, pick = i < 2 ? 0x1010 : 0x3232;
                const u32 f0 = __byte_perm(factor[part], 0, pick), f1 = __byte_perm(factor[part + 1], 0, pick);
                const u32(&p)[8] = x[i].pair;
                u32& eight = words[i % 2 * 2 + j];
                eight = F::Element::template eight<kRound>({p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]}, {f0, f0, f1, f1});
                seen |= eight;
            }
            put(to, i, words);
        }
        any = (seen & 0x77777777) != 0;
        return scale;
    }

    /// Encodes half a block of 64 values for each of two columns together. Another lane has
    /// the other half of both blocks; each of the two lanes computes the scale of one column.
    __device__ __forceinline__ void columns_in_pairs(const TwoColumns<In> (&x)[2], u8* to, Scaled (&scale)[2], bool (&any)[2]) const {
        u32 amax[8], factor[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) amax[i] = ptx::magnitudes_bf16x2(x[i / 4].template largest_pair<4>(i % 4 * 4));
        u32 two = largest_of(amax);
        two = ptx::max_u16x2(two, __shfl_xor_sync(kAllLanes, two, 8));
        const bool second = threadIdx.x & 8;
        Scaled mine = F::scale(second ? two & 0xFFFF0000 : two << 16, arg.rule, {1.0f, 1.0f});
        const Scaled other{__shfl_xor_sync(kAllLanes, mine.record, 8), __shfl_xor_sync(kAllLanes, mine.inverse, 8)};
        scale[0] = second ? other : mine;
        scale[1] = second ? mine : other;
        const u32 inverse = __byte_perm(__float_as_uint(scale[0].inverse), __float_as_uint(scale[1].inverse), 0x7632);
        const u32 octaves = F::refine_pairs(inverse, amax, factor);
        // Each word has codes of four rows of two columns, one column in each half.
        u32 rows[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32(&r)[16] = x[i / 4].row;
            rows[i] = F::Element::template four_rows<kRound>({r[i % 4 * 4], r[i % 4 * 4 + 1], r[i % 4 * 4 + 2], r[i % 4 * 4 + 3]}, factor[i]);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const bool is_nan = scale[c].is_nan();
            u32 words[4], seen = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[i] = __byte_perm(rows[2 * i], rows[2 * i + 1], c == 0 ? 0x5410 : 0x7632);
                seen |= words[i];
            }
            this->store_words(to + c * Records::kNextColumn, words);
            any[c] = (seen & 0x77777777) != 0;
            u32 of_half = is_nan ? 0 : F::octaves_of_half(c == 0 ? octaves : octaves >> 16, second);
            // Bit 0 carries `any`, because octaves do not use that bit.
            static_assert(F::kBlock == 64);
            of_half |= __shfl_xor_sync(kAllLanes, of_half | u32(any[c]), 8);
            any[c] |= of_half & 1;
            scale[c].record |= of_half & ~1u;
        }
    }

    __device__ __forceinline__ static u32 largest_of(const u32 (&amax)[8]) {
        u32 largest = amax[0];
#pragma unroll
        for (int i = 1; i < 8; ++i) largest = ptx::max_u16x2(largest, amax[i]);
        return largest;
    }

    /// The encoder calls this function when the codes of sixteen `i` of a row or column are
    /// complete. It stores 32 codes after every second sixteen (kAny: 16 codes after every sixteen).
    __device__ __forceinline__ static void put(u8* to, int i, const u32 (&words)[kHeld]) {
        if constexpr (kAny) Records::store_words(to + i * (2 * kBits), words);
        else if (i % 2 == 1) Records::store_words(to + i / 2 * (4 * kBits), words);
    }
};

}  // namespace nib
