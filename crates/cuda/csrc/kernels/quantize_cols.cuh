// BF16 or F32 -> blocks with scales down the columns, stored transposed; from the same read also along the rows.
//
// quantize_cols<In, E, kF32Scales, kRows, Round>: x [rows][cols], cols a multiple of 8. col_codes [cols][capacity], col_scales
//   [cols][capacity / E::kBlock], zeros from `rows` to `capacity`, which is a multiple of the block. kRows: also what quantize_rows writes;
//   else row_codes and row_scales are null. row_id as there; counts as there, of the row blocks where those are written.
//   256 threads; a cta takes squares of 128 x 128 one after the other, and stores their scales together: one byte at a time they would
//   cost as much as the codes. Squares come in groups of `strips` x `panels`, at most kStrips and kPanels, and bands of `band` groups are done
//   side by side, so that what is written at one time lies together. The first `whole` ctas take a group each, of the others each takes `part`
//   strips of one panel: a grid of whole + (groups - whole) * ceil(strips / part) * panels. Where two codes share a byte, `strips` and `part`
//   are even. sizeof(ColumnShared<In, E, kF32Scales, kRows>) dynamic shared memory.
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

/// Which of eight rows count, one a bit, of a warp's sixteen from `first` on: lanes 0 to 15 have the first eight.
__device__ __forceinline__ u32 rows_of_lane(const int* __restrict__ row_id, int first, int rows) {
    const int lane = threadIdx.x % 32, row = first + lane % 16;
    const bool counts = row < rows && (row_id == nullptr || __ldg(row_id + row) >= 0);
    return __ballot_sync(kAllLanes, counts) >> (lane & 16 ? 8 : 0);
}

/// Fetches eight rows of eight columns to this thread's own place in shared memory, in the background: loads that need no register are
/// all in flight. Rows whose bit in `counted` is 0 are zeros and not read.
template <class In>
__device__ __forceinline__ void fetch_octet(u8* mine, const u8* from, u64 row_bytes, u32 counted) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int part = 0; part < In::kBytes / 2; ++part)
            ptx::copy_16_async(mine + j * kTile * In::kBytes + part * 16, from + part * 16, counted >> j & 1);
        from += row_bytes;
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

/// The squares of a cta, in units of one.
struct Squares {
    int strip, panel;    // the first
    int strips, panels;  // how many

    /// `down` x `across` squares of the matrix in groups of strips x panels, in bands of `band` groups side by side. The first `whole` ctas
    /// take a group each; of the other groups, `part` strips a cta, so that all multiprocessors finish together.
    __device__ __forceinline__ Squares(int down, int across, int group_strips, int group_panels, int band, int whole, int part) {
        const int cta = blockIdx.x, groups_across = ceil_div(across, group_panels), groups_down = ceil_div(down, group_strips);
        int group = cta, first_strip = 0, first_panel = 0;
        strips = group_strips;
        panels = group_panels;
        if (cta >= whole) {
            const int down_parts = ceil_div(group_strips, part), rest = cta - whole;
            group = whole + rest / (down_parts * group_panels);
            first_strip = rest % down_parts * part;
            first_panel = rest / down_parts % group_panels;
            strips = part;
            panels = 1;
        }
        const int first = group / (band * groups_across) * band, height = min(band, groups_down - first);
        const int within = group - first * groups_across;
        strip = (first + within % height) * group_strips + first_strip;
        panel = within / height * group_panels + first_panel;
        strips = min(strips, down - strip);
        panels = min(panels, across - panel);
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

/// Eight rows of eight columns to columns, in their place of a tile. Two codes a byte: the four bytes of a column take half a slot.
__device__ __forceinline__ void turn_codes(u32 (&codes)[8], u8* place) {
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
    for (int i = 0; i < 8; ++i) ptx::store_4(place + i * kTile, codes[i]);
}

__device__ __forceinline__ void turn_codes(const uint2 (&codes)[8], u8* place) {
    u32 of[2][8];
#pragma unroll
    for (int j = 0; j < 8; ++j) of[0][j] = codes[j].x, of[1][j] = codes[j].y;
    turn_8x8(of, place);
}

/// Zeros in place of the codes of column i of eight.
__device__ __forceinline__ void clear_column(u32 (&codes)[8], int i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) codes[j] &= ~(0xFu << (4 * i));
}
__device__ __forceinline__ void clear_column(uint2 (&codes)[8], int i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        u32& four = i < 4 ? codes[j].x : codes[j].y;
        four &= ~(0xFFu << (i % 4 * 8));
    }
}

