// BF16 or F32 -> blocks of any format, along the rows, down the columns, both from one read, or square tiles; every rule and rounding.
//
// quantize_units<F, In, kRound, kAcross>: x [stack * rows][cols]. F: of formats/all.cuh. kRound: kNearestEven, kNearestAway where F has a way of its
//   own for it, or kAnyRounding: `policy`. kAcross: 2 for every form, or 16 for rows alone, whose tiles are then 16 x 1024.
//   256 threads; grid stack * ceil(lines / (256 / kAcross)) * ceil(cols / (64 * kAcross)), lines = capacity where columns are written, else rows.
//   Bands of `band` tiles are done side by side. sizeof(QuantizeUnitsShared<F, In, kAcross>) dynamic shared memory.
//
//   form kFormRows: row_codes [stack * rows][cols] and records of ceil(cols / kBlock) blocks a row.
//   form kFormCols: col_codes [stack * cols][capacity] and records of ceil(capacity / kBlock) blocks, zeros from `rows` on. Both: either.
//   form kFormTiles: row_codes as in kFormRows, col_codes [stack * cols][rows], one record for kBlock x kBlock; capacity = rows.
//   row_id (null: every row counts): row r counts if row_id[r & id_mask] is not negative; what does not count reads as zero, has the least
//   record, and is not counted in `counts`. It is the row's number for random bits, else its position is.
//   Formats with a scale for a line take `row_amax` and `col_amax`, bits of the largest magnitude of each line, and leave in `row_any` and
//   `col_any` whether it has a non-zero code; columns have these for each span of rows (`span_of_row`; one if null), and a record for each
//   `column_record` rows: 128, which groups start at multiples of, or all of them. Those with one for a tensor take `tensor`, by the span of a
//   row: `span_of_row`, or its matrix if null.
//   With `found` (a tensor's scale alone, of earlier steps): the bits of the largest magnitude of each of `found_spans` spans, zeros before; a NaN
//   where a value is not finite. found_counts[0] += the finite values that are larger than `unit` of their span.
//
// A thread encodes 64 values of a row, then of a column. It reads them from shared memory, where the tile was brought in the background, and
// leaves the codes there, so that both ways memory sees lines of at least 128 bytes.
#pragma once
#include "math/philox.cuh"
#include "pieces/convert/units.cuh"
#include "formats/rounding.cuh"

namespace nib {

constexpr int kFormRows = 1;
constexpr int kFormCols = 2;
constexpr int kFormTiles = 4;

/// `UnitsArg` of the launch.
struct UnitsArg {
    const u8* x;
    u8* row_codes;
    u8* col_codes;
    RecordPlane row_records, col_records;
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
    int rows, cols, capacity, stack;
    int form, policy, band, id_mask;
    u32 x_aligned, rows_aligned, cols_aligned;
    int found_spans;
    u32 column_record;  // rows of a column that a record stands for, of formats with a scale for a line
    ScaleArg rule;

    __device__ __forceinline__ bool counts_row(int row) const { return row < rows && (row_id == nullptr || __ldg(row_id + (row & id_mask)) >= 0); }
    /// The number of a row for random bits.
    __device__ __forceinline__ u64 number_of(int matrix, int row) const {
        return row_id == nullptr || row >= rows ? u64(matrix) * rows + row : u64(max(__ldg(row_id + row), 0));
    }
    __device__ __forceinline__ int span_of(int row) const { return span_of_row == nullptr ? 0 : __ldg(span_of_row + min(row, rows - 1)); }
    /// Which of a line's maxima is a row's.
    __device__ __forceinline__ u64 maximum_of(bool down, u64 line, int row) const {
        return down ? u64(span_of(row)) * (u64(stack) * cols) + line : line;
    }
    __device__ __forceinline__ TensorInverse tensor_of(int matrix, int row) const {
        if (tensor == nullptr) return {1.0f, 1.0f};
        const float2 of = __ldg(reinterpret_cast<const float2*>(tensor) + tensor_span(matrix, row));
        return {of.x, of.y};
    }
    __device__ __forceinline__ int tensor_span(int matrix, int row) const {
        return span_of_row == nullptr ? matrix : __ldg(span_of_row + min(row, rows - 1));
    }
};

template <class F, class In, int kAcross>
struct alignas(16) QuantizeUnitsShared {
    UnitValues<In, kAcross> values;
    UnitCodes<F> codes;
    u32 square_max[64];  // of square tiles, those of a row of tiles after the other
    u32 square_any[64];
    u32 total[3];
};

/// Where a unit lies, and what is known of its line.
struct UnitLine {
    int matrix, row, col;  // of its first value
    bool down;             // along a column
    bool exists;
    u32 partner;           // the lane that has the other half of a block of 128, by exclusive or

