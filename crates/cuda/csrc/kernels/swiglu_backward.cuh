// The backward pass of kernels/swiglu.cuh with everything that the next products take, from one read: dh = [dg | du] in E4M3 along its
// rows and down its columns, a made again and in E4M3 down its columns, and the gate weight's gradient.
//
// swiglu_backward<H, kRule>: h [rows][2f] as H holds it, da BF16 [rows][f], weight[rows] (null: 1) -> dh codes [rows][2f], scales
//   [rows][2f / 128]; dh columns [2f][capacity], scales [2f][capacity / 128]; a columns [f][capacity], scales [f][capacity / 128], zeros from
//   `rows` to `capacity`; parts [f / 128][rows], the gate weight's gradient by parts of 128 columns; counts of dh's row blocks
//   and of a's blocks. f % 128 == 0, capacity % 128 == 0; row_id as in kernels/quantize.cuh; padding gives zeros; planes start on 16 bytes.
//   512 threads, any grid, best a cta a multiprocessor; `by_across` divides by f / 128; sizeof(BackwardShared<H>) dynamic shared
//   memory: 216704 and 215552. kernels/add_parts.cuh adds the parts.
//
// Sources, and the tiles that the launch makes maps of, not swizzled: SavedH, MXFP4 codes [rows][f], 128 x 64 bytes, scales
// [rows][2f / 32]; PlainH, BF16 [rows][2f], 128 x 128. da: 128 x 128 too.
//
// A tile of 128 x 128 stays in registers from its values to its codes, but for rows of a, which wait in shared memory: half a
// warp holds a row's 128 columns, a thread four rows of eight columns. The next tile arrives in the meantime.
//
// Measured on an H200, as in kernels/swiglu.cuh, power-of-two scales: from MXFP4 64 % (63 %), from BF16 78 % (77 %); adding the parts
// takes 3 us more. From MXFP4 the look-ups are what takes longest: shared memory's pipe and the waits for it.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "kernels/strip_tile.cuh"
#include "kernels/swiglu_grad.cuh"
#include "math/reduce.cuh"
#include "math/sigmoid_table.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

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
    struct alignas(128) Stage {
        u8 codes[2][kTile][kTile / 2];  // gate, up
        u32 scales[2][kTile];           // four a row
    };
    static constexpr u32 kTileBytes = sizeof(Stage::codes);  // that the copy engine delivers

    __device__ __forceinline__ static u8* room(Table&) { return nullptr; }  // not asked for

    /// One thread starts to fetch the tile at (row, col).
    __device__ __forceinline__ static void fetch(Stage& stage, ptx::Barrier& there, const TensorMap& h, int row, int col, int f) {
        for (int half = 0; half < 2; ++half) ptx::tma_load(stage.codes[half], h, there, (half * f + col) / 2, row);
    }

    /// Every thread starts to fetch its part of the scales of the first `left` rows.
    __device__ __forceinline__ static void fetch_scales(Stage& stage, const u8* scales, u64 row, int col, int left, int f) {
        if (threadIdx.x >= 2 * kTile) return;
        const u32 half = threadIdx.x / kTile, in_tile = threadIdx.x % kTile, per_row = u32(f) / 16;
        const u8* const from = scales + (row * per_row + u32(col) / E2m1::kBlock) + (in_tile * per_row + half * (per_row / 2));
        ptx::copy_4_async(&stage.scales[half][in_tile], from, int(in_tile) < left);
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

    struct alignas(128) Stage {
        u8 numbers[2][kTile][kTile * Bf16::kBytes];
    };
    static constexpr u32 kTileBytes = sizeof(Stage);

    __device__ __forceinline__ static void fetch(Stage& stage, ptx::Barrier& there, const TensorMap& h, int row, int col, int f) {
        for (int half = 0; half < 2; ++half) ptx::tma_load(stage.numbers[half], h, there, half * f + col, row);
    }

    __device__ __forceinline__ static void fetch_scales(Stage&, const u8*, u64, int, int, int) {}

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

/// What is fetched of a tile; past the last row there are zeros.
template <class H>
struct alignas(128) BackwardStage {
    typename H::Stage h;
    u8 da[kTile][kTile * Bf16::kBytes];
    float weight[kTile];
    int row_id[kTile];

    /// Makes zeros of rows that do not count.
    __device__ __forceinline__ void clear_padding() {
#pragma unroll 1
        for (int in_tile = threadIdx.x / 32; in_tile < kTile; in_tile += BackwardThread::kThreads / 32) {
            if (row_id[in_tile] >= 0) continue;
            const int lane = threadIdx.x % 32;
            H::clear(h, in_tile, lane);
            ptx::store_8(da[in_tile] + lane * 8, {0, 0});
            if (lane == 0) weight[in_tile] = 1.0f;  // not negative: padding is +0
        }
        ptx::fence_shared_to_async();  // before the next tile comes here
    }

    /// Starts to fetch the tile at (row, col): the copy engine the large parts, on `there`, each thread the small ones. What is given
    /// for all rows alike is not fetched.
    __device__ __forceinline__ void fetch(ptx::Barrier& there, u64 row, int col, const TensorMap& h_map, const u8* h_scales,
                                          const TensorMap& da_map, const float* weights, const int* row_ids, int rows, int f) {
        if (threadIdx.x == 0) {
            ptx::barrier_arrive_expect(there, H::kTileBytes + sizeof(da));
            H::fetch(h, there, h_map, int(row), col, f);
            ptx::tma_load(da, da_map, there, col, int(row));
        }
        const int left = rows - int(row);
        H::fetch_scales(h, h_scales, row, col, left, f);
        // By warps that have no scales to fetch.
        const u32 of_weight = threadIdx.x - 2 * kTile, of_id = threadIdx.x - 3 * kTile;
        if (of_weight < kTile && weights != nullptr) ptx::copy_4_async(weight + of_weight, weights + row + of_weight, int(of_weight) < left);
        if (of_id < kTile && row_ids != nullptr) ptx::copy_4_async(row_id + of_id, row_ids + row + of_id, int(of_id) < left);
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
    ptx::Barrier there;               // the copy engine delivered the tile
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
    swiglu_backward(const __grid_constant__ TensorMap h, const u8* __restrict__ h_scales, const __grid_constant__ TensorMap da,
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
        shared.stage.fetch(shared.there, at.row(), at.col(), h, h_scales, da, weight, row_id, rows, f);
    };
    if (threadIdx.x == 0) {
        ptx::barrier_init(shared.there, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    fetch(blockIdx.x);
    if (weight == nullptr && threadIdx.x < kTile) shared.stage.weight[threadIdx.x] = 1.0f;
    shared.table.fill();

    u32 parity = 0;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const StripTile at(index, by_across, across);
        const int my_row = int(at.strip) * kTile + me.row, first_col = at.col();
        const BackwardStage<H>& stage = shared.stage;
        ptx::copies_wait();
        ptx::barrier_wait(shared.there, parity);
        parity ^= 1;
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
        BlockScale<typename ScaleType<kRule>::Stored> col_scale = {};
        float col_amax = 0.0f;
        const int col_matrix = threadIdx.x / kTile, col_place = threadIdx.x % kTile;
        if (col_matrix < kMatrices) {
            col_amax = shared.matrix(col_matrix).maxima.at(col_place);
            col_scale = block_scale<E, kRule>(__float_as_uint(col_amax));
            shared.inverse[col_matrix][col_place] = col_scale.inverse;
        }
        // Rows meanwhile.
        u8* const row_codes = dh_codes + u64(u32(my_row)) * (2 * f) + (first_col + chunk * 8);
        const int lines = min(rows - my_row, kThreadRows) * 2;  // of dg and du, one after the other
        store_lines<2 * kThreadRows>(
            row_codes, f, lines, __any_sync(kAllLanes, row_scale.is_nan()), [&](int i) { return value[i % 2][i / 2]; },
            [&](int i) { return __shfl_sync(kAllLanes, row_scale.inverse, (lane & 16) | i); });
        const bool col_nan = __syncthreads_or(col_scale.is_nan());
#pragma unroll
        for (int r = 0; r < H::kSpareRows; ++r) shared.a[r].take(value[2][r]);
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) turn_values<kBackwardCols>(shared.matrix(m).tile, me, value[m], shared.inverse[m]);
        if (col_matrix < kMatrices) {
            const int col = first_col + ColumnMaxima<kBackwardCols>::column_at(col_place) + (col_matrix == 1 ? f : 0);
            (col_matrix == 2 ? a_scales : dh_col_scales)[u64(u32(col)) * down + at.strip] = col_scale.stored;
        }
        if (col_matrix == 2) {
            of_a.non_zero += __fmul_rn(col_amax, col_scale.inverse) > E::kLargestToZero;
            of_a.non_finite += col_scale.is_nan();
        }
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
