// BF16 -> a random Hadamard transform along the rows -> blocks with scales along the rows.
//
// quantize_hadamard_rows<E, kLen, Round>: x, codes [rows][cols], scales [rows][cols / E::kBlock], E8M0; cols is a multiple of 128, kLen a
//   transform's length. row_id and counts as in quantize.cuh. x comes by `map`, as rows of one unit of 64 numbers, in tiles of 32 with the
//   128-byte swizzle. A lane takes a unit at a time; units = cols / 64 of a row, and `by_units` divides by it; rows * units is below 2^31.
//   128 threads, sizeof(UnitsShared<E>) dynamic shared memory; any grid, best 4 ctas a multiprocessor, and 128 * ctas a multiple of `units`, for then a lane draws its signs once.
//
// A unit lies in a lane's registers as a whole, so that no butterfly but that of stride 64 leaves it, and so do its blocks, or half of one.
#pragma once
#include "kernels/hadamard_unit.cuh"
#include "math/reduce.cuh"
#include "ptx/tma.cuh"

namespace nib {

constexpr int kUnitThreads = 128;
constexpr int kUnitChunks = kUnit / 8;

/// A line of 128 bytes a lane, in chunks of 16: as the copy engine swizzles them, no two of eight lanes meet in a bank.
struct alignas(1024) LaneLines {
    uint4 chunks[32][kUnitChunks];

    __device__ __forceinline__ uint4& at(int lane, int i) { return chunks[lane][i ^ (lane % kUnitChunks)]; }
};

/// What a warp has.
template <class E>
struct UnitShared {
    LaneLines input, signs;
    uint4 codes[32][kUnit * E::kCodeBits / 128];
    ptx::Barrier loaded;
};

template <class E>
struct UnitsShared {
    UnitShared<E> of_warps[kUnitThreads / 32];
    u32 total[3];
};

/// Where a lane's unit lies, and whether any of the warp's lanes has one.
struct Unit {
    u32 of_row;  // its number among the units of the row
    int id;      // of the row; negative if the unit is padding or does not exist
    bool any;
};

template <class E, int kLen, class Round>
__global__ void __launch_bounds__(kUnitThreads, 4)
    quantize_hadamard_rows(const __grid_constant__ TensorMap map, u8* __restrict__ codes, u8* __restrict__ scales, u64* counts,
                           const int* __restrict__ row_id, int rows, int cols, Divider by_units, u32 units, PowerRule rule,
                           const RoundingArg rounding, const HadamardArg hadamard) {
    using Codes = UnitCodes<E, Round>;
    extern __shared__ uint4 raw[];
    UnitsShared<E>& of_all = *reinterpret_cast<UnitsShared<E>*>(raw);
    UnitShared<E>& shared = of_all.of_warps[threadIdx.x / 32];
    const Round round(rounding);
    const int lane = threadIdx.x % 32;
    const u32 all_units = u32(rows) * units, tasks = (all_units + 31) / 32, stride = gridDim.x * (kUnitThreads / 32);
    u32 signed_unit = ~0u, phase = 0;
    Tally tally;

    if (lane == 0) {
        ptx::barrier_init(shared.loaded, 1);
        ptx::barrier_init_fence();
    }
    __syncwarp();
    const auto fetch = [&](u32 task) {
        const u32 mine = task * 32 + lane, row = by_units.divide(mine);
        Unit unit = {mine - row * units, -1, true};
        if (mine < all_units) unit.id = row_id == nullptr ? int(row) : __ldg(row_id + row);
        if (row_id != nullptr) unit.any = __any_sync(kAllLanes, unit.id >= 0);
        if (lane == 0 && unit.any) {
            ptx::barrier_arrive_expect(shared.loaded, sizeof(shared.input));
            ptx::tma_load(&shared.input, map, shared.loaded, 0, task * 32);
        }
        return unit;
    };
    u32 task = blockIdx.x * (kUnitThreads / 32) + threadIdx.x / 32;
    Unit next = {0, -1, false};
    if (task < tasks) next = fetch(task);
#pragma unroll 1
    for (; task < tasks; task += stride) {
        const Unit unit = next;
        if (unit.of_row != signed_unit) {
#pragma unroll 1
            for (int i = 0; i < kUnitChunks; ++i) shared.signs.at(lane, i) = hadamard.sign_bits_of_eight(unit.of_row * kUnit + i * 8);
            signed_unit = unit.of_row;
        }
        float v[kUnit];
        if (unit.any) {
            ptx::barrier_wait(shared.loaded, phase);
            phase ^= 1;
#pragma unroll
            for (int i = 0; i < kUnitChunks; ++i) {
                const uint4 line = shared.input.at(lane, i);
                Bf16::Eight plain = {{line.x, line.y, line.z, line.w}};
                flip(plain, shared.signs.at(lane, i));
#pragma unroll
                for (int j = 0; j < 8; ++j) v[i * 8 + j] = Bf16::value(plain, j);
            }
            __syncwarp();
        }
        if (task + stride < tasks) next = fetch(task + stride);
        Codes out;
        if (unit.any) {
            const auto draws = round.draws(u64(u32(unit.id)) * cols + unit.of_row * kUnit);
            const auto bits_of = [&](int i) { return draws.bits(i); };
            out.template encode<kLen>(v, hadamard.factor, rule, round, bits_of);
        }
        if (unit.id < 0) {
            // A sign has made -0 of padding.
            for (u32& word : out.words) word = 0;
            for (u8& scale : out.scales) scale = 0;
        } else {
            tally.non_zero += out.non_zero;
            tally.non_finite += out.non_finite;
        }
        // The codes of a warp lie together.
        if (lane == 0) ptx::tma_store_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < Codes::kWords; i += 4)
            shared.codes[lane][i / 4] = {out.words[i], out.words[i + 1], out.words[i + 2], out.words[i + 3]};
        ptx::fence_shared_to_async();
        __syncwarp();
        const u32 first = task * 32, mine = first + lane;
        constexpr u32 kUnitBytes = kUnit * E::kCodeBits / 8;
        if (lane == 0) {
            ptx::bulk_store(codes + u64(first) * kUnitBytes, shared.codes, min(all_units - first, 32u) * kUnitBytes);
            ptx::tma_store_commit();
        }
        if (mine < all_units) {
            if constexpr (Codes::kBlocks == 2) reinterpret_cast<u16*>(scales)[mine] = u16(out.scales[0] | out.scales[1] << 8);
            else if (lane % 2 == 0) scales[mine / 2] = out.scales[0];
        }
    }
    if (lane == 0) ptx::tma_store_wait_all();
    tally.flush(counts, of_all.total, Codes::kLanes);
}

}  // namespace nib
