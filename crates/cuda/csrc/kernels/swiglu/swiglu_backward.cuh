// The backward pass of kernels/swiglu/swiglu.cuh. From one read it computes all results that the next GEMMs need: dh = [dg |
// du] in E4M3 along its rows and down its columns; the recomputed a in E4M3 down its columns; and the gate weight's gradient.
//
// swiglu_backward<H, kRule>: reads h [rows][2f] in the format of H, da BF16 [rows][f], and weight[rows] (null: 1). Writes dh codes
//   [rows][2f] with scales [rows][2f / 128]; dh columns [2f][capacity] with scales [capacity / 128][2f]; a columns [f][capacity] with scales
//   [capacity / 128][f]. Column codes are zeros from `rows` to `capacity`. `parts` [f / 128][rows] is the gate weight's gradient, with one
//   sum per 128 columns. Counts are those of dh's row blocks and of a's blocks. f % 128 == 0, capacity % 128 == 0. Rows with a negative
//   row_id are padding, and give zeros. Buffers are 16-byte aligned. 512 threads per CTA; one CTA per SM is fastest; `by_across` divides by
//   f / 128. sizeof(BackwardShared<H>) dynamic shared memory: 231424 or 232448 bytes. kernels/swiglu/add_partial_sums.cuh adds `parts`.
//
// The tensor maps have boxes of 32 rows. With SavedH, the map of h covers the MXFP4 codes [rows][f], 64 bytes wide, in the 64-byte
// swizzle; the scales [rows][2f / 32] are loaded without a map. With PlainH, the map of h covers BF16 [rows][2f], 128 values wide, not
// swizzled. The map of da is also 128 values wide and not swizzled. Each box of the column outputs' maps has the layout of a TurnedTile.
//
// A tile of 128 x 128 stays in registers until it is encoded, except most of a, which waits in
// shared memory. Meanwhile the next tile is loaded, and the columns of the previous tile are stored.
// The factors of columns use a split barrier, which kernels/swiglu/swiglu_cols.cuh explains.
//
// Speed at the shapes of kernels/swiglu/swiglu.cuh, in % of its bandwidth limit, with h in MXFP4: 76 % (72 %), in 32 uneven
// groups 70 %, in 256 groups 64 %; adding `parts` takes 3 us more. An element takes 42 instructions and 12 passes through
// the shared-memory pipe. Half of the time is spent on computing values, because their table look-ups wait for that pipe.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "math/reduce.cuh"
#include "math/sigmoid_table.cuh"
#include "pieces/convert/strip_tile.cuh"
#include "pieces/swiglu/swiglu_grad.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"

namespace nib {

constexpr int kMatrices = 3;  // dg, du, a

/// Inputs of the kernel if h is in MXFP4.
struct SavedH {
    static constexpr int kStages = 2;
    static constexpr int kTiles = kMatrices;
    /// How many groups of four of a thread's values of a wait in shared
    /// memory, which saves registers; the first kInDa groups overwrite da.
    static constexpr int kSpares = 7, kInDa = 4;

    /// Table entries, which are indexed by a code and the scale byte of its block.
    struct alignas(128) Table {
        GateTerms gate[256][16];
        uint4 up[256];  // low and high bytes of the eight magnitudes, as BF16

        __device__ __forceinline__ void fill() {
            for (int i = threadIdx.x; i < 256 * 16; i += kStripThreads) {
                const float x = __fmul_rn(E2m1::decode(i % 16), e8m0_decode(i / 16));
                gate[i / 16][i % 16] = gate_terms(x, sigmoid(x));
            }
            if (threadIdx.x >= 256) return;
            u32 two[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float scale = e8m0_decode(threadIdx.x);
                two[i] = ptx::pack_bf16(__fmul_rn(E2m1::decode(2 * i), scale), __fmul_rn(E2m1::decode(2 * i + 1), scale));
            }
            up[threadIdx.x] = {__byte_perm(two[0], two[1], 0x6420), __byte_perm(two[2], two[3], 0x6420),
                               __byte_perm(two[0], two[1], 0x7531), __byte_perm(two[2], two[3], 0x7531)};
        }
    };

