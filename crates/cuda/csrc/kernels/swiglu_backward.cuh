// The backward pass of kernels/swiglu.cuh with everything that the next products take, from one read: dh = [dg | du] in E4M3 along its
// rows and down its columns, a made again and in E4M3 down its columns, and the gate weight's gradient.
//
// swiglu_backward<H, kRule>: h [rows][2f] as H holds it, da BF16 [rows][f], weight[rows] (null: 1) -> dh codes [rows][2f], scales
//   [rows][2f / 128]; dh columns [2f][capacity], scales [2f][capacity / 128]; a columns [f][capacity], scales [f][capacity / 128], zeros from
//   `rows` to `capacity`; parts [f / 128][rows], the gate weight's gradient by parts of 128 columns; counts of dh's row blocks
//   and of a's blocks. f % 128 == 0, capacity % 128 == 0; row_id as in kernels/quantize.cuh; padding gives zeros; planes start on 16 bytes.
//   512 threads, any grid, best a cta a multiprocessor; `by_across` divides by f / 128; sizeof(BackwardShared<H>) dynamic shared memory: 151168
//   and 182912. kernels/add_parts.cuh adds the parts.
//
// Sources: SavedH, MXFP4 codes [rows][f], scales [rows][2f / 32]; PlainH, BF16.
//
// A tile of 128 x 128 stays in registers from its values to its codes: half a warp holds a row's 128 columns, a thread four
// rows of eight columns. The next tile arrives in the meantime.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/strip_tile.cuh"
#include "kernels/swiglu_grad.cuh"
#include "math/reduce.cuh"
#include "math/sigmoid_table.cuh"

namespace nib {

constexpr int kMatrices = 3;      // dg, du, a
constexpr int kBackwardCols = 8;  // of a thread
using BackwardThread = StripThread<kBackwardCols>;

/// h in MXFP4.
struct SavedH {
    /// As many of a thread's rows of a as there is shared memory for, which spares registers.
    static constexpr int kSpareRows = 4;
    static constexpr int kRooms = kMatrices;

    /// What an element decides, by its block's scale and its code.
    struct alignas(128) Table {
        GateTerms gate[256][16];
        float up[256][16];

        __device__ __forceinline__ void fill() {
            for (int i = threadIdx.x; i < 256 * 16; i += BackwardThread::kThreads) {
                const float x = __fmul_rn(E2m1::decode(i % 16), e8m0_decode(i / 16));
                gate[i / 16][i % 16] = gate_terms(x, sigmoid(x));
                up[i / 16][i % 16] = x;
            }
        }
    };

    /// A tile.
    struct alignas(16) Stage {
        u8 codes[2][kTile][kTile / 2];  // gate, up
        u32 scales[2][kTile];           // four a row
    };

    __device__ __forceinline__ static u8* room(Table&) { return nullptr; }  // not asked for

    /// Starts to fetch the first `left` rows of the tile at (row, col); zeros past them.
    __device__ __forceinline__ static void fetch(Stage& stage, const u8* codes, const u8* scales, u64 row, int col, int left, int f) {
        const u32 in_tile = threadIdx.x / 4, chunk = threadIdx.x % 4;
        const u8* const from = codes + (row * f + u32(col) / 2) + (in_tile * f + chunk * 16);
        const bool present = int(in_tile) < left;
        ptx::copy_16_async(stage.codes[0][in_tile] + chunk * 16, from, present);
        ptx::copy_16_async(stage.codes[1][in_tile] + chunk * 16, from + u32(f) / 2, present);
        if (threadIdx.x < 2 * kTile) {
            const u32 half = threadIdx.x / kTile, in_tile = threadIdx.x % kTile, per_row = u32(f) / 16;
            const u8* const from = scales + (row * per_row + u32(col) / E2m1::kBlock) + (in_tile * per_row + half * (per_row / 2));
            ptx::copy_4_async(&stage.scales[half][in_tile], from, int(in_tile) < left);
        }
    }

    /// Zeros for a row, by a warp.
    __device__ __forceinline__ static void clear(Stage& stage, int in_tile, int lane) {
        ptx::store_4(stage.codes[lane / 16][in_tile] + lane % 16 * 4, 0);
        if (lane < 2) stage.scales[lane][in_tile] = 0;
    }

    /// Eight columns of a row. The codes moved up, so that a code masked is the offset of its entry.
    struct Row {
        u32 gate, up;            // codes
        u32 gate_line, up_line;  // addresses of the lines of their scales

