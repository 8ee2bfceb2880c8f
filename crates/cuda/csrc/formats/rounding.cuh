// Rounding modes: each struct says how a value between two codes is rounded. The structs give the same
// bits as `Rounding` and `Element::encode_rounded` in crates/formats. A kernel takes the rounding mode as
// a template argument (`RoundingArg::policy` in src/launch/args.rs names it) and a `RoundingArg` by value:
//
//   template <class In, class E, int kRule, bool kAligned, class Round> __global__ void kernel(..., RoundingArg rounding) {
//       const Round round(rounding);
//       const u64 e = u64(row_id) * cols + col;                              // index of the first of eight columns
//       const auto bits = round.template bits<kAligned>(e, i);               // bits of the eight columns that are 8·i further; i is best a constant
//       auto codes = round.template encode<E, kRule, In>(x, inverse, bits);  // x is an In::Eight
//       if (scale.is_nan()) codes = E::zeros();                              // the same is needed after E::encode
//
// * e = row_id · cols + col whether blocks lie along rows or down columns. So a thread generates random bits once for eight adjacent
//   columns of a row, for row blocks and column blocks. `inverse` is one float (blocks along the row, or a 2-D block), or an array of
//   eight floats, one per column.
//   For blocks down the columns too, the thread encodes row after row, so that only one row's random bits are live, and then
//   transposes the codes (`turn_8x8`). Where both row blocks and column blocks are written, they share the random bits.
// * bits<kAligned>: cols is a multiple of 8. NearestEven and NearestAway need no random bits; `Bits` is then empty.
// * Whether a block has a non-zero code: `Round::reaches<E>(largest |x| · inverse)` if Round::kDraws is false. If
//   Round::kDraws is true, the codes must be tested: E::any(codes) over the threads of the block.
// * x · inverse is the F32 product of the specification. Under a NaN scale the codes are undefined.
//
// A product is scaled by a power of two so that the smallest normal numbers of the element and of F32 coincide, and then rounded
// towards zero. Then the product's upper bits are the code, and the lower bits are the fraction of a step, for subnormal codes too.
// One integer addition rounds the product: it adds the complement of the random bits, or half a step.
#pragma once
#include "formats/bf16.cuh"
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "math/philox.cuh"
#include "ptx/packed.cuh"

namespace nib {

/// The parameters of a rounding mode; the launch code builds them as `RoundingArg`
/// (src/launch/args.rs).
struct RoundingArg {
    Stream stream;
    u32 delta_q16;       // the half width of dither, times 2^16
    const u32* step_at;  // the step that selects the random bits; null: the stream's own step
    u64 first;           // index of the first element; a multiple of the row length

    /// The step that selects the random bits. A kernel reads the step once, at its start.
    __device__ __forceinline__ u32 step() const { return step_at == nullptr ? stream.step : __ldg(step_at); }
};

/// Returns x · inverse, saturated if the scale rule allows products above the
/// largest element. F32 scales allow such products too, because they are rounded.
template <class E, int kRule>
__device__ __forceinline__ float scaled(float x, float inverse) {
    const float y = __fmul_rn(x, inverse);
    if constexpr (kRule == kRuleRceil || kRule == kRuleCeil) return y;
    return ptx::clamp_magnitude(y, E::kMax);
}

/// The bits of a scaled value: the code has the bits from 23 - kMantissaBits
/// up, the fraction has the bits below, and bit 31 is the sign.
template <class E>
__device__ __forceinline__ u32 code_and_fraction(float y) {
    return __float_as_uint(__fmul_rz(y, E::kToCode));
}

/// If `wanted` is true, which is rare, multiplies the values of a block by `factor`,
/// a power of two, and saturates the products. Zeros that result keep their sign.
template <class E, int kCount>
__device__ __forceinline__ void clamp_block(F32::Eight (&x)[kCount], float factor, bool wanted) {
    if (!wanted) return;
#pragma unroll
    for (int i = 0; i < kCount * 8; ++i)
        x[i / 8].number[i % 8] = ptx::clamp_magnitude(__fmul_rn(x[i / 8].number[i % 8], factor), E::kMax);
}
template <class E, int kCount>
__device__ __forceinline__ void clamp_block(Bf16::Eight (&x)[kCount], float factor, bool wanted) {
    if (!wanted) return;
    const u32 factors = __byte_perm(__float_as_uint(factor), 0, 0x3232), limits = __byte_perm(__float_as_uint(E::kMax), 0, 0x3232);
#pragma unroll
    for (int i = 0; i < kCount * 4; ++i)
        x[i / 4].word[i % 4] = ptx::clamp_magnitude_bf16x2(ptx::fma_bf16x2(x[i / 4].word[i % 4], factors, 0x80008000), limits);
}

struct NearestEven {
    static constexpr bool kDraws = false;
    struct Bits {};