/// Stores the lines of a turned tile, `left` bytes of each of the `lines` that exist, to `to`: line 0, row 0. With kTally, counts the
/// blocks of E that hold a non-zero code.
template <class E, bool kTally, class Tile>
__device__ __forceinline__ void store_turned(const Tile& tile, u8* to, u64 line_bytes, int lines, int left, Tally& tally) {
    const int chunk = threadIdx.x % 8, lane = threadIdx.x % 32;
    const int first = threadIdx.x / 8;
    if (chunk * 16 >= left) lines = 0;
    to += first * line_bytes + chunk * 16;
#pragma unroll
    for (int line = 0; line < kTile; line += 32) {
        const uint4 v = tile.chunk(first + line, chunk);
        const bool present = first + line < lines;
        if (present) ptx::store_16(to, v);
        to += 32 * line_bytes;
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
#pragma unroll 1
        for (u32 i = 0; i < bytes / 4; ++i) reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const u32*>(from)[i];
    } else if (both % 2 == 0) {
#pragma unroll 1
        for (u32 i = 0; i < bytes / 2; ++i) reinterpret_cast<u16*>(to)[i] = reinterpret_cast<const u16*>(from)[i];
    } else {
#pragma unroll 1
        for (int i = 0; i < count; ++i) to[i] = from[i];
    }
}

