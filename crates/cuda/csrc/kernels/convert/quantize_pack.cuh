// Quantizes BF16 values to blocks along the rows, and writes each row directly into its all-to-all records.
//
// quantize_pack<In, E, kF32Scales, Round>: x [rows][cols], codes, scales and counts have the meaning of quantize.cuh. place [rows][top_k] lists
//   the records into which each row is written; a place that is negative, or not below `messages`, names no record. A record has
//   `row_bytes` bytes, a multiple of 16: first the codes, then the scales, then zeros. The kernel leaves records that no place names unwritten.
//   128 threads per CTA, without dynamic shared memory. row_tasks.cuh defines the grid; 16 chunks per warp are fastest.
//
// The kernel reads x once and writes each record once. The kernel moves 595 MB for 32768 x 7168 BF16 values as MXFP4, if each row goes to one rank.
#pragma once
#include "pieces/convert/row_quantizer.cuh"

namespace nib {

/// The all-to-all records, and the list of records into which each row is written.
struct MessagesArg {
    u8* bytes;
    const int* place;
    u32 top_k;
    u32 messages;
    u32 row_bytes;
    u32 unused;
};

template <class E, class Stored, int kChunks>
struct RowMessages {
    using Layout = RowLayout<E, kChunks>;

    const MessagesArg& to;
    const RowSource& of;
    typename E::Eight held[Layout::kHeld][Layout::kTogether];
    u32 row, segment;
    int place;  // in lane i: the i-th of the row's top_k places
    int col;

    __device__ __forceinline__ RowMessages(const MessagesArg& to, const RowSource& of) : to(to), of(of) {}

    __device__ __forceinline__ void begin(u32 of_rows, u32 of_row, int first) {
        row = of_rows;
        segment = of_row;
        col = first;
        place = place_of(threadIdx.x % 32);
    }
    __device__ __forceinline__ void put(int h, const typename E::Eight (&of_block)[Layout::kTogether], Stored) {
#pragma unroll
        for (int i = 0; i < Layout::kTogether; ++i) held[h][i] = of_block[i];
    }
    __device__ __forceinline__ void end(const Stored (&scales)[Layout::kHeld]) {
#pragma unroll 1
        for (u32 first = 0; first < to.top_k; first += 32) {
            if (first != 0) place = place_of(first + threadIdx.x % 32);
#pragma unroll 1
            for (u32 to_do = __ballot_sync(kAllLanes, u32(place) < to.messages); to_do != 0; to_do &= to_do - 1)
                store(to.bytes + u64(u32(__shfl_sync(kAllLanes, place, __ffs(int(to_do)) - 1))) * to.row_bytes, scales);
        }
    }

private:
    __device__ __forceinline__ int place_of(u32 slot) const { return slot < to.top_k ? __ldg(to.place + u64(row) * to.top_k + slot) : -1; }

    /// Stores this segment's part of a record; the row's last segment also stores the zeros at the record's end.
    __device__ __forceinline__ void store(u8* message, const Stored (&scales)[Layout::kHeld]) const {
        const bool is_aligned = of.cols * E::kCodeBits % 128 == 0;
#pragma unroll
        for (int h = 0; h < Layout::kHeld; ++h) {
            const int c = Layout::col_of(h * Layout::kTogether);
            store_together(message + (col + c) * E::kCodeBits / 8, of.cols - col - c, is_aligned, held[h]);
        }
        const u32 code_bytes = u32(of.cols) * E::kCodeBits / 8;
        const int blocks = ceil_div(of.cols, E::kBlock);
        Layout::store_scales(reinterpret_cast<Stored*>(message + code_bytes), segment, blocks, scales);
        const u32 end = code_bytes + blocks * sizeof(Stored) + threadIdx.x % 32;
        if (segment + 1 == of.segments && end < to.row_bytes) message[end] = 0;
    }
};

template <class In, class E, bool kF32Scales, class Round>
__global__ void __launch_bounds__(kRowThreads, kRowCtas<In, Round>)
    quantize_pack(const u8* __restrict__ x, const __grid_constant__ MessagesArg to, u64* counts, const int* __restrict__ row_id, int rows, int cols,
                  Divider by_segments, u32 segments, u32 rounds, PowerRule rule, const RoundingArg rounding) {
    __shared__ u32 total[3];
    const RowSource of = {x, row_id, rows, cols, by_segments, segments, rounds, FoldedRows{}};
    RowMessages<E, ScaleOf<kF32Scales>, row_chunks<In, Round>> messages(to, of);
    quantize_segments<In, E, kF32Scales>(of, counts, total, rule, Round(rounding), messages);
}

}  // namespace nib
