// BF16 or F32 -> blocks with scales down the columns, stored transposed; from the same read also along the rows.
//
// quantize_cols<In, E, kF32Scales, kRows, Round>: x [rows][cols], cols a multiple of 8. col_codes [cols][capacity], col_scales
//   [cols][capacity / E::kBlock], zeros from `rows` to `capacity`, which is a multiple of the block. kRows: also what quantize_rows writes;
//   else row_codes and row_scales are null. row_id as there; counts as there, of the row blocks where those are written.
//   256 threads; a cta takes `strips` x `panels` squares of 128 x 128, one after the other, and stores their scales together: one byte at a
//   time they would cost as much as the codes. At most kStrips and kPanels; `strips` is even where two codes share a byte. Grid
//   ceil(ceil(cols / 128) / panels) * ceil(ceil(capacity / 128) / strips); bands of `band` ctas are done side by side, so that what is written
//   at one time lies together. sizeof(ColumnShared<In, E, kF32Scales, kRows>) dynamic shared memory.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/rounding.cuh"
#include "kernels/column_tile.cuh"
#include "kernels/quantize.cuh"
#include "math/reduce.cuh"

namespace nib {

constexpr int kStrips = 4;
constexpr int kPanels = 2;

template <class In, class E, bool kF32Scales, bool kRows>
struct alignas(16) ColumnShared {
    static constexpr int kBlocks = kTile / E::kBlock;  // along a side of a square
    u8 input[kTile][kTile * In::kBytes];
    ColumnTile tile;
    ScaleOf<kF32Scales> col_scales[kPanels * kTile][kStrips * kBlocks];
    ScaleOf<kF32Scales> row_scales[kRows ? kStrips * kTile : 1][kRows ? kPanels * kBlocks : 16];
    float inverse[kBlocks][kTile];   // of columns, see inverse_place
    u32 maxima[8][In::kWords * 16];  // of each warp's rows
    u32 total[3];
};

/// Eight columns of a thread lie in two groups of four, each beside those of the neighbouring threads.
__device__ __forceinline__ int inverse_place(int col) { return col % 8 / 4 * 64 + col / 8 * 4 + col % 4; }

/// Fetches this thread's eight rows of eight columns to its own place in shared memory, in the background: loads that need no
/// register are all in flight.
template <class In>
__device__ __forceinline__ void fetch_octet(u8* mine, const u8* x, u64 row_bytes, int first_row, int col, u32 counted) {
    const u8* const from = x + first_row * row_bytes + col * In::kBytes;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const bool present = counted >> j & 1;
#pragma unroll
        for (int part = 0; part < In::kBytes / 2; ++part)
            ptx::copy_16_async(mine + j * kTile * In::kBytes + part * 16, present ? from + j * row_bytes + part * 16 : x, present);
    }
}

/// The largest magnitude of each of eight columns over the sixteen rows of a warp.
template <class In>
__device__ __forceinline__ typename In::Magnitudes columns_of_warp(const typename In::Eight (&in)[8]) {
    typename In::Magnitudes largest = In::magnitudes(in[0]);
#pragma unroll
    for (int j = 1; j < 8; ++j) {
        const auto m = In::magnitudes(in[j]);
#pragma unroll
        for (int i = 0; i < In::kWords; ++i) largest.word[i] = In::larger(largest.word[i], m.word[i]);
    }
#pragma unroll
    for (int i = 0; i < In::kWords; ++i)
        largest.word[i] = In::larger(largest.word[i], __shfl_xor_sync(kAllLanes, largest.word[i], 16));
    return largest;
}

/// The place of this cta's squares, in multiples of what a cta takes.
struct SquaresPlace {
    int down, across;

    __device__ __forceinline__ SquaresPlace(int total_across, int total_down, int band) {
        const int first = blockIdx.x / (band * total_across) * band;
        const int height = min(band, total_down - first);
        const int within = blockIdx.x - first * total_across;
        across = within / height;
        down = first + within - across * height;
    }
};