        __device__ __forceinline__ Row(const Stage& stage, const Table& table, int in_tile, int chunk) {
            const auto codes = [&](int half) { return *reinterpret_cast<const u32*>(stage.codes[half][in_tile] + chunk * 4); };
            const auto scale = [&](int half) { return reinterpret_cast<const u8*>(&stage.scales[half][in_tile])[chunk / 4]; };
            gate = codes(0);
            up = codes(1);
            gate_line = shared_address(table.gate[scale(0)]);
            up_line = shared_address(table.up[scale(1)]);
        }

        /// Columns 2i and 2i + 1.
        __device__ __forceinline__ void two(int i, GateTerms (&of)[2], float (&number)[2]) const {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int shift = 8 * i + 4 * k;
                const u32 eighths = shift < 3 ? gate << (3 - shift) : gate >> (shift - 3);
                const u32 quarters = shift < 2 ? up << (2 - shift) : up >> (shift - 2);
                // The lines lie on multiples of their lengths.
                of[k] = *static_cast<const GateTerms*>(at_shared_address((eighths & 0x78) | gate_line));
                number[k] = *static_cast<const float*>(at_shared_address((quarters & 0x3C) | up_line));
            }
        }
    };
};

/// h in BF16.
struct PlainH {
    using Table = SigmoidTable;
    static constexpr int kSpareRows = 2;
    static constexpr int kRooms = kMatrices - 1;  // the table has one

    __device__ __forceinline__ static u8* room(Table& table) { return table.room; }

    struct alignas(16) Stage {
        u8 numbers[2][kTile][kTile * Bf16::kBytes];
    };

    __device__ __forceinline__ static void fetch(Stage& stage, const u8* numbers, const u8*, u64 row, int col, int left, int f) {
        const u32 first = threadIdx.x / 16, chunk = threadIdx.x % 16;
        const u8* const from = numbers + (row * 2 * f + col) * Bf16::kBytes + (first * f * 4 + chunk * 16);
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 in_tile = i * (kTile / 4) + first;
                ptx::copy_16_async(stage.numbers[half][in_tile] + chunk * 16, from + (i * (kTile / 4) * 4 + half * 2) * u32(f),
                                   int(in_tile) < left);
            }
    }

    __device__ __forceinline__ static void clear(Stage& stage, int in_tile, int lane) {
        ptx::store_16(stage.numbers[lane / 16][in_tile] + lane % 16 * 16, {0, 0, 0, 0});
    }

    struct Row {
        Bf16::Eight gate, up;
        u32 table;

        __device__ __forceinline__ Row(const Stage& stage, const Table& sigmoids, int in_tile, int chunk) {
            gate = Bf16::load_shared(stage.numbers[0][in_tile] + chunk * 16);
            up = Bf16::load_shared(stage.numbers[1][in_tile] + chunk * 16);
            table = sigmoids.base();
        }

        __device__ __forceinline__ void two(int i, GateTerms (&of)[2], float (&number)[2]) const {
            float s[2];
            SigmoidTable::two(table, gate.word[i], s);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                of[k] = gate_terms(Bf16::value(gate, 2 * i + k), s[k]);
                number[k] = Bf16::value(up, 2 * i + k);
            }
        }
    };
};

/// What is fetched of a tile.
template <class H>
struct alignas(16) BackwardStage {
    typename H::Stage h;
    u8 da[kTile][kTile * Bf16::kBytes];
    float weight[kTile];
    int row_id[kTile];

    /// Makes zeros of rows that do not count; past the last row there are zeros already.
    __device__ __forceinline__ void clear_padding() {
#pragma unroll 1
        for (int in_tile = threadIdx.x / 32; in_tile < kTile; in_tile += BackwardThread::kThreads / 32) {
            if (row_id[in_tile] >= 0) continue;
            const int lane = threadIdx.x % 32;
            H::clear(h, in_tile, lane);
            ptx::store_8(da[in_tile] + lane * 8, {0, 0});
            if (lane == 0) weight[in_tile] = 1.0f;  // not negative: padding is +0
        }
    }

    /// Starts to fetch the tile at (row, col). What is given for all rows alike is not fetched.
    __device__ __forceinline__ void fetch(u64 row, int col, const u8* h_codes, const u8* h_scales, const u8* das, const float* weights,
                                          const int* row_ids, int rows, int f) {
        const int left = rows - int(row);
        H::fetch(h, h_codes, h_scales, row, col, left, f);
        const u32 first = threadIdx.x / 16, chunk = threadIdx.x % 16;
        const u8* const from = das + (row * f + col) * Bf16::kBytes + (first * f * 2 + chunk * 16);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 in_tile = i * (kTile / 4) + first;
            ptx::copy_16_async(da[in_tile] + chunk * 16, from + i * (kTile / 4) * 2 * u32(f), int(in_tile) < left);
        }
        if (threadIdx.x < kTile) {
            const bool present = int(threadIdx.x) < left;
            if (weights != nullptr) ptx::copy_4_async(weight + threadIdx.x, weights + row + threadIdx.x, present);
            if (row_ids != nullptr) ptx::copy_4_async(row_id + threadIdx.x, row_ids + row + threadIdx.x, present);
        }
    }
};

