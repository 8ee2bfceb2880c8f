// GEMMs of FP8 blocks: the ring of pipeline stages in shared memory, the warps that fill the ring, and the warps that multiply, scale and store.
#pragma once
#include "pieces/products/grouped_store.cuh"

namespace nib {

constexpr int kBlockK = 128;  // elements of k per stage: one scale block, so each stage needs one promotion (scaling and F32 addition)

/// How many columns of D (rows of B) share a scale of B. kTile: the 128 columns of a tile, as
/// weights need. kStrips: strips of 32 columns, as columns lifted from MXFP4 rows need. kPowers and
/// kFloats: each column has its own scale, which is a power of two (kPowers) or any F32 (kFloats).
enum class ScalesOfB { kTile, kStrips, kPowers, kFloats };
constexpr int kStrips = 4;
__host__ __device__ constexpr bool by_column(ScalesOfB of) { return of == ScalesOfB::kPowers || of == ScalesOfB::kFloats; }
__host__ __device__ constexpr int columns_a_scale(ScalesOfB of) {
    return by_column(of) ? 1 : of == ScalesOfB::kTile ? kBlockN : kBlockN / kStrips;
}
__host__ __device__ constexpr int scale_warps(ScalesOfB of) { return by_column(of) ? 3 : 2; }

/// The scales of columns are stored in the order of the accumulators, as four lists. The first list is for lanes 0, 4,
/// 8, ... of a warp, which have columns 8j and 8j + 1; the second list is for lanes 1, 5, 9, ..., which have columns 8j
/// + 2 and 8j + 3; and so on. A list has 32 scales and four words of padding, so that the four lists start in different
/// banks. Powers of two are stored as BF16, two per word, because the tensor cores wait while lanes read shared memory.
__host__ __device__ constexpr int lane_words(ScalesOfB of) { return of == ScalesOfB::kPowers ? 16 : 32; }
__host__ __device__ constexpr int words_of_b(ScalesOfB of) { return by_column(of) ? 4 * (lane_words(of) + 4) : kStrips; }

template <int kStages, int kOutBuffers, int kBoxes, ScalesOfB kScalesB, class Out>
struct SharedLayout {
    u8 a[kStages][kBlockM * kBlockK];
    u8 b[kStages][kBlockN * kBlockK];
    Out out[kMathWarps][kOutBuffers][kBoxes][kBoxStaged / sizeof(Out)];  // sums that are being stored to D
    ptx::Barrier loaded[kMathWarps][kOutBuffers];                        // the old values of D have arrived in `out`
    alignas(16) float scale_a[kStages][kBlockM];                         // multiplied by the scale of B if the whole tile shares one scale of B
    alignas(16) u32 scale_b[kStages][words_of_b(kScalesB)];
    Tile tile[kStages];           // written with the first stage of each tile
    ptx::Barrier full[kStages];   // TMA and the scale warps delivered the stage
    ptx::Barrier empty[kStages];  // the math warps of the whole cluster have finished reading the stage

    /// True if a stage holds two blocks of k for a tile that has rows for only one wave. The space for A then
    /// holds the first block's rows of A, the second block's rows of A, and the second block's rows of B.
    static constexpr bool kPairs = false;
    static constexpr int kSecondA = kWaveRows * kBlockK, kSecondB = 2 * kSecondA;
};

/// Fills the ring with the codes of A and B. One warp calls this function.
template <Ragged kRagged, int kStages, int kCluster, class Shared>
__device__ __forceinline__ void produce(Shared& shared, const TensorMap& map_a, const TensorMap& map_b, const Groups& groups) {
    constexpr int kSlice = kBlockM / kCluster;
    const int rank = kCluster == 1 ? 0 : int(ptx::cluster_cta_rank());
    produce<kRagged, kStages, kCluster, kBlockK>(
        shared, groups, [&](u32 stage, ptx::Barrier& full, const Tile& tile, int k, int slices) {
            if (rank < slices)
                load_shared_by_cluster<kCluster>(shared.a[stage] + rank * kSlice * kBlockK, map_a, full, k, tile.row_a + rank * kSlice);
            ptx::tma_load(shared.b[stage], map_b, full, k, tile.row_b);
        });
}

/// The scales of four adjacent rows for four blocks of k, loaded by as few and as wide
/// loads as their layout allows. One-byte scales are loaded kWidth at a time from a row,
/// where kWidth is 4 or 8. If kWidth is 8, the second half is saved for the next call.
template <int kWidth>
struct FourRows {
    enum Layout { kBytesByRow, kBytesByOddRow, kBytesByBlock, kF32ByRow, kF32ByBlock, kScattered };
    static constexpr int kAhead = 4;

