// NVFP4: E2M1 in blocks of 16 with an E4M3 scale. There may also be an F32 scale per tensor, or
// a power-of-two scale per 128 values. The CPU implementation is crates/formats/src/nvfp4.rs.
#pragma once
#include "formats/block_format.cuh"
#include "formats/pair_code.cuh"

namespace nib {

/// Common base of NVFP4 with and without a scale per tensor.
struct Nvfp4Codes : OneFactor<SixteenE2m1> {
    static constexpr int kBlock = 16, kPart = 16, kScaleBytes = 1;
    static constexpr bool kTiles = true, kCandidates = true;
    static constexpr u32 kNan = 0x7F;

    /// Returns the value of a block's scale byte, which may be NaN.
    __device__ __forceinline__ static float multiplier(u32 record, int) {
        return (record & 0x7F) == kNan ? __uint_as_float(kNanBits) : E4m3::decode(record);
    }

    /// Returns the rounding error of sixteen values under a scale. The unit of the error depends only on `six`, so that
    /// both candidate scales have the same unit. Rounding errors are integers, so their sum does not depend on the order.
    __device__ __forceinline__ static u32 lost(const float (&x)[16], const Scaled& scale, const Scaled& six, TensorInverse tensor, bool squared) {
        const float of_code = E4m3::decode(scale.record);
        const u32 exponent = __float_as_uint(fmaxf(E4m3::decode(six.record), 0x1p-9f)) >> 23;
        const float unit = __uint_as_float((254 - exponent) << 23);
        u32 sum = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float code = nearest_code(__fmul_rn(fabsf(x[i]), scale.inverse));
            const float rest = __fmul_rn(__fsub_rn(fabsf(__fmul_rn(x[i], tensor.inverse)), __fmul_rn(code, of_code)), unit);
            const float share = __fmul_rn(squared ? __fmul_rn(rest, rest) : fabsf(rest), 0x1p20f);
            sum += __float2uint_rz(fminf(share, 0x1.fffffep23f));
        }
        return sum;
    }

    /// Returns the E2M1 value nearest to a magnitude, with ties to the even
    /// code. The last mantissa bit of `far` is worth the step between codes.
    __device__ __forceinline__ static float nearest_code(float x) {
        const float far = x < 2.0f ? 0x1p22f : x < 4.0f ? 0x1p23f : 0x1p24f;
        return __fsub_rn(__fadd_rn(fminf(x, 6.0f), far), far);
    }

    /// Because a scale byte is rounded, a quotient may
    /// exceed the largest code, so kWithin is never true.
    template <int kRound, bool kWithin, int kFactors, class Decide>
    __device__ __forceinline__ static bool encode(const float (&x)[16], const float (&factor)[kFactors], u32 (&words)[2], const Decide& decision) {
        return OneFactor<SixteenE2m1>::encode<kRound, false>(x, factor, words, decision);
    }
};

/// NVFP4 with an F32 scale per tensor.
struct Nvfp4 : Nvfp4Codes {
    static constexpr bool kTensor = true, kCorrection = true;
    // Multiplier of the largest magnitude: the product is 6, or slightly more.
    static constexpr float kSixth = 1.0f / 6.0f, kClippedSixth = 0.93f * 17.0f / 16.0f / 6.0f;

