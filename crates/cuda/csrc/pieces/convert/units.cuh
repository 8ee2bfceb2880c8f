// A unit is 64 adjacent values of a row or column; each of 256 threads has one unit. quantize_units and
// dequantize_units share this code.
//
// A tile has 16384 values: 16 rows of 1024, or 128 rows of 128. In shared memory plain values are stored unit by unit
// along the rows. The 16-byte vectors of a unit are swizzled (`key`), so that threads that read the same vector of
// their units hit different banks. In tiles of 128 rows, each 32 rows have an additional swizzle, so that sixteen
// columns and the same columns 32 rows below also hit different banks. A swizzle needs no padding, so vectors that
// are adjacent in global memory fill whole 128-byte rows of shared memory. With padded units the L2 moved a third
// more sectors. Codes are stored unit by unit, along the rows or the columns that are written.
#pragma once
#include "formats/all.cuh"  // generated file: includes every header that declares a format
#include "formats/bf16.cuh"
#include "math/reduce.cuh"
#include "pieces/convert/column_tile.cuh"
#include "pieces/convert/unit.cuh"
#include "ptx/global.cuh"
#include "ptx/thread.cuh"

namespace nib {

constexpr int kUnitThreads = 256;
constexpr int kColumnRecord = 128;  // number of rows of a column per record, in formats with one scale per row or column

/// The plain values of a tile that has kAcross units per row.
template <class T, int kAcross>
struct UnitValues {
    static constexpr int kUnitBytes = kUnit * T::kBytes;
    static constexpr int kRows = kUnitThreads / kAcross, kCols = kAcross * kUnit;
    static constexpr int kVectors = kUnitBytes / 16;  // number of 16-byte vectors per unit

    u8 bytes[kUnitThreads * kUnitBytes];

    /// The number of vectors per row, the number of rows that all threads together move in one pass, and the number of passes.
    static constexpr int kPerRow = kAcross * kVectors, kRowsAtOnce = kUnitThreads / kPerRow, kPasses = kRows / kRowsAtOnce;

    /// Returns the swizzle of unit `u`, with which the byte offsets of the unit's vectors are XORed.
    __device__ __forceinline__ static int key(int u) { return ((u ^ u / 64 * T::kBytes) & 7) * 16; }

    /// Returns the address of vector `i` of a unit.
    __device__ __forceinline__ u8* vector(int u, int i) { return bytes + u * kUnitBytes + (i * 16 ^ key(u)); }
    /// Returns the address of the vector that a thread moves in pass `i`.
    __device__ __forceinline__ u8* moved(int i) {
        // A pass has a multiple of eight units, so only the part of the key that comes from u / 64 depends on the pass.
        constexpr int kUnits = kUnitThreads / kVectors;
        static_assert(kUnits % 8 == 0 && 64 % kUnits == 0);
        const int u = threadIdx.x / kVectors, first = u * kUnitBytes + (threadIdx.x % kVectors * 16 ^ u % 8 * 16);
        return bytes + (first ^ (i * kUnits / 64 * T::kBytes & 7) * 16) + i * kUnits * kUnitBytes;
    }
    /// Returns the address of value `col` of row `row` of the tile.
    __device__ __forceinline__ u8* value(int row, int col) {
        const int u = row * kAcross + col / kUnit, byte = col % kUnit * T::kBytes;
        return bytes + u * kUnitBytes + (byte ^ key(u));
    }

    /// The addresses of the values in column `col` of 32 rows. The index of
    /// the first row is a multiple of 32. The swizzle repeats after four rows.
    struct Rows {
        static constexpr int kNext = 4 * kAcross * kUnitBytes;  // distance from a row to the fourth row below it
        u8* at[4];
    };
    __device__ __forceinline__ Rows rows_from(int row, int col) {
        static_assert(kAcross == 2, "of the eight keys the next row has the second next one");
        const int u = row * kAcross + col / kUnit, place = col % kUnit * T::kBytes ^ key(u);
        Rows rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.at[i] = bytes + (u + i * kAcross) * kUnitBytes + (place ^ i * kAcross * 16);
        return rows;
    }
};

/// The number of bytes that `codes` codes fill, rounded up.
__device__ __forceinline__ u32 code_bytes(int bits, int codes) { return u32(codes) / 8 * bits + (codes % 8 * bits + 7) / 8; }

/// The codes of a tile.
template <class F>
struct UnitCodes {
    static constexpr int kBytes = kUnit * F::Element::kBits / 8;  // bytes per unit
    static constexpr int kVectors = kBytes / 16;
    static constexpr int kStride = kBytes == 48 ? 48 : kBytes + 16;
    u8 bytes[kUnitThreads * kStride];

    __device__ __forceinline__ u8* unit(int u) { return bytes + u * kStride; }

    /// The 16-byte vectors that a thread moves, if a row has kAcross units: the same vector
    /// of a row in each pass, where each pass is kLines rows below the preceding pass.
    template <int kAcross>
    struct Moved {
        static constexpr int kPerLine = kAcross * kVectors;
        static constexpr int kLines = kPerLine > 128 ? 1 : kPerLine > 64 ? 2 : kPerLine > 32 ? 4 : kPerLine > 4 ? (kPerLine > 8 ? 8 : 32) : 64;
        static constexpr int kPasses = kUnitThreads / kAcross / kLines;
        static_assert(kPerLine * kLines <= kUnitThreads && kPasses * kLines * kAcross == kUnitThreads, "each vector once");
        int line = threadIdx.x / kPerLine, byte, offset;

