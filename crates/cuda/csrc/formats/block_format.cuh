// What a format is to quantize_units and dequantize_units: a struct with
//   Element      its numbers (small_elements.cuh)
//   kBlock       values that share a record of scales: 16, 32, 64 or 128
//   kPart        of those, the values whose largest magnitude is looked at by itself: a factor for each part.
//                Below 16 in blocks of 64 only; or 16 of 128
//   kScaleBytes  of a record: 0, 1, 4 or 8. 4 in blocks of 64 or 128 only, and then an F32 unless blocks have parts: padding takes the least
//   kPartBits    only with parts of 16: bits of a part in the record, the first part's behind the lowest byte
//   kLine        whether there is one record for the whole line instead of one for each block
//   kTensor      whether all blocks of a tensor share a second scale
//   kTiles       whether there are square blocks
//   scale        from the bits of a block's largest magnitude: its record, and the factor for its values
//   refine       only where blocks have parts: what the record has of some parts (octaves, or scales), and the factors for their values
//   multiplier   the factor for the codes of a part when they are decoded
//   kLimits      whether BF16 numbers are clamped before they are encoded, two at a time
//   limit        the bound of that clamp under a scale: the element's largest number times the scale, which is a BF16 number
//   encode       sixteen values to packed codes; returns whether one is not zero. kWithin: the values are BF16 numbers, and
//                clamped if the format has kLimits and the rounding is to nearest
//   has_pairs    whether two lines of BF16 numbers are encoded side by side under a rounding; Hif4 shows how
//   has_table    whether BF16 numbers are encoded two at a time, by a table's entry for the scale byte; Nvfp4Block shows how,
//                with the `bytes_of` and `pair_code` that table_encoder.cuh calls
//   kChosen      whether scales are chosen as ScalingArg says: false, but in Chosen<..>. What follows is for that alone
//   kThresholds  whether `refine` takes the thresholds of octaves too
//   kCorrection  whether records of blocks of 16 may be `corrected` once their values are rounded; Nvfp4. Its scale takes what the largest value is multiplied by
//   kCandidates  whether blocks of 16 choose between scales: scale<true> takes the largest magnitude to 4 instead of 6, and `lost` compares; Nvfp4Codes
//                shows how
// The record of a block with a NaN or an infinity has the inverse NaN, and the block's codes are zeros. The twin of
// crates/formats/src/block.rs.
//
// A line of its own, NIB_UNIT_FORMAT(format, scale rule, struct, roundings..), declares the struct for a format. The build script of this
// crate reads such lines, and makes of them the table that launches look in (src/ops/convert/units.rs) and formats/all.cuh. To the
// compiler they are nothing.
//   format       its name in crates/formats/src/format.rs
//   scale rule   the one of crates/formats/src/e8m0.rs that the struct is for; AnyOther: all that no line before names for the format
//   struct       of the namespace nib, or an alias there
//   roundings    NearestEven, NearestAway, Stochastic: those that have instances of quantize_units to themselves. The others share one,
//                kAnyRounding. There are few or none for a format with faster kernels of its own, which do what is common.
//                Where scales may be chosen (ScalingArg), two instances more, of Chosen<struct>, take every rounding.
#pragma once
#include "formats/small_elements.cuh"

#define NIB_UNIT_FORMAT(...)

namespace nib {

/// A rule for scales that are powers of two; `ScaleArg` of the launch. `up` is added to the bits of the largest
/// magnitude, and the carry into the exponent rounds the scale as the rule says. `up_least` takes its place where the
/// magnitude is subnormal. From the bits `nan_from` on the scale is NaN.
struct ScaleArg {
    u32 up;
    u32 up_least;
    u32 nan_from;
};

/// A tensor's own scale: the factor for its values, and one over that. With scales of earlier steps, `unit` is the
/// magnitude that was expected instead (`tensor_scales` in whole_scales.cuh).
struct TensorInverse {
    float inverse;
    float unit;
};

/// A block's record, and the factor for its values, before the factors of its parts.
struct Scaled {
    u32 record;
    float inverse;

