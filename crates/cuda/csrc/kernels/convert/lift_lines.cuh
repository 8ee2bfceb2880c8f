// Blocks along lines under powers of two, of an element that E4M3 holds -> E4M3 under a power of two for 128; nearest-even where it does not hold
// the value. The twin of crates/formats/src/lift.rs. For products: of rows, and of the lines that a column plane stores. lift_rows.cuh counts as
// well, and passes over padding.
//
// lift_lines<F, kWhole>: codes [lines][code_bytes(len)] -> out [lines][len]; from, to: the records of a line's blocks, in any layout.
//   kWhole: len % 16 == 0, and planes start on 16 bytes. A thread takes 16 neighbours, eight threads a block of 128: `by_units` divides by
//   units = 8 * ceil(len / 128). 256 threads; grid ceil(lines * units / 256), the grid has fewer than 2^31 threads.
#pragma once
#include "math/reduce.cuh"
#include "pieces/convert/units.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

/// Octaves by which a lifted scale lies below the largest source scale: the largest number still fits.
template <class E>
__host__ __device__ constexpr int lift_headroom() {
    int octaves = 0;
    for (float largest = 2.0f * E::kMax; largest <= 448.0f; largest *= 2.0f) ++octaves;
    return octaves;
}

template <class F, bool kWhole>
__global__ void __launch_bounds__(256) lift_lines(const u8* __restrict__ codes, const RecordPlane from, u8* __restrict__ out, const RecordPlane to,
                                                  int lines, int len, Divider by_units, u32 units) {
    using E = typename F::Element;
    constexpr int kBits = E::kBits, kLifted = 128, kFarthest = -32;
    static_assert(F::kBlock % 16 == 0 && kLifted % F::kBlock == 0 && F::kScaleBytes == 1);
    const u32 task = blockIdx.x * 256 + threadIdx.x;
    const int line = by_units.divide(task), first = int(task - line * units) * 16;
    const bool exists = line < lines && first < len;

    u32 record = kScaleNan, words[kBits / 2] = {};
    if (exists) {
        record = from.template load<1>(line, first / F::kBlock);
        const u32 line_bytes = code_bytes(kBits, len), at = first / 8 * kBits;
        const u8* const in = codes + u64(line) * line_bytes + at;
        if constexpr (kWhole) {
#pragma unroll
            for (int i = 0; i < kBits / 2; ++i) words[i] = __ldg(reinterpret_cast<const u32*>(in) + i);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * kBits; ++i)
                if (at + i < line_bytes) words[i / 4] |= u32(__ldg(in + i)) << (i % 4 * 8);
        }
    }
    // A NaN is 0, so that it is never the largest.
    u32 largest = (record + 1) & 0xFF;
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, lane));
    const int target = max(int(largest) - 1 - lift_headroom<E>(), 0);
    if (!exists) return;
    if (first % kLifted == 0) to.template store<1>(line, first / kLifted, u32(target));

    // Past the farthest nothing differs any more: every number has vanished.
    const float factor = __uint_as_float(u32(127 + max(int(record) - target, kFarthest)) << 23);
    float value[16];
    E::decode(words, value);
    u32 lifted[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] = __fmul_rn(value[4 * i + j], factor);
        lifted[i] = u32(ptx::e4m3x2_from_f32(four[0], four[1])) | u32(ptx::e4m3x2_from_f32(four[2], four[3])) << 16;
        if (record == kScaleNan) lifted[i] = 0x7F7F7F7F;
    }
    u8* const at = out + u64(line) * len + first;
    if constexpr (kWhole) {
        ptx::store_16(at, {lifted[0], lifted[1], lifted[2], lifted[3]});
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (first + i < len) at[i] = u8(lifted[i / 4] >> (i % 4 * 8));
    }
}

}  // namespace nib