    /// `rows` is the number of rows.
    __device__ __forceinline__ FourRows(const Scales& scales, int rows, int first_block) : scales_(scales), rows_(rows) {
        const bool by_row = scales.block_stride == 1, by_block = scales.row_stride == 1 && scales.block_stride % 4 == 0 && scales.block_stride != 0;
        // The bytes of a row, or the four F32 scales of a row, start at a multiple of their total size.
        const u32 odd = scales.row_stride | u32(first_block);
        if (by_block)
            layout_ = scales.is_f32 ? kF32ByBlock : kBytesByBlock;
        else if (by_row && odd % 4 == 0 && scales.is_f32)
            layout_ = kF32ByRow;
        else if (by_row && odd % kWidth == 0 && !scales.is_f32)
            layout_ = kBytesByRow;
        else if (by_row && !scales.is_f32 && u32(rows) * scales.row_stride % 4 == 0)
            layout_ = kBytesByOddRow;
        else
            layout_ = kScattered;
    }

    /// Variant for a layout that the caller knows at compile time.
    __device__ __forceinline__ FourRows(const Scales& scales, int rows, Layout layout)
        : scales_(scales), rows_(rows), layout_(layout) {}

    __device__ __forceinline__ Layout layout() const { return layout_; }

    /// Loads blocks `block` to `block` + 3 of four rows from `row` on, a multiple of 4. Blocks past `last` get
    /// arbitrary scales. `from` is the index of `block` within the tile, counted from the tile's first block.
    __device__ __forceinline__ void load(int row, int block, int from, int last) {
        const u8* const bytes = static_cast<const u8*>(scales_.values);
        const u32* const words = static_cast<const u32*>(scales_.values);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 r = min(row + i, rows_ - 1);
            // If the scales of one block are contiguous, they are padded to 16 bytes.
            const u32 padded = min(u32(row), scales_.block_stride - 4);
            const u32 at = u32(min(block + i, last)) * scales_.block_stride + padded;
            if (layout_ == kBytesByRow || layout_ == kBytesByOddRow) {
                const u32 first = r * scales_.row_stride + block;
                if constexpr (kWidth == 4) {
                    raw_[i][0] = layout_ == kBytesByRow ? __ldg(words + first / 4) : four_bytes(words, first);
                } else if (from % 8 != 0) {
                    raw_[i][0] = later_[i];
                } else if (layout_ == kBytesByRow) {
                    const uint2 eight = __ldg(reinterpret_cast<const uint2*>(bytes + first));
                    raw_[i][0] = eight.x;
                    later_[i] = eight.y;
                } else {
                    // Loads eight bytes that may start at any byte of a
                    // word. Nothing past the buffer's last word is read.
                    u32 three[3];
#pragma unroll
                    for (int w = 0; w < 3; ++w) three[w] = __ldg(words + min(first / 4 + w, u32(rows_) * scales_.row_stride / 4 - 1));
                    raw_[i][0] = __funnelshift_r(three[0], three[1], first % 4 * 8);
                    later_[i] = __funnelshift_r(three[1], three[2], first % 4 * 8);
                }
            } else if (layout_ == kBytesByBlock) {
                raw_[i][0] = __ldg(reinterpret_cast<const u32*>(bytes + at));
            } else if (layout_ == kF32ByRow || layout_ == kF32ByBlock) {
                const u32 four = layout_ == kF32ByRow ? r * scales_.row_stride + block : at;
                const uint4 v = __ldg(reinterpret_cast<const uint4*>(words + four));
                raw_[i][0] = v.x, raw_[i][1] = v.y, raw_[i][2] = v.z, raw_[i][3] = v.w;
            } else {
#pragma unroll
                for (int ahead = 0; ahead < kAhead; ++ahead) raw_[i][ahead] = scales_.load(r, min(block + ahead, last));
            }
        }
    }