    /// The inputs of one tile.
    struct alignas(512) Stage {
        u8 codes[2][kTile][kTile / 2];  // gate, up; in the 64-byte swizzle
        u32 scales[2][kTile];           // four scales per row
    };
    static constexpr u32 kBoxBytes = kBoxRows * kTile / 2;  // bytes of a box of gate or of up

    __device__ __forceinline__ static u8* room(Table&) { return nullptr; }  // never called: `own` holds all tiles

    /// Starts to fetch a box of gate or of up; `row` is the box's first row in the tile.
    __device__ __forceinline__ static void fetch(Stage& stage, ptx::Barrier& there, const TensorMap& h, int half, int row, int first_row,
                                                 int col, int f) {
        ptx::tma_load(stage.codes[half][row], h, there, (half * f + col) / 2, first_row + row);
    }

    /// Every thread starts to fetch its part of the scales of the first `left` rows.
    __device__ __forceinline__ static void fetch_scales(Stage& stage, const u8* scales, u64 row, int col, int left, int f) {
        if (threadIdx.x >= 2 * kTile) return;
        const u32 half = threadIdx.x / kTile, in_tile = threadIdx.x % kTile, per_row = u32(f) / 16;
        const u8* const from = scales + (row * per_row + u32(col) / E2m1::kBlock) + (in_tile * per_row + half * (per_row / 2));
        ptx::copy_4_async(&stage.scales[half][in_tile], from, int(in_tile) < left);
    }

    /// Eight columns of a row of h.
    struct Row {
        u32 gate;       // codes
        u32 gate_line;  // address of the table line for the codes' scale
        u32 up[4];      // BF16 values

        __device__ __forceinline__ void load(const Stage& stage, const Table& table, int in_tile, int col) {
            const int swizzled = col / 2 ^ in_tile / 2 % 4 * 16;
            const auto codes = [&](int half) { return *reinterpret_cast<const u32*>(stage.codes[half][in_tile] + swizzled); };
            const auto scale = [&](int half) {
                return reinterpret_cast<const u8*>(&stage.scales[half][in_tile])[col / E2m1::kBlock];
            };
            gate = codes(0);
            gate_line = shared_address(table.gate[scale(0)]);
            const uint4 of = table.up[scale(1)];
            const u32 code = codes(1), even_signs = code << 4;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 four = code >> 16 * i & 0x7777;
                // Selectors with the top bit set replicate a sign bit.
                const u32 signs = ptx::byte_perm_signs(even_signs, code, i == 0 ? 0xD9C8 : 0xFBEA);
                const u32 low = __byte_perm(of.x, of.y, four), high = __byte_perm(of.z, of.w, four) | (signs & 0x80808080);
                up[2 * i] = __byte_perm(low, high, 0x5140);
                up[2 * i + 1] = __byte_perm(low, high, 0x7362);
            }
        }

        /// Sets the values to zeros, for a padding row.
        __device__ __forceinline__ void clear(const Table& table) {
            gate = up[0] = up[1] = up[2] = up[3] = 0;
            gate_line = shared_address(table.gate[0]);
        }

        /// Columns 2i and 2i + 1.
        __device__ __forceinline__ void two(int i, GateTerms (&of)[2], float (&number)[2]) const {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int shift = 8 * i + 4 * k;
                // The code, shifted to bits 3 to 6, is the byte offset of its table entry. A table line is aligned to
                // its length, so OR adds the offset.
                const u32 eighths = shift < 3 ? gate << (3 - shift) : gate >> (shift - 3);
                const float2 terms = ptx::table_f32x2((eighths & 0x78) | gate_line);
                of[k] = {terms.x, terms.y};
            }
            number[0] = __uint_as_float(up[i] << 16);
            number[1] = __uint_as_float(up[i] & 0xFFFF0000);
        }
    };
};