template <class In, class E, bool kF32Scales, bool kRows, class Round>
__global__ void __launch_bounds__(256, In::kBytes == 4 ? 2 : kRows || Round::kDraws ? 3 : 4)
    quantize_cols(const u8* __restrict__ x, u8* __restrict__ row_codes, ScaleOf<kF32Scales>* __restrict__ row_scales,
                  u8* __restrict__ col_codes, ScaleOf<kF32Scales>* __restrict__ col_scales, u64* counts, const int* __restrict__ row_id,
                  int rows, int cols, int capacity, int strips, int panels, int band, int whole, int part, PowerRule rule,
                  const RoundingArg rounding) {
    using Shared = ColumnShared<In, E, kF32Scales, kRows>;
    constexpr int kBlocks = Shared::kBlocks, kPerByte = 8 / E::kCodeBits, kLanes = E::kBlock / 8;
    extern __shared__ uint4 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const Round round(rounding);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int octet = warp * 2 + lane / 16, chunk = lane % 16;
    const Squares at(ceil_div(capacity, kTile), ceil_div(cols, kTile), strips, panels, band, whole, part);
    if (at.strips <= 0 || at.panels <= 0) return;
    const u64 in_bytes = u64(cols) * In::kBytes, row_bytes = u64(cols) / kPerByte, col_bytes = u64(capacity) / kPerByte;
    u8* const mine = shared.input[octet * 8] + chunk * 8 * In::kBytes;
    u8* const place = shared.tile.place(chunk * 8, kPerByte == 2 ? octet / 2 : octet) + (kPerByte == 2 ? octet % 2 * 4 : 0);
    Tally tally;

    const auto fetch = [&](int s, int p) {
        const int first = (at.strip + s) * kTile, col = (at.panel + p) * kTile + chunk * 8;
        const u32 counted = rows_of_lane(row_id, first + warp * 16, rows);
        fetch_octet<In>(mine, x + (first + octet * 8) * in_bytes + col * In::kBytes, in_bytes, col < cols ? counted : 0);
    };
    fetch(0, 0);
    for (int s = 0, p = 0; p < at.panels;) {
        const int next_s = s + 1 < at.strips ? s + 1 : 0, next_p = next_s == 0 ? p + 1 : p;
        const int my_row = (at.strip + s) * kTile + octet * 8;
        const int first_col = (at.panel + p) * kTile, my_col = first_col + chunk * 8;
        typename In::Eight in[8];
        ptx::copies_wait();
#pragma unroll
        for (int j = 0; j < 8; ++j) in[j] = In::load_shared(mine + j * kTile * In::kBytes);
        const auto largest = columns_of_warp<In>(in);
#pragma unroll
        for (int i = 0; i < In::kWords; ++i)
            if (lane < 16) shared.maxima[warp][chunk * In::kWords + i] = largest.word[i];
        // Every thread has read what it fetched, and reads nobody else's.
        if (next_p < at.panels) fetch(next_s, next_p);
        RowScales<In, E, kF32Scales> of_rows;
        if constexpr (kRows) of_rows = RowScales<In, E, kF32Scales>(in, lane, rule);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < (kBlocks + 1) / 2; ++i) {
            const int col = threadIdx.x % kTile, block = threadIdx.x / kTile + 2 * i;
            if (block >= kBlocks) break;
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
        int id = 0;  // of row lane % 16 of the warp, for random bits
        if constexpr (Round::kDraws) {
            id = (at.strip + s) * kTile + warp * 16 + lane % 16;
            if (row_id != nullptr && id < rows) id = max(__ldg(row_id + id), 0);
        }
        __syncthreads();

        const float4* const inverses = reinterpret_cast<const float4*>(shared.inverse[octet / kLanes]) + chunk;
        const float4 low = inverses[0], high = inverses[kTile / 8];
        const float inverse[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        typename E::Eight codes[8];
        u8* to_row = row_codes + my_row * row_bytes + my_col / kPerByte;
        const int rows_left = my_col < cols ? rows - my_row : 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            u64 element = 0;
            if constexpr (Round::kDraws) element = u64(__shfl_sync(kAllLanes, id, (lane & 16) / 2 + j)) * cols + my_col;
            const auto bits = round.template bits<true>(element);
            if constexpr (kRows) {
                const float row_inverse = of_rows.inverse_of(j, lane);
                auto out = round.template encode<E, kRuleFloor, In>(in[j], row_inverse, bits);
                if (__float_as_uint(row_inverse) == kNanBits) out = E::zeros();
                if (j < rows_left) store_codes<E, true>(to_row, 8, out);
                to_row += row_bytes;
                if constexpr (Round::kDraws) {
                    const u32 any = __ballot_sync(kAllLanes, my_col < cols && E::any(out));
                    tally.non_zero += lane % kLanes == 0 && (any >> lane & ((1u << kLanes) - 1)) != 0;
                }
            }
            codes[j] = round.template encode<E, kRuleFloor, In>(in[j], inverse, bits);
        }
        bool nan = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) nan |= __float_as_uint(inverse[i]) == kNanBits;
        if (nan) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (__float_as_uint(inverse[i]) == kNanBits) clear_column(codes, i);
        }
        // Two strips of half bytes fill the lines of a tile.
        turn_codes(codes, kPerByte == 2 && s % 2 == 1 ? shared.tile.place(chunk * 8, 8 + octet / 2) + octet % 2 * 4 : place);
        if (kPerByte == 1 || s % 2 == 1 || s + 1 == at.strips) {
            __syncthreads();
            const int first = (at.strip + s / kPerByte * kPerByte) * kTile;  // row
            const int end = min((at.strip + s + 1) * kTile, capacity);
            store_turned<E, Round::kDraws && !kRows>(shared.tile, col_codes + first_col * col_bytes + first / kPerByte, col_bytes,
                                                     cols - first_col, (end - first) / kPerByte, tally);
        }
        s = next_s;
        p = next_p;
    }
    const int first_row = at.strip * kTile, first_col = at.panel * kTile;
    const int row_blocks = ceil_div(cols, E::kBlock), col_blocks = capacity / E::kBlock;
#pragma unroll 1
    for (int i = threadIdx.x; i < at.panels * kTile && first_col + i < cols; i += 256) {
        const int first = at.strip * kBlocks;
        store_scales(col_scales + u64(first_col + i) * col_blocks + first, shared.col_scales[i], min(at.strips * kBlocks, col_blocks - first));
    }
    if constexpr (kRows) {
#pragma unroll 1
        for (int i = threadIdx.x; i < at.strips * kTile && first_row + i < rows; i += 256) {
            const int first = at.panel * kBlocks;
            store_scales(row_scales + u64(first_row + i) * row_blocks + first, shared.row_scales[i], min(at.panels * kBlocks, row_blocks - first));
        }
    }
    tally.flush(counts, shared.total);
}

}  // namespace nib