    __device__ __forceinline__ bool is_nan() const { return __float_as_uint(inverse) == kNanBits; }
    __device__ __forceinline__ static Scaled nan(u32 record) { return {record, __uint_as_float(kNanBits)}; }
};

/// Whether parts of a block have scales of their own under the block's.
template <class F>
constexpr bool kHasParts = F::kPart < F::kBlock;

/// Whether those are numbers, of sixteen values each, and not octaves. They leave room above a part's largest magnitude as a block's scale does.
template <class F>
constexpr bool kPartsHaveScales = kHasParts<F> && F::kPart == 16;

/// What holds a record of so many bytes.
template <int kBytes>
struct RecordBits {
    using Type = u32;
};
template <>
struct RecordBits<8> {
    using Type = u64;
};
template <class F>
using Record = typename RecordBits<F::kScaleBytes>::Type;

/// A power of two for numbers of E.
template <class E>
__device__ __forceinline__ Scaled power_of(u32 amax, ScaleArg rule) {
    if (amax >= rule.nan_from) return Scaled::nan(kScaleNan);
    // Only where the largest element is below two does a subnormal magnitude reach above the least scale.
    const u32 up = E::kEmax == 0 && amax < 0x00800000 ? rule.up_least : rule.up;
    const u32 byte = min(max(int((amax + up) >> 23) - E::kEmax, 0), 254);
    return {byte, __uint_as_float(byte == 254 ? 0x00400000 : (254 - byte) << 23)};
}

/// How scales are chosen within a rule; `ScalingArg` of the launch.
struct ScalingArg {
    float headroom;
    float high, low;  // thresholds of octaves
    u32 divides;      // whether values are multiplied by the reciprocal of their scale as an F32 number
    u32 corrects;     // whether a block's scale is corrected by what rounding lost, and rounded at random
    u32 candidates;   // 0: the scale that takes the largest magnitude to 6. Or to 4, by squared errors (1) or by absolute ones (2)

    /// The bits of a magnitude with room above it.
    __device__ __forceinline__ u32 over(u32 amax) const {
        return amax >= kInfinityBits ? amax : __float_as_uint(fminf(__fmul_rn(__uint_as_float(amax), headroom), 0x1.fffffep127f));
    }
};

/// A format whose scales are chosen as ScalingArg says. It is encoded by the rounding that is known at run time.
template <class F>
struct Chosen : F {
    static constexpr bool kChosen = true;

    template <int kRound>
    __host__ __device__ static constexpr bool has_pairs() {
        return false;
    }
    template <int kRound>
    __host__ __device__ static constexpr bool has_table() {
        return false;
    }
};

/// The common part of formats with one factor for all values of a block.
template <class E>
struct OneFactor {
    using Element = E;
    static constexpr bool kLine = false, kTensor = false, kTiles = false, kLimits = false;
    static constexpr bool kChosen = false, kThresholds = false, kCandidates = false, kCorrection = false;

    template <int kRound>
    __host__ __device__ static constexpr bool has_pairs() {
        return false;
    }
    template <int kRound>
    __host__ __device__ static constexpr bool has_table() {
        return false;
    }

    /// `decision(i)` says how value i is rounded, where that is known only at run time. For kStochastic it is the
    /// `rounded_up` of `stochastic_codes`.
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

/// Encodes sixteen numbers by a rounding that is known only at run time.
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
    // Under some rules the largest values are past the largest code, which only conversions to FP8 take care of by themselves.
    static constexpr bool kLimits = E::kBits < 8 || E::kTwosComplement;

    __device__ __forceinline__ static float limit(const Scaled& scale) { return __fmul_rn(e8m0_decode(scale.record), E::kMax); }
    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg rule, TensorInverse) { return power_of<E>(amax, rule); }
    __device__ __forceinline__ static float multiplier(u32 record, int) { return e8m0_decode(record); }
};

}  // namespace nib