/// Inputs of the kernel if h is in BF16.
struct PlainH {
    using Table = SigmoidTable;
    static constexpr int kStages = 1;
    static constexpr int kTiles = kMatrices - 1;  // one more tile lies in the spare memory of the table
    static constexpr int kSpares = 4, kInDa = 0;

    __device__ __forceinline__ static u8* room(Table& table) { return table.room; }

    struct alignas(128) Stage {
        u8 numbers[2][kTile][kTile * Bf16::kBytes];
    };
    static constexpr u32 kBoxBytes = kBoxRows * kTile * Bf16::kBytes;

    __device__ __forceinline__ static void fetch(Stage& stage, ptx::Barrier& there, const TensorMap& h, int half, int row, int first_row,
                                                 int col, int f) {
        ptx::tma_load(stage.numbers[half][row], h, there, half * f + col, first_row + row);
    }

    __device__ __forceinline__ static void fetch_scales(Stage&, const u8*, u64, int, int, int) {}

    struct Row {
        Bf16::Eight gate, up;
        u32 table;

        __device__ __forceinline__ void load(const Stage& stage, const Table& sigmoids, int in_tile, int col) {
            gate = Bf16::load_shared(stage.numbers[0][in_tile] + col * Bf16::kBytes);
            up = Bf16::load_shared(stage.numbers[1][in_tile] + col * Bf16::kBytes);
            table = sigmoids.base();
        }

        __device__ __forceinline__ void clear(const Table&) { gate = up = Bf16::zeros(); }

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

/// The inputs of a tile, with zeros in rows past the last row.
template <class H>
struct alignas(512) BackwardStage {
    typename H::Stage h;
    u8 da[kTile][kTile * Bf16::kBytes];
    float weight[kTile];
};

/// Values exchanged between the two warps that share a row.
struct RowHalves {
    float largest[2][2 * kTile];  // largest magnitudes of dg and du
    float sum[2][kTile];
};

template <class H>
struct alignas(1024) BackwardShared {
    typename H::Table table;  // the first member, because SigmoidTable requires a low address
    TurnedTile own[H::kTiles];
    BackwardStage<H> stage[H::kStages];
    float4 spare[H::kSpares - H::kInDa][kStripThreads];
    ColumnMaxima<kMatrices> maxima;
    ColumnInverses inverse[kMatrices];
    RowHalves halves;
    int row_id[2 * H::kStages][kTile];  // row ids of the tiles in progress, and of the next tile
    ptx::Barrier there[H::kStages];  // TMA delivered the tile
    ptx::Barrier inverses_there;  // every thread arrives, because racecheck misreads one arrival per warp, and this is not slower
    u32 col_nan;                     // whether a column block is NaN
    u32 total[3];

    __device__ __forceinline__ TurnedTile& tile(int m) {
        return m < H::kTiles ? own[m] : *reinterpret_cast<TurnedTile*>(H::room(table));
    }