    /// Returns the scales of the rows for the `ahead`-th block.
    __device__ __forceinline__ float4 scales(int ahead) const {
        if (layout_ == kBytesByBlock) {
            const u32 four = raw_[ahead][0];
            return {e8m0_decode(four & 255), e8m0_decode(four >> 8 & 255), e8m0_decode(four >> 16 & 255),
                    e8m0_decode(four >> 24)};
        }
        if (layout_ == kF32ByBlock)
            return {__uint_as_float(raw_[ahead][0]), __uint_as_float(raw_[ahead][1]), __uint_as_float(raw_[ahead][2]),
                    __uint_as_float(raw_[ahead][3])};
        const auto of = [&](int i) {
            if (layout_ == kBytesByRow || layout_ == kBytesByOddRow) return e8m0_decode(raw_[i][0] >> (8 * ahead) & 255);
            return scales_.decode(raw_[i][ahead]);
        };
        return {of(0), of(1), of(2), of(3)};
    }

  private:
    /// Extracts four bytes that may start at any byte of a
    /// word. Nothing past the buffer's last word is read.
    __device__ __forceinline__ u32 four_bytes(const u32* words, u32 first) const {
        const u32 end = min(first / 4 + 1, u32(rows_) * scales_.row_stride / 4 - 1);
        return __funnelshift_r(__ldg(words + first / 4), __ldg(words + end), first % 4 * 8);
    }

    const Scales& scales_;
    int rows_;
    Layout layout_;
    u32 raw_[4][kAhead];
    u32 later_[4];
};

/// Stores the scales of four columns from `column` on, in
/// the order of lanes that `words_of_b` defines.
template <ScalesOfB kScalesB>
__device__ __forceinline__ void put_columns(u32* scale_b, int column, float4 four) {
    constexpr int kLane = lane_words(kScalesB);
    u32* const to = scale_b + column % 8 / 2 * (kLane + 4) + column / 8 * (kLane / 16);
    const u32 of[4] = {__float_as_uint(four.x), __float_as_uint(four.y), __float_as_uint(four.z), __float_as_uint(four.w)};
    if constexpr (kScalesB == ScalesOfB::kPowers) {
        to[0] = __byte_perm(of[0], of[1], 0x7632);
        to[kLane + 4] = __byte_perm(of[2], of[3], 0x7632);
    } else {
        *reinterpret_cast<uint2*>(to) = {of[0], of[1]};
        *reinterpret_cast<uint2*>(to + kLane + 4) = {of[2], of[3]};
    }
}

