// The interface of a format for quantize_units and dequantize_units: a struct with these members.
//   Element: the element type of the format (small_elements.cuh).
//   kBlock: the number of values per scale record: 16, 32, 64 or 128.
//   kPart: the number of successive values of a block whose largest magnitude is measured and that share a factor: a part of the block.
//     Parts smaller than their block have fewer than 16 values (in blocks of 64) or 16 values (in blocks of 128).
//   kScaleBytes: the number of bytes of a scale record, 0, 1, 4 or 8. Records of 4 bytes exist only in blocks of 64 or 128. 4-byte records are F32
//     unless blocks have parts. The record of padding has the least scale.
//   kPartBits: the number of bits per part in the record, only for parts of 16. The bits of the first part follow the lowest byte.
//   kLine: true if a whole row or column has one scale record, instead of one record per block.
//   kTensor: true if all blocks of a tensor share a second scale.
//   kTiles: true if 2-D blocks (kBlock x kBlock) are supported.
//   kSquares: true if the rows (or columns) of a 2-D block share scales but have separate records; this holds only for Squared<..>.
//   refine_in_square: does the work of `refine` from the largest magnitudes of the square sub-blocks that share a scale (only for parts).
//   scale: maps the bits of a block's largest magnitude to the block's scale record and the factor for its values.
//   refine: computes the record's bits for some parts (doublings, or scales), and the factors of these parts; only if blocks have parts.
//   multiplier: returns the factor by which the codes of a part are multiplied when they are decoded.
//   kLimits: true if BF16 values are clamped before they are encoded, two at a time.
//   limit: returns the bound of this clamp under a scale, which is the element's largest value times the scale; the bound is a BF16 number.
//   encode: converts sixteen values to packed codes, and returns whether any code is not zero. kWithin: the values are BF16 numbers, and
//     they have been clamped if the format has kLimits and the rounding is to nearest.
//   has_pairs: returns whether two rows or columns of BF16 values are encoded together under a rounding mode; Hif4 is an example.
//   has_table: returns whether BF16 values are encoded two at a time with a table entry per scale byte; Nvfp4Block is an example. Such a
//     format has the functions `bytes_of` and `pair_code`, which table_encoder.cuh calls.
//   kChosen: true if ScalingArg chooses the scales, which holds only for Chosen<..>. Only Chosen<..> uses the members below.
//   kThresholds: true if `refine` also takes the thresholds above which a part doubles its scale.
//   kCorrection: true if records of blocks of 16 may be `corrected` after rounding (Nvfp4); `scale` takes the largest value's multiplier.
//   kCandidates: true if blocks of 16 choose between two scales. Then scale<true> maps the largest magnitude to 4, not 6, and `lost`
//     compares the two scales; Nvfp4Codes is an example.
// If a block has a NaN or an infinity, its codes are zeros, and its record has a NaN
// inverse. crates/formats/src/block.rs is the CPU implementation of this interface.
//
// The source line NIB_UNIT_FORMAT(format, scale rule, struct, roundings..) declares the struct of a format. This crate's build script reads
// these lines, and generates the launch table (src/ops/convert/units.rs) and formats/all.cuh. To the compiler, the macro expands to nothing.
//   format: the format's name in crates/formats/src/format.rs.
//   scale rule: the rule of crates/formats/src/e8m0.rs for this struct. AnyOther stands for all rules that no earlier line names for the format.
//   struct: a struct in the namespace nib, or an alias of such a struct.
//   roundings: those rounding modes (NearestEven, NearestAway, Stochastic) that have their own instances of quantize_units. All other modes
//     share the instance kAnyRounding. A format whose common cases have faster kernels needs few such instances, or none.
//     If scales may be chosen (ScalingArg), two more instances, of Chosen<struct>, handle every rounding mode.
#pragma once
#include "formats/small_elements.cuh"

#define NIB_UNIT_FORMAT(...)

