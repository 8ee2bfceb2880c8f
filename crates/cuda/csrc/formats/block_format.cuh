// The interface of a format for quantize_units and dequantize_units: a struct with
//   Element      its element type (small_elements.cuh)
//   kBlock       values per scale record: 16, 32, 64 or 128
//   kPart        values per part of a block: the largest magnitude of each part is measured, and each part has its own factor.
//                Parts smaller than their block have fewer than 16 values (in blocks of 64) or 16 values (in blocks of 128)
//   kScaleBytes  bytes of a record: 0, 1, 4 or 8. Records of 4 bytes exist only in blocks of 64 or 128; they are F32 unless blocks
//                have parts, and padding has the least scale
//   kPartBits    only with parts of 16: bits per part in the record; the first part's bits follow the lowest byte
//   kLine        whether a whole row or column has one record instead of one record per block
//   kTensor      whether all blocks of a tensor share a second scale
//   kTiles       whether 2-D blocks (kBlock x kBlock) are supported
//   kSquares     whether the rows (or columns) of a 2-D block share scales, but have separate records: true only in Squared<..>
//   refine_in_square  only if blocks have parts: `refine` from the largest magnitudes of the square sub-blocks that share a scale
//   scale        maps the bits of a block's largest magnitude to its record and the factor for its values
//   refine       only if blocks have parts: the record's bits for some parts (doublings, or scales), and the factors for these parts
//   multiplier   the factor for the codes of a part when they are decoded
//   kLimits      whether BF16 values are clamped before they are encoded, two at a time
//   limit        the bound of the kLimits clamp under a scale: the element's largest value times the scale; a BF16 number
//   encode       sixteen values to packed codes; returns whether any code is not zero. kWithin: the values are BF16 numbers, and
//                clamped if the format has kLimits and the rounding is to nearest
//   has_pairs    whether two rows or columns of BF16 values are encoded together under a rounding mode, as in Hif4
//   has_table    whether BF16 values are encoded two at a time, with a table entry per scale byte, as in Nvfp4Block,
//                with the `bytes_of` and `pair_code` that table_encoder.cuh calls
//   kChosen      whether scales are chosen by ScalingArg: true only in Chosen<..>. Only Chosen<..> uses the members below
//   kThresholds  whether `refine` also takes the thresholds from which a part doubles its scale
//   kCorrection  whether records of blocks of 16 may be `corrected` after rounding (Nvfp4); `scale` takes the largest value's multiplier
//   kCandidates  whether blocks of 16 choose between two scales: scale<true> maps the largest magnitude to 4, not 6, and `lost` compares them,
//                as in Nvfp4Codes
// A block with a NaN or an infinity has zero codes and a record whose inverse is NaN. This interface is the twin of
// crates/formats/src/block.rs.
//
// A source line NIB_UNIT_FORMAT(format, scale rule, struct, roundings..) declares the struct for a format. This crate's build script reads
// these lines, and generates the launch table (src/ops/convert/units.rs) and formats/all.cuh. For the compiler the macro is empty.
//   format       the format's name in crates/formats/src/format.rs
//   scale rule   the rule of crates/formats/src/e8m0.rs for this struct; AnyOther: all rules that no earlier line names for the format
//   struct       a struct in the namespace nib, or an alias of one
//   roundings    NearestEven, NearestAway, Stochastic: the rounding modes with their own instances of quantize_units. All other modes share one,
//                kAnyRounding. A format whose common cases have faster kernels needs few such instances, or none.
//                Where scales may be chosen (ScalingArg), two more instances, of Chosen<struct>, handle every rounding mode.
#pragma once
#include "formats/small_elements.cuh"

#define NIB_UNIT_FORMAT(...)