    /// The place in shared memory of four of a thread's values of a, for `i` below kSpares: for
    /// i < 4, the first four values of row i; for i >= 4, the last four values of row i % 4.
    __device__ __forceinline__ float4& kept(BackwardStage<H>& of, const StripThread& me, int i) {
        if (i < H::kInDa) return *reinterpret_cast<float4*>(of.da[me.row + i] + me.col * Bf16::kBytes);
        return spare[i - H::kInDa][threadIdx.x];
    }
};

template <class H, int kRule>
__global__ void __launch_bounds__(kStripThreads, 1)
    swiglu_backward(const __grid_constant__ TensorMap h, const u8* __restrict__ h_scales, const __grid_constant__ TensorMap da,
                    const float* __restrict__ weight, u8* __restrict__ dh_codes,
                    typename ScaleType<kRule>::Stored* __restrict__ dh_scales, const __grid_constant__ TensorMap dh_cols,
                    typename ScaleType<kRule>::Stored* __restrict__ dh_col_scales, const __grid_constant__ TensorMap a_cols,
                    typename ScaleType<kRule>::Stored* __restrict__ a_scales, float* __restrict__ parts, u64* dh_counts,
                    u64* a_counts, const int* __restrict__ row_id, int rows, int f, int capacity, Divider by_across) {
    using E = E4m3;
    constexpr u32 kIdTiles = 2 * H::kStages;
    extern __shared__ __align__(1024) u8 raw[];
    BackwardShared<H>& shared = *reinterpret_cast<BackwardShared<H>*>(raw);
    const StripThread me;
    const int lane = me.lane;
    const u32 across = u32(f) / kTile, down = u32(capacity) / kTile, tiles = across * down;
    Tally of_dh, of_a;
    // `n` counts the tiles of this CTA.
    const auto tile_at = [&](u32 n) { return StripTile(blockIdx.x + n * gridDim.x, by_across, across); };
    const auto is_tile = [&](u32 n) { return blockIdx.x + n * gridDim.x < tiles; };
    const auto fetch_ids = [&](u32 n) {
        const u32 in_tile = threadIdx.x - 3 * kTile;
        if (row_id == nullptr || in_tile >= kTile || !is_tile(n)) return;
        const u64 row = tile_at(n).row() + in_tile;
        ptx::copy_4_async(&shared.row_id[n % kIdTiles][in_tile], row_id + row, row < u64(rows));
    };
    // Starts to fetch tile `n`, whose row ids have arrived, and the row ids of the next
    // tile. If the pointer to row ids or to weights is null, they are not fetched.
    const auto fetch = [&](u32 n) {
        if (!is_tile(n)) return;
        const StripTile at = tile_at(n);
        BackwardStage<H>& stage = shared.stage[n % H::kStages];
        const int row = int(at.row()), col = at.col(), left = rows - row;
        if (threadIdx.x < 32) {
            ptx::Barrier& there = shared.there[n % H::kStages];
            const u32 wanted = boxes_wanted(shared.row_id[n % kIdTiles]);
            const int matrix = lane / 4, first = lane % 4 * kBoxRows;
            if (lane == 0) ptx::barrier_arrive_expect(there, __popc(wanted) * (2 * H::kBoxBytes + kBoxRows * sizeof(stage.da[0])));
            __syncwarp();
            if (matrix < kMatrices && (wanted >> lane % 4 & 1)) {
                if (matrix < 2) H::fetch(stage.h, there, h, matrix, first, row, col, f);
                else ptx::tma_load(stage.da[first], da, there, col, row + first);
            }
        }
        H::fetch_scales(stage.h, h_scales, u64(row), col, left, f);
        const u32 in_tile = threadIdx.x - 2 * kTile;  // done by warps that have no scales to fetch
        if (in_tile < kTile && weight != nullptr) ptx::copy_4_async(stage.weight + in_tile, weight + row + in_tile, int(in_tile) < left);
        fetch_ids(n + 1);
    };
    if (threadIdx.x == 0) {
        for (ptx::Barrier& there : shared.there) ptx::barrier_init(there, 1);
        ptx::barrier_init(shared.inverses_there, kStripThreads);
        shared.col_nan = 0;
        ptx::barrier_init_fence();
    }
    if (threadIdx.x < kIdTiles * kTile) shared.row_id[threadIdx.x / kTile][threadIdx.x % kTile] = 0;
    if (weight == nullptr && threadIdx.x < kTile)
        for (BackwardStage<H>& stage : shared.stage) stage.weight[threadIdx.x] = 1.0f;
    __syncthreads();
    fetch_ids(0);
    ptx::copies_wait();
    __syncthreads();
#pragma unroll 1
    for (u32 n = 0; n < H::kStages; ++n) {
        fetch(n);
        ptx::copies_wait();
        __syncthreads();
    }
    shared.table.fill();
    __syncthreads();

    for (u32 n = 0; is_tile(n); ++n) {
        const StripTile at = tile_at(n);
        const int my_row = int(at.strip) * kTile + me.row, first_col = at.col();
        BackwardStage<H>& stage = shared.stage[n % H::kStages];
        ptx::barrier_wait(shared.there[n % H::kStages], n / H::kStages & 1);
        __syncwarp();

        StripValues value[kMatrices];
        float row_largest[2 * kThreadRows], terms[kThreadRows], a_largest[kThreadCols];
        // All rows are read before anything is computed, and before a overwrites da.
        typename H::Row source[kThreadRows];
        Bf16::Eight incoming[kThreadRows];
        float w[kThreadRows];
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            source[r].load(stage.h, shared.table, me.row + r, me.col);
            incoming[r] = Bf16::load_shared(stage.da[me.row + r] + me.col * Bf16::kBytes);
            w[r] = stage.weight[me.row + r];
        }
        const int4 id = *reinterpret_cast<const int4*>(shared.row_id[n % kIdTiles] + me.row);
        if (__any_sync(kAllLanes, (id.x | id.y | id.z | id.w) < 0)) {  // boxes that contain only padding were not loaded
            const int ids[kThreadRows] = {id.x, id.y, id.z, id.w};
#pragma unroll
            for (int r = 0; r < kThreadRows; ++r) {
                if (ids[r] >= 0) continue;
                source[r].clear(shared.table);
                incoming[r] = Bf16::zeros();
                w[r] = 1.0f;  // not negative, so that padding gives +0
            }
        }
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            float silu_up[kThreadCols], das[kThreadCols];
#pragma unroll
            for (int i = 0; i < kThreadCols / 2; ++i) {
                GateTerms gate[2];
                float up[2];
                source[r].two(i, gate, up);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int c = 2 * i + k;
                    das[c] = Bf16::value(incoming[r], c);
                    const SwigluGrad grad = swiglu_grad(gate[k], up[k], das[c], w[r]);
                    value[0][r][c] = grad.gate;
                    value[1][r][c] = grad.up;
                    value[2][r][c] = grad.a;
                    silu_up[c] = grad.silu_up;
                    a_largest[c] = r == 0 ? grad.a : ptx::max_magnitude(a_largest[c], grad.a);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* const v = value[2][r] + half * 4;
                if (half * 4 + r < H::kSpares) shared.kept(stage, me, half * 4 + r) = {v[0], v[1], v[2], v[3]};
            }
            terms[r] = dot_of_neighbours(silu_up, das);
#pragma unroll
            for (int m = 0; m < 2; ++m) row_largest[2 * r + m] = largest_magnitude<kThreadCols>(value[m][r]);
        }
        {
            float largest[kMatrices * kThreadCols];
#pragma unroll
            for (int c = 0; c < kThreadCols; ++c) {
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    largest[m * kThreadCols + c] = largest_magnitude<4>({value[m][0][c], value[m][1][c], value[m][2][c], value[m][3][c]});
                largest[2 * kThreadCols + c] = a_largest[c];
            }
            shared.maxima.write(me, largest);
        }
        const auto larger = [](float a, float b) { return ptx::max_magnitude(a, b); };
        const auto sum = [](float a, float b) { return __fadd_rn(a, b); };
        join_lanes<1, 1>(row_largest, ptx::lane_idx_anew(), larger);  // now the maximum of row lane % 8 / 2: dg's in even lanes, du's in odd lanes
        shared.halves.largest[me.half][me.in_rows()] = row_largest[0];
        join_lanes<1, 1>(terms, ptx::lane_idx_anew(), sum);  // now the sum of row lane % 4
        terms[0] = __fadd_rn(terms[0], __shfl_xor_sync(kAllLanes, terms[0], 4));
        if (lane % 8 < kThreadRows) shared.halves.sum[me.half][me.row + lane % 8] = terms[0];
        if (H::kStages == 1) ptx::copies_wait();
        __syncthreads();