/// The scales of eight rows over a panel, or over each 32 columns of it: of one row (lanes 2r and 2r + 1 of sixteen), or of
/// two (lane r of four has those of rows 2r and 2r + 1).
template <class In, class E, bool kF32Scales>
struct RowScales {
    static constexpr int kHeld = E::kBlock == kTile ? 1 : 2;
    BlockScale<ScaleOf<kF32Scales>> scale[kHeld];
    u32 amax[kHeld];

    RowScales() = default;
    __device__ __forceinline__ RowScales(const typename In::Eight (&in)[8], int lane, PowerRule rule) {
        In::row_maxima_of_eight(in, lane, amax);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) scale[i] = scale_of<E, kF32Scales>(amax[i], rule);
    }

    /// Of row j of the eight.
    __device__ __forceinline__ float inverse_of(int j, int lane) const {
        if constexpr (kHeld == 1) return __shfl_sync(kAllLanes, scale[0].inverse, (lane & 16) | j * 2);
        return __shfl_sync(kAllLanes, scale[j % kHeld].inverse, (lane & 28) | j / 2);
    }

    /// Puts those of one panel to the others of these rows, and counts. `present`: whether this thread's columns exist.
    template <class Round, int kCount>
    __device__ __forceinline__ void put(ScaleOf<kF32Scales> (*to)[kCount], int panel, bool present, int lane, Tally& tally) const {
        if (kHeld == 1 ? lane % 2 != 0 : !present) return;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int row = kHeld == 1 ? lane / 2 % 8 : lane % 4 * 2 + i;
            to[row][kHeld == 1 ? panel : panel * 4 + lane / 4 % 4] = scale[i].stored;
            if constexpr (!Round::kDraws)
                tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax[i]), scale[i].inverse));
            tally.non_finite += scale[i].is_nan();
        }
    }
};

/// Eight rows of eight columns to columns; those under a NaN scale become zeros. Two codes a byte: the four bytes of a column go to
/// half a slot of the tile.
__device__ __forceinline__ void turn_codes(u32 (&codes)[8], const float (&inverse)[8], u8* place) {
    // Half-words, bytes, then nibbles change places across the diagonal.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 a = codes[i], b = codes[i + 4];
        codes[i] = __byte_perm(a, b, 0x5410);
        codes[i + 4] = __byte_perm(a, b, 0x7632);
    }
#pragma unroll
    for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) {
        const u32 a = codes[i], b = codes[i + 2];
        codes[i] = __byte_perm(a, b, 0x6240);
        codes[i + 2] = __byte_perm(a, b, 0x7351);
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const u32 a = codes[i], b = codes[i + 1];
        codes[i] = (a & 0x0F0F0F0F) | (b << 4 & 0xF0F0F0F0);
        codes[i + 1] = (a >> 4 & 0x0F0F0F0F) | (b & 0xF0F0F0F0);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) ptx::store_4(place + i * kTile, __float_as_uint(inverse[i]) == kNanBits ? 0 : codes[i]);
}

__device__ __forceinline__ void turn_codes(const uint2 (&codes)[8], const float (&inverse)[8], u8* place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 of[8], upper[4], lower[4];
#pragma unroll
        for (int j = 0; j < 8; ++j) of[j] = half == 0 ? codes[j].x : codes[j].y;
        turn_4x4({of[0], of[1], of[2], of[3]}, upper);
        turn_4x4({of[4], of[5], of[6], of[7]}, lower);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const bool nan = __float_as_uint(inverse[half * 4 + c]) == kNanBits;
            ptx::store_8(place + (half * 4 + c) * kTile, {nan ? 0 : upper[c], nan ? 0 : lower[c]});
        }
    }
}

