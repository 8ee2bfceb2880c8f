// Quantizes BF16 or F32 values to blocks down the columns, stored transposed. Optionally also quantizes to blocks along the rows, from the same read.
//
// quantize_cols<In, E, kF32Scales, kRows, Round>: x is [rows][cols], cols a multiple of 8. col_codes is [cols][capacity], with zeros from `rows` to
//   `capacity`; capacity is a multiple of the block size. kRows: the kernel also writes row_codes in the layout of quantize_rows; otherwise row_codes
//   and row_scales are null. row_id and counts have the meaning of quantize_rows. If the kernel writes row blocks, counts counts the row blocks.
//   256 threads per CTA. A CTA quantizes 128 x 128 values, or 256 x 128 values if two codes share a byte. The grid has
//   A * ceil(D / squares) CTAs: A = ceil(cols / 128), D = ceil(capacity / 128), squares = 2 if two codes share a byte,
//   else 1. TilePlace orders the CTAs in bands that are `band` CTAs high, so that concurrent writes are adjacent. If
//   only columns are written, there is a single band; if both forms are written, a band is 4 strips high.
//   Dynamic shared memory: sizeof(ColumnShared<In, E, kF32Scales>) bytes. The scales of a 128 x 128 tile are stored together.
//   col_scales is [ceil(capacity / E::kBlock)][scale_stride], with scale_stride at least cols. row_scales is initially [A *
//   128 / E::kBlock][D * 128]. Storing each row scale directly in its final place would take 11 % of the whole time.
//
// transpose_scales<Stored>: transposes the row scales from [blocks][stride] to their final order [rows][blocks]; stride is a
//   multiple of 128. 256 threads per CTA; the grid has ceil(blocks / 32) * ceil(rows / 128) CTAs. The launch may start the kernel
//   early (programmatic dependent launch). Four one-byte scale records form a word, which is transposed like an F32 scale.
//
// Speed at the shapes of quantize.cuh, in % of its bandwidth limit: 98, 93 and 84 % for BF16 -> E4M3 columns; 90, 83 and 77
// % for rows and columns. transpose_scales takes 2 us of the time for rows and columns, or 4 us if it is not launched early.
#pragma once
#include "pieces/convert/column_codes.cuh"