        __device__ __forceinline__ Moved() {
            const int place = threadIdx.x % kPerLine;
            byte = place / kVectors * kBytes + place % kVectors * 16;
            offset = (line * kAcross + place / kVectors) * kStride + place % kVectors * 16;
        }
        /// Returns the distance in `bytes` from one pass to the next.
        static constexpr int kStep = kLines * kAcross * kStride;
    };

    /// Stores units, kAcross of them per row, to rows of `line_bytes` bytes. The first byte is stored at `to`. There
    /// are `lines` rows, with `bytes_left` bytes in each row. is_aligned: row lengths are multiples of 16 bytes.
    template <int kAcross>
    __device__ __forceinline__ void store(u8* to, u32 line_bytes, int lines, int bytes_left, bool is_aligned) {
        using M = Moved<kAcross>;
        const M mine;
        if ((M::kPerLine * M::kLines < kUnitThreads && mine.line >= M::kLines) || mine.byte >= bytes_left) return;
        u8* at = to + u64(u32(mine.line)) * line_bytes + mine.byte;
        if (is_aligned && lines >= kUnitThreads / kAcross) {
            // In nearly every call all rows exist. With a branch in each pass,
            // the compiler would recompute each address from the beginning.
            const u8* const from = bytes + mine.offset;
#pragma unroll
            for (int i = 0; i < M::kPasses; ++i) {
                ptx::store_16(at, *reinterpret_cast<const uint4*>(from + i * M::kStep));
                at += u64(M::kLines) * line_bytes;
            }
        } else if (is_aligned) {
#pragma unroll
            for (int i = 0; i < M::kPasses; ++i) {
                if (mine.line + i * M::kLines < lines) ptx::store_16(at, *reinterpret_cast<const uint4*>(bytes + mine.offset + i * M::kStep));
                at += u64(M::kLines) * line_bytes;
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < M::kPasses && mine.line + i * M::kLines < lines; ++i) {
                for (int b = 0; b < min(bytes_left - mine.byte, 16); ++b) at[b] = bytes[mine.offset + i * M::kStep + b];
                at += u64(M::kLines) * line_bytes;
            }
        }
    }

    /// Loads units, with zeros where no codes exist; the parameters are those of `store`.
    template <int kAcross>
    __device__ __forceinline__ void load(const u8* from, u32 line_bytes, int lines, int bytes_left, bool is_aligned) {
        using M = Moved<kAcross>;
        const M mine;
        if (mine.line >= M::kLines) return;
        const u8* at = from + u64(u32(mine.line)) * line_bytes + mine.byte;
        if (is_aligned) {
#pragma unroll
            for (int i = 0; i < M::kPasses; ++i) {
                const bool present = mine.line + i * M::kLines < lines && mine.byte < bytes_left;
                ptx::copy_16_async(bytes + mine.offset + i * M::kStep, present ? at : from, present);
                at += u64(M::kLines) * line_bytes;
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < M::kPasses; ++i) {
                const bool present = mine.line + i * M::kLines < lines;
                for (int b = 0; b < 16; ++b)
                    bytes[mine.offset + i * M::kStep + b] = present && mine.byte + b < bytes_left ? at[b] : 0;
                at += u64(M::kLines) * line_bytes;
            }
        }
    }
};

/// The records of rows or of columns. The rows or columns of a stack's matrices are numbered
/// consecutively.
struct RecordPlane {
    u8* records;
    u64 line_stride;
    u64 block_stride;

    template <int kBytes>
    __device__ __forceinline__ void store(u64 line, u64 block, typename RecordBits<kBytes>::Type record) const {
        const u64 at = line * line_stride + block * block_stride;
        if constexpr (kBytes == 1) records[at] = u8(record);
        if constexpr (kBytes == 4) reinterpret_cast<u32*>(records)[at] = record;
        if constexpr (kBytes == 8) reinterpret_cast<u64*>(records)[at] = record;
    }
    template <int kBytes>
    __device__ __forceinline__ typename RecordBits<kBytes>::Type load(u64 line, u64 block) const {
        const u64 at = line * line_stride + block * block_stride;
        if constexpr (kBytes == 1) return __ldg(records + at);
        if constexpr (kBytes == 4) return __ldg(reinterpret_cast<const u32*>(records) + at);
        if constexpr (kBytes == 8) return __ldg(reinterpret_cast<const u64*>(records) + at);
        return 0;
    }
    /// Loads a record that this CTA has written.
    template <int kBytes>
    __device__ __forceinline__ typename RecordBits<kBytes>::Type load_written(u64 line, u64 block) const {
        const u64 at = line * line_stride + block * block_stride;
        if constexpr (kBytes == 1) return records[at];
        if constexpr (kBytes == 4) return reinterpret_cast<const u32*>(records)[at];
        if constexpr (kBytes == 8) return reinterpret_cast<const u64*>(records)[at];
        return 0;
    }
};

}  // namespace nib