    __device__ __forceinline__ bool is_second() const { return (threadIdx.x & partner) != 0; }
};

/// Random bits of the values of a unit, one at a time.
struct UnitBits {
    Stream stream;
    u64 q;  // of the block of eight numbers that was drawn last
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

/// Values [first, first + kCount) of a row's unit, or of a column's.
template <class In, int kAcross, int kCount>
__device__ __forceinline__ void read_values(UnitValues<In, kAcross>& values, bool down, int u, int first, float (&v)[kCount]) {
    if (!down) {
        const u8* const from = values.unit(u) + first * In::kBytes;
#pragma unroll
        for (int i = 0; i < kCount / 8; ++i) {
            const auto eight = In::load_shared(from + i * 8 * In::kBytes);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[8 * i + j] = In::value(eight, j);
        }
    } else {
        // Of column u / 2, from the upper or the lower half.
        const u8* const from = values.value(u % 2 * kUnit, u / 2) + first * (2 * UnitValues<In, kAcross>::kStride);
#pragma unroll
        for (int i = 0; i < kCount; ++i) v[i] = In::number(from + i * (2 * UnitValues<In, kAcross>::kStride));
    }
}

/// The bits of the largest magnitudes of the parts of some values.
template <int kPart, int kCount>
__device__ __forceinline__ void part_maxima(const float (&v)[kCount], u32 (&amax)[kCount / kPart < 1 ? 1 : kCount / kPart]) {
    constexpr int kEach = kPart < kCount ? kPart : kCount;
#pragma unroll
    for (int p = 0; p < kCount / kEach; ++p) {
        float largest = v[p * kEach];
#pragma unroll
        for (int i = 1; i < kEach; ++i) largest = ptx::max_magnitude(largest, v[p * kEach + i]);
        amax[p] = __float_as_uint(largest) & 0x7FFFFFFF;
    }
}

/// The bits of the largest magnitude of some BF16 values of a row's unit, two at a time.
template <int kAcross, int kCount>
__device__ __forceinline__ u32 row_maximum(UnitValues<Bf16, kAcross>& values, int u, int first) {
    const uint4* const from = reinterpret_cast<const uint4*>(values.unit(u) + first * Bf16::kBytes);
    u32 two = 0;
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
        const uint4 w = from[i];
        const u32 a = ptx::max_magnitude_bf16x2(w.x, w.y), b = ptx::max_magnitude_bf16x2(w.z, w.w);
        two = ptx::max_magnitude_bf16x2(two, ptx::max_magnitude_bf16x2(a, b));
    }
    return max(two << 16 & 0x7FFFFFFF, two & 0x7FFF0000);
}

template <class F, class In, int kRound, int kAcross>
struct UnitEncoder {
    static constexpr int kStep = F::kBlock < kUnit ? F::kBlock : kUnit;  // values that are encoded under one record at a time
    static constexpr int kParts = F::kPart < kStep ? kStep / F::kPart : 1;
    static constexpr int kWords = 16 * F::Element::kBits / 32;           // of sixteen codes
    using Shared = QuantizeUnitsShared<F, In, kAcross>;

    const UnitsArg& arg;
    const RoundingArg& rounding;
    Shared& shared;
    Tally& tally;