namespace nib {

/// A rule for power-of-two scales; the launch code builds this struct as `ScaleArg`. `up` is added to the
/// bits of the largest magnitude, and the carry into the exponent rounds the scale by the rule. For subnormal
/// magnitudes, `up_least` is added instead of `up`. If the bits are `nan_from` or more, the scale is NaN.
struct ScaleArg {
    u32 up;
    u32 up_least;
    u32 nan_from;
};

/// The scale of a tensor: the factor for its values, and the factor's reciprocal. With delayed scales, which follow from
/// earlier steps, `unit` is the expected magnitude instead of the reciprocal (`tensor_scales` in whole_scales.cuh).
struct TensorInverse {
    float inverse;
    float unit;
};

/// The scale record of a block, and the factor for the block's values. The scales of parts of the block are not included.
struct Scaled {
    u32 record;
    float inverse;

    __device__ __forceinline__ bool is_nan() const { return __float_as_uint(inverse) == kNanBits; }
    __device__ __forceinline__ static Scaled nan(u32 record) { return {record, __uint_as_float(kNanBits)}; }
};

/// True if parts of a block have their own scales, relative to the block's scale.
template <class F>
constexpr bool kHasParts = F::kPart < F::kBlock;

/// True if the scale of a part is a number for sixteen values, not a power-of-two step.
/// Like a block's scale, the scale of a part leaves headroom above the largest code.
template <class F>
constexpr bool kPartsHaveScales = kHasParts<F> && F::kPart == 16;

/// The integer type that holds a record of kBytes bytes.
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

/// Computes a power-of-two scale for values of element type E.
template <class E>
__device__ __forceinline__ Scaled power_of(u32 amax, ScaleArg rule) {
    if (amax >= rule.nan_from) return Scaled::nan(kScaleNan);
    // `up_least` is needed only if the largest element is below two. For other
    // elements, a subnormal magnitude never needs more than the least scale.
    const u32 up = E::kEmax == 0 && amax < 0x00800000 ? rule.up_least : rule.up;
    const u32 byte = min(max(int((amax + up) >> 23) - E::kEmax, 0), 254);
    return {byte, __uint_as_float(byte == 254 ? 0x00400000 : (254 - byte) << 23)};
}

/// Options that change how scales are chosen within a scale rule; the launch code builds this struct as `ScalingArg`.
struct ScalingArg {
    float headroom;
    float high, low;  // thresholds; above them, the scale of a part is doubled
    u32 divides;      // whether values are multiplied by the F32 reciprocal of their scale
    u32 corrects;     // whether a block's scale is corrected for rounding losses, and rounded stochastically
    u32 candidates;   // 0: the scale maps the largest magnitude to 6; 1 or 2: to 6 or to 4, whichever has less squared (1) or absolute (2) error

    /// Returns the bits of a magnitude after multiplication by the headroom factor.
    __device__ __forceinline__ u32 over(u32 amax) const {
        return amax >= kInfinityBits ? amax : __float_as_uint(fminf(__fmul_rn(__uint_as_float(amax), headroom), 0x1.fffffep127f));
    }
};

/// Wraps a format whose rounding mode is known only at run time.
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

/// Wraps a format whose scales are chosen by ScalingArg.
template <class F>
struct Chosen : RoundedByArg<F> {
    static constexpr bool kChosen = true;
};

/// Wraps a format for weights in 2-D blocks whose rows store separate scale records (crates/formats/src/square.rs).
template <class F>
struct Squared : RoundedByArg<F> {
    static constexpr bool kSquares = true;
};

/// Common base of formats in which all values of a block have one factor.
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

    /// `decision(i)` says how value i is rounded, if the rounding mode is known only at run
    /// time. For kStochastic, `decision` is passed to `stochastic_codes` as `rounded_up`.
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

/// Encodes sixteen values with a rounding mode that is known only at run time.
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

/// A format of the OCP MX family, with blocks of 32 values and a power-of-two scale.
template <class E>
struct MxFormat : OneFactor<E> {
    static constexpr int kBlock = 32, kPart = 32, kScaleBytes = 1;
    // Under some scale rules the largest values exceed the largest
    // code. In hardware, only the conversions to FP8 saturate.
    static constexpr bool kLimits = E::kBits < 8 || E::kTwosComplement;

    __device__ __forceinline__ static float limit(const Scaled& scale) { return __fmul_rn(e8m0_decode(scale.record), E::kMax); }
    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg rule, TensorInverse) { return power_of<E>(amax, rule); }
    __device__ __forceinline__ static float multiplier(u32 record, int) { return e8m0_decode(record); }
};

}  // namespace nib
