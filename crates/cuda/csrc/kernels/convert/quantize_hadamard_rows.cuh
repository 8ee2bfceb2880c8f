// Applies a random Hadamard transform to BF16 values along the rows, then quantizes to blocks along the rows.
//
// quantize_hadamard_rows<E, kLen, Round>: x and codes are [rows][cols], scales [rows][cols / E::kBlock], E8M0. cols is a multiple of 128; kLen
//   is the transform's length. row_id and counts have the meaning of quantize.cuh. The tensor map `map` has one row per unit of 64 values; its
//   boxes have 32 rows in the 128-byte swizzle. A lane quantizes one unit at a time. A row has units = cols / 64 <= kMostUnits; `by_units`
//   divides by `units`; rows * units < 2^31. 512 threads, sizeof(UnitsShared<E>) bytes of dynamic shared memory; one CTA per SM is fastest.
//
// Each lane holds a whole unit of 64 values in registers. So only butterflies of stride 64 and blocks of 128
// values need data from the neighbouring lane. The warps of a CTA take their next units dynamically. With
// equal shares, only a few warps would still run at the end, because the SM issues the oldest warps first.
//
// Speed in % of the bandwidth limit of quantize.cuh, with transforms of length 64, at 32768 x 7168 (4096 x 7168): MXFP4 79 % (58
// %), E4M3 97 % (73 %). The figures above were measured before the kernel's last change. The kernel needs 20 instructions per value.
#pragma once
#include "math/reduce.cuh"
#include "pieces/convert/hadamard_unit.cuh"
#include "ptx/tma.cuh"

namespace nib {

constexpr int kUnitThreads = 512;
constexpr int kUnitWarps = kUnitThreads / 32;
constexpr int kMostUnits = 768;
constexpr int kUnitChunks = kUnit / 8;

/// Each unit is a row of 128 bytes in TMA's 128-byte swizzle,
/// so that reads of eight adjacent rows have no bank conflicts.
template <int kLines>
struct alignas(1024) UnitLines {
    uint4 chunks[kLines][kUnitChunks];

    __device__ __forceinline__ uint4& at(int line, int i) { return chunks[line][i ^ (line % kUnitChunks)]; }

