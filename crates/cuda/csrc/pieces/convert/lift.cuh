// Converts E2M1 codes with one power-of-two scale to E4M3 codes with another power-of-two scale, for
// kernels that lift and kernels that quantize. The CPU implementation is crates/formats/src/lift.rs.
//
// If a source scale is at most 2^11 times smaller than the largest source scale, its values are normal in E4M3, and each
// factor of two adds 8 to their codes. Blocks whose values are normal need only integer arithmetic. Other blocks are rare and use a lookup table.
#pragma once
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"

namespace nib {

/// The E4M3 codes to which E2M1 codes are mapped for one pair of scales.
/// The instruction PRMT looks up four codes at a time in `magnitudes`.
struct alignas(16) Lift {
    uint2 magnitudes;  // E4M3 codes of the eight magnitudes
    u32 signs;         // 0x80808080; 0 for a NaN, whose codes lose their signs
    u32 changed;       // bit c is set if magnitude c changes its value
};

/// The lookup table has one entry for each difference source
/// - target from -32 to 6, and one entry for a NaN source.
constexpr int kLiftFar = 32;
constexpr u32 kLiftNan = kLiftFar + 7;
constexpr int kLifts = kLiftFar + 8;
/// The entries from kLiftNormal on, except the NaN's, give normal numbers. kLiftLow and kLiftHigh are the magnitudes
/// of the first of these entries; kLiftOctave is the increment of each non-zero magnitude per factor of two.
constexpr u32 kLiftNormal = kLiftFar - 5;
constexpr u32 kLiftLow = 0x14100800, kLiftHigh = 0x24201C18;
constexpr u32 kLiftOctave = 0x08080808;
/// Masks of the lowest and of the highest bit of each of four bytes.
constexpr u32 kEachByte = 0x01010101, kEachSign = 0x80808080;

struct LiftTable {
    Lift entry[kLifts];
};

/// Returns the E4M3 code of halves / 2 · 2^octaves, rounded to nearest even, and whether the value changed.
struct LiftedCode {
    u32 code;
    bool changed;
};
__host__ __device__ constexpr LiftedCode lifted(u32 halves, int octaves) {
    const int shift = octaves + 8;  // counted from E4M3's smallest step, 2^-9
    if (shift < 0) {
        if (shift < -8) return {0, halves != 0};
        const u32 floor = halves >> -shift, rest = halves - (floor << -shift), half = 1u << (-shift - 1);
        return {floor + (rest > half || (rest == half && floor % 2 == 1)), rest != 0};
    }
    u32 steps = halves << shift, code = 0;
    while (steps >= 16) {
        steps /= 2;
        code += 8;
    }
    return {code + steps, false};  // steps are 8 to 15, and the 8 belongs to the exponent
}

__host__ __device__ constexpr LiftTable make_lifts() {
    constexpr u32 kHalves[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    LiftTable table = {};
    for (int i = 0; i < int(kLiftNan); ++i) {
        Lift& lift = table.entry[i];
        lift.signs = 0x80808080;
        for (int c = 0; c < 8; ++c) {
            const LiftedCode to = lifted(kHalves[c], i - kLiftFar);
            (c < 4 ? lift.magnitudes.x : lift.magnitudes.y) |= to.code << (8 * (c % 4));
            lift.changed |= u32(to.changed) << c;
        }
    }
    table.entry[kLiftNan].magnitudes = {0x7F7F7F7F, 0x7F7F7F7F};
    return table;
}

__device__ constexpr LiftTable kLiftTable = make_lifts();

/// Returns the table index for a source scale and a target scale; the target scale is at most 2^6 times smaller.
__device__ __forceinline__ u32 lift_index(u32 source, int target) {
    return source == kScaleNan ? kLiftNan : u32(max(int(source) - target, -kLiftFar) + kLiftFar);
}

__device__ __forceinline__ bool lifts_to_normal(u32 entry) { return entry - kLiftNormal < kLiftNan - kLiftNormal; }

/// Converts four of a word's eight E2M1 codes to E4M3: the first four codes, or with kHigh the last four.
template <bool kHigh>
__device__ __forceinline__ u32 lift_four(u32 codes, const uint2& magnitudes, u32 signs) {
    const u32 selector = (kHigh ? codes >> 16 : codes) & 0x7777;
    // Moves the sign of a nibble to the top of a byte. For even
    // codes, the shift by one nibble also moves the sign to the top.
    const u32 sign = __byte_perm(codes, codes << 4, kHigh ? 0x3726 : 0x1504);
    return __byte_perm(magnitudes.x, magnitudes.y, selector) | (sign & signs);
}

/// Converts four codes. `low` and `high` hold the results
/// for the eight magnitudes, and all signs are kept.
template <bool kHigh>
__device__ __forceinline__ u32 lift_word(u32 codes, u32 low, u32 high) {
    const u32 selector = kHigh ? (codes & E2m1::kMagnitudes) >> 16 : codes & E2m1::kMagnitudes;
    // Moves the sign of a nibble to the top of a byte, by the method of lift_four.
    return __byte_perm(low, high, selector) | (__byte_perm(codes, codes << 4, kHigh ? 0x3726 : 0x1504) & kEachSign);
}

/// Converts a block's E2M1 codes to another scale: by arithmetic, or through the lookup table if that scale is much
/// larger.
struct BlockLift {
    uint2 magnitudes;
    u32 signs;

    __device__ __forceinline__ BlockLift(u32 source, int target) : BlockLift(lift_index(source, target)) {}
    /// Takes the results from one entry of the lookup table.
    __device__ __forceinline__ explicit BlockLift(u32 entry) : signs(kEachSign) {
        const u32 rise = (entry - kLiftNormal) * kLiftOctave;
        magnitudes = {kLiftLow + (rise & 0xFFFFFF00), kLiftHigh + rise};
        if (!lifts_to_normal(entry)) {
            const Lift& by = kLiftTable.entry[entry];
            magnitudes = by.magnitudes;
            signs = by.signs;
        }
    }

    /// Converts sixteen codes.
    __device__ __forceinline__ uint4 sixteen(u32 first, u32 second) const {
        return {lift_four<false>(first, magnitudes, signs), lift_four<true>(first, magnitudes, signs), lift_four<false>(second, magnitudes, signs),
                lift_four<true>(second, magnitudes, signs)};
    }
};

/// Returns whether the value of any of these codes changed.
__device__ __forceinline__ bool any_changed(u32 codes, u32 changed) {
    u32 seen = 0;
#pragma unroll 1  // rare, so unrolling is not worth the instructions
    for (int i = 0; i < 8; ++i) seen |= 1u << (codes >> (4 * i) & 7);
    return (seen & changed) != 0;
}

/// Returns byte + 1, but 0 for the NaN 0xFF, so that a maximum ignores NaN.
__device__ __forceinline__ u32 above_nan(u32 byte) { return (byte + 1) & 0xFF; }

/// Computes `above_nan` of bytes 0 and 2 of a word; the results are the two halves of a word.
__device__ __forceinline__ u32 above_nan_x2(u32 bytes) { return ((bytes & 0x00FF00FF) + 0x00010001) & 0x00FF00FF; }

/// Returns the target scale byte of a lift, from the largest `above_nan` of its
/// source scales. The target is the largest source byte minus 6, but at least 0.
__device__ __forceinline__ int lift_target(u32 largest_above_nan) { return max(int(largest_above_nan) - 7, 0); }

/// Loads four scale bytes; from the `left`-th on, bytes are 0xFF.
template <bool kWhole>
__device__ __forceinline__ u32 load_scales(const u8* from, int left) {
    if constexpr (kWhole) return __ldg(reinterpret_cast<const u32*>(from));
    u32 four = 0xFFFFFFFF;
#pragma unroll
    for (int b = 0; b < 4; ++b)
        if (b < left) four ^= (from[b] ^ 0xFFu) << (8 * b);
    return four;
}

}  // namespace nib