    __device__ __forceinline__ explicit NearestEven(const RoundingArg&) {}

    template <bool kAligned>
    __device__ __forceinline__ Bits bits(u64, u32 = 0) const {
        return {};
    }

    template <class E, int kRule, class In, class Inverse>
    __device__ __forceinline__ typename E::Eight encode(const typename In::Eight& x, const Inverse& inverse, Bits) const {
        return E::template encode<rule_exceeds(kRule)>(x, inverse);
    }

    /// Does the work of `encode` in two steps. Stochastic has the same two functions.
    struct Draws {
        __device__ __forceinline__ Bits bits(u32) const { return {}; }
    };
    __device__ __forceinline__ Draws draws(u64) const { return {}; }
    template <class E, class Eight, int kCount>
    __device__ __forceinline__ static float prepare(Eight (&x)[kCount], float largest, float factor) {
        const bool saturates = __fmul_rn(largest, factor) > E::kMax;
        clamp_block<E>(x, factor, saturates);
        return saturates ? 1.0f : factor;
    }
    template <class E, class In>
    __device__ __forceinline__ typename E::Eight encode_prepared(const typename In::Eight& x, float factor, Bits) const {
        return E::template encode<false>(x, factor);
    }

    /// Returns whether a value of this magnitude gets a non-zero code.
    template <class E>
    __device__ __forceinline__ static bool reaches(float magnitude) {
        return magnitude > E::kLargestToZero;
    }
};

/// Rounds to the nearest code, with ties away from zero.
struct NearestAway {
    static constexpr bool kDraws = false;
    struct Bits {};

    __device__ __forceinline__ explicit NearestAway(const RoundingArg&) {}

    template <bool kAligned>
    __device__ __forceinline__ Bits bits(u64, u32 = 0) const {
        return {};
    }

    template <class E, int kRule, class In, class Inverse>
    __device__ __forceinline__ typename E::Eight encode(const typename In::Eight& x, const Inverse& inverse, Bits) const {
        u32 of[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float y = scaled<E, kRule>(In::value(x, i), inverse_of(inverse, i));
            of[i] = code_and_fraction<E>(y) + (1u << (22 - E::kMantissaBits));
        }
        return E::pack(of);
    }

    template <class E>
    __device__ __forceinline__ static bool reaches(float magnitude) {
        return magnitude >= E::kLargestToZero;
    }
};

/// Stochastic rounding: a magnitude is rounded up if and only if its sixteen
/// random bits are less than the first sixteen bits of the fraction.
struct Stochastic {
    static constexpr bool kDraws = true;
    using Bits = RandomBits;
    const Stream stream;
    const u64 first;

    __device__ __forceinline__ explicit Stochastic(const RoundingArg& arg) : Stochastic(arg, arg.step()) {}
    __device__ __forceinline__ Stochastic(const RoundingArg& arg, u32 step) : stream(arg.stream.at(step)), first(arg.first) {}

    template <bool kAligned>
    __device__ __forceinline__ Bits bits(u64 e, u32 eights = 0) const {
        return stream.bits<kAligned>(first + e, eights);
    }

    template <class E, int kRule, class In, class Inverse>
    __device__ __forceinline__ typename E::Eight encode(const typename In::Eight& x, const Inverse& inverse, const Bits& bits) const {
        constexpr int kBelow = 7 - E::kMantissaBits;  // number of fraction bits that do not decide the rounding
        u32 of[8];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            // The sum of the fraction and 2^16 - 1 - r carries into the code if and only if r < fraction.
            const u32 even = ~bits.word[i / 2] & 0xFFFF, odd = ~bits.word[i / 2] & 0xFFFF0000;
            const u32 low = code_and_fraction<E>(scaled<E, kRule>(In::value(x, i), inverse_of(inverse, i)));
            const u32 high = code_and_fraction<E>(scaled<E, kRule>(In::value(x, i + 1), inverse_of(inverse, i + 1)));
            of[i] = ptx::mul_add(even, 1u << kBelow, low);
            of[i + 1] = high + (odd >> (16 - kBelow));
        }
        return E::pack(of);
    }

