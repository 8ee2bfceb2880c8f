// Looks up the sigmoid of BF16 values in a shared-memory table. The table entries are
// bit-identical to the sigmoid of math/exp.cuh; a look-up takes a fifth of its instructions.
#pragma once
#include "math/exp.cuh"
#include "ptx/packed.cuh"
#include "ptx/types.cuh"

namespace nib {

/// The table is indexed by the bits of a BF16 value. Beyond the ends of the table, sigmoid is
/// constant.
struct SigmoidTable {
    static constexpr u32 kLow = 0x3300;   // 2^-25: sigmoid is 0.5 for smaller magnitudes of either sign
    static constexpr u32 kHigh = 0x42D0;  // 104: sigmoid is 1 from 104 on, and 0 from -104 down
    static constexpr int kEntries = kHigh - kLow + 1;

    static constexpr int kRoom = 0x4000;

    alignas(16) float positive[0x4000 / 4];
    u8 room[kRoom];            // spare memory for other uses
    float negative[kEntries];  // 0x8000 bytes after `positive`, so that a value's sign bit is the offset

    /// All threads of the CTA call this function; a barrier must follow.
    __device__ __forceinline__ void fill() {
        for (int i = threadIdx.x; i < kEntries; i += blockDim.x) {
            const float z = exp_of_negative(-__uint_as_float((kLow + i) << 16));
            const float sum = __fadd_rn(1.0f, z);
            positive[i] = divide_by_one_to_two(1.0f, sum);
            negative[i] = divide_by_one_to_two(z, sum);
        }
    }

    /// Returns the argument `base` of `two`, which is the table's address in both
    /// halves of a word. The table must start in the first 16 KiB of shared memory.
    __device__ __forceinline__ u32 base() const { return shared_address(this) * 0x10001; }

    /// Returns the sigmoids of both values of a word, first that of the low half.
    __device__ __forceinline__ static void two(u32 base, u32 numbers, float (&s)[2]) {
        constexpr u32 kNegativeLow = 0x10000 - kLow, kLast = kEntries - 1;
        const u32 i = ptx::add_clamp_s16x2(numbers & 0x7FFF7FFF, kNegativeLow << 16 | kNegativeLow, kLast << 16 | kLast);
        const u32 address = i * 4 + ((numbers & 0x80008000) | base);
        s[0] = *static_cast<const float*>(at_shared_address(address & 0xFFFF));
        s[1] = *static_cast<const float*>(at_shared_address(address >> 16));
    }
};
static_assert(SigmoidTable::kEntries * 4 <= 0x4000, "an offset within a line, a base below that and the sign share 16 bits");
static_assert(sizeof(SigmoidTable) == 0x8000 + (SigmoidTable::kEntries * 4 + 15) / 16 * 16, "the lines lie 32 KiB apart");

}  // namespace nib