/// Stores the lines of a turned tile, `left` bytes of each, to `codes`: column 0 to line `first_col`, from byte `first` of it on.
/// With kTally, counts the blocks of E that hold a non-zero code.
template <class E, bool kTally>
__device__ __forceinline__ void store_turned(const ColumnTile& tile, u8* codes, int first_col, int cols, u64 line_bytes, u64 first,
                                             int left, Tally& tally) {
    const int chunk = threadIdx.x % 8, lane = threadIdx.x % 32;
    u8* const to = codes + first + chunk * 16;
#pragma unroll
    for (int line = threadIdx.x / 8; line < kTile; line += 32) {
        const uint4 v = tile.chunk(line, chunk);
        const bool present = first_col + line < cols && chunk * 16 < left;
        if (present) ptx::store_16(to + (first_col + line) * line_bytes, v);
        if constexpr (kTally) {
            const bool any = present && ((v.x | v.y | v.z | v.w) & (E::kCodeBits == 4 ? 0x77777777 : 0x7F7F7F7F)) != 0;
            const u32 lanes = __ballot_sync(kAllLanes, any);
            // A chunk is a block of 32 codes of four bits; a line, one of 128 of eight.
            if constexpr (E::kCodeBits == 4) {
                tally.non_zero += any;
            } else {
                tally.non_zero += chunk == 0 && (lanes >> (lane & 24) & 0xFF) != 0;
            }
        }
    }
}

/// Copies the scales of a line, whole words at a time where both ends of the copy allow it.
template <class Stored>
__device__ __forceinline__ void store_scales(Stored* to, const Stored* from, int count) {
    const u32 bytes = count * sizeof(Stored), both = bytes | u32(reinterpret_cast<u64>(to));
    if (bytes == 16 && both % 16 == 0) {
        ptx::store_16(to, *reinterpret_cast<const uint4*>(from));
    } else if (bytes == 8 && both % 8 == 0) {
        ptx::store_8(to, *reinterpret_cast<const uint2*>(from));
    } else if (both % 4 == 0) {
        for (u32 i = 0; i < bytes / 4; ++i) reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const u32*>(from)[i];
    } else if (both % 2 == 0) {
        for (u32 i = 0; i < bytes / 2; ++i) reinterpret_cast<u16*>(to)[i] = reinterpret_cast<const u16*>(from)[i];
    } else {
        for (int i = 0; i < count; ++i) to[i] = from[i];
    }
}