/// Memory where each thread keeps a row's numbers.
struct SpareRow {
    float4 half[2][BackwardThread::kThreads];

    __device__ __forceinline__ void keep(const float (&v)[8]) {
        half[0][threadIdx.x] = {v[0], v[1], v[2], v[3]};
        half[1][threadIdx.x] = {v[4], v[5], v[6], v[7]};
    }

    __device__ __forceinline__ void take(float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 four = half[i][threadIdx.x];
            v[4 * i] = four.x;
            v[4 * i + 1] = four.y;
            v[4 * i + 2] = four.z;
            v[4 * i + 3] = four.w;
        }
    }
};

template <class H>
struct alignas(128) BackwardShared {
    /// Maxima, then codes.
    union Matrix {
        ColumnMaxima<kBackwardCols> maxima;
        ColumnTile tile;
    };

    typename H::Table table;  // first, as SigmoidTable wants
    BackwardStage<H> stage;
    Matrix own[H::kRooms];
    SpareRow a[H::kSpareRows];
    float inverse[kMatrices][kTile];  // in the order of the maxima
    u32 total[3];

    __device__ __forceinline__ Matrix& matrix(int m) { return m < H::kRooms ? own[m] : *reinterpret_cast<Matrix*>(H::room(table)); }
};

/// Sums four values over 16 neighbouring lanes by the tree of neighbours; lane l gets value l % 2 · 2 + l / 2 % 2.
__device__ __forceinline__ float sum_of_four(float (&v)[4], int lane) {
#pragma unroll
    for (int half = 2, far = 1; half >= 1; half /= 2, far *= 2) {
        const bool upper = lane & far;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float sent = upper ? v[i] : v[i + half];
            v[i] = __fadd_rn(upper ? v[i + half] : v[i], __shfl_xor_sync(kAllLanes, sent, far));
        }
    }
    v[0] = __fadd_rn(v[0], __shfl_xor_sync(kAllLanes, v[0], 4));
    return __fadd_rn(v[0], __shfl_xor_sync(kAllLanes, v[0], 8));
}

template <class H, int kRule>
__global__ void __launch_bounds__(BackwardThread::kThreads, 1)
    swiglu_backward(const u8* __restrict__ h, const u8* __restrict__ h_scales, const u8* __restrict__ da,
                    const float* __restrict__ weight, u8* __restrict__ dh_codes,
                    typename ScaleType<kRule>::Stored* __restrict__ dh_scales, u8* __restrict__ dh_col_codes,
                    typename ScaleType<kRule>::Stored* __restrict__ dh_col_scales, u8* __restrict__ a_codes,
                    typename ScaleType<kRule>::Stored* __restrict__ a_scales, float* __restrict__ parts, u64* dh_counts,
                    u64* a_counts, const int* __restrict__ row_id, int rows, int f, int capacity, Divider by_across) {
    using E = E4m3;
    extern __shared__ __align__(1024) u8 raw[];
    BackwardShared<H>& shared = *reinterpret_cast<BackwardShared<H>*>(raw);
    const BackwardThread me;
    const int lane = me.lane, chunk = me.of_row;
    const u32 across = u32(f) / kTile, down = u32(capacity) / kTile, tiles = across * down;
    Tally of_dh, of_a;
    const auto fetch = [&](u32 index) {
        if (index >= tiles) return;
        const StripTile at(index, by_across, across);
        shared.stage.fetch(at.row(), at.col(), h, h_scales, da, weight, row_id, rows, f);
    };
    fetch(blockIdx.x);
    if (weight == nullptr && threadIdx.x < kTile) shared.stage.weight[threadIdx.x] = 1.0f;
    shared.table.fill();

    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const StripTile at(index, by_across, across);
        const int my_row = int(at.strip) * kTile + me.row, first_col = at.col();
        const BackwardStage<H>& stage = shared.stage;
        ptx::copies_wait();
        // The tile is there, the table is filled, the codes of the last tile are stored.
        __syncthreads();
        if (row_id != nullptr && __syncthreads_or(threadIdx.x < kTile && stage.row_id[threadIdx.x] < 0)) {
            shared.stage.clear_padding();
            __syncthreads();
        }

        StripValues<kBackwardCols> value[kMatrices];
        float row_largest[2 * kThreadRows], terms[kThreadRows], a_largest[kBackwardCols] = {};
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            const typename H::Row row(stage.h, shared.table, me.row + r, chunk);
            const Bf16::Eight incoming = Bf16::load_shared(stage.da[me.row + r] + chunk * 16);
            const float w = stage.weight[me.row + r];
            float silu_up[8], das[8];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                GateTerms gate[2];
                float up[2];
                row.two(i, gate, up);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int c = 2 * i + k;
                    das[c] = Bf16::value(incoming, c);
                    const SwigluGrad grad = swiglu_grad(gate[k], up[k], das[c], w);
                    value[0][r][c] = grad.gate;
                    value[1][r][c] = grad.up;
                    value[2][r][c] = grad.a;
                    silu_up[c] = grad.silu_up;
                    a_largest[c] = ptx::max_magnitude(a_largest[c], grad.a);
                }
            }
            if (r < H::kSpareRows) shared.a[r].keep(value[2][r]);
            terms[r] = dot_of_neighbours(silu_up, das);