/// The scale warps call this function. It fetches scales for four stages at a time and puts them
/// into the ring. `thread` is the index within the scale warps. Each of the first 64 threads
/// fetches the scales of four rows of A. If each column has a scale, each of the next 32 threads
/// fetches the scales of four columns of B; otherwise the first threads fetch the scales of B too.
template <Ragged kRagged, int kStages, int kCluster, ScalesOfB kScalesB, class Shared>
__device__ __forceinline__ void fetch_scales(Shared& shared, const Scales& scales_a, const Scales& scales_b,
                                             const Groups& groups, int thread) {
    constexpr int kAhead = FourRows<8>::kAhead;
    constexpr int kSharedB = columns_a_scale(kScalesB);
    const bool of_a = !by_column(kScalesB) || thread < kBlockM / 4;
    const int slot = of_a ? thread * 4 : thread * 4 - kBlockM;
    const int rows = of_a ? groups.m : kRagged == Ragged::kRows ? groups.n * groups.count : groups.n;
    // If rows of B share scales, the matrix of each group has its own rows of scales.
    const int rows_b = ceil_div(groups.n, kSharedB);
    Schedule<kRagged, kBlockM, kCluster> schedule(groups);
    Ring<kStages> ring;
    Tile tile;
    const auto deliver = [&] {
        __syncwarp();
        if (ptx::lane_idx() == 0) ptx::barrier_arrive(shared.full[ring.stage]);
        ring.advance();
    };
    while (schedule.take(tile)) {
        const int first = tile.k / kBlockK, blocks = ceil_div(tile.len_k, kBlockK), last = first + blocks - 1;
        if (blocks == 0) {
            ptx::barrier_wait(shared.empty[ring.stage], ring.parity ^ 1);
            deliver();
        }
        const int group = kRagged == Ragged::kRows ? (tile.row_b - tile.col_d) / groups.n : 0;
        const auto row_b = [&](int strip) { return group * rows_b + min(tile.col_d / kSharedB + strip, rows_b - 1); };
        FourRows<8> mine(of_a ? scales_a : scales_b, rows, first);
        for (int from = 0; from < blocks; from += kAhead) {
            mine.load((of_a ? tile.row_a : tile.row_b) + slot, first + from, from, last);
            u32 of_b[kScalesB == ScalesOfB::kTile ? kAhead : 1];
            if constexpr (kScalesB == ScalesOfB::kTile) {
#pragma unroll
                for (int ahead = 0; ahead < kAhead; ++ahead) of_b[ahead] = scales_b.load(row_b(0), min(first + from + ahead, last));
            } else if constexpr (kScalesB == ScalesOfB::kStrips) {
                of_b[0] = 0;
                if (thread < kAhead * kStrips)
                    of_b[0] = scales_b.load(row_b(thread % kStrips), min(first + from + thread / kStrips, last));
            }
#pragma unroll
            for (int ahead = 0; ahead < kAhead; ++ahead) {
                if (from + ahead >= blocks) break;
                float4 four = mine.scales(ahead);
                if constexpr (kScalesB == ScalesOfB::kTile) {
                    const float b = scales_b.decode(of_b[ahead]);
                    four = {four.x * b, four.y * b, four.z * b, four.w * b};
                }
                ptx::barrier_wait(shared.empty[ring.stage], ring.parity ^ 1);
                if (of_a)
                    *reinterpret_cast<float4*>(shared.scale_a[ring.stage] + slot) = four;
                else
                    put_columns<kScalesB>(shared.scale_b[ring.stage], slot, four);
                if constexpr (kScalesB == ScalesOfB::kStrips) {
                    if (thread / kStrips == ahead) shared.scale_b[ring.stage][thread % kStrips] = __float_as_uint(scales_b.decode(of_b[0]));
                }
                deliver();
            }
        }
    }
    ptx::barrier_wait(shared.empty[ring.stage], ring.parity ^ 1);
    deliver();
}

/// Starts the product of a stage for one wave of 64 rows: four WGMMAs over its 128 elements of k. `a` and `b` are the
/// low halves of the tiles' descriptors. One step of 32 elements along k is 32 bytes, which add 2 to a descriptor.
template <ptx::Fp8 kA, ptx::Fp8 kB>
__device__ __forceinline__ void multiply(float (&partial)[64], u32 a, u32 b) {
    ptx::wgmma_pin(partial);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 32; ++step)
        ptx::wgmma_m64n128k32_fp8<kA, kB>(partial, ptx::wgmma_descriptor(a + 2 * step), ptx::wgmma_descriptor(b + 2 * step),
                                          step != 0);
    ptx::wgmma_commit();
    ptx::wgmma_pin(partial);
}

/// Waits for the WGMMAs that `multiply` started.
__device__ __forceinline__ void finish(float (&partial)[64]) {
    ptx::wgmma_wait();
    ptx::wgmma_pin(partial);
}

/// The scales for a lane's partial sums of one wave: the scales of its two rows, and those of its 32
/// columns, unless the rows' scales already contain the scale of B (kTile). One scale per column costs
/// one more multiplication per element, and more loads. Half of these loads are issued while the product
/// runs (`fetch`), because the tensor cores leave little shared-memory bandwidth to other readers.
template <ScalesOfB kScalesB>
struct Promotion {
    static constexpr int kVectors = lane_words(kScalesB) / 4, kFetched = kVectors / 2;
    float rows[2];
    float4 strips;
    const uint4* columns;
    uint4 next[kFetched];

    template <class Shared>
    __device__ __forceinline__ void read(const Shared& shared, u32 stage, int row) {
        rows[0] = shared.scale_a[stage][row];
        rows[1] = shared.scale_a[stage][row + 8];
        const uint4* const of_b = reinterpret_cast<const uint4*>(shared.scale_b[stage]);
        if constexpr (kScalesB == ScalesOfB::kStrips) strips = *reinterpret_cast<const float4*>(of_b);
        if constexpr (by_column(kScalesB)) columns = of_b + ptx::lane_idx() % 4 * (kVectors + 1);
    }

