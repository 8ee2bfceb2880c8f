// Decodes codes to plain values. dequantize_units and the kernels that quantize and decode in one pass share this code.
#pragma once
#include "formats/plain.cuh"
#include "pieces/convert/units.cuh"

namespace nib {

/// The position of a thread's unit of codes in a tile that has kAcross units per row or column. kDown: codes
/// are stored by column; a warp has sixteen columns, and a lane has the upper or the lower half of one column.
template <int kAcross, bool kDown>
struct DecodedPlace {
    int u;            // index of the unit in the tile
    int line, place;  // position of the unit's first value in the tile

    __device__ __forceinline__ DecodedPlace() {
        const int lane = threadIdx.x % 32, in_tile = threadIdx.x / 32 * 16 + lane % 16, half = lane / 16;
        u = kDown ? in_tile * 2 + half : threadIdx.x;
        line = u / kAcross;
        place = u % kAcross * kUnit;
    }
};

/// The number of values per record, but at most the number of values of a unit.
template <class F>
constexpr int kRecorded = F::kBlock < kUnit ? F::kBlock : kUnit;

/// Returns the record of the unit at position `place` of its row or column.
/// If a block has two units, the parts of this unit come first in the result.
template <class F>
__device__ __forceinline__ Record<F> record_of_unit(Record<F> record, int place) {
    if constexpr (kPartsHaveScales<F>) {
        constexpr int kBits = kUnit / F::kPart * F::kPartBits;
        return place % F::kBlock < kUnit ? record : (record >> kBits & ~Record<F>(0xFF)) | (record & 0xFF);
    }
    return record;
}

/// Decodes unit `u` of a tile with the given records to plain values. `scaled(i, value)` maps value i to the result.
template <class F, class Out, bool kDown, int kAcross, class Scaled>
__device__ __forceinline__ void decode_unit(const u8* codes, const Record<F> (&record)[kUnit / kRecorded<F>], UnitValues<Out, kAcross>& values, int u,
                                            const Scaled& scaled) {
    constexpr int kBits = F::Element::kBits, kBlock = kRecorded<F>;
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
        for (int i = 0; i < 16; ++i) value[i] = scaled(sixteen * 16 + i, __fmul_rn(value[i], factor[i * kFactors / 16]));
        if constexpr (kDown) {
            u8* to[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = values.value(u % 2 * kUnit + sixteen * 16 + i, u / 2);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float one[1] = {value[i]};
                Few<Out, 1>::from_f32(one).store(to[i % 4] + i / 4 * (8 * UnitValues<Out, kAcross>::kUnitBytes));
            }
        } else {
            constexpr int kFew = 16 / Out::kBytes;
#pragma unroll
            for (int part = 0; part < 16; part += kFew) {
                float few[kFew];
#pragma unroll
                for (int i = 0; i < kFew; ++i) few[i] = value[part + i];
                Few<Out, kFew>::from_f32(few).store(values.vector(u, (sixteen * 16 + part) / kFew));
            }
        }
    }
}

/// Stores the plain values of a tile to the matrix `out` [rows][cols]; the tile
/// begins at (first_row, first_col). is_aligned: rows are multiples of 16 bytes.
template <class Out, int kAcross>
__device__ __forceinline__ void store_decoded(UnitValues<Out, kAcross>& values, u8* out, int first_row, int first_col, int rows, int cols, bool is_aligned) {
    using Values = UnitValues<Out, kAcross>;
    constexpr int kNumbers = 16 / Out::kBytes;
    const int row = first_row + threadIdx.x / Values::kPerRow, col = first_col + threadIdx.x % Values::kPerRow * kNumbers;
    if (col >= cols) return;
    const u64 step = u64(Values::kRowsAtOnce) * cols * Out::kBytes;
    u8* to = out + (u64(row) * cols + col) * Out::kBytes;
    if (is_aligned) {
#pragma unroll
        for (int i = 0; i < Values::kPasses; ++i) {
            if (row + i * Values::kRowsAtOnce < rows) ptx::store_16(to, *reinterpret_cast<const uint4*>(values.moved(i)));
            to += step;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < Values::kPasses && row + i * Values::kRowsAtOnce < rows; ++i) {
            const u8* const from = values.moved(i);
            for (int n = 0; n < min(cols - col, kNumbers); ++n) {
                if constexpr (Out::kBytes == 2) reinterpret_cast<u16*>(to)[n] = reinterpret_cast<const u16*>(from)[n];
                else reinterpret_cast<u32*>(to)[n] = reinterpret_cast<const u32*>(from)[n];
            }
            to += step;
        }
    }
}

}  // namespace nib