namespace nib {

template <class In, class E, bool kF32Scales, bool kRows, class Round>
__global__ void __launch_bounds__(256, In::kBytes == 4 ? 2 : kRows || Round::kDraws ? 3 : 4)
    quantize_cols(const u8* __restrict__ x, u8* __restrict__ row_codes, ScaleOf<kF32Scales>* __restrict__ row_scales,
                  u8* __restrict__ col_codes, ScaleOf<kF32Scales>* __restrict__ col_scales, u64* counts, const int* __restrict__ row_id,
                  int rows, int cols, int capacity, int scale_stride, int band, PowerRule rule, const RoundingArg rounding) {
    using Shared = ColumnShared<In, E, kF32Scales>;
    constexpr int kBlocks = Shared::kBlocks, kPerByte = 8 / E::kCodeBits, kLanes = E::kBlock / 8;
    extern __shared__ uint4 raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const Round round(rounding);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int octet = warp * 2 + lane / 16, chunk = lane % 16;
    const int down = ceil_div(capacity, kTile);
    const TilePlace at(cols, ceil_div(down, kPerByte) * kTile, band);
    const int first_strip = at.strip * kPerByte, end_strip = min(first_strip + kPerByte, down);
    const int first_col = at.panel * kTile, my_col = first_col + chunk * 8;
    const u64 in_bytes = u64(cols) * In::kBytes, row_bytes = u64(cols) / kPerByte, col_bytes = u64(capacity) / kPerByte;
    u8* const mine = shared.input[octet * 8] + chunk * 8 * In::kBytes;
    u8* const place = shared.tile.place(chunk * 8, kPerByte == 2 ? octet / 2 : octet) + (kPerByte == 2 ? octet % 2 * 4 : 0);
    Tally tally;

    const auto fetch = [&](int strip) {
        const int first = strip * kTile;
        const u32 counted = rows_of_lane<8>(row_id, first + warp * 16, rows);
        fetch_rows<In, 8>(mine, x + (first + octet * 8) * in_bytes + my_col * In::kBytes, in_bytes, my_col < cols ? counted : 0);
    };
    fetch(first_strip);
    for (int strip = first_strip; strip < end_strip; ++strip) {
        const int my_row = strip * kTile + octet * 8;
        typename In::Eight in[8];
        ptx::copies_wait();
#pragma unroll
        for (int j = 0; j < 8; ++j) in[j] = In::load_shared(mine + j * kTile * In::kBytes);
        const auto largest = columns_of_warp<In>(in);
#pragma unroll
        for (int i = 0; i < In::kWords; ++i)
            if (lane < 16) shared.maxima[warp][chunk * In::kWords + i] = largest.word[i];
        // A thread reads only values that it fetched itself. It has finished
        // reading them, so the next strip may overwrite the buffer.
        if (strip + 1 < end_strip) fetch(strip + 1);
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
            if (first_col + col < scale_stride && strip * kTile + block * E::kBlock < capacity)
                col_scales[u64(strip * kBlocks + block) * scale_stride + first_col + col] = scale.stored;
            if (!kRows && first_col + col < cols) {
                if constexpr (!Round::kDraws)
                    tally.non_zero += Round::template reaches<E>(__fmul_rn(__uint_as_float(amax), scale.inverse));
                tally.non_finite += scale.is_nan();
            }
        }
        if constexpr (kRows) of_rows.template put<Round>(shared.row_scales, octet * 8, my_col < cols, lane, tally);
        int id = 0;  // row id of row lane % 16 of the warp, for random bits
        if constexpr (Round::kDraws) {
            id = strip * kTile + warp * 16 + lane % 16;
            if (row_id != nullptr && id < rows) id = max(__ldg(row_id + id), 0);
        }
        __syncthreads();

        if (kRows && threadIdx.x < sizeof(shared.row_scales) / 4) {
            constexpr int kWords = sizeof(shared.row_scales[0]) / 4;  // number of words in a block of scales of all rows
            const int block = threadIdx.x / kWords, word = threadIdx.x % kWords;
            u32* const to = reinterpret_cast<u32*>(row_scales + (u64(at.panel * kBlocks + block) * down + strip) * kTile);
            to[word] = reinterpret_cast<const u32*>(shared.row_scales[block])[word];
        }
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
        // If two codes share a byte, two strips of x fill the rows of a tile of codes.
        const bool second = strip != first_strip;
        turn_codes(codes, second ? shared.tile.place(chunk * 8, 8 + octet / 2) + octet % 2 * 4 : place);
    }
    __syncthreads();
    const int left = (min(end_strip * kTile, capacity) - first_strip * kTile) / kPerByte;
    store_turned<E, Round::kDraws && !kRows, 256>(shared.tile, col_codes + first_col * col_bytes + first_strip * kTile / kPerByte, col_bytes,
                                                  cols - first_col, left, tally);
    tally.flush(counts, shared.total);
}

template <class Stored>
__global__ void __launch_bounds__(256)
    transpose_scales(const Stored* __restrict__ in, Stored* __restrict__ out, int lines, int blocks, int stride) {
    constexpr int kLines = 128, kEach = 16;                     // number of rows per CTA, and number of blocks per thread
    constexpr int kBlocks = 256 / kLines * kEach;               // number of blocks per CTA
    constexpr int kInWord = 4 / sizeof(Stored), kWords = kBlocks / kInWord;  // number of words per row
    __shared__ u32 words[kLines][kWords + 1];                   // one word of padding, so that rows lie in different banks
    const int across = ceil_div(blocks, kBlocks), down = blockIdx.x / across;
    const int first_block = (blockIdx.x - down * across) * kBlocks, first_line = down * kLines;
    // Adjacent threads read adjacent rows, and each thread loads all its blocks before it uses any.
    const int line = threadIdx.x % kLines, part = threadIdx.x / kLines, block = first_block + part * kEach;
    const Stored* from = in + u64(block) * stride + first_line + line;
    ptx::grid_wait();
    alignas(16) Stored of[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        of[i] = block + i < blocks ? __ldg(from) : Stored(0);
        from += stride;
    }
#pragma unroll
    for (int i = 0; i < kEach / kInWord; ++i) words[line][part * (kEach / kInWord) + i] = reinterpret_cast<const u32*>(of)[i];
    __syncthreads();
    // Adjacent threads write adjacent blocks.
    const int word = threadIdx.x % kWords, my_block = first_block + word * kInWord;
    const bool whole_words = blocks % kInWord == 0;
#pragma unroll
    for (int i = 0; i < kLines; i += 256 / kWords) {
        const int l = i + threadIdx.x / kWords;
        if (first_line + l >= lines || my_block >= blocks) continue;
        Stored* const to = out + u64(first_line + l) * blocks + my_block;
        if (whole_words) {
            *reinterpret_cast<u32*>(to) = words[l][word];
        } else {
            for (int j = 0; j < kInWord && my_block + j < blocks; ++j) to[j] = reinterpret_cast<const Stored*>(&words[l][word])[j];
        }
    }
}

}  // namespace nib