    /// Splits `at` into two steps: `line` returns the address of chunk 0 of a row, and the second step finds
    /// chunk i from that address. The second step is one XOR, which costs less than computing an index.
    __device__ __forceinline__ u32 line(int line) const { return shared_address(&chunks[line][line % kUnitChunks]); }
    __device__ __forceinline__ static uint4 chunk(u32 line, int i) { return *static_cast<const uint4*>(at_shared_address(line ^ i * 16)); }
};

template <class E>
struct UnitsShared {
    UnitLines<32> input[kUnitWarps];
    UnitLines<kMostUnits> signs;  // random signs for the values of a row
    uint4 codes[kUnitWarps][32][kUnit * E::kCodeBits / 128];
    ptx::Barrier loaded[kUnitWarps];
    u32 taken;
    u32 total[3];
};

/// A lane's unit. The struct also says whether any lane of the warp has a unit.
struct Unit {
    u32 task;    // index of the warp's first task
    u32 of_row;  // index of the unit in its row
    int id;      // row id of the unit; negative if the unit is padding or does not exist
    bool any;
};

template <class E, int kLen, class Round>
__global__ void __launch_bounds__(kUnitThreads, 1)
    quantize_hadamard_rows(const __grid_constant__ TensorMap map, u8* __restrict__ codes, u8* __restrict__ scales, u64* counts,
                           const int* __restrict__ row_id, int rows, int cols, Divider by_units, u32 units, PowerRule rule,
                           const RoundingArg rounding, const HadamardArg hadamard) {
    using Codes = UnitCodes<E, Round>;
    extern __shared__ uint4 raw[];
    UnitsShared<E>& shared = *reinterpret_cast<UnitsShared<E>*>(raw);
    const Round round(rounding);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& input = shared.input[warp];
    auto& codes_of_warp = shared.codes[warp];
    ptx::Barrier& loaded = shared.loaded[warp];
    const u32 all_units = u32(rows) * units, tasks = (all_units + 31) / 32;
    u32 phase = 0;
    Tally tally;

    if (lane == 0) {
        ptx::barrier_init(loaded, 1);
        ptx::barrier_init_fence();
    }
    if (threadIdx.x == 0) shared.taken = kUnitWarps;
    __syncwarp();
    const auto fetch = [&](u32 number) {
        const u32 task = blockIdx.x + number * gridDim.x, mine = task * 32 + lane, row = by_units.divide(mine);
        Unit unit = {task, mine - row * units, -1, true};
        if (task >= tasks) return unit;
        if (mine < all_units) unit.id = row_id == nullptr ? int(row) : __ldg(row_id + row);
        if (row_id != nullptr) unit.any = __any_sync(kAllLanes, unit.id >= 0);
        if (lane == 0 && unit.any) {
            ptx::barrier_arrive_expect(loaded, sizeof(input));
            ptx::tma_load(&input, map, loaded, 0, task * 32);
        }
        return unit;
    };
    Unit next = fetch(warp);
    for (u32 i = threadIdx.x; i < units * kUnitChunks; i += kUnitThreads)
        shared.signs.at(i / kUnitChunks, i % kUnitChunks) = hadamard.sign_bits_of_eight(i * 8);
    __syncthreads();
#pragma unroll 1
    while (next.task < tasks) {
        const Unit unit = next;
        const auto take_next = [&] {
            u32 number = 0;
            if (lane == 0) number = atomicAdd(&shared.taken, 1u);
            next = fetch(__shfl_sync(kAllLanes, number, 0));
        };
        // The codes of a warp's units are contiguous, so one bulk store writes them.
        const auto store = [&](const Codes& out) {
            if (lane == 0) ptx::tma_store_wait_read<0>();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < Codes::kWords; i += 4)
                codes_of_warp[lane][i / 4] = {out.words[i], out.words[i + 1], out.words[i + 2], out.words[i + 3]};
            ptx::fence_shared_to_async();
            __syncwarp();
            const u32 first = unit.task * 32, mine = first + lane;
            constexpr u32 kUnitBytes = kUnit * E::kCodeBits / 8;
            if (lane == 0) {
                ptx::bulk_store(codes + u64(first) * kUnitBytes, codes_of_warp, min(all_units - first, 32u) * kUnitBytes);
                ptx::tma_store_commit();
            }
            if (mine < all_units) {
                if constexpr (Codes::kBlocks == 2) reinterpret_cast<u16*>(scales)[mine] = u16(out.scales[0] | out.scales[1] << 8);
                else if (lane % 2 == 0) scales[mine / 2] = out.scales[0];
            }
        };
        if (!unit.any) {
            take_next();
            store(Codes::zeros());
            continue;
        }
        ptx::barrier_wait(loaded, phase);
        phase ^= 1;
        float v[kUnit];
        const u32 line = input.line(lane), signs = shared.signs.line(unit.of_row);
#pragma unroll
        for (int i = 0; i < kUnitChunks; ++i) {
            const uint4 eight = input.chunk(line, i);
            Bf16::Eight plain = {{eight.x, eight.y, eight.z, eight.w}};
            flip(plain, shared.signs.chunk(signs, i));
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i * 8 + j] = Bf16::value(plain, j);
        }
        __syncwarp();
        take_next();
        Codes out;
        const auto draws = round.draws(u64(u32(unit.id)) * cols + unit.of_row * kUnit);
        const auto bits_of = [&](int i) { return draws.bits(i); };
        out.template encode<kLen>(v, hadamard.factor, rule, round, bits_of);
        // Flipping signs has turned padding zeros into -0, but their codes must be +0.
        if (unit.id < 0) out = Codes::zeros();
        tally.non_zero += out.non_zero;
        tally.non_finite += out.non_finite;
        store(out);
    }
    if (lane == 0) ptx::tma_store_wait_all();
    tally.flush(counts, shared.total, Codes::kLanes);
}

}  // namespace nib