    /// The math warps call this function while the product of the stage runs.
    __device__ __forceinline__ void fetch() {
        if constexpr (by_column(kScalesB)) {
#pragma unroll
            for (int i = 0; i < kFetched; ++i) next[i] = columns[i];
        }
    }

    /// Computes total = fma(scales, partial, total).
    __device__ __forceinline__ void add(float (&total)[64], float (&partial)[64]) {
        if constexpr (kScalesB == ScalesOfB::kTile) {
#pragma unroll
            for (int i = 0; i < 64; ++i) total[i] = __fmaf_rn(rows[i / 2 % 2], partial[i], total[i]);
        } else if constexpr (kScalesB == ScalesOfB::kStrips) {
            const float strip[kStrips] = {strips.x, strips.y, strips.z, strips.w};
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                const float scale = rows[i / 2 % 2] * strip[i / 16];
                total[i] = __fmaf_rn(scale, partial[i], total[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const uint4 four = next[i % kFetched];
                if (i + kFetched < kVectors) next[i % kFetched] = columns[i + kFetched];
                const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int c = 0; c < 32 / kVectors; ++c) {
                    const u32 pair = words[c / 2 % 4];
                    const float scale = __uint_as_float(kScalesB == ScalesOfB::kFloats ? words[c % 4]
                                                        : c % 2 == 0                   ? pair << 16
                                                                                       : pair & 0xFFFF0000);
                    const int column = 32 / kVectors * i + c, at = column / 2 * 4 + column % 2;
                    total[at] = __fmaf_rn(rows[0], partial[at] * scale, total[at]);
                    total[at + 2] = __fmaf_rn(rows[1], partial[at + 2] * scale, total[at + 2]);
                }
            }
        }
    }
};

/// Processes the stages of the ring: multiplies, promotes (scales and adds in
/// F32), and stores finished tiles. `warp` is the index among the math warps.
template <ptx::Fp8 kA, ptx::Fp8 kB, Ragged kRagged, int kStages, int kCluster, int kOutBuffers, int kBoxes, ScalesOfB kScalesB, Adds kAdds,
          bool kTransposed, class Out, class Shared>