    /// Does the work of `encode` in two steps, for power-of-two scales. `prepare` takes a whole block, whose
    /// largest magnitude is `largest`. It may change the values, and returns the factor for the second step.
    /// `encode_prepared` gets its random bits from `draws(e)`; these bits are already complemented (see Stream).
    __device__ __forceinline__ Stream::Complements draws(u64 e) const { return stream.complements(first + e); }
    template <class E, class Eight, int kCount>
    __device__ __forceinline__ static float prepare(Eight (&x)[kCount], float largest, float factor) {
        // A factor below 2^-23 could underflow when it is multiplied by
        // kToCode, so the values of such a block are scaled beforehand.
        const bool apart = __fmul_rn(largest, factor) > E::kMax || factor < 0x1p-23f;
        clamp_block<E>(x, factor, apart);
        return apart ? E::kToCode : __fmul_rn(factor, E::kToCode);
    }
    template <class E, class In>
    __device__ __forceinline__ typename E::Eight encode_prepared(const typename In::Eight& x, float factor, const Bits& bits) const {
        constexpr u32 kOne = 1u << (7 - E::kMantissaBits);  // the lowest of the sixteen bits that decide the rounding
        u32 of[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 code = __float_as_uint(__fmul_rz(In::value(x, i), factor));
            of[i] = ptx::halves_mul_add(bits.word[i / 2], i % 2 ? kOne << 8 : kOne, code);
        }
        return E::pack(of);
    }
};

/// Rounds x + d to nearest even, where d is uniform in (-delta, delta) code steps.
///
/// A magnitude is rounded up if and only if fraction + d exceeds one half. The fraction's upper bits
/// decide the rounding unless they equal the upper bits of 1/2 - d, which happens about once in a million
/// values. Then all eight values are encoded again with 32 bits of the fraction and a sticky bit.
struct Dither {
    static constexpr bool kDraws = true;
    using Bits = RandomBits;
    const Stream stream;
    const u64 first;
    const u32 delta_q16;

    __device__ __forceinline__ explicit Dither(const RoundingArg& arg) : Dither(arg, arg.step()) {}
    __device__ __forceinline__ Dither(const RoundingArg& arg, u32 step) : stream(arg.stream.at(step)), first(arg.first), delta_q16(arg.delta_q16) {}

    template <bool kAligned>
    __device__ __forceinline__ Bits bits(u64 e, u32 eights = 0) const {
        return stream.bits<kAligned>(first + e, eights);
    }

    template <class E, int kRule, class In, class Inverse>
    __device__ __forceinline__ typename E::Eight encode(const typename In::Eight& x, const Inverse& inverse, const Bits& bits) const {
        constexpr int kFractionBits = 23 - E::kMantissaBits;
        constexpr u32 kFraction = (1u << kFractionBits) - 1;
        u32 of[8], undecided = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float y = scaled<E, kRule>(In::value(x, i), inverse_of(inverse, i));
            // The sum carries into the code if and only if the fraction is
            // larger. If the fraction is equal, all bits below the code are ones.
            of[i] = code_and_fraction<E>(y) + (kFraction - (half_less_d(bits.of(i)) >> (32 - kFractionBits)));
            undecided = max(undecided, of[i] | ~kFraction);
        }
        if (undecided == 0xFFFFFFFF) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float y = scaled<E, kRule>(In::value(x, i), inverse_of(inverse, i));
                of[i] = (__float_as_uint(y) & 0x80000000) | exact_code<E>(fabsf(y), half_less_d(bits.of(i))) << kFractionBits;
            }
        }
        return E::pack(of);
    }

private:
    /// Returns 1/2 - d in units of 2^-32; the result is between 2^15 and 2^32 - 2^15.
    __device__ __forceinline__ u32 half_less_d(u32 r) const { return 0x80000000u + 65535u * delta_q16 - 2 * delta_q16 * r; }

    /// Returns the code of a magnitude that is at most the largest element. The magnitude
    /// is rounded up if its fraction exceeds `half_less_d`; ties go to the even code.
    template <class E>
    __device__ __noinline__ static u32 exact_code(float magnitude, u32 half_less_d) {
        constexpr u32 kMinExponent = 128 - E::kBias;  // exponent of the smallest normal element
        const u32 bits = __float_as_uint(magnitude);
        const u32 exponent = max(bits >> 23, 1u);
        const u32 significand = bits - (exponent << 23) + (1u << 23);
        const u32 base = exponent > kMinExponent ? exponent - kMinExponent : 0;
        const u32 below = exponent < kMinExponent ? kMinExponent - exponent : 0;
        const u32 shift = min(23 - E::kMantissaBits + below, 60u);
        const u64 wide = u64(significand) << 32, steps = wide >> shift;
        const bool sticky = steps << shift != wide;
        const u32 floor_code = (base << E::kMantissaBits) + u32(steps >> 32), fraction = u32(steps);
        const bool up = fraction > half_less_d || (fraction == half_less_d && (sticky || (floor_code & 1)));
        return floor_code + up;
    }
};

}  // namespace nib