#pragma unroll
            for (int m = 0; m < 2; ++m) row_largest[2 * r + m] = largest_magnitude<8>(value[m][r]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) shared.matrix(m).maxima.write(me, value[m]);
        shared.matrix(2).maxima.write(me, a_largest);
        const float part = sum_of_four(terms, lane);
        const int part_row = my_row + lane % 2 * 2 + lane / 2 % 2;
        if (chunk < kThreadRows && part_row < rows) parts[u64(at.panel) * rows + part_row] = part;
        // Value 2r is dg's of row r, 2r + 1 du's.
        const float row_amax = largest_of_lanes<BackwardThread::kLanes>(row_largest, lane);
        const auto row_scale = block_scale<E, kRule>(__float_as_uint(row_amax));
        const int scale_row = my_row + chunk / 2;
        if (chunk < 2 * kThreadRows) {
            if (scale_row < rows) dh_scales[(u64(scale_row) * 2 + chunk % 2) * across + at.panel] = row_scale.stored;
            of_dh.non_zero += __fmul_rn(row_amax, row_scale.inverse) > E::kLargestToZero;
            of_dh.non_finite += row_scale.is_nan();
        }
        __syncthreads();

        // Nobody reads the tile any more.
        fetch(index + gridDim.x);
        bool col_nan = false;
        if (threadIdx.x < kMatrices * kTile) {
            const int m = threadIdx.x / kTile, place = threadIdx.x % kTile, col = ColumnMaxima<kBackwardCols>::column_at(place);
            const float amax = shared.matrix(m).maxima.at(place);
            const auto scale = block_scale<E, kRule>(__float_as_uint(amax));
            shared.inverse[m][place] = scale.inverse;
            col_nan = scale.is_nan();
            const u64 to = u64(u32(first_col + col + (m == 1 ? f : 0))) * down + at.strip;
            (m == 2 ? a_scales : dh_col_scales)[to] = scale.stored;
            if (m == 2) {
                of_a.non_zero += __fmul_rn(amax, scale.inverse) > E::kLargestToZero;
                of_a.non_finite += scale.is_nan();
            }
        }
        // Rows meanwhile.
        u8* const row_codes = dh_codes + u64(u32(my_row)) * (2 * f) + (first_col + chunk * 8);
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float inverse = __shfl_sync(kAllLanes, row_scale.inverse, (lane & 16) | (2 * r + m));
                if (my_row + r < rows) store_row_codes(row_codes + u32(r * 2 + m) * u32(f), value[m][r], inverse);
            }
        if (__any_sync(kAllLanes, row_scale.is_nan())) {  // rare
#pragma unroll 1
            for (int i = 0; i < 2 * kThreadRows; ++i) {
                const float inverse = __shfl_sync(kAllLanes, row_scale.inverse, (lane & 16) | i);
                if (__float_as_uint(inverse) == kNanBits && my_row + i / 2 < rows) store_row_zeros<kBackwardCols>(row_codes + u32(i) * u32(f));
            }
        }
        col_nan = __syncthreads_or(col_nan);
#pragma unroll
        for (int r = 0; r < H::kSpareRows; ++r) shared.a[r].take(value[2][r]);
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) turn_values<kBackwardCols>(shared.matrix(m).tile, me, value[m], shared.inverse[m]);
        __syncthreads();
        if (col_nan) {
#pragma unroll 1
            for (int m = 0; m < kMatrices; ++m) clear_nan_columns<kBackwardCols>(shared.matrix(m).tile, shared.inverse[m]);
            __syncthreads();
        }
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
            u8* const line = (m == 2 ? a_codes : dh_col_codes) + u64(u32(first_col + (m == 1 ? f : 0))) * capacity + u32(at.strip) * kTile;
            shared.matrix(m).tile.template store_whole<BackwardThread::kThreads>(line, capacity);
        }
    }
    of_dh.flush(dh_counts, shared.total);
    __syncthreads();
    of_a.flush(a_counts, shared.total);
}

}  // namespace nib