        if (H::kStages == 1) fetch(n + 1);  // no thread reads the tile any more
        const float row_amax = ptx::max_magnitude(row_largest[0], shared.halves.largest[1 - me.half][me.in_rows()]);
        const auto row_scale = block_scale<E, kRule>(__float_as_uint(row_amax));
        if (me.half == 0) {
            const int row = my_row + lane % 8 / 2, part_row = my_row + lane % 8;
            if (row < rows) dh_scales[(u64(u32(row)) * 2 + lane % 2) * across + at.panel] = row_scale.stored;
            of_dh.non_zero += __fmul_rn(row_amax, row_scale.inverse) > E::kLargestToZero;
            of_dh.non_finite += row_scale.is_nan();
            if (lane % 8 < kThreadRows && part_row < rows)
                parts[u64(at.panel) * rows + part_row] = __fadd_rn(terms[0], shared.halves.sum[1][me.row + lane % 8]);
        }
        const int col_matrix = threadIdx.x / kTile, col = ColumnMaxima<kMatrices>::column_at(threadIdx.x % kTile);
        if (col_matrix < kMatrices) {
            const float amax = shared.maxima.at(col_matrix, threadIdx.x % kTile);
            const auto col_scale = block_scale<E, kRule>(__float_as_uint(amax));
            shared.inverse[col_matrix].at(col) = col_scale.inverse;
            if (col_scale.is_nan()) shared.col_nan = 1;
            const u32 to = first_col + col;
            if (col_matrix == 2) a_scales[u64(at.strip) * u32(f) + to] = col_scale.stored;
            else dh_col_scales[u64(at.strip) * u32(2 * f) + to + col_matrix * f] = col_scale.stored;
            if (col_matrix == 2) {
                of_a.non_zero += __fmul_rn(amax, col_scale.inverse) > E::kLargestToZero;
                of_a.non_finite += col_scale.is_nan();
            }
        }
        if (threadIdx.x == 0) ptx::tma_store_wait_read<0>();  // the columns of the last tile have been read
        __syncwarp();
        ptx::barrier_arrive(shared.inverses_there);
        // While the columns are stored, the rows are encoded and stored.
        u8* const row_codes = dh_codes + u64(u32(my_row)) * (2 * f) + (first_col + me.col);
        const int lines = min(rows - my_row, kThreadRows) * 2;  // rows of dg and of du, alternating
        store_lines<2 * kThreadRows>(
            row_codes, f, lines, __any_sync(kAllLanes, row_scale.is_nan()), [&](int i) { return value[i % 2][i / 2]; },
            [&](int i) { return __shfl_sync(kAllLanes, row_scale.inverse, (lane & 24) | i); });
#pragma unroll
        for (int i = 0; i < H::kSpares; ++i) {
            const float4 v = shared.kept(stage, me, i);
            float* const to = value[2][i % 4] + i / 4 * 4;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
        ptx::barrier_wait(shared.inverses_there, n & 1);
        __syncwarp();
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) shared.tile(m).write(me, value[m], shared.inverse[m]);
        if (shared.col_nan != 0) {
            __syncthreads();
#pragma unroll 1
            for (int m = 0; m < kMatrices; ++m) shared.tile(m).clear_nan(shared.inverse[m]);
        }
        ptx::fence_shared_to_async();  // TMA reads the columns, and then overwrites the memory in which a was parked
        ptx::copies_wait();
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll
            for (int m = 0; m < kMatrices; ++m)
                ptx::tma_store(m == 2 ? a_cols : dh_cols, &shared.tile(m), int(at.strip) * kTile, (first_col + (m == 1 ? f : 0)) / 8, 0);
            ptx::tma_store_commit();
            shared.col_nan = 0;
        }
        if (H::kStages > 1) fetch(n + H::kStages);
    }
    if (threadIdx.x == 0) ptx::tma_store_wait_all();
    of_dh.flush(dh_counts, shared.total);
    __syncthreads();
    of_a.flush(a_counts, shared.total);
}

}  // namespace nib