__device__ __forceinline__ void consume(Shared& shared, const TensorMap& map_d, int warp) {
    const u32 lane = ptx::lane_idx();
    const int first_row = warp / 4 * kWaveRows;             // first row, in the tile, of this warpgroup's first wave
    const int warp_row = first_row + warp % 4 * kOutRows;   // first row, in the tile, of this warp
    const int lane_row = warp_row + lane / 4;               // row of this lane's even accumulators
    constexpr int kNextWave = 2 * kWaveRows;
    // The loop over stages is not unrolled if each column has a scale, because
    // too few registers are left; with register spills, the kernel is 8 % slower.
    constexpr bool kUnrolled = !by_column(kScalesB);
    constexpr u32 kStageA = kBlockM * kBlockK / 16, kStageB = kBlockN * kBlockK / 16;
    const u32 first_a = ptx::wgmma_descriptor_low(shared_address(shared.a[0]) + first_row * kBlockK);
    const u32 first_b = ptx::wgmma_descriptor_low(shared_address(shared.b[0]));
    Ring<kStages> ring;
    bool ready = false;  // true if the ring's next stage is known to be full
    float total[2][64];
#pragma unroll
    for (int wave = 0; wave < 2; ++wave)
#pragma unroll
        for (int i = 0; i < 64; ++i) total[wave][i] = 0.0f;
    using Stored = Stores<kAdds, kTransposed, Out, kOutBuffers, kBoxes>;
    // The parts of a finished tile are stored while the tensor cores work: parts [0, kLast) during the tile's own last
    // product, [kLast, kFirst) during the next tile's first product, and [kFirst, kAll) during the next tile's second
    // product. Each range is about a third of the parts, but the first has no more parts than there are buffers. The
    // next tile's first product is added to the first wave's sums, so all parts of that wave come before kFirst.
    constexpr int kAll = Stored::kAll, kThird = ceil_div(kAll, 3), kLast = kOutBuffers < kThird ? kOutBuffers : kThird;
    constexpr int kFirst = kLast + ceil_div(kAll - kLast, 2);
    static_assert((!Stored::kLoads || (kLast >= Stored::kLeaving && kLast <= kAll - Stored::kAhead)) && kFirst >= Stored::kParts);
    constexpr int kParts = Stored::kParts;
    Stored stores(shared.out[warp], shared.loaded[warp], map_d);
    const auto rows_of = [&](const Tile& tile, int part) -> Rows {
        const int row = warp_row + part / kParts * kNextWave;
        // If the warp adds to D, then D is a gradient. All rows of a gradient
        // exist up to the matrix's end, and TMA stores nothing past this end.
        const bool whole = Stored::kLoads;
        return {tile.row_a + row, tile.col_d, tile.matrix, whole ? kOutRows : tile.kept - row, whole ? kOutRows : tile.stored - row};
    };
    // Stores parts [from, to) of a tile. If the warp adds to D, this also loads later parts of D ahead.
    // `more` says whether a tile `next` follows; if so, the first parts of `next` are loaded too. After
    // the last tile nothing is loaded, because no copy to shared memory may be in flight when a CTA exits.
    const auto store = [&](const Tile& tile, int from, int to, const Tile& next = {}, bool more = false) {
#pragma unroll
        for (int part = from; part < to; ++part) {
            // A tile with one wave has no rows for half of its parts.
            // No code waits for the stores of parts without rows.
            if (Shared::kPairs && rows_of(tile, part).stored <= 0) continue;
            stores.store(total[part / kParts], rows_of(tile, part), part);
            constexpr int kPending = Stored::kLeaving;
            const int later = part + Stored::kAhead;
            if (later >= kAll && more) stores.template load<kPending>(rows_of(next, later - kAll), later - kAll);
            if (later >= kOutBuffers && later < kAll) stores.template load<kPending>(rows_of(tile, later), later);
        }
    };
    // Loads the parts of D that `store` does not load. These are the parts of
    // a tile whose buffers are free before the tile's first part is stored.
    const auto load = [&](const Tile& tile) {
#pragma unroll
        for (int part = Stored::kAhead; part < kOutBuffers; ++part)
            stores.template load<0>(rows_of(tile, part), part);
    };
    const auto release = [&](u32 stage) {
        // Every lane has read what it needs of the stage, and a few lanes arrive for the whole
        // warp. compute-sanitizer's racecheck does not understand this and reports the accesses
        // that the arrival orders. If every thread arrives, racecheck reports nothing.
        __syncwarp();
        if (lane < kCluster) {  // lane i arrives at CTA i, which fills part of this stage
            if constexpr (kCluster == 1)
                ptx::barrier_arrive(shared.empty[stage]);
            else
                ptx::barrier_arrive_at(shared.empty[stage], lane);
        }
    };
    const auto await = [&](u32 stage) {
        if (!ready) ptx::barrier_wait(shared.full[stage], ring.parity);
    };
    // Advances to the next stage. The code queries before a promotion whether
    // that stage is full, so that the answer has arrived after the promotion.
    const auto advance = [&](u32 stage) {
        ring.stage = stage + 1 == kStages ? 0 : stage + 1;
        if (stage + 1 == kStages) ring.parity ^= 1;
        ready = ptx::barrier_passed(shared.full[ring.stage], ring.parity);
    };
    // The previous tile, whose remaining parts are stored during the first
    // products of the next tile. Initially there is no previous tile.
    Tile before = {Stored::kNowhere};
    stores.begin(kLast);
#pragma unroll
    for (int part = kLast; part < kLast + Stored::kAhead; ++part) stores.template load<0>(rows_of(before, part), part);
    // The scales of a promotion are read before its product starts. But if the warp adds to D and
    // needs the registers, the scales are read after the stores that are issued during that product.
    constexpr bool kLate = Stored::kLoads;
    // Multiplies both waves of a stage. While the tensor cores work, parts of the previous tile, or of
    // this tile, are stored.
    const auto take = [&](const Tile& tile, u32 stage, bool first, bool second, bool last) {
        if (!first) await(stage);
        const u32 a = first_a + stage * kStageA, b = first_b + stage * kStageB;
        float partial[64];
        Promotion<kScalesB> upper, lower;
        if (!kLate) upper.read(shared, stage, lane_row);
        multiply<kA, kB>(partial, a, b);
        if (!kLate) upper.fetch();
        if (first) store(before, kLast, kFirst, tile, true);
        if (second) load(tile);
        if (kLate) upper.read(shared, stage, lane_row), upper.fetch();
        finish(partial);
        upper.add(total[0], partial);
        if (!kLate) lower.read(shared, stage, lane_row + kNextWave);
        multiply<kA, kB>(partial, a + kNextWave * kBlockK / 16, b);
        if (!kLate) lower.fetch();
        if (first) store(before, kFirst, kAll, tile, true);
        if (first && last) load(tile);
        if (last) store(tile, 0, kLast);
        if (kLate) lower.read(shared, stage, lane_row + kNextWave), lower.fetch();
        finish(partial);
        if constexpr (!by_column(kScalesB)) release(stage);
        advance(stage);
        lower.add(total[1], partial);
        if constexpr (by_column(kScalesB)) release(stage);
    };
    // Multiplies the two blocks of a stage with a single wave (kPairs). The product of the first block is promoted while
    // the second block is multiplied. The second product uses the registers of the other wave's sums, which are free.
    const auto take_pair = [&](u32 stage) {
        const u32 a = first_a + stage * kStageA, second_a = a + Shared::kSecondA / 16, second_b = a + Shared::kSecondB / 16;
        float partial[64];
        Promotion<kScalesB> promotion, second;
        promotion.read(shared, stage, lane_row), second.read(shared, stage, lane_row + kWaveRows);
        multiply<kA, kB>(partial, a, first_b + stage * kStageB);
        multiply<kA, kB>(total[1], second_a, second_b);
        ptx::wgmma_wait_until<1>();
        ptx::wgmma_pin(partial);
        promotion.add(total[0], partial);
        finish(total[1]);
        release(stage);
        advance(stage);
        second.add(total[0], total[1]);
    };
    for (;;) {
        await(ring.stage);
        Tile tile = uniform(shared.tile[ring.stage]);
        if (tile.len_k < 0) break;
        // The product of this tile is empty, so D must not change.
        if (kAdds != Adds::kNone && tile.len_k == 0) tile.row_a = Stored::kNowhere;
        const int blocks = ceil_div(tile.len_k, kBlockK);
        if (tile.kept > first_row + kNextWave && blocks > 0) {
            for (int block = 0; block < blocks;) {
                if (kUnrolled && ring.stage == 0 && blocks - block >= kStages) {
                    // With the loop unrolled over all stages, addresses are constants, which is 2 to 3 % faster.
#pragma unroll
                    for (int stage = 0; stage < kStages; ++stage)
                        take(tile, stage, stage == 0 && block == 0, stage <= 1 && block + stage == 1, stage == kStages - 1 && block == blocks - kStages);
                    block += kStages;
                } else {
                    take(tile, ring.stage, block == 0, block == 1, block == blocks - 1);
                    ++block;
                }
            }
        } else {
            // In this branch only the first wave of this warpgroup has
            // rows, or no wave has rows, or the contraction is empty.
            store(before, kLast, kAll, tile, true);
            load(tile);
            const bool some = tile.kept > first_row && blocks > 0;
            int block = 0;
            if constexpr (Shared::kPairs) {
                if (Shared::is_paired(tile)) {
                    for (; block + 1 < blocks; block += 2) {
                        if (block != 0) await(ring.stage);
                        if (some) {
                            take_pair(ring.stage);
                        } else {
                            release(ring.stage);
                            advance(ring.stage);
                        }
                    }
                    // `take_pair` has overwritten the registers that hold the sums of the second wave.
#pragma unroll
                    for (int i = 0; i < 64; ++i) total[1][i] = 0.0f;
                }
            }
            for (; block < max(blocks, 1); ++block) {
                const u32 stage = ring.stage;
                if (block != 0) await(stage);
                if (some) {
                    Promotion<kScalesB> promotion;
                    promotion.read(shared, stage, lane_row);
                    float partial[64];
                    multiply<kA, kB>(partial, first_a + stage * kStageA, first_b + stage * kStageB);
                    promotion.fetch();
                    finish(partial);
                    promotion.add(total[0], partial);
                }
                release(stage);
                advance(stage);
            }
            store(tile, 0, kLast);
        }
        before = tile;
    }
    store(before, kLast, kAll);
    ptx::tma_store_wait_all();
}

}  // namespace nib
