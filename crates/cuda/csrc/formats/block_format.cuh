// The interface of a format for quantize_units and dequantize_units: a struct with
//   Element      its element type (small_elements.cuh)
//   kBlock       values per scale record: 16, 32, 64 or 128
//   kPart        values per part of a block: the largest magnitude of each part is measured, and each part has its own factor.
//                Below 16 only in blocks of 64; or 16 in blocks of 128
//   kScaleBytes  bytes of a record: 0, 1, 4 or 8. 4 only in blocks of 64 or 128, as F32 unless blocks have parts; padding: least scale
//   kPartBits    only with parts of 16: bits per part in the record; the first part's bits follow the lowest byte
//   kLine        whether a whole line has one record instead of one record per block
//   kTensor      whether all blocks of a tensor share a second scale
//   kTiles       whether 2-D blocks (kBlock x kBlock) are supported
//   kSquares     whether the lines of a square (kBlock x kBlock) share scales, and each line has a record: true only in Squared<..>
//   refine_in_square  only where blocks have parts: `refine` with the largest magnitudes of the squares that share octaves
//   scale        maps the bits of a block's largest magnitude to its record and the factor for its values
//   refine       only where blocks have parts: the record's bits for some parts (octaves, or scales), and the factors for their values
//   multiplier   the factor for the codes of a part when they are decoded
//   kLimits      whether BF16 values are clamped before they are encoded, two at a time
//   limit        the bound of that clamp under a scale: the element's largest value times the scale, which is a BF16 number
//   encode       sixteen values to packed codes; returns whether any code is not zero. kWithin: the values are BF16 numbers, and
//                clamped if the format has kLimits and the rounding is to nearest
//   has_pairs    whether two lines of BF16 values are encoded side by side under a rounding mode; see Hif4
//   has_table    whether BF16 values are encoded two at a time, with a table entry per scale byte; see Nvfp4Block,
//                with the `bytes_of` and `pair_code` that table_encoder.cuh calls
//   kChosen      whether scales are chosen by ScalingArg: true only in Chosen<..>. The members below are for that case only
//   kThresholds  whether `refine` also takes the thresholds of octaves
//   kCorrection  whether records of blocks of 16 may be `corrected` after rounding (Nvfp4); `scale` takes the largest value's multiplier
//   kCandidates  whether blocks of 16 choose between two scales: scale<true> maps the largest magnitude to 4, not 6; `lost` compares;
//                see Nvfp4Codes
// A block with a NaN or an infinity has a record whose inverse is NaN, and its codes are zeros. The twin of
// crates/formats/src/block.rs.
//
// A line of its own, NIB_UNIT_FORMAT(format, scale rule, struct, roundings..), declares the struct for a format. This crate's build
// script reads these lines, and generates the table for launches (src/ops/convert/units.rs) and formats/all.cuh. For the
// compiler the macro is empty.
//   format       its name in crates/formats/src/format.rs
//   scale rule   the rule of crates/formats/src/e8m0.rs for this struct; AnyOther: all rules that no earlier line names for the format
//   struct       in the namespace nib, or an alias there
//   roundings    NearestEven, NearestAway, Stochastic: the rounding modes with their own instances of quantize_units. All others share one,
//                kAnyRounding. A format with faster kernels for the common cases needs few such instances or none.
//                Where scales may be chosen (ScalingArg), two more instances, of Chosen<struct>, handle every rounding mode.
#pragma once
#include "formats/small_elements.cuh"

#define NIB_UNIT_FORMAT(...)

namespace nib {

/// A rule for power-of-two scales; `ScaleArg` of the launch. `up` is added to the bits of the largest magnitude, and
/// the carry into the exponent rounds the scale according to the rule. For subnormal magnitudes `up_least` replaces
/// `up`. From the bits `nan_from` on the scale is NaN.
struct ScaleArg {
    u32 up;
    u32 up_least;
    u32 nan_from;
};

/// A tensor's scale: the factor for its values, and its reciprocal. With delayed scales (of earlier steps), `unit` is
/// the expected magnitude instead (`tensor_scales` in whole_scales.cuh).
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

/// Whether parts of a block have their own scales, relative to the block's scale.
template <class F>
constexpr bool kHasParts = F::kPart < F::kBlock;

/// Whether those scales are numbers for sixteen values each, not octaves. Like a block's scale they have headroom above the largest.
template <class F>
constexpr bool kPartsHaveScales = kHasParts<F> && F::kPart == 16;

/// The type that holds a record of kBytes bytes.
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

/// A power-of-two scale for values of E.
template <class E>
__device__ __forceinline__ Scaled power_of(u32 amax, ScaleArg rule) {
    if (amax >= rule.nan_from) return Scaled::nan(kScaleNan);
    // A subnormal magnitude exceeds the least scale only if the largest element is below two.
    const u32 up = E::kEmax == 0 && amax < 0x00800000 ? rule.up_least : rule.up;
    const u32 byte = min(max(int((amax + up) >> 23) - E::kEmax, 0), 254);
    return {byte, __uint_as_float(byte == 254 ? 0x00400000 : (254 - byte) << 23)};
}

/// Non-default choice of scales within a rule; `ScalingArg` of the launch.
struct ScalingArg {
    float headroom;
    float high, low;  // thresholds of octaves
    u32 divides;      // whether values are multiplied by the F32 reciprocal of their scale
    u32 corrects;     // whether a block's scale is corrected for rounding losses, and rounded stochastically
    u32 candidates;   // 0: the scale maps the largest magnitude to 6. 1, 2: to 6 or 4, by squared errors (1) or by absolute errors (2)

    /// The bits of a magnitude times the headroom.
    __device__ __forceinline__ u32 over(u32 amax) const {
        return amax >= kInfinityBits ? amax : __float_as_uint(fminf(__fmul_rn(__uint_as_float(amax), headroom), 0x1.fffffep127f));
    }
};

/// A format whose scales are chosen by ScalingArg. The rounding mode is known only at run time.
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

/// A format with scales of squares (crates/formats/src/square.rs). The rounding mode is known only at run time.
template <class F>
struct Squared : F {
    static constexpr bool kSquares = true;

    template <int kRound>
    __host__ __device__ static constexpr bool has_pairs() {
        return false;
    }
    template <int kRound>
    __host__ __device__ static constexpr bool has_table() {
        return false;
    }
};

/// Common base of formats with one factor for all values of a block.
template <class E>
struct OneFactor {
    using Element = E;
    static constexpr bool kLine = false, kTensor = false, kTiles = false, kSquares = false, kLimits = false;
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

/// Encodes sixteen values; the rounding mode is known only at run time.
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

/// A format of the OCP MX family: blocks of 32 with a power-of-two scale.
template <class E>
struct MxFormat : OneFactor<E> {
    static constexpr int kBlock = 32, kPart = 32, kScaleBytes = 1;
    // Under some rules the largest values exceed the largest code; only conversions to FP8 saturate by themselves.
    static constexpr bool kLimits = E::kBits < 8 || E::kTwosComplement;

    __device__ __forceinline__ static float limit(const Scaled& scale) { return __fmul_rn(e8m0_decode(scale.record), E::kMax); }
    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg rule, TensorInverse) { return power_of<E>(amax, rule); }
    __device__ __forceinline__ static float multiplier(u32 record, int) { return e8m0_decode(record); }
};

}  // namespace nib