    /// One unit: u of the tile's rows or columns, to the codes of shared memory and to the records.
    template <bool kDown>
    __device__ __forceinline__ void encode(const UnitLine& at, int u) const {
        const bool has_counts = !at.down || arg.form == kFormCols;
        const u64 line = at.down ? u64(at.matrix) * arg.cols + at.col : u64(at.matrix) * arg.rows + at.row;
        const RecordPlane& records = kDown ? arg.col_records : arg.row_records;
        u8* const to = shared.codes.unit(u);
        UnitBits bits(rounding);
        constexpr bool kSquares = F::kTiles && kAcross == 2;
        // Of a row they follow from its number alone.
        const bool row_is_padding = !kDown && at.exists && !arg.counts_row(at.row);
        TensorInverse tensor{1.0f, 1.0f};
        if constexpr (F::kTensor && !kDown) tensor = arg.tensor_of(at.matrix, at.row);
        // A row's bytes are stored as one word where its blocks are as many.
        constexpr int kSteps = kUnit / kStep;
        constexpr bool kTogether = !kDown && F::kScaleBytes == 1 && !F::kLine && F::kBlock < kUnit;
        const bool together = kTogether && at.exists && !is_square() && arg.cols - at.col >= kUnit && arg.row_records.line_stride % kSteps == 0;
        u32 word = 0;
#pragma unroll(kRound == kAnyRounding ? 1 : kUnit / kStep)
        for (int step = 0; step < kUnit / kStep; ++step) {
            const int first = step * kStep, position = (at.down ? at.row : at.col) + first;
            const bool exists = at.exists && position < (at.down ? arg.capacity : arg.cols);
            const bool is_padding = kDown ? at.exists && !arg.counts_row(at.row + first) : row_is_padding;
            float v[kStep];
            read_values<In, kAcross>(shared.values, kDown, u, first, v);
            u32 amax[kParts];
            if constexpr (!kDown && In::kBytes == 2 && F::kPart >= 16) amax[0] = row_maximum<kAcross, kStep>(shared.values, u, first);
            else part_maxima<F::kPart>(v, amax);
            const int square = at.down ? (u % 2 * kUnit + first) / F::kBlock * 8 + u / 2 / F::kBlock
                                       : u / kAcross / F::kBlock * 8 + (u % kAcross * kUnit + first) / F::kBlock;
            if constexpr (F::kBlock == 128) amax[0] = max(amax[0], __shfl_xor_sync(kAllLanes, amax[0], at.partner));
            if constexpr (kSquares) amax[0] = is_square() ? shared.square_max[square & 63] : amax[0];
            if constexpr (F::kLine) amax[0] = at.exists ? __ldg((at.down ? arg.col_amax : arg.row_amax) + arg.maximum_of(at.down, line, position)) : 0;
            if constexpr (F::kTensor && kDown) tensor = arg.tensor_of(at.matrix, at.row + first);
            Scaled scale = F::scale(amax, arg.rule, tensor);
            const bool is_nan = scale.is_nan() && !is_padding;
            if (is_padding) scale = {least(), 1.0f};
            bool any = false;
#pragma unroll(kRound == kAnyRounding ? 1 : kStep / 16)
            for (int sixteen = 0; sixteen < kStep / 16; ++sixteen) {
                constexpr int kFactors = F::kPart < 16 ? 16 / F::kPart : 1;
                float x[16], factor[kFactors];
                u32 words[kWords];
                if constexpr (kRound == kAnyRounding) {
                    // Again, since registers are not indexed.
                    read_values<In, kAcross>(shared.values, kDown, u, first + sixteen * 16, x);
                } else {
#pragma unroll
                    for (int i = 0; i < 16; ++i) x[i] = v[sixteen * 16 + i];
                }
#pragma unroll
                for (int i = 0; i < kFactors; ++i) factor[i] = F::factor(scale, sixteen * 16 / F::kPart + i);
                const auto decide = [&](int i) {
                    const int along = first + sixteen * 16 + i;
                    const u64 number = arg.number_of(at.matrix, at.down ? at.row + along : at.row);
                    const bool draws = arg.policy == kStochastic || arg.policy == kDither;
                    const u64 element = number * arg.cols + (at.down ? at.col : at.col + along);
                    return Decision{arg.policy, rounding.delta_q16, draws ? bits.of(element) : 0};
                };
                any |= F::template encode<kRound>(x, factor, words, decide);
#pragma unroll
                for (int i = 0; i < kWords; ++i) words[i] = is_nan ? 0 : words[i];
                store_words(to + (first + sixteen * 16) * F::Element::kBits / 8, words);
            }
            if constexpr (F::kTensor && F::kScaleBytes == 0) {
                if (arg.found != nullptr && has_counts) note<kDown>(at, u, first, exists && !is_padding, amax[0]);
            }
            any &= !is_nan;
            if constexpr (F::kBlock == 128) any |= __shfl_xor_sync(kAllLanes, int(any), at.partner) != 0;
            if (kTogether && together) {
                word |= scale.record << (8 * step);
                tally.non_zero += has_counts && any && !is_padding;
                tally.non_finite += has_counts && is_nan;
                continue;
            }
            if (!exists) continue;
            settle(at, {line, position, square}, scale.record, any && !is_padding, is_nan, has_counts, records);
        }
        if constexpr (kTogether) {
            u8* const first = records.records + line * records.line_stride + at.col / F::kBlock;
            if (!together) return;
            if constexpr (kSteps == 4) *reinterpret_cast<u32*>(first) = word;
            else *reinterpret_cast<u16*>(first) = u16(word);
        }
    }

private:
    __device__ __forceinline__ bool is_square() const { return F::kTiles && kAcross == 2 && arg.form == kFormTiles; }

