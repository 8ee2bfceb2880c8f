// What a format is to quantize_units and dequantize_units: a struct with
//   Element      its numbers (small_elements.cuh)
//   kBlock       values that share a record of scales: 16, 32, 64 or 128
//   kPart        of those, the values whose largest magnitude is looked at by itself: a factor for each part
//   kScaleBytes  of a record: 0, 1 or 4
//   kLine        whether a record is for the whole line instead
//   kTensor      whether all blocks share a scale besides
//   kTiles       whether there are square blocks
//   scale        the record of a block, and what its values are multiplied by, from the bits of its largest magnitude
//   refine       of formats whose parts have octaves of their own: those of some parts, and what their values are multiplied by
//   multiplier   what the codes of a part are multiplied by when they are decoded
//   kLimits      whether BF16 numbers are brought to the largest code before, two at a time
//   limit        that of a scale: the largest number times it, which is a BF16 number
//   encode       sixteen values to packed codes; whether one is not zero. kWithin: they are BF16 numbers, under a nearest rounding within
//                the limit if there is one
//   has_pairs    whether two lines of BF16 numbers are encoded side by side under a rounding (Hif4 has how)
//   has_table    whether BF16 numbers are encoded two at a time by what a table has for the scale byte (Nvfp4Block has how, and `bytes_of` and
//                `pair_code` say what table_encoder.cuh asks)
// A record that marks a block has the inverse NaN, and codes of zero. The twin of crates/formats/src/block.rs.
#pragma once
#include "formats/small_elements.cuh"

namespace nib {

/// How powers of two follow from the largest magnitude, `ScaleArg` of the launch: what is added to its bits, whose carry into the exponent is
/// the rule; the same for subnormal ones; the bits from which on the scale is NaN.
struct ScaleArg {
    u32 up;
    u32 up_least;
    u32 nan_from;
};

/// A tensor's own scale: what its values are multiplied by, and one over that.
struct TensorInverse {
    float inverse;
    float unit;
};

/// A block's record, and what its values are multiplied by before the factors of its parts.
struct Scaled {
    u32 record;
    float inverse;

    __device__ __forceinline__ bool is_nan() const { return __float_as_uint(inverse) == kNanBits; }
    __device__ __forceinline__ static Scaled nan(u32 record) { return {record, __uint_as_float(kNanBits)}; }
};

/// A power of two for numbers of E.
template <class E>
__device__ __forceinline__ Scaled power_of(u32 amax, ScaleArg rule) {
    if (amax >= rule.nan_from) return Scaled::nan(kScaleNan);
    // Only where the largest element is below two does a subnormal magnitude reach above the least scale.
    const u32 up = E::kEmax == 0 && amax < 0x00800000 ? rule.up_least : rule.up;
    const u32 byte = min(max(int((amax + up) >> 23) - E::kEmax, 0), 254);
    return {byte, __uint_as_float(byte == 254 ? 0x00400000 : (254 - byte) << 23)};
}

/// What formats have in common whose values have one factor in their block.
template <class E>
struct OneFactor {
    using Element = E;
    static constexpr bool kLine = false, kTensor = false, kTiles = false, kLimits = false;

    template <int kRound>
    __host__ __device__ static constexpr bool has_pairs() {
        return false;
    }
    template <int kRound>
    __host__ __device__ static constexpr bool has_table() {
        return false;
    }

    /// `decision(i)`: how value i is rounded, where that is known at run time; of kStochastic `rounded_up` of `stochastic_codes`.
    template <int kRound, bool kWithin, int kFactors, class Decide>
    __device__ __forceinline__ static bool encode(const float (&x)[16], const float (&factor)[kFactors], u32 (&words)[E::kBits / 2],
                                                  const Decide& decision) {
        if constexpr (kRound == kNearestEven) {
            return E::template nearest_even<kWithin>(x, factor[0], words);
        } else if constexpr (kRound == kStochastic) {
            return stochastic_codes<E>(x, factor, words, decision);
        } else {
            float y[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) y[i] = __fmul_rn(x[i], factor[0]);
            return encode_by<E>(y, words, decision);
        }
    }
};

/// Sixteen numbers by a rounding known at run time.
template <class E, class Decide>
__device__ __forceinline__ bool encode_by(const float (&y)[16], u32 (&words)[E::kBits / 2], const Decide& decision) {
    constexpr u32 kMagnitude = E::kTwosComplement ? 0xFF : (1u << (E::kBits - 1)) - 1;
    u32 bytes[4] = {0, 0, 0, 0}, any = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const u32 code = spec_code<E>(y[i], decision(i));
        any |= code & kMagnitude;
        bytes[i / 4] |= code << (i % 4 * 8);
    }
    pack_sixteen<E::kBits>(bytes, words);
    return any != 0;
}

/// A format of the OCP MX family: blocks of 32 under a power of two.
template <class E>
struct MxFormat : OneFactor<E> {
    static constexpr int kBlock = 32, kPart = 32, kScaleBytes = 1;
    static constexpr bool kLimits = E::kBits == 6 || E::kTwosComplement;

    __device__ __forceinline__ static float limit(const Scaled& scale) { return __fmul_rn(e8m0_decode(scale.record), E::kMax); }
    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg rule, TensorInverse) { return power_of<E>(amax, rule); }
    __device__ __forceinline__ static float multiplier(u32 record, int) { return e8m0_decode(record); }
};

}  // namespace nib