    template <bool kFour = false>
    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg, TensorInverse tensor, float sixth = kSixth) {
        if (amax >= kInfinityBits) return Scaled::nan(kNan);
        const float wanted = __fmul_rn(__uint_as_float(amax), __fmul_rn(tensor.inverse, kFour ? 0.25f : sixth));
        const u32 byte = ptx::e4m3x2_from_f32(wanted, 0.0f) & 0xFF;
        if (byte == kNan) return Scaled::nan(byte);
        // If the scale is zero, all non-zero values get the largest code, which decodes to zero.
        const float value = __fmul_rn(E4m3::decode(byte), tensor.unit);
        if (value >= 0x1p-126f && value <= 0x1p125f) return {byte, reciprocal(value)};
        return {byte, fminf(__frcp_rn(value), 0x1.fffffep127f)};
    }

    /// Returns the scale times Σ v² / Σ v · code(v), which compensates rounding errors. The
    /// result is rounded up if and only if the sixteen random bits `r` are below its fraction.
    __device__ __forceinline__ static u32 corrected(const float (&x)[16], const Scaled& scale, u32 r) {
        if (scale.record == 0) return 0;
        float square[16], product[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float v = fabsf(__fmul_rn(x[i], scale.inverse));
            square[i] = __fmul_rn(v, v);
            product[i] = __fmul_rn(v, nearest_code(v));
        }
#pragma unroll
        for (int half = 8; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; ++i) {
                square[i] = __fadd_rn(square[i], square[i + half]);
                product[i] = __fadd_rn(product[i], product[i + half]);
            }
        }
        const float factor = product[0] > 0.0f ? __fdiv_rn(square[0], product[0]) : 1.0f;
        const float wanted = fminf(__fmul_rn(E4m3::decode(scale.record), factor), E4m3::kMax);
        // The complement of `r` carries into the code if and only if `r` is less than
        // the fraction. Stochastic in formats/rounding.cuh uses the same method.
        return (__float_as_uint(__fmul_rz(wanted, E4m3::kToCode)) + ((~r & 0xFFFF) << (7 - E4m3::kMantissaBits))) >> (23 - E4m3::kMantissaBits);
    }
};

/// NVFP4 without a scale per tensor.
struct Nvfp4Block : Nvfp4Codes {
    /// Returns amax / 6, correctly rounded. The product with the F32 number nearest to 1/6 is the rounded
    /// quotient or an adjacent number, and the exact remainder decides between them (Markstein, 1990). If
    /// a magnitude is so small that the remainder is rounded, the scale byte is zero in both cases.
    __device__ __forceinline__ static float sixth(float amax) {
        constexpr float kSixth = 1.0f / 6.0f;
        const float near = __fmul_rn(amax, kSixth);
        return __fmaf_rn(__fmaf_rn(-6.0f, near, amax), kSixth, near);
    }

    template <bool kFour = false>
    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg, TensorInverse) {
        const float wanted = kFour ? __fmul_rn(__uint_as_float(amax), 0.25f) : sixth(__uint_as_float(amax));
        const u32 byte = ptx::e4m3x2_from_f32(wanted, 0.0f) & 0xFF;
        const float value = E4m3::decode(byte), approx = ptx::reciprocal_approx(value);
        // One Newton step gives the correctly rounded reciprocal, since the value has only four significant bits.
        const float inverse = byte == 0 ? 0x1.fffffep127f : __fmaf_rn(__fmaf_rn(-value, approx, 1.0f), approx, approx);
        return {amax >= kInfinityBits ? kNan : byte, amax >= kInfinityBits ? __uint_as_float(kNanBits) : inverse};
    }

    template <int kRound>
    __host__ __device__ static constexpr bool has_table() {
        return kRound == kNearestEven;
    }

    /// Returns the scale bytes of two blocks, from BF16 magnitudes in the halves of a word; infinity gives the
    /// largest scale. Multiplying by 1/6 gives the same bytes as dividing by 6, because a sixth of a BF16 number
    /// is either a tie between two scales or far from a tie, and a product that should be a tie is exact.
    __device__ __forceinline__ static u32 bytes_of(u32 amax) {
        constexpr float kSixth = 1.0f / 6.0f;
        return ptx::e4m3x2_from_f32(__fmul_rn(__uint_as_float(amax << 16), kSixth), __fmul_rn(__uint_as_float(amax & 0xFFFF0000), kSixth));
    }

    /// The parameters that convert BF16 magnitudes under a scale byte to the
    /// codes of x · inverse. In the specification, x · inverse is an F32 product.
    ///
    /// F16 has too few bits for x / scale, but enough to tell on which side of a threshold between codes the quotient
    /// lies. Thresholds and scales have mantissas of three bits. So a BF16 number x and a threshold times the scale are
    /// either equal or differ by at least 2^-8 of their size, and F16 keeps such a difference. Where x and a threshold
    /// times the scale are equal, x · inverse in F32 is exactly the threshold, with one exception: under a scale of
    /// 15/8 times a power of two, x · inverse is the next number above each of the thresholds 0.75, 1.25 and so on, but
    /// not above 0.25. F16 arithmetic gives the same results if the factor is larger by 2^-11 under the scale 15/8, and
    /// under 11/8 too. The threshold 0.25 is a subnormal F16 number in this method.
    ///
    /// Under a scale of zero the inverse is the largest F32 number, slightly less than 2^128, and all normal numbers
    /// get the largest code. A subnormal number with the BF16 bits b becomes slightly less than b / 32 after the
    /// multiplication, so ties go down.
    __device__ __forceinline__ static PairCode pair_code(u32 byte) {
        if (byte == 0) return {0x47FF, 192};
        const float value = E4m3::decode(byte), mantissa = __uint_as_float((__float_as_uint(value) & 0x7FFFFF) | 0x3F800000);
        const u32 factor = ptx::f16x2_from_f32(__frcp_rn(mantissa), 0.0f) + (mantissa == 1.375f || mantissa == 1.875f) - 7 * 1024;
        const u32 exponent = __float_as_uint(value) >> 23;
        return {factor | (9 - exponent) * 128 << 16, ptx::f16x2_from_f32(__fmul_rn(mantissa, 0x6p-6f), 0.0f) >> 3};
    }
};