    /// What was found of the values of a step of a unit, the largest of which is `amax`. All threads of a warp come here.
    template <bool kDown>
    __device__ __forceinline__ void note(const UnitLine& at, int u, int first, bool counts, u32 amax) const {
        const int row = at.row + (kDown ? first : 0);
        int span = counts ? arg.tensor_span(at.matrix, row) : -1;
        if (unsigned(span) >= unsigned(arg.found_spans)) span = -1;
        u32 bits = span < 0 ? 0 : amax >= kInfinityBits ? kNanBits : amax;
        const float expected = span < 0 ? 0.0f : arg.tensor_of(at.matrix, row).unit;
        u32 larger = 0;
        if (span >= 0 && !(__uint_as_float(amax) <= expected)) {
            // Again, since registers are not indexed, and this is rare.
#pragma unroll 1
            for (int sixteen = 0; sixteen < kStep / 16; ++sixteen) {
                float x[16];
                read_values<In, kAcross>(shared.values, kDown, u, first + sixteen * 16, x);
#pragma unroll
                for (int i = 0; i < 16; ++i) larger += fabsf(x[i]) > expected && (__float_as_uint(x[i]) & 0x7FFFFFFF) < kInfinityBits;
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
        // Most are smaller than what is there already.
        if (bits != 0 && bits > *const_cast<volatile u32*>(arg.found + span)) atomicMax(arg.found + span, bits);
    }

    struct Place {
        u64 line;
        int position, square;
    };

    /// The least record, of padding.
    __device__ __forceinline__ static u32 least() { return F::kScaleBytes == 4 && F::kPart >= 16 ? 0x00800000 : 0; }

    /// Writes a block's record and counts it, once.
    __device__ __forceinline__ void settle(const UnitLine& at, const Place& place, u32 record, bool any, bool is_nan, bool has_counts,
                                           const RecordPlane& records) const {
        if constexpr (F::kLine) {
            const int each = at.down ? int(arg.column_record) : arg.cols, at_record = place.position % each;
            if (any) (at.down ? arg.col_any : arg.row_any)[arg.maximum_of(at.down, place.line, place.position)] = 1;
            if (at_record != 0) return;
            records.template store<F::kScaleBytes>(place.line, place.position / each, record);
            // A line, or its part within a group, counts once.
            const bool first = place.position == 0 || arg.span_of(place.position) != arg.span_of(place.position - 1);
            tally.non_finite += has_counts && is_nan && first;
            return;
        }
        if (F::kBlock == 128 && at.is_second()) return;
        const int block = place.position / F::kBlock;
        if constexpr (F::kTiles && kAcross == 2) {
            if (is_square()) {
                if (any && !at.down) shared.square_any[place.square & 63] = 1;
                const int across = at.down ? at.col : at.row;
                if (across % F::kBlock != 0) return;
                const u64 tiles = u64(ceil_div(at.down ? arg.cols : arg.rows, F::kBlock));
                records.template store<F::kScaleBytes>(at.matrix * tiles + across / F::kBlock, block, record);
                tally.non_finite += !at.down && is_nan;
                return;
            }
        }
        records.template store<F::kScaleBytes>(place.line, block, record);
        tally.non_zero += has_counts && any;
        tally.non_finite += has_counts && is_nan;
    }

    __device__ __forceinline__ static void store_words(u8* to, const u32 (&words)[kWords]) {
        if constexpr (kWords == 4) *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
        else if constexpr (kWords == 2) *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
        else {
#pragma unroll
            for (int i = 0; i < kWords; ++i) reinterpret_cast<u32*>(to)[i] = words[i];
        }
    }
};

/// Brings a tile to shared memory: zeros where nothing is, or counts.
template <class In, int kAcross>
__device__ __forceinline__ void fetch_tile(UnitValues<In, kAcross>& values, const UnitsArg& arg, int matrix, int first_row, int first_col) {
    using Values = UnitValues<In, kAcross>;
    constexpr int kNumbers = 16 / In::kBytes;
    int row = first_row + threadIdx.x / Values::kPerRow;
    const int col = first_col + threadIdx.x % Values::kPerRow * kNumbers;
    const u64 step = u64(Values::kRowsAtOnce) * arg.cols * In::kBytes;
    const u8* from = arg.x + ((u64(matrix) * arg.rows + row) * arg.cols + col) * In::kBytes;
    if (arg.x_aligned) {
#pragma unroll
        for (int i = 0; i < Values::kPasses; ++i) {
            bool present = col < arg.cols && row < arg.rows;
            if (arg.row_id != nullptr) present = present && arg.counts_row(row);
            // Where nothing is copied nothing is read, wherever that is.
            ptx::copy_16_async(values.moved(i), from, present);
            from += step;
            row += Values::kRowsAtOnce;
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
    ptx::copies_wait();
}

template <class F, class In, int kRound, int kAcross>
__global__ void __launch_bounds__(kUnitThreads, In::kBytes == 2 && F::kPart >= 16 ? 3 : 2) quantize_units(const UnitsArg arg, const RoundingArg rounding) {
    extern __shared__ uint4 raw[];
    using Shared = QuantizeUnitsShared<F, In, kAcross>;
    using Values = UnitValues<In, kAcross>;
    constexpr int kBits = F::Element::kBits;
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const bool has_cols = arg.form != kFormRows, is_square = arg.form == kFormTiles, has_rows = arg.form != kFormCols;
    const int across = ceil_div(arg.cols, Values::kCols), down = ceil_div(has_cols ? arg.capacity : arg.rows, Values::kRows);
    const int matrix = blockIdx.x / (across * down);
    const TilePlace at(int(blockIdx.x) - matrix * across * down, across, down, arg.band);
    const int first_row = at.strip * Values::kRows, first_col = at.panel * Values::kCols;
    Tally tally;
    const UnitEncoder<F, In, kRound, kAcross> encoder{arg, rounding, shared, tally};

    if (threadIdx.x < 64) {
        shared.square_max[threadIdx.x] = 0;
        shared.square_any[threadIdx.x] = 0;
    }
    fetch_tile<In, kAcross>(shared.values, arg, matrix, first_row, first_col);
    __syncthreads();
    if constexpr (F::kTiles && kAcross == 2) {
        if (is_square) {
            constexpr int kSide = F::kBlock < kUnit ? F::kBlock : kUnit;
#pragma unroll 1
            for (int first = 0; first < kUnit; first += kSide) {
                float v[kSide];
                read_values<In, kAcross>(shared.values, false, threadIdx.x, first, v);
                u32 amax[1];
                part_maxima<kSide>(v, amax);
                const int col = threadIdx.x % 2 * kUnit + first;
                atomicMax(&shared.square_max[threadIdx.x / 2 / F::kBlock * 8 + col / F::kBlock], amax[0]);
            }
            __syncthreads();
        }
    }
    if (has_rows) {
        const int u = threadIdx.x, row = first_row + u / kAcross, col = first_col + u % kAcross * kUnit;
        encoder.template encode<false>({matrix, row, col, false, row < arg.rows && col < arg.cols, 1}, u);
        __syncthreads();
        const u64 line_bytes = code_bytes(kBits, arg.cols), first_byte = u64(first_col) * kBits / 8;
        shared.codes.template store<kAcross>(arg.row_codes + (u64(matrix) * arg.rows + first_row) * line_bytes + first_byte, line_bytes,
                                             arg.rows - first_row, int(line_bytes - first_byte), arg.rows_aligned);
        if (is_square && threadIdx.x < 64) tally.non_zero += shared.square_any[threadIdx.x] != 0;
    }
    if constexpr (kAcross == 2) {
        if (has_cols) {
            if (has_rows) __syncthreads();
            // Sixteen neighbouring columns a warp, each from its upper and its lower half.
            const int lane = threadIdx.x % 32, in_tile = threadIdx.x / 32 * 16 + lane % 16, half = lane / 16;
            const int col = first_col + in_tile, row = first_row + half * kUnit;
            encoder.template encode<true>({matrix, row, col, true, row < arg.capacity && col < arg.cols, 16}, in_tile * 2 + half);
            __syncthreads();
            const u64 line_bytes = code_bytes(kBits, arg.capacity), first_byte = u64(first_row) * kBits / 8;
            shared.codes.template store<2>(arg.col_codes + (u64(matrix) * arg.cols + first_col) * line_bytes + first_byte, line_bytes,
                                           arg.cols - first_col, int(line_bytes - first_byte), arg.cols_aligned);
        }
    }
    tally.flush(arg.counts, shared.total);
}

}  // namespace nib