namespace nib {

/// A rule for power-of-two scales; the launch code builds it as `ScaleArg`. `up` is added to the bits of the largest
/// magnitude, and the carry into the exponent rounds the scale according to the rule. For subnormal magnitudes,
/// `up_least` is added instead of `up`. If the bits are `nan_from` or more, the scale is NaN.
struct ScaleArg {
    u32 up;
    u32 up_least;
    u32 nan_from;
};

/// A tensor's scale: the factor for its values, and its reciprocal. With delayed scales (computed in earlier steps),
/// `unit` is the expected magnitude instead (`tensor_scales` in whole_scales.cuh).
struct TensorInverse {
    float inverse;
    float unit;
};

/// A block's scale record, and the factor for the block's values. Scales of parts are not included.
struct Scaled {
    u32 record;
    float inverse;

    __device__ __forceinline__ bool is_nan() const { return __float_as_uint(inverse) == kNanBits; }
    __device__ __forceinline__ static Scaled nan(u32 record) { return {record, __uint_as_float(kNanBits)}; }
};

/// Whether parts of a block have their own scales, relative to the block's scale.
template <class F>
constexpr bool kHasParts = F::kPart < F::kBlock;

/// Whether the scales of parts are numbers for sixteen values each, not power-of-two steps. Like a block's scale, these scales leave
/// headroom above the largest code.
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

/// A power-of-two scale for values of element type E.
template <class E>
__device__ __forceinline__ Scaled power_of(u32 amax, ScaleArg rule) {
    if (amax >= rule.nan_from) return Scaled::nan(kScaleNan);
    // `up_least` is needed only if the largest element is below two. For other elements, a
    // subnormal magnitude never exceeds the least scale.
    const u32 up = E::kEmax == 0 && amax < 0x00800000 ? rule.up_least : rule.up;
    const u32 byte = min(max(int((amax + up) >> 23) - E::kEmax, 0), 254);
    return {byte, __uint_as_float(byte == 254 ? 0x00400000 : (254 - byte) << 23)};
}

/// Non-default choices of scales within a scale rule; the launch code builds it as `ScalingArg`.
struct ScalingArg {
    float headroom;
    float high, low;  // thresholds above which a part's scale rises by a factor of two
    u32 divides;      // whether values are multiplied by the F32 reciprocal of their scale
    u32 corrects;     // whether a block's scale is corrected for rounding losses, and rounded stochastically
    u32 candidates;   // 0: the scale maps the largest magnitude to 6; 1 or 2: to 6 or to 4, whichever has less squared (1) or absolute (2) error

    /// The bits of a magnitude multiplied by the headroom factor.
    __device__ __forceinline__ u32 over(u32 amax) const {
        return amax >= kInfinityBits ? amax : __float_as_uint(fminf(__fmul_rn(__uint_as_float(amax), headroom), 0x1.fffffep127f));
    }
};

/// A format whose rounding mode is known only at run time.
template <class F>
struct RoundedByArg : F {
    template <int kRound>
    __host__ __device__ static constexpr bool has_pairs() {
        return false;
    }
    template <int kRound>
    __host__ __device__ static constexpr bool has_table() {
        return false;
    }
};

/// A format whose scales are chosen by ScalingArg.
template <class F>
struct Chosen : RoundedByArg<F> {
    static constexpr bool kChosen = true;
};

/// A format in 2-D blocks of weights whose rows store separate scale records (crates/formats/src/square.rs).
template <class F>
struct Squared : RoundedByArg<F> {
    static constexpr bool kSquares = true;
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

    /// `decision(i)` says how value i is rounded, if the rounding mode is known only at run time. For
    /// kStochastic, `decision` is the argument `rounded_up` of `stochastic_codes`.
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
    // Under some scale rules the largest values exceed the largest code; only conversions to FP8 saturate in
    // hardware.
    static constexpr bool kLimits = E::kBits < 8 || E::kTwosComplement;

    __device__ __forceinline__ static float limit(const Scaled& scale) { return __fmul_rn(e8m0_decode(scale.record), E::kMax); }
    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg rule, TensorInverse) { return power_of<E>(amax, rule); }
    __device__ __forceinline__ static float multiplier(u32 record, int) { return e8m0_decode(record); }
};

}  // namespace nib