/// NVFP4 in blocks of 128 values that share a power of two. Every 16 values have an E4M3 scale relative to the power of
/// two.
struct Nvfp4In128 : Nvfp4Codes {
    static constexpr int kBlock = 128, kScaleBytes = 8, kPartBits = 7;
    static constexpr bool kTiles = false, kCandidates = false;

    /// Returns the smallest power of two that is at least amax / (6
    /// · 448). The carry into the exponent rounds the result up.
    __device__ __forceinline__ static Scaled scale(u32 amax, ScaleArg, TensorInverse) {
        constexpr u32 kUp = 0x007FFFFF - 0x00280000;  // 6 · 448 is 1.3125 · 2^11
        if (amax >= kInfinityBits) return Scaled::nan(kScaleNan);
        const u32 byte = amax == 0 ? 0 : max(int((amax + kUp) >> 23) - 11, 1);
        return {byte, __uint_as_float((254 - byte) << 23)};
    }

    /// Returns the scale of part `part`, at the part's bit position in a record.
    __device__ __forceinline__ static u64 refine(float inverse, const u32 (&amax)[1], int part, float (&factor)[1]) {
        // `inverse` and `unit` are powers of two. For a block of zeros the result
        // is not used. For a block with a NaN, the record has no further bits.
        const float unit = __uint_as_float(0x7F000000 - __float_as_uint(inverse));
        const Scaled scale = Nvfp4::scale(amax[0], {}, {inverse, unit});
        factor[0] = scale.inverse;
        return __float_as_uint(inverse) == kNanBits ? 0 : u64(scale.record) << (8 + kPartBits * part);
    }

    __device__ __forceinline__ static float multiplier(u64 record, int part) {
        const u32 power = u32(record) & 0xFF, of_part = u32(record >> (8 + kPartBits * part)) & 0x7F;
        if (power == kScaleNan) return __uint_as_float(kNanBits);
        return __fmul_rn(e8m0_decode(power), Nvfp4Codes::multiplier(of_part, 0));
    }
};

NIB_UNIT_FORMAT(Nvfp4, Amax, Nvfp4Block, NearestEven, Stochastic)
NIB_UNIT_FORMAT(Nvfp4, AnyOther, Nvfp4, NearestEven, Stochastic)
NIB_UNIT_FORMAT(Nvfp4In128, AnyOther, Nvfp4In128, NearestEven, Stochastic)

}  // namespace nib