template <class In, class E, bool kF32Scales, bool kRows, class Round>
__global__ void __launch_bounds__(256, In::kBytes == 4 ? 2 : kRows || Round::kDraws ? 3 : 4)
    quantize_cols(const u8* __restrict__ x, u8* __restrict__ row_codes, ScaleOf<kF32Scales>* __restrict__ row_scales,
                  u8* __restrict__ col_codes, ScaleOf<kF32Scales>* __restrict__ col_scales, u64* counts, const int* __restrict__ row_id,
                  int rows, int cols, int capacity, int strips, int panels, int band, PowerRule rule, const RoundingArg rounding) {
    using Shared = ColumnShared<In, E, kF32Scales, kRows>;
    constexpr int kBlocks = Shared::kBlocks, kPerByte = 8 / E::kCodeBits, kLanes = E::kBlock / 8;
    extern __shared__ uint4 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const Round round(rounding);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int octet = warp * 2 + lane / 16, chunk = lane % 16;
    const int across = ceil_div(cols, kTile), down = ceil_div(capacity, kTile);
    const SquaresPlace at(ceil_div(across, panels), ceil_div(down, strips), band);
    const int first_strip = at.down * strips, first_panel = at.across * panels;
    strips = min(strips, down - first_strip);
    panels = min(panels, across - first_panel);
    const u64 row_bytes = u64(cols) / kPerByte, col_bytes = u64(capacity) / kPerByte;
    u8* const mine = shared.input[octet * 8] + chunk * 8 * In::kBytes;
    Tally tally;

    const auto fetch = [&](int strip, int panel) {
        const int row = (first_strip + strip) * kTile + octet * 8, col = (first_panel + panel) * kTile + chunk * 8;
        fetch_octet<In>(mine, x, u64(cols) * In::kBytes, row, col, col < cols ? rows_that_count(row_id, row, rows) : 0);
    };
    fetch(0, 0);
    for (int square = 0, s = 0, p = 0; square < strips * panels; ++square) {
        const int next_s = s + 1 < strips ? s + 1 : 0, next_p = next_s == 0 ? p + 1 : p;
        const int my_row = (first_strip + s) * kTile + octet * 8;
        const int first_col = (first_panel + p) * kTile, my_col = first_col + chunk * 8;
        ptx::copies_wait();
        typename In::Eight in[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) in[j] = In::load_shared(mine + j * kTile * In::kBytes);
        const auto largest = columns_of_warp<In>(in);
#pragma unroll
        for (int i = 0; i < In::kWords; ++i)
            if (lane < 16) shared.maxima[warp][chunk * In::kWords + i] = largest.word[i];
        // Every thread has read what it fetched, and reads nobody else's.
        if (next_p < panels) fetch(next_s, next_p);
        RowScales<In, E, kF32Scales> of_rows;
        if constexpr (kRows) of_rows = RowScales<In, E, kF32Scales>(in, lane, rule);
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < kTile * kBlocks; i += 256) {
            const int col = i % kTile, block = i / kTile;
            const u32 amax = In::template column_max<8 / kBlocks>(shared.maxima + block * (8 / kBlocks), col);
            const auto scale = scale_of<E, kF32Scales>(amax, rule);
            shared.inverse[block][inverse_place(col)] = scale.inverse;
            shared.col_scales[p * kTile + col][s * kBlocks + block] = scale.stored;
            if (!kRows && first_col + col < cols) {
                if constexpr (!Round::kDraws)
                    tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax), scale.inverse));
                tally.non_finite += scale.is_nan();
            }
        }
        if constexpr (kRows) of_rows.template put<Round>(shared.row_scales + s * kTile + octet * 8, p, my_col < cols, lane, tally);
        __syncthreads();

        float inverse[8];
        const float* const inverses = shared.inverse[octet / kLanes] + chunk * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) inverse[i] = inverses[i / 4 * 64 + i % 4];
        typename E::Eight codes[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u64 element = 0;
            if constexpr (Round::kDraws) {
                const int row = min(my_row + j, rows - 1);
                element = u64(u32(row_id == nullptr ? row : __ldg(row_id + row))) * cols + my_col;
            }
            const auto bits = round.template bits<true>(element);
            if constexpr (kRows) {
                const float row_inverse = of_rows.inverse_of(j, lane);
                auto out = round.template encode<E, kRuleFloor, In>(in[j], row_inverse, bits);
                if (__float_as_uint(row_inverse) == kNanBits) out = E::zeros();
                if (my_row + j < rows) store_codes<E, true>(row_codes + (my_row + j) * row_bytes + my_col / kPerByte, cols - my_col, out);
                if constexpr (Round::kDraws) {
                    const u32 any = __ballot_sync(kAllLanes, my_col < cols && E::any(out));
                    tally.non_zero += lane % kLanes == 0 && (any >> lane & ((1u << kLanes) - 1)) != 0;
                }
            }
            codes[j] = round.template encode<E, kRuleFloor, In>(in[j], inverse, bits);
        }
        const int slot = kPerByte == 2 ? s % 2 * 8 + octet / 2 : octet;
        turn_codes(codes, inverse, shared.tile.place(chunk * 8, slot) + (kPerByte == 2 ? octet % 2 * 4 : 0));
        if (kPerByte == 1 || s % 2 == 1 || s + 1 == strips) {
            __syncthreads();
            const int first = (first_strip + s / kPerByte * kPerByte) * kTile;  // row
            store_turned<E, Round::kDraws && !kRows>(shared.tile, col_codes, first_col, cols, col_bytes, first / kPerByte,
                                                     min((first_strip + s + 1) * kTile, capacity) / kPerByte - first / kPerByte, tally);
        }
        s = next_s;
        p = next_p;
    }
    const int first_row = first_strip * kTile, first_col = first_panel * kTile;
    const int row_blocks = ceil_div(cols, E::kBlock), col_blocks = capacity / E::kBlock;
    for (int i = threadIdx.x; i < panels * kTile && first_col + i < cols; i += 256) {
        const int first = first_strip * kBlocks;
        store_scales(col_scales + u64(first_col + i) * col_blocks + first, shared.col_scales[i], min(strips * kBlocks, col_blocks - first));
    }
    if constexpr (kRows) {
        for (int i = threadIdx.x; i < strips * kTile && first_row + i < rows; i += 256) {
            const int first = first_panel * kBlocks;
            store_scales(row_scales + u64(first_row + i) * row_blocks + first, shared.row_scales[i], min(panels * kBlocks, row_blocks - first));
        }
    }
    tally.flush(counts, shared.total);
}

}  // namespace nib
